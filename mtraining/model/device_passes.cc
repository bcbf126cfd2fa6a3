#include "mtraining/model/device_passes.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "mtraining/attention/tensors.h"
#include "mtraining/kernels/elementwise_cuda/elementwise.h"
#include "mtraining/model/token_runs.h"

namespace mtraining::model {

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

namespace {

namespace elementwise = kernels::elementwise_cuda;

kernels::DType dtype_of(const at::Tensor& tensor) {
  return attention::kernel_dtype(tensor, "a layer on a GPU");
}
void* stream_of(const at::Tensor& tensor) { return attention::current_stream(tensor.device()); }
at::Tensor floats(at::IntArrayRef shape, const at::Tensor& like) {
  return at::empty(shape, like.options().dtype(at::kFloat));
}

/// rows = x weights^T + biases, the parts beside each other. Undefined biases: none.
void project(at::Tensor rows, const at::Tensor& x, at::TensorList weights, at::TensorList biases) {
  const bool has_bias = biases.front().defined();
  if (const at::Tensor weight = joined(weights); weight.defined()) {
    at::Tensor bias = has_bias ? joined(biases) : at::Tensor();
    if (has_bias && !bias.defined()) bias = at::cat(biases);  // short: cheaper than more products
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

/// Fills out [rows, width] and roots [rows]; where `added` is given, overwrites it with x + added.
void norm(const at::Tensor& x, elementwise::Rows x_rows, at::Tensor added, const at::Tensor& weight,
          double eps, at::Tensor& out, at::Tensor& roots) {
  elementwise::rms_norm({.dtype = dtype_of(x),
                         .rows = roots.numel(),
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
}

/// Gradients of norms over runs of rows; the gradient of their weight is summed over them.
class NormBackward {
 public:
  NormBackward(const at::Tensor& weight, int64_t rows, int64_t run)
      : weight_(weight),
        of_runs_(floats({std::max<int64_t>(1, (rows + run - 1) / run), weight.numel()}, weight)),
        partials_(floats({elementwise::rms_norm_partial_rows(dtype_of(weight), std::min(rows, run),
                                                             weight.numel()),
                          weight.numel()},
                         weight)) {}

  struct Rows {
    const at::Tensor& dout;
    elementwise::Rows dout_rows = {};
    const at::Tensor& x;
    elementwise::Rows x_rows = {};
    const at::Tensor& roots;
    at::Tensor added = {};
    const at::Tensor& dx;  ///< may be dout or added; rows as dout's
  };
  void add(const Rows& g) {
    at::Tensor dweight = of_runs_[next_++];
    elementwise::rms_norm_backward({.dtype = dtype_of(g.x),
                                    .rows = g.roots.numel(),
                                    .width = weight_.numel(),
                                    .dout = g.dout.const_data_ptr(),
                                    .dout_rows = g.dout_rows,
                                    .x = g.x.const_data_ptr(),
                                    .x_rows = g.x_rows,
                                    .dx_rows = g.dout_rows,
                                    .weight = weight_.const_data_ptr(),
                                    .inverse_root = g.roots.const_data_ptr<float>(),
                                    .added = g.added.defined() ? g.added.const_data_ptr() : nullptr,
                                    .dx = g.dx.data_ptr(),
                                    .dweight = dweight.data_ptr(),
                                    .wide_dweight = true,
                                    .partials = partials_.data_ptr<float>(),
                                    .stream = stream_of(g.x)});
  }
  at::Tensor take() {
    const at::Tensor sum = of_runs_.size(0) == 1 ? of_runs_[0] : of_runs_.sum(0);
    return sum.to(weight_.scalar_type());
  }

 private:
  const at::Tensor& weight_;
  at::Tensor of_runs_, partials_;
  int64_t next_ = 0;
};

int64_t table_tokens(const LayerCall& call) {
  return call.rope.cos.numel() / (call.options.head_dim / 2);
}

/// Turns the first heads of each row, in place.
void turn(const LayerCall& call, at::Tensor& rows, int64_t heads) {
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

/// In place over the heads of drow that begin at `column`. Returns the gradient of the weight.
at::Tensor head_norm_backward(at::Tensor& drow, const at::Tensor& raw, int64_t column,
                              int64_t heads, const at::Tensor& roots, const at::Tensor& weight) {
  const at::Tensor d = drow.narrow(1, column, heads * weight.numel());
  const at::Tensor x = raw.narrow(1, column, heads * weight.numel());
  const elementwise::Rows rows{heads, drow.size(1)};
  NormBackward backward(weight, roots.numel(), roots.numel());
  backward.add({.dout = d, .dout_rows = rows, .x = x, .x_rows = rows, .roots = roots, .dx = d});
  return backward.take();
}

}  // namespace

ProjectedInput project_input(const LayerCall& call, const at::Tensor& h, const LayerParameters& l) {
  const DeviceLayerOptions& o = call.options;
  const int64_t tokens = call.tokens(), run = call.run();
  const at::Tensor rows = at::empty({tokens, call.row_width()}, h.options());
  {
    at::Tensor x = at::empty({run, h.size(1)}, h.options()), roots = floats({run}, h);
    for_each_run(tokens, run, [&](int64_t begin, int64_t count) {
      at::Tensor normed = x.narrow(0, 0, count), of_rows = roots.narrow(0, 0, count);
      {
        const Stretch stretch(call, "norm");
        norm(h.narrow(0, begin, count), {}, {}, l.input_norm, o.rms_norm_eps, normed, of_rows);
      }
      project(rows.narrow(0, begin, count), normed, {l.q_weight, l.k_weight, l.v_weight},
              {l.q_bias, l.k_bias, l.v_bias});
    });
  }
  ProjectedInput input;
  input.q = rows.narrow(1, 0, call.q_width());
  input.k = rows.narrow(1, call.q_width(), call.kv_width());
  input.v = rows.narrow(1, call.q_width() + call.kv_width(), call.kv_width());
  if (!l.q_norm.defined()) {
    at::Tensor all = rows;
    turn(call, all, o.num_q_heads + o.num_kv_heads);
    return input;
  }
  input.raw = {rows, floats({tokens * o.num_q_heads}, h), floats({tokens * o.num_kv_heads}, h)};
  at::Tensor q = at::empty({tokens, call.q_width()}, h.options());
  at::Tensor k = at::empty({tokens, call.kv_width()}, h.options());
  norm(input.q, {o.num_q_heads, call.row_width()}, {}, l.q_norm, o.rms_norm_eps, q,
       input.raw.q_roots);
  norm(input.k, {o.num_kv_heads, call.row_width()}, {}, l.k_norm, o.rms_norm_eps, k,
       input.raw.k_roots);
  turn(call, q, o.num_q_heads);
  turn(call, k, o.num_kv_heads);
  input.q = q;
  input.k = k;
  return input;
}

at::Tensor input_backward(const LayerCall& call, const at::Tensor& h, const LayerParameters& l,
                          const BeforeHeadNorms& raw, InputGradients given,
                          LayerParameters& gradients) {
  const Stretch stretch(call, "attention_input backward");
  const DeviceLayerOptions& o = call.options;
  const int64_t tokens = call.tokens(), run = call.run(), row_width = call.row_width(),
                q_width = call.q_width(), kv_width = call.kv_width();
  at::Tensor drow = at::empty({tokens, row_width}, h.options());
  const bool has_bias = l.q_bias.defined(), has_norm = l.q_norm.defined();
  at::Tensor dbias;
  {
    at::Tensor partials;
    elementwise::RopeBackward turn_back{.dtype = dtype_of(h),
                                        .tokens = tokens,
                                        .q_heads = o.num_q_heads,
                                        .kv_heads = o.num_kv_heads,
                                        .head_dim = o.head_dim,
                                        .cos = call.rope.cos.const_data_ptr<float>(),
                                        .sin = call.rope.sin.const_data_ptr<float>(),
                                        .table_tokens = table_tokens(call),
                                        .dq = given.dq.const_data_ptr(),
                                        .dk = given.dk.const_data_ptr(),
                                        .dv = given.dv.const_data_ptr(),
                                        .dq_token_stride = q_width,
                                        .dk_token_stride = kv_width,
                                        .dv_token_stride = kv_width,
                                        .drow = drow.data_ptr(),
                                        .stream = stream_of(h)};
    if (has_bias && !has_norm) {
      dbias = at::empty({row_width}, h.options());
      partials = floats({elementwise::rope_partial_rows(turn_back), row_width}, h);
      turn_back.dbias = dbias.data_ptr();
      turn_back.partials = partials.data_ptr<float>();
    }
    elementwise::rope_backward(turn_back);
  }
  given.dq.reset();
  given.dk.reset();
  given.dv.reset();
  if (has_norm) {
    gradients.q_norm = head_norm_backward(drow, raw.rows, 0, o.num_q_heads, raw.q_roots, l.q_norm);
    gradients.k_norm =
        head_norm_backward(drow, raw.rows, q_width, o.num_kv_heads, raw.k_roots, l.k_norm);
    if (has_bias) dbias = drow.sum(0);
  }
  const at::Tensor dh = given.residual_is_free ? given.residual : at::empty_like(h);
  at::Tensor x = at::empty({run, h.size(1)}, h.options()), dx = at::empty_like(x),
             roots = floats({run}, h);
  ProductSum products(run < tokens);
  NormBackward norms(l.input_norm, tokens, run);
  for_each_run(tokens, run, [&](int64_t begin, int64_t count) {
    const at::Tensor h_rows = h.narrow(0, begin, count), d_rows = drow.narrow(0, begin, count);
    at::Tensor normed = x.narrow(0, 0, count), of_rows = roots.narrow(0, 0, count);
    {
      const Stretch norm_stretch(call, "norm");
      norm(h_rows, {}, {}, l.input_norm, o.rms_norm_eps, normed, of_rows);
    }
    products.add(d_rows, normed);
    const at::Tensor dnormed = dx.narrow(0, 0, count);
    project_back(dnormed, d_rows, {l.q_weight, l.k_weight, l.v_weight});
    const Stretch norm_stretch(call, "norm");
    norms.add(
        {.dout = dnormed,
         .x = h_rows,
         .roots = of_rows,
         .added = given.residual.defined() ? given.residual.narrow(0, begin, count) : at::Tensor(),
         .dx = dh.narrow(0, begin, count)});
  });
  gradients.input_norm = norms.take();
  const at::Tensor dweight = products.take();
  gradients.q_weight = dweight.narrow(0, 0, q_width);
  gradients.k_weight = dweight.narrow(0, q_width, kv_width);
  gradients.v_weight = dweight.narrow(0, q_width + kv_width, kv_width);
  if (has_bias) {
    gradients.q_bias = dbias.narrow(0, 0, q_width);
    gradients.k_bias = dbias.narrow(0, q_width, kv_width);
    gradients.v_bias = dbias.narrow(0, q_width + kv_width, kv_width);
  }
  return dh;
}

namespace {

/// h + o of a run, and its norm.
void make_middle(const LayerCall& call, const at::Tensor& h, const at::Tensor& attended,
                 const LayerParameters& l, at::Tensor middle, at::Tensor y, at::Tensor roots) {
  project(middle, attended, {l.o_weight}, {l.o_bias});
  const Stretch stretch(call, "norm");
  norm(h, {}, middle, l.post_attention_norm, call.options.rms_norm_eps, y, roots);
}

void swiglu(const at::Tensor& gate_up, at::Tensor& product) {
  elementwise::swiglu({.dtype = dtype_of(gate_up),
                       .rows = gate_up.size(0),
                       .width = gate_up.size(1) / 2,
                       .gate_up = gate_up.const_data_ptr(),
                       .product = product.data_ptr(),
                       .stream = stream_of(gate_up)});
}

}  // namespace

Output project_output(const LayerCall& call, const at::Tensor& h, const at::Tensor& attended,
                      const LayerParameters& l) {
  const int64_t tokens = call.tokens(), run = call.run(), ffn = l.gate_weight.size(0);
  Output output;
  output.out = at::empty_like(h);
  if (call.keeps_middle) output.middle = at::empty_like(h);
  at::Tensor gate_up = at::empty({call.keeps_gate_up ? tokens : run, 2 * ffn}, h.options());
  at::Tensor y = at::empty({run, h.size(1)}, h.options()), roots = floats({run}, h),
             products = at::empty({run, ffn}, h.options());
  for_each_run(tokens, run, [&](int64_t begin, int64_t count) {
    at::Tensor to = output.out.narrow(0, begin, count), normed = y.narrow(0, 0, count),
               product = products.narrow(0, 0, count),
               both = gate_up.narrow(0, call.keeps_gate_up ? begin : 0, count);
    const at::Tensor middle = call.keeps_middle ? output.middle.narrow(0, begin, count) : to;
    make_middle(call, h.narrow(0, begin, count), attended.narrow(0, begin, count), l, middle,
                normed, roots.narrow(0, 0, count));
    project(both, normed, {l.gate_weight, l.up_weight}, {at::Tensor(), at::Tensor()});
    swiglu(both, product);
    at::addmm_out(to, middle, product, l.down_weight.t());
  });
  if (call.keeps_gate_up) output.gate_up = gate_up;
  return output;
}

OutputGradients output_backward(const LayerCall& call, const at::Tensor& h,
                                const at::Tensor& attended, const LayerParameters& l,
                                const Output& kept, at::Tensor dout, bool dout_is_free,
                                LayerParameters& gradients) {
  const Stretch stretch(call, "mlp backward");
  const int64_t tokens = call.tokens(), run = call.run(), hidden = h.size(1),
                ffn = l.gate_weight.size(0);
  OutputGradients result;
  result.middle = dout_is_free ? dout : at::empty_like(dout);
  result.attended = at::empty_like(attended);
  const auto tile = [&](int64_t width) { return at::empty({run, width}, h.options()); };
  at::Tensor y = tile(hidden), dy = tile(hidden), roots = floats({run}, h), dproduct = tile(ffn),
             dgate_up = tile(2 * ffn),
             middles = kept.middle.defined() ? at::Tensor() : tile(hidden);
  ProductSum dgates(run < tokens), ddown(run < tokens), d_o(run < tokens);
  NormBackward norms(l.post_attention_norm, tokens, run);
  for_each_run(tokens, run, [&](int64_t begin, int64_t count) {
    const auto rows = [&](const at::Tensor& all) { return all.narrow(0, begin, count); };
    const auto first = [&](const at::Tensor& all) { return all.narrow(0, 0, count); };
    const at::Tensor d = rows(dout), product = first(dproduct), dnormed = first(dy);
    at::Tensor normed = first(y), of_rows = first(roots), both = first(dgate_up), middle;
    if (kept.middle.defined()) {
      middle = rows(kept.middle);
      const Stretch norm_stretch(call, "norm");
      norm(middle, {}, {}, l.post_attention_norm, call.options.rms_norm_eps, normed, of_rows);
    } else {
      middle = first(middles);
      make_middle(call, rows(h), rows(attended), l, middle, normed, of_rows);
    }
    if (!kept.gate_up.defined())
      project(both, normed, {l.gate_weight, l.up_weight}, {at::Tensor(), at::Tensor()});
    at::Tensor dp = product;
    at::mm_out(dp, d, l.down_weight);
    elementwise::swiglu_backward({.dtype = dtype_of(both),
                                  .rows = count,
                                  .width = ffn,
                                  .gate_up = kept.gate_up.defined()
                                                 ? rows(kept.gate_up).const_data_ptr()
                                                 : both.const_data_ptr(),
                                  .dproduct = product.const_data_ptr(),
                                  .dgate_up = both.data_ptr(),
                                  .product = product.data_ptr(),
                                  .stream = stream_of(both)});
    ddown.add(d, product);
    dgates.add(both, normed);
    project_back(dnormed, both, {l.gate_weight, l.up_weight});
    const at::Tensor dmiddle = rows(result.middle);
    {
      const Stretch norm_stretch(call, "norm");
      norms.add({.dout = dnormed, .x = middle, .roots = of_rows, .added = d, .dx = dmiddle});
    }
    d_o.add(dmiddle, rows(attended));
    at::Tensor dattended = rows(result.attended);
    at::mm_out(dattended, dmiddle, l.o_weight);
  });
  gradients.post_attention_norm = norms.take();
  const at::Tensor both = dgates.take();
  gradients.gate_weight = both.narrow(0, 0, ffn);
  gradients.up_weight = both.narrow(0, ffn, ffn);
  gradients.down_weight = ddown.take();
  gradients.o_weight = d_o.take();
  if (l.o_bias.defined()) gradients.o_bias = result.middle.sum(0);
  return result;
}

at::Tensor norm_rows(const at::Tensor& x, const at::Tensor& weight, double eps, at::Tensor& out) {
  at::Tensor roots = floats({x.size(0)}, x);
  norm(x, {}, {}, weight, eps, out, roots);
  return roots;
}

NormRowsGradient norm_rows_backward(const at::Tensor& x, const at::Tensor& weight,
                                    const at::Tensor& roots, at::Tensor dout) {
  NormBackward backward(weight, x.size(0), x.size(0));
  const at::Tensor dx = at::empty_like(dout);
  backward.add({.dout = dout, .x = x, .roots = roots, .dx = dx});
  return {dx, backward.take()};
}

}  // namespace mtraining::model
