// Estimation on Hopper: a thread block keeps the rows of up to eight query heads and streams blocks of 64 keys past them, each
// read from device memory once for all of them.
//
// In:   HopperArgs. Out: per pass, see window.h.
// Next: one instantiation a head_dim, window_sm90_d<head_dim>.cu.
//
// Stacked rows as in window_kernel.cuh, in tiles of 64; a warpgroup owns a pair of tiles. The scan multiplies rows by keys (a
// thread has few rows, whose maxima it needs), the masses keys by rows (a thread has few keys, whose sums it needs). Four
// warpgroups run apart from each other, so that one's products hide another's exponentials.
#pragma once

#include "mtraining/kernels/pattern_cuda/window_sm90.h"
#include "mtraining/kernels/sm90/ptx.cuh"
#include "mtraining/kernels/sm90/wgmma_shared.cuh"

namespace mtraining::kernels::sm90 {

template <>
__device__ __forceinline__ void wgmma_shared<__nv_bfloat16, 128, 0, 0>(float (&d)[64], uint64_t a,
                                                                       uint64_t b,
                                                                       bool accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, %64, %65, p, 1, 1, 0, 0;\n}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]),
        "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),
        "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]),
        "+f"(d[63])
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
}
template <>
__device__ __forceinline__ void wgmma_shared<__half, 128, 0, 0>(float (&d)[64], uint64_t a,
                                                                uint64_t b, bool accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, %64, %65, p, 1, 1, 0, 0;\n}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]),
        "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),
        "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]),
        "+f"(d[63])
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
}

}  // namespace mtraining::kernels::sm90

namespace mtraining::kernels::pattern_cuda {

template <int kD, Pass kPass>
struct HopperShape {
  static constexpr int kGroups = 4;  // warpgroups
  static constexpr int kThreads = 128 * kGroups;
  static constexpr int kTiles = 2 * kGroups;
  static constexpr int kTileBytes = 64 * kD * 2;  // [D / 64][64 rows][64 of D], 128-byte swizzle
  static constexpr int kStages = (kPass == Pass::kScan ? 8 : 5) * 128 / kD;
  static constexpr int kRows = kStages * kTileBytes;  // masses only: [kTiles] of rows
  static constexpr int kStates =
      kRows + (kPass == Pass::kScan ? 0 : kTiles * kTileBytes);  // float, int, int [kTiles][64]
  static constexpr int kBarriers = kStates + (kPass == Pass::kScan ? 0 : kTiles * 64 * 12);
  static constexpr int kBytes =
      kBarriers + 2 * kStages * 8 + 1024;  // to begin at a multiple of 1024

  static __device__ __forceinline__ uint32_t keys(uint32_t base, int slot) {
    return base + slot * kTileBytes;
  }
  /// [D / 64][128 rows of the pair][64 of D]
  static __device__ __forceinline__ uint32_t rows(uint32_t base, int pair) {
    return base + kRows + pair * 2 * kTileBytes;
  }
  static __device__ __forceinline__ uint32_t full(uint32_t base, int slot) {
    return base + kBarriers + slot * 8;
  }
  static __device__ __forceinline__ uint32_t empty(uint32_t base, int slot) {
    return base + kBarriers + (kStages + slot) * 8;
  }
};

/// Which keys and rows a thread block has, and the ring of key blocks that its warpgroups read.
template <typename Shape>
struct KeyRing {
  const HopperArgs& args;
  uint32_t base;
  int begin, end;  // key blocks
  int kv_head, first_tile;
  int64_t batch;
  int loaded = 0;  // blocks whose copies the first thread has begun

