// Sparse attention backward for compute capability 8.0 and newer: mma.sync, cp.async.
//
// In:   BackwardParams (params.h) whose pointers are device pointers, the array `sources` itself and its structs on the host.
// Out:  dq, dk, dv, added to. Next: the dispatch in kernels/.
//
// Takes what forward.h takes. Two passes over the same lists. Key pass: a thread block has 64 keys of a kv head and walks the
// query blocks of all its query heads in order; dk and dv stay in registers. By default it adds dq atomically as well. With
// params.deterministic dq is summed by a query pass of its own (7 products a tile instead of 5), and the heads' shares of columns
// are added in head order: the same bits on every run, whatever else the device does.
// Workspace: counters and the bounds of query blocks; contents need not survive between launches.
// Stream: enqueues on params.stream, allocates nothing, never synchronises. Errors: InvalidArgument, Unsupported, ExternalError
// before anything is written. Cost: 10 * D flops a pair, 14 * D if deterministic.
#pragma once

#include <cstdint>

#include "mtraining/kernels/params.h"

namespace mtraining::kernels::sm80 {

/// Bytes that params.workspace must have (256-byte aligned); does not look at params.workspace itself.
int64_t backward_workspace_bytes(const BackwardParams& params);

/// delta: of delta().
void backward(const BackwardParams& params);
/// Whether dq_rounded can be written: over at most 32 sources.
bool rounds_dq(const BackwardParams& params);

/// delta[b, h, i] = sum_d dout * out, 0 where lse is -inf (out is then not read). Needs no workspace.
void delta(const BackwardParams& params, const RoundedOut& out, void* delta);

}  // namespace mtraining::kernels::sm80
