// Column union: columns = "once". Which K/V rows the ranks exchange so that every rank can attend
// to all chosen columns.
//
// In:   Index, Layout, num_kv_heads.
// Out:  per slice: for each rank the packed rows (batch, kv head, offset) that it contributes; for
//       each query head a list of indices into the gathered buffer [W * rows_per_rank, D] with
//       positions. Identical on every rank.
// Next: attention/ packs, all-gathers, launches, and reduces dk, dv back to the owners.
//
// Source: docs/math/index.md, "Columns" (beyond the paper).
#pragma once

#include <cstdint>
#include <vector>

#include "mtraining/index/index.h"
#include "mtraining/kernels/params.h"
#include "mtraining/layout/layout.h"

namespace mtraining::index {

/// One row that a rank packs.
struct PackedRow {
  int32_t batch = 0;
  int32_t kv_head = 0;
  int32_t offset = 0;  ///< in the rank's shard
};

/// Rows of a rank ascend by (position, batch, kv_head). Buffer rows beyond a rank's count are
/// padding that no head names.
struct ColumnSlice {
  int64_t rows_per_rank = 0;                 ///< padded: the largest count over ranks
  std::vector<std::vector<PackedRow>> rows;  ///< [cp_size][<= rows_per_rank]
  int64_t capacity = 0;
  std::vector<int32_t>
      gathered_rows;  ///< [batch*heads, capacity] source_rank * rows_per_rank + packed index
  std::vector<int32_t> positions;  ///< [batch*heads, capacity] ascending
  std::vector<int32_t> counts;     ///< [batch*heads]
  kernels::ColumnLists view() const;
};

struct ColumnPlan {
  std::vector<ColumnSlice> slices;  ///< empty where no head has a column
  int64_t union_rows = 0;           ///< rows over all kv heads and samples
};

/// Slices cover ascending ranges of (position, batch, kv_head), so that a position may be split
/// between two; each has rows_per_rank <= max_rows_per_rank (>= 1). A column is named whether or
/// not a query reaches it outside the chosen diagonals. No rank is given: every rank gets the same
/// plan. Cost: O(columns log heads). Errors: InvalidArgument.
ColumnPlan plan_columns(const Index& index, const layout::Layout& layout, int num_kv_heads,
                        int64_t max_rows_per_rank);
/// True where the union per kv head exceeds half of N on average: then per_step moves less.
bool union_too_large(const Index& index, int num_kv_heads);

}  // namespace mtraining::index
