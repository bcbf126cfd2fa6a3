// The estimation kernel: a thread block keeps query rows in registers and streams blocks of 64 keys past them.
//
// In:   WindowArgs. Out: per pass, see window.h. Next: one instantiation a head_dim, window_d<head_dim>.cu.
//
// Rows of all query heads of a kv head are stacked, each head's padded to a multiple of 64 ("stacked rows"), so that a group
// shares each loaded block. A warp owns 32 stacked rows of one head; two warps, a pair, own 64.
// Keys in shared memory: row of kChunks 16-byte chunks, chunk c of key j at c ^ (j % 8).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "mtraining/kernels/params.h"
#include "mtraining/kernels/pattern_cuda/fault.h"
#include "mtraining/kernels/pattern_cuda/instructions.cuh"

namespace mtraining::kernels::pattern_cuda {

__device__ constexpr float kInfinity = __builtin_huge_valf();

enum class Pass : int32_t { kScan, kMasses, kCovered };

struct WindowArgs {
  const char *q, *k;
  int64_t q_stride_batch, q_stride_row, q_stride_head;  // bytes
  int64_t k_stride_batch, k_stride_token, k_stride_head;
  int32_t num_heads, num_kv_heads, heads_per_kv_head;
  int32_t num_rows, padded_rows;  // R; rounded up to 64
  int32_t num_keys, num_blocks, seq_len;
  const int32_t* block_starts;
  const int32_t* row_positions;
  const int32_t* row_document_start;  // [B, R] or null
  float scale_log2;
  int32_t row_groups, chunks,
      chunk_blocks;  // of a thread block: which stacked rows, which key blocks
  // scan
  float2* block_statistics;  // [B * H, num_blocks, padded_rows] maximum, sum
  float* row_max;
  int64_t* fault;
  uint32_t magnitude_limit;  // bits of the first 16-bit magnitude that is refused
  // masses, covered
  const float* known_row_max;
  const int64_t* row_sum;
  int32_t heads_per_choice;
  int32_t columns_shared;  // several thread blocks add to a column
  int32_t num_diagonals;   // NB + 1
  int64_t *columns, *diagonals, *offsets, *totals;
  const uint64_t* diagonal_bits;
  const uint32_t* column_bits;
  int64_t diagonal_words, column_words;
  int64_t* covered;
};

template <int kD, int kWarps>
struct WindowShape {
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kRows = 32 * kWarps;  // stacked rows of a thread block
  static constexpr int kStages = kD <= 128 ? 3 : 2;
  static constexpr int kChunks = (kD / 8 + 7) / 8 * 8;  // of a key in shared memory
  static constexpr int kStageBytes = 64 * kChunks * 16;
  static constexpr int kColumnSums = kStages * kStageBytes;  // float [2][kWarps][64]
  static constexpr int kBytes = kColumnSums + 2 * kWarps * 64 * 4;
};

/// Four sums over the warp; valid in lane 0.
__device__ __forceinline__ void warp_sum(float (&x)[4]) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] += __shfl_xor_sync(~0u, x[i], distance);
  }
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
/// Adds what the lane at `distance` holds to the half of x[0, 2 kKept) that this lane keeps: the upper half where its bit is set.
template <int kKept>
__device__ __forceinline__ void halve(float (&x)[16], int distance, int lane) {
  const bool upper = (lane & distance) != 0;
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    const float other = __shfl_xor_sync(~0u, upper ? x[i] : x[i + kKept], distance);
    x[i] = (upper ? x[i + kKept] : x[i]) + other;
  }
}
/// A mass in units of 2^-40 (times 64 for diagonals); nothing that is not finite or out of range.
__device__ __forceinline__ int64_t fixed_point(float mass, float most) {
  return __float2ll_rn(fminf(fmaxf(mass, 0.0f), most) * 0x1p40f);
}

