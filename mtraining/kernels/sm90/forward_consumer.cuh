// A consumer warpgroup: 64 query rows against the stages that its notes say it needs.
//
// In:   queries, stages, notes in shared memory. Out: out (or its rounded form), lse. Next: forward_kernel.cuh.
//
// A consumer does the exponentials of one stage while the tensor cores compute S = Q K^T of its next and O += P V of the one before.
// Row maxima are raised only where scores leave them more than 2^8 behind: the same stale maximum divides out, and rescaling O is rare.
#pragma once

#include <climits>

#include "mtraining/kernels/device/rounded_rows.cuh"
#include "mtraining/kernels/sm90/forward_args.cuh"
#include "mtraining/kernels/sm90/forward_shape.cuh"
#include "mtraining/kernels/sm90/ptx.cuh"
#include "mtraining/kernels/sm90/query_mask.cuh"

namespace mtraining::kernels::sm90 {

template <typename Element, int kD>
struct Consumer {
  using Shape = ForwardShape<kD>;
  const ForwardArgs& args;
  uint32_t base;
  int group, warp, lane;  // warp within the group
  RingCursor<Shape::kStages> ring;

  // of the item: two rows a thread, lane / 4 and 8 below
  int32_t q_position[2];
  int32_t q_document[2];
  float row_max[2], row_sum[2];
  float row_shift[2];  // row_max in powers of two, 0 where there is none
  float row_limit[2];  // scores above it raise row_max
  float row_top[2];    // the highest score that this thread saw

  // ---- stages ----

  __device__ __forceinline__ void arrive(uint32_t barrier) const {
    __syncwarp();
    if (lane < kArrivals) mbarrier_arrive(barrier);
  }
  __device__ __forceinline__ void release(uint32_t slot) const { arrive(Shape::empty(base, slot)); }

  /// The note of the ring's next stage as if it were there.
  __device__ __forceinline__ Stage look() const {
    const uint4 note = load_shared_v4(Shape::note(base, ring.slot, group));
    return {ring.index, ring.slot, note.x, static_cast<int32_t>(note.y), note.z, note.w};
  }

  /// The next stage that this group needs, or the end, both held. Stages it does not need are given back unread. Looks no further than
  /// the ring reaches from the oldest stage still held: the producer cannot refill that one, and waiting for more would hang.
  template <uint32_t kReach = Shape::kStages>
  __device__ __forceinline__ Stage find(uint32_t oldest_held) {
#pragma unroll 1
    while (ring.index - oldest_held < kReach) {
      mbarrier_wait(Shape::full(base, ring.slot), ring.parity);
      const Stage stage = look();
      ring.advance();
      if ((stage.flags & kNeeded) != 0) return stage;
      if ((stage.flags & kEnd) != 0 && Shape::kQueriesInRing) return stage;
      release(stage.slot);
      if ((stage.flags & kEnd) != 0) return stage;
    }
    return {0, 0, 0, 0, 0, 0};
  }

  /// The same holding no stage: always finds one.
  __device__ __forceinline__ Stage find_any() {
    Stage stage;
    do {
      stage = find(ring.index);
    } while (stage.flags == 0);
    return stage;
  }

  // ---- products ----

  __device__ __forceinline__ void load_queries(uint32_t (&q)[kD / 16][4], uint32_t slot) const {
    const int row = 16 * warp + lane / 8 % 2 * 8 + lane % 8;
    const uint32_t tile = Shape::item_queries(base, slot, group);
#pragma unroll
    for (int c = 0; c < kD / 16; ++c)
      ldmatrix_x4(Shape::chunk_at(tile, row, 2 * c + lane / 16), q[c]);
  }

