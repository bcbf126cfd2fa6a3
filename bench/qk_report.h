// QkReport: what a pattern chooses from given q and k, and what the choice is worth.
//
// In:   a safetensors file with q [H, S, D] and k [Hk, S, D] (after RoPE, in the order of positions), pattern options.
// Out:  a row a head, pooling and p: columns, diagonals, density, recall on the window and on rows elsewhere, imbalance by layout.
// Next: cli/bench_attention.cc prints them.
//
// Runs over loopback ranks: the choice is the same for every number of them, and the rows too.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "bench/attention_case.h"
#include "bench/rows.h"
#include "mtraining/layout/layout.h"
#include "mtraining/pattern/pattern.h"
#include "mtraining/topology/topology.h"

namespace mtraining::bench {

struct QueryKeys {
  AttentionSizes sizes;
  AlignedBytes q;  ///< [H, S, D]
  AlignedBytes k;  ///< [Hk, S, D]
};
/// Errors: those of SafetensorsFile; InvalidArgument naming file and tensor: q or k missing, not of three dimensions, dtypes that
/// differ or that attention has not, shapes that do not fit each other.
QueryKeys read_query_keys(const std::filesystem::path& path);

struct QkReportOptions {
  std::vector<double> p = {0.9, 0.95};
  std::vector<pattern::SlashPooling> poolings = {pattern::SlashPooling::kBlock,
                                                 pattern::SlashPooling::kToken};
  /// All but p and pooling.
  pattern::VerticalSlashOptions pattern;
  int ranks = 1;  ///< loopback ranks that estimate together
  layout::LayoutKind layout = layout::LayoutKind::kBlockStriped;
  int64_t stripe = 64;
  topology::Topology balance = {4, 8};  ///< whose imbalance is told, flat ring, columns once
  uint64_t recall_seed = 1;
};
/// Errors: InvalidArgument on every option before anything runs.
std::vector<Json> qk_report(const QueryKeys& given, const QkReportOptions& options);

}  // namespace mtraining::bench
