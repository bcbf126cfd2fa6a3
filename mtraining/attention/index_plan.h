// IndexPlan: the rank-local parts of one index, made when first asked for and kept: nothing is computed twice within a layer.
//
// In:   an index::Index, a Layout, this rank. Out: block lists and columns of each source, the union of columns, the bitmap.
// Next: ring_attention.cc and column_exchange.cc hand them to kernels; forward, recomputation and backward share one plan.
//
// Memory: O(diagonals + columns) where the layout has stripes, O(blocks computed) of CSR on zigzag. One thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "mtraining/attention/device_lists.h"
#include "mtraining/attention/list_uploads.h"
#include "mtraining/attention/ring_attention.h"
#include "mtraining/index/columns.h"
#include "mtraining/index/index.h"
#include "mtraining/index/step_index.h"

namespace mtraining::attention {

class IndexPlan {
 public:
  IndexPlan(std::shared_ptr<const index::Index> index, const layout::Layout& layout, int cp_rank);
  /// Of an index that the ranks' GPUs have chosen together; the host's copy is asked for when something needs it.
  IndexPlan(std::shared_ptr<DeviceLists> made, const layout::Layout& layout, int cp_rank);

  const ListSizes& sizes() const { return sizes_; }
  const index::Index& index();
  /// Made by a GPU, and not here yet.
  bool is_awaited() const { return index_ == nullptr; }
  /// The host's index, handed over: the plan does not keep it alive from here on.
  std::shared_ptr<const index::Index> release_index();
  bool has_columns();
  /// Every head computes every pair. False of an index that is awaited.
  bool is_dense() const { return is_dense_; }
  /// A digest of the index: ranks with different ones must not meet.
  uint64_t digest();
  /// Of an index that is awaited: the ranks' choice is one calculation, whose sums they share.
  static constexpr uint64_t kAwaitedDigest = 1;

  // Lists of a source, of its columns, of a slice of the union, and the bitmap, where kernels on `device` read them.
  /// by_key_too: also the lists by key block, which the backward of a GPU walks; made there.
  kernels::BlockLists block_lists(int source_rank, at::Device device, bool by_key_too);
  kernels::ColumnLists column_lists(int source_rank, at::Device device);
  kernels::ColumnLists slice_lists(const index::ColumnSlice& slice, at::Device device);
  const uint64_t* bitmap_words(at::Device device);
  int64_t bitmap_words_a_row();

  const index::StepBlocks& blocks(int source_rank);
  const index::StepColumns& step_columns(int source_rank);
  /// Of the heads' diagonals; only where there are columns.
  const index::DiagonalBitmap& bitmap();
  const index::ColumnPlan& column_plan(int num_kv_heads, int64_t max_rows_per_rank);
  /// columns = "once" would move more than K and V themselves.
  bool union_too_large(int num_kv_heads);

  /// (query, key) pairs, all heads: of a source's blocks, and of the columns that live in its shard.
  int64_t block_pairs(int source_rank);
  int64_t column_pairs(int source_rank);

  int64_t bytes() const;

 private:
  /// CSR lists by key block, in device memory.
  struct BlocksByKey {
    at::Tensor row_begin, query_blocks;
  };

  void look_at(const index::Index& index);

  std::shared_ptr<const index::Index> index_;
  std::shared_ptr<DeviceLists> made_;  // null: from the host
  ListSizes sizes_;
  const layout::Layout& layout_;
  int cp_rank_;
  bool has_columns_ = false, is_dense_ = false;
  std::optional<uint64_t> digest_;
  std::vector<std::unique_ptr<index::StepBlocks>> blocks_;  // by source rank
  std::vector<BlocksByKey> blocks_by_key_;                  // by source rank
  std::vector<std::unique_ptr<index::StepColumns>> step_columns_;
  std::optional<index::DiagonalBitmap> bitmap_;
  std::optional<index::ColumnPlan> column_plan_;
  int plan_kv_heads_ = 0;
  int64_t plan_max_rows_ = 0;
  std::optional<bool> union_too_large_;
  int union_kv_heads_ = 0;
  std::vector<int64_t> block_pairs_, column_pairs_;  // by source rank; empty: not counted yet
  ListUploads uploads_;
  ListUploads slice_uploads_;  // apart: a launch may hold the others when slices change
};

/// Plans by index object: a layer's forward, recomputation and backward pass the same index and find its plan. Forgets plans
/// whose index is gone, and the oldest beyond a limit of bytes.
class IndexPlanCache {
 public:
  std::shared_ptr<IndexPlan> find_or_make(const std::shared_ptr<const index::Index>& index,
                                          const layout::Layout& layout, int cp_rank);
  void keep(const std::shared_ptr<const index::Index>& index, std::shared_ptr<IndexPlan> plan);

 private:
  struct Kept {
    std::weak_ptr<const index::Index> index;
    std::shared_ptr<IndexPlan> plan;
  };
  std::vector<Kept> kept_;  // oldest first
};

}  // namespace mtraining::attention
