// Tensor maps, lists and the gather of columns: what forward and backward fill in the same way.
#include <cudaTypedefs.h>

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "mtraining/base/check.h"
#include "mtraining/kernels/device/rounded_rows.cuh"
#include "mtraining/kernels/sm90/source_args.cuh"

namespace mtraining::kernels::sm90 {
namespace {

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

/// What a tensor map is made of, and nothing else: the same key, the same map.
struct MapKey {
  uint64_t data, type, swizzle;
  cuuint64_t sizes[5], strides[4];
  cuuint32_t box[5], unused;
};
static_assert(std::has_unique_object_representations_v<MapKey>);

/// Encoding takes the driver half a microsecond, a backward has seven maps, and the same tensors come again and again.
CUresult encode(const MapKey& key, CUtensorMap* map) {
  struct Slot {
    MapKey key;
    CUtensorMap map;
  };
  constexpr size_t kSlots = 512;
  static thread_local std::vector<Slot> slots(kSlots);  // key.data null: empty
  uint64_t hash = 0;
  for (const uint64_t part : {key.data, key.sizes[1], key.sizes[3], key.strides[0], key.strides[2]})
    hash = (hash ^ part) * 0x9E3779B97F4A7C15u;
  Slot& slot = slots[hash >> 55];
  if (key.data == 0 || std::memcmp(&slot.key, &key, sizeof(key)) != 0) {
    constexpr cuuint32_t steps[5] = {1, 1, 1, 1, 1};
    const CUresult result = tensor_map_encoder()(
        &slot.map, static_cast<CUtensorMapDataType>(key.type), 5, reinterpret_cast<void*>(key.data),
        key.sizes, key.strides, key.box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
        static_cast<CUtensorMapSwizzle>(key.swizzle), CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    slot.key = result == CUDA_SUCCESS ? key : MapKey{};
    if (result != CUDA_SUCCESS) return result;
  }
  *map = slot.map;
  return CUDA_SUCCESS;
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
    out.key_row_begin = blocks.key_row_begin;
    out.query_blocks = blocks.query_blocks;
  }
  out.column_positions = source.columns.positions;
  out.column_counts = source.columns.counts;
  out.column_capacity = source.columns.capacity;
}

}  // namespace

void check_cuda(cudaError_t error, const char* what) {
  MT_CHECK_EXTERNAL(error == cudaSuccess, "sm90: ", what, ": ", cudaGetErrorString(error));
}

int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

int multiprocessors(const AttentionParams& params) {
  int device = 0, count = 0;
  check_cuda(cudaGetDevice(&device), "asking for the device");
  check_cuda(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device),
             "asking for the SM count");
  return std::max(1, count - std::max(0, params.sm_margin));
}

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
  const int64_t atom = head_dim % 64 == 0 ? 64 : 32;
  const int64_t map_heads = view.stride_head == 0 ? 1 : heads;
  const int64_t map_batch = view.stride_batch == 0 ? 1 : batch;
  const MapKey key = {
      reinterpret_cast<uint64_t>(view.data),
      static_cast<uint64_t>(dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                      : CU_TENSOR_MAP_DATA_TYPE_FLOAT16),
      static_cast<uint64_t>(atom == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B),
      {static_cast<cuuint64_t>(atom), static_cast<cuuint64_t>(tokens),
       static_cast<cuuint64_t>(head_dim / atom), static_cast<cuuint64_t>(map_heads),
       static_cast<cuuint64_t>(map_batch)},
      {bytes(view.stride_token, tokens), static_cast<cuuint64_t>(atom * 2),
       bytes(view.stride_head, map_heads), bytes(view.stride_batch, map_batch)},
      {static_cast<cuuint32_t>(atom), 64, static_cast<cuuint32_t>(head_dim / atom), 1, 1},
      0};
  CUtensorMap map;
  const CUresult result = encode(key, &map);
  MT_CHECK_SUPPORTED(result == CUDA_SUCCESS, name, ": the driver cannot map [", batch, ", ", tokens,
                     ", ", heads, ", ", head_dim, "] with strides ", view.stride_batch, ", ",
                     view.stride_token, ", ", view.stride_head, " (CUresult ",
                     static_cast<int>(result), ")");
  return map;
}

CUtensorMap gradient_map(const char* name, const View& view, int64_t head_dim, int64_t tokens,
                         int64_t heads, int64_t batch) {
  MT_CHECK_SUPPORTED(reinterpret_cast<uintptr_t>(view.data) % 16 == 0 &&
                         view.stride_token % 4 == 0 && view.stride_head % 4 == 0 &&
                         view.stride_batch % 4 == 0 && view.stride_token >= 0 &&
                         view.stride_head >= 0 && view.stride_batch >= 0,
                     name,
                     ": expected 16-byte aligned memory and strides that are multiples of 4 "
                     "elements and not negative, got ",
                     view.data, ", batch ", view.stride_batch, ", token ", view.stride_token,
                     ", head ", view.stride_head);
  const auto bytes = [](int64_t stride, int64_t size) {
    return static_cast<cuuint64_t>(size > 1 ? stride * 4 : 128);
  };
  const MapKey key = {reinterpret_cast<uint64_t>(view.data),
                      CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
                      CU_TENSOR_MAP_SWIZZLE_128B,
                      {32, static_cast<cuuint64_t>(tokens), static_cast<cuuint64_t>(head_dim / 32),
                       static_cast<cuuint64_t>(heads), static_cast<cuuint64_t>(batch)},
                      {bytes(view.stride_token, tokens), 128, bytes(view.stride_head, heads),
                       bytes(view.stride_batch, batch)},
                      {32, 16, 2, 1, 1},
                      0};
  CUtensorMap map;
  const CUresult result = encode(key, &map);
  MT_CHECK_SUPPORTED(result == CUDA_SUCCESS, name, ": the driver cannot map [", batch, ", ", tokens,
                     ", ", heads, ", ", head_dim, "] float32 with strides ", view.stride_batch,
                     ", ", view.stride_token, ", ", view.stride_head, " (CUresult ",
                     static_cast<int>(result), ")");
  return map;
}

