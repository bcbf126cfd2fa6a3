#include "mtraining/model/device_layer.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>
#include <utility>
#include <vector>

#include "mtraining/model/device_passes.h"

namespace mtraining::model {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using CallPointer = c10::intrusive_ptr<LayerCall>;

CallPointer call_of(AutogradContext* context) {
  return c10::static_intrusive_pointer_cast<LayerCall>(context->saved_data["call"].toCapsule());
}

/// Autograd takes no undefined tensor for an argument.
using MaybeTensor = std::optional<at::Tensor>;
MaybeTensor maybe(const at::Tensor& tensor) {
  return tensor.defined() ? MaybeTensor(tensor) : std::nullopt;
}
at::Tensor defined_or_not(const MaybeTensor& tensor) { return tensor.value_or(at::Tensor()); }

/// A tensor that autograd does not take for a view of another one, and that holds no other one.
at::Tensor unrelated(const at::Tensor& tensor) { return tensor.variable_data(); }

/// [B, n, heads, D] or nothing -> the heads of a token contiguous, [B * n, heads * D].
at::Tensor token_rows(const at::Tensor& gradient, int64_t tokens, int64_t width,
                      const at::Tensor& like) {
  if (!gradient.defined()) return at::zeros({tokens, width}, like.options());
  return gradient.contiguous().view({tokens, width});
}

at::Tensor hidden_rows(const at::Tensor& h) { return h.reshape({-1, h.size(-1)}).contiguous(); }

at::Tensor of_heads(const LayerCall& call, const at::Tensor& rows) {
  return rows.view({call.batch, call.tokens_a_sample, rows.size(1) / call.options.head_dim,
                    call.options.head_dim});
}

class AttentionInputFunction : public torch::autograd::Function<AttentionInputFunction> {
 public:
  enum Place { kNorm, kQ, kK, kV, kQBias, kKBias, kVBias, kQNorm, kKNorm, kPlaces };

  static variable_list forward(AutogradContext* context, const at::Tensor& h,
                               const at::Tensor& input_norm, const at::Tensor& q_weight,
                               const at::Tensor& k_weight, const at::Tensor& v_weight,
                               const MaybeTensor& q_bias, const MaybeTensor& k_bias,
                               const MaybeTensor& v_bias, const MaybeTensor& q_norm,
                               const MaybeTensor& k_norm, const CallPointer& call) {
    const variable_list weights = {input_norm,
                                   q_weight,
                                   k_weight,
                                   v_weight,
                                   defined_or_not(q_bias),
                                   defined_or_not(k_bias),
                                   defined_or_not(v_bias),
                                   defined_or_not(q_norm),
                                   defined_or_not(k_norm)};
    const at::Tensor rows = hidden_rows(h);
    const ProjectedInput input = project_input(*call, rows, layer_of(weights.data()));
    variable_list saved = {rows, input.raw.rows, input.raw.q_roots, input.raw.k_roots};
    saved.insert(saved.end(), weights.begin(), weights.end());
    context->save_for_backward(std::move(saved));
    context->saved_data["call"] = c10::IValue::make_capsule(call);
    context->set_materialize_grads(false);
    return {unrelated(of_heads(*call, input.q)), unrelated(of_heads(*call, input.k)),
            unrelated(of_heads(*call, input.v)), unrelated(h)};
  }

  static variable_list backward(AutogradContext* context, const variable_list& upstream) {
    const CallPointer call = call_of(context);
    const variable_list saved = context->get_saved_variables();
    const at::Tensor& h = saved[0];
    const LayerParameters layer = layer_of(&saved[4]);
    InputGradients given{.dq = token_rows(upstream[0], call->tokens(), call->q_width(), h),
                         .dk = token_rows(upstream[1], call->tokens(), call->kv_width(), h),
                         .dv = token_rows(upstream[2], call->tokens(), call->kv_width(), h),
                         .residual = upstream[3].defined()
                                         ? upstream[3].reshape(h.sizes()).contiguous()
                                         : at::Tensor()};
    LayerParameters g;
    const at::Tensor dh =
        input_backward(*call, h, layer, {saved[1], saved[2], saved[3]}, std::move(given), g);
    // Inputs of the function: h, the weights, the call.
    return {dh.view({call->batch, call->tokens_a_sample, h.size(1)}),
            g.input_norm,
            g.q_weight,
            g.k_weight,
            g.v_weight,
            g.q_bias,
            g.k_bias,
            g.v_bias,
            g.q_norm,
            g.k_norm,
            at::Tensor()};
  }