  __device__ __forceinline__ void issue_scores(float (&s)[32], const uint32_t (&q)[kD / 16][4],
                                               uint32_t slot) const {
    constexpr int kSteps = Shape::kAtom / 16;  // in an atom
    const uint64_t k =
        matrix_descriptor<16, 8 * Shape::kRowBytes, Shape::kRowBytes>(Shape::keys(base, slot));
#pragma unroll
    for (int c = 0; c < kD / 16; ++c) {
      wgmma<Element, 64, 0>(s, q[c], k + (c / kSteps * Shape::kAtomBytes + c % kSteps * 32) / 16,
                            c > 0);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void issue_output(float (&o)[kD / 2], const uint32_t (&p)[4][4],
                                               uint32_t slot) const {
    const uint64_t v = matrix_descriptor<Shape::kAtomBytes, 8 * Shape::kRowBytes, Shape::kRowBytes>(
        Shape::values(base, slot));
#pragma unroll
    for (int c = 0; c < 4; ++c) wgmma<Element, kD, 1>(o, p[c], v + c * Shape::kRowBytes, true);
    wgmma_commit();
  }

  // ---- softmax ----

  /// Raises the maxima of rows whose scores left them more than 2^8 behind. rescale: what O must be multiplied by.
  __device__ __forceinline__ void raise_maxima(const float (&top)[2], float (&rescale)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float highest = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 1));
      highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 2));
      const bool raise = highest > row_limit[r];
      rescale[r] =
          raise ? exp2_approx(row_max[r] * args.scale_log2 - highest * args.scale_log2) : 1.0f;
      if (raise) {
        row_max[r] = highest;
        row_shift[r] = highest * args.scale_log2;
        row_limit[r] = highest + args.reach;
      }
      row_sum[r] *= rescale[r];
    }
  }

  /// Scores to probabilities relative to the (possibly stale) row maxima. True: a row's maximum rose, and O must be rescaled.
  __device__ __forceinline__ bool probabilities(float (&s)[32], const Stage& stage,
                                                float (&rescale)[2]) {
    mask(s, stage);
    return weigh(s, rescale);
  }

  __device__ __forceinline__ void mask(float (&s)[32], const Stage& stage) const {
    if ((stage.flags & (kMaskBits | kMaskEach)) != 0) {
      mask_scores(s, stage, Shape::positions(base, stage.slot), lane, q_position, q_document,
                  args.position_stride);
    }
  }

  /// Of masked scores.
  __device__ __forceinline__ bool weigh(float (&s)[32], float (&rescale)[2]) {
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
      row_top[r] = fmaxf(row_top[r], top[r]);
    }
    const bool raised = __any_sync(~0u, top[0] > row_limit[0] || top[1] > row_limit[1]);
    if (raised) raise_maxima(top, rescale);
    float sum[4] = {0, 0, 0, 0};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = s[4 * j + i];
        x = exp2_approx(fmaf(x, args.scale_log2, -row_shift[i / 2]));
        sum[i] += x;
      }
    }
    row_sum[0] += sum[0] + sum[1];
    row_sum[1] += sum[2] + sum[3];
    return raised;
  }

  __device__ __forceinline__ void rescale_output(float (&o)[kD / 2],
                                                 const float (&rescale)[2]) const {
#pragma unroll
    for (int i = 0; i < kD / 2; ++i) o[i] *= rescale[i / 2 % 2];
  }

  __device__ __forceinline__ void round(uint32_t (&p)[4][4], const float (&s)[32]) const {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
#pragma unroll
      for (int i = 0; i < 4; ++i) p[c][i] = pack<Element>(s[8 * c + 2 * i], s[8 * c + 2 * i + 1]);
    }
  }

  /// Probabilities of `current`, whose scores are on their way into s, while the scores of `next` are computed into s_next;
  /// then O += P V of `current`, left in flight. In flight before: scores of current, the product of `held`.
  __device__ __forceinline__ void step(float (&s)[32], float (&s_next)[32], float (&o)[kD / 2],
                                       uint32_t (&p)[4][4], const uint32_t (&q)[kD / 16][4],
                                       uint32_t& held, Stage& current, Stage& next) {
    pin(s_next);
    wgmma_fence();
    issue_scores(s_next, q, next.slot);
    // A first look at the stage after next: where it is there and needed, as most are, find() is spared.
    const uint32_t there = mbarrier_test_wait(Shape::full(base, ring.slot), ring.parity);
    wgmma_wait<2>();
    pin(s);
    float rescale[2];
    const bool raised = probabilities(s, current, rescale);
    const bool ready = there != 0 && ring.index - current.index < Shape::kStages;
    Stage following = {0, 0, 0, 0, 0, 0};
    if (ready) following = look();
    RingCursor<Shape::kStages> beyond = ring;
    beyond.advance();
    const bool taken = ready && (following.flags & kNeeded) != 0;
    // The assembler would wait first and do the exponentials after; a branch on their sums, never taken, keeps the order.
    if (row_sum[0] + row_sum[1] < 0) asm volatile("nanosleep.u32 1;");
    wgmma_wait<1>();
    pin(o);
    if (held != kNoSlot) release(held);
    if (raised) rescale_output(o, rescale);
    round(p, s);
    pin(o);
    wgmma_fence();
    issue_output(o, p, current.slot);
    held = current.slot;
    const uint32_t oldest = current.index;
    current = next;
    if (taken) {
      next = following;
      ring = beyond;
    } else {
      next = find(oldest);
    }
  }

  // ---- items ----

  /// All lanes of the warp.
  __device__ __forceinline__ void store(const float (&o)[kD / 2], int row, int q_block) const {
    const int64_t batch = row / args.num_heads, head = row % args.num_heads;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum = row_sum[r];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      float top = row_top[r];
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      const int token = q_block * 64 + 16 * warp + lane / 4 + 8 * r;
      const bool real = token < args.num_queries;
      // A sum that is not a number is no empty row: it must show in out and lse.
      const bool none = sum == 0 || q_position[r] >= args.seq_len;
      float lse =
          none ? -INFINITY : (row_max[r] * args.scale_log2 + log2f(sum)) * 0.69314718055994531f;
      float* lse_at = args.lse + static_cast<int64_t>(row) * args.num_queries + token;
      // Where one key has nearly all of the weight, out is its value and no rounding may show: the gradient's differences of dout * v
      // and dout * out cancel [Sm90Forward.AKeyWithNearlyAllTheWeightGivesItsValue]. So the largest counts as the products saw it.
      const float largest = exp2_approx(fmaf(top, args.scale_log2, -row_shift[r]));
      if (!none) sum += unpack_low<Element>(pack<Element>(largest, largest)) - largest;
      float weight = none ? 0.0f : 1.0f / sum, weight_before = 0;
      bool merged = false;
      if (args.first == 0 && real) {
        const float before = *lse_at;
        if (before != -INFINITY) {
          const float most = fmaxf(lse, before);
          const float share = none ? 0.0f : expf(lse - most), share_before = expf(before - most);
          const float total = share + share_before;
          weight = none ? 0.0f : share / total / sum;
          weight_before = share_before / total;
          lse = none ? before : most + logf(total);
          merged = true;
        }
      }
      float2* out_at =
          reinterpret_cast<float2*>(args.out + batch * args.out_stride_batch +
                                    token * args.out_stride_token + head * args.out_stride_head) +
          (lane & 3);
      const auto pair = [&](int j) {
        float2 x = none ? make_float2(0, 0)
                        : make_float2(o[4 * j + 2 * r] * weight, o[4 * j + 2 * r + 1] * weight);
        if (merged) {
          const float2 old = __ldcs(out_at + 4 * j);
          x = make_float2(fmaf(old.x, weight_before, x.x), fmaf(old.y, weight_before, x.y));
        }
        return x;
      };
      if (args.rounded.data != nullptr) {
        device::store_rounded<Element, kD>(
            args.rounded.row(batch, token, head),
            args.residual.data == nullptr ? nullptr : args.residual.row(batch, token, head), real,
            kD, true, lane, pair);
      } else if (real && (args.first != 0 || !none)) {
#pragma unroll
        for (int j = 0; j < kD / 8; ++j) __stcs(out_at + 4 * j, pair(j));
      }
      __syncwarp();  // the four lanes of the row have read it
      if (real && (lane & 3) == 0) *lse_at = lse;
    }
  }

  __device__ __forceinline__ void begin_rows(int row, int q_block) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int inside = 16 * warp + lane / 4 + 8 * r;
      const int token = q_block * 64 + inside;
      const bool real = token < args.num_queries;
      q_position[r] = real ? args.q_block_starts[q_block] + inside * args.position_stride : INT_MAX;
      q_document[r] =
          real && args.document_start != nullptr
              ? args.document_start[row / args.num_heads * args.document_stride_batch + token]
              : 0;
      row_max[r] = row_limit[r] = row_top[r] = -INFINITY;
      row_sum[r] = row_shift[r] = 0;
    }
  }

  __device__ __forceinline__ void run() {
    Stage next = find_any();  // brings an item
    while (static_cast<uint32_t>(next.start) != kNoRow) {
      const int row = next.start, q_block = static_cast<int>(next.bits_low);
      uint32_t q[kD / 16][4];
      load_queries(q, next.slot);
      release(next.slot);
      begin_rows(row, q_block);
      float o[kD / 2], s0[32], s1[32];
      uint32_t p[4][4];
#pragma unroll
      for (int i = 0; i < kD / 2; ++i) o[i] = 0;

      next = find_any();
      while ((next.flags & kEnd) == 0) {
        Stage current = next;
        uint32_t held = kNoSlot;  // the slot whose product is still being added
        wgmma_fence();
        issue_scores(s0, q, current.slot);
        next = find(current.index);
        wgmma_commit();  // an empty group in place of the product that later steps have in flight here
        // Each way out waits for itself: where registers in flight meet in one place, the assembler makes all products wait.
        for (;;) {
          if ((next.flags & kNeeded) == 0) {
            wgmma_wait<0>();
            pin(s0);
            pin(o);
            break;
          }
          step(s0, s1, o, p, q, held, current, next);
          if ((next.flags & kNeeded) == 0) {
            wgmma_wait<0>();
            pin(s1);
            pin(o);
#pragma unroll
            for (int i = 0; i < 32; ++i) s0[i] = s1[i];
            break;
          }
          step(s1, s0, o, p, q, held, current, next);
        }
        if (held != kNoSlot) release(held);
        float rescale[2];
        if (probabilities(s0, current, rescale)) rescale_output(o, rescale);
        round(p, s0);
        pin(o);
        wgmma_fence();
        issue_output(o, p, current.slot);
        wgmma_wait<0>();
        pin(o);
        release(current.slot);
        if (next.flags == 0) next = find_any();
      }
      store(o, row, q_block);
    }
  }
};

}  // namespace mtraining::kernels::sm90
