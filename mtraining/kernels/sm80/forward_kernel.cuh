// The forward kernel: a thread block takes items (one or two neighbouring query blocks of a head) until the queue is empty.
//
// In:   ForwardArgs. Out: out (or its rounded form), lse. Next: one instantiation a file, forward_<dtype>_d<head_dim>.cu.
//
// Four warps; a warp has 16 rows of each query block, so keys and values read for one serve the other too. Tiles of keys and
// values come through a ring of slots: while one is computed with, the others are on their way. Sums are rescaled only where a
// row's maximum rises.
#pragma once

#include "mtraining/kernels/sm80/launch_shared.cuh"
#include "mtraining/kernels/sm80/query_list.cuh"
#include "mtraining/kernels/sm80/query_scores.cuh"
#include "mtraining/kernels/sm80/tile.cuh"

namespace mtraining::kernels::sm80 {

template <int kD>
struct ForwardShape {
  static constexpr int kWarps = 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kGroups = kD > 128 ? 1 : 2;  // query blocks of an item
  static constexpr int kBlocksPerSm = 2;
  static constexpr int kMinSlots = 2, kMaxSlots = 4;
  using List = QueryList<kGroups, kWarps, 256, 16>;
  static constexpr int shared_bytes(int slots) {
    return (kGroups + slots) * Tile<kD>::kBytes + static_cast<int>(sizeof(typename List::Memory));
  }
};

template <typename Element, int kD>
struct Forward {
  using Shape = ForwardShape<kD>;
  using List = typename Shape::List;
  static constexpr int kGroups = Shape::kGroups;
  static constexpr int kReadAhead = 2;
  static constexpr int kRowBytes = Tile<kD>::kRowBytes;
  const ForwardArgs& args;
  uint32_t queries, ring;  // shared addresses
  List list;
  int warp, lane;
  // of the item
  int row = 0, q_block = 0;
  float o[kGroups][kD / 2];
  float row_max[kGroups][2], row_sum[kGroups][2];
  // of the ring: tiles issued; slots of the next tile to issue and to use
  int issued = 0, slot_in = 0, slot_out = 0;

  __device__ __forceinline__ Forward(const ForwardArgs& a, char* memory)
      : args(a),
        queries(shared_address(memory)),
        ring(queries + kGroups * Tile<kD>::kBytes),
        list(a, *reinterpret_cast<typename List::Memory*>(memory +
                                                          (kGroups + a.slots) * Tile<kD>::kBytes)),
        warp(threadIdx.x / 32),
        lane(threadIdx.x % 32) {}

  // ---- ring ----

  /// Starts the copy of the next tile: keys, values, keys, ... of the stages in order.
  __device__ __forceinline__ void issue() {
    const int i = issued / 2;
    if (i < list.built()) {
      list.template load<kD>(i, issued % 2 == 1, ring + slot_in * Tile<kD>::kBytes);
    }
    copy_async_commit();
    ++issued;
    if (++slot_in == args.slots) slot_in = 0;
  }

  /// Waits for the next tile, starts the copy of another into the slot of the one before; returns its address.
  __device__ __forceinline__ uint32_t next_tile() {
    if (args.slots == 4)
      copy_async_wait<2>();
    else if (args.slots == 3)
      copy_async_wait<1>();
    else
      copy_async_wait<0>();
    __syncthreads();
    issue();
    const uint32_t tile = ring + slot_out * Tile<kD>::kBytes;
    if (++slot_out == args.slots) slot_out = 0;
    return tile;
  }

  // ---- products ----

  // Operands are read kReadAhead steps before the products that use them.

  template <bool kFirst, bool kSecond>
  __device__ __forceinline__ void load_queries(uint32_t (&q)[kGroups][4], int c) const {
    const uint32_t left = Tile<kD>::left(queries, 16 * warp, lane) ^ (c * 32);
    if constexpr (kFirst) load_matrices(left, q[0]);
    if constexpr (kSecond) load_matrices(left + Tile<kD>::kBytes, q[kGroups - 1]);
  }

