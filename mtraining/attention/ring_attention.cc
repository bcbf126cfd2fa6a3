#include "mtraining/attention/ring_attention.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "mtraining/attention/column_exchange.h"
#include "mtraining/attention/dense_alone.h"
#include "mtraining/attention/ring_call.h"
#include "mtraining/attention/ring_context.h"
#include "mtraining/attention/ring_pass.h"
#include "mtraining/attention/tensors.h"
#include "mtraining/base/check.h"
#include "mtraining/kernels/launch.h"

namespace mtraining::attention {
namespace {

/// The columns of one call: exchanged once, or taken from each source as it comes. Where one launch has all sources they are there anyway.
bool columns_are_exchanged(RingContext::State& state, IndexPlan& plan, int num_kv_heads) {
  return plan.has_columns() && state.options.columns == ColumnMode::kOnce &&
         ring::num_launches(state.forward) > 1 && !plan.union_too_large(num_kv_heads);
}

/// What chooses the kernels of a call on a GPU.
kernels::Request request_of(const RingContext::State& state, IndexPlan& plan, const RingCall& call,
                            kernels::Direction direction) {
  kernels::Request request;
  request.direction = direction;
  request.device = kernels::current_cuda_device();
  request.dtype = kernel_dtype(call.q, "q");
  request.head_dim = call.q.size(3);
  request.columns = plan.has_columns();
  request.position_stride = state.layout.position_stride();
  request.rows_aligned =
      rows_are_aligned(call.q) && rows_are_aligned(call.k) && rows_are_aligned(call.v);
  // torch's backward adds up in no fixed order.
  const bool any_order = direction == kernels::Direction::kForward || !state.options.deterministic;
  request.dense_alone =
      state.layout.cp_size() == 1 && plan.is_dense() && !call.document_start.defined() && any_order;
  return request;
}

bool is_torchs(const RingContext::State& state, IndexPlan& plan, const RingCall& call,
               kernels::Direction direction) {
  return !call.q.is_cpu() && kernels::choose(request_of(state, plan, call, direction)).backend ==
                                 kernels::Backend::kTorch;
}

/// Which launch takes the exchanged columns along, by its operation. Forward: the last one, under which all else has arrived. Backward:
/// the second one, so that they travel under the first, and their gradients home under the others.
int launch_with_columns(const ring::Schedule& schedule, kernels::Direction direction) {
  std::vector<int> launches;
  for (const ring::Op& op : schedule.ops) {
    if (op.kind == ring::OpKind::kLaunch) launches.push_back(op.id);
  }
  return direction == kernels::Direction::kForward
             ? launches.back()
             : launches[std::min<size_t>(1, launches.size() - 1)];
}

/// What a launch of either direction needs besides its sources.
class Launcher {
 public:
  Launcher(RingContext::State& state, IndexPlan& plan, RingSlots& slots, const RingCall& call,
           bool columns_exchanged, kernels::Direction direction)
      : state_(state),
        plan_(plan),
        slots_(slots),
        device_(call.q.device()),
        by_key_too_(direction == kernels::Direction::kBackward && !device_.is_cpu()),
        with_columns_(plan.has_columns() && !columns_exchanged) {
    common_.batch = call.q.size(0);
    common_.num_queries = call.q.size(1);
    common_.num_q_heads = call.q.size(2);
    common_.num_kv_heads = call.k.size(2);
    common_.head_dim = call.q.size(3);
    common_.dtype = kernel_dtype(call.q, "q");
    common_.softmax_scale = call.softmax_scale;
    common_.seq_len = state.layout.seq_len();
    common_.q = const_view(call.q);
    common_.q_block_starts = state.uploads.get(state.block_starts[state.cp_rank], device_);
    common_.position_stride = state.layout.position_stride();
    if (call.document_start.defined()) {
      common_.document_start = call.document_start.const_data_ptr<int32_t>();
      common_.document_stride_batch = call.document_start.stride(0);
    }
    if (plan.has_columns()) {
      common_.diagonal_bits = plan.bitmap_words(device_);
      common_.diagonal_words = plan.bitmap_words_a_row();
    }
    if (device_.is_cpu()) return;
    backend_ = kernels::choose(request_of(state, plan, call, direction)).backend;
    common_.stream = current_stream(device_);
  }

