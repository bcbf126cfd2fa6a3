// The products of both backward passes.
//
// In:   tiles in shared memory. Out: accumulators. Next: backward_keys_kernel.cuh, backward_queries_kernel.cuh.
//
// Query pass: a warp has 16 rows of the tile that stays (queries) and all 64 of the tile that passes by. Above head_dim 128 two
// warps share the rows: both compute the scores, each sums its half of the gradient's columns.
// Key pass: a warp has 32 rows of the tile that stays (keys) and a share of the columns: of the scores, and of the gradient. What
// passes from the one product to the other goes through shared memory, to the warps with the same rows.
#pragma once

#include "mtraining/kernels/sm80/tile.cuh"

namespace mtraining::kernels::sm80 {

/// Steps by which operands are read before their products.
inline constexpr int kReadAhead = 3;
inline constexpr int kReadAhead32 = 2;  // of 32 rows, whose reads serve twice the products

template <int kD>
struct BackwardShape {
  static constexpr int kHalves = kD > 128 ? 2 : 1;
  static constexpr int kWarps = 4 * kHalves;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kBlocksPerSm = kD > 128 ? 1 : 2;
  static constexpr int kSummed = kD / kHalves;  // columns of a gradient that a warp sums
  static constexpr int kMaxStages = 2;
};

// Products take a function that is called for the elements 0 .. 31 of another accumulator in turn: arithmetic that fills the gaps
// between the products of a warp.

/// Calls fn for the elements that belong to one of kSteps steps.
template <int kSteps, typename Fn>
__device__ __forceinline__ void visit_elements(int step, const Fn& fn) {
#pragma unroll
  for (int x = step * 32 / kSteps; x < (step + 1) * 32 / kSteps; ++x) fn(x);
}

/// Sixteen rows as left operands: read from a tile step by step, one step ahead of its use ...
template <int kD>
struct RowsInTile {
  uint32_t at;  // Tile::left() of the rows
  uint32_t a[2][4];
  __device__ __forceinline__ explicit RowsInTile(uint32_t left) : at(left) {
    load_matrices(at, a[0]);
  }
  __device__ __forceinline__ void read_ahead(int c) {
    if (c + 1 < kD / 16) load_matrices(at ^ ((c + 1) * 32), a[(c + 1) % 2]);
  }
  __device__ __forceinline__ const uint32_t (&step(int c) const)[4] { return a[c % 2]; }
};
/// ... or held in registers from tile to tile.
template <int kD>
struct RowsHeld {
  uint32_t a[kD / 16][4];
  __device__ __forceinline__ void read(uint32_t left) {
#pragma unroll
    for (int c = 0; c < kD / 16; ++c) load_matrices(left ^ (c * 32), a[c]);
  }
  __device__ __forceinline__ void read_ahead(int) {}
  __device__ __forceinline__ const uint32_t (&step(int c) const)[4] { return a[c]; }
};

/// s[16, 64] = left[16, kD] right[64, kD]^T; right: Tile::right() of the tile.
template <typename Element, int kD, typename Left, typename Fn>
__device__ __forceinline__ void transposed_product(float (&s)[32], Left&& left, uint32_t right,
                                                   const Fn& fn) {
  constexpr int kSteps = kD / 16 * 4;  // 16 of D, then 16 of the right rows
  uint32_t b[kReadAhead + 1][4];
  const auto read = [&](int step) {
    load_matrices((right ^ (step / 4 * 32)) + step % 4 * 16 * Tile<kD>::kRowBytes,
                  b[step % (kReadAhead + 1)]);
  };
#pragma unroll
  for (int step = 0; step < kReadAhead; ++step) read(step);
#pragma unroll
  for (int x = 0; x < 32; ++x) s[x] = 0;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int c = step / 4, n = step % 4;
    if (step + kReadAhead < kSteps) read(step + kReadAhead);
    if (n == 1) left.read_ahead(c);
    const uint32_t(&from)[4] = b[step % (kReadAhead + 1)];
    multiply<Element>(s + 8 * n, left.step(c), from[0], from[1]);
    multiply<Element>(s + 8 * n + 4, left.step(c), from[2], from[3]);
    visit_elements<kSteps>(step, fn);
  }
}

/// sum[16, kSummed] += p[16, 64] right[64, kSummed]; right: summed() of the tile, from first_column on.
template <typename Element, int kD, int kSummed, typename Fn>
__device__ __forceinline__ void add_product(float (&sum)[kSummed / 2], const uint32_t (&p)[4][4],
                                            uint32_t right, int first_column, const Fn& fn) {
  constexpr int kColumnSteps = kSummed / 16, kSteps = 4 * kColumnSteps;
  const uint32_t first = right ^ (first_column * 2);
  uint32_t b[kReadAhead + 1][4];
  const auto read = [&](int step) {
    load_matrices_transposed(
        (first ^ (step % kColumnSteps * 32)) + step / kColumnSteps * 16 * Tile<kD>::kRowBytes,
        b[step % (kReadAhead + 1)]);
  };
#pragma unroll
  for (int step = 0; step < kReadAhead; ++step) read(step);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    if (step + kReadAhead < kSteps) read(step + kReadAhead);
    float* at = sum + 8 * (step % kColumnSteps);
    const uint32_t(&from)[4] = b[step % (kReadAhead + 1)];
    multiply<Element>(at, p[step / kColumnSteps], from[0], from[1]);
    multiply<Element>(at + 4, p[step / kColumnSteps], from[2], from[3]);
    visit_elements<kSteps>(step, fn);
  }
}

