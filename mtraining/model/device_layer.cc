#include "mtraining/model/device_layer.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "mtraining/attention/tensors.h"
#include "mtraining/base/check.h"
#include "mtraining/kernels/elementwise_cuda/elementwise.h"

namespace mtraining::model {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
namespace elementwise = kernels::elementwise_cuda;

/// What both functions know beside tensors. A layer's forward and backward share it.
struct LayerCall : torch::CustomClassHolder {
  DeviceLayerOptions options;
  RopeTable rope;
  int64_t batch = 0, tokens_a_sample = 0;
  bool keeps_gate_up = false;

  int64_t q_width() const { return options.num_q_heads * options.head_dim; }
  int64_t kv_width() const { return options.num_kv_heads * options.head_dim; }
  int64_t row_width() const { return q_width() + 2 * kv_width(); }
};
using CallPointer = c10::intrusive_ptr<LayerCall>;

CallPointer call_of(AutogradContext* context) {
  return c10::static_intrusive_pointer_cast<LayerCall>(context->saved_data["call"].toCapsule());
}

/// Tells the observer when it begins and ends.
class Stretch {
 public:
  Stretch(const LayerCall& call, std::string_view part) : call_(call), part_(part) {
    if (call_.options.observe) call_.options.observe(part_, true);
  }
  ~Stretch() {
    if (call_.options.observe) call_.options.observe(part_, false);
  }
  Stretch(const Stretch&) = delete;
  Stretch& operator=(const Stretch&) = delete;

 private:
  const LayerCall& call_;
  std::string_view part_;
};

kernels::DType dtype_of(const at::Tensor& tensor) {
  return attention::kernel_dtype(tensor, "a layer on a GPU");
}
void* stream_of(const at::Tensor& tensor) { return attention::current_stream(tensor.device()); }
at::Tensor floats(at::IntArrayRef shape, const at::Tensor& like) {
  return at::empty(shape, like.options().dtype(at::kFloat));
}

/// The tensors as one whose first dimension is the sum of theirs, without a copy; undefined where they do not lie so.
at::Tensor joined(at::TensorList parts) {
  int64_t rows = 0;
  const char* next = static_cast<const char*>(parts.front().const_data_ptr());
  for (const at::Tensor& part : parts) {
    if (!part.is_contiguous() || !part.storage().is_alias_of(parts.front().storage()) ||
        part.const_data_ptr() != next)
      return {};
    next += part.nbytes();
    rows += part.size(0);
  }
  std::vector<int64_t> sizes = parts.front().sizes().vec(), strides = parts.front().strides().vec();
  sizes[0] = rows;
  return parts.front().detach().as_strided(sizes, strides, parts.front().storage_offset());
}

/// rows = x weights^T + biases, the parts beside each other. Undefined biases: none.
void project(at::Tensor rows, const at::Tensor& x, at::TensorList weights, at::TensorList biases) {
  const bool has_bias = biases.front().defined();
  const at::Tensor weight = joined(weights), bias = has_bias ? joined(biases) : at::Tensor();
  if (weight.defined() && bias.defined() == has_bias) {
    has_bias ? at::addmm_out(rows, bias, x, weight.t()) : at::mm_out(rows, x, weight.t());
    return;
  }
  int64_t begin = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    at::Tensor part = rows.narrow(1, begin, weights[i].size(0));
    has_bias ? at::addmm_out(part, biases[i], x, weights[i].t())
             : at::mm_out(part, x, weights[i].t());
    begin += weights[i].size(0);
  }
}
/// dx = drows weights.
void project_back(at::Tensor dx, const at::Tensor& drows, at::TensorList weights) {
  if (const at::Tensor weight = joined(weights); weight.defined()) {
    at::mm_out(dx, drows, weight);
    return;
  }
  int64_t begin = 0;
  for (const at::Tensor& weight : weights) {
    const at::Tensor part = drows.narrow(1, begin, weight.size(0));
    begin == 0 ? at::mm_out(dx, part, weight) : dx.addmm_(part, weight);
    begin += weight.size(0);
  }
}

/// a^T b summed over runs of tokens.
class ProductSum {
 public:
  explicit ProductSum(bool several) : several_(several) {}

