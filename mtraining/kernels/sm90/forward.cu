// Checks, tensor maps and launches of the Hopper forward.
#include <cudaTypedefs.h>

#include <algorithm>

#include "mtraining/base/check.h"
#include "mtraining/kernels/sm90/forward.h"
#include "mtraining/kernels/sm90/forward_args.cuh"
#include "mtraining/kernels/validate.h"

namespace mtraining::kernels::sm90 {
namespace {

constexpr int64_t kCounterBytes = 256;
// Keys and values beyond about half of L2: the heads of one kv head are done before the next one's.
constexpr int64_t kGroupAboveBytes = int64_t{24} << 20;

int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

void check_cuda(cudaError_t error, const char* what) {
  MT_CHECK_EXTERNAL(error == cudaSuccess, "sm90 forward: ", what, ": ", cudaGetErrorString(error));
}

PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encoder() {
  static const PFN_cuTensorMapEncodeTiled_v12000 encoder = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                cudaEnableDefault, &result),
               "looking up cuTensorMapEncodeTiled");
    MT_CHECK_EXTERNAL(result == cudaDriverEntryPointSuccess && function != nullptr,
                      "sm90 forward: the driver has no cuTensorMapEncodeTiled (query result ",
                      static_cast<int>(result), ")");
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  }();
  return encoder;
}

/// Rows of one head's gathered columns over sources[first, last), each source padded to whole tiles.
int64_t gathered_rows(const ForwardParams& params, int first, int last) {
  int64_t rows = 0;
  for (int s = first; s < last; ++s) {
    const ColumnLists& columns = params.sources[s].columns;
    if (columns.counts != nullptr) rows += round_up(columns.capacity, kBlock);
  }
  return rows;
}

/// Bytes of keys and values in sources[first, last).
int64_t keys_bytes(const ForwardParams& params, int first, int last) {
  int64_t keys = 0;
  for (int s = first; s < last; ++s) keys += params.sources[s].num_keys;
  return keys * params.batch * params.num_kv_heads * params.head_dim * size_of(params.dtype) * 2;
}

