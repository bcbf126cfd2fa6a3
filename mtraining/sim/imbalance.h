// Imbalance: how unevenly an index spreads over ranks and ring steps.
//
// In:   an index::Index, a Layout, a ring (ScheduleOptions), how columns are attended to.
// Out:  pairs by rank and step; worker degree, step degree, and what the slowest ranks cost in
//       lockstep.
// Next: cli/ prints tables; event_simulation.h turns pairs into time; train/ logs the same degrees.
//
// Source: paper section 4.3 (imbalance degree = max / mean of attention time, here of pairs);
// docs/math/ring.md.
#pragma once

#include <cstdint>
#include <vector>

#include "mtraining/index/index.h"
#include "mtraining/layout/layout.h"
#include "mtraining/ring/schedule.h"

namespace mtraining::sim {

/// kOnce: a rank attends to the columns of all shards once; counted as a launch of its own, though a launch of the ring takes them
/// along.
/// kPerStep: with the blocks of their shard. kNone: columns are left out.
enum class ColumnCost { kOnce, kPerStep, kNone };

/// Pairs of all heads and samples, [cp_size, cp_size] by (cp_rank, source_rank).
struct PairTable {
  int cp_size = 1;
  std::vector<int64_t> blocks;   ///< 64x64 blocks, whole
  std::vector<int64_t> columns;  ///< column pairs outside chosen diagonals

  int64_t block_pairs(int cp_rank, int source_rank) const {
    return blocks[static_cast<int64_t>(cp_rank) * cp_size + source_rank];
  }
  int64_t column_pairs(int cp_rank, int source_rank) const {
    return columns[static_cast<int64_t>(cp_rank) * cp_size + source_rank];
  }
};
/// Errors: Unsupported for a sparse index on `striped`.
PairTable count_pairs(const index::Index& index, const layout::Layout& layout);

/// What each launch of each rank computes.
struct StepLoads {
  std::vector<int> outer_step;                ///< [launches] of the ring
  std::vector<std::vector<int64_t>> by_step;  ///< [cp_size][launches] pairs
  std::vector<int64_t> columns_once;  ///< [cp_size] pairs of the column launch; 0 unless kOnce
};
StepLoads step_loads(const PairTable& pairs, const ring::ScheduleOptions& ring, ColumnCost columns);

struct Imbalance {
  double worker = 1;      ///< largest rank total / mean rank total, column launch included
  double step = 1;        ///< largest launch / mean launch of a rank, mean over ranks
  double step_worst = 1;  ///< the same, of the worst rank
  /// Time in lockstep / mean rank total, 1 at best. A flat ring: sum over launches of the slowest
  /// rank. A hierarchical one: the ranks of a node wait for each other at every launch, the nodes
  /// at every outer step. The column launch, where there is one, counts as one launch more.
  double lockstep = 1;
  int64_t total_pairs = 0;
};
Imbalance measure(const StepLoads& loads, const ring::ScheduleOptions& ring);

}  // namespace mtraining::sim
