// Dense alone: causal attention over every pair on one GPU, by torch's own kernels (cuDNN's, or the memory-efficient ones).
//
// In:   q, k, v of a whole sequence in order, one document. Out: as ring_attention.h has it, lse included, and gradients.
// Next: ring_attention.cc takes it where dispatch chooses `torch`.
//
// Stream: the current one; never synchronises.
#pragma once

#include "mtraining/attention/ring_attention.h"

namespace mtraining::attention {

/// "cudnn" | "efficient": which of torch's kernels serve the dtype and head_dim.
const char* dense_alone_kernels(at::ScalarType dtype, int64_t head_dim);

/// q [B, n, H, D], k, v [B, n, Hk, D]; tokens at and beyond seq_len are padding. No out_residual: out is what these kernels round.
ForwardResult dense_alone_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                  int64_t seq_len, double softmax_scale);
/// saved: dense_alone_forward's. Deterministic with "efficient" only.
BackwardResult dense_alone_backward(const at::Tensor& dout, const at::Tensor& q,
                                    const at::Tensor& k, const at::Tensor& v,
                                    const ForwardResult& saved, int64_t seq_len,
                                    double softmax_scale);

}  // namespace mtraining::attention
