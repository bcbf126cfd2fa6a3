// Attend: sparse attention of whole sequences on one device, forward and backward, over a given index.
//
// In:   q, k, v, the tensors of an index or the bits of blocks. Out: out and lse; dq, dk, dv. Next: register.cc makes operators of them.
//
// Shapes: q, dout, out [B, S, H, D], k, v [B, S, Hk, D] of one dtype (bf16, fp16, float32, float64), any strides, any S >= 1;
// lse [B, H, S] float32 (float64 for float64); document_starts [B, S] int32 or undefined. Memory: the CPU's.
// Errors: InvalidArgument, Unsupported naming the input, what was expected and got.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

#include "mtraining/torch_ops/block_bits.h"
#include "mtraining/torch_ops/index_tensors.h"

namespace mtraining::torch_ops {

struct AttendInputs {
  at::Tensor q, k, v;
  IndexTensors index;
  at::Tensor document_starts;
  double softmax_scale = 0;  ///< 0: 1 / sqrt(head_dim)
  BlockBits blocks = {};     ///< defined: in place of index
};

/// What forward gives and backward takes.
struct Attended {
  at::Tensor out, lse;
  /// Shape and dtype of out: what rounding it lost; [0] where nothing was rounded. Backward subtracts dout . out from dout . v;
  /// where one key has nearly all the weight they cancel, and the rounding of a bf16 out would be all that is left.
  at::Tensor out_residual;
};

/// Cost: 4 * D flops a pair.
Attended attend(const AttendInputs& inputs);
/// (dq, dk, dv) in the dtype of q, k, v; the index is a constant. Cost: 10 * D flops a pair. Deterministic.
std::tuple<at::Tensor, at::Tensor, at::Tensor> attend_backward(const AttendInputs& inputs,
                                                               const at::Tensor& dout,
                                                               const Attended& attended);

/// InvalidArgument unless q [B, S, H, D], k (and v) [B, S, Hk, D] fit one another; v may be undefined.
void check_shapes(const at::Tensor& q, const at::Tensor& k, const at::Tensor* v);
/// Contiguous and checked: each row's document starts at or before it. Undefined stays undefined.
at::Tensor checked_document_starts(const at::Tensor& document_starts, int64_t batch,
                                   int64_t seq_len);
double checked_scale(double softmax_scale, int64_t head_dim);

}  // namespace mtraining::torch_ops