  kernels::Backend backend() const { return backend_; }
  /// Called last: how much it is depends on all else. One launch's is the next one's, in the order of the stream.
  template <typename Params>
  void give_workspace(Params& params) const {
    const int64_t bytes = kernels::workspace_bytes(backend_, params);
    if (bytes == 0) return;
    at::Tensor workspace = state_.buffers.get("workspace", {bytes}, at::kByte, device_);
    params.workspace = workspace.mutable_data_ptr();
    params.workspace_bytes = bytes;
  }

  /// The sources of a ring launch, with gradients where the schedule names slots for them.
  std::vector<kernels::KeySource> sources_of(const ring::Op& op) {
    std::vector<kernels::KeySource> sources;
    for (const ring::SourceRef& ref : op.sources) {
      kernels::KeySource& source = sources.emplace_back();
      source.k = const_view(slots_.k(ref.kv_slot));
      source.v = const_view(slots_.v(ref.kv_slot));
      source.num_keys = slots_.k(ref.kv_slot).size(1);
      source.block_starts = state_.uploads.get(state_.block_starts[ref.source_rank], device_);
      source.blocks = plan_.block_lists(ref.source_rank, device_, by_key_too_);
      if (with_columns_) source.columns = plan_.column_lists(ref.source_rank, device_);
      if (ref.grad_slot >= 0) {
        source.dk = view(slots_.dk(ref.grad_slot));
        source.dv = view(slots_.dv(ref.grad_slot));
      }
    }
    return sources;
  }

  /// under_way: transfers that need multiprocessors while the launch runs.
  template <typename Params>
  void fill(Params& params, const std::vector<kernels::KeySource>& sources, bool under_way) const {
    static_cast<kernels::AttentionParams&>(params) = common_;
    if (under_way && !device_.is_cpu()) params.sm_margin = state_.options.sm_margin;
    params.sources = sources.data();
    params.num_sources = static_cast<int>(sources.size());
  }

  /// Counted only where somebody listens.
  int64_t pairs_of(const ring::Op& op) {
    int64_t pairs = 0;
    for (const ring::SourceRef& source : op.sources) {
      if (!state_.observer) break;
      pairs += plan_.block_pairs(source.source_rank) +
               (with_columns_ ? plan_.column_pairs(source.source_rank) : 0);
    }
    return pairs;
  }
  int64_t exchanged_column_pairs() {
    int64_t pairs = 0;
    for (int r = 0; state_.observer && r < state_.layout.cp_size(); ++r)
      pairs += plan_.column_pairs(r);
    return pairs;
  }

