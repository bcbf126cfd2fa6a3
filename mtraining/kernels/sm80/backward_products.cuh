// The two products that both backward passes begin with, and the one that they end with.
//
// In:   tiles in shared memory. Out: accumulators. Next: backward_keys_kernel.cuh, backward_queries_kernel.cuh.
//
// A warp has 16 rows of the tile that stays (keys, or queries) and all 64 of the tile that passes by. Above head_dim 128 two
// warps share the rows: both compute the scores, each sums its half of the gradient's columns.
#pragma once

#include "mtraining/kernels/sm80/tile.cuh"

namespace mtraining::kernels::sm80 {

template <int kD>
struct BackwardShape {
  static constexpr int kHalves = kD > 128 ? 2 : 1;
  static constexpr int kWarps = 4 * kHalves;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kBlocksPerSm = kD > 128 ? 1 : 2;
  static constexpr int kSummed = kD / kHalves;  // columns of a gradient that a warp sums
  static constexpr int kMaxStages = 2;
};

/// s = a_left a_right^T, t = b_left b_right^T over kD, for 16 rows of the left and 64 of the right tiles.
template <typename Element, int kD>
__device__ __forceinline__ void two_products(float (&s)[32], float (&t)[32], uint32_t a_left,
                                             uint32_t a_right, uint32_t b_left, uint32_t b_right) {
#pragma unroll
  for (int x = 0; x < 32; ++x) s[x] = t[x] = 0;
#pragma unroll
  for (int c = 0; c < kD / 16; ++c) {
    uint32_t a[4], b[4];
    load_matrices(a_left ^ (c * 32), a);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      load_matrices((a_right ^ (c * 32)) + n * 16 * Tile<kD>::kRowBytes, b);
      multiply<Element>(s + 8 * n, a, b[0], b[1]);
      multiply<Element>(s + 8 * n + 4, a, b[2], b[3]);
    }
    load_matrices(b_left ^ (c * 32), a);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      load_matrices((b_right ^ (c * 32)) + n * 16 * Tile<kD>::kRowBytes, b);
      multiply<Element>(t + 8 * n, a, b[0], b[1]);
      multiply<Element>(t + 8 * n + 4, a, b[2], b[3]);
    }
  }
}

/// sum[16, kSummed] += p[16, 64] right[64, kSummed]; right: summed() of the tile, of its first column.
template <typename Element, int kD, int kSummed>
__device__ __forceinline__ void add_product(float (&sum)[kSummed / 2], const uint32_t (&p)[4][4],
                                            uint32_t right, int first_column) {
#pragma unroll
  for (int c = 0; c < 4; ++c) {
#pragma unroll
    for (int d = 0; d < kSummed / 16; ++d) {
      uint32_t b[4];
      load_matrices_transposed(
          (right ^ (first_column * 2) ^ (d * 32)) + c * 16 * Tile<kD>::kRowBytes, b);
      multiply<Element>(sum + 8 * d, p[c], b[0], b[1]);
      multiply<Element>(sum + 8 * d + 4, p[c], b[2], b[3]);
    }
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
