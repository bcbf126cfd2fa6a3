// Estimation on Hopper: a thread block keeps the rows of up to eight query heads and streams blocks of 64 keys past them, each
// read from device memory once for all of them.
//
// In:   HopperArgs. Out: per pass, see window.h.
// Next: one instantiation a head_dim, window_sm90_d<head_dim>.cu.
//
// Stacked rows as in window_kernel.cuh, in tiles of 64, a warpgroup a tile. The scan multiplies rows by keys (a thread has few rows,
// whose maxima it needs), the masses keys by rows (a thread has few keys, whose sums it needs). Eight warpgroups run apart from
// each other, so that one's products hide another's exponentials.
#pragma once

#include "mtraining/kernels/pattern_cuda/window_sm90.h"
#include "mtraining/kernels/sm90/ptx.cuh"
#include "mtraining/kernels/sm90/wgmma_shared.cuh"

namespace mtraining::kernels::pattern_cuda {

template <int kD>
struct HopperShape {
  static constexpr int kGroups = KeyWalk::kGroups;
  static constexpr int kThreads = 128 * kGroups;
  static constexpr int kTileBytes = 64 * kD * 2;  // [D / 64][64 rows][64 of D], 128-byte swizzle
  static constexpr int kStates = KeyWalk::kTilesHeld * kTileBytes;  // float, int, int [kGroups][64]
  static constexpr int kStarts = kStates + kGroups * 64 * 12;       // int [kMostBlocks]
  static constexpr int kBarriers = kStarts + kMostBlocks * 4;       // full and empty, a slot each
  static constexpr int kBytes =
      kBarriers + KeyWalk::kTilesHeld * 16 + 1024;  // to begin at a multiple of 1024

