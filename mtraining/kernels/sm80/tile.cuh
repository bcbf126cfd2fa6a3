// Tiles of 64 rows in shared memory: how they are filled and how matrix operands are read from them.
//
// In:   rows in global memory. Out: [64][D] of 16-bit elements, the 16-byte chunks of a row permuted by row % 8 so that eight
//       rows' chunks lie in different banks. Next: forward_kernel.cuh, backward_*_kernel.cuh.
#pragma once

#include "mtraining/kernels/sm80/attention_args.cuh"
#include "mtraining/kernels/sm80/ptx.cuh"

namespace mtraining::kernels::sm80 {

template <int kD>
struct Tile {
  static constexpr int kRowBytes = 2 * kD;
  static constexpr int kBytes = 64 * kRowBytes;  // aligned to a row's bytes
  static constexpr int kChunks = kD / 8;

  // Operand addresses of a lane, for the first 16 columns of D; ^ (c * 32) gives columns 16 c .., + 16 n * kRowBytes rows 16 n ...

  /// Rows row .. row + 15 as the left operand, D summed over.
  static __device__ __forceinline__ uint32_t left(uint32_t tile, int row, int lane) {
    return tile + (row + lane / 8 % 2 * 8 + lane % 8) * kRowBytes +
           (((lane / 16) ^ (lane % 8)) << 4);
  }
  /// 16 rows as the columns of the right operand, D summed over; two products of 8 columns.
  static __device__ __forceinline__ uint32_t right(uint32_t tile, int lane) {
    return tile + (lane / 16 * 8 + lane % 8) * kRowBytes + (((lane / 8 % 2) ^ (lane % 8)) << 4);
  }
  /// 16 rows summed over, D the columns of the right operand; read transposed; two products of 8 columns.
  static __device__ __forceinline__ uint32_t summed(uint32_t tile, int lane) {
    return left(tile, 0, lane);
  }
};

/// Where a tile's rows come from.
struct TileRows {
  const char* head;         // of (batch, head)
  int64_t stride;           // bytes from token to token
  const int32_t* tokens;    // null: consecutive from first
  int32_t first, count;     // rows at and beyond count are zeros
  int32_t start, step;      // position of row r: start + r * step
  int32_t lowest, highest;  // rows whose positions lie outside are zeros
};

/// Eight elements from an address that is not aligned.
__device__ __forceinline__ uint4 load_elements(const void* from) {
  const auto* x = static_cast<const uint16_t*>(from);
  uint32_t v[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = x[2 * i] | static_cast<uint32_t>(x[2 * i + 1]) << 16;
  return make_uint4(v[0], v[1], v[2], v[3]);
}

/// Starts the copy of 64 rows; columns at and beyond head_dim are zeros. Not committed.
template <int kD, int kThreads>
__device__ __forceinline__ void load_tile(uint32_t tile, const TileRows& from, int head_dim,
                                          bool vectors) {
  constexpr int kRowsAtOnce = kThreads / Tile<kD>::kChunks;
  const int chunk = threadIdx.x % Tile<kD>::kChunks;
  const char* column = from.head + chunk * 16;
#pragma unroll
  for (int i = 0; i < 64 / kRowsAtOnce; ++i) {
    const int r = threadIdx.x / Tile<kD>::kChunks + i * kRowsAtOnce;
    const int position = from.start + r * from.step;
    const bool valid = r < from.count && position >= from.lowest && position <= from.highest &&
                       chunk * 8 < head_dim;
    int64_t token = from.first + r;
    if (from.tokens != nullptr) token = valid ? from.tokens[r] : 0;
    const char* at = valid ? column + token * from.stride : from.head;
    const uint32_t to = tile + r * Tile<kD>::kRowBytes + ((chunk ^ (r % 8)) << 4);
    if (vectors) {
      copy_async_16(to, at, valid);
    } else {
      store_shared_v4(to, valid ? load_elements(at) : make_uint4(0, 0, 0, 0));
    }
  }
}

__device__ __forceinline__ const char* head_of(const Rows& rows, int batch, int head) {
  return rows.data + batch * rows.stride_batch + head * rows.stride_head;
}

/// Query rows of one block, padding zero.
__device__ __forceinline__ TileRows query_rows(const AttentionArgs& args, const Rows& rows,
                                               int batch, int head, int q_block,
                                               const QueryBounds& bounds) {
  return {head_of(rows, batch, head),
          rows.stride_token,
          nullptr,
          q_block * 64,
          args.num_queries - q_block * 64,
          bounds.first,
          args.position_stride,
          0,
          bounds.last};
}

/// Whether the diagonal of a pair of positions is chosen in row's bitmap.
__device__ __forceinline__ bool diagonal_chosen(const AttentionArgs& args, int row, int q_position,
                                                int k_position) {
  const int diagonal = q_position / 64 - k_position / 64;
  if (args.diagonal_bits == nullptr || diagonal < 0 || diagonal >= args.diagonal_words * 64)
    return false;
  const auto* words =
      reinterpret_cast<const uint32_t*>(args.diagonal_bits + row * args.diagonal_words);
  return (words[diagonal / 32] >> (diagonal % 32) & 1) != 0;
}

}  // namespace mtraining::kernels::sm80
