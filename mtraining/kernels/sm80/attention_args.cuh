// What the kernels take: structs by value.
//
// In:   filled by forward.cu and backward.cu from ForwardParams and BackwardParams. Out: read by the kernels through constant
//       memory. Next: query_list.cuh, key_list.cuh.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "mtraining/kernels/device/rounded_rows.cuh"
#include "mtraining/kernels/params.h"

namespace mtraining::kernels::sm80 {

/// Sources of one launch; more are done by several launches that merge.
inline constexpr int kMaxSources = 32;

/// [B, tokens, heads, D] of 16-bit elements; strides in bytes.
struct Rows {
  const char* data;
  int64_t stride_batch, stride_token, stride_head;
};
/// The same of float32, written; strides in elements.
struct FloatRows {
  float* data;
  int64_t stride_batch, stride_token, stride_head;
};

/// Positions of a query block's real rows and of their documents' starts. last < 0: no real row.
struct alignas(16) QueryBounds {
  int32_t first, last, document_min, document_max;
};

struct SourceArgs {
  Rows k, v;
  const int32_t* block_starts;  // null: no blocks
  int32_t num_keys, num_blocks;
  BlockListKind kind;
  int32_t blocks_per_stripe;
  const Entry* entries;
  const int32_t* num_entries;
  int64_t entry_capacity;
  const int64_t* row_begin;
  const int32_t* key_blocks;
  const int32_t* column_rows;
  const int32_t* column_positions;
  const int32_t* column_counts;  // null: no columns
  int64_t column_capacity;
};

struct AttentionArgs {
  SourceArgs sources[kMaxSources];
  Rows q;
  int32_t num_sources;
  int32_t batch, num_heads, num_kv_heads, heads_per_kv_head;
  int32_t num_rows;  // batch * heads
  int32_t num_queries, num_q_blocks;
  int32_t head_dim;
  int32_t seq_len;
  int32_t position_stride;
  bool vectors;  // every row of every input starts on 16 bytes
  const int32_t* document_start;
  int64_t document_stride_batch;
  const uint64_t* diagonal_bits;
  int64_t diagonal_words;
  float scale, scale_log2;    // softmax_scale, that times log2(e)
  const QueryBounds* bounds;  // [batch, num_q_blocks]
  int32_t* next_item;         // the queue's counter, 0 at launch
};

struct ForwardArgs : AttentionArgs {
  FloatRows out;
  float* lse;
  bool first;
  bool vector_out;                     // pairs of out are 8-byte aligned
  device::HalfRows rounded, residual;  // where `rounded` is given, out is only read
  bool vector_rounded;                 // their rows start on 16 bytes
  int32_t group_rows;                  // rows whose items are queued together
  int32_t slots;                       // of the ring of key and value tiles
};

struct BackwardArgs : AttentionArgs {
  Rows dout;
  const float *lse, *delta;
  FloatRows dq;
  FloatRows dk[kMaxSources], dv[kMaxSources];
  bool vector_dq;               // pairs of dq are 8-byte aligned
  device::HalfRows dq_rounded;  // where given, all that is written of dq
  bool vector_rounded;          // its rows start on 16 bytes
  bool deterministic;           // sums of columns wait for their turn
  int32_t stages;               // tiles of the walk held at a time: 1 or 2
  // Items of the key pass: columns first, each tile once a (query head of its kv head, chunk of query blocks); then key blocks.
  int32_t first_item, num_items;
  int32_t num_column_items, column_tiles_all;  // tiles of all sources and (batch, kv head)
  int32_t column_tiles[kMaxSources];           // of one (batch, kv head), by capacity
  int32_t num_chunks, chunk_blocks;
  int32_t* turns;  // [sources, batch * kv heads] column tiles that have been added, 0 at launch
};

/// How a kernel is launched.
struct Launch {
  int32_t blocks, shared_bytes;
  cudaStream_t stream;
};
#define MT_SM80_LAUNCHERS(name, Args)                              \
  cudaError_t name##_bf16_d64(const Args& args, const Launch& l);  \
  cudaError_t name##_bf16_d128(const Args& args, const Launch& l); \
  cudaError_t name##_bf16_d256(const Args& args, const Launch& l); \
  cudaError_t name##_fp16_d64(const Args& args, const Launch& l);  \
  cudaError_t name##_fp16_d128(const Args& args, const Launch& l); \
  cudaError_t name##_fp16_d256(const Args& args, const Launch& l);
MT_SM80_LAUNCHERS(launch_forward, ForwardArgs)
MT_SM80_LAUNCHERS(launch_backward_keys, BackwardArgs)
MT_SM80_LAUNCHERS(launch_backward_queries, BackwardArgs)
#undef MT_SM80_LAUNCHERS

/// Before the attention kernels of a launch: bounds of all query blocks, counters to 0.
struct PrepareArgs {
  const int32_t* q_block_starts;
  const int32_t* document_start;
  int64_t document_stride_batch;
  int32_t batch, num_queries, num_q_blocks, seq_len, position_stride;
  QueryBounds* bounds;
  int32_t* counters;
  int64_t num_counters;
};
cudaError_t launch_prepare(const PrepareArgs& args, cudaStream_t stream);

/// delta[b, h, i] = sum over d of dout * out; 0 where lse is -inf.
struct DeltaArgs {
  Rows dout, rounded, residual;  // residual null: zeros
  const float* lse;
  float* delta;
  int64_t batch, num_heads, num_queries;
  int32_t head_dim;
  bool bf16;
  bool vectors;  // all rows start on 16 bytes
};
cudaError_t launch_delta(const DeltaArgs& args, cudaStream_t stream);

}  // namespace mtraining::kernels::sm80
