#include "bench/device_launch.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <optional>

#include "bench/sampled_errors.h"
#include "bench/torch_device.h"
#include "mtraining/attention/index_plan.h"
#include "mtraining/attention/tensors.h"
#include "mtraining/base/check.h"
#include "mtraining/index/step_pairs.h"
#include "mtraining/kernels/launch.h"
#include "mtraining/torch_ops/device_ops.h"

namespace mtraining::bench {
namespace {

using attention::const_view;
using attention::view;

constexpr int kSampledRows = 32;
constexpr int64_t kColumnRowsPerRank = attention::RingOptions{}.max_column_rows_per_rank;

/// One shard of keys, or the gathered columns: what a launch reads and where gradients go.
struct Source {
  at::Tensor k, v;
  std::vector<int32_t> starts;  // of blocks; empty for columns
  const index::ColumnSlice* slice = nullptr;
  at::Tensor dk = {}, dv = {};
};

class DeviceLaunch : public AttentionLaunch {
 public:
  DeviceLaunch(const LaunchPlace& place, const AttentionSizes& sizes, const DeviceInputs& inputs,
               const index::Index& index)
      : place_(place),
        sizes_(sizes),
        inputs_(inputs),
        index_(std::make_shared<const index::Index>(index)),
        layout_({.kind = place.layout,
                 .seq_len = sizes.seq_len,
                 .cp_size = place.cp_size,
                 .stripe = place.stripe}),
        plan_(index_, layout_, place.cp_rank),
        device_(inputs.q.device()),
        positions_(layout_.positions(place.cp_rank)),
        starts_(layout_.block_starts(place.cp_rank)) {
    q_ = shard_of(inputs.q, place.cp_rank);
    dout_ = shard_of(inputs.dout, place.cp_rank);
    for (int rank = 0; rank < place.cp_size; ++rank) {
      sources_.push_back({.k = shard_of(inputs.k, rank),
                          .v = shard_of(inputs.v, rank),
                          .starts = layout_.block_starts(rank)});
    }
    has_columns_ = plan_.has_columns();
    columns_gathered_ = has_columns_ && place.cp_size > 1 && !plan_.union_too_large(kv_heads());
    if (columns_gathered_) gather_columns();
    for (const int64_t pairs : index::rank_step_pairs(*index_, layout_, place.cp_rank, true))
      pairs_ += static_cast<double>(pairs);
    choose(kernels::Direction::kForward, forward_);
    choose(kernels::Direction::kBackward, backward_);
  }

  void forward(Times& times) override {
    forget_forward();
    time_on(device_, times, [&] { run_forward(); });
  }

  void backward(Times& times) override {
    MT_CHECK_ARG(out_.defined(), "backward: expected a forward before it");
    forget_gradients();
    time_on(device_, times, [&] { run_backward(); });
  }

  void index(Times& times, const pattern::VerticalSlashOptions& options) override {
    MT_CHECK_ARG(place_.cp_size == 1, "index: expected one rank, got cp_size ", place_.cp_size,
                 ": the estimation of several ranks needs all of them");
    const at::Tensor q = inputs_.q.unsqueeze(0), k = inputs_.k.unsqueeze(0);
    time_on(device_, times, [&] { torch_ops::build_index_on_device(q, k, {}, 0, options); });
  }

  double pairs() const override { return pairs_; }

  std::vector<double> out() const override {
    const at::Tensor values = (out_.to(at::kCPU, at::kDouble) + residual_.cpu()).contiguous();
    return {values.const_data_ptr<double>(), values.const_data_ptr<double>() + values.numel()};
  }

  void add_facts(Json& row, int repeats) override {
    row["backend"] = {{"forward", concat(to_string(forward_.backend), ", ", forward_.tile)},
                      {"backward", concat(to_string(backward_.backend), ", ", backward_.tile)}};
    row["deterministic"] = place_.deterministic;
    forget_forward();
    forget_gradients();
    row["peak_bytes"] = peak_bytes(device_, [&] {
      run_forward();
      run_backward();
    });
    row.update(errors());
    row["fwd_kernels"] = kernels_of(device_, [&] { run_forward(); });
    row["bwd_kernels"] = kernels_of(device_, [&] { run_backward(); });
    forget_forward();
    forget_gradients();
    // Operators take the back end that dispatch chooses.
    if (place_.cp_size == 1 && place_.backend.empty()) add_operators(row, repeats);
  }