 private:
  RingContext::State& state_;
  IndexPlan& plan_;
  RingSlots& slots_;
  at::Device device_;
  bool by_key_too_;
  bool with_columns_;
  kernels::Backend backend_ = kernels::Backend::kRef;
  kernels::AttentionParams common_;
};

}  // namespace

namespace {

/// As q, in the type of the state: of this call alone. On a GPU others use the memory between two calls; on the CPU, where new memory
/// is slow, it is kept.
at::Tensor state_rows(RingContext::State& state, const at::Tensor& q, at::ScalarType held) {
  return q.is_cpu() ? state.buffers.get("out or dq", q.sizes(), held, q.device())
                    : at::empty(q.sizes(), q.options().dtype(held));
}

}  // namespace

StartedForward::StartedForward(RingContext::State& state, RingCall checked)
    : call(std::move(checked)),
      slots(state.buffers, state.forward, call.k, call.v, state_type(call.q.scalar_type()),
            state_type(call.q.scalar_type())),
      pass(state, state.forward, slots) {
  // In host memory whoever is late would read what an error of this rank has freed.
  if (!call.q.is_cpu()) pass.begin();
}

ForwardResult ring_forward(RingContext::State& state, IndexPlan& plan, const RingCall& call) {
  StartedForward started(state, call);
  return ring_forward(state, plan, started);
}

ForwardResult ring_forward(RingContext::State& state, IndexPlan& plan, StartedForward& started) {
  const RingCall& call = started.call;
  RingSlots& slots = started.slots;
  RingPass& pass = started.pass;
  const at::ScalarType dtype = call.q.scalar_type(), held = state_type(dtype);
  const at::Device device = call.q.device();
  state.forward_by_torch = is_torchs(state, plan, call, kernels::Direction::kForward);
  if (state.forward_by_torch) {
    auto stretch = state.begin_stretch(device);
    const ForwardResult result =
        dense_alone_forward(call.q, call.k, call.v, state.layout.seq_len(), call.softmax_scale);
    state.end_stretch(std::move(stretch), "forward", 0, state.observer ? plan.block_pairs(0) : 0);
    return result;
  }
  const at::TensorOptions state_options = at::TensorOptions().dtype(held).device(device);
  const bool rounds = held != dtype;
  // The result; in the type of the state, where it has another, only between launches.
  at::Tensor out = at::empty(call.q.sizes(), state_options.dtype(dtype)), residual, between;
  if (rounds) residual = at::empty_like(out);
  at::Tensor lse = at::empty({call.q.size(0), call.q.size(2), call.q.size(1)}, state_options);

  const bool exchanged = columns_are_exchanged(state, plan, static_cast<int>(call.k.size(2)));
  Launcher launcher(state, plan, slots, call, exchanged, kernels::Direction::kForward);
  bool first = true;
  const auto launch = [&](const std::vector<kernels::KeySource>& sources, bool under_way,
                          bool last) {
    kernels::ForwardParams params;
    launcher.fill(params, sources, under_way);
    params.lse = lse.data_ptr();
    params.first = std::exchange(first, false);
    if (!rounds) params.out = view(out);
    if (rounds && last) {
      params.rounded = view(out);
      params.residual = view(residual);
    }
    if (rounds && kernels::needs_out(launcher.backend(), params)) {
      if (!between.defined()) between = state_rows(state, call.q, held);
      params.out = view(between);
    }
    launcher.give_workspace(params);
    kernels::forward(launcher.backend(), params);
  };

  std::optional<ColumnExchange> columns;
  const int last_op = launch_with_columns(state.forward, kernels::Direction::kForward);
  const int with_columns = exchanged ? last_op : -1;
  int attended_slices = 0;
  const auto post_columns = [&] {
    columns.emplace(
        state, plan,
        plan.column_plan(static_cast<int>(call.k.size(2)), state.options.max_column_rows_per_rank),
        call.k, call.v);
    // They travel under the ring.
    for (int slice = 0; slice < columns->num_slices_beside_shards(); ++slice)
      columns->post_gather(slice);
  };
  if (exchanged && device.is_cpu()) post_columns();
  pass.run([&](const ring::Op& op) {
    if (op.id == with_columns && !columns) post_columns();
    std::vector<kernels::KeySource> sources = launcher.sources_of(op);
    if (op.id == with_columns) {
      for (; attended_slices < columns->num_slices_beside_shards(); ++attended_slices)
        sources.push_back(columns->gathered(attended_slices));
    }
    auto stretch = state.begin_stretch(device);
    launch(sources, pass.needs_multiprocessors() || (columns && columns->needs_multiprocessors()),
           op.id == last_op && (!columns || attended_slices == columns->num_slices()));
    state.end_stretch(
        std::move(stretch), "forward", op.ring_step,
        launcher.pairs_of(op) + (op.id == with_columns ? launcher.exchanged_column_pairs() : 0));
    // A GPU attends to the first shards while the host plans.
    if (exchanged && !columns) post_columns();
  });
  for (int slice = attended_slices; columns && slice < columns->num_slices(); ++slice) {
    if (slice == attended_slices) columns->post_gather(slice);
    if (slice + 1 < columns->num_slices()) columns->post_gather(slice + 1);
    const kernels::KeySource source = columns->gathered(slice);
    auto stretch = state.begin_stretch(device);
    launch({source}, columns->needs_multiprocessors(), slice + 1 == columns->num_slices());
    state.end_stretch(std::move(stretch), "columns", slice, 0);
  }
  return {out, lse, residual};
}

namespace {

/// rowsum(dout * out) into delta [B, H, n]. `params` has all but that.
void compute_delta(kernels::Backend backend, const kernels::BackwardParams& params,
                   const ForwardResult& saved, at::Tensor& delta) {
  const auto rows = [](const at::Tensor& tensor) {
    return tensor.is_cpu() ? with_contiguous_rows(tensor) : with_aligned_rows(tensor);
  };
  const at::Tensor out = rows(saved.out);
  kernels::RoundedOut read = {const_view(out), {}};
  at::Tensor residual;
  if (saved.out_residual.defined()) {
    residual = rows(saved.out_residual);
    read.residual = const_view(residual);
  }
  kernels::delta(backend, params, read, delta.data_ptr());
}

}  // namespace

BackwardResult ring_backward(RingContext::State& state, IndexPlan& plan, RingCall call,
                             at::Tensor dout, ForwardResult saved) {
  const at::Tensor lse = saved.lse;
  const at::ScalarType dtype = call.q.scalar_type(), held = state_type(dtype);
  const at::Device device = call.q.device();
  if (is_torchs(state, plan, call, kernels::Direction::kBackward)) {
    auto stretch = state.begin_stretch(device);
    const BackwardResult result = dense_alone_backward(dout, call.q, call.k, call.v, saved,
                                                       state.layout.seq_len(), call.softmax_scale);
    state.end_stretch(std::move(stretch), "backward", 0, state.observer ? plan.block_pairs(0) : 0);
    return result;
  }
  const at::ScalarType wire =
      state.options.gradient_transport == GradientTransport::kBFloat16 ? at::kBFloat16 : held;
  at::Tensor dq, dq_rounded;  // when out has gone
  at::Tensor delta = state.buffers.get("delta", lse.sizes(), held, device);

  const bool exchanged = columns_are_exchanged(state, plan, static_cast<int>(call.k.size(2)));
  RingSlots slots(state.buffers, state.backward, call.k, call.v, held, wire);
  RingPass pass(state, state.backward, slots);
  pass.begin();
  Launcher launcher(state, plan, slots, call, exchanged, kernels::Direction::kBackward);
  const auto fill = [&](kernels::BackwardParams& params,
                        const std::vector<kernels::KeySource>& sources, bool under_way) {
    launcher.fill(params, sources, under_way);
    params.dout = const_view(dout);
    params.lse = lse.const_data_ptr();
    params.delta = delta.const_data_ptr();
    if (dq.defined()) params.dq = view(dq);
    if (dq_rounded.defined()) params.dq_rounded = view(dq_rounded);
    params.deterministic = state.options.deterministic;
  };
  bool rounds_dq = false;
  {
    kernels::BackwardParams params;
    fill(params, {}, false);
    compute_delta(launcher.backend(), params, saved, delta);
    // One launch has all shards, and their columns: nothing is added to dq afterwards.
    params.num_sources = state.layout.cp_size();
    rounds_dq = held != dtype && ring::num_launches(state.backward) == 1 &&
                kernels::rounds_dq(launcher.backend(), params);
  }
  saved = {};
  if (rounds_dq) {
    dq_rounded = at::empty(call.q.sizes(), call.q.options());
  } else {
    dq = state_rows(state, call.q, held).zero_();
  }
  const auto launch = [&](const std::vector<kernels::KeySource>& sources, bool under_way) {
    kernels::BackwardParams params;
    fill(params, sources, under_way);
    launcher.give_workspace(params);
    kernels::backward(launcher.backend(), params);
  };

  std::optional<ColumnExchange> columns;
  const int with_columns =
      exchanged ? launch_with_columns(state.backward, kernels::Direction::kBackward) : -1;
  if (exchanged) {
    columns.emplace(
        state, plan,
        plan.column_plan(static_cast<int>(call.k.size(2)), state.options.max_column_rows_per_rank),
        call.k, call.v);
    for (int slice = 0; slice < columns->num_slices_beside_shards(); ++slice)
      columns->post_gather(slice);
  }
  const auto gathered = [&](int slice) {
    kernels::KeySource source = columns->gathered(slice);
    columns->add_gradient_buffers(slice, source, held);
    return source;
  };
  pass.run([&](const ring::Op& op) {
    std::vector<kernels::KeySource> sources = launcher.sources_of(op);
    const int beside = op.id == with_columns ? columns->num_slices_beside_shards() : 0;
    for (int slice = 0; slice < beside; ++slice) sources.push_back(gathered(slice));
    auto stretch = state.begin_stretch(device);
    launch(sources, pass.needs_multiprocessors() || (columns && columns->needs_multiprocessors()));
    state.end_stretch(std::move(stretch), "backward", op.ring_step,
                      launcher.pairs_of(op) + (beside > 0 ? launcher.exchanged_column_pairs() : 0));
    if (beside == 0) return;
    for (int slice = 0; slice < beside; ++slice) columns->post_reduce(slice, wire);
    for (int slice = beside; slice < columns->num_slices(); ++slice) {
      if (slice == beside) columns->post_gather(slice);
      if (slice + 1 < columns->num_slices()) columns->post_gather(slice + 1);
      const kernels::KeySource source = gathered(slice);
      auto columns_stretch = state.begin_stretch(device);
      launch({source}, true);
      state.end_stretch(std::move(columns_stretch), "columns", slice, 0);
      columns->post_reduce(slice, wire);  // travels under the ring
    }
  });
  at::Tensor& dk = slots.dk(state.backward.home_grad_slot);
  at::Tensor& dv = slots.dv(state.backward.home_grad_slot);
  if (columns) columns->add_reduced_to(dk, dv);
  // Nothing reads them any more.
  columns.reset();
  slots.release_own();
  call = {};
  dout.reset();
  // Copies: the buffers belong to the next call.
  return {rounds_dq ? dq_rounded : dq.to(dtype, false, true), dk.to(dtype, false, true),
          dv.to(dtype, false, true)};
}

namespace {

/// A plan of an index that only this call knows.
IndexPlan plan_of(const RingContext::State& state, const index::Index& index) {
  return {std::shared_ptr<const index::Index>(std::shared_ptr<const index::Index>(), &index),
          state.layout, state.cp_rank};
}

}  // namespace

ForwardResult ring_forward(RingContext& context, const at::Tensor& q, const at::Tensor& k,
                           const at::Tensor& v, const index::Index& index, double softmax_scale,
                           const at::Tensor& document_starts) {
  IndexPlan plan = plan_of(context.state(), index);
  return ring_forward(
      context.state(), plan,
      checked_call(context.state(), plan, "forward", q, k, v, softmax_scale, document_starts));
}

BackwardResult ring_backward(RingContext& context, const at::Tensor& dout, const at::Tensor& q,
                             const at::Tensor& k, const at::Tensor& v, const at::Tensor& out,
                             const at::Tensor& lse, const index::Index& index, double softmax_scale,
                             const at::Tensor& document_starts, const at::Tensor& out_residual) {
  IndexPlan plan = plan_of(context.state(), index);
  return checked_backward(context.state(), plan, {dout, q, k, v, {out, lse, out_residual}},
                          softmax_scale, document_starts);
}

BackwardResult checked_backward(RingContext::State& state, IndexPlan& plan, BackwardInputs inputs,
                                double softmax_scale, const at::Tensor& document_starts) {
  check_gradient_inputs(inputs.q, inputs.dout, inputs.saved);
  RingCall call = checked_call(state, plan, "backward", inputs.q, inputs.k, inputs.v, softmax_scale,
                               document_starts);
  at::Tensor dout = without_padding(state, call.q.is_cpu() || rows_are_aligned(inputs.dout)
                                               ? with_contiguous_rows(inputs.dout)
                                               : inputs.dout.clone(at::MemoryFormat::Contiguous));
  ForwardResult saved = std::move(inputs.saved);
  saved.lse = saved.lse.contiguous();
  inputs = {};
  return ring_backward(state, plan, std::move(call), std::move(dout), std::move(saved));
}

ForwardResult ring_forward(RingContext& context, const at::Tensor& q, const at::Tensor& k,
                           const at::Tensor& v, const std::shared_ptr<const index::Index>& index,
                           double softmax_scale, const at::Tensor& document_starts) {
  RingContext::State& state = context.state();
  const c10::DeviceGuard guard(q.device());
  const std::shared_ptr<IndexPlan> plan =
      state.plans.find_or_make(index, state.layout, state.cp_rank);
  return ring_forward(
      state, *plan, checked_call(state, *plan, "forward", q, k, v, softmax_scale, document_starts));
}

BackwardResult ring_backward(RingContext& context, BackwardInputs inputs,
                             const std::shared_ptr<const index::Index>& index, double softmax_scale,
                             const at::Tensor& document_starts) {
  RingContext::State& state = context.state();
  const c10::DeviceGuard guard(inputs.q.device());
  const std::shared_ptr<IndexPlan> plan =
      state.plans.find_or_make(index, state.layout, state.cp_rank);
  return checked_backward(state, *plan, std::move(inputs), softmax_scale, document_starts);
}

}  // namespace mtraining::attention