  void add(const at::Tensor& a, const at::Tensor& b) {
    const bool low = a.scalar_type() != at::kFloat;
    if (!sum_.defined()) {
      dtype_ = a.scalar_type();
      sum_ = several_ && low ? at::mm(a.t(), b, at::kFloat) : at::mm(a.t(), b);
    } else if (low) {
      at::addmm_out(sum_, sum_, a.t(), b, at::kFloat);
    } else {
      sum_.addmm_(a.t(), b);
    }
  }
  at::Tensor take() { return std::move(sum_).to(dtype_); }

 private:
  bool several_;
  at::Tensor sum_;
  at::ScalarType dtype_ = at::kFloat;
};

/// Fills out [rows, width] and, where `added` is given, overwrites it with x + added. Returns inverse roots [rows].
at::Tensor norm(const at::Tensor& x, elementwise::Rows x_rows, int64_t rows, at::Tensor added,
                const at::Tensor& weight, double eps, at::Tensor& out) {
  at::Tensor roots = floats({rows}, x);
  elementwise::rms_norm({.dtype = dtype_of(x),
                         .rows = rows,
                         .width = weight.numel(),
                         .x = x.const_data_ptr(),
                         .x_rows = x_rows,
                         .added = added.defined() ? added.data_ptr() : nullptr,
                         .weight = weight.const_data_ptr(),
                         .sum = added.defined() ? added.data_ptr() : nullptr,
                         .out = out.data_ptr(),
                         .inverse_root = roots.data_ptr<float>(),
                         .eps = eps,
                         .stream = stream_of(x)});
  return roots;
}

struct NormGradient {
  const void* dout = nullptr;
  elementwise::Rows dout_rows = {};
  const at::Tensor& x;
  elementwise::Rows x_rows = {};
  const at::Tensor& roots;
  const at::Tensor& weight;
  at::Tensor added = {};
  void* dx = nullptr;
};
/// Returns the gradient of the weight; that of x goes where dout was, or to dx.
at::Tensor norm_backward(const NormGradient& g) {
  const int64_t rows = g.roots.numel(), width = g.weight.numel();
  const kernels::DType dtype = dtype_of(g.x);
  at::Tensor dweight = at::empty_like(g.weight);
  const at::Tensor partials =
      floats({elementwise::rms_norm_partial_rows(dtype, rows, width), width}, g.x);
  elementwise::rms_norm_backward({.dtype = dtype,
                                  .rows = rows,
                                  .width = width,
                                  .dout = g.dout,
                                  .dout_rows = g.dout_rows,
                                  .x = g.x.const_data_ptr(),
                                  .x_rows = g.x_rows,
                                  .dx_rows = g.dout_rows,
                                  .weight = g.weight.const_data_ptr(),
                                  .inverse_root = g.roots.const_data_ptr<float>(),
                                  .added = g.added.defined() ? g.added.const_data_ptr() : nullptr,
                                  .dx = g.dx,
                                  .dweight = dweight.data_ptr(),
                                  .partials = partials.data_ptr<float>(),
                                  .stream = stream_of(g.x)});
  return dweight;
}

/// Autograd takes no undefined tensor for an argument.
using MaybeTensor = std::optional<at::Tensor>;
MaybeTensor maybe(const at::Tensor& tensor) {
  return tensor.defined() ? MaybeTensor(tensor) : std::nullopt;
}
at::Tensor defined_or_not(const MaybeTensor& tensor) { return tensor.value_or(at::Tensor()); }

/// A tensor that autograd does not take for a view of another one.
at::Tensor unrelated(const at::Tensor& tensor) { return tensor.variable_data(); }

/// [B, n, heads, D] or nothing -> the heads of a token contiguous, [B * n, heads * D].
at::Tensor token_rows(const at::Tensor& gradient, int64_t tokens, int64_t width,
                      const at::Tensor& like) {
  if (!gradient.defined()) return at::zeros({tokens, width}, like.options());
  return gradient.contiguous().view({tokens, width});
}

class AttentionInputFunction : public torch::autograd::Function<AttentionInputFunction> {
 public:
  enum Place { kNorm, kQ, kK, kV, kQBias, kKBias, kVBias, kQNorm, kKNorm, kPlaces };