 private:
  int kv_heads() const { return static_cast<int>(sizes_.num_kv_heads); }

  /// Rows of `whole` [S, heads, D] that a rank holds, [1, n, heads, D]; padding rows are zero.
  at::Tensor shard_of(const at::Tensor& whole, int cp_rank) const {
    if (place_.cp_size == 1 && layout_.tokens_per_rank() == sizes_.seq_len)
      return whole.unsqueeze(0);
    const std::vector<int64_t> positions = layout_.positions(cp_rank);
    const at::Tensor rows = at::tensor(positions, at::kLong).to(device_);
    at::Tensor shard = whole.index_select(0, rows.clamp_max(sizes_.seq_len - 1));
    shard.masked_fill_((rows >= sizes_.seq_len).view({-1, 1, 1}), 0);
    return shard.unsqueeze(0);
  }

  void gather_columns() {
    for (const index::ColumnSlice& slice :
         plan_.column_plan(kv_heads(), kColumnRowsPerRank).slices) {
      const int64_t rows = slice.rows_per_rank;
      at::Tensor k = at::zeros({place_.cp_size * rows, sizes_.head_dim}, inputs_.k.options());
      at::Tensor v = at::zeros_like(k);
      for (int rank = 0; rank < place_.cp_size; ++rank) {
        std::vector<int64_t> offsets, heads;
        for (const index::PackedRow& row : slice.rows[rank]) {
          offsets.push_back(row.offset);
          heads.push_back(row.kv_head);
        }
        if (offsets.empty()) continue;
        const at::Tensor at_offsets = at::tensor(offsets, at::kLong).to(device_);
        const at::Tensor at_heads = at::tensor(heads, at::kLong).to(device_);
        const auto count = static_cast<int64_t>(offsets.size());
        k.narrow(0, rank * rows, count).copy_(sources_[rank].k[0].index({at_offsets, at_heads}));
        v.narrow(0, rank * rows, count).copy_(sources_[rank].v[0].index({at_offsets, at_heads}));
      }
      sources_.push_back({.k = k, .v = v, .starts = {}, .slice = &slice});
    }
  }

  void choose(kernels::Direction direction, kernels::Choice& choice) const {
    kernels::Request request;
    request.direction = direction;
    request.device = kernels::current_cuda_device();
    request.dtype = sizes_.dtype;
    request.head_dim = sizes_.head_dim;
    request.columns = has_columns_;
    request.position_stride = layout_.position_stride();
    request.rows_aligned = attention::rows_are_aligned(q_) &&
                           attention::rows_are_aligned(sources_[0].k) &&
                           attention::rows_are_aligned(sources_[0].v);
    choice = kernels::choose(request);
    if (place_.backend.empty() || place_.backend == to_string(choice.backend)) return;
    // An older one: its launch refuses what it cannot run.
    for (const kernels::Kernel& kernel : kernels::kernel_table()) {
      if (kernel.direction != direction || to_string(kernel.backend) != place_.backend) continue;
      MT_CHECK_SUPPORTED(request.device.capability() >= kernel.min_capability &&
                             request.device.capability() <= kernel.max_capability,
                         "--backend ", place_.backend, ": this GPU has compute capability ",
                         request.device.major, ".", request.device.minor);
      choice = {kernel.backend, kernel.tile};
    }
  }

  /// Columns' rows carry no batch and no head: each names its own.
  static kernels::ConstView rows_of(const at::Tensor& rows) {
    return rows.dim() == 4 ? const_view(rows)
                           : kernels::ConstView{rows.const_data_ptr(), 0, rows.size(1), 0};
  }
  static kernels::View writable_rows_of(at::Tensor& rows) {
    return rows.dim() == 4 ? view(rows) : kernels::View{rows.data_ptr(), 0, rows.size(1), 0};
  }

