// A consumer warpgroup of the key-stationary backward: 64 keys against the stages of queries that its notes say it needs.
//
// In:   keys, values, stages of queries and dout, notes in shared memory. Out: dk, dv of its keys; its half of the columns of dq.
// Next: backward_kernel.cuh.
//
// Scores are kept transposed, S^T[key][query]: the probabilities and their gradients leave the accumulators as the left operands of
// dv += P^T dO and dk += dS^T Q. For dq = dS K, dS^T goes through shared memory, where the other group reads it too: each group
// computes half of D over the keys of both. That product is done one stage later, so that no group waits for the other.
#pragma once

#include <climits>

#include "mtraining/kernels/sm90/backward_args.cuh"
#include "mtraining/kernels/sm90/backward_shape.cuh"
#include "mtraining/kernels/sm90/wgmma_shared.cuh"

namespace mtraining::kernels::sm90 {

template <typename Element, int kD, bool kWithQueries>
struct KeyConsumer {
  using Shape = BackwardShape<kD, kWithQueries>;
  static constexpr int kHalf = kD / 2;  // columns of dq of one group
  const BackwardArgs& args;
  uint32_t base;
  int group, warp, lane;  // warp within the group
  RingCursor<Shape::kStages> ring;
  uint32_t step = 0;  // stages before this one, over all items: which buffer of score gradients

  // of the item: two keys a thread, lane / 4 and 8 below
  int32_t key_position[2];

  /// A stage whose part of dq is still to be computed.
  struct Due {
    uint32_t flags = 0;  // 0: none
    int32_t q_block, row;
  };

  __device__ __forceinline__ void arrive(uint32_t barrier) const {
    __syncwarp();
    if (lane < kArrivals) mbarrier_arrive(barrier);
  }

  // ---- scores ----

  /// d = a b^T over D, both [64][D].
  __device__ __forceinline__ void issue_scores(float (&d)[32], uint32_t a, uint32_t b) const {
    const uint64_t left = matrix_descriptor<16, 1024>(a), right = matrix_descriptor<16, 1024>(b);
#pragma unroll
    for (int c = 0; c < kD / 16; ++c) {
      const int at = (c / 4 * 8192 + c % 4 * 32) / 16;
      wgmma_shared<Element, 64, 0, 0>(d, left + at, right + at, c > 0);
    }
    wgmma_commit();
  }

  /// d += a b over the 64 queries of a stage; a in registers, b [64][D].
  __device__ __forceinline__ void issue_keys(float (&d)[kD / 2], const uint32_t (&a)[4][4],
                                             uint32_t b) const {
    const uint64_t right = matrix_descriptor<8192, 1024>(b);
#pragma unroll
    for (int c = 0; c < 4; ++c) wgmma<Element, kD, 1>(d, a[c], right + c * 2048 / 16, true);
    wgmma_commit();
  }

  __device__ __forceinline__ void mask(float (&s)[32], uint32_t flags, int32_t q_start,
                                       uint32_t bits_low, uint32_t bits_high, int q_block,
                                       int row) const {
    const int first = 16 * (warp & 1) + lane / 4;
    const uint32_t bits = warp < 2 ? bits_low : bits_high;
    int32_t position[2];
#pragma unroll
    for (int r = 0; r < 2; ++r)
      position[r] = (bits >> (first + 8 * r) & 1) != 0 ? key_position[r] : INT_MAX;
    const bool documents = (flags & kMaskEach) != 0 && args.document_start != nullptr;
    const int32_t* starts =
        args.document_start + row / args.num_heads * args.document_stride_batch + q_block * 64;
#pragma unroll
    for (int c = 0; c < 16; ++c) {
      const int j = c / 2, e = c % 2;
      const int query = 8 * j + 2 * (lane & 3) + e;
      const int32_t q_position = q_start + query * args.position_stride;
      const int32_t document =
          documents && q_block * 64 + query < args.num_queries ? starts[query] : 0;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (position[r] > q_position || position[r] < document) s[4 * j + 2 * r + e] = -INFINITY;
      }
    }
  }

