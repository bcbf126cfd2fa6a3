// AttentionBench: times cases of attention in turn, repeat by repeat, with the peer's among them.
//
// In:   sizes, a place, cases, repeats. Out: a row a case, the peer's row first. Next: cli/bench_attention.cc prints them.
//
// In every repeat each case runs once, one after the other: what else the machine does weighs on all of them, and the ratio of a
// repeat's times is what counts.
#pragma once

#include <functional>
#include <vector>

#include "bench/attention_launch.h"
#include "bench/rows.h"
#include "bench/sdpa_peer.h"

namespace mtraining::bench {

struct AttentionBenchOptions {
  AttentionSizes sizes;
  LaunchPlace place;
  int warm_up = 1, repeats = 5;
  bool peer = true;  ///< cp_size 1 only: a rank's share and the whole are not the same work
  uint64_t seed = 1;
  pattern::VerticalSlashOptions estimation;  ///< what index_ms times
};
/// Errors: InvalidArgument, Unsupported naming the flag.
void check(const AttentionBenchOptions& options);

/// Inputs that lie somewhere, and what runs over them. Device, inputs: what rows say of them.
struct AttentionArms {
  std::string device, inputs;
  std::function<std::unique_ptr<AttentionLaunch>(const index::Index&)> launch;
  std::function<std::unique_ptr<SdpaPeer>()> peer;
};
/// On the CPU; `inputs` must live as long.
AttentionArms cpu_arms(const AttentionBenchOptions& options, const AttentionInputs& inputs);

/// Rows of ours have "ratio_<peer>" keys where the peer ran and the work is the same. `progress` hears each finished repeat.
/// Errors: InvalidArgument, Unsupported before anything runs.
std::vector<AttentionRow> bench_attention(const AttentionBenchOptions& options,
                                          const AttentionArms& arms,
                                          const std::vector<AttentionCase>& cases,
                                          const Provenance& from,
                                          const std::function<void(int repeat)>& progress = {});
/// The same with cpu_arms().
std::vector<AttentionRow> bench_attention(const AttentionBenchOptions& options,
                                          const AttentionInputs& inputs,
                                          const std::vector<AttentionCase>& cases,
                                          const Provenance& from,
                                          const std::function<void(int repeat)>& progress = {});

}  // namespace mtraining::bench