  /// Tiles of rows, then slots of keys.
  static __device__ __forceinline__ uint32_t rows(uint32_t base, int tile) {
    return base + tile * kTileBytes;
  }
  static __device__ __forceinline__ uint32_t full(uint32_t base, int slot) {
    return base + kBarriers + slot * 16;
  }
  static __device__ __forceinline__ uint32_t empty(uint32_t base, int slot) {
    return base + kBarriers + slot * 16 + 8;
  }
  // Of this thread block's rows: what is subtracted from a score, position (-1: no row), first position of the document.
  static __device__ __forceinline__ uint32_t state(uint32_t base, int row) {
    return base + kStates + row * 4;
  }
  static __device__ __forceinline__ uint32_t position(uint32_t base, int row) {
    return base + kStates + kGroups * 256 + row * 4;
  }
  static __device__ __forceinline__ uint32_t document(uint32_t base, int row) {
    return base + kStates + 2 * kGroups * 256 + row * 4;
  }
  /// First position of the i-th key block.
  static __device__ __forceinline__ uint32_t start(uint32_t base, int i) {
    return base + kStarts + i * 4;
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

/// Which keys and rows a thread block has, and the ring of key blocks that its warpgroups read.
template <typename Shape>
struct KeyRing {
  const HopperArgs& args;
  uint32_t base;
  int begin, count;  // key blocks
  int kv_head, first_tile;
  int64_t batch;
  int group, tile;  // of this warpgroup, the same in all lanes
  KeyWalk walk;

  __device__ __forceinline__ KeyRing(const HopperArgs& a, uint32_t base_)
      : args(a),
        base(base_),
        group(__shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0)),
        tile(group % a.tiles),
        walk(group, a.tiles) {
    const WindowArgs& w = a.window;
    int work = blockIdx.x;
    begin = work % w.chunks * w.chunk_blocks;
    count = min(w.num_blocks, begin + w.chunk_blocks) - begin;
    work /= w.chunks;
    first_tile = work % w.row_groups * a.tiles;
    work /= w.row_groups;
    kv_head = work % w.num_kv_heads;
    batch = work / w.num_kv_heads;
    if (threadIdx.x == 0) {
      sm90::prefetch_tensor_map(&a.keys);
      for (int i = 0; i < walk.stages; ++i) {
        sm90::mbarrier_init(Shape::full(base, i), 1);
        sm90::mbarrier_init(Shape::empty(base, i), 4 * a.tiles);  // a warp arrives once
      }
      sm90::mbarrier_init_fence();
      load(0, walk.load_until(0));
    }
  }
  /// The key block at work.
  __device__ __forceinline__ uint32_t keys() const { return keys(walk.slot); }
  __device__ __forceinline__ uint32_t keys(int slot) const {
    return Shape::rows(base, args.tiles + slot);
  }
  template <int kD>
  __device__ __forceinline__ uint32_t place_of(int stacked, int c) const {
    return Shape::rows(base, stacked / 64) + c / 8 * 8192 + stacked % 64 * 128 +
           (c % 8 ^ stacked % 8) * 16;
  }
  /// Rows, their positions and documents, block starts into shared memory; state(head_row, row) is what is subtracted. Reports queries
  /// that are refused. All threads.
  template <typename Element, int kD, typename State>
  __device__ __forceinline__ void prepare(const State& state) const {
    const WindowArgs& w = args.window;
    for (int i = threadIdx.x; i < count; i += Shape::kThreads)
      sm90::store_shared_s32(Shape::start(base, i), w.block_starts[begin + i]);
    for (int i = threadIdx.x; i < args.tiles * 64; i += Shape::kThreads) {
      const RowTile of(w, batch, kv_head, first_tile + i / 64);
      const int row = of.first_row + i % 64;
      const bool real = of.active && row < w.num_rows;
      sm90::store_shared_s32(
          Shape::state(base, i),
          __float_as_int(real ? state(of.head_row * w.num_rows + row) : kInfinity));
      sm90::store_shared_s32(Shape::position(base, i), real ? w.row_positions[row] : -1);
      sm90::store_shared_s32(Shape::document(base, i),
                             real && w.row_document_start != nullptr
                                 ? w.row_document_start[batch * w.num_rows + row]
                                 : 0);
    }
    // Thread blocks of copies, none waited for before all are begun.
#pragma unroll 4
    for (int i = threadIdx.x; i < args.tiles * 64 * (kD / 8); i += Shape::kThreads) {
      const int stacked = i / (kD / 8), c = i % (kD / 8);
      const RowTile of(w, batch, kv_head, first_tile + stacked / 64);
      const int row = of.first_row + stacked % 64;
      const bool real = of.active && row < w.num_rows;
      copy_async_16(place_of<kD>(stacked, c),
                    w.q + batch * w.q_stride_batch + (real ? row : 0) * w.q_stride_row +
                        of.head * w.q_stride_head + c * 16,
                    real ? 16 : 0);
    }
    copy_async_commit();
    copy_async_wait<0>();
    if (w.fault != nullptr) {
      for (int i = threadIdx.x; i < args.tiles * 64 * (kD / 8); i += Shape::kThreads) {
        const int stacked = i / (kD / 8), c = i % (kD / 8);
        if (beyond(sm90::load_shared_v4(place_of<kD>(stacked, c)), w.magnitude_limit) == 0)
          continue;
        const RowTile of(w, batch, kv_head, first_tile + stacked / 64);
        report(w.fault, FaultKind::kQuery,
               of.head_row * w.seq_len + w.row_positions[of.first_row + stacked % 64]);
      }
    }
    sm90::fence_async_shared();
    __syncthreads();
    begin_turns();
  }
  /// By the first thread: copies of blocks [from, until). Waits until their slots are free.
  __device__ __forceinline__ void load(int from, int until) const {
    for (int block = from; block < min(count, until); ++block) {
      const int to = block % walk.stages, round = block / walk.stages;
      if (round > 0) sm90::mbarrier_wait(Shape::empty(base, to), (round - 1) % 2);
      sm90::mbarrier_arrive_expect(Shape::full(base, to), Shape::kTileBytes);
      sm90::tensor_load_5d(keys(to), &args.keys, Shape::full(base, to), sm90::evict_normal_policy(),
                           0, (begin + block) * 64, 0, args.window.k_stride_head == 0 ? 0 : kv_head,
                           args.window.k_stride_batch == 0 ? 0 : static_cast<int>(batch));
    }
  }
  /// Before the i-th block: the first thread begins copies of blocks to come.
  __device__ __forceinline__ void load_ahead(int i) const {
    if (threadIdx.x == 0 && i > 0) load(walk.load_from(i), walk.load_until(i));
    __syncwarp();
  }
  // Were all warpgroups to multiply at a time, all would finish at a time, and tensor cores wait for exponentials: they take turns, two
  // at a time, where each has every block.
  __device__ __forceinline__ bool take_turns() const { return args.tiles == Shape::kGroups; }
  __device__ __forceinline__ void begin_turns() const {
    if (take_turns() && group >= Shape::kGroups - 2) end_turn();
  }
  __device__ __forceinline__ void begin_turn() const {
    __syncwarp();
    if (take_turns()) asm volatile("bar.sync %0, 256;" ::"r"(1 + group) : "memory");
  }
  __device__ __forceinline__ void end_turn() const {
    if (take_turns())
      asm volatile("bar.arrive %0, 256;" ::"r"(1 + (group + 2) % Shape::kGroups) : "memory");
  }
  __device__ __forceinline__ void wait() const {
    sm90::mbarrier_wait(Shape::full(base, walk.slot), walk.parity);
  }
  /// After the last read of the block; goes on to the next.
  __device__ __forceinline__ void release() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) sm90::mbarrier_arrive(Shape::empty(base, walk.slot));
    walk.next();
  }
};

