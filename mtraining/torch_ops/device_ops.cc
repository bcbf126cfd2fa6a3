#include "mtraining/torch_ops/device_ops.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "mtraining/attention/choice_on_device.h"
#include "mtraining/attention/local_attention.h"
#include "mtraining/attention/tensors.h"
#include "mtraining/base/check.h"
#include "mtraining/kernels/launch.h"
#include "mtraining/kernels/pattern_cuda/lists.h"
#include "mtraining/kernels/rounding_cuda/rounding.h"
#include "mtraining/kernels/window.h"
#include "mtraining/layout/layout.h"
#include "mtraining/pattern/device_choice.h"
#include "mtraining/pattern/observation.h"
#include "mtraining/torch_ops/block_lists.h"
#include "mtraining/torch_ops/later_checks.h"

namespace mtraining::torch_ops {
namespace {

namespace cuda = kernels::pattern_cuda;
using attention::check_tensor;
using attention::const_view;
using attention::current_stream;
using attention::with_aligned_rows;

at::Tensor bytes_on(at::Device device, int64_t bytes) {
  return at::empty({std::max<int64_t>(bytes, 256)},
                   at::TensorOptions().dtype(at::kByte).device(device));
}
at::TensorOptions ints_on(at::Device device) {
  return at::TensorOptions().dtype(at::kInt).device(device);
}
int64_t blocks_of(int64_t seq_len) { return (seq_len + layout::kBlock - 1) / layout::kBlock; }

/// Contiguous, of the right shape and device; values are not looked at.
at::Tensor shaped_document_starts(const at::Tensor& document_starts, int64_t batch, int64_t seq_len,
                                  at::Device device) {
  if (!document_starts.defined()) return {};
  check_tensor("document_starts", document_starts, {{"B", batch}, {"S", seq_len}}, at::kInt,
               device);
  return document_starts.contiguous();
}

// ---------------------------------------------------------------- faults
/// Where a device tells of values that no index can be chosen from, and of lists that none has. Nobody waits for it: the next call
/// throws.
kernels::pattern_cuda::FaultReport* fault_report(at::Device device) {
  static std::mutex mutex;
  // Never freed: a kernel may still be running when the process ends.
  static auto* const reports = new std::map<at::DeviceIndex, at::Tensor>();
  const std::lock_guard<std::mutex> lock(mutex);
  at::Tensor& memory = (*reports)[device.index()];
  if (!memory.defined()) {
    memory = at::empty({sizeof(cuda::FaultReport)},
                       at::TensorOptions().dtype(at::kByte).pinned_memory(true));
    *reinterpret_cast<cuda::FaultReport*>(memory.mutable_data_ptr()) = {};
  }
  return reinterpret_cast<cuda::FaultReport*>(memory.mutable_data_ptr());
}
/// Throws what an earlier call found, once.
void throw_reported(at::Device device) {
  check_what_came(device);
  volatile cuda::FaultReport* const report = fault_report(device);
  if (report->code == 0) return;
  cuda::FaultReport found = {};
  found.code = report->code;
  found.num_q_heads = report->num_q_heads;
  found.seq_len = report->seq_len;
  found.first_sample = report->first_sample;
  found.value = report->value;
  found.end = report->end;
  report->code = 0;
  report->claimed = 0;
  pattern::check_fault(found);
}

// ---------------------------------------------------------------- lists
/// The lists of an index in device memory, their bits, and what a launch reads of them.
class ListsOnDevice {
 public:
  ListsOnDevice(const IndexTensors& tensors, int64_t batch, int64_t heads, int64_t seq_len,
                at::Device device)
      : batch_(batch), heads_(heads), seq_len_(seq_len) {
    const auto check = [&](const char* name, const at::Tensor& values, const char* counts_name,
                           const at::Tensor& counts) {
      MT_CHECK_ARG(values.dim() == 3, name, ": expected [B, H, capacity] int32, got ",
                   attention::shape_text(values));
      check_tensor(name, values, {{"B", batch}, {"H", heads}, {"capacity", values.size(2)}},
                   at::kInt, device);
      check_tensor(counts_name, counts, {{"B", batch}, {"H", heads}}, at::kInt, device);
    };
    check("diagonals", tensors.diagonals, "num_diagonals", tensors.num_diagonals);
    check("columns", tensors.columns, "num_columns", tensors.num_columns);
    diagonals_ = tensors.diagonals.contiguous();
    num_diagonals_ = tensors.num_diagonals.contiguous();
    columns_ = tensors.columns.contiguous();
    num_columns_ = tensors.num_columns.contiguous();
  }

