// RingCall: the checked inputs of one forward or backward, and the agreement of all ranks that they mean the same one.
//
// In:   what the caller passed. Out: tensors as kernels and transports need them; or InvalidArgument, before any shard moves.
// Next: ring_attention.cc runs it, autograd.cc makes it.
#pragma once

#include <ATen/core/Tensor.h>

#include "mtraining/attention/buffers.h"
#include "mtraining/attention/ring_context.h"
#include "mtraining/attention/ring_pass.h"

namespace mtraining::attention {

struct RingCall {
  at::Tensor q;     ///< [B, n, H, D], rows contiguous
  at::Tensor k, v;  ///< [B, n, Hk, D], contiguous: they travel
  double softmax_scale = 0;
  at::Tensor document_start;  ///< [B, n] int32 of this rank's rows, or undefined
};

/// Collective (one small exchange of host memory). Errors: InvalidArgument,
/// Unsupported naming the input, what was expected and got.
RingCall checked_call(RingContext::State& state, IndexPlan& plan, const char* direction,
                      const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                      double softmax_scale, const at::Tensor& document_starts);
/// The same of a forward whose index the ranks' GPUs are yet to choose together.
RingCall checked_call(RingContext::State& state, const at::Tensor& q, const at::Tensor& k,
                      const at::Tensor& v, double softmax_scale, const at::Tensor& document_starts);
/// Local. dout, out and out_residual (where defined) as q, lse [B, H, n].
void check_gradient_inputs(const at::Tensor& q, const at::Tensor& dout, const ForwardResult& saved);

ForwardResult ring_forward(RingContext::State& state, IndexPlan& plan, const RingCall& call);
/// A forward whose first transfers are under way, on a GPU: while its index is chosen.
struct StartedForward {
  StartedForward(RingContext::State& state, RingCall checked);

  RingCall call;
  RingSlots slots;
  RingPass pass;
};
/// `plan`: of the sizes that `started` was checked with. Once.
ForwardResult ring_forward(RingContext::State& state, IndexPlan& plan, StartedForward& started);
/// dout: rows contiguous; saved.lse contiguous. What is moved in goes as BackwardInputs say.
BackwardResult ring_backward(RingContext::State& state, IndexPlan& plan, RingCall call,
                             at::Tensor dout, ForwardResult saved);
/// rows [B, n, ..] with zeros at padded positions; itself where there are none, and on the CPU, whose kernels do not look there.
at::Tensor without_padding(const RingContext::State& state, at::Tensor rows);
/// Both checks, then ring_backward.
BackwardResult checked_backward(RingContext::State& state, IndexPlan& plan, BackwardInputs inputs,
                                double softmax_scale, const at::Tensor& document_starts);

}  // namespace mtraining::attention
