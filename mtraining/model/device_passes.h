// DevicePasses: what a layer on a GPU does before and after attention, forward and backward, over runs of tokens. Private to model/.
//
// In:   rows [tokens, ..], a layer's parameters. Out: the other rows; gradients. Next: device_layer.cc, which gives them to autograd,
//       or runs a whole layer's gradient with them.
//
// A run is mlp_tile tokens (kMlpRunOnDevice where that is 0), everywhere: whoever makes something again makes the same products, and
// so the same bits. norm(h) and norm(h + o) live within a run alone; backward makes them again from what they are norms of. Sums over
// runs are float32.
// Stream: the current one; nothing here waits for the device.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cstdint>
#include <string_view>

#include "mtraining/model/device_layer.h"

namespace mtraining::model {

/// What a layer's functions know beside tensors. Its forward and backward share it.
struct LayerCall : torch::CustomClassHolder {
  DeviceLayerOptions options;
  RopeTable rope;
  int64_t batch = 0, tokens_a_sample = 0;
  bool keeps_middle = false, keeps_gate_up = false;

  int64_t tokens() const { return batch * tokens_a_sample; }
  int64_t q_width() const { return options.num_q_heads * options.head_dim; }
  int64_t kv_width() const { return options.num_kv_heads * options.head_dim; }
  int64_t row_width() const { return q_width() + 2 * kv_width(); }
  int64_t run() const {
    const int64_t tile = options.mlp_tile == 0 ? kMlpRunOnDevice : options.mlp_tile;
    return std::max<int64_t>(1, std::min(tokens(), tile));
  }
};

/// The tensors as one whose first dimension is the sum of theirs, without a copy; undefined where they do not lie so.
at::Tensor joined(at::TensorList parts);

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

/// Undefined without norms of q and k.
struct BeforeHeadNorms {
  at::Tensor rows;              // [tokens, row_width]: q, k, v
  at::Tensor q_roots, k_roots;  // [tokens * heads]
};
struct ProjectedInput {
  at::Tensor q, k, v;  // [tokens, heads * D]; views of one memory where there is no norm of q and k
  BeforeHeadNorms raw;
};
/// h [tokens, hidden]: norm, product, norms of q and k, rotation.
ProjectedInput project_input(const LayerCall& call, const at::Tensor& h, const LayerParameters& l);

struct InputGradients {
  at::Tensor dq, dk, dv;          ///< [tokens, heads * D]; freed on the way
  at::Tensor residual;            ///< gradient that reached h another way, or undefined
  bool residual_is_free = false;  ///< its memory may become the result's
};
/// Returns the gradient of h; fills those of the norm, of q, k, v and of what belongs to them.
at::Tensor input_backward(const LayerCall& call, const at::Tensor& h, const LayerParameters& l,
                          const BeforeHeadNorms& raw, InputGradients given,
                          LayerParameters& gradients);

struct Output {
  at::Tensor out;      // [tokens, hidden]
  at::Tensor middle;   // h + o, where call.keeps_middle
  at::Tensor gate_up;  // [tokens, 2 ffn], where call.keeps_gate_up
};
/// attended [tokens, H * D]: product o, residual, norm, SwiGLU, residual.
Output project_output(const LayerCall& call, const at::Tensor& h, const at::Tensor& attended,
                      const LayerParameters& l);

struct OutputGradients {
  at::Tensor middle;    ///< of h + o, and so of h
  at::Tensor attended;  ///< of attention's result
};
/// What `kept` lacks is made again. `dout_is_free`: its memory may become that of OutputGradients::middle. Fills the gradients of o,
/// of the second norm, of gate, up and down.
OutputGradients output_backward(const LayerCall& call, const at::Tensor& h,
                                const at::Tensor& attended, const LayerParameters& l,
                                const Output& kept, at::Tensor dout, bool dout_is_free,
                                LayerParameters& gradients);

/// One norm over all rows, and its backward, for the decoder's last one. roots: [rows].
at::Tensor norm_rows(const at::Tensor& x, const at::Tensor& weight, double eps, at::Tensor& out);
struct NormRowsGradient {
  at::Tensor x, weight;
};
NormRowsGradient norm_rows_backward(const at::Tensor& x, const at::Tensor& weight,
                                    const at::Tensor& roots, at::Tensor dout);

}  // namespace mtraining::model
