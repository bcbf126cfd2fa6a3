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
  const char* head;         // of (batch, head), its first token; whole: of the tile's first token
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

/// How the threads of a block share a tile: each has one 16-byte chunk of every kRowsAtOnce-th row.
template <int kD, int kThreads>
struct TileShare {
  static constexpr int kRowsAtOnce = kThreads / Tile<kD>::kChunks;
  static constexpr int kCopies = 64 / kRowsAtOnce;
  static_assert(kRowsAtOnce % 8 == 0 || kRowsAtOnce == 4);
  static __device__ __forceinline__ int chunk() { return threadIdx.x % Tile<kD>::kChunks; }
  static __device__ __forceinline__ int row(int i) {
    return static_cast<int>(threadIdx.x) / Tile<kD>::kChunks + i * kRowsAtOnce;
  }
  static __device__ __forceinline__ uint32_t to(uint32_t tile, int i) {
    return tile + row(i) * Tile<kD>::kRowBytes + ((chunk() ^ (row(i) % 8)) << 4);
  }
};

/// Starts the copy of 64 consecutive rows on 16 bytes, all of which count; columns at and beyond head_dim are zeros. Not
/// committed.
template <int kD, int kThreads>
__device__ __forceinline__ void load_whole_tile(uint32_t tile, const char* first, int64_t stride,
                                                int head_dim) {
  using Share = TileShare<kD, kThreads>;
  const bool valid = Share::chunk() * 8 < head_dim;
  const char* at = first + Share::row(0) * stride + (valid ? Share::chunk() * 16 : 0);
#pragma unroll
  for (int i = 0; i < Share::kCopies; ++i) {
    copy_async_16(Share::to(tile, i), at, valid);
    at += Share::kRowsAtOnce * stride;
  }
}

/// The same of rows that a list names; rows at and beyond count are zeros.
template <int kD, int kThreads>
__device__ __forceinline__ void load_listed_tile(uint32_t tile, const char* head, int64_t stride,
                                                 const int32_t* tokens, int count, int head_dim) {
  using Share = TileShare<kD, kThreads>;
  const bool column_valid = Share::chunk() * 8 < head_dim;
  const char* column = head + (column_valid ? Share::chunk() * 16 : 0);
#pragma unroll
  for (int i = 0; i < Share::kCopies; ++i) {
    const int r = Share::row(i);
    const bool valid = column_valid && r < count;
    const int64_t token = valid ? tokens[r] : 0;
    copy_async_16(Share::to(tile, i), column + token * stride, valid);
  }
}

/// Any 64 rows; columns at and beyond head_dim are zeros.
template <int kD, int kThreads>
__device__ __forceinline__ void load_any_tile(uint32_t tile, const TileRows& from, int head_dim,
                                              bool vectors) {
  using Share = TileShare<kD, kThreads>;
  const char* column = from.head + Share::chunk() * 16;
#pragma unroll 1
  for (int i = 0; i < Share::kCopies; ++i) {
    const int r = Share::row(i);
    const int position = from.start + r * from.step;
    const bool valid = r < from.count && position >= from.lowest && position <= from.highest &&
                       Share::chunk() * 8 < head_dim;
    int64_t token = from.first + r;
    if (from.tokens != nullptr) token = valid ? from.tokens[r] : 0;
    const char* at = valid ? column + token * from.stride : from.head;
    if (vectors) {
      copy_async_16(Share::to(tile, i), at, valid);
    } else {
      store_shared_v4(Share::to(tile, i), valid ? load_elements(at) : make_uint4(0, 0, 0, 0));
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

/// The word of row's bitmap with the diagonal of a pair of positions; 0 where there is none.
__device__ __forceinline__ uint32_t diagonal_word(const AttentionArgs& args, int row,
                                                  int q_position, int k_position) {
  const int diagonal = q_position / 64 - k_position / 64;
  if (args.diagonal_bits == nullptr || diagonal < 0 || diagonal >= args.diagonal_words * 64)
    return 0;
  return reinterpret_cast<const uint32_t*>(args.diagonal_bits +
                                           row * args.diagonal_words)[diagonal / 32];
}
__device__ __forceinline__ bool diagonal_bit(uint32_t word, int q_position, int k_position) {
  return (word >> ((q_position / 64 - k_position / 64) & 31) & 1) != 0;
}
/// Whether the diagonal of a pair of positions is chosen.
__device__ __forceinline__ bool diagonal_chosen(const AttentionArgs& args, int row, int q_position,
                                                int k_position) {
  return diagonal_bit(diagonal_word(args, row, q_position, k_position), q_position, k_position);
}

}  // namespace mtraining::kernels::sm80