  __device__ __forceinline__ void probabilities(float (&s)[32], uint32_t statistics) const {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 lse = load_shared_f2(statistics + (8 * j + 2 * (lane & 3)) * 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = s[4 * j + i];
        x = exp2_approx(fmaf(x, args.scale_log2, i % 2 == 0 ? lse.x : lse.y));
      }
    }
  }

  /// dp = p (dp - delta) softmax_scale.
  __device__ __forceinline__ void score_gradients(float (&dp)[32], const float (&p)[32],
                                                  uint32_t statistics) const {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 delta = load_shared_f2(statistics + (64 + 8 * j + 2 * (lane & 3)) * 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = dp[4 * j + i];
        x = p[4 * j + i] * fmaf(x, args.scale, i % 2 == 0 ? delta.x : delta.y);
      }
    }
  }

  /// The same where keys are hidden. Hidden pairs get 0 whatever dp holds. So do keys that have all of a row's weight to the
  /// rounding of lse: there dp - delta is 0 but for rounding, and a row that sees one key has no gradient.
  __device__ __forceinline__ void masked_score_gradients(float (&dp)[32], const float (&p)[32],
                                                         uint32_t statistics) const {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const uint32_t at = statistics + (8 * j + 2 * (lane & 3)) * 4;
      const float2 lse = load_shared_f2(at), delta = load_shared_f2(at + 256);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = dp[4 * j + i];
        const float all = 1.0f - 1e-6f - 3e-7f * fabsf(i % 2 == 0 ? lse.x : lse.y);
        const float p_here = p[4 * j + i];
        const float gradient = p_here * fmaf(x, args.scale, i % 2 == 0 ? delta.x : delta.y);
        x = p_here > 0 && p_here < all ? gradient : 0.0f;
      }
    }
  }

  __device__ __forceinline__ void round(uint32_t (&p)[4][4], const float (&s)[32]) const {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
#pragma unroll
      for (int i = 0; i < 4; ++i) p[c][i] = pack<Element>(s[8 * c + 2 * i], s[8 * c + 2 * i + 1]);
    }
  }

  /// dS^T as [64 keys][64 queries], 128-byte swizzle.
  __device__ __forceinline__ void store_scores(const uint32_t (&ds)[4][4], uint32_t buffer) const {
    const int key = 16 * warp + lane / 8 % 2 * 8 + lane % 8;
    const uint32_t tile = Shape::scores(base, buffer, group) + key * 128;
#pragma unroll
    for (int c = 0; c < 4; ++c) stmatrix_x4(tile + ((2 * c + lane / 16) ^ key % 8) * 16, ds[c]);
    fence_async_shared();
  }

  // ---- dq ----

  /// 64 keys of `keys_of` times their score gradients.
  __device__ __forceinline__ void issue_queries(float (&dq)[kHalf / 2], uint32_t buffer,
                                                uint32_t keys_of, bool accumulate) const {
    const uint64_t ds = matrix_descriptor<8192, 1024>(Shape::scores(base, buffer, keys_of));
    const uint64_t k =
        matrix_descriptor<8192, 1024>(Shape::keys(base, keys_of) + group * (kD == 128 ? 8192 : 64));
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      wgmma_shared<Element, kHalf, 1, 1>(dq, ds + c * 2048 / 16, k + c * 2048 / 16,
                                         accumulate || c > 0);
    }
  }

  /// Adds a group's half of dq of a query block; each warp its 16 rows.
  __device__ __forceinline__ void add_queries(const float (&dq)[kHalf / 2], const Due& due) const {
    const uint32_t part = Shape::part(base, group, warp);
    if (lane == 0) bulk_wait_read<0>();
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kHalf / 8; ++j) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = lane / 4 + 8 * r, chunk = 2 * (j % 4) + (lane & 3) / 2;
        store_shared_f2(part + j / 4 * 2048 + row * 128 + ((chunk ^ row % 8) * 16) + (lane & 1) * 8,
                        dq[4 * j + 2 * r], dq[4 * j + 2 * r + 1]);
      }
    }
    fence_async_shared();
    __syncwarp();
    if (lane == 0) {
      tensor_reduce_add_5d(&args.dq, part, 0, due.q_block * 64 + 16 * warp, group * (kD / 64),
                           due.row % args.num_heads, due.row / args.num_heads);
      bulk_commit();
    }
  }

  /// Waits for all products in flight, among them this group's half of the part of dq that is due; gives back `slot` and adds the part.
  template <int kKeys>
  __device__ __forceinline__ void finish_part(float (&dk)[kD / 2], float (&dv)[kD / 2],
                                              const Due& due, uint32_t slot) const {
    const uint32_t buffer = (step - 1) & 1;
    float dq[kHalf / 2];
    wgmma_fence();
    issue_queries(dq, buffer, kKeys == 2 || (due.flags & kNeeded) != 0 ? 0 : 1, false);
    if constexpr (kKeys == 2) issue_queries(dq, buffer, 1, true);
    wgmma_commit();
    wgmma_wait<0>();
    pin(dk);
    pin(dv);
    pin(dq);
    if (slot != kNoSlot) arrive(Shape::empty(base, slot));
    arrive(Shape::scores_empty(base, buffer));
    add_queries(dq, due);
  }

  __device__ __forceinline__ void finish(float (&dk)[kD / 2], float (&dv)[kD / 2], const Due& due,
                                         uint32_t slot) const {
    if (kWithQueries && due.flags != 0) {
      const uint32_t before = step - 1;
      mbarrier_wait(Shape::scores_full(base, before & 1), before >> 1 & 1);
      // Each way waits for itself: where registers in flight meet in one place, the assembler makes all products wait.
      if ((due.flags & due.flags >> kGroupFlags & kNeeded) != 0) {
        finish_part<2>(dk, dv, due, slot);
      } else {
        finish_part<1>(dk, dv, due, slot);
      }
    } else {
      wgmma_wait<0>();
      pin(dk);
      pin(dv);
      if (slot != kNoSlot) arrive(Shape::empty(base, slot));
    }
  }

  // ---- stages ----

  /// One stage: this group's keys against its queries, and the part of dq that the stage before left.
  __device__ __forceinline__ void stage(float (&dk)[kD / 2], float (&dv)[kD / 2], const uint4& note,
                                        Due& due, bool& any) {
    const uint32_t slot = ring.slot;
    const uint32_t flags = note.x >> (group * kGroupFlags) & ((1 << kGroupFlags) - 1);
    const int32_t q_start = static_cast<int32_t>(note.y), q_block = static_cast<int32_t>(note.z),
                  row = static_cast<int32_t>(note.w);
    const uint32_t buffer = step & 1;
    if ((flags & kNeeded) != 0) {
      any = true;
      const uint32_t statistics = Shape::statistics(base, slot);
      float s[32], dp[32];
      wgmma_fence();
      issue_scores(s, Shape::keys(base, group), Shape::queries(base, slot));
      issue_scores(dp, Shape::values(base, group), Shape::dout(base, slot));
      wgmma_wait<1>();
      pin(s);
      const bool masked = (flags & (kMaskBits | kMaskEach)) != 0;
      if (masked) {
        const uint4 bits = load_shared_v4(Shape::note(base, slot) + 16);
        mask(s, flags, q_start, group == 0 ? bits.x : bits.z, group == 0 ? bits.y : bits.w, q_block,
             row);
      }
      probabilities(s, statistics);
      wgmma_wait<0>();
      pin(dp);
      if (masked) {
        masked_score_gradients(dp, s, statistics);
      } else {
        score_gradients(dp, s, statistics);
      }
      uint32_t rounded[4][4], gradients[4][4];
      round(rounded, s);
      round(gradients, dp);
      pin(dv);
      wgmma_fence();
      issue_keys(dv, rounded, Shape::dout(base, slot));
      if constexpr (kWithQueries) {
        mbarrier_wait(Shape::scores_empty(base, buffer), (step >> 1 & 1) ^ 1);
        store_scores(gradients, buffer);
        arrive(Shape::scores_full(base, buffer));
      }
      pin(dk);
      wgmma_fence();
      issue_keys(dk, gradients, Shape::queries(base, slot));
      finish(dk, dv, due, slot);
    } else {
      if constexpr (kWithQueries) {
        mbarrier_wait(Shape::scores_empty(base, buffer), (step >> 1 & 1) ^ 1);
        arrive(Shape::scores_full(base, buffer));
      }
      finish(dk, dv, due, slot);
    }
    if constexpr (kWithQueries) {
      due = {note.x, q_block, row};
      ++step;
    }
  }

  // ---- items ----

  __device__ __forceinline__ void store(const float (&dk)[kD / 2], const float (&dv)[kD / 2],
                                        const uint4& item) const {
    const int limit = static_cast<int>(item.w);
    const int source = static_cast<int>(item.x >> 8);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int key = 64 * group + 16 * warp + lane / 4 + 8 * r;
      if (key >= limit) continue;
      const int64_t token = static_cast<int64_t>(item.z) + key;
      if ((item.x & 255) == kItemColumns) {
        const int64_t at = (static_cast<int64_t>(item.y) * args.gathered_rows +
                            args.sources[source].gathered_begin + token) *
                               kD +
                           2 * (lane & 3);
#pragma unroll
        for (int j = 0; j < kD / 8; ++j) {
          *reinterpret_cast<float2*>(args.gathered_dk + at + 8 * j) =
              make_float2(dk[4 * j + 2 * r], dk[4 * j + 2 * r + 1]);
          *reinterpret_cast<float2*>(args.gathered_dv + at + 8 * j) =
              make_float2(dv[4 * j + 2 * r], dv[4 * j + 2 * r + 1]);
        }
      } else {
        // One addition per place and launch: their order does not matter.
        const GradientArgs& to = args.gradients[source];
        const int64_t batch = static_cast<int>(item.y) / args.num_kv_heads,
                      head = static_cast<int>(item.y) % args.num_kv_heads;
        float* dk_at = to.dk + batch * to.dk_stride_batch + token * to.dk_stride_token +
                       head * to.dk_stride_head + 2 * (lane & 3);
        float* dv_at = to.dv + batch * to.dv_stride_batch + token * to.dv_stride_token +
                       head * to.dv_stride_head + 2 * (lane & 3);
#pragma unroll
        for (int j = 0; j < kD / 8; ++j) {
          reduce_add_f2(dk_at + 8 * j, dk[4 * j + 2 * r], dk[4 * j + 2 * r + 1]);
          reduce_add_f2(dv_at + 8 * j, dv[4 * j + 2 * r], dv[4 * j + 2 * r + 1]);
        }
      }
    }
  }

  __device__ __forceinline__ void run() {
    for (uint32_t parity = 0;; parity ^= 1) {
      mbarrier_wait(Shape::keys_full(base), parity);
      const uint4 item = load_shared_v4(Shape::item(base));
      if ((item.x & 255) == kItemEnd) break;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        key_position[r] =
            load_shared_s32(Shape::positions(base, group) + (16 * warp + lane / 4 + 8 * r) * 4);
      }
      float dk[kD / 2], dv[kD / 2];
#pragma unroll
      for (int i = 0; i < kD / 2; ++i) dk[i] = dv[i] = 0;
      Due due;
      bool any = false;
      for (;;) {
        mbarrier_wait(Shape::full(base, ring.slot), ring.parity);
        const uint4 note = load_shared_v4(Shape::note(base, ring.slot));
        if ((note.x & kEnd) != 0) break;
        stage(dk, dv, note, due, any);
        ring.advance();
      }
      arrive(Shape::empty(base, ring.slot));
      ring.advance();
      if constexpr (kWithQueries) {
        if (due.flags != 0) finish(dk, dv, due, kNoSlot);
      }
      arrive(Shape::keys_empty(base));
      if (any || (item.x & 255) == kItemColumns) store(dk, dv, item);
    }
    if (lane == 0) bulk_wait();
  }
};

}  // namespace mtraining::kernels::sm90
