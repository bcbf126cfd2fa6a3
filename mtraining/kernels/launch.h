// Launch: runs an attention call on the back end that dispatch chose.
//
// In:   ForwardParams / BackwardParams in the memory of that back end, a workspace where it asks for one.
// Out:  state or gradients, in place. Next: attention/ and torch_ops/.
//
// Back ends of a GPU enqueue on params.stream of the current device, allocate nothing and never synchronise. Errors:
// InvalidArgument, Unsupported, ExternalError before anything is written.
#pragma once

#include <cstdint>

#include "mtraining/kernels/dispatch.h"
#include "mtraining/kernels/params.h"

namespace mtraining::kernels {

/// The thread's current CUDA device. Errors: Unsupported where the build has no CUDA, ExternalError from CUDA.
DeviceKind current_cuda_device();

/// Bytes that params.workspace must have, 256-byte aligned; 0: none.
int64_t workspace_bytes(Backend backend, const ForwardParams& params);
int64_t workspace_bytes(Backend backend, const BackwardParams& params);

/// Whether the launch needs params.out even where params.rounded is given.
bool needs_out(Backend backend, const ForwardParams& params);
/// Whether the launch can write params.dq_rounded.
bool rounds_dq(Backend backend, const BackwardParams& params);

void forward(Backend backend, const ForwardParams& params);
void backward(Backend backend, const BackwardParams& params);
/// delta[b, h, i] = sum_d dout * out, 0 where lse is -inf.
void delta(Backend backend, const BackwardParams& params, const RoundedOut& out, void* delta);

}  // namespace mtraining::kernels