  template <bool kFirst, bool kSecond>
  __device__ __forceinline__ void scores(float (&s)[kGroups][32], uint32_t keys) const {
    constexpr int kSteps = kD / 16 * 4;
    const uint32_t right = Tile<kD>::right(keys, lane);
    uint32_t q[2][kGroups][4], k[kReadAhead + 1][4];
    const auto read = [&](int step) {
      load_matrices((right ^ (step / 4 * 32)) + step % 4 * 16 * kRowBytes,
                    k[step % (kReadAhead + 1)]);
    };
    load_queries<kFirst, kSecond>(q[0], 0);
#pragma unroll
    for (int step = 0; step < kReadAhead; ++step) read(step);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int x = 0; x < 32; ++x) {
        if (g == 0 ? kFirst : kSecond) s[g][x] = 0;
      }
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int c = step / 4, n = step % 4;
      if (step + kReadAhead < kSteps) read(step + kReadAhead);
      if (n == 1 && c + 1 < kD / 16) load_queries<kFirst, kSecond>(q[(c + 1) % 2], c + 1);
      const uint32_t(&b)[4] = k[step % (kReadAhead + 1)];
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        if (g == 0 ? kFirst : kSecond) {
          multiply<Element>(s[g] + 8 * n, q[c % 2][g], b[0], b[1]);
          multiply<Element>(s[g] + 8 * n + 4, q[c % 2][g], b[2], b[3]);
        }
      }
    }
  }

  /// O += P V of one group; fn is called for the elements 0 .. 31 in turn: arithmetic that fills the gaps between products.
  template <int kGroup, typename Fn>
  __device__ __forceinline__ void output(const float (&s)[32], uint32_t values, const Fn& fn) {
    constexpr int kColumnSteps = kD / 16, kSteps = 4 * kColumnSteps;
    const uint32_t right = Tile<kD>::summed(values, lane);
    uint32_t p[4][4], v[kReadAhead + 1][4];
    const auto read = [&](int step) {
      load_matrices_transposed(
          (right ^ (step % kColumnSteps * 32)) + step / kColumnSteps * 16 * kRowBytes,
          v[step % (kReadAhead + 1)]);
    };
#pragma unroll
    for (int step = 0; step < kReadAhead; ++step) read(step);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
#pragma unroll
      for (int x = 0; x < 4; ++x) p[c][x] = pack<Element>(s[8 * c + 2 * x], s[8 * c + 2 * x + 1]);
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int c = step / kColumnSteps, d = step % kColumnSteps;
      if (step + kReadAhead < kSteps) read(step + kReadAhead);
      const uint32_t(&b)[4] = v[step % (kReadAhead + 1)];
      multiply<Element>(o[kGroup] + 8 * d, p[c], b[0], b[1]);
      multiply<Element>(o[kGroup] + 8 * d + 4, p[c], b[2], b[3]);
#pragma unroll
      for (int x = step * 32 / kSteps; x < (step + 1) * 32 / kSteps; ++x) fn(x);
    }
  }

  // ---- softmax ----

  /// Masks scores and raises row maxima; shift: what the exponents are relative to. A row's largest probability is exactly 1: where
  /// one key has nearly all the weight, rounding it would leave more in out than the gradients of such a row are large.
  template <int kGroup>
  __device__ __forceinline__ void raise_maxima(float (&s)[32], int i, uint32_t info,
                                               float (&shift)[2]) {
    if ((info & (kMasked << kGroup)) != 0)
      mask_scores<2, 64>(s, args, list, i, kGroup, q_block + kGroup, 16 * warp, 0, lane);
    float(&most)[2] = row_max[kGroup];
    float top[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float t[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        t[j] = fmaxf(fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]), s[4 * j + 16 + 2 * r]);
        t[j] = fmaxf(t[j], s[4 * j + 16 + 2 * r + 1]);
      }
      top[r] = fmaxf(fmaxf(t[0], t[1]), fmaxf(t[2], t[3]));
    }
    if (__any_sync(~0u, top[0] > most[0] || top[1] > most[1])) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float highest = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 1));
        highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 2));
        if (highest > most[r]) {
          const float rescale = exp2_approx((most[r] - highest) * args.scale_log2);
          most[r] = highest;
          row_sum[kGroup][r] *= rescale;
#pragma unroll
          for (int j = 0; j < kD / 8; ++j) {
            o[kGroup][4 * j + 2 * r] *= rescale;
            o[kGroup][4 * j + 2 * r + 1] *= rescale;
          }
        }
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) shift[r] = most[r] == -INFINITY ? 0 : most[r] * args.scale_log2;
  }

  /// A score to a probability.
  template <int kGroup>
  __device__ __forceinline__ void exponentiate(float& s, int x, const float (&shift)[2]) {
    s = exp2_approx(fmaf(s, args.scale_log2, -shift[x / 2 % 2]));
    row_sum[kGroup][x / 2 % 2] += s;
  }
  template <int kGroup>
  __device__ __forceinline__ void exponentiate(float (&s)[32], const float (&shift)[2]) {
    float sum[4] = {0, 0, 0, 0};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        float& p = s[4 * j + x];
        p = exp2_approx(fmaf(p, args.scale_log2, -shift[x / 2]));
        sum[x] += p;
      }
    }
    row_sum[kGroup][0] += sum[0] + sum[1];
    row_sum[kGroup][1] += sum[2] + sum[3];
  }

  // ---- items ----

  __device__ __forceinline__ void write_pair(float* at, float x, float y) const {
    if (args.vector_out) {
      __stcs(reinterpret_cast<float2*>(at), make_float2(x, y));
    } else {
      at[0] = x;
      at[1] = y;
    }
  }

  template <int kGroup>
  __device__ __forceinline__ void store() {
    const int64_t batch = row / args.num_heads, head = row % args.num_heads;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum = row_sum[kGroup][r];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      const int inside = 16 * warp + lane / 4 + 8 * r;
      const int token = (q_block + kGroup) * 64 + inside;
      const bool real = token < args.num_queries;
      const QueryBounds& bounds = list.bounds(kGroup);
      // A sum that is not a number is no empty row: it must show in out and lse.
      const bool none =
          !real || sum == 0 || bounds.first + inside * int64_t{args.position_stride} > bounds.last;
      const float lse = (row_max[kGroup][r] * args.scale_log2 + log2f(sum)) * 0.69314718055994531f;
      float* lse_at = args.lse + int64_t{row} * args.num_queries + token;
      float factor = none ? 0.0f : 1.0f / sum, factor_before = 0, after = none ? -INFINITY : lse;
      bool merged = false;
      if (!args.first && real) {
        const float before = *lse_at;
        if (before != -INFINITY) {
          const float top = none ? before : fmaxf(lse, before);
          const float weight = none ? 0.0f : expf(lse - top), weight_before = expf(before - top);
          const float total = weight + weight_before;
          factor = none ? 0.0f : weight / total / sum;
          factor_before = weight_before / total;
          after = none ? before : top + logf(total);
          merged = true;
        }
      }
      float* out_at = args.out.data + batch * args.out.stride_batch +
                      token * args.out.stride_token + head * args.out.stride_head + 2 * (lane % 4);
      const auto pair = [&](int j) {
        float2 x = none ? make_float2(0, 0)
                        : make_float2(o[kGroup][4 * j + 2 * r] * factor,
                                      o[kGroup][4 * j + 2 * r + 1] * factor);
        if (merged && 8 * j < args.head_dim) {
          const float* at = out_at + 8 * j;
          x = make_float2(fmaf(at[0], factor_before, x.x), fmaf(at[1], factor_before, x.y));
        }
        return x;
      };
      if (args.rounded.data != nullptr) {
        device::store_rounded<Element, kD>(
            args.rounded.row(batch, token, head),
            args.residual.data == nullptr ? nullptr : args.residual.row(batch, token, head), real,
            args.head_dim, args.vector_rounded, lane, pair);
      } else if (real && (args.first || !none)) {
#pragma unroll
        for (int j = 0; j < kD / 8; ++j) {
          if (8 * j >= args.head_dim) break;
          const float2 x = pair(j);
          write_pair(out_at + 8 * j, x.x, x.y);
        }
      }
      __syncwarp();  // the four lanes of the row have read it
      if (real && lane % 4 == 0) *lse_at = after;
    }
  }

  __device__ __forceinline__ void begin_item() {
    list.begin(row, q_block);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      load_any_tile<kD, Shape::kThreads>(
          queries + g * Tile<kD>::kBytes,
          query_rows(args, args.q, row / args.num_heads, row % args.num_heads, q_block + g,
                     list.bounds(g)),
          args.head_dim, args.vectors);
#pragma unroll
      for (int x = 0; x < kD / 2; ++x) o[g][x] = 0;
      row_max[g][0] = row_max[g][1] = -INFINITY;
      row_sum[g][0] = row_sum[g][1] = 0;
    }
    issued = slot_in = slot_out = 0;
  }

  __device__ __forceinline__ void run_item() {
    constexpr int kAhead = (Shape::kMaxSlots + 1) / 2;
    constexpr int kLast = kGroups - 1;
    begin_item();
    for (int i = 0;; ++i) {
      list.refill(i, kAhead);
#pragma unroll 1
      while (issued < 2 * i + args.slots - 1) issue();
      if (i >= list.built()) break;
      const uint32_t info = list.stage(i).info;
      const bool both = kGroups > 1 && (info / kNeeded & 3) == 3;
      const bool first = (info & kNeeded) != 0;
      float s[kGroups][32];
      const uint32_t keys = next_tile();
      if (both)
        scores<true, kGroups == 2>(s, keys);
      else if (first)
        scores<true, false>(s, keys);
      else
        scores<false, kGroups == 2>(s, keys);
      const uint32_t values = next_tile();
      float shift[kGroups][2];
      if (both) {
        raise_maxima<0>(s[0], i, info, shift[0]);
        raise_maxima<kLast>(s[kLast], i, info, shift[kLast]);
        exponentiate<0>(s[0], shift[0]);
        output<0>(s[0], values, [&](int x) { exponentiate<kLast>(s[kLast][x], x, shift[kLast]); });
        output<kLast>(s[kLast], values, [](int) {});
      } else if (first) {
        raise_maxima<0>(s[0], i, info, shift[0]);
        exponentiate<0>(s[0], shift[0]);
        output<0>(s[0], values, [](int) {});
      } else if constexpr (kGroups == 2) {
        raise_maxima<1>(s[1], i, info, shift[1]);
        exponentiate<1>(s[1], shift[1]);
        output<1>(s[1], values, [](int) {});
      }
    }
    store<0>();
    if constexpr (kGroups == 2) store<1>();
    copy_async_wait<0>();
  }

  /// Rows of a group together, its last query blocks, which have the most keys, first.
  __device__ __forceinline__ void run(int32_t* shared_item) {
    const int sets = (args.num_q_blocks + kGroups - 1) / kGroups;
    int taken = 0;
    if (threadIdx.x == 0) taken = atomicAdd(args.next_item, 1);
    for (;;) {
      __syncthreads();
      if (threadIdx.x == 0) {
        *shared_item = taken;
        taken = atomicAdd(args.next_item, 1);  // early: its latency hides behind the item
      }
      __syncthreads();
      const int item = *shared_item;
      if (item >= args.num_rows * sets) return;
      const int inside = item % (args.group_rows * sets);
      row = item / (args.group_rows * sets) * args.group_rows + inside % args.group_rows;
      q_block = kGroups * (sets - 1 - inside / args.group_rows);
      run_item();
    }
  }
};

template <typename Element, int kD>
__global__ void __launch_bounds__(ForwardShape<kD>::kThreads, ForwardShape<kD>::kBlocksPerSm)
    forward_kernel(const __grid_constant__ ForwardArgs args) {
  extern __shared__ __align__(1024) char memory[];
  using List = typename ForwardShape<kD>::List;
  auto* list = reinterpret_cast<typename List::Memory*>(
      memory + (ForwardShape<kD>::kGroups + args.slots) * Tile<kD>::kBytes);
  Forward<Element, kD> forward(args, memory);
  forward.run(&list->item);
}

template <typename Element, int kD>
cudaError_t launch_forward(const ForwardArgs& args, const Launch& l) {
  static std::atomic<uint64_t> ready{0};  // bit per device
  const cudaError_t error = allow_shared_memory(forward_kernel<Element, kD>, ready);
  if (error != cudaSuccess) return error;
  // clang-format off
  forward_kernel<Element, kD>
      <<<l.blocks, ForwardShape<kD>::kThreads, l.shared_bytes, l.stream>>>(args);
  // clang-format on
  return cudaGetLastError();
}

}  // namespace mtraining::kernels::sm80