 private:
  static LayerParameters layer_of(const at::Tensor* weights) {
    LayerParameters l;
    l.input_norm = weights[kNorm];
    l.q_weight = weights[kQ];
    l.k_weight = weights[kK];
    l.v_weight = weights[kV];
    l.q_bias = weights[kQBias];
    l.k_bias = weights[kKBias];
    l.v_bias = weights[kVBias];
    l.q_norm = weights[kQNorm];
    l.k_norm = weights[kKNorm];
    return l;
  }
};

class AttentionOutputFunction : public torch::autograd::Function<AttentionOutputFunction> {
 public:
  enum Place { kO, kOBias, kNorm, kGate, kUp, kDown, kPlaces };

  static at::Tensor forward(AutogradContext* context, const at::Tensor& h,
                            const at::Tensor& attended, const at::Tensor& o_weight,
                            const MaybeTensor& o_bias, const at::Tensor& post_norm,
                            const at::Tensor& gate, const at::Tensor& up, const at::Tensor& down,
                            const CallPointer& call) {
    const variable_list weights = {o_weight, defined_or_not(o_bias), post_norm, gate, up, down};
    const at::Tensor a = hidden_rows(attended);
    const Output output = project_output(*call, hidden_rows(h), a, layer_of(weights.data()));
    variable_list saved = {a, output.middle, output.gate_up};
    saved.insert(saved.end(), weights.begin(), weights.end());
    context->save_for_backward(std::move(saved));
    context->saved_data["call"] = c10::IValue::make_capsule(call);
    return output.out.view(h.sizes());
  }

  static variable_list backward(AutogradContext* context, const variable_list& upstream) {
    const CallPointer call = call_of(context);
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &attended = saved[0], &middle = saved[1];
    LayerParameters g;
    // With h + o kept, h is not looked at but for its shape.
    const OutputGradients d =
        output_backward(*call, middle, attended, layer_of(&saved[3]), {{}, middle, saved[2]},
                        hidden_rows(upstream[0]), false, g);
    const auto samples = [&](const at::Tensor& rows) {
      return rows.view({call->batch, call->tokens_a_sample, rows.size(1)});
    };
    return {samples(d.middle), samples(d.attended),   g.o_weight,
            g.o_bias,          g.post_attention_norm, g.gate_weight,
            g.up_weight,       g.down_weight,         at::Tensor()};
  }

 private:
  static LayerParameters layer_of(const at::Tensor* weights) {
    LayerParameters l;
    l.o_weight = weights[kO];
    l.o_bias = weights[kOBias];
    l.post_attention_norm = weights[kNorm];
    l.gate_weight = weights[kGate];
    l.up_weight = weights[kUp];
    l.down_weight = weights[kDown];
    return l;
  }
};

class DeviceNorm : public torch::autograd::Function<DeviceNorm> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                            double eps) {
    const at::Tensor rows = hidden_rows(x);
    at::Tensor out = at::empty_like(rows);
    const at::Tensor roots = norm_rows(rows, weight, eps, out);
    context->save_for_backward({rows, roots, weight});
    return out.view(x.sizes());
  }
  static variable_list backward(AutogradContext* context, const variable_list& upstream) {
    const variable_list saved = context->get_saved_variables();
    const NormRowsGradient g =
        norm_rows_backward(saved[0], saved[2], saved[1], hidden_rows(upstream[0]));
    return {unrelated(g.x.view(upstream[0].sizes())), g.weight, at::Tensor()};
  }
};

void join(std::initializer_list<at::Tensor*> parts) {
  std::vector<at::Tensor> values;
  for (const at::Tensor* part : parts) values.push_back(part->detach());
  if (!values.front().defined() || joined(values).defined()) return;
  const at::Tensor memory = at::cat(values);
  int64_t begin = 0;
  for (at::Tensor* part : parts) {
    const int64_t rows = part->size(0);
    part->set_data(memory.narrow(0, begin, rows));
    begin += rows;
  }
}

