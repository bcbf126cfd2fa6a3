// The kernel contract: plain structs that every back end (ref, sm80, sm90) takes. No torch, no
// ranks, no layouts by name.
//
// In:   q, a list of key sources (arrived shards, or gathered columns), per source block lists and
//       column lists, positions, float32 state (out, lse) or gradients to accumulate into.
// Out:  the state after merging all sources, or the result in dtype; gradients added to the given
//       buffers.
// Next: attention/ builds these; kernels/ref, sm80, sm90 run them.
//
// A pair (query i, key j) of head h is computed iff
//   position(j) <= position(i)  and  position(j) >= document_start[i]  and  position(i) < seq_len  and
//   ( the block of j is in the block list of i's block  or
//     (j is in a column list of h  and  diagonal position(i)/64 - position(j)/64 is not in the head's bitmap) ).
// Empty rows: out = 0, lse = -inf exactly. Natural logarithm. Block lists and column lists never
// name a pair twice. Masked scores and probabilities are selected to zero, never multiplied: what a
// masked lane of q or k holds does not matter. A value row that is not finite spoils the rows whose
// blocks hold its key (0 * inf), as in dense attention. Offsets are int64; positions are int32
// (sequences below 2^31).
#pragma once

#include <cstdint>

namespace mtraining::kernels {

inline constexpr int kBlock = 64;

enum class DType : int32_t { kFloat64, kFloat32, kBFloat16, kFloat16 };

/// Bytes of one element.
constexpr int64_t size_of(DType dtype) {
  return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2;
}
/// out, lse and gradients are held in this: float64 for float64 inputs, else float32.
constexpr DType state_dtype(DType dtype) {
  return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

/// [B, S, H, D] with D contiguous and any element strides (0 allowed on inputs: expanded tensors).
struct ConstView {
  const void* data = nullptr;
  int64_t stride_batch = 0, stride_token = 0, stride_head = 0;
};
struct View {
  void* data = nullptr;
  int64_t stride_batch = 0, stride_token = 0, stride_head = 0;
};
constexpr ConstView const_of(const View& view) {
  return {view.data, view.stride_batch, view.stride_token, view.stride_head};
}

/// Query block (sl, a) meets key block (sl - lambda, a - delta); see index/step_index.h.
struct Entry {
  int32_t lambda = 0;
  int32_t delta = 0;
  bool operator==(const Entry&) const = default;
};

enum class BlockListKind : int32_t { kNone, kEntries, kCsr };

/// Which key blocks of a source each query block attends to. Rows are batch * num_q_heads.
struct BlockLists {
  BlockListKind kind = BlockListKind::kNone;
  // kEntries
  // [rows, capacity] ascending by lambda * blocks_per_stripe + delta
  const Entry* entries = nullptr;
  const int32_t* num_entries = nullptr;  // [rows]
  int64_t capacity = 0;
  int64_t blocks_per_stripe = 1;  // m
  // kCsr
  const int64_t* row_begin = nullptr;   // [rows, num_q_blocks + 1], absolute into key_blocks
  const int32_t* key_blocks = nullptr;  // local key blocks, ascending within a query block
  // The same lists by key block, which the backward of a GPU walks; the forward and ref do not look.
  const int64_t* key_row_begin = nullptr;  // [rows, num_key_blocks + 1], absolute into query_blocks
  const int32_t* query_blocks = nullptr;   // local query blocks, ascending within a key block
};

/// Which single keys of a source each head attends to. Rows are batch * num_q_heads.
struct ColumnLists {
  const int32_t* key_rows = nullptr;  // [rows, capacity] row of k and v (token index of the source)
  const int32_t* positions = nullptr;  // [rows, capacity] ascending
  const int32_t* counts = nullptr;     // [rows]; null: no columns
  int64_t capacity = 0;
};

/// One arrived shard, or the gathered columns.
struct KeySource {
  ConstView k, v;  // [B, num_keys, Hk, D]; a gathered buffer uses stride_batch = stride_head = 0
  int64_t num_keys = 0;  // rows that exist in memory; the last block may be ragged
  // [ceil(num_keys / 64)] position of each block's first key; null without blocks
  const int32_t* block_starts = nullptr;
  BlockLists blocks;
  ColumnLists columns;
  View dk, dv;  // backward: state dtype, same logical shape, accumulated into (+=);
                // sources of one launch share no rows
};

/// What forward and backward share.
struct AttentionParams {
  // sizes
  int64_t batch = 0, num_q_heads = 0, num_kv_heads = 0, head_dim = 0;
  int64_t num_queries = 0;  // rows in memory; the last block may be ragged
  DType dtype = DType::kFloat32;
  double softmax_scale = 0;
  int64_t seq_len = 0;  // real tokens: query rows at positions >= seq_len are empty
  // queries
  ConstView q;                              // [B, num_queries, H, D]
  const int32_t* q_block_starts = nullptr;  // [ceil(num_queries / 64)]
  // position(local t) = block_starts[t / 64] + (t % 64) * position_stride
  int64_t position_stride = 1;
  const int32_t* document_start = nullptr;  // [B, num_queries] or null: one document
  int64_t document_stride_batch = 0;
  // keys
  const KeySource* sources = nullptr;
  int num_sources = 0;
  // [B * H, diagonal_words] or null: no diagonal is chosen
  const uint64_t* diagonal_bits = nullptr;
  int64_t diagonal_words = 0;
  // device
  void* stream = nullptr;  // cudaStream_t; ref ignores it
  int sm_margin = 0;       // SMs left to the transport; ref ignores it
  // device memory of a back end that asks for it (forward_workspace_bytes)
  void* workspace = nullptr;
  int64_t workspace_bytes = 0;
};

struct ForwardParams : AttentionParams {
  View out;             // [B, num_queries, H, D] state dtype; see rounded
  void* lse = nullptr;  // [B, H, num_queries] state dtype, contiguous
  bool first = true;    // true: state is written; false: read, merged with, written
  // Where given, this launch is the last of these rows: the result goes here, in dtype, and what
  // `out` holds afterwards means nothing. `out` may be null then, unless needs_out() (launch.h).
  View rounded;   // [B, num_queries, H, D] dtype
  View residual;  // as rounded: what rounding lost, in dtype; null: not wanted
};

/// out as its last forward launch left it: rounded + residual, in dtype.
struct RoundedOut {
  ConstView rounded;   // [B, num_queries, H, D]
  ConstView residual;  // the same; null: zeros
};

struct BackwardParams : AttentionParams {
  ConstView dout;             // [B, num_queries, H, D] dtype
  const void* lse = nullptr;  // [B, H, num_queries] state dtype, of the whole row
  // [B, H, num_queries] state dtype: rowsum(dout * out); 0 on empty rows
  const void* delta = nullptr;
  View dq;  // [B, num_queries, H, D] state dtype, accumulated into (+=)
  // Where given, this is the only launch of these rows: dq goes here, in dtype, and `dq` may be null.
  // For back ends that sum dq in one go: rounds_dq() (launch.h); others refuse it.
  View dq_rounded;  // [B, num_queries, H, D] dtype
  bool deterministic = true;
};

}  // namespace mtraining::kernels
