// Sparse attention backward for Hopper (sm_90a): 128 keys a thread block walk the query blocks that list them.
//
// In:   BackwardParams (params.h) whose pointers are device pointers, the array `sources` itself and its structs on the host.
// Out:  dq, dk, dv, added to what is there. Next: the dispatch in kernels/.
//
// dtype bf16 or fp16, head_dim 64 or 128, any ratio of query heads to kv heads, softmax_scale > 0.
// deterministic: dq is computed by a launch of its own, query by query, and the result is bitwise the same whatever else runs; else parts
// of dq, dk and dv are added as they come.
// Memory: q, k, v, dout: 16-byte aligned, byte strides multiples of 16 (0 for an expanded batch or head; tokens expanded with stride 0
// are Unsupported); dq: 16-byte aligned, strides multiples of 4; dk, dv: 8-byte aligned, even strides; dq_rounded: 16-byte
// aligned, strides multiples of 8. CSR lists need their
// transpose (key_row_begin, query_blocks). Columns need position_stride 1.
// Workspace: statistics of rows, gathered columns and their gradients; contents need not survive between launches.
// Stream: enqueues on params.stream, allocates nothing, never synchronises. Errors: InvalidArgument, Unsupported, ExternalError
// before anything is written. Cost: 10 * D flops a pair, 14 * D where deterministic.
#pragma once

#include <cstdint>

#include "mtraining/kernels/params.h"

namespace mtraining::kernels::sm90 {

/// Bytes that params.workspace must have (256-byte aligned); does not look at params.workspace itself.
int64_t backward_workspace_bytes(const BackwardParams& params);

/// Whether dq_rounded can be written: where deterministic, over at most 32 sources.
bool rounds_dq(const BackwardParams& params);

void backward(const BackwardParams& params);

/// delta[b, h, i] = sum over D of dout * out, 0 where lse is -inf (whatever out and dout then hold). out, dout: 16-byte aligned,
/// strides multiples of 8, 0 allowed. Uses no workspace.
void delta(const BackwardParams& params, const RoundedOut& out, void* delta);

}  // namespace mtraining::kernels::sm90
