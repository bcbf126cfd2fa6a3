// Sparse attention forward for compute capability 8.0 and newer: mma.sync, cp.async.
//
// In:   ForwardParams (params.h) whose pointers are device pointers, the array `sources` itself and its structs on the host.
// Out:  the state, merged with what it held unless params.first; or its rounded form. Next: the dispatch in kernels/.
//
// dtype bf16 or fp16, head_dim up to 256 (work is that of 64, 128 or 256), any ratio of query heads to kv heads, any strides (0
// too) and alignments of inputs, any position_stride; rows that are 16-byte aligned are read much faster.
// Workspace: counters and the bounds of query blocks; contents need not survive between launches.
// Stream: enqueues on params.stream, allocates nothing, never synchronises. Errors: InvalidArgument, Unsupported, ExternalError
// before anything is written. Cost: 4 * D flops a pair.
#pragma once

#include <cstdint>

#include "mtraining/kernels/params.h"

namespace mtraining::kernels::sm80 {

/// Bytes that params.workspace must have (256-byte aligned); does not look at params.workspace itself.
int64_t forward_workspace_bytes(const ForwardParams& params);

/// Whether params.out is read or written even where params.rounded is given.
bool needs_out(const ForwardParams& params);

void forward(const ForwardParams& params);

}  // namespace mtraining::kernels::sm80
