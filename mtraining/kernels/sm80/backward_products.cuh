// The products of both backward passes.
//
// In:   tiles in shared memory. Out: accumulators. Next: backward_keys_kernel.cuh, backward_queries_kernel.cuh.
//
// A warp has 32 rows of the tile that stays (keys, or queries) and a share of the columns: of the scores, and of the gradient. What
// goes from the one product into the other passes through shared memory to the warps with the same rows; its own part a warp has.
#pragma once

#include "mtraining/kernels/sm80/tile.cuh"

namespace mtraining::kernels::sm80 {

/// Steps by which right operands are read before their products.
inline constexpr int kReadAhead = 2;

template <int kD>
struct BackwardShape {
  static constexpr int kWarps = kD > 128 ? 8 : 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kBlocksPerSm = kD > 128 ? 1 : 2;
  static constexpr int kMaxStages = 2;
  static constexpr int kShares = kWarps / 2;     // warps that share 32 rows of the tile that stays
  static constexpr int kColumns = 64 / kShares;  // of a warp's scores
  static constexpr int kSummed = kD / kShares;   // columns of a gradient that a warp sums
  using Packed = uint32_t[kColumns / 16][2][4];  // a warp's scores as left operands
  static constexpr int kPassedBytes = Tile<64>::kBytes;
  __device__ __forceinline__ static int row() { return threadIdx.x / 32 / kShares * 32; }
  __device__ __forceinline__ static int share() { return threadIdx.x / 32 % kShares; }
  /// The warps with the same rows wait for one another.
  __device__ __forceinline__ static void meet() {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + row() / 32), "n"(32 * kShares) : "memory");
  }
};

/// Thirty-two rows of a tile as left operands. The first kHeld steps of 16 of D stay in registers from product to product.
template <int kD, int kHeld>
struct LeftRows {
  static constexpr int kSteps = kD / 16;
  uint32_t at = 0;  // Tile::left() of the rows
  uint32_t held[kHeld > 0 ? kHeld : 1][2][4];
  __device__ __forceinline__ void read(int c, uint32_t (&a)[2][4]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) load_matrices((at ^ (c * 32)) + i * 16 * Tile<kD>::kRowBytes, a[i]);
  }
  /// When the tile is there.
  __device__ __forceinline__ void hold() {
#pragma unroll
    for (int c = 0; c < kHeld; ++c) read(c, held[c]);
  }
};

// Products take a function that is called for the elements of another accumulator in turn: arithmetic that fills the gaps between
// the products of a warp.

/// s[32, kColumns] = left[32, kD] right[kColumns, kD]^T; right: Tile::right() of the first column.
/// s[8 j + 4 i + ..]: rows 16 i .., columns 8 j ...
template <typename Element, int kD, int kHeld, int kColumns, typename Fn>
__device__ __forceinline__ void transposed_product(float (&s)[kColumns],
                                                   const LeftRows<kD, kHeld>& left, uint32_t right,
                                                   const Fn& fn) {
  constexpr int kPieces = kColumns / 16, kSteps = kD / 16 * kPieces;
  uint32_t a[2][2][4], b[kReadAhead + 1][4];
  const auto read = [&](int step) {
    load_matrices((right ^ (step / kPieces * 32)) + step % kPieces * 16 * Tile<kD>::kRowBytes,
                  b[step % (kReadAhead + 1)]);
  };
  if (kHeld == 0) left.read(0, a[0]);
#pragma unroll
  for (int step = 0; step < kReadAhead; ++step) read(step);
#pragma unroll
  for (int x = 0; x < kColumns; ++x) s[x] = 0;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int c = step / kPieces, n = step % kPieces;
    if (step + kReadAhead < kSteps) read(step + kReadAhead);
    if (n == 0 && c + 1 >= kHeld && c + 1 < kD / 16) left.read(c + 1, a[(c + 1) % 2]);
    const uint32_t(&from)[4] = b[step % (kReadAhead + 1)];
    const uint32_t(*rows)[4] = c < kHeld ? left.held[c < kHeld ? c : 0] : a[c % 2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        multiply<Element>(s + 16 * n + 8 * half + 4 * i, rows[i], from[2 * half],
                          from[2 * half + 1]);
    }
#pragma unroll
    for (int x = step * kColumns / kSteps; x < (step + 1) * kColumns / kSteps; ++x) fn(x);
  }
}

