// The kernels of sparse attention, whichever back end serves them.
//
// In:   ForwardParams / BackwardParams (params.h). Out: state or gradients, in place. Next:
//       attention/.
//
// Errors: InvalidArgument / Unsupported before anything is written. Each back end has the same
//       functions in its namespace.
#pragma once

#include <cstdint>

#include "mtraining/kernels/params.h"

namespace mtraining::kernels {

/// (out_a, lse_a) merged with (out_b, lse_b) into a, over rows x head_dim; (0, -inf) is the neutral
/// element, bit-exactly.
/// Shapes: out [rows, head_dim] state dtype contiguous, lse [rows]. Source: docs/math/kernels.md.
void merge(DType state, int64_t rows, int64_t head_dim, void* out_a, void* lse_a, const void* out_b,
           const void* lse_b);

namespace ref {

/// Attends to every source and merges into the state. Cost: 4 * D flops a pair.
void forward(const ForwardParams& params);
bool needs_out(const ForwardParams& params);
/// Adds dq, dk, dv; refuses dq_rounded. Cost: 10 * D flops a pair. Deterministic for a given params
/// whatever the thread count.
void backward(const BackwardParams& params);
/// delta[b, h, i] = sum_d dout * out, 0 where lse is -inf (out is then not read).
void delta(const BackwardParams& params, const RoundedOut& out, void* delta);

}  // namespace ref
}  // namespace mtraining::kernels
