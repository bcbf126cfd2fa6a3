#include "mtraining/attention/device_index.h"

#include <ATen/ATen.h>
#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <bit>
#include <numeric>
#include <utility>

#include "mtraining/attention/choice_on_device.h"
#include "mtraining/attention/local_attention.h"
#include "mtraining/attention/tensors.h"
#include "mtraining/base/check.h"
#include "mtraining/kernels/window.h"
#include "mtraining/pattern/device_choice.h"
#include "mtraining/pattern/observation.h"

namespace mtraining::attention {
namespace {

/// A rank's shards, and the memory behind them.
struct Shards : DeviceShards {
  Shards(RingContext::State& state, const at::Tensor& given_q, const at::Tensor& given_k,
         double softmax_scale, const at::Tensor& document_starts)
      : q(with_aligned_rows(given_q)), k(with_aligned_rows(given_k)) {
    device = q.device();
    num_keys = k.size(1);
    host = local_attention(state.layout, state.cp_rank, q, k, softmax_scale);
    on_device = host;
    if (document_starts.defined()) {
      host.document_starts = document_starts.const_data_ptr<int32_t>();
      documents = upload(document_starts.const_data_ptr(),
                         static_cast<int64_t>(document_starts.nbytes()), device);
      on_device.document_starts = static_cast<const int32_t*>(documents.const_data_ptr());
    }
    layout.block_starts = state.uploads.get(state.block_starts[state.cp_rank], device);
    if (state.layout.cp_size() > 1) layout.owners = state.uploads.get(state.block_owners, device);
    group = state.device_index_group.get();
    stream = current_stream(device);
  }

  at::Tensor q, k, documents;
};

/// Where the device reports values that no index can be chosen from. Its memory is nobody else's before the kernels that were enqueued
/// on the current stream until it goes are over: a call that fails leaves them behind.
class FaultMemory {
 public:
  explicit FaultMemory(at::Device device)
      : memory_(at::empty({sizeof(kernels::pattern_cuda::FaultReport)},
                          at::TensorOptions().dtype(at::kByte).pinned_memory(true))) {
    *report() = {};
    const bool known =
        at::getHostAllocator(device.type())
            ->record_event(memory_.data_ptr(), memory_.storage().data_ptr().get_context(),
                           c10::impl::VirtualGuardImpl(device.type()).getStream(device));
    MT_ASSERT(known, "pinned memory that its allocator does not know");
  }
  kernels::pattern_cuda::FaultReport* report() const {
    return static_cast<kernels::pattern_cuda::FaultReport*>(memory_.data_ptr());
  }

 private:
  at::Tensor memory_;
};

at::Tensor copied_later(const at::Tensor& device) {
  return device.to(at::kCPU, /*non_blocking=*/true);  // pinned
}

c10::Event recorded_now(at::Device device) {
  c10::Event event(device.type(), c10::EventFlag::PYTORCH_DEFAULT);
  event.record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  return event;
}

template <typename Word>
std::vector<int32_t> set_bits(const Word* words, int64_t num_words, int64_t count) {
  std::vector<int32_t> bits;
  bits.reserve(static_cast<size_t>(count));
  for (int64_t w = 0; w < num_words; ++w) {
    for (Word left = words[w]; left != 0; left &= left - 1) {
      bits.push_back(static_cast<int32_t>(w * static_cast<int64_t>(8 * sizeof(Word)) +
                                          std::countr_zero(left)));
    }
  }
  return bits;
}

/// Room for columns that is taken without asking how many there are: 1 GiB of copies of K and V.
constexpr int64_t kMostRoomBytes = int64_t{1} << 30;
/// Of K and V of one column, head_dim 256, in 2 bytes.
constexpr int64_t kMostBytesAColumn = 2 * 256 * 2;

/// A choice that the device has made, or is about to.
class ChosenLists : public DeviceLists {
 public:
  /// `room`: of a head's columns where it is bounded, else nothing.
  ChosenLists(RingContext::State& state, ListSizes sizes, at::Device device, at::Tensor counts,
              at::Tensor dense, at::Tensor caps_hit, at::Tensor diagonal_bits,
              at::Tensor column_bits, FaultMemory faults, std::optional<int64_t> room,
              bool counts_caps)
      : state_(state),
        sizes_(sizes),
        device_(device),
        diagonal_bits_(std::move(diagonal_bits)),
        column_bits_(std::move(column_bits)),
        faults_(std::move(faults)),
        room_(room),
        counts_caps_(counts_caps),
        host_counts_(copied_later(counts)),
        host_dense_(copied_later(dense)),
        host_caps_(copied_later(caps_hit)),
        counted_(recorded_now(device)),
        host_diagonals_(copied_later(diagonal_bits_)),
        host_columns_(copied_later(column_bits_)),
        copied_(recorded_now(device)) {}