/// s[32, kColumns] = left[32, kD] right[kColumns, kD]^T; left: Tile::left() of the first row, right: Tile::right() of the first column.
/// s[8 j + 4 i + ..]: rows 16 i .., columns 8 j ...
template <typename Element, int kD, int kColumns, typename Fn>
__device__ __forceinline__ void transposed_product_32(float (&s)[kColumns], uint32_t left,
                                                      uint32_t right, const Fn& fn) {
  constexpr int kPieces = kColumns / 16, kSteps = kD / 16 * kPieces;
  uint32_t a[2][2][4], b[kReadAhead32 + 1][4];
  const auto read = [&](int step) {
    load_matrices((right ^ (step / kPieces * 32)) + step % kPieces * 16 * Tile<kD>::kRowBytes,
                  b[step % (kReadAhead32 + 1)]);
  };
  const auto read_left = [&](int c) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      load_matrices((left ^ (c * 32)) + i * 16 * Tile<kD>::kRowBytes, a[c % 2][i]);
  };
  read_left(0);
#pragma unroll
  for (int step = 0; step < kReadAhead32; ++step) read(step);
#pragma unroll
  for (int x = 0; x < kColumns; ++x) s[x] = 0;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int c = step / kPieces, n = step % kPieces;
    if (step + kReadAhead32 < kSteps) read(step + kReadAhead32);
    if (n == 0 && c + 1 < kD / 16) read_left(c + 1);
    const uint32_t(&from)[4] = b[step % (kReadAhead32 + 1)];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        multiply<Element>(s + 16 * n + 8 * half + 4 * i, a[c % 2][i], from[2 * half],
                          from[2 * half + 1]);
    }
#pragma unroll
    for (int x = step * kColumns / kSteps; x < (step + 1) * kColumns / kSteps; ++x) fn(x);
  }
}

/// sum[32, kSummed] += p[32, 64] right[64, kSummed]; left: Tile<64>::left() of p's first row, right: summed() of the tile. fn is called for
/// the elements 0 .. kElements - 1.
template <typename Element, int kD, int kSummed, int kElements, typename Fn>
__device__ __forceinline__ void add_product_32(float (&sum)[kSummed], uint32_t left, uint32_t right,
                                               int first_column, const Fn& fn) {
  constexpr int kPieces = kSummed / 16, kSteps = 4 * kPieces;
  const uint32_t first = right ^ (first_column * 2);
  uint32_t a[2][2][4], b[kReadAhead32 + 1][4];
  const auto read = [&](int step) {
    load_matrices_transposed(
        (first ^ (step % kPieces * 32)) + step / kPieces * 16 * Tile<kD>::kRowBytes,
        b[step % (kReadAhead32 + 1)]);
  };
  const auto read_left = [&](int c) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      load_matrices((left ^ (c * 32)) + i * 16 * Tile<64>::kRowBytes, a[c % 2][i]);
  };
#pragma unroll
  for (int step = 0; step < kReadAhead32; ++step) read(step);
  read_left(0);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int c = step / kPieces, n = step % kPieces;
    if (step + kReadAhead32 < kSteps) read(step + kReadAhead32);
    if (n == 0 && c + 1 < 4) read_left(c + 1);
    const uint32_t(&from)[4] = b[step % (kReadAhead32 + 1)];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        multiply<Element>(sum + 16 * n + 8 * half + 4 * i, a[c % 2][i], from[2 * half],
                          from[2 * half + 1]);
    }
#pragma unroll
    for (int x = step * kElements / kSteps; x < (step + 1) * kElements / kSteps; ++x) fn(x);
  }
}

/// s[32, kColumns] rounded, to columns first_column .. of rows that Tile<64> has; row: the warp's first.
template <typename Element, int kColumns>
__device__ __forceinline__ void store_rows_32(uint32_t tile, const float (&s)[kColumns], int row,
                                              int first_column, int lane) {
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
#pragma unroll
    for (int x = 0; x < 4; ++x)  // rows 8 apart
      store_shared_u32(tile + (row + 8 * x + lane / 4) * Tile<64>::kRowBytes +
                           (((first_column / 8 + j) ^ (lane / 4)) << 4) + lane % 4 * 4,
                       pack<Element>(s[8 * j + 2 * x], s[8 * j + 2 * x + 1]));
  }
}

struct Nothing {
  __device__ __forceinline__ void operator()(int) const {}
};

/// 16 x 64 accumulators as left operands.
template <typename Element>
__device__ __forceinline__ void round_rows(uint32_t (&p)[4][4], const float (&s)[32]) {
#pragma unroll
  for (int c = 0; c < 4; ++c) {
#pragma unroll
    for (int x = 0; x < 4; ++x) p[c][x] = pack<Element>(s[8 * c + 2 * x], s[8 * c + 2 * x + 1]);
  }
}

}  // namespace mtraining::kernels::sm80
