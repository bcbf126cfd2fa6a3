// Sparse attention forward for Hopper (sm_90a): tensor copies, wgmma, one producer warp and two consumer warpgroups.
//
// In:   ForwardParams (params.h) whose pointers are device pointers, the array `sources` itself and its structs on the host.
// Out:  the state, merged with what it held unless params.first; or its rounded form.
// Next: the dispatch in kernels/.
//
// dtype bf16 or fp16, head_dim 64 or 128 (96 and 256 where MTRAINING_ALL_KERNELS is on), any ratio of query heads to kv heads,
// softmax_scale > 0.
// Memory: q, k, v: 16-byte aligned, byte strides multiples of 16 (0 for an expanded batch or head); out: 8-byte aligned, even
// strides; rounded, residual: 16-byte aligned, strides multiples of 8. q_block_starts and block_starts: multiples of 64 where position_stride is 1; columns need position_stride 1.
// Workspace: gathered columns and the queue's counter; contents need not survive between launches.
// Stream: enqueues on params.stream, allocates nothing, never synchronises. Errors: InvalidArgument, Unsupported, ExternalError
// before anything is written. Cost: 4 * D flops a pair.
#pragma once

#include <cstdint>

#include "mtraining/kernels/params.h"

namespace mtraining::kernels::sm90 {

/// Bytes that params.workspace must have (256-byte aligned); does not look at params.workspace itself.
int64_t forward_workspace_bytes(const ForwardParams& params);

/// Whether params.out is read or written even where params.rounded is given.
bool needs_out(const ForwardParams& params);

void forward(const ForwardParams& params);

}  // namespace mtraining::kernels::sm90