/// Not 0 where one of eight 16-bit magnitudes is at or above the limit: exponents order magnitudes.
__device__ __forceinline__ uint32_t beyond(uint4 value, uint32_t limit) {
  const uint32_t lift = (0x8000u - limit) * 0x10001u;
  return (((value.x & 0x7fff7fffu) + lift) | ((value.y & 0x7fff7fffu) + lift) |
          ((value.z & 0x7fff7fffu) + lift) | ((value.w & 0x7fff7fffu) + lift)) &
         0x80008000u;
}
__device__ __forceinline__ void report(int64_t* fault, FaultKind kind, int64_t place) {
  if (fault != nullptr)
    atomicMax(reinterpret_cast<long long*>(fault), static_cast<long long>(fault_code(kind, place)));
}
__device__ __forceinline__ bool beyond(uint32_t two, uint32_t limit) {
  return (((two & 0x7fff7fffu) + (0x8000u - limit) * 0x10001u) & 0x80008000u) != 0;
}
/// Key j of a block holds what is refused. Padding may hold anything.
__device__ __forceinline__ void report_key(const WindowArgs& args, int64_t batch, int block,
                                           int j) {
  const int64_t position = int64_t{args.block_starts[block]} + j;
  if (static_cast<int64_t>(block) * 64 + j < args.num_keys && position < args.seq_len)
    report(args.fault, FaultKind::kKey, batch * args.seq_len + position);
}

template <typename Element, int kD, int kWarps, Pass kPass, bool kConsecutive>
__global__ void __launch_bounds__(32 * kWarps, 1)
    window_kernel(const __grid_constant__ WindowArgs args) {
  using Shape = WindowShape<kD, kWarps>;
  extern __shared__ __align__(128) char memory[];
  const uint32_t base = shared_address(memory);
  float* const column_sums = reinterpret_cast<float*>(memory + Shape::kColumnSums);

  int work = blockIdx.x;
  const int chunk = work % args.chunks;
  work /= args.chunks;
  const int row_group = work % args.row_groups;
  work /= args.row_groups;
  const int kv_head = work % args.num_kv_heads;
  const int64_t batch = work / args.num_kv_heads;

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int stacked = row_group * Shape::kRows + warp * 32;
  const int head_of_group = stacked / args.padded_rows;
  const bool active = head_of_group < args.heads_per_kv_head;
  const int head = kv_head * args.heads_per_kv_head + (active ? head_of_group : 0);
  const int64_t head_row = batch * args.num_heads + head;  // of [B, H]
  const int first_row = stacked % args.padded_rows;        // of the head

  // This thread's rows: first_row + lane / 4 + 8 i.
  uint32_t q[2][kD / 16][4];
  int position[4];
  int document[4];
  float state[4];  // scan: maxima so far; else what is subtracted from a score
  int lowest = 0x7fffffff, highest = -1, latest_document = 0;  // of the warp's rows
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = first_row + lane / 4 + 8 * i;
    const bool real = active && row < args.num_rows;
    position[i] = real ? args.row_positions[row] : -1;
    document[i] = real && args.row_document_start != nullptr
                      ? args.row_document_start[batch * args.num_rows + row]
                      : 0;
    if (real) {
      lowest = min(lowest, position[i]);
      highest = max(highest, position[i]);
      latest_document = max(latest_document, document[i]);
    }
    bool refused = false;
    const char* from = args.q + batch * args.q_stride_batch + row * args.q_stride_row +
                       head * args.q_stride_head + lane % 4 * 4;
#pragma unroll
    for (int step = 0; step < kD / 16; ++step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        q[i / 2][step][i % 2 + 2 * half] =
            real ? *reinterpret_cast<const uint32_t*>(from + step * 32 + half * 16) : 0;
        if constexpr (kPass == Pass::kScan)
          refused = refused || beyond(q[i / 2][step][i % 2 + 2 * half], args.magnitude_limit);
      }
    }
    if (refused) report(args.fault, FaultKind::kQuery, head_row * args.seq_len + position[i]);
    if constexpr (kPass == Pass::kScan) {
      state[i] = -kInfinity;
    } else {
      state[i] = kInfinity;
      if (real) {
        const int64_t sum = args.row_sum[head_row * args.num_rows + row];
        if (sum > 0)
          state[i] = args.known_row_max[head_row * args.num_rows + row] +
                     log2f(static_cast<float>(sum) * 0x1p-40f);
      }
    }
  }
  lowest = __reduce_min_sync(~0u, lowest);
  highest = __reduce_max_sync(~0u, highest);
  latest_document = __reduce_max_sync(~0u, latest_document);
  int64_t covered[4] = {0, 0, 0, 0};
  int64_t total = 0;  // of the columns that this thread flushed, all of one head

  const int begin = chunk * args.chunk_blocks;
  const int end = min(args.num_blocks, begin + args.chunk_blocks);
  const char* const keys = args.k + batch * args.k_stride_batch + kv_head * args.k_stride_head;
  const auto load = [&](int block) {
    if (block < end) {
      const uint32_t stage = base + (block - begin) % Shape::kStages * Shape::kStageBytes;
      for (int i = threadIdx.x; i < 64 * (kD / 8); i += Shape::kThreads) {
        const int j = i / (kD / 8), c = i % (kD / 8);
        const int64_t key = static_cast<int64_t>(block) * 64 + j;
        const bool exists = key < args.num_keys;
        copy_async_16(stage + (j * Shape::kChunks + (c ^ (j % 8))) * 16,
                      keys + (exists ? key : 0) * args.k_stride_token + c * 16, exists ? 16 : 0);
      }
    }
    copy_async_commit();
  };
  /// Sums of a pair of warps over one block's keys, a block later.
  const auto flush_columns = [&](int block) {
    const int pair = threadIdx.x / 64, j = threadIdx.x % 64;
    const int pair_stacked = row_group * Shape::kRows + pair * 64;
    const int pair_head = pair_stacked / args.padded_rows;
    const int64_t key = static_cast<int64_t>(block) * 64 + j;
    if (pair_head >= args.heads_per_kv_head || key >= args.num_keys) return;
    const float* sums = column_sums + ((block - begin) % 2 * kWarps + 2 * pair) * 64 + j;
    const int64_t mass = fixed_point(sums[0] + sums[64], 64.0f);
    const int64_t choice = (batch * args.num_heads + kv_head * args.heads_per_kv_head + pair_head) /
                           args.heads_per_choice;
    total += mass;
    int64_t* to = args.columns + choice * args.num_keys + key;
    if (args.columns_shared == 0)
      *to = mass;
    else if (mass != 0)
      atomic_add(to, mass);
  };