  __device__ __forceinline__ KeyRing(const HopperArgs& a, uint32_t base_) : args(a), base(base_) {
    const WindowArgs& w = a.window;
    int work = blockIdx.x;
    begin = work % w.chunks * w.chunk_blocks;
    end = min(w.num_blocks, begin + w.chunk_blocks);
    work /= w.chunks;
    first_tile = work % w.row_groups * 2 * a.pairs;
    work /= w.row_groups;
    kv_head = work % w.num_kv_heads;
    batch = work / w.num_kv_heads;
    if (threadIdx.x == 0) {
      sm90::prefetch_tensor_map(&a.keys);
      for (int slot = 0; slot < Shape::kStages; ++slot) {
        sm90::mbarrier_init(Shape::full(base, slot), 1);
        sm90::mbarrier_init(Shape::empty(base, slot), 4 * a.pairs);  // a warp arrives once
      }
      sm90::mbarrier_init_fence();
    }
  }
  /// The first thread, at its i-th block: copies of blocks to come. Slots two blocks back are waited for at most.
  __device__ __forceinline__ void load_ahead(int i) {
    const int until = min(end - begin, i + Shape::kStages - 1);
    for (; loaded < until; ++loaded) {
      const int slot = loaded % Shape::kStages, round = loaded / Shape::kStages;
      if (round > 0) sm90::mbarrier_wait(Shape::empty(base, slot), (round - 1) % 2);
      sm90::mbarrier_arrive_expect(Shape::full(base, slot), Shape::kTileBytes);
      sm90::tensor_load_5d(Shape::keys(base, slot), &args.keys, Shape::full(base, slot),
                           sm90::evict_normal_policy(), 0, (begin + loaded) * 64, 0,
                           args.window.k_stride_head == 0 ? 0 : kv_head,
                           args.window.k_stride_batch == 0 ? 0 : static_cast<int>(batch));
    }
  }
  __device__ __forceinline__ void wait(int i) const {
    sm90::mbarrier_wait(Shape::full(base, i % Shape::kStages), i / Shape::kStages % 2);
  }
  __device__ __forceinline__ void release(int i) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) sm90::mbarrier_arrive(Shape::empty(base, i % Shape::kStages));
  }
};

/// A tile of 64 stacked rows: whose rows they are.
struct RowTile {
  bool active;
  int head, first_row;
  int64_t head_row;  // of [B, H]
  __device__ __forceinline__ RowTile(const WindowArgs& w, int64_t batch, int kv_head, int tile) {
    const int per_head = w.padded_rows / 64;
    active = tile / per_head < w.heads_per_kv_head;
    head = kv_head * w.heads_per_kv_head + (active ? tile / per_head : 0);
    first_row = tile % per_head * 64;
    head_row = batch * w.num_heads + head;
  }
};