  const ListSizes& sizes() const override { return sizes_; }
  bool has_columns() override { return column_room() > 0; }
  int64_t total_columns() override {
    wait_for_counts();
    return host_counts_.select(0, 1).sum().item<int64_t>();
  }

  std::optional<kernels::BlockLists> block_lists(int source_rank) override {
    const layout::Layout& layout = state_.layout;
    if (layout.kind() != layout::LayoutKind::kBlockStriped &&
        layout.kind() != layout::LayoutKind::kContiguous)
      return std::nullopt;
    const int64_t m = layout.blocks_per_stripe(), stripes = layout.blocks_per_rank() / m;
    const int ranks = layout.cp_size();
    if (!entries_.defined()) {
      kernels::pattern_cuda::EntriesParams params;
      params.rows = rows();
      params.num_blocks = (sizes_.seq_len + 63) / 64;
      params.diagonal_bits = bitmap_words();
      params.blocks_per_stripe = m;
      params.ranks = ranks;
      params.stripes_per_rank = stripes;
      params.num_sources = ranks;
      entries_capacity_ =
          kernels::pattern_cuda::entries_capacity(m, stripes, params.num_blocks, ranks);
      params.capacity = entries_capacity_;
      const at::TensorOptions ints = at::TensorOptions().dtype(at::kInt).device(device_);
      entries_ = at::empty({ranks, rows(), entries_capacity_, 2}, ints);
      num_entries_ = at::empty({ranks, rows()}, ints);
      params.distances = state_.uploads.get(state_.residue_distances, device_);
      params.entries = reinterpret_cast<kernels::Entry*>(entries_.data_ptr<int32_t>());
      params.num_entries = num_entries_.data_ptr<int32_t>();
      params.stream = current_stream(device_);
      kernels::pattern_cuda::write_entries(params);
    }
    kernels::BlockLists lists;
    lists.kind = kernels::BlockListKind::kEntries;
    lists.entries = reinterpret_cast<const kernels::Entry*>(entries_.const_data_ptr<int32_t>()) +
                    source_rank * rows() * entries_capacity_;
    lists.num_entries = num_entries_.const_data_ptr<int32_t>() + source_rank * rows();
    lists.capacity = entries_capacity_;
    lists.blocks_per_stripe = m;
    return lists;
  }

  std::optional<kernels::ColumnLists> column_lists(int source_rank) override {
    const int64_t ranks = state_.layout.cp_size();
    if (!state_.layout.has_blocks() || state_.layout.position_stride() != 1) return std::nullopt;
    // How many of a head's columns are a source's nobody has counted: room for all of them.
    if (ranks > 1 && ranks * rows() * column_room() * kMostBytesAColumn > kMostRoomBytes)
      return std::nullopt;
    if (!columns_.defined()) {
      const at::TensorOptions ints = at::TensorOptions().dtype(at::kInt).device(device_);
      columns_ = at::empty({2, ranks, rows(), column_room()}, ints);
      num_columns_ = at::empty({ranks, rows()}, ints);
      kernels::pattern_cuda::ShardColumnsParams params;
      params.rows = rows();
      params.seq_len = sizes_.seq_len;
      params.column_bits =
          reinterpret_cast<const uint32_t*>(column_bits_.const_data_ptr<int32_t>());
      if (ranks > 1) {
        params.owners = state_.uploads.get(state_.block_owners, device_);
        params.sources = state_.uploads.get(state_.source_ranks, device_);
        params.num_sources = ranks;
      }
      params.capacity = column_room();
      params.key_rows = columns_.data_ptr<int32_t>();
      params.positions = columns_.data_ptr<int32_t>() + ranks * rows() * column_room();
      params.counts = num_columns_.data_ptr<int32_t>();
      params.stream = current_stream(device_);
      kernels::pattern_cuda::write_shard_columns(params);
    }
    const int64_t list = rows() * column_room();
    const int32_t* first = columns_.const_data_ptr<int32_t>() + source_rank * list;
    return kernels::ColumnLists{first, first + ranks * list,
                                num_columns_.const_data_ptr<int32_t>() + source_rank * rows(),
                                column_room()};
  }

  const uint64_t* bitmap_words() override {
    return reinterpret_cast<const uint64_t*>(diagonal_bits_.const_data_ptr<int64_t>());
  }
  int64_t bitmap_words_a_row() const override { return diagonal_bits_.size(1); }

