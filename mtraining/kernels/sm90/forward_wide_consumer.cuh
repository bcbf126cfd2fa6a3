// A consumer warpgroup for head sizes beyond 128: its sum of 64 x D fills the registers, queries stay in shared memory.
//
// In:   as Consumer, values apart from keys. Out: out, lse. Next: forward_kernel.cuh.
//
// The exponentials of a stage run beside the product of the one before; the other group's products fill the rest.
#pragma once

#include "mtraining/kernels/sm90/forward_consumer.cuh"
#include "mtraining/kernels/sm90/wgmma_shared.cuh"

namespace mtraining::kernels::sm90 {

template <typename Element, int kD>
struct WideConsumer : Consumer<Element, kD> {
  using Base = Consumer<Element, kD>;
  using Base::base, Base::group;
  using typename Base::Shape;
  static_assert(kD == 256);

  __device__ __forceinline__ void release_values(uint32_t slot) const {
    this->arrive(Shape::values_empty(base, slot));
  }

  __device__ __forceinline__ void issue_scores(float (&s)[32], uint32_t slot) const {
    const uint64_t q = matrix_descriptor<16, 1024>(Shape::queries(base, group)),
                   k = matrix_descriptor<16, 1024>(Shape::keys(base, slot));
#pragma unroll
    for (int c = 0; c < kD / 16; ++c) {
      const int at = (c / 4 * Shape::kAtomBytes + c % 4 * 32) / 16;
      wgmma_shared<Element, 64, 0, 0>(s, q + at, k + at, c > 0);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void issue_output(float (&low)[64], float (&high)[64],
                                               const uint32_t (&p)[4][4], uint32_t slot) const {
    const uint64_t v = matrix_descriptor<Shape::kAtomBytes, 1024>(Shape::values(base, slot));
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      wgmma<Element, 128, 1>(low, p[c], v + c * 128, true);
      wgmma<Element, 128, 1>(high, p[c], v + c * 128 + 2 * Shape::kAtomBytes / 16, true);
    }
    wgmma_commit();
  }

  /// Stages from `current` on as long as they follow within reach. Returns what comes after: none within reach (flags 0), or the end.
  __device__ __forceinline__ Stage work(float (&low)[64], float (&high)[64], Stage current) {
    float s[32];
    uint32_t p[4][4];
    uint32_t held = kNoSlot;  // the slot whose product is still being added
    wgmma_fence();
    issue_scores(s, current.slot);
    wgmma_commit();  // an empty group in place of the product that later rounds have in flight here
    for (;;) {
      wgmma_wait<1>();
      pin(s);
      this->mask(s, current);
      this->release(current.slot);
      float rescale[2];
      const bool raised = this->weigh(s, rescale);
      // The assembler would wait first and do the exponentials after; a branch on their sums, never taken, keeps the order.
      if (this->row_sum[0] + this->row_sum[1] < 0) asm volatile("nanosleep.u32 1;");
      wgmma_wait<0>();
      pin(low);
      pin(high);
      if (held != kNoSlot) release_values(held);
      if (raised) {
#pragma unroll
        for (int i = 0; i < 64; ++i) {
          low[i] *= rescale[i / 2 % 2];
          high[i] *= rescale[i / 2 % 2];
        }
      }
      this->round(p, s);
      // Keys are given back, values are not: two rounds of the ring.
      const Stage next = this->template find<2 * Shape::kStages>(current.index);
      pin(s);
      pin(low);
      pin(high);
      if ((next.flags & kNeeded) == 0) {
        mbarrier_wait(Shape::values_full(base, current.slot), current.index / Shape::kStages & 1);
        wgmma_fence();
        issue_output(low, high, p, current.slot);
        wgmma_wait<0>();
        pin(low);
        pin(high);
        release_values(current.slot);
        return next;
      }
      mbarrier_wait(Shape::values_full(base, current.slot), current.index / Shape::kStages & 1);
      wgmma_fence();
      issue_scores(s, next.slot);
      issue_output(low, high, p, current.slot);
      held = current.slot;
      current = next;
    }
  }

  __device__ __forceinline__ void run() {
    for (uint32_t parity = 0;; parity ^= 1) {
      mbarrier_wait(Shape::q_full(base, group), parity);
      const uint4 item = load_shared_v4(Shape::item(base, group));
      if (item.x == kNoRow) return;
      const int row = static_cast<int>(item.x), q_block = static_cast<int>(item.y);
      this->begin_rows(row, q_block);
      float low[64], high[64];  // of D
#pragma unroll
      for (int i = 0; i < 64; ++i) low[i] = high[i] = 0;
      Stage stage = this->find_any();
      while ((stage.flags & kEnd) == 0) {
        stage = work(low, high, stage);
        if (stage.flags == 0) stage = this->find_any();
      }
      this->arrive(Shape::q_empty(base, group));
      float o[kD / 2];
#pragma unroll
      for (int i = 0; i < 64; ++i) {
        o[i] = low[i];
        o[i + 64] = high[i];
      }
      this->store(o, row, q_block);
    }
  }
};

}  // namespace mtraining::kernels::sm90