  static variable_list forward(AutogradContext* context, const at::Tensor& h,
                               const at::Tensor& input_norm, const at::Tensor& q_weight,
                               const at::Tensor& k_weight, const at::Tensor& v_weight,
                               const MaybeTensor& q_bias_or_none, const MaybeTensor& k_bias_or_none,
                               const MaybeTensor& v_bias_or_none, const MaybeTensor& q_norm_or_none,
                               const MaybeTensor& k_norm_or_none, const CallPointer& call) {
    const at::Tensor q_bias = defined_or_not(q_bias_or_none),
                     k_bias = defined_or_not(k_bias_or_none),
                     v_bias = defined_or_not(v_bias_or_none),
                     q_norm = defined_or_not(q_norm_or_none),
                     k_norm = defined_or_not(k_norm_or_none);
    const DeviceLayerOptions& o = call->options;
    const int64_t tokens = call->batch * call->tokens_a_sample;
    const at::Tensor rows = h.reshape({tokens, h.size(-1)}).contiguous();
    at::Tensor x = at::empty_like(rows), q_roots, k_roots, roots;
    {
      const Stretch stretch(*call, "norm");
      roots = norm(rows, {}, tokens, {}, input_norm, o.rms_norm_eps, x);
    }
    at::Tensor qkv = at::empty({tokens, call->row_width()}, x.options());
    project(qkv, x, {q_weight, k_weight, v_weight}, {q_bias, k_bias, v_bias});
    const std::vector<int64_t> q_shape = {call->batch, call->tokens_a_sample, o.num_q_heads,
                                          o.head_dim},
                               kv_shape = {call->batch, call->tokens_a_sample, o.num_kv_heads,
                                           o.head_dim};
    at::Tensor q = qkv.narrow(1, 0, call->q_width());
    at::Tensor k = qkv.narrow(1, call->q_width(), call->kv_width());
    const at::Tensor v = qkv.narrow(1, call->q_width() + call->kv_width(), call->kv_width());
    at::Tensor raw;
    if (q_norm.defined()) {
      raw = qkv;
      at::Tensor q_normed = at::empty({tokens, call->q_width()}, x.options());
      at::Tensor k_normed = at::empty({tokens, call->kv_width()}, x.options());
      q_roots = norm(q, {o.num_q_heads, call->row_width()}, tokens * o.num_q_heads, {}, q_norm,
                     o.rms_norm_eps, q_normed);
      k_roots = norm(k, {o.num_kv_heads, call->row_width()}, tokens * o.num_kv_heads, {}, k_norm,
                     o.rms_norm_eps, k_normed);
      q = q_normed;
      k = k_normed;
      turn(*call, q, o.num_q_heads);
      turn(*call, k, o.num_kv_heads);
    } else {
      turn(*call, qkv, o.num_q_heads + o.num_kv_heads);
    }
    context->save_for_backward({rows, roots, x, raw, q_roots, k_roots, input_norm, q_weight,
                                k_weight, v_weight, q_bias, k_bias, v_bias, q_norm, k_norm});
    context->saved_data["call"] = c10::IValue::make_capsule(call);
    context->set_materialize_grads(false);
    return {unrelated(q.view(q_shape)), unrelated(k.view(kv_shape)), unrelated(v.view(kv_shape)),
            unrelated(h)};
  }