  /// Parameters but for what only one direction has; `sources` must live as long.
  void fill(kernels::AttentionParams& p, std::vector<kernels::KeySource>& sources, bool backward) {
    for (size_t i = 0; i < sources_.size(); ++i) {
      Source& held = sources_[i];
      kernels::KeySource& source = sources.emplace_back();
      source.k = rows_of(held.k);
      source.v = rows_of(held.v);
      source.num_keys = held.k.size(held.k.dim() == 4 ? 1 : 0);
      if (held.slice != nullptr) {
        source.columns = plan_.slice_lists(*held.slice, device_);
      } else {
        const int rank = static_cast<int>(i);
        source.block_starts = uploads_.get(held.starts, device_);
        source.blocks = plan_.block_lists(rank, device_, backward);
        if (has_columns_ && !columns_gathered_) source.columns = plan_.column_lists(rank, device_);
      }
      if (backward) {
        source.dk = writable_rows_of(held.dk);
        source.dv = writable_rows_of(held.dv);
      }
    }
    p.batch = 1;
    p.num_queries = layout_.tokens_per_rank();
    p.num_q_heads = sizes_.num_q_heads;
    p.num_kv_heads = sizes_.num_kv_heads;
    p.head_dim = sizes_.head_dim;
    p.dtype = sizes_.dtype;
    p.softmax_scale = scale_of(sizes_);
    p.seq_len = sizes_.seq_len;
    p.q = const_view(q_);
    p.q_block_starts = uploads_.get(starts_, device_);
    p.position_stride = layout_.position_stride();
    p.sources = sources.data();
    p.num_sources = static_cast<int>(sources.size());
    if (has_columns_) {
      p.diagonal_bits = plan_.bitmap_words(device_);
      p.diagonal_words = plan_.bitmap().words;
    }
    p.stream = attention::current_stream(device_);
  }

  template <typename Params>
  at::Tensor give_workspace(kernels::Backend backend, Params& params) const {
    const int64_t bytes = kernels::workspace_bytes(backend, params);
    at::Tensor workspace =
        at::empty({std::max<int64_t>(bytes, 256)}, inputs_.q.options().dtype(at::kByte));
    params.workspace = workspace.data_ptr();
    params.workspace_bytes = workspace.numel();
    return workspace;
  }

  void run_forward() {
    const at::TensorOptions held = inputs_.q.options().dtype(at::kFloat);
    out_ = at::empty(q_.sizes(), q_.options());
    residual_ = at::empty(q_.sizes(), q_.options());
    lse_ = at::empty({1, sizes_.num_q_heads, q_.size(1)}, held);
    kernels::ForwardParams params;
    std::vector<kernels::KeySource> sources;
    fill(params, sources, false);
    at::Tensor state;
    params.rounded = view(out_);
    params.residual = view(residual_);
    if (kernels::needs_out(forward_.backend, params)) {
      state = at::empty(q_.sizes(), held);
      params.out = view(state);
    }
    params.lse = lse_.data_ptr();
    const at::Tensor workspace = give_workspace(forward_.backend, params);
    kernels::forward(forward_.backend, params);
  }

  void run_backward() {
    const at::TensorOptions held = inputs_.q.options().dtype(at::kFloat);
    dq_ = at::zeros(q_.sizes(), held);
    for (Source& source : sources_) {
      source.dk = at::zeros(source.k.sizes(), held);
      source.dv = at::zeros(source.v.sizes(), held);
    }
    at::Tensor delta = at::empty(lse_.sizes(), held);
    kernels::BackwardParams params;
    std::vector<kernels::KeySource> sources;
    fill(params, sources, true);
    params.dout = const_view(dout_);
    params.lse = lse_.const_data_ptr();
    params.delta = delta.const_data_ptr();
    params.dq = view(dq_);
    params.deterministic = place_.deterministic;
    const at::Tensor workspace = give_workspace(backward_.backend, params);
    kernels::delta(backward_.backend, params, {const_view(out_), const_view(residual_)},
                   delta.data_ptr());
    kernels::backward(backward_.backend, params);
  }

