// StepPairs: how many (query, key) pairs each rank computes against each source rank, in closed
// form.
//
// In:   Index, Layout, one head row.
// Out:  pairs per (cp_rank, source_rank), as computed_pairs (index.h) counts them.
// Next: sim/ makes imbalance tables of it; attention/ stamps a launch with its pairs.
//
// What runs is counted whole. On layouts with blocks a step's blocks are the 64x64 blocks of chosen
// diagonals whose query block begins before seq_len, and a column counts 64 pairs per such query
// block that is not before the column's block and not on a chosen diagonal with it. So the sum over
// all (cp_rank, source_rank) is computed_pairs exactly, for every seq_len. On `striped` (dense
// only) the units are 64 x 64 local tokens, each counted whole if any pair of it is causal: each
// unit of a rank straddles the causal edge with every source, W of them instead of one, and the sum
// is larger than computed_pairs; that is what runs there.
#pragma once

#include <cstdint>
#include <vector>

#include "mtraining/index/index.h"
#include "mtraining/layout/layout.h"

namespace mtraining::index {

/// Pairs that (cp_rank, source_rank) computes for head row r (Index::row): blocks, and with
/// `with_columns` the columns that live in the source's shard. Cost: O(diagonals + columns).
/// Errors: as step_blocks.
int64_t step_pairs(const Index& index, const layout::Layout& layout, int cp_rank, int source_rank,
                   int64_t row, bool with_columns);

/// step_pairs of cp_rank against every source, summed over all head rows, [cp_size]: one pass for
/// all launches of a layer. Cost: O(diagonals + columns) a head.
std::vector<int64_t> rank_step_pairs(const Index& index, const layout::Layout& layout, int cp_rank,
                                     bool with_columns);

/// step_pairs of every (cp_rank, source_rank), [cp_size * cp_size], cp_rank-major. Cost: O(W
/// (diagonals + blocks that hold a column) + columns), so a head of 512K tokens over 128 ranks
/// takes a few milliseconds.
std::vector<int64_t> step_pair_table(const Index& index, const layout::Layout& layout, int64_t row,
                                     bool with_columns);

}  // namespace mtraining::index