  static variable_list backward(AutogradContext* context, const variable_list& upstream) {
    const CallPointer call = call_of(context);
    const Stretch stretch(*call, "attention_input backward");
    const DeviceLayerOptions& o = call->options;
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &h = saved[0], &roots = saved[1], &x = saved[2], &raw = saved[3];
    const at::Tensor* weights = &saved[6];
    const int64_t tokens = h.size(0), q_width = call->q_width(), kv_width = call->kv_width();
    const int64_t row_width = call->row_width();
    const at::Tensor dq = token_rows(upstream[0], tokens, q_width, x),
                     dk = token_rows(upstream[1], tokens, kv_width, x),
                     dv = token_rows(upstream[2], tokens, kv_width, x);
    at::Tensor drow = at::empty({tokens, row_width}, x.options());
    const bool has_bias = weights[kQBias].defined(), has_norm = weights[kQNorm].defined();
    at::Tensor dbias, partials;
    elementwise::RopeBackward turn_back{.dtype = dtype_of(x),
                                        .tokens = tokens,
                                        .q_heads = o.num_q_heads,
                                        .kv_heads = o.num_kv_heads,
                                        .head_dim = o.head_dim,
                                        .cos = call->rope.cos.const_data_ptr<float>(),
                                        .sin = call->rope.sin.const_data_ptr<float>(),
                                        .table_tokens = table_tokens(*call),
                                        .dq = dq.const_data_ptr(),
                                        .dk = dk.const_data_ptr(),
                                        .dv = dv.const_data_ptr(),
                                        .dq_token_stride = q_width,
                                        .dk_token_stride = kv_width,
                                        .dv_token_stride = kv_width,
                                        .drow = drow.data_ptr(),
                                        .stream = stream_of(x)};
    if (has_bias && !has_norm) {
      dbias = at::empty({row_width}, x.options());
      partials = floats({elementwise::rope_partial_rows(turn_back), row_width}, x);
      turn_back.dbias = dbias.data_ptr();
      turn_back.partials = partials.data_ptr<float>();
    }
    elementwise::rope_backward(turn_back);
    variable_list gradients(kPlaces + 2);
    at::Tensor* of_weights = &gradients[1];
    if (has_norm) {
      of_weights[kQNorm] =
          head_norm_backward(drow, raw, 0, o.num_q_heads, saved[4], weights[kQNorm]);
      of_weights[kKNorm] =
          head_norm_backward(drow, raw, q_width, o.num_kv_heads, saved[5], weights[kKNorm]);
      if (has_bias) dbias = drow.sum(0);
    }
    const auto part = [&](const at::Tensor& all, int which) {
      const int64_t begin = which == 0 ? 0 : which == 1 ? q_width : q_width + kv_width;
      return all.narrow(0, begin, which == 0 ? q_width : kv_width);
    };
    const at::Tensor dweight = at::mm(drow.t(), x);
    for (int which = 0; which < 3; ++which) {
      of_weights[kQ + which] = part(dweight, which);
      if (has_bias) of_weights[kQBias + which] = part(dbias, which);
    }
    at::Tensor dx = at::empty_like(x);
    project_back(dx, drow, {weights[kQ], weights[kK], weights[kV]});
    const at::Tensor residual =
        upstream[3].defined() ? upstream[3].reshape(h.sizes()).contiguous() : at::Tensor();
    {
      const Stretch norm_stretch(*call, "norm");
      of_weights[kNorm] = norm_backward({.dout = dx.data_ptr(),
                                         .x = h,
                                         .roots = roots,
                                         .weight = weights[kNorm],
                                         .added = residual,
                                         .dx = dx.data_ptr()});
    }
    gradients[0] = dx.view({call->batch, call->tokens_a_sample, dx.size(-1)});
    return gradients;
  }

 private:
  static int64_t table_tokens(const LayerCall& call) {
    return call.rope.cos.numel() / (call.options.head_dim / 2);
  }
  /// The first heads of each row, in place.
  static void turn(const LayerCall& call, at::Tensor& rows, int64_t heads) {
    elementwise::rope({.dtype = dtype_of(rows),
                       .tokens = rows.size(0),
                       .rotated_heads = heads,
                       .head_dim = call.options.head_dim,
                       .cos = call.rope.cos.const_data_ptr<float>(),
                       .sin = call.rope.sin.const_data_ptr<float>(),
                       .table_tokens = table_tokens(call),
                       .x = rows.data_ptr(),
                       .token_stride = rows.stride(0),
                       .stream = stream_of(rows)});
  }
  /// In place over the heads of drow that begin at `column`.
  static at::Tensor head_norm_backward(at::Tensor& drow, const at::Tensor& raw, int64_t column,
                                       int64_t heads, const at::Tensor& roots,
                                       const at::Tensor& weight) {
    at::Tensor d = drow.narrow(1, column, heads * weight.numel());
    const at::Tensor x = raw.narrow(1, column, heads * weight.numel());
    const elementwise::Rows rows{heads, drow.size(1)};
    return norm_backward({.dout = d.data_ptr(),
                          .dout_rows = rows,
                          .x = x,
                          .x_rows = rows,
                          .roots = roots,
                          .weight = weight,
                          .dx = d.data_ptr()});
  }
};

