#include "mtraining/attention/block_lists.h"

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <string>
#include <utility>

#include "mtraining/attention/tensors.h"
#include "mtraining/base/check.h"
#include "mtraining/kernels/lists_cuda/expand.h"
#include "mtraining/kernels/lists_cuda/transpose.h"

namespace mtraining::attention {
namespace {

/// Room for the lists of a source that is taken without asking how much is needed.
constexpr int64_t kMostRoomBytes = int64_t{256} << 20;

at::Tensor copied_later(const at::Tensor& device) {
  return device.to(at::kCPU, /*non_blocking=*/true);  // pinned
}

class ChosenBlockLists : public DeviceLists {
 public:
  ChosenBlockLists(RingContext::State& state, BlockChoice choice)
      : state_(state),
        choice_(std::move(choice)),
        device_(choice_.bits.device()),
        event_(device_.type(), c10::EventFlag::PYTORCH_DEFAULT) {
    for (int source = 0; source < state_.layout.cp_size(); ++source)
      bound_ = std::max(bound_, most_entries(source));
    if (rows() * bound_ * int64_t{sizeof(int32_t)} > kMostRoomBytes) {
      longest_ = at::zeros({1}, choice_.bits.options());
      for (int source = 0; source < state_.layout.cp_size(); ++source)
        kernels::lists_cuda::longest_row(chosen(source), begins(source).data_ptr<int64_t>(),
                                         longest_.data_ptr<int32_t>(), current_stream(device_));
      host_longest_ = copied_later(longest_);
    }
    for (const BlockChoice::Refusal& refusal : choice_.refusals)
      host_places_.push_back(copied_later(refusal.place));
    host_bits_ = copied_later(choice_.bits);
    event_.record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  }

  const ListSizes& sizes() const override { return choice_.sizes; }
  bool has_columns() override { return false; }
  int64_t total_columns() override { return 0; }

  std::optional<kernels::BlockLists> block_lists(int source_rank) override {
    at::Tensor row_begin = begins(source_rank);
    at::Tensor key_blocks =
        state_.buffers.get("key blocks of source " + std::to_string(source_rank),
                           {rows(), capacity()}, at::kInt, device_);
    kernels::lists_cuda::ExpandParams params;
    params.chosen = chosen(source_rank);
    params.capacity = capacity();
    params.row_begin = row_begin.data_ptr<int64_t>();
    params.key_blocks = key_blocks.data_ptr<int32_t>();
    params.stream = current_stream(device_);
    kernels::lists_cuda::expand_lists(params);
    kernels::BlockLists lists;
    lists.kind = kernels::BlockListKind::kCsr;
    lists.row_begin = params.row_begin;
    lists.key_blocks = params.key_blocks;
    return lists;
  }
  void add_lists_by_key(int source_rank, kernels::BlockLists& lists) override {
    kernels::lists_cuda::TransposeParams params;
    params.rows = rows();
    params.num_q_blocks = params.num_k_blocks = state_.layout.blocks_per_rank();
    params.row_begin = lists.row_begin;
    params.key_blocks = lists.key_blocks;
    const std::string source = std::to_string(source_rank);
    at::Tensor begin = state_.buffers.get("begins by key of source " + source,
                                          {rows(), params.num_k_blocks + 1}, at::kLong, device_);
    at::Tensor query_blocks = state_.buffers.get("query blocks of source " + source,
                                                 {rows(), capacity()}, at::kInt, device_);
    at::Tensor workspace = state_.buffers.get(
        "transpose of block lists", {kernels::lists_cuda::transpose_workspace_bytes(params)},
        at::kByte, device_);
    params.key_row_begin = begin.data_ptr<int64_t>();
    params.query_blocks = query_blocks.data_ptr<int32_t>();
    params.workspace = workspace.data_ptr();
    params.stream = current_stream(device_);
    kernels::lists_cuda::transpose_lists(params);
    lists.key_row_begin = params.key_row_begin;
    lists.query_blocks = params.query_blocks;
  }
  std::optional<kernels::ColumnLists> column_lists(int /*source_rank*/) override {
    return std::nullopt;
  }
  const uint64_t* bitmap_words() override { return nullptr; }
  int64_t bitmap_words_a_row() const override { return 0; }

  std::shared_ptr<const index::Index> host_index() override {
    event_.synchronize();
    check_places();
    return std::make_shared<const index::Index>(index_of(choice_, host_bits_));
  }
  void check_values() const override {
    if (event_.query()) check_places();
  }
  int64_t bytes() const override { return static_cast<int64_t>(choice_.bits.nbytes()); }

 private:
  int64_t rows() const { return choice_.bits.size(0); }

  /// Entries that a row's list of a source can have.
  int64_t most_entries(int source) const {
    const std::vector<int32_t>& keys = state_.block_starts[source];
    const int64_t end = choice_.sizes.seq_len;
    int64_t entries = 0;
    size_t before = 0;  // key blocks of real tokens up to the query block
    for (const int32_t start : state_.block_starts[state_.cp_rank]) {
      if (start >= end) break;
      while (before < keys.size() && keys[before] <= start) ++before;
      entries += std::min<int64_t>(static_cast<int64_t>(before), choice_.most_key_blocks);
    }
    return entries;
  }
  int64_t capacity() {
    if (longest_.defined() && !capacity_) {
      event_.synchronize();
      capacity_ = std::max<int64_t>(1, host_longest_.item<int32_t>());
    }
    return capacity_.value_or(std::max<int64_t>(1, bound_));
  }
  at::Tensor begins(int source) {
    return state_.buffers.get("begins of source " + std::to_string(source),
                              {rows(), state_.layout.blocks_per_rank() + 1}, at::kLong, device_);
  }
  kernels::lists_cuda::ChosenBlocks chosen(int source) {
    kernels::lists_cuda::ChosenBlocks chosen;
    chosen.rows = rows();
    chosen.num_blocks = (choice_.sizes.seq_len + layout::kBlock - 1) / layout::kBlock;
    chosen.bits = reinterpret_cast<const uint32_t*>(choice_.bits.const_data_ptr<int32_t>());
    chosen.words = choice_.bits.size(2);
    chosen.query_blocks_per_unit = choice_.query_blocks_per_unit;
    chosen.key_blocks_per_unit = choice_.key_blocks_per_unit;
    chosen.q_block_starts = state_.uploads.get(state_.block_starts[state_.cp_rank], device_);
    chosen.k_block_starts = state_.uploads.get(state_.block_starts[source], device_);
    chosen.num_q_blocks = chosen.num_k_blocks = state_.layout.blocks_per_rank();
    return chosen;
  }
  void check_places() const {
    for (size_t i = 0; i < host_places_.size(); ++i)
      choice_.refusals[i].check(host_places_[i].item<int64_t>());
  }

  RingContext::State& state_;
  BlockChoice choice_;
  at::Device device_;
  int64_t bound_ = 0;
  std::optional<int64_t> capacity_;
  at::Tensor longest_, host_longest_, host_bits_;
  std::vector<at::Tensor> host_places_;
  c10::Event event_;
};

}  // namespace

std::shared_ptr<DeviceLists> block_lists_on_device(RingContext::State& state, BlockChoice choice) {
  return std::make_shared<ChosenBlockLists>(state, std::move(choice));
}

}  // namespace mtraining::attention
