// What the forward kernel takes: one struct by value, tensor maps included.
//
// In:   filled by forward.cu from ForwardParams. Out: read by forward_kernel.cuh through constant memory.
// Next: forward_kernel.cuh.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "mtraining/kernels/device/rounded_rows.cuh"
#include "mtraining/kernels/params.h"
#include "mtraining/kernels/sm90/source_args.cuh"

namespace mtraining::kernels::sm90 {

struct ForwardArgs {
  CUtensorMap q;
  CUtensorMap gathered_k, gathered_v;  // [64 of D, batch * heads * gathered_rows, D / 64, 1, 1]
  SourceArgs sources[kMaxSources];
  int32_t num_sources;
  int32_t num_heads, heads_per_kv_head;
  int32_t num_rows;  // batch * heads
  int32_t num_queries, num_q_blocks;
  int32_t group_rows;     // rows whose items are queued together
  int32_t gathered_rows;  // a head
  int32_t q_head_step, q_batch_step;
  int32_t seq_len;
  int32_t position_stride;
  const int32_t* q_block_starts;
  const int32_t* document_start;
  int64_t document_stride_batch;
  const uint64_t* diagonal_bits;
  int64_t diagonal_words;
  float scale_log2;  // softmax_scale * log2(e)
  float reach;       // how far a score may exceed a stale maximum: 2^8 after the exponential
  float* out;
  int64_t out_stride_batch, out_stride_token, out_stride_head;
  float* lse;
  int32_t first;
  device::HalfRows rounded, residual;  // where `rounded` is given, out is only read
  int32_t* next_item;                  // the queue's counter, 0 at launch
};

/// Launches the kernel of one (dtype, head_dim).
using ForwardLauncher = cudaError_t (*)(const ForwardArgs& args, int num_sms, cudaStream_t stream);
cudaError_t launch_forward_bf16_d128(const ForwardArgs& args, int num_sms, cudaStream_t stream);
cudaError_t launch_forward_bf16_d96(const ForwardArgs& args, int num_sms, cudaStream_t stream);
cudaError_t launch_forward_bf16_d256(const ForwardArgs& args, int num_sms, cudaStream_t stream);
cudaError_t launch_forward_bf16_d64(const ForwardArgs& args, int num_sms, cudaStream_t stream);
cudaError_t launch_forward_fp16_d128(const ForwardArgs& args, int num_sms, cudaStream_t stream);
cudaError_t launch_forward_fp16_d96(const ForwardArgs& args, int num_sms, cudaStream_t stream);
cudaError_t launch_forward_fp16_d256(const ForwardArgs& args, int num_sms, cudaStream_t stream);
cudaError_t launch_forward_fp16_d64(const ForwardArgs& args, int num_sms, cudaStream_t stream);

}  // namespace mtraining::kernels::sm90