/// What of a tile's rows decides whether a block of keys is masked.
struct RowRange {
  int lowest = 0x7fffffff, latest_document = 0;
  template <typename Shape>
  __device__ __forceinline__ void find(uint32_t base, int tile, int lane) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = tile * 64 + lane + 32 * i;
      const int position = sm90::load_shared_s32(Shape::position(base, row));
      if (position < 0) continue;
      lowest = min(lowest, position);
      latest_document = max(latest_document, sm90::load_shared_s32(Shape::document(base, row)));
    }
    lowest = __reduce_min_sync(~0u, lowest);
    latest_document = __reduce_max_sync(~0u, latest_document);
  }
  __device__ __forceinline__ bool masked(int start) const {
    return start + 63 > lowest || start < latest_document;
  }
};

/// x[4 n + 2 r + e] of row 16 warp + lane / 4 + 8 r of the left operand, row 8 n + lane % 4 * 2 + e of the right one; 64 x 64.
template <typename Element, int kD>
__device__ __forceinline__ void multiply(float (&x)[32], uint32_t left, uint32_t right) {
  const uint64_t a = sm90::matrix_descriptor<16, 1024>(left),
                 b = sm90::matrix_descriptor<16, 1024>(right);
  sm90::pin(x);
  sm90::wgmma_fence();
#pragma unroll
  for (int c = 0; c < kD / 16; ++c)
    sm90::wgmma_shared<Element, 64, 0, 0>(x, a + (c / 4 * 8192 + c % 4 * 32) / 16,
                                          b + (c / 4 * 8192 + c % 4 * 32) / 16, c > 0);
  sm90::wgmma_commit();
  sm90::wgmma_wait<0>();
  sm90::pin(x);
}