template <typename Element, int kD>
__global__ void __launch_bounds__(512, 1) hopper_scan(const __grid_constant__ HopperArgs args) {
  using Shape = HopperShape<kD, Pass::kScan>;
  extern __shared__ char memory[];
  const uint32_t base = (shared_address(memory) + 1023) / 1024 * 1024;
  const WindowArgs& w = args.window;
  KeyRing<Shape> ring(args, base);
  const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const int pair = group % args.pairs, step = Shape::kGroups / args.pairs;

  // This thread's rows of tile s: 16 warp + lane / 4 + 8 r.
  uint32_t q[2][kD / 16][4];
  int position[2][2], document[2][2];
  float top_so_far[2][2];
  float2* statistics[2];
  bool active[2];
  int lowest = 0x7fffffff, highest = -1, latest_document = 0;  // of the warp's rows
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    const RowTile tile(w, ring.batch, ring.kv_head, ring.first_tile + 2 * pair + s);
    active[s] = tile.active;
    statistics[s] = w.block_statistics + tile.head_row * w.num_blocks * w.padded_rows +
                    tile.first_row + warp * 16 + lane / 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = tile.first_row + warp * 16 + lane / 4 + 8 * r;
      const bool real = tile.active && row < w.num_rows;
      position[s][r] = real ? w.row_positions[row] : -1;
      document[s][r] = real && w.row_document_start != nullptr
                           ? w.row_document_start[ring.batch * w.num_rows + row]
                           : 0;
      top_so_far[s][r] = -kInfinity;
      if (real) {
        lowest = min(lowest, position[s][r]);
        highest = max(highest, position[s][r]);
        latest_document = max(latest_document, document[s][r]);
      }
      bool refused = false;
      const char* from = w.q + ring.batch * w.q_stride_batch + row * w.q_stride_row +
                         tile.head * w.q_stride_head + lane % 4 * 4;
#pragma unroll
      for (int c = 0; c < kD / 16; ++c) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          q[s][c][r + 2 * half] =
              real ? *reinterpret_cast<const uint32_t*>(from + c * 32 + half * 16) : 0;
          refused = refused || beyond(q[s][c][r + 2 * half], w.magnitude_limit);
        }
      }
      if (refused) report(w.fault, FaultKind::kQuery, tile.head_row * w.seq_len + position[s][r]);
    }
  }
  lowest = __reduce_min_sync(~0u, lowest);
  highest = __reduce_max_sync(~0u, highest);
  latest_document = __reduce_max_sync(~0u, latest_document);
  __syncthreads();  // the barriers are ready

  for (int i = group / args.pairs; i < ring.end - ring.begin; i += step) {
    if (threadIdx.x == 0) ring.load_ahead(i);
    __syncwarp();
    const int start = w.block_starts[ring.begin + i];
    ring.wait(i);
    for (int chunk = pair * 128 + static_cast<int>(threadIdx.x) % 128; chunk < 64 * (kD / 8);
         chunk += args.pairs * 128) {
      const uint4 value = sm90::load_shared_v4(Shape::keys(base, i % Shape::kStages) + chunk * 16);
      if (beyond(value, w.magnitude_limit) != 0)
        report_key(w, ring.batch, ring.begin + i, chunk / 8 % 64);
    }
    const uint64_t keys = sm90::matrix_descriptor<16, 1024>(Shape::keys(base, i % Shape::kStages));
    const bool visible = start <= highest;
    const bool masked = start + 63 > lowest || start < latest_document;
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      float x[32];
      sm90::pin(x);
      sm90::wgmma_fence();
#pragma unroll
      for (int c = 0; c < kD / 16; ++c)
        sm90::wgmma<Element, 64, 0>(x, q[s][c], keys + (c / 4 * 8192 + c % 4 * 32) / 16, c > 0);
      sm90::wgmma_commit();
      sm90::wgmma_wait<0>();
      sm90::pin(x);
      if (s == 1) ring.release(i);
      // x[4 n + 2 r + e]: key 8 n + lane % 4 * 2 + e.
      if (masked) {
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int key = start + n * 8 + lane % 4 * 2 + e % 2;
            if (key > position[s][e / 2] || key < document[s][e / 2]) x[4 * n + e] = -kInfinity;
          }
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float top = -kInfinity;
#pragma unroll
        for (int n = 0; n < 8; ++n) top = fmaxf(top, fmaxf(x[4 * n + 2 * r], x[4 * n + 2 * r + 1]));
        top = quad_max(top) * w.scale_log2;
        if (!visible) top = -kInfinity;
        const float reference = top == -kInfinity ? 0.0f : top;
        float sum = 0, other = 0;
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          sum += exp2_approx(fmaf(x[4 * n + 2 * r], w.scale_log2, -reference));
          other += exp2_approx(fmaf(x[4 * n + 2 * r + 1], w.scale_log2, -reference));
        }
        sum = quad_sum(sum + other);
        if (!visible) sum = 0;
        top_so_far[s][r] = fmaxf(top_so_far[s][r], top);
        if (active[s] && lane % 4 == 0)
          statistics[s][static_cast<int64_t>(ring.begin + i) * w.padded_rows + 8 * r] = {top, sum};
      }
    }
  }
  if (lane % 4 == 0) {
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const RowTile tile(w, ring.batch, ring.kv_head, ring.first_tile + 2 * pair + s);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = tile.first_row + warp * 16 + lane / 4 + 8 * r;
        if (tile.active && row < w.num_rows)
          atomic_max(w.row_max + tile.head_row * w.num_rows + row, top_so_far[s][r]);
      }
    }
  }
}

