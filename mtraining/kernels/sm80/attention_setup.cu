// Host code that forward and backward share.
#include <algorithm>

#include "mtraining/base/check.h"
#include "mtraining/kernels/sm80/attention_setup.cuh"

namespace mtraining::kernels::sm80 {
namespace {

constexpr int64_t kMaxHeadDimHere = 256;
constexpr int kReservedShared =
    1024;  // bytes of shared memory that each block costs besides its own

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  check_cuda(cudaDeviceGetAttribute(&value, which, device), "asking for the device");
  return value;
}

void fill_source(const KeySource& source, DType dtype, SourceArgs& out) {
  out.k = rows_of(source.k, dtype);
  out.v = rows_of(source.v, dtype);
  out.num_keys = static_cast<int32_t>(source.num_keys);
  out.num_blocks = static_cast<int32_t>((source.num_keys + kBlock - 1) / kBlock);
  const BlockLists& blocks = source.blocks;
  out.kind = blocks.kind;
  if (source.num_keys == 0) return;
  if (blocks.kind != BlockListKind::kNone) {
    out.block_starts = source.block_starts;
    // One stripe however long: distances inside it fit.
    out.blocks_per_stripe =
        static_cast<int32_t>(std::min<int64_t>(blocks.blocks_per_stripe, 1 << 26));
    out.entries = blocks.entries;
    out.num_entries = blocks.num_entries;
    out.entry_capacity = blocks.capacity;
    out.row_begin = blocks.row_begin;
    out.key_blocks = blocks.key_blocks;
  }
  if (source.columns.capacity > 0) {
    out.column_rows = source.columns.key_rows;
    out.column_positions = source.columns.positions;
    out.column_counts = source.columns.counts;
    out.column_capacity = source.columns.capacity;
  }
}

}  // namespace

void check_cuda(cudaError_t error, const char* what) {
  MT_CHECK_EXTERNAL(error == cudaSuccess, "sm80: ", what, ": ", cudaGetErrorString(error));
}

DeviceSizes device_sizes() {
  int device = 0;
  check_cuda(cudaGetDevice(&device), "asking for the device");
  return {attribute(cudaDevAttrMultiProcessorCount, device),
          attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device),
          attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device)};
}

int blocks_per_sm(const DeviceSizes& device, int bytes, int most) {
  if (bytes > device.shared_per_block) return 0;
  return std::min(most, device.shared_per_sm / (bytes + kReservedShared));
}

int kernel_head_dim(int64_t head_dim) { return head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : 256; }

Rows rows_of(const ConstView& view, DType dtype) {
  const int64_t size = size_of(dtype);
  return {static_cast<const char*>(view.data), view.stride_batch * size, view.stride_token * size,
          view.stride_head * size};
}

FloatRows float_rows_of(const View& view) {
  return {static_cast<float*>(view.data), view.stride_batch, view.stride_token, view.stride_head};
}

bool rows_aligned(const Rows& rows) {
  return reinterpret_cast<uintptr_t>(rows.data) % 16 == 0 && rows.stride_batch % 16 == 0 &&
         rows.stride_token % 16 == 0 && rows.stride_head % 16 == 0;
}

bool pairs_aligned(const FloatRows& rows) {
  return reinterpret_cast<uintptr_t>(rows.data) % 8 == 0 && rows.stride_batch % 2 == 0 &&
         rows.stride_token % 2 == 0 && rows.stride_head % 2 == 0;
}