  /// Enqueues the bits; values out of range are dropped and reported.
  void read() {
    cuda::GivenLists given = begin();
    cuda::read_lists(given);
  }
  /// The same, and fills what a launch over the whole sequence on one rank reads. `columns`: room for a head's.
  void read_for_launch(const at::Tensor& document_starts, int64_t columns,
                       kernels::AttentionParams& params, kernels::KeySource& source) {
    const int64_t blocks = blocks_of(seq_len_);
    cuda::GivenLists given = begin();
    if (document_starts.defined()) given.document_start = document_starts.const_data_ptr<int32_t>();
    // Entries, then block starts, counts, columns.
    // How many a head can have: kernels choose how to cut their work by it.
    given.entry_capacity = std::min(blocks, diagonals_.size(2));
    launch_ =
        at::empty({2 * rows() * given.entry_capacity + blocks + 2 * rows() + rows() * columns},
                  ints_on(columns_.device()));
    int32_t* memory = launch_.data_ptr<int32_t>();
    const auto take = [&](int64_t count) { return std::exchange(memory, memory + count); };
    given.entries = reinterpret_cast<kernels::Entry*>(take(2 * rows() * given.entry_capacity));
    given.block_starts = take(blocks);
    given.num_entries = take(rows());
    given.counts = take(rows());
    given.positions = take(rows() * columns);
    given.capacity = columns;
    cuda::read_lists(given);
    source.block_starts = given.block_starts;
    source.blocks.kind = kernels::BlockListKind::kEntries;
    source.blocks.entries = given.entries;
    source.blocks.num_entries = given.num_entries;
    source.blocks.capacity = given.entry_capacity;
    source.blocks.blocks_per_stripe = blocks;  // one stripe: lambda 0, delta the diagonal
    if (columns > 0) source.columns = {given.positions, given.positions, given.counts, columns};
    params.q_block_starts = given.block_starts;
    params.diagonal_bits = bits().diagonals;
    params.diagonal_words = diagonal_words();
  }

  cuda::IndexBits bits() const {
    auto* diagonals = reinterpret_cast<uint64_t*>(bits_.data_ptr<int64_t>());
    return {diagonals, reinterpret_cast<uint32_t*>(diagonals + rows() * diagonal_words())};
  }
  /// Of the samples' rows from `row` on.
  cuda::IndexBits bits_from(int64_t row) const {
    return {bits().diagonals + row * diagonal_words(),
            bits().columns + row * ((seq_len_ + 31) / 32)};
  }
  int64_t rows() const { return batch_ * heads_; }
  int64_t diagonal_words() const { return (blocks_of(seq_len_) + 63) / 64; }
  const at::Tensor& num_columns() const { return num_columns_; }
  int64_t column_capacity() const { return std::min(columns_.size(2), seq_len_); }