#pragma unroll
  for (int s = 0; s + 1 < Shape::kStages; ++s) load(begin + s);
  for (int block = begin; block < end; ++block) {
    copy_async_wait<Shape::kStages - 2>();
    __syncthreads();
    if constexpr (kPass == Pass::kMasses) {
      if (block > begin) flush_columns(block - 1);
    }
    load(block + Shape::kStages - 1);
    const uint32_t stage = base + (block - begin) % Shape::kStages * Shape::kStageBytes;
    if constexpr (kPass == Pass::kScan) {
      for (int i = threadIdx.x; i < 64 * (kD / 8); i += Shape::kThreads) {
        const int j = i / (kD / 8), c = i % (kD / 8);
        const char* at = memory + (block - begin) % Shape::kStages * Shape::kStageBytes +
                         (j * Shape::kChunks + (c ^ (j % 8))) * 16;
        if (beyond(*reinterpret_cast<const uint4*>(at), args.magnitude_limit) != 0)
          report_key(args, batch, block, j);
      }
    }
    const int start = args.block_starts[block];
    const bool visible = start <= highest;

    float s[2][8][4];
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[m][n][e] = 0;
    if (visible) {
#pragma unroll
      for (int step = 0; step < kD / 32; ++step) {
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          uint32_t b[4];
          const int j = n * 8 + lane % 8, c = step * 4 + lane / 8;
          load_matrices(stage + (j * Shape::kChunks + (c ^ (j % 8))) * 16, b);
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            multiply_add<Element>(s[m][n], q[m][2 * step], b[0], b[1]);
            multiply_add<Element>(s[m][n], q[m][2 * step + 1], b[2], b[3]);
          }
        }
      }
    }
    // s[m][n][e]: row i = 2 m + e / 2, key n * 8 + lane % 4 * 2 + e % 2.
    const bool masked = start + 63 > lowest || start < latest_document || !visible;
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int i = 2 * m + e / 2;
          if constexpr (kPass != Pass::kScan)
            s[m][n][e] = fmaf(s[m][n][e], args.scale_log2, -state[i]);
          if (masked) {
            const int key = start + n * 8 + lane % 4 * 2 + e % 2;
            if (key > position[i] || key < document[i]) s[m][n][e] = -kInfinity;
          }
        }

    if constexpr (kPass == Pass::kScan) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float top = -kInfinity;
