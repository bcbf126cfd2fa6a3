// StepIndex: the part of the global index that one rank needs to attend to one source rank's shard.
//
// In:   Index, Layout, (cp_rank, source_rank).
// Out:  block_striped and contiguous: per head one short list of entries (lambda, delta), the same
//       for every query block; zigzag (and any layout with blocks): CSR lists of key blocks per
//       query block; dense on `striped`: CSR too.
// Next: kernels/ (BlockLists of a KeySource). How many pairs a step computes: step_pairs.h.
//
// Source: docs/math/index.md. Query block (sl, a) = local block sl * m + a meets key block
// (sl - lambda, a - delta) where sl - lambda >= 0 and 0 <= a - delta < m. Never O(NB^2) for
// entries; CSR is O(blocks computed).
#pragma once

#include <cstdint>
#include <vector>

#include "mtraining/index/index.h"
#include "mtraining/index/step_pairs.h"
#include "mtraining/kernels/params.h"
#include "mtraining/layout/layout.h"

namespace mtraining::index {

/// Owns the host memory that a kernels::BlockLists points to. Movable; `view()` is valid while it
/// lives.
///
/// Entries are one list for every query block of a head. (lambda, delta) and (lambda + 1,
/// delta - m) share the local distance lambda * m + delta, and no query block has both: the list
/// ascends by distance, then by lambda, and so the key blocks of a query block descend. The reader
/// cuts it: 0 <= sl - lambda < stripes, 0 <= a - delta < m, and no block for a query block that
/// begins at or beyond seq_len. CSR lists are cut already.
struct StepBlocks {
  kernels::BlockListKind kind = kernels::BlockListKind::kEntries;
  int64_t blocks_per_stripe = 1;
  int64_t capacity = 0;
  std::vector<kernels::Entry>
      entries;  ///< [batch*heads, capacity], ascending by (lambda * m + delta, lambda)
  std::vector<int32_t> num_entries;  ///< [batch*heads]
  std::vector<int64_t>
      row_begin;  ///< CSR: [batch*heads, num_q_blocks + 1] (absolute into key_blocks)
  std::vector<int32_t>
      key_blocks;  ///< CSR: local key blocks of the source shard, ascending per query block
  int64_t num_q_blocks = 0;

  kernels::BlockLists view() const;
  int64_t bytes() const;
};

/// Entries where the layout has (stripe, residue) form and the index diagonals, else CSR.
/// Cost: O(diagonals) a head for entries (a sort where m > 1).
/// Errors: InvalidArgument where index and layout differ in seq_len or a rank is out of range;
/// Unsupported for a sparse index on `striped`.
StepBlocks step_blocks(const Index& index, const layout::Layout& layout, int cp_rank,
                       int source_rank);
/// The same mask as CSR on any layout with blocks; also `striped` where the index is dense: there a
/// unit of 64 local tokens is listed iff some pair of it is causal. Cost: O(blocks listed) a head.
StepBlocks step_blocks_csr(const Index& index, const layout::Layout& layout, int cp_rank,
                           int source_rank);
/// Key-stationary form of the same pairs: per key block the list of query blocks; in entries
/// (lambda, delta) become (-lambda, -delta), read as before with key blocks in the place of query
/// blocks. Twice is the identity. `num_k_blocks`: blocks of the source shard. Query blocks at or
/// beyond seq_len are still the reader's to skip in entries.
StepBlocks transpose(const StepBlocks& blocks, int64_t num_k_blocks);

/// columns = "per_step": the columns that live in one source shard, as rows (offsets) of that
/// shard.
struct StepColumns {
  int64_t capacity = 0;
  std::vector<int32_t> rows;       ///< [batch*heads, capacity] offset in the source shard
  std::vector<int32_t> positions;  ///< [batch*heads, capacity] ascending
  std::vector<int32_t> counts;     ///< [batch*heads]
  kernels::ColumnLists view() const;
};
StepColumns step_columns(const Index& index, const layout::Layout& layout, int source_rank);

}  // namespace mtraining::index