/// Calls body(first token, number of tokens) for each run.
template <typename Body>
void for_each_run(int64_t tokens, int64_t run, const Body& body) {
  for (int64_t begin = 0; begin < tokens; begin += run) body(begin, std::min(run, tokens - begin));
}

class AttentionOutputFunction : public torch::autograd::Function<AttentionOutputFunction> {
 public:
  enum Place { kO, kOBias, kNorm, kGate, kUp, kDown, kPlaces };

  static at::Tensor forward(AutogradContext* context, const at::Tensor& h,
                            const at::Tensor& attended, const at::Tensor& o_weight,
                            const MaybeTensor& o_bias_or_none, const at::Tensor& post_norm,
                            const at::Tensor& gate, const at::Tensor& up, const at::Tensor& down,
                            const CallPointer& call) {
    const at::Tensor o_bias = defined_or_not(o_bias_or_none);
    const DeviceLayerOptions& o = call->options;
    const int64_t tokens = call->batch * call->tokens_a_sample, ffn = gate.size(0);
    const at::Tensor rows = h.reshape({tokens, h.size(-1)}).contiguous();
    const at::Tensor a = attended.reshape({tokens, -1}).contiguous();
    at::Tensor middle = at::empty_like(rows);
    project(middle, a, {o_weight}, {o_bias});
    at::Tensor y = at::empty_like(rows), roots;
    {
      const Stretch stretch(*call, "norm");
      roots = norm(rows, {}, tokens, middle, post_norm, o.rms_norm_eps, y);
    }
    const bool wanted = o.result == LayerResult::kValues;
    const int64_t run = run_of(*call, tokens);
    at::Tensor gate_up, product, out;
    if (wanted || call->keeps_gate_up)
      gate_up = at::empty({call->keeps_gate_up ? tokens : run, 2 * ffn}, rows.options());
    if (wanted) {
      product = at::empty({run, ffn}, rows.options());
      out = at::empty_like(rows);
    }
    if (gate_up.defined()) {
      for_each_run(tokens, run, [&](int64_t begin, int64_t count) {
        at::Tensor both = gate_up.narrow(0, call->keeps_gate_up ? begin : 0, count);
        project(both, y.narrow(0, begin, count), {gate, up}, {at::Tensor(), at::Tensor()});
        if (!wanted) return;
        at::Tensor part = product.narrow(0, 0, count), to = out.narrow(0, begin, count);
        elementwise::swiglu({.dtype = dtype_of(both),
                             .rows = count,
                             .width = ffn,
                             .gate_up = both.const_data_ptr(),
                             .product = part.data_ptr(),
                             .stream = stream_of(both)});
        at::addmm_out(to, middle.narrow(0, begin, count), part, down.t());
      });
    }
    if (!call->keeps_gate_up) gate_up.reset();
    context->save_for_backward(
        {a, middle, y, roots, gate_up, o_weight, o_bias, post_norm, gate, up, down});
    context->saved_data["call"] = c10::IValue::make_capsule(call);
    if (!wanted) return at::zeros({1}, rows.options()).expand(h.sizes());
    return out.view(h.sizes());
  }

