#include "mtraining/attention/device_index.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "mtraining/attention/tensors.h"
#include "mtraining/base/check.h"
#include "mtraining/kernels/window.h"
#include "mtraining/pattern/device_choice.h"
#include "mtraining/pattern/observation.h"

namespace mtraining::attention {
namespace {

at::Tensor aligned(const at::Tensor& tensor) {
  // A copy even where it is contiguous already: then its memory begins at an odd place.
  return rows_are_aligned(tensor) ? tensor : tensor.clone(at::MemoryFormat::Contiguous);
}

/// A rank's shards as pattern/ takes them: once with documents in host memory, where windows are chosen, once in the device's.
struct Shards {
  Shards(RingContext::State& state, const at::Tensor& given_q, const at::Tensor& given_k,
         double softmax_scale, const at::Tensor& document_starts)
      : q(aligned(given_q)), k(aligned(given_k)), device(q.device()) {
    host.layout = &state.layout;
    host.cp_rank = state.cp_rank;
    host.batch = q.size(0);
    host.num_q_heads = q.size(2);
    host.num_kv_heads = k.size(2);
    host.head_dim = q.size(3);
    host.dtype = kernel_dtype(q, "q");
    host.softmax_scale =
        softmax_scale > 0 ? softmax_scale : 1 / std::sqrt(static_cast<double>(q.size(3)));
    host.q = const_view(q);
    host.k = const_view(k);
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
  int64_t num_keys() const { return k.size(1); }
  at::Tensor upload_rows(const std::vector<int32_t>& positions) const {
    return upload(positions.data(), static_cast<int64_t>(positions.size() * sizeof(int32_t)),
                  device);
  }

  at::Tensor q, k;
  at::Device device;
  at::Tensor documents;
  pattern::LocalAttention host, on_device;
  pattern::DeviceLayout layout;
  comm::Communicator* group = nullptr;
  void* stream = nullptr;
};

pattern::DeviceRows rows_in(const at::Tensor& memory, bool consecutive) {
  return {static_cast<const int32_t*>(memory.const_data_ptr()),
          static_cast<int64_t>(memory.nbytes() / sizeof(int32_t)), consecutive};
}

/// Where the device reports values that no index can be chosen from.
class FaultMemory {
 public:
  FaultMemory()
      : memory_(at::empty({sizeof(kernels::pattern_cuda::FaultReport)},
                          at::TensorOptions().dtype(at::kByte).pinned_memory(true))) {
    *report() = {};
  }
  kernels::pattern_cuda::FaultReport* report() const {
    return static_cast<kernels::pattern_cuda::FaultReport*>(memory_.data_ptr());
  }