  void forget_forward() {
    out_.reset();
    residual_.reset();
    lse_.reset();
  }
  void forget_gradients() {
    dq_.reset();
    for (Source& source : sources_) {
      source.dk.reset();
      source.dv.reset();
    }
  }

  Json errors() {
    run_forward();
    run_backward();
    const AskedAttention asked{.q = q_[0],
                               .dout = dout_[0],
                               .k = inputs_.k,
                               .v = inputs_.v,
                               .positions = positions_,
                               .index = index_.get(),
                               .softmax_scale = scale_of(sizes_)};
    const at::Tensor out = out_[0].to(at::kFloat) + residual_[0];
    ComputedAttention computed{.out = out, .dq = dq_[0], .lse = lse_[0], .dk = {}, .dv = {}};
    if (place_.cp_size == 1) {  // a rank of several has a part of them only
      computed.dk = sources_[0].dk[0];
      computed.dv = sources_[0].dv[0];
    }
    return sampled_errors(asked, computed, kSampledRows, 1);
  }

  /// What a user calls: lists from index tensors and rounding included.
  void add_operators(Json& row, int repeats) {
    torch_ops::AttendInputs call;
    call.q = inputs_.q.unsqueeze(0);
    call.k = inputs_.k.unsqueeze(0);
    call.v = inputs_.v.unsqueeze(0);
    int64_t columns = 1;
    for (const int64_t count : index_->columns.counts) columns = std::max(columns, count);
    torch_ops::IndexTensors lists =
        torch_ops::to_tensors(*index_, torch_ops::diagonal_capacity(sizes_.seq_len), columns);
    for (at::Tensor* tensor :
         {&lists.diagonals, &lists.num_diagonals, &lists.columns, &lists.num_columns})
      *tensor = tensor->to(device_);
    call.index = lists;
    const at::Tensor dout = inputs_.dout.unsqueeze(0);
    const bool before = at::globalContext().deterministicAlgorithms();
    at::globalContext().setDeterministicAlgorithms(place_.deterministic, true);
    const bool fills = at::globalContext().deterministicFillUninitializedMemory();
    at::globalContext().setDeterministicFillUninitializedMemory(false);
    Times forward, backward;
    for (int repeat = -1; repeat < repeats; ++repeat) {
      torch_ops::Attended attended;
      Times skipped;
      time_on(device_, repeat < 0 ? skipped : forward,
              [&] { attended = torch_ops::attend_on_device(call); });
      time_on(device_, repeat < 0 ? skipped : backward,
              [&] { torch_ops::attend_backward_on_device(call, dout, attended); });
    }
    at::globalContext().setDeterministicAlgorithms(before, true);
    at::globalContext().setDeterministicFillUninitializedMemory(fills);
    const auto median = [](const Times& times) { return rounded(spread(times.wall_ms).median); };
    row["op_fwd_ms"] = median(forward);
    row["op_bwd_ms"] = median(backward);
  }

