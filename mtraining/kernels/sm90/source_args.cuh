// Key sources as the kernels read them, and how they are filled from KeySources.
//
// In:   AttentionParams. Out: SourceArgs with tensor maps; gathered columns. Next: forward_args.cuh, backward_args.cuh.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "mtraining/kernels/params.h"

namespace mtraining::kernels::sm90 {

/// Sources of one launch; more are done by several launches that merge.
inline constexpr int kMaxSources = 32;

struct SourceArgs {
  CUtensorMap k, v;             // see tensor_map
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
  const int64_t* key_row_begin;  // the same lists by key block: backward
  const int32_t* query_blocks;
  const int32_t* column_positions;
  const int32_t* column_counts;  // null: no columns
  int64_t column_capacity;
  int32_t gathered_begin;  // first row of this source inside a head's gathered rows
};

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
  int32_t max_tiles;      // of 64 columns, the most over sources; 0: no columns
  char *gathered_k, *gathered_v;
  int32_t* next_item;  // set to 0
};
/// Copies the rows that the column lists name into contiguous memory, zeros up to the next multiple of 64, and resets the queue.
cudaError_t launch_gather_columns(const GatherArgs& args, cudaStream_t stream);

void check_cuda(cudaError_t error, const char* what);
int multiprocessors(const AttentionParams& params);
int64_t round_up(int64_t value, int64_t multiple);

/// [64 of D, tokens, D / 64, heads, batch]; boxes of one 64-row block, all of D, 128-byte swizzle. D no multiple of 64: 32 and 64 bytes.
CUtensorMap tensor_map(const char* name, const ConstView& view, DType dtype, int64_t head_dim,
                       int64_t tokens, int64_t heads, int64_t batch);
/// [32 of D, tokens, D / 32, heads, batch] of float32; boxes of 16 rows, 64 of D, 128-byte swizzle.
CUtensorMap gradient_map(const char* name, const View& view, int64_t head_dim, int64_t tokens,
                         int64_t heads, int64_t batch);

/// Bytes of keys and values in sources[first, last).
int64_t keys_bytes(const AttentionParams& params, int first, int last);
/// 16-bit rows that whole lanes read or write: 16-byte aligned. Null passes.
void check_rounded_rows(const char* name, const ConstView& view);
void check_rounded_rows(const char* name, const View& view);
/// Limits of what this back end does, by name.
void check_sizes(const AttentionParams& params);
/// Rows of one head's gathered columns over sources[first, last), each source padded to whole blocks.
int64_t gathered_rows(const AttentionParams& params, int first, int last);
/// The most over the ranges of sources that one launch takes.
int64_t most_gathered_rows(const AttentionParams& params);

/// Fills out[0 .. last - first) and what is to be gathered into `memory` (k, then v: gathered_rows of every head); where there are
/// columns, the maps of it too. Launches nothing. Returns gathered_rows.
int64_t plan_sources(const AttentionParams& params, int first, int last, void* memory,
                     SourceArgs* out, GatherArgs* gather, CUtensorMap* gathered_k,
                     CUtensorMap* gathered_v);
/// The same, and enqueues the gather and the reset of next_item.
int64_t fill_sources(const AttentionParams& params, int first, int last, void* memory,
                     int32_t* next_item, SourceArgs* out, CUtensorMap* gathered_k,
                     CUtensorMap* gathered_v);

}  // namespace mtraining::kernels::sm90
