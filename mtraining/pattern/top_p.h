// Top-p: the fewest entries, in descending order of mass, whose sum reaches p of the total.
//
// In:   int64 masses. Out: chosen entry indices, ascending. Next: vertical_slash.
//
// Ties: lower index first. p >= 1 selects every entry without summing; p <= 0 none. reached: sum >= ceil(p * total), with the
// product in double: one formula on every device. Source: docs/math/pattern.md, step 3.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "mtraining/comm/transport.h"

namespace mtraining::pattern {

/// threshold = ceil(p * total).
int64_t top_p_threshold(int64_t total, double p);

/// On one rank's complete list. `cap` < 0: none; else at most cap entries (the highest).
std::vector<int32_t> top_p(std::span<const int64_t> masses, double p, int64_t cap = -1);

/// Result of the distributed form for one row (head).
struct SelectedKeys {
  std::vector<int32_t> positions;  ///< of all ranks, ascending, the same everywhere
  bool cut = false;                ///< the cap removed entries
};

/// Collective: every rank holds masses [rows, num_local] of keys at `positions` [num_local] (ascending; of real tokens only).
/// Radix search on the unique key (mass, N-1-position): never gathers N masses on one rank. Equal to top_p on the gathered
/// list, bit for bit, whatever the split.
std::vector<SelectedKeys> distributed_top_p(std::span<const int64_t> masses,
                                            std::span<const int32_t> positions, int64_t rows,
                                            int64_t seq_len, double p, int64_t cap,
                                            comm::Communicator& group);

}  // namespace mtraining::pattern
