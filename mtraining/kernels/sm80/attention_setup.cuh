// What the host code of forward and backward shares: checks, the kernels' arguments, the device's sizes, workspace.
//
// In:   AttentionParams whose pointers are device pointers. Out: AttentionArgs. Next: forward.cu, backward.cu.
#pragma once

#include <cstdint>

#include "mtraining/kernels/params.h"
#include "mtraining/kernels/sm80/attention_args.cuh"

namespace mtraining::kernels::sm80 {

void check_cuda(cudaError_t error, const char* what);

/// The current device.
struct DeviceSizes {
  int num_sms = 0;
  int shared_per_sm = 0, shared_per_block = 0;  // bytes, the most that a block may ask for
};
DeviceSizes device_sizes();

/// Thread blocks of `bytes` shared memory that fit into an SM.
int blocks_per_sm(const DeviceSizes& device, int bytes, int most);

/// head_dim to that of the kernels: 64, 128 or 256.
int kernel_head_dim(int64_t head_dim);

/// Beyond validate.h: types, sizes, the workspace. Errors: Unsupported, InvalidArgument.
void check_attention(const AttentionParams& params, const char* name, int64_t workspace_bytes);

/// Everything but bounds, counters and, where pointers of one direction matter, `vectors` of q, k, v.
void fill_attention(const AttentionParams& params, int first, int last, AttentionArgs& args);

Rows rows_of(const ConstView& view, DType dtype);
FloatRows float_rows_of(const View& view);
/// Whether every row starts on 16 bytes.
bool rows_aligned(const Rows& rows);
/// Whether pairs of floats are 8-byte aligned.
bool pairs_aligned(const FloatRows& rows);

inline constexpr int64_t kCounterBytes = 256;
int64_t bounds_bytes(const AttentionParams& params);
/// Enqueues the bounds of the query blocks and num_counters zeros; sets args.bounds.
void prepare(const AttentionParams& params, QueryBounds* bounds, int32_t* counters,
             int64_t num_counters, AttentionArgs& args);

}  // namespace mtraining::kernels::sm80