/// Adds what the lane at `distance` holds to the half of x[0, 2 kKept) that this lane keeps: the upper half where its bit is set.
template <int kKept, int kCount>
__device__ __forceinline__ void keep_half(float (&x)[kCount], int distance, int lane) {
  const bool upper = (lane & distance) != 0;
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    const float other = __shfl_xor_sync(~0u, upper ? x[i] : x[i + kKept], distance);
    x[i] = (upper ? x[i + kKept] : x[i]) + other;
  }
}

/// Consecutive rows; no offsets.
template <typename Element, int kD>
__global__ void __launch_bounds__(512, 1) hopper_masses(const __grid_constant__ HopperArgs args) {
  using Shape = HopperShape<kD, Pass::kMasses>;
  extern __shared__ char memory[];
  const uint32_t base = (shared_address(memory) + 1023) / 1024 * 1024;
  const WindowArgs& w = args.window;
  KeyRing<Shape> ring(args, base);
  const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const int pair = group % args.pairs, step = Shape::kGroups / args.pairs;

  const uint32_t states = base + Shape::kStates, positions = states + Shape::kTiles * 256,
                 documents = positions + Shape::kTiles * 256;
  for (int i = threadIdx.x; i < 2 * args.pairs * 64; i += Shape::kThreads) {
    const RowTile tile(w, ring.batch, ring.kv_head, ring.first_tile + i / 64);
    const int row = tile.first_row + i % 64;
    const bool real = tile.active && row < w.num_rows;
    float state = kInfinity;  // what is subtracted from a score
    if (real) {
      const int64_t sum = w.row_sum[tile.head_row * w.num_rows + row];
      if (sum > 0)
        state = w.known_row_max[tile.head_row * w.num_rows + row] +
                log2f(static_cast<float>(sum) * 0x1p-40f);
    }
    sm90::store_shared_s32(states + i * 4, __float_as_int(state));
    sm90::store_shared_s32(positions + i * 4, real ? w.row_positions[row] : -1);
    sm90::store_shared_s32(documents + i * 4,
                           real && w.row_document_start != nullptr
                               ? w.row_document_start[ring.batch * w.num_rows + row]
                               : 0);
  }
  for (int i = threadIdx.x; i < 2 * args.pairs * 64 * (kD / 8); i += Shape::kThreads) {
    const int stacked = i / (kD / 8), c = i % (kD / 8);
    const RowTile tile(w, ring.batch, ring.kv_head, ring.first_tile + stacked / 64);
    const int row = tile.first_row + stacked % 64;
    uint4 value = {0, 0, 0, 0};
    if (tile.active && row < w.num_rows)
      value = *reinterpret_cast<const uint4*>(w.q + ring.batch * w.q_stride_batch +
                                              row * w.q_stride_row + tile.head * w.q_stride_head +
                                              c * 16);
    sm90::store_shared_v4(Shape::rows(base, stacked / 128) + c / 8 * 16384 + stacked % 128 * 128 +
                              (c % 8 ^ stacked % 8) * 16,
                          value.x, value.y, value.z, value.w);
  }
  sm90::fence_async_shared();
  __syncthreads();

  int lowest = 0x7fffffff, highest = -1, latest_document = 0;  // of the pair's rows
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t at = (pair * 128 + lane + 32 * i) * 4;
    const int position = sm90::load_shared_s32(positions + at);
    if (position < 0) continue;
    lowest = min(lowest, position);
    highest = max(highest, position);
    latest_document = max(latest_document, sm90::load_shared_s32(documents + at));
  }
  lowest = __reduce_min_sync(~0u, lowest);
  highest = __reduce_max_sync(~0u, highest);
  latest_document = __reduce_max_sync(~0u, latest_document);
  // After the sums over lanes a lane holds one: of key lane / 4 + 8 (lane / 2 % 2), tile lane % 2.
  const RowTile of_column(w, ring.batch, ring.kv_head, ring.first_tile + 2 * pair + lane % 2);
  int64_t* const own_columns = w.columns + of_column.head_row / w.heads_per_choice * w.num_keys;
  const int own_key = warp * 16 + lane / 4 + lane / 2 % 2 * 8;
  // Likewise of diagonals: tile lane / 16, share lane / 4 % 4.
  const RowTile of_diagonal(w, ring.batch, ring.kv_head, ring.first_tile + 2 * pair + lane / 16);
  int64_t* const own_diagonals =
      w.diagonals + of_diagonal.head_row / w.heads_per_choice * w.num_diagonals;
  int first_position[2];