  LaunchPlace place_;
  AttentionSizes sizes_;
  DeviceInputs inputs_;
  std::shared_ptr<const index::Index> index_;
  layout::Layout layout_;
  attention::IndexPlan plan_;
  at::Device device_;
  std::vector<int64_t> positions_;
  std::vector<int32_t> starts_;
  attention::ListUploads uploads_;
  at::Tensor q_, dout_, out_, residual_, lse_, dq_;
  std::vector<Source> sources_;  // filled once: uploads are by address
  bool has_columns_ = false, columns_gathered_ = false;
  kernels::Choice forward_, backward_;
  double pairs_ = 0;
};

}  // namespace

DeviceInputs make_device_inputs(const LaunchPlace& place, const AttentionSizes& sizes,
                                uint64_t seed) {
  check(sizes);
  MT_CHECK_SUPPORTED(
      sizes.dtype == kernels::DType::kBFloat16 || sizes.dtype == kernels::DType::kFloat16,
      "--dtype: expected bf16 or fp16 with --device cuda, got ", bench::to_string(sizes.dtype));
  const at::Device device = torch_device(place);
  at::Generator random = at::globalContext().defaultGenerator(device).clone();
  random.set_current_seed(seed);
  const auto normal = [&](at::IntArrayRef shape) {
    return at::randn(shape, random, at::TensorOptions().dtype(at::kFloat).device(device));
  };
  const int64_t half = sizes.head_dim / 2;
  const at::TensorOptions floats = at::TensorOptions().dtype(at::kFloat).device(device);
  const at::Tensor step = at::pow(1e4, -at::arange(half, floats) / static_cast<double>(half));
  const at::Tensor angle = at::arange(sizes.seq_len, floats).unsqueeze(1) * step;
  const at::Tensor cosine = angle.cos().unsqueeze(1), sine = angle.sin().unsqueeze(1);
  const auto rotated = [&](const at::Tensor& x) {
    const at::Tensor a = x.narrow(2, 0, half), b = x.narrow(2, half, half);
    return at::cat({a * cosine - b * sine, a * sine + b * cosine}, 2);
  };
  const at::Tensor mean = normal({1, 1, sizes.head_dim});
  const at::Tensor sharpness = at::linspace(2, 0.5, sizes.num_q_heads, floats).view({1, -1, 1});
  at::Tensor q =
      rotated(sharpness * mean + 0.5 * normal({sizes.seq_len, sizes.num_q_heads, sizes.head_dim}));
  at::Tensor k =
      rotated(1.5 * mean + 0.5 * normal({sizes.seq_len, sizes.num_kv_heads, sizes.head_dim}));
  const at::Tensor liked = at::randint(sizes.seq_len, {std::max<int64_t>(1, sizes.seq_len / 50)},
                                       random, floats.dtype(at::kLong));
  k.index_put_({liked}, k.index({liked}) + 0.5 * q.mean(at::IntArrayRef{0, 1}));
  const at::ScalarType dtype = scalar_type(sizes.dtype);
  DeviceInputs inputs{.q = q.to(dtype),
                      .k = k.to(dtype),
                      .v = normal({sizes.seq_len, sizes.num_kv_heads, sizes.head_dim}).to(dtype),
                      .dout = normal({sizes.seq_len, sizes.num_q_heads, sizes.head_dim}).to(dtype),
                      .digest = ""};
  std::string all;
  for (const at::Tensor* tensor : {&inputs.q, &inputs.k, &inputs.v, &inputs.dout}) {
    const at::Tensor bytes = tensor->cpu();
    all += digest(bytes.const_data_ptr(), static_cast<int64_t>(bytes.nbytes()));
  }
  inputs.digest = digest(all.data(), static_cast<int64_t>(all.size()));
  return inputs;
}

std::unique_ptr<AttentionLaunch> make_device_launch(const LaunchPlace& place,
                                                    const AttentionSizes& sizes,
                                                    const DeviceInputs& inputs,
                                                    const index::Index& index) {
  check(place, sizes);
  return std::make_unique<DeviceLaunch>(place, sizes, inputs, index);
}

AttentionArms device_arms(const AttentionBenchOptions& options, const DeviceInputs& inputs) {
  return {.device = device_name(options.place),
          .inputs = inputs.digest,
          .launch =
              [&options, &inputs](const index::Index& index) {
                return make_device_launch(options.place, options.sizes, inputs, index);
              },
          .peer =
              [&inputs] {
                return std::make_unique<SdpaPeer>(inputs.q, inputs.k, inputs.v, inputs.dout);
              }};
}

index::Index choose_device_index(const DeviceInputs& inputs,
                                 const pattern::VerticalSlashOptions& options) {
  torch_ops::IndexTensors chosen = torch_ops::build_index_on_device(
      inputs.q.unsqueeze(0), inputs.k.unsqueeze(0), {}, 0, options);
  for (at::Tensor* tensor : {&chosen.diagonals, &chosen.num_diagonals, &chosen.columns,
                             &chosen.num_columns, &chosen.dense_heads, &chosen.caps_hit})
    *tensor = tensor->cpu();
  return torch_ops::from_tensors(chosen, inputs.q.size(0));
}

}  // namespace mtraining::bench