template <typename Element, int kD>
__global__ void __launch_bounds__(1024, 1) hopper_scan(const __grid_constant__ HopperArgs args) {
  using Shape = HopperShape<kD>;
  extern __shared__ char memory[];
  const uint32_t base = (shared_address(memory) + 1023) / 1024 * 1024;
  const WindowArgs& w = args.window;
  KeyRing<Shape> ring(args, base);
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  ring.template prepare<Element, kD>([](int64_t) { return 0.0f; });
  RowRange range;
  range.find<Shape>(base, ring.tile, lane);
  // This thread's rows: 16 warp + lane / 4 + 8 r.
  const RowTile tile(w, ring.batch, ring.kv_head, ring.first_tile + ring.tile);
  const bool keeps = tile.active && lane % 4 == 0;
  float2* statistics =
      w.block_statistics +
      (tile.head_row * w.num_blocks + ring.begin + ring.walk.first) * w.padded_rows +
      tile.first_row + warp * 16 + lane / 4;
  float top_so_far[2] = {-kInfinity, -kInfinity};
  for (int i = ring.walk.first; i < ring.count; i += ring.walk.step) {
    ring.load_ahead(i);
    const int start = sm90::load_shared_s32(Shape::start(base, i));
    ring.wait();
    const uint32_t keys = ring.keys();
    for (int chunk = ring.tile * 128 + static_cast<int>(threadIdx.x) % 128; chunk < 64 * (kD / 8);
         chunk += args.tiles * 128) {
      if (beyond(sm90::load_shared_v4(keys + chunk * 16), w.magnitude_limit) != 0)
        report_key(w, ring.batch, ring.begin + i, chunk / 8 % 64);
    }
    float x[32];
    ring.begin_turn();
    multiply<Element, kD>(x, Shape::rows(base, ring.tile), keys);
    ring.end_turn();
    ring.release();
    if (range.masked(start)) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = ring.tile * 64 + warp * 16 + lane / 4 + 8 * r;
        const int position = sm90::load_shared_s32(Shape::position(base, row)),
                  document = sm90::load_shared_s32(Shape::document(base, row));
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int key = start + n * 8 + lane % 4 * 2 + e;
            if (key > position || key < document) x[4 * n + 2 * r + e] = -kInfinity;
          }
      }
    }
    float top[2], sum[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      top[r] = fmaxf(x[2 * r], x[2 * r + 1]);
#pragma unroll
      for (int n = 1; n < 8; ++n)
        top[r] = fmaxf(top[r], fmaxf(x[4 * n + 2 * r], x[4 * n + 2 * r + 1]));
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      top[r] = quad_max(top[r]) * w.scale_log2;
      const float reference = top[r] == -kInfinity ? 0.0f : top[r];
      float other = 0;
      sum[r] = 0;
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        sum[r] += exp2_approx(fmaf(x[4 * n + 2 * r], w.scale_log2, -reference));
        other += exp2_approx(fmaf(x[4 * n + 2 * r + 1], w.scale_log2, -reference));
      }
      sum[r] += other;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] = quad_sum(sum[r]);
      top_so_far[r] = fmaxf(top_so_far[r], top[r]);
      if (keeps) statistics[8 * r] = {top[r], sum[r]};
    }
    statistics += static_cast<int64_t>(ring.walk.step) * w.padded_rows;
  }
  if (keeps) {
    const RowTile own(w, ring.batch, ring.kv_head, ring.first_tile + ring.tile);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = own.first_row + warp * 16 + lane / 4 + 8 * r;
      if (row < w.num_rows) atomic_max(w.row_max + own.head_row * w.num_rows + row, top_so_far[r]);
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
__global__ void __launch_bounds__(1024, 1) hopper_masses(const __grid_constant__ HopperArgs args) {
  using Shape = HopperShape<kD>;
  extern __shared__ char memory[];
  const uint32_t base = (shared_address(memory) + 1023) / 1024 * 1024;
  const WindowArgs& w = args.window;
  KeyRing<Shape> ring(args, base);
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  ring.template prepare<Element, kD>([&](int64_t at) {
    const int64_t sum = w.row_sum[at];
    return sum > 0 ? w.known_row_max[at] + log2f(static_cast<float>(sum) * 0x1p-40f) : kInfinity;
  });
  RowRange range;
  range.find<Shape>(base, ring.tile, lane);
  const RowTile tile(w, ring.batch, ring.kv_head, ring.first_tile + ring.tile);
  const int64_t choice = tile.head_row / w.heads_per_choice;
  // After the sums over lanes an even lane holds one: of key 16 warp + lane / 4 + 8 (lane / 2 % 2).
  const int own_key = warp * 16 + lane / 4 + lane / 2 % 2 * 8;
  const bool keeps_column = tile.active && lane % 2 == 0;
  int64_t* const columns_of_choice = w.columns + choice * w.num_keys;
  // Likewise every eighth lane one share of a diagonal.
  int64_t* const diagonals_of_choice = w.diagonals == nullptr || !tile.active || lane % 8 != 0
                                           ? nullptr
                                           : w.diagonals + choice * w.num_diagonals;
  const int first_position = sm90::load_shared_s32(Shape::position(base, ring.tile * 64));
  const uint32_t states = Shape::state(base, ring.tile * 64 + lane % 4 * 2);

  int64_t total = 0;  // of the columns that this thread wrote
  for (int i = ring.walk.first; i < ring.count; i += ring.walk.step) {
    ring.load_ahead(i);
    const int start = sm90::load_shared_s32(Shape::start(base, i));
    ring.wait();
    // x[4 n + 2 r + e]: key 16 warp + lane / 4 + 8 r, row 8 n + lane % 4 * 2 + e.
    float x[32];
    ring.begin_turn();
    multiply<Element, kD>(x, ring.keys(), Shape::rows(base, ring.tile));
    ring.end_turn();
    ring.release();
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float2 state = sm90::load_shared_f2(states + n * 32);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        x[4 * n + 2 * r] = fmaf(x[4 * n + 2 * r], w.scale_log2, -state.x);
        x[4 * n + 2 * r + 1] = fmaf(x[4 * n + 2 * r + 1], w.scale_log2, -state.y);
      }
    }
    if (range.masked(start)) {
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int row = ring.tile * 64 + n * 8 + lane % 4 * 2 + e;
          const int position = sm90::load_shared_s32(Shape::position(base, row)),
                    document = sm90::load_shared_s32(Shape::document(base, row));
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const int key = start + warp * 16 + lane / 4 + 8 * r;
            if (key > position || key < document) x[4 * n + 2 * r + e] = -kInfinity;
          }
        }
    }