 private:
  /// What every reading has; makes room for bits.
  cuda::GivenLists begin() {
    const at::Device device = diagonals_.device();
    const int64_t diagonal_longs = rows() * diagonal_words(),
                  column_longs = (rows() * ((seq_len_ + 31) / 32) + 1) / 2;
    bits_ = at::empty({diagonal_longs + column_longs}, ints_on(device).dtype(at::kLong));
    cuda::GivenLists given;
    given.lists.diagonals = diagonals_.data_ptr<int32_t>();
    given.lists.num_diagonals = num_diagonals_.data_ptr<int32_t>();
    given.lists.diagonal_capacity = diagonals_.size(2);
    given.lists.columns = columns_.data_ptr<int32_t>();
    given.lists.num_columns = num_columns_.data_ptr<int32_t>();
    given.lists.column_capacity = columns_.size(2);
    given.batch = batch_;
    given.num_q_heads = heads_;
    given.seq_len = seq_len_;
    given.bits = bits();
    given.report = fault_report(device);
    given.stream = current_stream(device);
    return given;
  }

  int64_t batch_, heads_, seq_len_;
  at::Tensor diagonals_, num_diagonals_, columns_, num_columns_;
  at::Tensor bits_;    // of diagonals, then of columns
  at::Tensor launch_;  // what kernels read
};

// ---------------------------------------------------------------- attention
/// What the kernels read of one call, and the memory behind it: one shard, the whole sequence.
class LaunchOnDevice {
 public:
  LaunchOnDevice(const AttendInputs& inputs, kernels::Direction direction)
      : guard_(inputs.q.device()), q_(inputs.q), k_(inputs.k), v_(inputs.v) {
    check_shapes(q_, k_, &v_);
    const int64_t batch = q_.size(0), seq_len = q_.size(1), heads = q_.size(2);
    const at::Device device = q_.device();
    throw_reported(device);
    const bool columns = !inputs.blocks.defined();
    if (columns) {
      const at::Tensor& diagonals = inputs.index.diagonals;
      MT_CHECK_ARG(diagonals.dim() == 3 && diagonals.size(0) == batch && diagonals.size(1) == heads,
                   "index: expected B=", batch, ", H=", heads, " as q has, got ",
                   attention::shape_text(diagonals));
    } else {
      check_block_bits(inputs.blocks, batch, heads, seq_len, device);
    }
    documents_ = shaped_document_starts(inputs.document_starts, batch, seq_len, device);
    kernels::Request request;
    request.direction = direction;
    request.device = kernels::current_cuda_device();
    request.dtype = attention::kernel_dtype(q_, "q");
    request.head_dim = q_.size(3);
    request.columns = columns;
    backend_ = kernels::choose(request).backend;
    q_ = with_aligned_rows(q_);
    k_ = with_aligned_rows(k_);
    v_ = with_aligned_rows(v_);
    stream_ = current_stream(device);

    if (columns) {
      read_lists(inputs.index, batch, heads, seq_len);
    } else {
      check_starts_later();
      blocks_ = lists_of_bits(inputs.blocks, seq_len,
                              /*by_key=*/direction == kernels::Direction::kBackward);
      source_.blocks = blocks_.lists;
      source_.block_starts = params_.q_block_starts =
          blocks_.block_starts.const_data_ptr<int32_t>();
    }
    source_.k = const_view(k_);
    source_.v = const_view(v_);
    source_.num_keys = seq_len;

    params_.batch = batch;
    params_.num_queries = seq_len;
    params_.num_q_heads = heads;
    params_.num_kv_heads = k_.size(2);
    params_.head_dim = q_.size(3);
    params_.dtype = request.dtype;
    params_.softmax_scale = checked_scale(inputs.softmax_scale, q_.size(3));
    params_.seq_len = seq_len;
    params_.q = const_view(q_);
    if (documents_.defined()) {
      params_.document_start = documents_.const_data_ptr<int32_t>();
      params_.document_stride_batch = documents_.stride(0);
    }
    params_.sources = &source_;
    params_.num_sources = 1;
    params_.stream = stream_;
  }
  LaunchOnDevice(const LaunchOnDevice&) = delete;
  LaunchOnDevice& operator=(const LaunchOnDevice&) = delete;