#pragma unroll
        for (int n = 0; n < 8; ++n)
          top = fmaxf(top, fmaxf(s[i / 2][n][i % 2 * 2], s[i / 2][n][i % 2 * 2 + 1]));
        top = quad_max(top) * args.scale_log2;
        const float reference = top == -kInfinity ? 0.0f : top;
        float sum = 0;
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          sum += exp2_approx(fmaf(s[i / 2][n][i % 2 * 2], args.scale_log2, -reference)) +
                 exp2_approx(fmaf(s[i / 2][n][i % 2 * 2 + 1], args.scale_log2, -reference));
        }
        sum = quad_sum(sum);
        state[i] = fmaxf(state[i], top);
        if (active && lane % 4 == 0) {
          const int64_t at = (head_row * args.num_blocks + block) * args.padded_rows + first_row +
                             lane / 4 + 8 * i;
          args.block_statistics[at] = {top, sum};
        }
      }
    } else {
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e)
            s[m][n][e] = exp2_approx(s[m][n][e]);  // NaN stays; no mass comes of it
    }

    if constexpr (kPass == Pass::kMasses) {
      // Columns: over this thread's rows, then over the lanes that hold the same keys, halving what each lane keeps.
      float sums[16];
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          sums[2 * n + e] = (s[0][n][e] + s[0][n][e + 2]) + (s[1][n][e] + s[1][n][e + 2]);
      float whole = 0;  // this thread's
#pragma unroll
      for (int j = 0; j < 16; ++j) whole += sums[j];
      halve<8>(sums, 16, lane);
      halve<4>(sums, 8, lane);
      halve<2>(sums, 4, lane);
      // A lane ends with 2 keys of n = 4 (lane / 16) + 2 (lane / 8 % 2) + lane / 4 % 2.
      const int n = lane / 16 * 4 + lane / 8 % 2 * 2 + lane / 4 % 2;
      float* to = column_sums + ((block - begin) % 2 * kWarps + warp) * 64 + n * 8 + lane % 4 * 2;
      to[0] = sums[0];
      to[1] = sums[1];

      if (args.diagonals != nullptr && active && visible) {
        int64_t* const diagonals =
            args.diagonals + head_row / args.heads_per_choice * args.num_diagonals;
        if constexpr (kConsecutive) {
          // t = offset - 64 c of the warp's first row; shares are piecewise linear in t.
          const int offset = args.row_positions[first_row] - start;
          const int c = offset >= 0 ? offset / 64 : -((63 - offset) / 64);
          const float t0 =
              static_cast<float>(offset - 64 * c + lane / 4) - static_cast<float>(lane % 4 * 2);
          float x[4] = {whole, 0, 0, 0};  // sums of p, p t, p |t|, p |t - 64|
          if (offset - 64 * c <= 33) {    // then t <= 64 in all 32 rows, and the last sum follows
#pragma unroll
            for (int m = 0; m < 2; ++m)
#pragma unroll
              for (int n = 0; n < 8; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                  const float t = t0 + static_cast<float>((2 * m + e / 2) * 8 - n * 8 - e % 2);
                  x[1] = fmaf(s[m][n][e], t, x[1]);
                  x[2] = fmaf(s[m][n][e], fabsf(t), x[2]);
                }
            x[3] = 64 * x[0] - x[1];
          } else {
#pragma unroll
            for (int m = 0; m < 2; ++m)
#pragma unroll
              for (int n = 0; n < 8; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                  const float t = t0 + static_cast<float>((2 * m + e / 2) * 8 - n * 8 - e % 2);
                  x[1] = fmaf(s[m][n][e], t, x[1]);
                  x[2] = fmaf(s[m][n][e], fabsf(t), x[2]);
                  x[3] = fmaf(s[m][n][e], fabsf(t - 64), x[3]);
                }
          }
          warp_sum(x);
          const float shares[4] = {(x[2] - x[1]) / 2, (64 * x[0] + x[1] - 2 * x[2] + x[3]) / 2,
                                   (x[2] - 2 * x[3] + 128 * x[0] - x[1]) / 2,
                                   (x[3] + x[1] - 64 * x[0]) / 2};
          if (lane < 4) {
            const float total = __shfl_sync(0xfu, x[0], 0);
            float share = lane == 0   ? shares[0]
                          : lane == 1 ? shares[1]
                          : lane == 2 ? shares[2]
                                      : shares[3];
            // What cancellation leaves of nothing.
            if (share < total * 1e-4f) share = 0;
            const int64_t mass = fixed_point(share, 4096.0f);
            const int to_diagonal = c - 1 + lane;
            if (mass != 0 && to_diagonal >= 0 && to_diagonal < args.num_diagonals)
              atomic_add(diagonals + to_diagonal, mass);
          }
        } else {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int offset = position[i] - start;
            const int c = offset >= 0 ? offset / 64 : -((63 - offset) / 64);
            const float t0 = static_cast<float>(offset - 64 * c - lane % 4 * 2);
            float of_row = 0, slope = 0, bend = 0;
#pragma unroll
            for (int n = 0; n < 8; ++n)
#pragma unroll
              for (int e = 0; e < 2; ++e) {
                const float t = t0 - static_cast<float>(n * 8 + e);
                const float p = s[i / 2][n][i % 2 * 2 + e];
                of_row += p;
                slope = fmaf(p, t, slope);
                bend = fmaf(p, fabsf(t), bend);
              }
            of_row = quad_sum(of_row);
            slope = quad_sum(slope);
            bend = quad_sum(bend);
            const float shares[3] = {(bend - slope) / 2, 64 * of_row - bend, (bend + slope) / 2};
            if (lane % 4 < 3) {
              float share = lane % 4 == 0 ? shares[0] : lane % 4 == 1 ? shares[1] : shares[2];
              if (share < of_row * 1e-4f) share = 0;
              const int64_t mass = fixed_point(share, 128.0f);
              const int to_diagonal = c - 1 + lane % 4;
              if (mass != 0 && to_diagonal >= 0 && to_diagonal < args.num_diagonals)
                atomic_add(diagonals + to_diagonal, mass);
            }
          }
        }
      }
      if (args.offsets != nullptr && active && visible) {
        int64_t* const offsets =
            args.offsets + head_row / args.heads_per_choice * static_cast<int64_t>(args.seq_len);
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
          for (int n = 0; n < 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              const int64_t mass = fixed_point(s[m][n][e], 1.0f);
              if (mass != 0)
                atomic_add(offsets + position[2 * m + e / 2] - start - n * 8 - lane % 4 * 2 - e % 2,
                           mass);
            }
      }
    }

    if constexpr (kPass == Pass::kCovered) {
      if (active && visible) {
        const uint32_t* words =
            args.column_bits + head_row * args.column_words + static_cast<int64_t>(start) / 32;
        uint32_t columns[2] = {0, 0};
#pragma unroll
        for (int w = 0; w < 2; ++w)
          if (start / 32 + w < args.column_words) columns[w] = words[w];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int c = position[i] / 64 - start / 64;
          const bool chosen =
              position[i] >= start &&
              (args.diagonal_bits[head_row * args.diagonal_words + c / 64] >> (c % 64) & 1) != 0;
          float sum = 0;
#pragma unroll
          for (int n = 0; n < 8; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const int j = n * 8 + lane % 4 * 2 + e;
              const bool column = (columns[j / 32] >> (j % 32) & 1) != 0;
              sum += chosen || column ? s[i / 2][n][i % 2 * 2 + e] : 0.0f;
            }
          covered[i] += fixed_point(quad_sum(sum), 1.5f);
        }
      }
    }
  }

  if constexpr (kPass == Pass::kMasses) {
    __syncthreads();
    if (begin < end) flush_columns(end - 1);
    const int pair_head =
        (row_group * Shape::kRows + static_cast<int>(threadIdx.x) / 64 * 64) / args.padded_rows;
    if (args.totals != nullptr && pair_head < args.heads_per_kv_head && total != 0)
      atomic_add(
          args.totals + (batch * args.num_heads + kv_head * args.heads_per_kv_head + pair_head) /
                            args.heads_per_choice,
          total);
  }
  if (lane % 4 == 0 && active) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = first_row + lane / 4 + 8 * i;
      if (row >= args.num_rows) continue;
      if constexpr (kPass == Pass::kScan)
        atomic_max(args.row_max + head_row * args.num_rows + row, state[i]);
      if constexpr (kPass == Pass::kCovered)
        atomic_add(args.covered + head_row * args.num_rows + row, covered[i]);
    }
  }
}