 private:
  at::Tensor memory_;
};

std::vector<std::vector<int32_t>> ragged(const at::Tensor& lists, const at::Tensor& counts) {
  std::vector<std::vector<int32_t>> rows;
  const auto* from = lists.const_data_ptr<int32_t>();
  for (int64_t r = 0; r < counts.numel(); ++r) {
    const int32_t* row = from + r * lists.size(1);
    rows.emplace_back(row, row + counts.const_data_ptr<int32_t>()[r]);
  }
  return rows;
}

}  // namespace

index::Index choose_on_device(RingContext::State& state, const at::Tensor& q, const at::Tensor& k,
                              double softmax_scale, const at::Tensor& document_starts,
                              const pattern::VerticalSlashOptions& options) {
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
  at::Tensor diagonals = memory("index diagonals", {rows, blocks}, at::kInt);
  at::Tensor columns = memory("index columns", {rows, column_capacity}, at::kInt);
  // What the host reads first: counts, flags, faults.
  at::Tensor counts = memory("index counts", {2, rows}, at::kInt);
  at::Tensor dense = memory("index dense heads", {rows}, at::kByte);
  at::Tensor caps_hit = memory("index caps", {batch}, at::kLong);
  const FaultMemory faults;
  at::Tensor diagonal_bits = memory("index diagonal bits", {rows, (blocks + 63) / 64}, at::kLong);
  at::Tensor column_bits = memory("index column bits", {rows, (seq_len + 31) / 32}, at::kInt);

  const int64_t parts = pattern::has_windows_by_sample(shards.host, options) ? batch : 1;
  for (int64_t b = 0; b < parts; ++b) {
    const pattern::LocalAttention host =
        parts == 1 ? shards.host : pattern::sample_of(shards.host, b);
    const pattern::LocalAttention part =
        parts == 1 ? shards.on_device : pattern::sample_of(shards.on_device, b);
    const std::vector<int32_t> window =
        pattern::window_positions(options, seq_len, host.document_starts);
    const bool consecutive = window.back() - window.front() + 1 == std::ssize(window);
    const at::Tensor row_memory = shards.upload_rows(window);
    const pattern::DeviceRows row_list = rows_in(row_memory, consecutive);
    at::Tensor floor_memory;
    pattern::DeviceRows floor_rows;
    if (options.recall_floor > 0) {
      floor_memory = shards.upload_rows(pattern::floor_positions(options, window, seq_len));
      floor_rows = rows_in(floor_memory, false);
    }
    const int64_t bytes =
        pattern::device_choice_bytes(part, options, row_list.count, floor_rows.count);
    at::Tensor workspace = memory("index workspace", {bytes}, at::kByte);
    const int64_t row = b * heads;
    pattern::DeviceIndex out;
    out.lists = {diagonals.data_ptr<int32_t>() + row * blocks,
                 counts.data_ptr<int32_t>() + row,
                 columns.data_ptr<int32_t>() + row * column_capacity,
                 counts.data_ptr<int32_t>() + rows + row,
                 blocks,
                 column_capacity};
    out.bits = {
        reinterpret_cast<uint64_t*>(diagonal_bits.data_ptr<int64_t>()) +
            row * diagonal_bits.size(1),
        reinterpret_cast<uint32_t*>(column_bits.data_ptr<int32_t>()) + row * column_bits.size(1)};
    out.dense_heads = dense.data_ptr<uint8_t>() + row;
    out.caps_hit = caps_hit.data_ptr<int64_t>() + b;
    out.report = faults.report();
    out.first_sample = b;
    pattern::build_vertical_slash_on_device(part, shards.num_keys(), options, row_list, floor_rows,
                                            shards.layout, shards.group, workspace.data_ptr(),
                                            bytes, shards.stream, out);
  }

  const at::Tensor host_counts = counts.cpu(), host_dense = dense.cpu(), host_caps = caps_hit.cpu();
  pattern::check_fault(*faults.report());  // the copies have waited for the device
  const auto longest = [&](int64_t which) {
    return host_counts.select(0, which).max().item<int32_t>();
  };
  const at::Tensor host_diagonals = diagonals.narrow(1, 0, longest(0)).cpu(),
                   host_columns = columns.narrow(1, 0, longest(1)).cpu();
  index::Index index = index::make_index(static_cast<int>(batch), static_cast<int>(heads), seq_len,
                                         ragged(host_diagonals, host_counts.select(0, 0)),
                                         ragged(host_columns, host_counts.select(0, 1)));
  const auto* flags = host_dense.const_data_ptr<uint8_t>();
  index.dense_heads.assign(flags, flags + rows);
  const auto* caps = host_caps.const_data_ptr<int64_t>();
  index.caps_hit = std::accumulate(caps, caps + parts, int64_t{0});
  return index;
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
  const int64_t parts = pattern::has_windows_by_sample(shards.host, options) ? batch : 1;
  for (int64_t b = 0; b < parts; ++b) {
    const pattern::LocalAttention host =
        parts == 1 ? shards.host : pattern::sample_of(shards.host, b);
    const pattern::LocalAttention part =
        parts == 1 ? shards.on_device : pattern::sample_of(shards.on_device, b);
    const auto recall_of = [&](const std::vector<int32_t>& positions) {
      const at::Tensor row_memory = shards.upload_rows(positions);
      const pattern::DeviceRows rows = rows_in(row_memory, false);
      const int64_t bytes = pattern::device_recall_bytes(part, rows.count);
      at::Tensor workspace =
          state.buffers.get("index workspace", {bytes}, at::kByte, shards.device);
      at::Tensor covered = at::empty({part.batch * heads, rows.count},
                                     at::TensorOptions().dtype(at::kLong).device(shards.device));
      const int64_t row = b * heads;
      pattern::measure_covered_on_device(
          part, shards.num_keys(), rows, shards.layout, shards.group, workspace.data_ptr(), bytes,
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
