// Elementwise: the passes over activations that stand around attention in a layer, each one reading and writing what it must once.
//
// In:   contiguous rows in device memory, 16-byte aligned. Out: the others. Next: model/ (CUDA tensors), train/ (loss).
//
// dtype is float32 or bf16: what is stored; sums, exponentials and products are float32. Sums over tokens (gradients of norm weights
// and biases) go through partial sums of `partials`, one row a thread block, added up in a fixed order: the same bits every time
// on one kind of device.
// Stream: each enqueues on params.stream of the current device, allocates nothing, never synchronises.
// Errors, before anything is launched: InvalidArgument (sizes, null pointers), Unsupported (dtype, width), ExternalError (CUDA).
// Cost: bytes as said below; no flops to speak of.
#pragma once

#include <cstdint>

#include "mtraining/kernels/params.h"

namespace mtraining::kernels::elementwise_cuda {

/// Rows of `width` elements that lie as heads of a token: row r begins at (r / heads) * token_stride + (r % heads) * width.
/// heads = 1 and token_stride = width: plain rows.
struct Rows {
  int64_t heads = 1;
  int64_t token_stride = 0;
};

/// sum = x + added, rounded to dtype; out = sum / sqrt(mean(sum^2) + eps) * weight. Without `added` the sum is x.
struct RmsNormForward {
  DType dtype = DType::kBFloat16;
  int64_t rows = 0, width = 0;    // width: a multiple of 8, at most 16384
  const void* x = nullptr;        // [rows, width] as x_rows says
  Rows x_rows = {};               // token_stride 0: plain rows
  const void* added = nullptr;    // [rows, width] plain, or null
  const void* weight = nullptr;   // [width]
  void* sum = nullptr;            // [rows, width] plain; may be `added`; null without `added`
  void* out = nullptr;            // [rows, width] plain
  float* inverse_root = nullptr;  // [rows] 1 / sqrt(mean + eps)
  double eps = 0;
  void* stream = nullptr;
};
void rms_norm(const RmsNormForward& params);

/// dx = (added or 0) + the gradient of `x` (the sum, where there was one); dweight = sum over rows.
struct RmsNormBackward {
  DType dtype = DType::kBFloat16;
  int64_t rows = 0, width = 0;
  const void* dout = nullptr;  // as dout_rows says
  Rows dout_rows = {};
  const void* x = nullptr;  // as x_rows says
  Rows x_rows = {};
  Rows dx_rows = {};
  const void* weight = nullptr;         // [width]
  const float* inverse_root = nullptr;  // [rows]
  const void* added =
      nullptr;                // [rows, width] plain: a gradient that reached x another way, or null
  void* dx = nullptr;         // may be dout or added where plain
  void* dweight = nullptr;    // [width] dtype
  bool wide_dweight = false;  // dweight is float32: these rows are a part of all
  float* partials = nullptr;  // [rms_norm_partial_rows(), width]
  void* stream = nullptr;
};
int64_t rms_norm_partial_rows(DType dtype, int64_t rows, int64_t width);
void rms_norm_backward(const RmsNormBackward& params);

/// Rotates the first `rotated_heads` heads of each token in place: element i with element i + head_dim / 2.
struct Rope {
  DType dtype = DType::kBFloat16;
  int64_t tokens = 0, rotated_heads = 0, head_dim = 0;  // head_dim: a multiple of 8
  const float *cos = nullptr, *sin = nullptr;           // [table_tokens, head_dim / 2]
  int64_t table_tokens = 0;                             // token t has row t % table_tokens
  void* x = nullptr;
  int64_t token_stride = 0;  // elements
  void* stream = nullptr;
};
void rope(const Rope& params);

/// Gradient of q, k, v [tokens, heads, head_dim] after the rotation -> gradient of the row that holds q, k and v before it, and
/// its sum over tokens (the gradient of the biases).
struct RopeBackward {
  DType dtype = DType::kBFloat16;
  int64_t tokens = 0, q_heads = 0, kv_heads = 0, head_dim = 0;
  const float *cos = nullptr, *sin = nullptr;
  int64_t table_tokens = 0;
  const void *dq = nullptr, *dk = nullptr, *dv = nullptr;  // heads of a token are contiguous
  int64_t dq_token_stride = 0, dk_token_stride = 0, dv_token_stride = 0;
  void* drow = nullptr;       // [tokens, (q_heads + 2 kv_heads) * head_dim]
  void* dbias = nullptr;      // [(q_heads + 2 kv_heads) * head_dim] dtype, or null
  float* partials = nullptr;  // [rope_partial_rows(), the same]; null without dbias
  void* stream = nullptr;
};
int64_t rope_partial_rows(const RopeBackward& params);
void rope_backward(const RopeBackward& params);

/// product = silu(gate) * up; gate_up [rows, 2 width] holds gate, then up.
struct Swiglu {
  DType dtype = DType::kBFloat16;
  int64_t rows = 0, width = 0;  // width: a multiple of 8
  const void* gate_up = nullptr;
  void* product = nullptr;  // [rows, width]
  void* stream = nullptr;
};
void swiglu(const Swiglu& params);
/// The gradient of gate and up, and the product once more, which the gradient of the next matrix needs.
struct SwigluBackward {
  DType dtype = DType::kBFloat16;
  int64_t rows = 0, width = 0;
  const void* gate_up = nullptr;   // [rows, 2 width]
  const void* dproduct = nullptr;  // [rows, width]
  void* dgate_up = nullptr;        // [rows, 2 width]; may be gate_up
  void* product = nullptr;         // [rows, width]; may be dproduct
  void* stream = nullptr;
};
void swiglu_backward(const SwigluBackward& params);

/// loss[r] = logsumexp(logits[r]) - logits[r, label]; the gradient softmax - onehot takes the place of the logits. Rows of the label
/// `ignored`: loss 0, gradient 0, whatever the logits are. A label outside of the vocabulary: loss NaN.
struct CrossEntropy {
  DType logits_dtype = DType::kFloat32;
  DType gradient_dtype = DType::kBFloat16;  // no wider than the logits'
  int64_t rows = 0, vocab = 0;
  void* logits =
      nullptr;  // [rows, vocab]; row r of the gradient begins where row r of the logits does
  int64_t row_stride = 0;           // elements of logits_dtype
  const int64_t* labels = nullptr;  // [rows]
  int64_t ignored = 0;
  float* loss = nullptr;  // [rows]
  bool gradient = true;   // false: logits stay
  void* stream = nullptr;
};
void cross_entropy(const CrossEntropy& params);

}  // namespace mtraining::kernels::elementwise_cuda
