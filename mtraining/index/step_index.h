// StepIndex: the part of the global index that one rank needs to attend to one source rank's shard.
//
// In:   Index, Layout, (cp_rank, source_rank).
// Out:  block_striped and contiguous: per head one short list of entries (lambda, delta), the same for every query block;
//       zigzag (and any layout with blocks): CSR lists of key blocks per query block; dense on `striped`: CSR too.
// Next: kernels/ (BlockLists of a KeySource); sim/ counts pairs from it.
//
// Source: algorithm.md section 3. Query block (sl, a) = local block sl * m + a meets key block (sl - lambda, a - delta)
// where sl - lambda >= 0 and 0 <= a - delta < m. Never O(NB^2) for entries; CSR is O(blocks computed).
#pragma once

#include <cstdint>
#include <vector>

#include "mtraining/index/index.h"
#include "mtraining/kernels/params.h"
#include "mtraining/layout/layout.h"

namespace mtraining::index {

/// Owns the host memory that a kernels::BlockLists points to. Movable; `view()` is valid while it lives.
struct StepBlocks {
  kernels::BlockListKind kind = kernels::BlockListKind::kEntries;
  int64_t blocks_per_stripe = 1;
  int64_t capacity = 0;
  std::vector<kernels::Entry> entries;  ///< [batch*heads, capacity], ascending by (lambda * m + delta)
  std::vector<int32_t> num_entries;     ///< [batch*heads]
  std::vector<int64_t> row_begin;       ///< CSR: [batch*heads, num_q_blocks + 1] (absolute into key_blocks)
  std::vector<int32_t> key_blocks;      ///< CSR: local key blocks of the source shard, ascending per query block
  int64_t num_q_blocks = 0;

  kernels::BlockLists view() const;
};

/// Entries where the layout has (stripe, residue) form, else CSR. Errors: Unsupported for a sparse index on `striped`.
StepBlocks step_blocks(const Index& index, const layout::Layout& layout, int cp_rank, int source_rank);
/// The same mask as CSR on any layout with blocks; also `striped` where the index is dense.
StepBlocks step_blocks_csr(const Index& index, const layout::Layout& layout, int cp_rank, int source_rank);
/// Key-stationary form of the same pairs: per key block the list of query blocks. Twice is the identity.
StepBlocks transpose(const StepBlocks& blocks, int64_t num_k_blocks);

/// columns = "per_step": the columns that live in one source shard, as rows (offsets) of that shard.
struct StepColumns {
  int64_t capacity = 0;
  std::vector<int32_t> rows;       ///< [batch*heads, capacity] offset in the source shard
  std::vector<int32_t> positions;  ///< [batch*heads, capacity] ascending
  std::vector<int32_t> counts;     ///< [batch*heads]
  kernels::ColumnLists view() const;
};
StepColumns step_columns(const Index& index, const layout::Layout& layout, int source_rank);

/// Pairs that (cp_rank, source_rank) computes for head row r: 64x64 blocks whole, and columns of the source with
/// `with_columns` (64 pairs per query block and column whose block is not past the query's and not on a chosen diagonal).
int64_t step_pairs(const Index& index, const layout::Layout& layout, int cp_rank, int source_rank, int64_t row,
                   bool with_columns);

}  // namespace mtraining::index