void check_attention(const AttentionParams& p, const char* name, int64_t workspace_bytes) {
  MT_CHECK_SUPPORTED(p.dtype == DType::kBFloat16 || p.dtype == DType::kFloat16, name,
                     ": expected bf16 or fp16, got dtype code ", static_cast<int>(p.dtype));
  MT_CHECK_SUPPORTED(p.head_dim <= kMaxHeadDimHere, name, ": expected head_dim up to ",
                     kMaxHeadDimHere, ", got ", p.head_dim);
  const int64_t rows = p.batch * p.num_q_heads;
  const int64_t blocks = (p.num_queries + kBlock - 1) / kBlock;
  MT_CHECK_SUPPORTED(p.num_queries < (int64_t{1} << 31) - 256 && rows < (int64_t{1} << 30) &&
                         rows * std::max<int64_t>(1, blocks) < (int64_t{1} << 30),
                     name, ": expected fewer than 2^31 queries and 2^30 query blocks, got ",
                     p.num_queries, " queries of ", rows, " heads");
  for (int s = 0; s < p.num_sources; ++s)
    MT_CHECK_SUPPORTED(p.sources[s].num_keys < (int64_t{1} << 31) - 256, name, ": sources[", s,
                       "]: expected fewer than 2^31 - 256 keys, got ", p.sources[s].num_keys);
  if (rows * p.num_queries == 0) return;
  MT_CHECK_ARG(p.workspace != nullptr && p.workspace_bytes >= workspace_bytes &&
                   reinterpret_cast<uintptr_t>(p.workspace) % 256 == 0,
               name, ": expected a 256-byte aligned workspace of ", workspace_bytes, " bytes, got ",
               p.workspace_bytes, " at ", p.workspace);
}

void fill_attention(const AttentionParams& p, int first, int last, AttentionArgs& args) {
  args.q = rows_of(p.q, p.dtype);
  args.vectors = rows_aligned(args.q);
  args.num_sources = last - first;
  for (int s = first; s < last; ++s) {
    SourceArgs& out = args.sources[s - first];
    fill_source(p.sources[s], p.dtype, out);
    if (p.sources[s].num_keys > 0)
      args.vectors = args.vectors && rows_aligned(out.k) && rows_aligned(out.v);
  }
  args.batch = static_cast<int32_t>(p.batch);
  args.num_heads = static_cast<int32_t>(p.num_q_heads);
  args.num_kv_heads = static_cast<int32_t>(p.num_kv_heads);
  args.heads_per_kv_head = static_cast<int32_t>(p.num_q_heads / p.num_kv_heads);
  args.num_rows = static_cast<int32_t>(p.batch * p.num_q_heads);
  args.num_queries = static_cast<int32_t>(p.num_queries);
  args.num_q_blocks = static_cast<int32_t>((p.num_queries + kBlock - 1) / kBlock);
  args.head_dim = static_cast<int32_t>(p.head_dim);
  args.seq_len = static_cast<int32_t>(p.seq_len);
  args.position_stride = static_cast<int32_t>(p.position_stride);
  args.document_start = p.document_start;
  args.document_stride_batch = p.document_stride_batch;
  args.diagonal_bits = p.diagonal_bits;
  args.diagonal_words = p.diagonal_words;
  args.scale = static_cast<float>(p.softmax_scale);
  args.scale_log2 = static_cast<float>(p.softmax_scale * 1.4426950408889634);
}

int64_t bounds_bytes(const AttentionParams& p) {
  const int64_t bytes =
      p.batch * ((p.num_queries + kBlock - 1) / kBlock) * static_cast<int64_t>(sizeof(QueryBounds));
  return (bytes + 255) / 256 * 256;
}

void prepare(const AttentionParams& p, QueryBounds* bounds, int32_t* counters, int64_t num_counters,
             AttentionArgs& args) {
  args.bounds = bounds;
  PrepareArgs prepare;
  prepare.q_block_starts = p.q_block_starts;
  prepare.document_start = p.document_start;
  prepare.document_stride_batch = p.document_stride_batch;
  prepare.batch = args.batch;
  prepare.num_queries = args.num_queries;
  prepare.num_q_blocks = args.num_q_blocks;
  prepare.seq_len = args.seq_len;
  prepare.position_stride = args.position_stride;
  prepare.bounds = bounds;
  prepare.counters = counters;
  prepare.num_counters = num_counters;
  check_cuda(launch_prepare(prepare, static_cast<cudaStream_t>(p.stream)),
             "launching the preparation");
}

}  // namespace mtraining::kernels::sm80
