// The two products that both backward passes begin with, and the one that they end with.
//
// In:   tiles in shared memory. Out: accumulators. Next: backward_keys_kernel.cuh, backward_queries_kernel.cuh.
//
// A warp has 16 rows of the tile that stays (keys, or queries) and all 64 of the tile that passes by. Above head_dim 128 two
// warps share the rows: both compute the scores, each sums its half of the gradient's columns.
#pragma once

#include "mtraining/kernels/sm80/tile.cuh"

namespace mtraining::kernels::sm80 {

/// Steps by which operands are read before their products.
#ifndef READ_AHEAD
#define READ_AHEAD 3
#endif
inline constexpr int kReadAhead = READ_AHEAD;

template <int kD>
struct BackwardShape {
  static constexpr int kHalves = kD > 128 ? 2 : 1;
  static constexpr int kWarps = 4 * kHalves;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kBlocksPerSm = kD > 128 ? 1 : 2;
  static constexpr int kSummed = kD / kHalves;  // columns of a gradient that a warp sums
  static constexpr int kMaxStages = 2;
};

/// s = a_left a_right^T, t = b_left b_right^T over kD, for 16 rows of the left and 64 of the right tiles. Operands are read
/// kReadAhead steps of two products ahead.
template <typename Element, int kD>
__device__ __forceinline__ void two_products(float (&s)[32], float (&t)[32], uint32_t a_left,
                                             uint32_t a_right, uint32_t b_left, uint32_t b_right) {
  // A step: 16 of D, then which product, then 16 of the right rows.
  constexpr int kSteps = kD / 16 * 8;
  uint32_t left[2][4], right[kReadAhead + 1][4];
  const auto read_left = [&](int product) {
    load_matrices((product % 2 == 0 ? a_left : b_left) ^ (product / 2 * 32), left[product % 2]);
  };
  const auto read_right = [&](int step) {
    load_matrices(((step / 4 % 2 == 0 ? a_right : b_right) ^ (step / 8 * 32)) +
                      step % 4 * 16 * Tile<kD>::kRowBytes,
                  right[step % (kReadAhead + 1)]);
  };
  read_left(0);
#pragma unroll
  for (int step = 0; step < kReadAhead; ++step) read_right(step);
#pragma unroll
  for (int x = 0; x < 32; ++x) s[x] = t[x] = 0;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int product = step / 4, n = step % 4;
    if (step + kReadAhead < kSteps) read_right(step + kReadAhead);
    if (n == 1 && product + 1 < kSteps / 4) read_left(product + 1);
    float* sum = (product % 2 == 0 ? s : t) + 8 * n;
    const uint32_t(&b)[4] = right[step % (kReadAhead + 1)];
    multiply<Element>(sum, left[product % 2], b[0], b[1]);
    multiply<Element>(sum + 4, left[product % 2], b[2], b[3]);
  }
}

/// sum[16, kSummed] += p[16, 64] right[64, kSummed]; right: summed() of the tile, from first_column on.
template <typename Element, int kD, int kSummed>
__device__ __forceinline__ void add_product(float (&sum)[kSummed / 2], const uint32_t (&p)[4][4],
                                            uint32_t right, int first_column) {
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
  }
}

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
