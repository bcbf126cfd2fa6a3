#include "mtraining/attention/autograd.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/custom_function.h>

#include <utility>

#ifdef MT_WITH_CUDA
#include "mtraining/attention/block_lists.h"
#include "mtraining/attention/device_index.h"
#endif
#include "mtraining/attention/local_attention.h"
#include "mtraining/attention/ring_call.h"
#include "mtraining/attention/ring_context.h"
#include "mtraining/attention/tensors.h"
#include "mtraining/base/check.h"

namespace mtraining::attention {
namespace {

/// What backward needs besides tensors. The context must outlive the graph: its owner, where the call names one, does.
struct SavedCall : torch::CustomClassHolder {
  std::shared_ptr<void> owner;
  RingContext* context = nullptr;
  std::shared_ptr<const index::Index> index;
  std::shared_ptr<IndexPlan> plan;  ///< of a GPU's choice, in forward; then index is still null
  std::unique_ptr<StartedForward>
      started;  ///< whose transfers are under way since before the choice, or null
  double softmax_scale = 0;
  at::Tensor document_starts;  ///< not an input of the function: autograd refuses undefined ones
  ForwardResult
      result;  ///< given, or forward's; not kept for backward, which has them as saved tensors
};

class SparseRingAttention : public torch::autograd::Function<SparseRingAttention> {
 public:
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* graph,
                                                const at::Tensor& q, const at::Tensor& k,
                                                const at::Tensor& v,
                                                const c10::intrusive_ptr<SavedCall>& saved) {
    at::AutoDispatchBelowADInplaceOrView guard;
    RingContext::State& state = saved->context->state();
    ForwardResult& result = saved->result;
    if (result.out.defined()) {
      // Autograd makes what is returned its own; the caller's tensors stay as they are.
      result.out = result.out.detach();
      result.lse = result.lse.detach();
    } else {
      const std::shared_ptr<IndexPlan> plan =
          saved->plan ? saved->plan
                      : state.plans.find_or_make(saved->index, state.layout, state.cp_rank);
      const std::unique_ptr<StartedForward> started =
          saved->started ? std::move(saved->started)
                         : std::make_unique<StartedForward>(
                               state, checked_call(state, *plan, "forward", q, k, v,
                                                   saved->softmax_scale, saved->document_starts));
      result = ring_forward(state, *plan, *started);
    }
    graph->save_for_backward({q, k, v, result.out, result.lse, result.out_residual});
    graph->saved_data["call"] = c10::IValue::make_capsule(saved);
    graph->mark_non_differentiable({result.lse});
    return {result.out, result.lse};
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* graph,
                                                 const torch::autograd::variable_list& grads) {
    MT_CHECK_SUPPORTED(
        !at::GradMode::is_enabled(),
        "sparse ring attention: a second derivative (create_graph) is not supported");
    const auto saved =
        c10::static_intrusive_pointer_cast<SavedCall>(graph->saved_data["call"].toCapsule());
    const torch::autograd::variable_list tensors = graph->get_saved_variables();
    RingContext::State& state = saved->context->state();
    const std::shared_ptr<IndexPlan> plan =
        state.plans.find_or_make(saved->index, state.layout, state.cp_rank);
    const BackwardResult result = checked_backward(
        state, *plan,
        {grads[0], tensors[0], tensors[1], tensors[2], {tensors[3], tensors[4], tensors[5]}},
        saved->softmax_scale, saved->document_starts);
    return {result.dq, result.dk, result.dv, at::Tensor()};
  }
};

index::Index choose_index(const AttentionPattern& pattern, const pattern::LocalAttention& local,
                          comm::Communicator& group) {
  switch (pattern.kind) {
    case pattern::PatternKind::kVerticalSlash:
      return pattern::build_vertical_slash(local, pattern.vertical_slash, group);
    case pattern::PatternKind::kFixed:
      return pattern::build_fixed(local, pattern.vertical_slash, pattern.budgets, group);
    case pattern::PatternKind::kXAttention:
      return pattern::build_xattention(local, pattern.xattention, group);
    case pattern::PatternKind::kMoba:
      return pattern::build_moba(local, pattern.moba, group);
    case pattern::PatternKind::kDense:
      break;
  }
  MT_ASSERT(false, "pattern ", static_cast<int>(pattern.kind), " has no index to choose");
}

#ifdef MT_WITH_CUDA
/// What a GPU chooses, enqueued: the host goes on.
std::shared_ptr<DeviceLists> choose_lists(RingContext::State& state, const AttentionCall& call,
                                          const at::Tensor& q, const at::Tensor& k,
                                          const at::Tensor& documents) {
  const AttentionPattern& pattern = call.pattern;
  if (pattern.kind == pattern::PatternKind::kXAttention)
    return block_lists_on_device(
        state, choose_xattention(state, q, k, call.softmax_scale, documents, pattern.xattention));
  if (pattern.kind == pattern::PatternKind::kMoba)
    return block_lists_on_device(state, choose_moba(state, q, k, documents, pattern.moba));
  const bool is_fixed = pattern.kind == pattern::PatternKind::kFixed;
  return lists_on_device(state, q, k, call.softmax_scale, documents,
                         is_fixed ? pattern::options_of(pattern.budgets, pattern.vertical_slash)
                                  : pattern.vertical_slash,
                         /*counts_caps=*/!is_fixed);
}
#endif

pattern::Recall measure_recall(RingContext& context, const AttentionCall& call, const at::Tensor& q,
                               const at::Tensor& k, const at::Tensor& documents,
                               const index::Index& index) {
#ifdef MT_WITH_CUDA
  if (q.is_cuda() && !index.has_blocks())
    return recall_on_device(context.state(), q, k, call.softmax_scale, documents,
                            call.pattern.vertical_slash, index, call.recall_seed);
#endif
  const at::Tensor host_q = q.cpu(), host_k = k.cpu();
  return pattern::measure_recall(local_attention(context.layout(), context.cp_rank(), host_q,
                                                 host_k, call.softmax_scale, documents),
                                 call.pattern.vertical_slash, index, context.index_group(),
                                 call.recall_seed);
}

/// What vertical_slash would choose, in the place of a given index: its time is spent, nothing is made of it.
void estimate_beside(RingContext& context, const AttentionCall& call, const at::Tensor& q,
                     const at::Tensor& k, const at::Tensor& documents) {
  RingContext::State& state = context.state();
#ifdef MT_WITH_CUDA
  if (q.is_cuda()) {
    if (state.estimated) state.estimated->check_values();
    auto stretch = state.begin_stretch(q.device());
    state.estimated =
        lists_on_device(state, q, k, call.softmax_scale, documents, call.pattern.vertical_slash);
    state.end_stretch(std::move(stretch), "index", 0, 0);
    return;
  }
#endif
  auto stretch = state.begin_stretch(q.device());
  pattern::build_vertical_slash(
      local_attention(context.layout(), context.cp_rank(), q, k, call.softmax_scale, documents),
      call.pattern.vertical_slash, context.index_group());
  state.end_stretch(std::move(stretch), "index", 0, 0);
}

/// All layers share one dense index, and so its plan.
std::shared_ptr<const index::Index> shared_dense_index(RingContext::State& state, int64_t batch,
                                                       int64_t num_q_heads) {
  if (!state.dense || state.dense->batch != batch || state.dense->num_q_heads != num_q_heads) {
    state.dense = std::make_shared<const index::Index>(index::dense_index(
        static_cast<int>(batch), static_cast<int>(num_q_heads), state.layout.seq_len()));
  }
  return state.dense;
}

/// The index of a GPU's choice, whose plan backward will find.
std::shared_ptr<const index::Index> keep_chosen(RingContext::State& state,
                                                const std::shared_ptr<IndexPlan>& chosen) {
  const std::shared_ptr<const index::Index> index = chosen->release_index();
  state.plans.keep(index, chosen);
  return index;
}

/// Before the pattern reads them; the index's own sizes are not known yet.
void check_estimation_inputs(const RingContext& context, const at::Tensor& q, const at::Tensor& k,
                             const at::Tensor& document_starts) {
  const int64_t n = context.layout().tokens_per_rank();
  MT_CHECK_ARG(q.defined() && q.dim() == 4 && q.size(1) == n, "q: expected [B, S_local=", n,
               ", H, D], got ", shape_text(q));
  MT_CHECK_ARG(k.defined() && k.dim() == 4, "k: expected [B=", q.size(0), ", S_local=", n,
               ", Hk, D=", q.size(3), "], got ", shape_text(k));
  check_tensor("k", k, {{"B", q.size(0)}, {"S_local", n}, {"Hk", k.size(2)}, {"D", q.size(3)}},
               q.scalar_type(), q.device());
  MT_CHECK_ARG(k.size(2) >= 1 && q.size(2) % k.size(2) == 0,
               "k: expected num_kv_heads Hk that divides H=", q.size(2), ", got ", shape_text(k));
  if (document_starts.defined()) {
    check_tensor("document_starts", document_starts,
                 {{"B", q.size(0)}, {"S", context.layout().seq_len()}}, at::kInt, at::kCPU);
  }
}

}  // namespace

