// The consumer warpgroup that computes dq of the key-stationary backward: dq += dS K over the keys of the groups that need a stage.
//
// In:   score gradients that the key groups left in shared memory, keys, notes. Out: parts of dq, added by bulk reductions.
// Next: backward_kernel.cuh.
#pragma once

#include <type_traits>

#include "mtraining/kernels/sm90/backward_args.cuh"
#include "mtraining/kernels/sm90/backward_shape.cuh"
#include "mtraining/kernels/sm90/wgmma_shared.cuh"

namespace mtraining::kernels::sm90 {

template <typename Element, int kD>
struct QueryGradients {
  using Shape = BackwardShape<kD, true>;
  const BackwardArgs& args;
  uint32_t base;
  int warp, lane;  // warp within the group
  CountedCursor<Shape::kStages> ring;
  CountedCursor<2> buffers[2];  // of score gradients, of a key group
  CountedCursor<2> places;      // of outgoing parts

  static __device__ __forceinline__ uint32_t exclusive_or(uint32_t a, uint32_t b) {
    uint32_t c;
    asm volatile("xor.b32 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
  }
  __device__ __forceinline__ void arrive(uint32_t barrier) const {
    __syncwarp();
    if (lane < kArrivals) mbarrier_arrive(barrier);
  }

  // fp16: the scale comes last, see KeyConsumer.
  __device__ __forceinline__ float late_scale() const {
    return std::is_same_v<Element, __half> ? args.scale : 1.0f;
  }

  /// 64 of D of the product over the keys of groups [kFirst, kLast), complete on return.
  template <int kFirst, int kLast>
  __device__ __forceinline__ void multiply(float (&dq)[32], int part) const {
    wgmma_fence();
#pragma unroll
    for (int g = kFirst; g < kLast; ++g) {
      const uint64_t ds = matrix_descriptor<8192, 1024>(Shape::scores(base, buffers[g].slot(), g));
      const uint64_t k = matrix_descriptor<8192, 1024>(Shape::keys(base, g) + part * 8192);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (g == kFirst && c == 0) {
          wgmma_first<Element, 64, 1, 1>(dq, ds, k);
        } else {
          wgmma_shared<Element, 64, 1, 1>(dq, ds + c * 2048 / 16, k + c * 2048 / 16, true);
        }
      }
    }
    wgmma_commit();
    wgmma_wait<0>();
    pin(dq);
  }

  /// Leaves 64 of D of this warp's 16 rows in shared memory.
  __device__ __forceinline__ void stash(const float (&dq)[32]) const {
    // Row lane / 4 (and 8 below), chunk 2 (j % 4) + (lane & 3) / 2 of 16 bytes, swizzled by the row.
    const uint32_t at = Shape::outgoing(base, places.slot(), warp) + lane / 4 * 128 +
                        (((lane & 3) / 2) ^ lane / 4) * 16 + (lane & 1) * 8;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t chunk = exclusive_or(at, j * 32);
#pragma unroll
      for (int i = j; i < 8; i += 4) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          store_shared_f2(chunk + i / 4 * 2048 + r * 1024, dq[4 * i + 2 * r] * late_scale(),
                          dq[4 * i + 2 * r + 1] * late_scale());
        }
      }
    }
  }

  template <int kFirst, int kLast>
  __device__ __forceinline__ void stage(int32_t q_block, int32_t row) {
#pragma unroll
    for (int g = kFirst; g < kLast; ++g)
      mbarrier_wait(Shape::scores_full(base, buffers[g].slot(), g), buffers[g].parity());
#pragma unroll
    for (int part = 0; part < Shape::kParts; ++part) {
      float dq[32];
      multiply<kFirst, kLast>(dq, part);
      if (part + 1 == Shape::kParts) {
#pragma unroll
        for (int g = kFirst; g < kLast; ++g) {
          arrive(Shape::scores_empty(base, buffers[g].slot(), g));
          buffers[g].advance();
        }
      }
      // What was in this place has left it; what is in the other may be on its way.
      if (lane == 0) bulk_wait_read<1>();
      __syncwarp();
      stash(dq);
      fence_async_shared();
      __syncwarp();
      if (lane == 0) {
        tensor_reduce_add_5d(&args.dq, Shape::outgoing(base, places.slot(), warp), 0,
                             q_block * 64 + 16 * warp, 2 * part, row & 0xffff, row >> 16);
        bulk_commit();
      }
      places.advance();
    }
  }

  __device__ __forceinline__ void run() {
    for (uint32_t parity = 0;; parity ^= 1) {
      mbarrier_wait(Shape::keys_full(base), parity);
      if (load_shared_s32(Shape::item(base)) == kItemEnd) break;
      for (;;) {
        mbarrier_wait(Shape::full(base, ring.slot()), ring.parity());
        const uint4 note = load_shared_v4(Shape::note(base, ring.slot()));
        arrive(Shape::empty(base, ring.slot()));
        ring.advance();
        const bool first = (note.x & kNeeded) != 0, second = (note.x >> kGroupFlags & kNeeded) != 0;
        const int32_t q_block = static_cast<int32_t>(note.z), row = static_cast<int32_t>(note.w);
        if (first && second) {
          stage<0, 2>(q_block, row);
        } else if (first) {
          stage<0, 1>(q_block, row);
        } else if (second) {
          stage<1, 2>(q_block, row);
        }
        if ((note.x & kEnd) != 0) break;
      }
      arrive(Shape::keys_empty(base));
    }
    // Shared memory must outlive the copies that read it.
    if (lane == 0) bulk_wait();
  }
};

}  // namespace mtraining::kernels::sm90