#pragma unroll
  for (int h = 0; h < 2; ++h)
    first_position[h] = sm90::load_shared_s32(positions + (pair * 2 + h) * 256);

  int64_t total = 0;  // of the columns that this thread wrote, all of one head
  for (int i = group / args.pairs; i < ring.end - ring.begin; i += step) {
    if (threadIdx.x == 0) ring.load_ahead(i);
    __syncwarp();
    const int start = w.block_starts[ring.begin + i];
    ring.wait(i);
    float x[64];
    {
      const uint64_t keys =
                         sm90::matrix_descriptor<16, 1024>(Shape::keys(base, i % Shape::kStages)),
                     rows = sm90::matrix_descriptor<16, 1024>(Shape::rows(base, pair));
      sm90::pin(x);
      sm90::wgmma_fence();
#pragma unroll
      for (int c = 0; c < kD / 16; ++c)
        sm90::wgmma_shared<Element, 128, 0, 0>(x, keys + (c / 4 * 8192 + c % 4 * 32) / 16,
                                               rows + (c / 4 * 16384 + c % 4 * 32) / 16, c > 0);
      sm90::wgmma_commit();
      sm90::wgmma_wait<0>();
      sm90::pin(x);
    }
    ring.release(i);
    const bool visible = start <= highest;
    const bool masked = start + 63 > lowest || start < latest_document;
    float columns[4];    // tile + 2 r
    float diagonals[8];  // 4 tile + share
    // x[32 h + 4 n + 2 r + e]: key 16 warp + lane / 4 + 8 r, row 8 n + lane % 4 * 2 + e of tile h.
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t at = (pair * 128 + h * 64 + lane % 4 * 2) * 4;
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const float2 state = sm90::load_shared_f2(states + at + n * 32);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float* p = x + 32 * h + 4 * n + 2 * r;
          p[0] = fmaf(p[0], w.scale_log2, -state.x);
          p[1] = fmaf(p[1], w.scale_log2, -state.y);
        }
      }
      if (masked) {
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int position = sm90::load_shared_s32(positions + at + n * 32 + e * 4),
                      document = sm90::load_shared_s32(documents + at + n * 32 + e * 4);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
              const int key = start + warp * 16 + lane / 4 + 8 * r;
              if (key > position || key < document) x[32 * h + 4 * n + 2 * r + e] = -kInfinity;
            }
          }
      }
