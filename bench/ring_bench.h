// RingBench: one attention layer through the executor, over ranks that are threads of this process, or processes of a job.
//
// In:   a topology, a ring, a layout, sizes, a case. Out: a row: times, bytes by channel, imbalance; rows of phases.
// Next: cli/bench_ring.cc prints them.
//
// Threads: all code paths of a job run, with copies in memory instead of a network. Where ranks share cores, or a GPU, their times include
// each other's: bytes and pairs are what a job would have, times by phase say where this process spent them. In a job rank 0 has the rows.
#pragma once

#include <vector>

#include "bench/attention_case.h"
#include "bench/ring_ranks.h"
#include "bench/rows.h"
#include "mtraining/attention/ring_attention.h"

namespace mtraining::bench {

struct RingBenchOptions {
  AttentionSizes sizes;
  RingPlace place = {};
  attention::RingOptions
      ring;  ///< layout.seq_len, cp_size and nodes are filled from sizes and topology
  /// Chosen by the ranks together from the inputs where `given` is null.
  double p = 0.9;
  const AttentionCase* given = nullptr;
  int warm_up = 1, repeats = 3;
  bool breakdown = false;
  /// As a layer's forward runs: the index is chosen in it, while the first transfers are under way. Without `given`.
  bool whole_layer = false;
  bool timeline = false;  ///< a row with rank 0's stretches of the last repeat
  uint64_t seed = 1;
};
/// The layer's row; with `timeline` that row; with `breakdown` a row a phase after it, times a repeat: the busiest rank, the mean rank.
/// Empty on ranks of a job that do not print. Errors: InvalidArgument, Unsupported before any rank starts.
std::vector<std::string> bench_ring(const RingBenchOptions& options, const Provenance& from);

}  // namespace mtraining::bench
