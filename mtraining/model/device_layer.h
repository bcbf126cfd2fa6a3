// DeviceLayer: a decoder's layer on a GPU as two differentiable functions, one before attention and one after it, or as one gradient.
//
// In:   h [B, n, hidden], the layer's parameters, rotary tables. Out: q, k, v; then h after the layer. Next: decoder.h.
//
// attention_input: norm, one product for q, k and v, rotation in place. attention_output: product o, residual and norm in one pass, the
// SwiGLU part, residual; both over runs of tokens. Where the weights of q, k, v (gate, up) lie behind one another in memory their product
// is one (join_projections; parameters that optim/ lays out anew keep it, but where a bucket ends among them); elsewhere there are as
// many products into the same rows. Products are cuBLAS's, float32 inside; the passes
// between them are kernels/elementwise_cuda. Sums over runs are float32, so that other runs than one change last bits.
// Kept between forward and backward, a token: h, q, k, v; attended, h + o; with mlp_tile = 0 gate and up too. Norms are made again.
// bf16 and float32. Stream: the current one; nothing here waits for the device. Deterministic.
// Source: as decoder.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string_view>

#include "mtraining/model/decoder.h"
#include "mtraining/model/layer_gradient.h"
#include "mtraining/model/rope.h"

namespace mtraining::model {

/// Tokens of a run where mlp_tile is 0: wide enough that adding up the weights' gradients costs little.
inline constexpr int64_t kMlpRunOnDevice = 32768;

/// Hears of stretches within the functions, forward and backward: "norm", "attention_input backward", "mlp backward"; of layer_gradients
/// "recompute" too.
using StretchObserver = std::function<void(std::string_view part, bool begins)>;

struct DeviceLayerOptions {
  int64_t num_q_heads = 0, num_kv_heads = 0, head_dim = 0;
  double rms_norm_eps = 0;
  int64_t mlp_tile = 0;
  StretchObserver observe;
};

/// Moves the values of q, k and v's weights (their biases; gate's and up's weights) of each layer behind one another, where they
/// are not. The tensors stay the same objects. Cost: a copy of a layer's weights at a time.
void join_projections(DecoderParameters& parameters);

struct AttentionInput {
  at::Tensor q, k,
      v;  ///< [B, n, H, D], [B, n, Hk, D] x 2: views of one memory where there is no norm of q and k
  at::Tensor h;  ///< the layer's input, through which the residual's gradient must come back
};
/// Errors: InvalidArgument, Unsupported on shapes and dtypes (elementwise.h).
AttentionInput attention_input(const at::Tensor& h, const LayerParameters& layer,
                               const RopeTable& rope, const DeviceLayerOptions& options);

/// h: AttentionInput::h; attended [B, n, H * D]. Memory: run x (3 ffn + hidden) elements beside what is kept.
at::Tensor attention_output(const at::Tensor& h, const at::Tensor& attended,
                            const LayerParameters& layer, const DeviceLayerOptions& options);

/// Not differentiable. `upstream`, of the layer's output, is written over where nobody else holds it. Memory, in elements a token beside h
/// and upstream: q, k, v; attended and what its rounding lost; the gradient of attended; then attention's own.
LayerGradients layer_gradients(const at::Tensor& h, at::Tensor upstream,
                               const LayerParameters& layer, const RopeTable& rope,
                               const AttentionRuns& attention, const DeviceLayerOptions& options);

/// x [.., width]; differentiable.
at::Tensor device_rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps);

}  // namespace mtraining::model