  template <typename Params>
  void fill(Params& params) const {
    static_cast<kernels::AttentionParams&>(params) = params_;
  }
  /// Called last: how much it is depends on all else.
  template <typename Params>
  at::Tensor give_workspace(Params& params) const {
    const int64_t bytes = kernels::workspace_bytes(backend_, params);
    at::Tensor workspace = bytes_on(q_.device(), bytes);
    params.workspace = workspace.data_ptr();
    params.workspace_bytes = workspace.numel();
    return workspace;
  }
  kernels::KeySource& source() { return source_; }
  kernels::Backend backend() const { return backend_; }
  void* stream() const { return stream_; }

 private:
  /// As read_lists does beside an index.
  void check_starts_later() const {
    if (!documents_.defined()) return;
    const int64_t seq_len = documents_.size(1);
    const at::Tensor wrong =
        documents_.lt(0).logical_or(documents_.gt(at::arange(seq_len, documents_.options())));
    check_when_known(first_where(wrong, documents_), [seq_len](const int64_t* found) {
      MT_CHECK_ARG(found[0] < 0, "document_starts[", found[0] / seq_len, ", ", found[0] % seq_len,
                   "]: expected 0 .. ", found[0] % seq_len, ", got ", found[1]);
    });
  }
  void read_lists(const IndexTensors& index, int64_t batch, int64_t heads, int64_t seq_len) {
    lists_.emplace(index, batch, heads, seq_len, q_.device());
    int64_t capacity = lists_->column_capacity();
    if (4 * batch * heads * capacity * q_.size(3) > kMaxGatherBytes)
      capacity = std::clamp<int64_t>(lists_->num_columns().max().item<int32_t>(), 0, capacity);
    lists_->read_for_launch(documents_, capacity, params_, source_);
  }

  c10::DeviceGuard guard_;
  at::Tensor q_, k_, v_, documents_;
  kernels::Backend backend_ = kernels::Backend::kRef;
  void* stream_ = nullptr;
  std::optional<ListsOnDevice> lists_;
  BlockListsOnDevice blocks_;
  kernels::KeySource source_;
  kernels::AttentionParams params_;
};

// ---------------------------------------------------------------- estimation
/// A whole sequence on one device, and the memory that it is seen through.
struct SequenceOnDevice : attention::DeviceShards {
  SequenceOnDevice(const at::Tensor& given_q, const at::Tensor& given_k,
                   const at::Tensor& document_starts, double softmax_scale)
      : guard(given_q.device()) {
    check_shapes(given_q, given_k, nullptr);
    const int64_t seq_len = given_q.size(1);
    in_order.emplace(
        layout::LayoutOptions{.kind = layout::LayoutKind::kContiguous, .seq_len = seq_len});
    documents = shaped_document_starts(document_starts, given_q.size(0), seq_len, given_q.device());
    q = with_aligned_rows(given_q.detach());
    k = with_aligned_rows(given_k.detach());
    stream = current_stream(q.device());
    throw_reported(q.device());
    device = q.device();
    num_keys = seq_len;
    host = attention::local_attention(*in_order, 0, q, k, checked_scale(softmax_scale, q.size(3)));
    on_device = host;
    if (documents.defined()) {
      on_device.document_starts = documents.const_data_ptr<int32_t>();
      host_documents = checked_document_starts(documents.cpu(), q.size(0), seq_len);
      host.document_starts = host_documents.const_data_ptr<int32_t>();
    }
    block_starts = at::empty({blocks_of(seq_len)}, ints_on(q.device()));
    layout.block_starts = block_starts.const_data_ptr<int32_t>();
  }
  /// Once, before anything reads them.
  void write_block_starts() const {
    cuda::write_positions(q.size(1), 0, false, nullptr, block_starts.numel(),
                          block_starts.data_ptr<int32_t>(), stream);
  }