#pragma unroll
    for (int j = 0; j < 32; ++j) x[j] = exp2_approx(x[j]);

    // t = offset - 64 c; shares are piecewise linear in it (window_kernel.cuh).
    const int offset = first_position - start;
    const int c = offset >> 6;
    float columns[2] = {0, 0}, slope[2] = {0, 0}, bend[2] = {0, 0};  // sums of p, p t, p |t|
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float t0 =
          static_cast<float>((offset & 63) - warp * 16 - lane / 4 - 8 * r + lane % 4 * 2);
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float p = x[4 * n + 2 * r + e], t = t0 + static_cast<float>(8 * n + e);
          columns[r] += p;
          slope[r] = fmaf(p, t, slope[r]);
          bend[r] = fmaf(p, fabsf(t), bend[r]);
        }
    }
    const float whole = columns[0] + columns[1], x1 = slope[0] + slope[1], x2 = bend[0] + bend[1];
    float late = 64 * whole - x1;  // the sum of p |t - 64| where t <= 64 in all rows
    if ((offset & 63) > 1) {
      late = 0;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float t0 =
            static_cast<float>((offset & 63) - 64 - warp * 16 - lane / 4 - 8 * r + lane % 4 * 2);
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            late = fmaf(x[4 * n + 2 * r + e], fabsf(t0 + static_cast<float>(8 * n + e)), late);
      }
    }
    float shares[4] = {(x2 - x1) / 2, (64 * whole + x1 - 2 * x2 + late) / 2,
                       (x2 - 2 * late + 128 * whole - x1) / 2, (late + x1 - 64 * whole) / 2};
#pragma unroll
    for (int j = 0; j < 4; ++j)  // what cancellation leaves of nothing
      if (!(shares[j] >= whole * 1e-4f)) shares[j] = 0;

    keep_half<1>(columns, 2, lane);
    columns[0] += __shfl_xor_sync(~0u, columns[0], 1);
    const int key = (ring.begin + i) * 64 + own_key;
    if (keeps_column && key < w.num_keys) {
      const int64_t mass = fixed_point(columns[0], 64.0f);
      total += mass;
      if (w.columns_shared == 0)
        columns_of_choice[key] = mass;
      else if (mass != 0)
        atomic_add(columns_of_choice + key, mass);
    }
    keep_half<2>(shares, 16, lane);
    keep_half<1>(shares, 8, lane);
    float share = shares[0];
    share += __shfl_xor_sync(~0u, share, 4);
    share = quad_sum(share);
    const int to_diagonal = c - 1 + lane / 8;
    if (diagonals_of_choice != nullptr && to_diagonal >= 0 && to_diagonal < w.num_diagonals) {
      const int64_t mass = fixed_point(share, 4096.0f);
      if (mass != 0) atomic_add(diagonals_of_choice + to_diagonal, mass);
    }
  }
  if (w.totals != nullptr) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
      total += __shfl_xor_sync(~0u, total, distance);
    if (lane == 0 && total != 0) atomic_add(w.totals + choice, total);
  }
}

template <typename Kernel>
cudaError_t launch_hopper(Kernel kernel, int bytes, const HopperArgs& args, int64_t grid,
                          cudaStream_t stream) {
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  kernel<<<static_cast<unsigned>(grid), 1024, bytes, stream>>>(args);
  return cudaGetLastError();
}

template <typename Element, int kD>
cudaError_t launch_hopper_of(Pass pass, const HopperArgs& args, int64_t grid, cudaStream_t stream) {
  constexpr int kBytes = HopperShape<kD>::kBytes;
  return pass == Pass::kScan
             ? launch_hopper(hopper_scan<Element, kD>, kBytes, args, grid, stream)
             : launch_hopper(hopper_masses<Element, kD>, kBytes, args, grid, stream);
}

}  // namespace mtraining::kernels::pattern_cuda
