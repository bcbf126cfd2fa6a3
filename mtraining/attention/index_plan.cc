#include "mtraining/attention/index_plan.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <span>

#include "mtraining/attention/tensors.h"
#ifdef MT_WITH_CUDA
#include "mtraining/kernels/lists_cuda/transpose.h"
#endif

namespace mtraining::attention {
namespace {

/// FNV-1a over 32-bit words.
class Digest {
 public:
  void add(uint64_t word) {
    for (int half = 0; half < 2; ++half)
      value_ = (value_ ^ ((word >> (32 * half)) & 0xffffffffu)) * 0x100000001b3u;
    value_ ^= value_ >> 29;
  }
  void add(const index::Lists& lists) {
    add(static_cast<uint64_t>(lists.rows));
    for (int64_t r = 0; r < lists.rows; ++r) {
      const std::span<const int32_t> row = lists.row(r);
      add(row.size());
      for (int32_t v : row) add(static_cast<uint64_t>(v));
    }
  }
  uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 0xcbf29ce484222325u;
};

int64_t bytes_of(const index::StepColumns& columns) {
  return static_cast<int64_t>(
      (columns.rows.size() + columns.positions.size() + columns.counts.size()) * 4);
}

}  // namespace

IndexPlan::IndexPlan(std::shared_ptr<const index::Index> index, const layout::Layout& layout,
                     int cp_rank)
    : index_(std::move(index)),
      sizes_{index_->batch, index_->num_q_heads, index_->seq_len},
      layout_(layout),
      cp_rank_(cp_rank) {
  const auto ranks = static_cast<size_t>(layout.cp_size());
  blocks_.resize(ranks);
  blocks_by_key_.resize(ranks);
  step_columns_.resize(ranks);
  look_at(*index_);
}

IndexPlan::IndexPlan(std::shared_ptr<DeviceLists> made, const layout::Layout& layout, int cp_rank)
    : made_(std::move(made)), sizes_(made_->sizes()), layout_(layout), cp_rank_(cp_rank) {
  const auto ranks = static_cast<size_t>(layout.cp_size());
  blocks_.resize(ranks);
  blocks_by_key_.resize(ranks);
  step_columns_.resize(ranks);
}

void IndexPlan::look_at(const index::Index& index) {
  for (int64_t r = 0; r < index.columns.rows && !has_columns_; ++r)
    has_columns_ = index.columns.counts[r] > 0;
  const std::vector<uint8_t>& dense = index.dense_heads;
  is_dense_ = !index.has_blocks() && std::ssize(dense) == index.diagonals.rows &&
              std::find(dense.begin(), dense.end(), 0) == dense.end();
}

const index::Index& IndexPlan::index() {
  if (index_ == nullptr) {
    index_ = made_->host_index();
    has_columns_ = made_->has_columns();
  }
  return *index_;
}

std::shared_ptr<const index::Index> IndexPlan::release_index() {
  index();
  std::shared_ptr<const index::Index> owned = std::move(index_);
  index_ = {std::shared_ptr<const index::Index>(), owned.get()};
  return owned;
}

bool IndexPlan::has_columns() { return made_ ? made_->has_columns() : has_columns_; }

uint64_t IndexPlan::digest() {
  if (is_awaited()) return kAwaitedDigest;
  if (!digest_) {
    Digest digest;
    digest.add(static_cast<uint64_t>(index_->batch));
    digest.add(static_cast<uint64_t>(index_->num_q_heads));
    digest.add(static_cast<uint64_t>(index_->seq_len));
    digest.add(index_->diagonals);
    digest.add(index_->columns);
    for (const int64_t at : index_->blocks.row_begin) digest.add(static_cast<uint64_t>(at));
    for (const int32_t block : index_->blocks.key_blocks) digest.add(static_cast<uint64_t>(block));
    digest_ = digest.value();
  }
  return *digest_;
}

const index::StepBlocks& IndexPlan::blocks(int source_rank) {
  auto& made = blocks_[source_rank];
  if (!made)
    made = std::make_unique<index::StepBlocks>(
        index::step_blocks(index(), layout_, cp_rank_, source_rank));
  return *made;
}

kernels::BlockLists IndexPlan::block_lists(int source_rank, at::Device device, bool by_key_too) {
  if (made_ && !device.is_cpu()) {
    if (auto lists = made_->block_lists(source_rank)) {
      if (by_key_too && lists->kind == kernels::BlockListKind::kCsr)
        made_->add_lists_by_key(source_rank, *lists);
      return *lists;
    }
  }
  const index::StepBlocks& made = blocks(source_rank);
  kernels::BlockLists lists = made.view();
  lists.entries = uploads_.get(made.entries, device);
  lists.num_entries = uploads_.get(made.num_entries, device);
  lists.row_begin = uploads_.get(made.row_begin, device);
  lists.key_blocks = uploads_.get(made.key_blocks, device);
#ifdef MT_WITH_CUDA
  if (by_key_too && lists.kind == kernels::BlockListKind::kCsr) {
    BlocksByKey& by_key = blocks_by_key_[source_rank];
    if (!by_key.row_begin.defined()) {
      const at::TensorOptions options = at::TensorOptions().device(device);
      kernels::lists_cuda::TransposeParams params;
      params.rows = static_cast<int64_t>(made.row_begin.size()) / (made.num_q_blocks + 1);
      params.num_q_blocks = made.num_q_blocks;
      params.num_k_blocks = layout_.blocks_per_rank();
      params.row_begin = lists.row_begin;
      params.key_blocks = lists.key_blocks;
      by_key.row_begin =
          at::empty({params.rows, params.num_k_blocks + 1}, options.dtype(at::kLong));
      by_key.query_blocks =
          at::empty({static_cast<int64_t>(made.key_blocks.size())}, options.dtype(at::kInt));
      const at::Tensor workspace = at::empty(
          {kernels::lists_cuda::transpose_workspace_bytes(params)}, options.dtype(at::kByte));
      params.key_row_begin = by_key.row_begin.data_ptr<int64_t>();
      params.query_blocks = by_key.query_blocks.data_ptr<int32_t>();
      params.workspace = workspace.data_ptr();
      params.stream = current_stream(device);
      kernels::lists_cuda::transpose_lists(params);
    }
    lists.key_row_begin = by_key.row_begin.data_ptr<int64_t>();
    lists.query_blocks = by_key.query_blocks.data_ptr<int32_t>();
  }
#else
  static_cast<void>(by_key_too);
#endif
  return lists;
}

kernels::ColumnLists IndexPlan::column_lists(int source_rank, at::Device device) {
  if (made_ && !device.is_cpu()) {
    if (const auto lists = made_->column_lists(source_rank)) return *lists;
  }
  const index::StepColumns& made = step_columns(source_rank);
  kernels::ColumnLists lists = made.view();
  lists.key_rows = uploads_.get(made.rows, device);
  lists.positions = uploads_.get(made.positions, device);
  lists.counts = uploads_.get(made.counts, device);
  return lists;
}

kernels::ColumnLists IndexPlan::slice_lists(const index::ColumnSlice& slice, at::Device device) {
  kernels::ColumnLists lists = slice.view();
  lists.key_rows = slice_uploads_.get(slice.gathered_rows, device);
  lists.positions = slice_uploads_.get(slice.positions, device);
  lists.counts = slice_uploads_.get(slice.counts, device);
  return lists;
}

const uint64_t* IndexPlan::bitmap_words(at::Device device) {
  if (made_ && !device.is_cpu()) return made_->bitmap_words();
  return uploads_.get(bitmap().bits, device);
}

int64_t IndexPlan::bitmap_words_a_row() {
  return made_ ? made_->bitmap_words_a_row() : bitmap().words;
}

const index::StepColumns& IndexPlan::step_columns(int source_rank) {
  auto& made = step_columns_[source_rank];
  if (!made)
    made = std::make_unique<index::StepColumns>(index::step_columns(index(), layout_, source_rank));
  return *made;
}

const index::DiagonalBitmap& IndexPlan::bitmap() {
  if (!bitmap_) bitmap_ = index::diagonal_bitmap(index());
  return *bitmap_;
}

const index::ColumnPlan& IndexPlan::column_plan(int num_kv_heads, int64_t max_rows_per_rank) {
  if (!column_plan_ || plan_kv_heads_ != num_kv_heads || plan_max_rows_ != max_rows_per_rank) {
    slice_uploads_.clear();  // of slices that go now
    column_plan_ = index::plan_columns(index(), layout_, num_kv_heads, max_rows_per_rank);
    plan_kv_heads_ = num_kv_heads;
    plan_max_rows_ = max_rows_per_rank;
  }
  return *column_plan_;
}

bool IndexPlan::union_too_large(int num_kv_heads) {
  if (!union_too_large_ || union_kv_heads_ != num_kv_heads) {
    // A union is no larger than its lists together, and those of a GPU's choice need not be here to be counted.
    const bool surely_small =
        made_ && made_->total_columns() * 2 <= sizes_.seq_len * num_kv_heads * sizes_.batch;
    union_too_large_ = !surely_small && index::union_too_large(index(), num_kv_heads);
    union_kv_heads_ = num_kv_heads;
  }
  return *union_too_large_;
}

int64_t IndexPlan::block_pairs(int source_rank) {
  if (block_pairs_.empty())
    block_pairs_ = index::rank_step_pairs(index(), layout_, cp_rank_, false);
  return block_pairs_[source_rank];
}

int64_t IndexPlan::column_pairs(int source_rank) {
  if (!has_columns()) return 0;
  if (column_pairs_.empty()) {
    column_pairs_ = index::rank_step_pairs(index(), layout_, cp_rank_, true);
    for (int r = 0; r < layout_.cp_size(); ++r) column_pairs_[r] -= block_pairs(r);
  }
  return column_pairs_[source_rank];
}

int64_t IndexPlan::bytes() const {
  int64_t bytes = uploads_.bytes() + slice_uploads_.bytes() + (made_ ? made_->bytes() : 0);
  for (const BlocksByKey& by_key : blocks_by_key_) {
    if (by_key.row_begin.defined())
      bytes += static_cast<int64_t>(by_key.row_begin.nbytes() + by_key.query_blocks.nbytes());
  }
  for (const auto& blocks : blocks_) bytes += blocks ? blocks->bytes() : 0;
  for (const auto& columns : step_columns_) bytes += columns ? bytes_of(*columns) : 0;
  if (bitmap_) bytes += static_cast<int64_t>(bitmap_->bits.size() * 8);
  if (column_plan_) {
    for (const index::ColumnSlice& slice : column_plan_->slices) {
      bytes += static_cast<int64_t>(
          (slice.gathered_rows.size() + slice.positions.size() + slice.counts.size()) * 4);
      for (const auto& rows : slice.rows)
        bytes += static_cast<int64_t>(rows.size() * sizeof(index::PackedRow));
    }
  }
  return bytes;
}

std::shared_ptr<IndexPlan> IndexPlanCache::find_or_make(
    const std::shared_ptr<const index::Index>& index, const layout::Layout& layout, int cp_rank) {
  std::erase_if(kept_, [](const Kept& kept) { return kept.index.expired(); });
  for (const Kept& kept : kept_) {
    if (kept.index.lock() == index) return kept.plan;
  }
  // The plan must not own the index, or no index of this cache would ever go away.
  std::shared_ptr<const index::Index> unowned(std::shared_ptr<const index::Index>(), index.get());
  keep(index, std::make_shared<IndexPlan>(unowned, layout, cp_rank));
  return kept_.back().plan;
}

void IndexPlanCache::keep(const std::shared_ptr<const index::Index>& index,
                          std::shared_ptr<IndexPlan> plan) {
  constexpr int64_t kMaxBytes = int64_t{256} << 20;
  std::erase_if(kept_, [](const Kept& kept) { return kept.index.expired(); });
  int64_t bytes = 0;
  for (const Kept& kept : kept_) bytes += kept.plan->bytes();
  while (!kept_.empty() && bytes > kMaxBytes) {
    bytes -= kept_.front().plan->bytes();
    kept_.erase(kept_.begin());
  }
  kept_.push_back({index, std::move(plan)});
}

}  // namespace mtraining::attention