  std::vector<int32_t> window(const pattern::VerticalSlashOptions& options,
                              const pattern::LocalAttention& of) const {
    return pattern::window_positions(options, q.size(1), of.document_starts);
  }
  /// The window's rows; `memory` keeps them. Writes the block starts too, in the same launch where the device makes the rows.
  pattern::DeviceRows window_rows(const pattern::VerticalSlashOptions& options,
                                  const pattern::LocalAttention& of, at::Tensor& memory) const {
    const bool last = options.window == pattern::Window::kLast;
    if (documents.defined() && last) {
      write_block_starts();
      return attention::uploaded_rows(window(options, of), false, device, memory);
    }
    const int64_t rows = std::min<int64_t>(options.last_q, q.size(1));
    memory = at::empty({rows}, ints_on(device));
    cuda::write_positions(q.size(1), rows, !last, memory.data_ptr<int32_t>(), block_starts.numel(),
                          block_starts.data_ptr<int32_t>(), stream);
    return {memory.const_data_ptr<int32_t>(), rows, last};
  }

  c10::DeviceGuard guard;
  std::optional<layout::Layout> in_order;
  at::Tensor q, k, documents, host_documents, block_starts;
};

}  // namespace

IndexTensors build_index_on_device(const at::Tensor& q, const at::Tensor& k,
                                   const at::Tensor& document_starts, double softmax_scale,
                                   const pattern::VerticalSlashOptions& options) {
  const SequenceOnDevice whole(q, k, document_starts, softmax_scale);
  pattern::check_device_choice(whole.host, options);
  const int64_t batch = q.size(0), seq_len = q.size(1), heads = q.size(2);
  const at::TensorOptions ints = ints_on(whole.device);
  attention::ChoiceTensors to;
  to.diagonals = at::empty({batch, heads, diagonal_capacity(seq_len)}, ints);
  to.columns =
      at::empty({batch, heads, column_capacity(seq_len, options, document_starts.defined())}, ints);
  to.num_diagonals = at::empty({batch, heads}, ints);
  to.num_columns = at::empty({batch, heads}, ints);
  to.dense_heads = at::empty({batch, heads}, ints.dtype(at::kBool));
  const int64_t parts = attention::choice_parts(whole, options);
  to.caps_hit = at::empty({parts}, ints.dtype(at::kLong));
  to.diagonal_bits =
      at::empty({batch * heads, (blocks_of(seq_len) + 63) / 64}, ints.dtype(at::kLong));
  to.column_bits = at::empty({batch * heads, (seq_len + 31) / 32}, ints);
  attention::choose_samples(
      whole, options,
      [&](const pattern::LocalAttention& of, at::Tensor& memory) {
        return whole.window_rows(options, of, memory);
      },
      [&](int64_t bytes) { return bytes_on(whole.device, bytes); }, fault_report(whole.device), to);
  return {.diagonals = to.diagonals,
          .num_diagonals = to.num_diagonals,
          .columns = to.columns,
          .num_columns = to.num_columns,
          .dense_heads = to.dense_heads,
          .caps_hit = parts == 1 ? to.caps_hit.squeeze(0) : to.caps_hit.sum()};
}

Attended attend_on_device(const AttendInputs& inputs) {
  LaunchOnDevice launch(inputs, kernels::Direction::kForward);
  const at::Tensor& q = inputs.q;
  const at::TensorOptions held = q.options().dtype(at::kFloat);
  at::Tensor rounded = at::empty(q.sizes(), q.options()),
             residual = at::empty(q.sizes(), q.options());
  at::Tensor lse = at::empty({q.size(0), q.size(2), q.size(1)}, held);
  kernels::ForwardParams params;
  launch.fill(params);
  params.rounded = attention::view(rounded);
  params.residual = attention::view(residual);
  params.lse = lse.mutable_data_ptr();
  const at::Tensor workspace = launch.give_workspace(params);
  kernels::forward(launch.backend(), params);
  return {rounded, lse, residual};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> attend_backward_on_device(const AttendInputs& inputs,
                                                                         const at::Tensor& dout,
                                                                         const Attended& attended) {
  LaunchOnDevice launch(inputs, kernels::Direction::kBackward);
  const at::Tensor& q = inputs.q;
  const at::ScalarType dtype = q.scalar_type();
  const attention::NamedSizes rows = {
      {"B", q.size(0)}, {"S", q.size(1)}, {"H", q.size(2)}, {"D", q.size(3)}};
  check_tensor("dout", dout, rows, dtype, q.device());
  check_tensor("out", attended.out, rows, dtype, q.device());
  check_tensor("out_residual", attended.out_residual, rows, dtype, q.device());
  check_tensor("lse", attended.lse, {{"B", q.size(0)}, {"H", q.size(2)}, {"S", q.size(1)}},
               at::kFloat, q.device());
  const at::TensorOptions held = q.options().dtype(at::kFloat);
  const at::Tensor dout_rows = with_aligned_rows(dout), lse_rows = attended.lse.contiguous();
  const at::Tensor rounded = with_aligned_rows(attended.out),
                   residual = with_aligned_rows(attended.out_residual);
  at::Tensor delta = at::empty(lse_rows.sizes(), held);
  at::Tensor dq = at::empty(q.sizes(), q.options());
  at::Tensor dk = at::empty(inputs.k.sizes(), q.options());
  at::Tensor dv = at::empty(inputs.k.sizes(), q.options());
  kernels::BackwardParams params;
  launch.fill(params);
  params.dout = const_view(dout_rows);
  params.lse = lse_rows.const_data_ptr();
  params.delta = delta.const_data_ptr();
  params.deterministic = at::globalContext().deterministicAlgorithms();
  // Sums in float32: of dk, dv and, where parts of it come from several thread blocks, dq.
  const bool sums_dq = !kernels::rounds_dq(launch.backend(), params);
  const int64_t keys = inputs.k.numel();
  at::Tensor sums = at::zeros({2 * keys + (sums_dq ? q.numel() : 0)}, held);
  at::Tensor dk_sum = sums.narrow(0, 0, keys).view(inputs.k.sizes()),
             dv_sum = sums.narrow(0, keys, keys).view(inputs.k.sizes()), dq_sum;
  launch.source().dk = attention::view(dk_sum);
  launch.source().dv = attention::view(dv_sum);
  if (sums_dq) {
    dq_sum = sums.narrow(0, 2 * keys, q.numel()).view(q.sizes());
    params.dq = attention::view(dq_sum);
  } else {
    params.dq_rounded = attention::view(dq);
  }
  const at::Tensor workspace = launch.give_workspace(params);
  kernels::delta(launch.backend(), params, {const_view(rounded), const_view(residual)},
                 delta.mutable_data_ptr());
  kernels::backward(launch.backend(), params);
  const float* from = sums.const_data_ptr<float>();
  kernels::rounding_cuda::round(
      std::array{kernels::rounding_cuda::Rounded{from, keys, dk.mutable_data_ptr()},
                 kernels::rounding_cuda::Rounded{from + keys, keys, dv.mutable_data_ptr()},
                 kernels::rounding_cuda::Rounded{from + 2 * keys, sums_dq ? q.numel() : 0,
                                                 dq.mutable_data_ptr()}},
      params.dtype, launch.stream());
  return {dq, dk, dv};
}

std::tuple<at::Tensor, at::Tensor> measure_recall_on_device(
    const at::Tensor& q, const at::Tensor& k, const IndexTensors& index,
    const at::Tensor& document_starts, double softmax_scale,
    const pattern::VerticalSlashOptions& options, int64_t seed) {
  const SequenceOnDevice whole(q, k, document_starts, softmax_scale);
  const int64_t batch = q.size(0), seq_len = q.size(1), heads = q.size(2);
  pattern::check(options);
  ListsOnDevice lists(index, batch, heads, seq_len, q.device());
  lists.read();
  const at::TensorOptions longs = ints_on(q.device()).dtype(at::kLong);
  const int64_t parts = attention::choice_parts(whole, options);
  std::vector<at::Tensor> on_window, elsewhere;
  for (int64_t b = 0; b < parts; ++b) {
    const pattern::LocalAttention host = attention::part_of(whole.host, b, parts),
                                  part = attention::part_of(whole.on_device, b, parts);
    const auto covered = [&](const pattern::DeviceRows& rows) {
      at::Tensor masses = at::empty({part.batch, heads, rows.count}, longs);
      at::Tensor workspace = bytes_on(q.device(), pattern::device_recall_bytes(part, rows.count));
      pattern::measure_covered_on_device(part, seq_len, rows, whole.layout, nullptr,
                                         workspace.data_ptr(), workspace.numel(), whole.stream,
                                         lists.bits_from(b * heads), masses.data_ptr<int64_t>());
      // Each mass is rounded, so that a row's masses add up to 1 within some 2^-40 a key only.
      return masses.to(at::kDouble)
          .sum(-1)
          .div_(static_cast<double>(kernels::kMassOne) * static_cast<double>(rows.count))
          .clamp_max_(1.0);
    };
    at::Tensor memory;
    on_window.push_back(covered(whole.window_rows(options, host, memory)));
    const std::vector<int32_t> sampled = pattern::sampled_positions(
        whole.window(options, host), seq_len, options.recall_rows, static_cast<uint64_t>(seed));
    if (sampled.empty()) {
      elsewhere.push_back(on_window.back());
    } else {
      elsewhere.push_back(covered(attention::uploaded_rows(sampled, false, whole.device, memory)));
    }
  }
  const at::Tensor window = at::cat(on_window), sampled = at::cat(elsewhere);
  return {window.mean().expand({batch, heads}).contiguous(), sampled};
}

namespace {

/// What `make` makes of the lists, on their device.
template <typename Make>
at::Tensor of_lists(const IndexTensors& index, int64_t seq_len, const Make& make) {
  MT_CHECK_ARG(index.diagonals.dim() == 3, "diagonals: expected [B, H, capacity] int32, got ",
               attention::shape_text(index.diagonals));
  const at::Device device = index.diagonals.device();
  const c10::DeviceGuard guard(device);
  throw_reported(device);
  const int64_t batch = index.diagonals.size(0), heads = index.diagonals.size(1);
  ListsOnDevice lists(index, batch, heads, seq_len, device);
  lists.read();
  return make(lists, batch, heads, device);
}

}  // namespace

at::Tensor index_mask_on_device(const IndexTensors& index, const at::Tensor& document_starts,
                                int64_t seq_len) {
  return of_lists(
      index, seq_len,
      [&](const ListsOnDevice& lists, int64_t batch, int64_t heads, at::Device device) {
        const at::Tensor documents =
            shaped_document_starts(document_starts, batch, seq_len, device);
        at::Tensor mask =
            at::empty({batch, heads, seq_len, seq_len}, ints_on(device).dtype(at::kBool));
        cuda::write_mask(lists.bits(), batch, heads, seq_len,
                         documents.defined() ? documents.const_data_ptr<int32_t>() : nullptr,
                         reinterpret_cast<uint8_t*>(mask.data_ptr<bool>()), current_stream(device));
        return mask;
      });
}

at::Tensor index_pairs_on_device(const IndexTensors& index, int64_t seq_len) {
  return of_lists(index, seq_len,
                  [&](const ListsOnDevice& lists, int64_t batch, int64_t heads, at::Device device) {
                    at::Tensor pairs = at::empty({batch, heads}, ints_on(device).dtype(at::kLong));
                    cuda::count_pairs(lists.bits(), lists.rows(), seq_len,
                                      pairs.data_ptr<int64_t>(), current_stream(device));
                    return pairs;
                  });
}

}  // namespace mtraining::torch_ops