/// [64 of D, tokens, D / 64, heads, batch]; boxes of one 64-row block, all of D, 128-byte swizzle.
CUtensorMap tensor_map(const char* name, const ConstView& view, DType dtype, int64_t head_dim,
                       int64_t tokens, int64_t heads, int64_t batch) {
  MT_CHECK_SUPPORTED(reinterpret_cast<uintptr_t>(view.data) % 16 == 0, name,
                     ": expected 16-byte aligned memory, got ", view.data);
  MT_CHECK_SUPPORTED(
      view.stride_token % 8 == 0 && view.stride_head % 8 == 0 && view.stride_batch % 8 == 0 &&
          view.stride_token >= 0 && view.stride_head >= 0 && view.stride_batch >= 0,
      name, ": expected strides that are multiples of 8 elements and not negative, got batch ",
      view.stride_batch, ", token ", view.stride_token, ", head ", view.stride_head);
  MT_CHECK_SUPPORTED(view.stride_token > 0 || tokens <= 1, name,
                     ": tokens expanded with stride 0 are not supported");
  // A dimension of size 1 has no stride; the encoder still wants a legal one.
  const auto bytes = [](int64_t stride, int64_t size) {
    return static_cast<cuuint64_t>(size > 1 ? stride * 2 : 128);
  };
  const int64_t map_heads = view.stride_head == 0 ? 1 : heads;
  const int64_t map_batch = view.stride_batch == 0 ? 1 : batch;
  const cuuint64_t sizes[5] = {
      64, static_cast<cuuint64_t>(tokens), static_cast<cuuint64_t>(head_dim / 64),
      static_cast<cuuint64_t>(map_heads), static_cast<cuuint64_t>(map_batch)};
  const cuuint64_t strides[4] = {bytes(view.stride_token, tokens), 128,
                                 bytes(view.stride_head, map_heads),
                                 bytes(view.stride_batch, map_batch)};
  const cuuint32_t box[5] = {64, 64, static_cast<cuuint32_t>(head_dim / 64), 1, 1};
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  CUtensorMap map;
  const CUresult result =
      tensor_map_encoder()(&map,
                           dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                     : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                           5, const_cast<void*>(view.data), sizes, strides, box, steps,
                           CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                           CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  MT_CHECK_SUPPORTED(result == CUDA_SUCCESS, name, ": the driver cannot map [", batch, ", ", tokens,
                     ", ", heads, ", ", head_dim, "] with strides ", view.stride_batch, ", ",
                     view.stride_token, ", ", view.stride_head, " (CUresult ",
                     static_cast<int>(result), ")");
  return map;
}

ForwardLauncher launcher(DType dtype, int64_t head_dim) {
  if (dtype == DType::kBFloat16 && head_dim == 128) return launch_forward_bf16_d128;
  if (dtype == DType::kBFloat16 && head_dim == 64) return launch_forward_bf16_d64;
  if (dtype == DType::kFloat16 && head_dim == 128) return launch_forward_fp16_d128;
  if (dtype == DType::kFloat16 && head_dim == 64) return launch_forward_fp16_d64;
  return nullptr;
}

void check_params(const ForwardParams& p) {
  MT_CHECK_SUPPORTED(launcher(p.dtype, p.head_dim) != nullptr,
                     "sm90 forward: expected bf16 or fp16 with head_dim 64 or 128, got dtype ",
                     static_cast<int>(p.dtype), " with head_dim ", p.head_dim);
  MT_CHECK_SUPPORTED(reinterpret_cast<uintptr_t>(p.out.data) % 8 == 0 &&
                         p.out.stride_batch % 2 == 0 && p.out.stride_token % 2 == 0 &&
                         p.out.stride_head % 2 == 0,
                     "out: expected 8-byte aligned memory and even strides, got strides ",
                     p.out.stride_batch, ", ", p.out.stride_token, ", ", p.out.stride_head);
  const int64_t items = p.batch * p.num_q_heads * ((p.num_queries + 127) / 128);
  MT_CHECK_SUPPORTED(
      items < (int64_t{1} << 30) && p.num_queries < (int64_t{1} << 31) - 128 &&
          p.seq_len < (int64_t{1} << 31),
      "sm90 forward: expected fewer than 2^31 queries and 2^30 pairs of query blocks, got ",
      p.num_queries, " queries, ", items, " pairs");
  for (int s = 0; s < p.num_sources; ++s) {
    const KeySource& source = p.sources[s];
    MT_CHECK_SUPPORTED(source.num_keys < (int64_t{1} << 31) - 64, "sm90 forward: source ", s,
                       ": expected fewer than 2^31 keys, got ", source.num_keys);
    MT_CHECK_SUPPORTED(source.columns.counts == nullptr || p.position_stride == 1,
                       "sm90 forward: columns need position_stride 1, got ", p.position_stride);
  }
  const int64_t needed = forward_workspace_bytes(p);
  MT_CHECK_ARG(p.workspace != nullptr && p.workspace_bytes >= needed &&
                   reinterpret_cast<uintptr_t>(p.workspace) % 256 == 0,
               "sm90 forward: expected a 256-byte aligned workspace of ", needed, " bytes, got ",
               p.workspace_bytes, " at ", p.workspace);
}

void fill_lists(SourceArgs& out, const KeySource& source) {
  out.num_keys = static_cast<int32_t>(source.num_keys);
  out.num_blocks = static_cast<int32_t>((source.num_keys + kBlock - 1) / kBlock);
  const BlockLists& blocks = source.blocks;
  out.kind = blocks.kind;
  if (blocks.kind != BlockListKind::kNone && source.num_keys > 0) {
    out.block_starts = source.block_starts;
    // One stripe however long: distances inside it fit.
    out.blocks_per_stripe =
        static_cast<int32_t>(std::min<int64_t>(blocks.blocks_per_stripe, 1 << 24));
    out.entries = blocks.entries;
    out.num_entries = blocks.num_entries;
    out.entry_capacity = blocks.capacity;
    out.row_begin = blocks.row_begin;
    out.key_blocks = blocks.key_blocks;
  }
  out.column_positions = source.columns.positions;
  out.column_counts = source.columns.counts;
  out.column_capacity = source.columns.capacity;
}

/// One launch over sources[first, last).
void forward_range(const ForwardParams& p, int first, int last, bool write, int num_sms) {
  ForwardArgs args = {};
  const auto stream = static_cast<cudaStream_t>(p.stream);
  const int64_t rows = p.batch * p.num_q_heads;
  args.q = tensor_map("q", p.q, p.dtype, p.head_dim, p.num_queries, p.num_q_heads, p.batch);
  args.q_head_step = p.q.stride_head != 0;
  args.q_batch_step = p.q.stride_batch != 0;
  args.num_sources = last - first;
  args.num_heads = static_cast<int32_t>(p.num_q_heads);
  args.heads_per_kv_head = static_cast<int32_t>(p.num_q_heads / p.num_kv_heads);
  args.num_rows = static_cast<int32_t>(rows);
  args.num_queries = static_cast<int32_t>(p.num_queries);
  args.num_q_blocks = static_cast<int32_t>((p.num_queries + kBlock - 1) / kBlock);
  args.group_rows =
      keys_bytes(p, first, last) > kGroupAboveBytes ? args.heads_per_kv_head : args.num_rows;
  args.seq_len = static_cast<int32_t>(p.seq_len);
  args.position_stride = static_cast<int32_t>(p.position_stride);
  args.q_block_starts = p.q_block_starts;
  args.document_start = p.document_start;
  args.document_stride_batch = p.document_stride_batch;
  args.diagonal_bits = p.diagonal_bits;
  args.diagonal_words = p.diagonal_words;
  args.scale_log2 = static_cast<float>(p.softmax_scale * 1.4426950408889634);
  args.reach = 8 / args.scale_log2;
  args.out = static_cast<float*>(p.out.data);
  args.out_stride_batch = p.out.stride_batch;
  args.out_stride_token = p.out.stride_token;
  args.out_stride_head = p.out.stride_head;
  args.lse = static_cast<float*>(p.lse);
  args.first = write ? 1 : 0;
  args.next_item = static_cast<int32_t*>(p.workspace);

  GatherArgs gather;
  gather.num_sources = 0;
  int64_t gathered = 0, max_tiles = 0;
  for (int s = first; s < last; ++s) {
    const KeySource& source = p.sources[s];
    SourceArgs& out = args.sources[s - first];
    fill_lists(out, source);
    if (out.block_starts != nullptr) {
      out.k =
          tensor_map("k", source.k, p.dtype, p.head_dim, source.num_keys, p.num_kv_heads, p.batch);
      out.v =
          tensor_map("v", source.v, p.dtype, p.head_dim, source.num_keys, p.num_kv_heads, p.batch);
      out.k_head_step = source.k.stride_head != 0;
      out.k_batch_step = source.k.stride_batch != 0;
      out.v_head_step = source.v.stride_head != 0;
      out.v_batch_step = source.v.stride_batch != 0;
    }
    if (source.columns.counts != nullptr) {
      GatherSource& from = gather.sources[gather.num_sources++];
      const int64_t size = size_of(p.dtype);
      for (const ConstView& view : {source.k, source.v}) {
        MT_CHECK_SUPPORTED(reinterpret_cast<uintptr_t>(view.data) % 16 == 0 &&
                               view.stride_token % 8 == 0 && view.stride_head % 8 == 0 &&
                               view.stride_batch % 8 == 0,
                           "sm90 forward: source ", s,
                           ": expected 16-byte aligned k and v, strides multiples of 8 elements");
      }
      from = {static_cast<const char*>(source.k.data),
              static_cast<const char*>(source.v.data),
              source.k.stride_batch * size,
              source.k.stride_token * size,
              source.k.stride_head * size,
              source.v.stride_batch * size,
              source.v.stride_token * size,
              source.v.stride_head * size,
              source.columns.key_rows,
              source.columns.counts,
              source.columns.capacity,
              static_cast<int32_t>(gathered)};
      out.gathered_begin = static_cast<int32_t>(gathered);
      gathered += round_up(source.columns.capacity, kBlock);
      max_tiles = std::max(max_tiles, (source.columns.capacity + kBlock - 1) / kBlock);
    }
  }
  args.gathered_rows = static_cast<int32_t>(gathered);
  if (max_tiles > 0) {
    MT_CHECK_SUPPORTED(rows * gathered < (int64_t{1} << 31),
                       "sm90 forward: expected fewer than 2^31 gathered rows, got ", rows,
                       " heads of ", gathered);
    const int64_t bytes = rows * gathered * p.head_dim * 2;
    char* memory = static_cast<char*>(p.workspace) + kCounterBytes;
    gather.num_heads = args.num_heads;
    gather.heads_per_kv_head = args.heads_per_kv_head;
    gather.num_rows = args.num_rows;
    gather.row_bytes = static_cast<int32_t>(p.head_dim * 2);
    gather.gathered_rows = args.gathered_rows;
    gather.gathered_k = memory;
    gather.gathered_v = memory + bytes;
    gather.next_item = args.next_item;
    args.gathered_k = tensor_map("gathered k", {memory, 0, p.head_dim, 0}, p.dtype, p.head_dim,
                                 rows * gathered, 1, 1);
    args.gathered_v = tensor_map("gathered v", {memory + bytes, 0, p.head_dim, 0}, p.dtype,
                                 p.head_dim, rows * gathered, 1, 1);
    check_cuda(launch_gather_columns(gather, static_cast<int>(max_tiles), stream),
               "gathering columns");
  } else {
    check_cuda(cudaMemsetAsync(args.next_item, 0, sizeof(int32_t), stream), "resetting the queue");
  }
  check_cuda(launcher(p.dtype, p.head_dim)(args, num_sms, stream), "launching");
}

}  // namespace

int64_t forward_workspace_bytes(const ForwardParams& params) {
  int64_t rows = 0;
  for (int first = 0; first < params.num_sources; first += kMaxSources) {
    rows = std::max(
        rows, gathered_rows(params, first, std::min(first + kMaxSources, params.num_sources)));
  }
  return kCounterBytes + 2 * rows * params.batch * params.num_q_heads * params.head_dim * 2;
}

void forward(const ForwardParams& params) {
  check(params);
  check_params(params);
  if (params.batch == 0 || params.num_queries == 0) return;
  int device = 0, num_sms = 0;
  check_cuda(cudaGetDevice(&device), "asking for the device");
  check_cuda(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device),
             "asking for the SM count");
  num_sms = std::max(1, num_sms - std::max(0, params.sm_margin));
  int first = 0;
  bool write = params.first;
  do {
    const int last = std::min(first + kMaxSources, params.num_sources);
    forward_range(params, first, last, write, num_sms);
    first = last;
    write = false;
  } while (first < params.num_sources);
}

}  // namespace mtraining::kernels::sm90