template <typename Element, int kD, int kWarps, Pass kPass, bool kConsecutive>
cudaError_t launch_window(const WindowArgs& args, int64_t grid, cudaStream_t stream) {
  using Shape = WindowShape<kD, kWarps>;
  const auto kernel = window_kernel<Element, kD, kWarps, kPass, kConsecutive>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kBytes);
  if (error != cudaSuccess) return error;
  kernel<<<static_cast<unsigned>(grid), Shape::kThreads, Shape::kBytes, stream>>>(args);
  return cudaGetLastError();
}

template <typename Element, int kD, int kWarps>
cudaError_t launch_window_pass(Pass pass, bool consecutive, const WindowArgs& args, int64_t grid,
                               cudaStream_t stream) {
  switch (pass) {
    case Pass::kScan:
      return launch_window<Element, kD, kWarps, Pass::kScan, false>(args, grid, stream);
    case Pass::kMasses:
      return consecutive
                 ? launch_window<Element, kD, kWarps, Pass::kMasses, true>(args, grid, stream)
                 : launch_window<Element, kD, kWarps, Pass::kMasses, false>(args, grid, stream);
    case Pass::kCovered:
      return launch_window<Element, kD, kWarps, Pass::kCovered, false>(args, grid, stream);
  }
  return cudaErrorInvalidValue;
}