  std::shared_ptr<const index::Index> host_index() override {
    copied_.synchronize();
    pattern::check_fault(*faults_.report());
    const auto* counts = host_counts_.const_data_ptr<int32_t>();
    std::vector<std::vector<int32_t>> diagonals, columns;
    for (int64_t row = 0; row < rows(); ++row) {
      const int64_t words = host_diagonals_.size(1), column_words = host_columns_.size(1);
      diagonals.push_back(
          set_bits(reinterpret_cast<const uint64_t*>(host_diagonals_.const_data_ptr<int64_t>()) +
                       row * words,
                   words, counts[row]));
      columns.push_back(
          set_bits(reinterpret_cast<const uint32_t*>(host_columns_.const_data_ptr<int32_t>()) +
                       row * column_words,
                   column_words, counts[rows() + row]));
    }
    index::Index index = index::make_index(sizes_.batch, sizes_.num_q_heads, sizes_.seq_len,
                                           std::move(diagonals), std::move(columns));
    const auto* flags = host_dense_.const_data_ptr<uint8_t>();
    index.dense_heads.assign(flags, flags + rows());
    const auto* caps = host_caps_.const_data_ptr<int64_t>();
    if (counts_caps_) index.caps_hit = std::accumulate(caps, caps + host_caps_.numel(), int64_t{0});
    return std::make_shared<const index::Index>(std::move(index));
  }

  void check_values() const override { pattern::check_fault(*faults_.report()); }

  int64_t bytes() const override {
    int64_t bytes = 0;
    for (const at::Tensor* kept : {&diagonal_bits_, &column_bits_, &entries_, &columns_})
      bytes += kept->defined() ? static_cast<int64_t>(kept->nbytes()) : 0;
    return bytes;
  }

 private:
  int64_t rows() const { return int64_t{sizes_.batch} * sizes_.num_q_heads; }
  void wait_for_counts() {
    counted_.synchronize();
    pattern::check_fault(*faults_.report());
  }
  int64_t column_room() {
    if (!room_) {
      wait_for_counts();
      room_ = host_counts_.select(0, 1).max().item<int32_t>();
    }
    return *room_;
  }