  static variable_list backward(AutogradContext* context, const variable_list& upstream) {
    const CallPointer call = call_of(context);
    const Stretch stretch(*call, "mlp backward");
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &attended = saved[0], &middle = saved[1], &y = saved[2], &roots = saved[3];
    const at::Tensor& kept = saved[4];
    const at::Tensor* weights = &saved[5];
    const at::Tensor &gate = weights[kGate], &up = weights[kUp], &down = weights[kDown];
    const int64_t tokens = middle.size(0), ffn = gate.size(0), run = run_of(*call, tokens);
    const at::Tensor dout = upstream[0].reshape(middle.sizes()).contiguous();
    at::Tensor dy = at::empty_like(y);
    at::Tensor dproduct = at::empty({run, ffn}, y.options());
    at::Tensor dgate_up = at::empty({run, 2 * ffn}, y.options());
    ProductSum dgates(run < tokens), ddown(run < tokens);
    for_each_run(tokens, run, [&](int64_t begin, int64_t count) {
      const at::Tensor rows = y.narrow(0, begin, count), d = dout.narrow(0, begin, count);
      at::Tensor product = dproduct.narrow(0, 0, count), both = dgate_up.narrow(0, 0, count);
      if (!kept.defined()) project(both, rows, {gate, up}, {at::Tensor(), at::Tensor()});
      at::mm_out(product, d, down);
      elementwise::swiglu_backward({.dtype = dtype_of(both),
                                    .rows = count,
                                    .width = ffn,
                                    .gate_up = kept.defined()
                                                   ? kept.narrow(0, begin, count).const_data_ptr()
                                                   : both.const_data_ptr(),
                                    .dproduct = product.const_data_ptr(),
                                    .dgate_up = both.data_ptr(),
                                    .product = product.data_ptr(),
                                    .stream = stream_of(both)});
      ddown.add(d, product);
      dgates.add(both, rows);
      project_back(dy.narrow(0, begin, count), both, {gate, up});
    });
    dproduct.reset();
    dgate_up.reset();
    variable_list gradients(kPlaces + 3);
    at::Tensor* of_weights = &gradients[2];
    {
      const Stretch norm_stretch(*call, "norm");
      of_weights[kNorm] = norm_backward({.dout = dy.data_ptr(),
                                         .x = middle,
                                         .roots = roots,
                                         .weight = weights[kNorm],
                                         .added = dout,
                                         .dx = dy.data_ptr()});
    }
    const at::Tensor& dmiddle = dy;
    const at::Tensor both = dgates.take();
    of_weights[kGate] = both.narrow(0, 0, ffn);
    of_weights[kUp] = both.narrow(0, ffn, ffn);
    of_weights[kDown] = ddown.take();
    of_weights[kO] = at::mm(dmiddle.t(), attended);
    if (weights[kOBias].defined()) of_weights[kOBias] = dmiddle.sum(0);
    gradients[1] =
        at::mm(dmiddle, weights[kO]).view({call->batch, call->tokens_a_sample, attended.size(1)});
    gradients[0] = dmiddle.view({call->batch, call->tokens_a_sample, dmiddle.size(1)});
    return gradients;
  }

 private:
  static int64_t run_of(const LayerCall& call, int64_t tokens) {
    const int64_t tile = call.options.mlp_tile;
    return std::max<int64_t>(1, std::min(tokens, tile == 0 ? kMlpRunOnDevice : tile));
  }
};

class DeviceNorm : public torch::autograd::Function<DeviceNorm> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                            double eps) {
    const at::Tensor rows = x.reshape({-1, x.size(-1)}).contiguous();
    at::Tensor out = at::empty_like(rows);
    const at::Tensor roots = norm(rows, {}, rows.size(0), {}, weight, eps, out);
    context->save_for_backward({rows, roots, weight});
    return out.view(x.sizes());
  }
  static variable_list backward(AutogradContext* context, const variable_list& upstream) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor dout = upstream[0].reshape(saved[0].sizes()).contiguous();
    at::Tensor dx = at::empty_like(dout);
    const at::Tensor dweight = norm_backward({.dout = dout.const_data_ptr(),
                                              .x = saved[0],
                                              .roots = saved[1],
                                              .weight = saved[2],
                                              .dx = dx.data_ptr()});
    return {dx.view(upstream[0].sizes()), dweight, at::Tensor()};
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
  call->rope = {rope.cos.contiguous(), rope.sin.contiguous()};
  const variable_list results = AttentionInputFunction::apply(
      h, l.input_norm, l.q_weight, l.k_weight, l.v_weight, maybe(l.q_bias), maybe(l.k_bias),
      maybe(l.v_bias), maybe(l.q_norm), maybe(l.k_norm), call);
  return {results[0], results[1], results[2], results[3]};
}

at::Tensor attention_output(const at::Tensor& h, const at::Tensor& attended,
                            const LayerParameters& l, const DeviceLayerOptions& options) {
  const CallPointer call = new_call(h, options);
  call->keeps_gate_up = options.mlp_tile == 0 && at::GradMode::is_enabled();
  return AttentionOutputFunction::apply(h, attended, l.o_weight, maybe(l.o_bias),
                                        l.post_attention_norm, l.gate_weight, l.up_weight,
                                        l.down_weight, call);
}

at::Tensor device_rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  return DeviceNorm::apply(x, weight, eps);
}

}  // namespace mtraining::model