/// Warps of a thread block: 8, or 2 where a kv head has no more than 64 stacked rows.
template <int kD>
cudaError_t launch_window_of(Pass pass, bool consecutive, DType dtype, int warps,
                             const WindowArgs& args, int64_t grid, cudaStream_t stream) {
  if (dtype == DType::kBFloat16) {
    return warps == 2
               ? launch_window_pass<__nv_bfloat16, kD, 2>(pass, consecutive, args, grid, stream)
               : launch_window_pass<__nv_bfloat16, kD, 8>(pass, consecutive, args, grid, stream);
  }
  return warps == 2 ? launch_window_pass<__half, kD, 2>(pass, consecutive, args, grid, stream)
                    : launch_window_pass<__half, kD, 8>(pass, consecutive, args, grid, stream);
}

/// One instantiation a file.
using WindowLauncher = cudaError_t (*)(Pass pass, bool consecutive, DType dtype, int warps,
                                       const WindowArgs& args, int64_t grid, cudaStream_t stream);
cudaError_t launch_window_d64(Pass, bool, DType, int, const WindowArgs&, int64_t, cudaStream_t);
cudaError_t launch_window_d96(Pass, bool, DType, int, const WindowArgs&, int64_t, cudaStream_t);
cudaError_t launch_window_d128(Pass, bool, DType, int, const WindowArgs&, int64_t, cudaStream_t);
cudaError_t launch_window_d256(Pass, bool, DType, int, const WindowArgs&, int64_t, cudaStream_t);

}  // namespace mtraining::kernels::pattern_cuda
