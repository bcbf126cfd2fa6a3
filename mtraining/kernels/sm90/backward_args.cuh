// What the backward kernels take: one struct by value, tensor maps included.
//
// In:   filled by backward.cu from BackwardParams. Out: read by the kernels through constant memory. Next: backward_kernel.cuh.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "mtraining/kernels/params.h"
#include "mtraining/kernels/sm90/forward_args.cuh"
#include "mtraining/kernels/sm90/source_args.cuh"

namespace mtraining::kernels::sm90 {

/// Where the gradients of a source's keys are added.
struct GradientArgs {
  float *dk, *dv;
  int64_t dk_stride_batch, dk_stride_token, dk_stride_head;
  int64_t dv_stride_batch, dv_stride_token, dv_stride_head;
};

struct BackwardArgs {
  CUtensorMap q, dout;
  CUtensorMap dq;                      // [32 of D, tokens, D / 32, heads, batch] float32
  CUtensorMap gathered_k, gathered_v;  // [64 of D, batch * heads * gathered_rows, D / 64, 1, 1]
  SourceArgs sources[kMaxSources];
  GradientArgs gradients[kMaxSources];
  int32_t num_sources;
  int32_t num_heads, heads_per_kv_head, num_kv_heads;
  int32_t num_rows;  // batch * heads
  int32_t num_queries, num_q_blocks;
  int32_t gathered_rows;  // a head
  int32_t q_head_step, q_batch_step, dout_head_step, dout_batch_step;
  int32_t seq_len;
  int32_t position_stride;
  const int32_t* document_start;
  int64_t document_stride_batch;
  const uint64_t* diagonal_bits;
  int64_t diagonal_words;
  float scale_log2;  // softmax_scale * log2(e)
  float scale;       // softmax_scale
  // Items: pairs of key blocks of a kv head and heads_per_item of its query heads; 128 columns of a head over column_q_blocks query
  // blocks.
  int32_t heads_per_item, head_parts;
  int32_t column_items, num_items;
  // Sources that have blocks; that have columns.
  int32_t num_block_sources, num_column_sources;
  uint8_t block_sources[kMaxSources], column_sources[kMaxSources];
  int32_t columns_first;  // in the queue, before blocks
  int32_t
      column_q_blocks;  // fewer than all: parts of gathered_dk and gathered_dv are added to what is there
  int32_t column_tiles;              // of 128, the most over sources
  int32_t block_pairs;               // the most over sources
  float *gathered_dk, *gathered_dv;  // [batch * heads * gathered_rows, D]
  // Of the 64 queries of a block: -lse * log2(e), -inf for rows that see no key; -delta, times softmax_scale for bf16.
  const float* statistics;  // [rows, num_q_blocks, 2, 64]
  // {position of the first row | 1 << 31 where rows must be cleaned, of the last real row (-1: none), least and greatest document start}
  const int4* query_bounds;  // [rows, num_q_blocks]
  int32_t* next_item;        // the queue's counter, 0 at launch
};

using BackwardLauncher = cudaError_t (*)(const BackwardArgs& args, bool with_queries, int num_sms,
                                         cudaStream_t stream);
cudaError_t launch_backward_bf16_d128(const BackwardArgs& args, bool with_queries, int num_sms,
                                      cudaStream_t stream);
cudaError_t launch_backward_bf16_d64(const BackwardArgs& args, bool with_queries, int num_sms,
                                     cudaStream_t stream);
cudaError_t launch_backward_fp16_d128(const BackwardArgs& args, bool with_queries, int num_sms,
                                      cudaStream_t stream);
cudaError_t launch_backward_fp16_d64(const BackwardArgs& args, bool with_queries, int num_sms,
                                     cudaStream_t stream);

/// The walk by query blocks that computes dq in one order: the forward's arguments (out and lse unused; `rounded`, where given, is dq
/// in dtype and all that is written) and what gradients need.
struct QueryArgs : ForwardArgs {
  CUtensorMap dout;
  int32_t dout_head_step, dout_batch_step;
  const float* statistics;  // as in BackwardArgs
  float scale;              // softmax_scale
  float* dq;
  int64_t dq_stride_batch, dq_stride_token, dq_stride_head;
};

/// beside: may begin while the launch before it in the stream, the walk by keys, is at work.
using QueryLauncher = cudaError_t (*)(const QueryArgs& args, bool beside, int num_sms,
                                      cudaStream_t stream);
cudaError_t launch_queries_bf16_d128(const QueryArgs& args, bool beside, int num_sms,
                                     cudaStream_t stream);
cudaError_t launch_queries_bf16_d64(const QueryArgs& args, bool beside, int num_sms,
                                    cudaStream_t stream);
cudaError_t launch_queries_fp16_d128(const QueryArgs& args, bool beside, int num_sms,
                                     cudaStream_t stream);
cudaError_t launch_queries_fp16_d64(const QueryArgs& args, bool beside, int num_sms,
                                    cudaStream_t stream);

/// What launch_prepare reads and writes.
struct PrepareArgs {
  const float *lse, *delta;  // [rows, num_queries]
  const int32_t *q_block_starts, *document_start;
  int64_t document_stride_batch;
  int32_t num_heads, num_rows, num_queries, num_q_blocks, seq_len, position_stride;
  float delta_scale;
  float* statistics;
  int4* query_bounds;
  int32_t* counters;  // two, set to 0
  GatherArgs gather;
  float *gathered_dk, *gathered_dv;  // where not null, 0 for every gathered column
};
/// Statistics and bounds of all query blocks, and the gather of columns.
cudaError_t launch_prepare(const PrepareArgs& args, cudaStream_t stream);

/// Adds the gradients of gathered columns to those of their keys: where several heads of a kv head have a column, in head order.
struct ScatterSource {
  float *dk, *dv;
  int64_t dk_stride_batch, dk_stride_token, dk_stride_head;
  int64_t dv_stride_batch, dv_stride_token, dv_stride_head;
  const int32_t *key_rows, *positions, *counts;
  int64_t capacity;
  int32_t gathered_begin;
};
struct ScatterArgs {
  ScatterSource sources[kMaxSources];
  int32_t num_sources;
  int32_t num_heads, heads_per_kv_head, num_rows;
  int32_t head_dim;
  int32_t gathered_rows;  // a head
  const float *gathered_dk, *gathered_dv;
};
cudaError_t launch_scatter_columns(const ScatterArgs& args, int64_t max_capacity,
                                   cudaStream_t stream);

/// delta[row, t] = sum over D of dout * out, 0 where lse is -inf.
struct DeltaArgs {
  ConstView dout, rounded, residual;  // residual null: zeros
  const float* lse;
  float* delta;
  int32_t num_heads, num_rows, num_queries;
};
cudaError_t launch_delta(const DeltaArgs& args, DType dtype, int head_dim, cudaStream_t stream);

}  // namespace mtraining::kernels::sm90