AttentionOutput sparse_ring_attention(RingContext& context, const at::Tensor& q,
                                      const at::Tensor& k, const at::Tensor& v,
                                      const AttentionCall& call) {
  RingContext::State& state = context.state();
  // Launches and transfers are the current device's.
  const c10::DeviceGuard guard(q.defined() ? q.device() : at::Device(at::kCPU));
  const at::Tensor documents =
      call.document_starts.defined() ? call.document_starts.contiguous() : at::Tensor();
  AttentionOutput output;
  output.index = call.index;
  std::shared_ptr<IndexPlan> chosen;  // by a GPU
  std::unique_ptr<StartedForward> started;
  {
    // The choice is not differentiated.
    const at::NoGradGuard no_grad;
    if (!output.index && call.pattern.kind == pattern::PatternKind::kFixed)
      output.index = call.pattern.given;
    const bool estimate = !output.index && call.pattern.kind != pattern::PatternKind::kDense;
    if (estimate || call.measure_recall || !output.index)
      check_estimation_inputs(context, q, k, documents);
    const at::Tensor q_rows = with_contiguous_rows(q.detach()),
                     k_rows = with_contiguous_rows(k.detach());
    if (estimate) {
#ifdef MT_WITH_CUDA
      if (q.is_cuda()) {
        started = std::make_unique<StartedForward>(
            state,
            checked_call(state, q.detach(), k.detach(), v.detach(), call.softmax_scale, documents));
      }
#endif
      auto stretch = state.begin_stretch(q.device());
#ifdef MT_WITH_CUDA
      if (q.is_cuda()) {
        chosen = std::make_shared<IndexPlan>(choose_lists(state, call, q_rows, k_rows, documents),
                                             state.layout, state.cp_rank);
      }
#endif
      if (!chosen)
        output.index = std::make_shared<const index::Index>(
            choose_index(call.pattern,
                         local_attention(context.layout(), context.cp_rank(), q_rows, k_rows,
                                         call.softmax_scale, documents),
                         context.index_group()));
      state.end_stretch(std::move(stretch), "index", 0, 0);
    } else if (!output.index) {
      output.index = shared_dense_index(state, q.size(0), q.size(2));
    }
    if (call.pattern.estimate && !call.index && call.pattern.kind == pattern::PatternKind::kFixed &&
        call.pattern.given) {
      check_estimation_inputs(context, q, k, documents);
      if (q.is_cuda() && !call.result.out.defined()) {
        started = std::make_unique<StartedForward>(
            state,
            checked_call(
                state, *state.plans.find_or_make(output.index, state.layout, state.cp_rank),
                "forward", q.detach(), k.detach(), v.detach(), call.softmax_scale, documents));
      }
      estimate_beside(context, call, q_rows, k_rows, documents);
    }
    if (call.measure_recall) {
      if (chosen) output.index = keep_chosen(state, chosen);
      output.recall = measure_recall(context, call, q_rows, k_rows, documents, *output.index);
    }
  }
  if (call.chosen) call.chosen();
  auto saved = c10::make_intrusive<SavedCall>();
  saved->context = &context;
  saved->owner = call.owner;
  saved->index = output.index;
  saved->plan = chosen;
  saved->started = std::move(started);
  saved->softmax_scale = call.softmax_scale;
  saved->document_starts = documents;
  if (call.result.out.defined()) {
    MT_CHECK_ARG(call.index != nullptr, "sparse ring attention: a given result needs its index");
    check_gradient_inputs(q, call.result.out, call.result);
    saved->result = call.result;
  }
  state.forward_by_torch = false;
  const torch::autograd::variable_list results = SparseRingAttention::apply(q, k, v, saved);
  output.by_torch = state.forward_by_torch;
  output.out = results[0];
  output.lse = results[1];
  saved->plan.reset();
  if (!output.index) {  // while the device attends
    output.index = keep_chosen(state, chosen);
    saved->index = output.index;
  }
  output.out_residual = std::exchange(saved->result, {}).out_residual;
  const std::shared_ptr<IndexPlan> plan =
      state.plans.find_or_make(output.index, state.layout, state.cp_rank);
  output.columns_per_step = plan->has_columns() && state.options.columns == ColumnMode::kOnce &&
                            state.layout.cp_size() > 1 &&
                            plan->union_too_large(static_cast<int>(k.size(2)));
  return output;
}

}  // namespace mtraining::attention
