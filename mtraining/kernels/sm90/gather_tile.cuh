// The gather of one tile of columns: what the launches before the attention kernels share.
//
// In:   GatherArgs, a tile of 64 columns, a row (sample, head), a source. Out: k and v of those columns, contiguous.
// Next: gather_columns.cu, backward_rows.cu.
#pragma once

#include "mtraining/kernels/sm90/source_args.cuh"

namespace mtraining::kernels::sm90 {

/// Columns of the row; 0 where the source has none.
__device__ __forceinline__ int64_t columns_of(const GatherSource& source, int row) {
  return source.counts == nullptr ? 0 : source.counts[row];
}

/// By all kThreads threads of a block; zeros from the row's last column to the end of the tile.
template <int kThreads>
__device__ __forceinline__ void gather_tile(const GatherArgs& args, const GatherSource& source,
                                            int tile, int row) {
  const int64_t first = static_cast<int64_t>(tile) * kBlock;
  const int64_t count = columns_of(source, row);
  const int chunks = args.row_bytes / 16;
  const int64_t batch = row / args.num_heads;
  const int64_t kv_head = row % args.num_heads / args.heads_per_kv_head;
  const char* k = source.k + batch * source.k_stride_batch + kv_head * source.k_stride_head;
  const char* v = source.v + batch * source.v_stride_batch + kv_head * source.v_stride_head;
  const int64_t out =
      (static_cast<int64_t>(row) * args.gathered_rows + source.gathered_begin + first) *
      args.row_bytes;
  for (int i = threadIdx.x; i < kBlock * chunks; i += kThreads) {
    const int64_t c = first + i / chunks;
    const int64_t inside = i % chunks * 16;
    uint4 a{0, 0, 0, 0}, b{0, 0, 0, 0};
    if (c < count) {
      const int64_t token = source.key_rows[row * source.capacity + c];
      a = *reinterpret_cast<const uint4*>(k + token * source.k_stride_token + inside);
      b = *reinterpret_cast<const uint4*>(v + token * source.v_stride_token + inside);
    }
    const int64_t at = out + static_cast<int64_t>(i / chunks) * args.row_bytes + inside;
    *reinterpret_cast<uint4*>(args.gathered_k + at) = a;
    *reinterpret_cast<uint4*>(args.gathered_v + at) = b;
  }
}

}  // namespace mtraining::kernels::sm90