/// sum[32, kSummed] += p[32, 64] right[64, kSummed]. The warp has its own columns of p, own_column .., in registers and begins with
/// them; meet() returns when the other warps have stored theirs. left: Tile<64>::left() of p's first row,
/// right: summed() of the tile. fn is called for the elements 0 .. kColumns - 1.
template <typename Element, int kD, int kSummed, int kColumns, typename Meet, typename Fn>
__device__ __forceinline__ void add_product(float (&sum)[kSummed],
                                            const uint32_t (&own)[kColumns / 16][2][4],
                                            uint32_t left, int own_column, uint32_t right,
                                            int first_column, const Meet& meet, const Fn& fn) {
  constexpr int kPieces = kSummed / 16, kSteps = 4 * kPieces, kOwn = kColumns / 16;
  constexpr int kMeet = kOwn * kPieces - 2;  // early enough for the operands behind it
  const uint32_t first = right ^ (first_column * 2);
  uint32_t a[2][2][4], b[kReadAhead + 1][4];
  const auto column = [&](int c) { return (own_column + 16 * c) & 63; };
  const auto read = [&](int step) {
    load_matrices_transposed(
        (first ^ (step % kPieces * 32)) + column(step / kPieces) * Tile<kD>::kRowBytes,
        b[step % (kReadAhead + 1)]);
  };
  const auto read_left = [&](int c) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      load_matrices((left ^ (column(c) * 2)) + i * 16 * Tile<64>::kRowBytes, a[c % 2][i]);
  };
#pragma unroll
  for (int step = 0; step < kReadAhead; ++step) read(step);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int c = step / kPieces, n = step % kPieces;
    if (step + kReadAhead < kSteps) read(step + kReadAhead);
    if (step == kMeet) {
      meet();
      read_left(kOwn);
    }
    if (n == 0 && c >= kOwn && c + 1 < 4) read_left(c + 1);
    const uint32_t(&from)[4] = b[step % (kReadAhead + 1)];
    const uint32_t(*rows)[4] = c < kOwn ? own[c < kOwn ? c : 0] : a[c % 2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        multiply<Element>(sum + 16 * n + 8 * half + 4 * i, rows[i], from[2 * half],
                          from[2 * half + 1]);
    }
#pragma unroll
    for (int x = step * kColumns / kSteps; x < (step + 1) * kColumns / kSteps; ++x) fn(x);
  }
}

/// A probability from here on is all of a row's weight to the rounding of lse (in powers of two): where it is of the only key that the
/// row sees, its score has no gradient, and dp - delta is nothing but rounding.
__device__ __forceinline__ float all_weight(float lse) { return 1.0f - 1e-6f - 3e-7f * fabsf(lse); }

/// 32 x kColumns accumulators, rounded, as left operands.
template <typename Element, int kColumns>
__device__ __forceinline__ void pack_rows(uint32_t (&p)[kColumns / 16][2][4],
                                          const float (&s)[kColumns]) {
#pragma unroll
  for (int c = 0; c < kColumns / 16; ++c) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int x = 0; x < 4; ++x) {  // rows 8 apart, then columns 8 apart
        const int at = 16 * c + 8 * (x / 2) + 4 * i + 2 * (x % 2);
        p[c][i][x] = pack<Element>(s[at], s[at + 1]);
      }
    }
  }
}

/// The same into columns first_column .. of rows that Tile<64> has; row: the warp's first.
template <int kPieces>
__device__ __forceinline__ void store_rows(uint32_t tile, const uint32_t (&p)[kPieces][2][4],
                                           int row, int first_column, int lane) {
#pragma unroll
  for (int c = 0; c < kPieces; ++c) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if constexpr (kStoresMatrices) {
        store_matrices((Tile<64>::left(tile, row, lane) ^ ((first_column + 16 * c) * 2)) +
                           i * 16 * Tile<64>::kRowBytes,
                       p[c][i]);
      } else {
#pragma unroll
        for (int x = 0; x < 4; ++x)
          store_shared_u32(tile + (row + 16 * i + 8 * (x % 2) + lane / 4) * Tile<64>::kRowBytes +
                               (((first_column / 8 + 2 * c + x / 2) ^ (lane / 4)) << 4) +
                               lane % 4 * 4,
                           p[c][i][x]);
      }
    }
  }
}

struct Nothing {
  __device__ __forceinline__ void operator()(int) const {}
};

}  // namespace mtraining::kernels::sm80
