// What the forward kernel takes: one struct by value, tensor maps included.
//
// In:   filled by forward.cu from ForwardParams. Out: read by forward_kernel.cuh and gather_columns.cu through constant memory.
// Next: forward_kernel.cuh.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "mtraining/kernels/params.h"

namespace mtraining::kernels::sm90 {

/// Sources of one launch; more are done by several launches that merge.
inline constexpr int kMaxSources = 32;

struct SourceArgs {
  CUtensorMap k, v;             // [64 of D, tokens, D / 64, heads, batch]
  const int32_t* block_starts;  // null: no blocks
  int32_t num_keys;
  int32_t num_blocks;
  int32_t k_head_step, k_batch_step;  // 0 where k is expanded over heads or batch
  int32_t v_head_step, v_batch_step;
  BlockListKind kind;
  int32_t blocks_per_stripe;
  const Entry* entries;
  const int32_t* num_entries;
  int64_t entry_capacity;
  const int64_t* row_begin;
  const int32_t* key_blocks;
  const int32_t* column_positions;
  const int32_t* column_counts;  // null: no columns
  int64_t column_capacity;
  int32_t gathered_begin;  // first row of this source inside a head's gathered rows
};

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
  int32_t* next_item;  // the queue's counter, 0 at launch
};

/// Launches the kernel of one (dtype, head_dim).
using ForwardLauncher = cudaError_t (*)(const ForwardArgs& args, int num_sms, cudaStream_t stream);
cudaError_t launch_forward_bf16_d128(const ForwardArgs& args, int num_sms, cudaStream_t stream);
cudaError_t launch_forward_bf16_d64(const ForwardArgs& args, int num_sms, cudaStream_t stream);
cudaError_t launch_forward_fp16_d128(const ForwardArgs& args, int num_sms, cudaStream_t stream);
cudaError_t launch_forward_fp16_d64(const ForwardArgs& args, int num_sms, cudaStream_t stream);

/// Where the rows of one source's columns come from.
struct GatherSource {
  const char *k, *v;
  int64_t k_stride_batch, k_stride_token, k_stride_head;  // bytes
  int64_t v_stride_batch, v_stride_token, v_stride_head;
  const int32_t* key_rows;
  const int32_t* counts;
  int64_t capacity;
  int32_t gathered_begin;
};
struct GatherArgs {
  GatherSource sources[kMaxSources];
  int32_t num_sources;
  int32_t num_heads, heads_per_kv_head, num_rows;
  int32_t row_bytes;      // 2 * D
  int32_t gathered_rows;  // a head
  char *gathered_k, *gathered_v;
  int32_t* next_item;  // set to 0
};
/// Copies the rows that the column lists name into contiguous memory, zeros up to the next multiple of 64, and resets the queue.
cudaError_t launch_gather_columns(const GatherArgs& args, int max_tiles, cudaStream_t stream);

}  // namespace mtraining::kernels::sm90