CallPointer new_call(const at::Tensor& h, const DeviceLayerOptions& options) {
  auto call = c10::make_intrusive<LayerCall>();
  call->options = options;
  call->batch = h.size(0);
  call->tokens_a_sample = h.size(1);
  return call;
}

RopeTable contiguous(const RopeTable& rope) {
  return {rope.cos.contiguous(), rope.sin.contiguous()};
}

}  // namespace

void join_projections(DecoderParameters& parameters) {
  for (LayerParameters& l : parameters.layers) {
    join({&l.q_weight, &l.k_weight, &l.v_weight});
    if (l.q_bias.defined()) join({&l.q_bias, &l.k_bias, &l.v_bias});
    join({&l.gate_weight, &l.up_weight});
  }
}

AttentionInput attention_input(const at::Tensor& h, const LayerParameters& l, const RopeTable& rope,
                               const DeviceLayerOptions& options) {
  const CallPointer call = new_call(h, options);
  call->rope = contiguous(rope);
  const variable_list results = AttentionInputFunction::apply(
      h, l.input_norm, l.q_weight, l.k_weight, l.v_weight, maybe(l.q_bias), maybe(l.k_bias),
      maybe(l.v_bias), maybe(l.q_norm), maybe(l.k_norm), call);
  return {results[0], results[1], results[2], results[3]};
}

at::Tensor attention_output(const at::Tensor& h, const at::Tensor& attended,
                            const LayerParameters& l, const DeviceLayerOptions& options) {
  const CallPointer call = new_call(h, options);
  call->keeps_middle = at::GradMode::is_enabled();
  call->keeps_gate_up = call->keeps_middle && options.mlp_tile == 0;
  return AttentionOutputFunction::apply(h, attended, l.o_weight, maybe(l.o_bias),
                                        l.post_attention_norm, l.gate_weight, l.up_weight,
                                        l.down_weight, call);
}

LayerGradients layer_gradients(const at::Tensor& h, at::Tensor upstream, const LayerParameters& l,
                               const RopeTable& rope, const AttentionRuns& attention,
                               const DeviceLayerOptions& options) {
  const at::NoGradGuard no_grad;
  const CallPointer call = new_call(h, options);
  call->rope = contiguous(rope);
  const at::Tensor rows = hidden_rows(h);
  const bool is_free =
      upstream.use_count() == 1 && upstream.storage().use_count() == 1 && upstream.is_contiguous();
  at::Tensor dout = unrelated(hidden_rows(upstream));
  upstream.reset();

  BeforeHeadNorms raw;
  attention::BackwardInputs inputs;
  {
    const Stretch stretch(*call, "recompute");
    ProjectedInput input = project_input(*call, rows, l);
    inputs.q = unrelated(of_heads(*call, input.q));
    inputs.k = unrelated(of_heads(*call, input.k));
    inputs.v = unrelated(of_heads(*call, input.v));
    raw = std::move(input.raw);
    inputs.saved = attention.forward(inputs.q, inputs.k, inputs.v);
  }
  LayerParameters g;
  OutputGradients d = output_backward(*call, rows, hidden_rows(inputs.saved.out.flatten(2)), l, {},
                                      std::move(dout), is_free, g);
  inputs.dout = unrelated(of_heads(*call, d.attended));
  d.attended.reset();
  attention::BackwardResult of_attention = attention.backward(std::move(inputs));
  const auto rows_of = [&](at::Tensor& gradient, int64_t width) {
    return token_rows(std::exchange(gradient, {}), call->tokens(), width, rows);
  };
  InputGradients given{.dq = rows_of(of_attention.dq, call->q_width()),
                       .dk = rows_of(of_attention.dk, call->kv_width()),
                       .dv = rows_of(of_attention.dv, call->kv_width()),
                       .residual = std::move(d.middle),
                       .residual_is_free = true};
  const at::Tensor dh = input_backward(*call, rows, l, raw, std::move(given), g);
  return {unrelated(dh.view(h.sizes())), g.tensors()};
}

at::Tensor device_rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  return DeviceNorm::apply(x, weight, eps);
}

}  // namespace mtraining::model