  RingContext::State& state_;
  ListSizes sizes_;
  at::Device device_;
  at::Tensor diagonal_bits_, column_bits_;
  FaultMemory faults_;
  std::optional<int64_t> room_;
  bool counts_caps_;
  at::Tensor host_counts_, host_dense_, host_caps_;
  c10::Event counted_;
  at::Tensor host_diagonals_, host_columns_;
  c10::Event copied_;
  at::Tensor entries_, num_entries_, columns_, num_columns_;
  int64_t entries_capacity_ = 0;
};

}  // namespace

index::Index choose_on_device(RingContext::State& state, const at::Tensor& q, const at::Tensor& k,
                              double softmax_scale, const at::Tensor& document_starts,
                              const pattern::VerticalSlashOptions& options) {
  return *lists_on_device(state, q, k, softmax_scale, document_starts, options)->host_index();
}

std::shared_ptr<DeviceLists> lists_on_device(RingContext::State& state, const at::Tensor& q,
                                             const at::Tensor& k, double softmax_scale,
                                             const at::Tensor& document_starts,
                                             const pattern::VerticalSlashOptions& options,
                                             bool counts_caps) {
  const Shards shards(state, q, k, softmax_scale, document_starts);
  pattern::check_device_choice(shards.host, options);
  const int64_t batch = q.size(0), heads = q.size(2), rows = batch * heads;
  const int64_t seq_len = state.layout.seq_len(), blocks = (seq_len + 63) / 64;
  const int64_t column_capacity =
      options.max_columns && !document_starts.defined()
          ? std::min<int64_t>(seq_len, *options.max_columns + options.sink_tokens)
          : seq_len;
  const auto memory = [&](const char* name, at::IntArrayRef sizes, at::ScalarType dtype) {
    return state.buffers.get(name, sizes, dtype, shards.device);
  };
  ChoiceTensors to;
  to.diagonals = memory("index diagonals", {rows, blocks}, at::kInt);
  to.columns = memory("index columns", {rows, column_capacity}, at::kInt);
  // What the host reads first: counts, flags, faults.
  at::Tensor counts = memory("index counts", {2, rows}, at::kInt);
  to.num_diagonals = counts[0];
  to.num_columns = counts[1];
  to.dense_heads = memory("index dense heads", {rows}, at::kByte);
  to.caps_hit = memory("index caps", {batch}, at::kLong);
  const FaultMemory faults(shards.device);
  // These stay: lists of backward are made of them.
  const at::TensorOptions kept = at::TensorOptions().device(shards.device);
  to.diagonal_bits = at::empty({rows, (blocks + 63) / 64}, kept.dtype(at::kLong));
  to.column_bits = at::empty({rows, (seq_len + 31) / 32}, kept.dtype(at::kInt));
  const auto window_rows = [&](const pattern::LocalAttention& host, at::Tensor& row_memory) {
    const std::vector<int32_t> window =
        pattern::window_positions(options, seq_len, host.document_starts);
    const bool consecutive = window.back() - window.front() + 1 == std::ssize(window);
    return uploaded_rows(window, consecutive, shards.device, row_memory);
  };
  choose_samples(
      shards, options, window_rows,
      [&](int64_t bytes) { return memory("index workspace", {bytes}, at::kByte); }, faults.report(),
      to);

  // Copies of K and V that a launch makes of its columns.
  const int64_t most_bytes = 4 * rows * column_capacity * q.size(3);
  const bool bounded = options.max_columns && !document_starts.defined();
  return std::make_shared<ChosenLists>(
      state, ListSizes{static_cast<int>(batch), static_cast<int>(heads), seq_len}, shards.device,
      counts, to.dense_heads, to.caps_hit.narrow(0, 0, choice_parts(shards, options)),
      to.diagonal_bits, to.column_bits, faults,
      bounded && most_bytes <= kMostRoomBytes ? std::optional<int64_t>(column_capacity)
                                              : std::nullopt,
      counts_caps);
}

pattern::Recall recall_on_device(RingContext::State& state, const at::Tensor& q,
                                 const at::Tensor& k, double softmax_scale,
                                 const at::Tensor& document_starts,
                                 const pattern::VerticalSlashOptions& options,
                                 const index::Index& index, uint64_t seed) {
  MT_CHECK_SUPPORTED(!index.has_blocks(),
                     "recall of an index of single blocks: not supported on a GPU");
  const Shards shards(state, q, k, softmax_scale, document_starts);
  pattern::check_device_choice(shards.host, options);
  const int64_t batch = q.size(0), heads = q.size(2), seq_len = state.layout.seq_len();
  const int64_t column_words = (seq_len + 31) / 32;
  const index::DiagonalBitmap bitmap = index::diagonal_bitmap(index);
  std::vector<uint32_t> words(batch * heads * column_words, 0);
  for (int64_t row = 0; row < batch * heads; ++row)
    for (const int32_t j : index.columns.row(row))
      words[row * column_words + j / 32] |= 1u << (j % 32);
  const at::Tensor diagonal_memory =
                       upload(bitmap.bits.data(), static_cast<int64_t>(bitmap.bits.size() * 8),
                              shards.device),
                   column_memory =
                       upload(words.data(), static_cast<int64_t>(words.size() * 4), shards.device);

  pattern::Recall recall;
  std::vector<double> on_window;
  const int64_t parts = choice_parts(shards, options);
  for (int64_t b = 0; b < parts; ++b) {
    const pattern::LocalAttention host = part_of(shards.host, b, parts),
                                  part = part_of(shards.on_device, b, parts);
    const auto recall_of = [&](const std::vector<int32_t>& positions) {
      at::Tensor row_memory;
      const pattern::DeviceRows rows = uploaded_rows(positions, false, shards.device, row_memory);
      const int64_t bytes = pattern::device_recall_bytes(part, rows.count);
      at::Tensor workspace =
          state.buffers.get("index workspace", {bytes}, at::kByte, shards.device);
      at::Tensor covered = at::empty({part.batch * heads, rows.count},
                                     at::TensorOptions().dtype(at::kLong).device(shards.device));
      const int64_t row = b * heads;
      pattern::measure_covered_on_device(
          part, shards.num_keys, rows, shards.layout, shards.group, workspace.data_ptr(), bytes,
          shards.stream,
          {reinterpret_cast<uint64_t*>(diagonal_memory.data_ptr()) + row * bitmap.words,
           reinterpret_cast<uint32_t*>(column_memory.data_ptr()) + row * column_words},
          covered.data_ptr<int64_t>());
      const at::Tensor shares =
          covered.to(at::kDouble)
              .sum(-1)
              .div_(static_cast<double>(kernels::kMassOne) * static_cast<double>(rows.count))
              .clamp_max_(1.0)
              .cpu();
      const auto* first = shares.const_data_ptr<double>();
      return std::vector<double>(first, first + shares.numel());
    };
    const std::vector<int32_t> window =
        pattern::window_positions(options, seq_len, host.document_starts);
    const std::vector<double> here = recall_of(window);
    const std::vector<int32_t> sampled =
        pattern::sampled_positions(window, seq_len, options.recall_rows, seed);
    const std::vector<double> there = sampled.empty() ? here : recall_of(sampled);
    on_window.insert(on_window.end(), here.begin(), here.end());
    recall.by_head.insert(recall.by_head.end(), there.begin(), there.end());
  }
  const auto mean = [](const std::vector<double>& values) {
    return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
  };
  recall.window = mean(on_window);
  recall.sampled = mean(recall.by_head);
  recall.sampled_worst = *std::min_element(recall.by_head.begin(), recall.by_head.end());
  return recall;
}

}  // namespace mtraining::attention