#pragma unroll
      for (int j = 0; j < 32; ++j) x[32 * h + j] = exp2_approx(x[32 * h + j]);

      // t = offset - 64 c; shares are piecewise linear in it (window_kernel.cuh).
      const int offset = first_position[h] - start;
      const int c = offset >= 0 ? offset / 64 : -((63 - offset) / 64);
      float whole = 0, slope = 0, bend = 0, late = 0;  // sums of p, p t, p |t|, p |t - 64|
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float t0 =
            static_cast<float>(offset - 64 * c - warp * 16 - lane / 4 - 8 * r + lane % 4 * 2);
        float column = 0;
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float p = x[32 * h + 4 * n + 2 * r + e];
            const float t = t0 + static_cast<float>(8 * n + e);
            column += p;
            slope = fmaf(p, t, slope);
            bend = fmaf(p, fabsf(t), bend);
          }
        columns[h + 2 * r] = column;
        whole += column;
      }
      if (offset - 64 * c <= 1) {  // t <= 64
        late = 64 * whole - slope;
      } else {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float t0 = static_cast<float>(offset - 64 * c - 64 - warp * 16 - lane / 4 - 8 * r +
                                              lane % 4 * 2);
#pragma unroll
          for (int n = 0; n < 8; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e)
              late = fmaf(x[32 * h + 4 * n + 2 * r + e], fabsf(t0 + static_cast<float>(8 * n + e)),
                          late);
        }
      }
      float* const shares = diagonals + 4 * h;
      shares[0] = (bend - slope) / 2;
      shares[1] = (64 * whole + slope - 2 * bend + late) / 2;
      shares[2] = (bend - 2 * late + 128 * whole - slope) / 2;
      shares[3] = (late + slope - 64 * whole) / 2;
#pragma unroll
      for (int j = 0; j < 4; ++j)  // what cancellation leaves of nothing
        if (!(shares[j] >= whole * 1e-4f)) shares[j] = 0;
    }
    keep_half<2>(columns, 2, lane);
    keep_half<1>(columns, 1, lane);
    const int64_t key = static_cast<int64_t>(ring.begin + i) * 64 + own_key;
    if (of_column.active && key < w.num_keys) {
      const int64_t mass = visible ? fixed_point(columns[0], 64.0f) : 0;
      total += mass;
      if (w.columns_shared == 0)
        own_columns[key] = mass;
      else if (mass != 0)
        atomic_add(own_columns + key, mass);
    }
    if (w.diagonals != nullptr && visible) {
      keep_half<4>(diagonals, 16, lane);
      keep_half<2>(diagonals, 8, lane);
      keep_half<1>(diagonals, 4, lane);
      const float share = quad_sum(diagonals[0]);
      const int offset = first_position[lane / 16] - start;
      const int c = offset >= 0 ? offset / 64 : -((63 - offset) / 64);
      const int to_diagonal = c - 1 + lane / 4 % 4;
      if (lane % 4 == 0 && of_diagonal.active && to_diagonal >= 0 &&
          to_diagonal < w.num_diagonals) {
        const int64_t mass = fixed_point(share, 4096.0f);
        if (mass != 0) atomic_add(own_diagonals + to_diagonal, mass);
      }
    }
  }
  if (w.totals != nullptr) {
    // Lanes of one parity have one head.
#pragma unroll
    for (int distance = 16; distance > 1; distance /= 2)
      total += __shfl_xor_sync(~0u, total, distance);
    if (lane < 2 && of_column.active && total != 0)
      atomic_add(w.totals + of_column.head_row / w.heads_per_choice, total);
  }
}

template <typename Kernel>
cudaError_t launch_hopper(Kernel kernel, int bytes, const HopperArgs& args, int64_t grid,
                          cudaStream_t stream) {
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  kernel<<<static_cast<unsigned>(grid), 512, bytes, stream>>>(args);
  return cudaGetLastError();
}

template <typename Element, int kD>
cudaError_t launch_hopper_of(Pass pass, const HopperArgs& args, int64_t grid, cudaStream_t stream) {
  if (pass == Pass::kScan)
    return launch_hopper(hopper_scan<Element, kD>, HopperShape<kD, Pass::kScan>::kBytes, args, grid,
                         stream);
  return launch_hopper(hopper_masses<Element, kD>, HopperShape<kD, Pass::kMasses>::kBytes, args,
                       grid, stream);
}

}  // namespace mtraining::kernels::pattern_cuda
