// The products of both backward passes.
//
// In:   tiles in shared memory. Out: accumulators. Next: backward_keys_kernel.cuh, backward_queries_kernel.cuh.
//
// A warp has 16 rows of the tile that stays (keys, or queries) and all 64 of the tile that passes by. Above head_dim 128 two
// warps share the rows: both compute the scores, each sums its half of the gradient's columns.
#pragma once

#include "mtraining/kernels/sm80/tile.cuh"

namespace mtraining::kernels::sm80 {

/// Steps by which operands are read before their products.
inline constexpr int kReadAhead = 3;

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

/// s[16, 64] = left[16, kD] right[64, kD]^T; left: Tile::left() of the rows, right: Tile::right() of the tile.
template <typename Element, int kD, typename Fn>
__device__ __forceinline__ void transposed_product(float (&s)[32], uint32_t left, uint32_t right,
                                                   const Fn& fn) {
  constexpr int kSteps = kD / 16 * 4;  // 16 of D, then 16 of the right rows
  uint32_t a[2][4], b[kReadAhead + 1][4];
  const auto read = [&](int step) {
    load_matrices((right ^ (step / 4 * 32)) + step % 4 * 16 * Tile<kD>::kRowBytes,
                  b[step % (kReadAhead + 1)]);
  };
  load_matrices(left, a[0]);
#pragma unroll
  for (int step = 0; step < kReadAhead; ++step) read(step);
#pragma unroll
  for (int x = 0; x < 32; ++x) s[x] = 0;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int c = step / 4, n = step % 4;
    if (step + kReadAhead < kSteps) read(step + kReadAhead);
    if (n == 1 && c + 1 < kD / 16) load_matrices(left ^ ((c + 1) * 32), a[(c + 1) % 2]);
    const uint32_t(&from)[4] = b[step % (kReadAhead + 1)];
    multiply<Element>(s + 8 * n, a[c % 2], from[0], from[1]);
    multiply<Element>(s + 8 * n + 4, a[c % 2], from[2], from[3]);
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