int64_t gathered_rows(const AttentionParams& params, int first, int last) {
  int64_t rows = 0;
  for (int s = first; s < last; ++s) {
    const ColumnLists& columns = params.sources[s].columns;
    if (columns.counts != nullptr) rows += round_up(columns.capacity, kBlock);
  }
  return rows;
}

int64_t keys_bytes(const AttentionParams& params, int first, int last) {
  int64_t keys = 0;
  for (int s = first; s < last; ++s) keys += params.sources[s].num_keys;
  return keys * params.batch * params.num_kv_heads * params.head_dim * size_of(params.dtype) * 2;
}

void check_rounded_rows(const char* name, const View& view) {
  check_rounded_rows(name, const_of(view));
}

void check_rounded_rows(const char* name, const ConstView& view) {
  MT_CHECK_SUPPORTED(device::rows_are_aligned(view), name,
                     ": expected 16-byte aligned memory and strides that are multiples of 8, got "
                     "strides ",
                     view.stride_batch, ", ", view.stride_token, ", ", view.stride_head);
}

void check_sizes(const AttentionParams& p) {
  const int64_t items = p.batch * p.num_q_heads * ((p.num_queries + 127) / 128);
  MT_CHECK_SUPPORTED(items < (int64_t{1} << 30) && p.num_queries < (int64_t{1} << 31) - 128 &&
                         p.seq_len < (int64_t{1} << 31),
                     "sm90: expected fewer than 2^31 queries and 2^30 pairs of query blocks, got ",
                     p.num_queries, " queries, ", items, " pairs");
  for (int s = 0; s < p.num_sources; ++s) {
    const KeySource& source = p.sources[s];
    MT_CHECK_SUPPORTED(source.num_keys < (int64_t{1} << 31) - 64, "sm90: source ", s,
                       ": expected fewer than 2^31 keys, got ", source.num_keys);
    MT_CHECK_SUPPORTED(source.columns.counts == nullptr || p.position_stride == 1,
                       "sm90: columns need position_stride 1, got ", p.position_stride);
  }
}

int64_t most_gathered_rows(const AttentionParams& params) {
  int64_t rows = 0;
  for (int first = 0; first < params.num_sources; first += kMaxSources) {
    rows = std::max(
        rows, gathered_rows(params, first, std::min(first + kMaxSources, params.num_sources)));
  }
  return rows;
}

int64_t plan_sources(const AttentionParams& p, int first, int last, void* memory,
                     SourceArgs* sources, GatherArgs* to_gather, CUtensorMap* gathered_k,
                     CUtensorMap* gathered_v) {
  const int64_t rows = p.batch * p.num_q_heads;
  GatherArgs& gather = *to_gather;
  gather.num_sources = 0;
  int64_t gathered = 0, max_tiles = 0;
  for (int s = first; s < last; ++s) {
    const KeySource& source = p.sources[s];
    SourceArgs& out = sources[s - first];
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
                           "sm90: source ", s,
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
  if (max_tiles > 0) {
    MT_CHECK_SUPPORTED(rows * gathered < (int64_t{1} << 31),
                       "sm90: expected fewer than 2^31 gathered rows, got ", rows, " heads of ",
                       gathered);
    const int64_t bytes = rows * gathered * p.head_dim * 2;
    char* const k = static_cast<char*>(memory);
    gather.num_heads = static_cast<int32_t>(p.num_q_heads);
    gather.heads_per_kv_head = static_cast<int32_t>(p.num_q_heads / p.num_kv_heads);
    gather.num_rows = static_cast<int32_t>(rows);
    gather.row_bytes = static_cast<int32_t>(p.head_dim * 2);
    gather.gathered_rows = static_cast<int32_t>(gathered);
    gather.gathered_k = k;
    gather.gathered_v = k + bytes;
    *gathered_k =
        tensor_map("gathered k", {k, 0, p.head_dim, 0}, p.dtype, p.head_dim, rows * gathered, 1, 1);
    *gathered_v = tensor_map("gathered v", {k + bytes, 0, p.head_dim, 0}, p.dtype, p.head_dim,
                             rows * gathered, 1, 1);
  }
  gather.max_tiles = static_cast<int32_t>(max_tiles);
  return gathered;
}

int64_t fill_sources(const AttentionParams& p, int first, int last, void* memory,
                     int32_t* next_item, SourceArgs* sources, CUtensorMap* gathered_k,
                     CUtensorMap* gathered_v) {
  const auto stream = static_cast<cudaStream_t>(p.stream);
  GatherArgs gather;
  const int64_t gathered =
      plan_sources(p, first, last, memory, sources, &gather, gathered_k, gathered_v);
  if (gather.max_tiles > 0) {
    gather.next_item = next_item;
    check_cuda(launch_gather_columns(gather, stream), "gathering columns");
  } else {
    check_cuda(cudaMemsetAsync(next_item, 0, sizeof(int32_t), stream), "resetting the queue");
  }
  return gathered;
}

}  // namespace mtraining::kernels::sm90
