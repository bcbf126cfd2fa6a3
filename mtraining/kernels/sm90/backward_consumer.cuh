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
#include <type_traits>

#include "mtraining/kernels/sm90/backward_args.cuh"
#include "mtraining/kernels/sm90/backward_shape.cuh"
#include "mtraining/kernels/sm90/wgmma_shared.cuh"

namespace mtraining::kernels::sm90 {

/// kGroup is a template parameter so that the operands' addresses are uniform and cost no registers.
template <typename Element, int kD, bool kWithQueries, int kGroup>
struct KeyConsumer {
  using Shape = BackwardShape<kD, kWithQueries>;
  static constexpr int kHalf = kD / 2;  // columns of dq of one group
  const BackwardArgs& args;
  uint32_t base;
  int warp, lane;  // warp within the group
  RingCursor<Shape::kStages> ring;
  uint32_t step = 0;  // stages before this one, over all items: which buffer of score gradients

  /// A stage whose part of dq is still to be computed.
  struct Due {
    int32_t q_block = 0, row = -1;  // row: head and batch << 16; -1: none
  };
  Due stashed;  // whose part of dq is in shared memory

  /// Where it is needed: hoisted out of the loop, such addresses would take the registers.
  static __device__ __forceinline__ uint32_t exclusive_or(uint32_t a, uint32_t b) {
    uint32_t c;
    asm volatile("xor.b32 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
  }

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

  __device__ __forceinline__ void mask(float (&s)[32], uint32_t flags) const {
    const uint4 note = load_shared_v4(Shape::note(base, ring.slot));
    const int32_t q_start = static_cast<int32_t>(note.y), q_block = static_cast<int32_t>(note.z);
    const int first = 16 * (warp & 1) + lane / 4;
    const uint32_t bits = static_cast<uint32_t>(
        load_shared_s32(Shape::note(base, ring.slot) + 16 + kGroup * 8 + warp / 2 * 4));
    int32_t position[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      position[r] =
          load_shared_s32(Shape::positions(base, kGroup) + (16 * warp + lane / 4 + 8 * r) * 4);
      if ((bits >> (first + 8 * r) & 1) == 0) position[r] = INT_MAX;
    }
    const bool documents = (flags & kMaskEach) != 0 && args.document_start != nullptr;
    const int32_t* starts = args.document_start +
                            static_cast<int32_t>(note.w >> 16) * args.document_stride_batch +
                            q_block * 64;
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

  /// Of this thread's 16 queries: the first or second half of a stage's statistics.
  __device__ __forceinline__ void load_statistics(float2 (&of)[8], uint32_t statistics) const {
#pragma unroll
    for (int j = 0; j < 8; ++j) of[j] = load_shared_f2(statistics + (8 * j + 2 * (lane & 3)) * 4);
  }

  __device__ __forceinline__ void probabilities(float (&s)[32], const float2 (&lse)[8]) const {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = s[4 * j + i];
        x = exp2_approx(fmaf(x, args.scale_log2, i % 2 == 0 ? lse[j].x : lse[j].y));
      }
    }
  }

  // fp16 has too few exponents for small gradients times the scale: there the scale comes last.
  static constexpr bool kScaleLast = std::is_same_v<Element, __half>;
  __device__ __forceinline__ float early_scale() const { return kScaleLast ? 1.0f : args.scale; }
  __device__ __forceinline__ float late_scale() const { return kScaleLast ? args.scale : 1.0f; }

  /// dp = p (dp - delta), times softmax_scale unless that comes last.
  __device__ __forceinline__ void score_gradients(float (&dp)[32], const float (&p)[32],
                                                  const float2 (&delta)[8]) const {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = dp[4 * j + i];
        x = p[4 * j + i] * fmaf(x, early_scale(), i % 2 == 0 ? delta[j].x : delta[j].y);
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
        const float gradient = p_here * fmaf(x, early_scale(), i % 2 == 0 ? delta.x : delta.y);
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
    const uint32_t at =
        Shape::scores(base, buffer, kGroup) + key * 128 + (lane / 16 ^ key % 8) * 16;
#pragma unroll
    for (int c = 0; c < 4; ++c) stmatrix_x4(exclusive_or(at, c * 32), ds[c]);
  }

  __device__ __forceinline__ void clear_scores(uint32_t buffer) const {
    const uint32_t at = Shape::scores(base, buffer, kGroup) + (32 * warp + lane) * 16;
#pragma unroll
    for (int i = 0; i < Shape::kScoreBytes / 2048; ++i) store_shared_v4(at + i * 2048, 0, 0, 0, 0);
  }

  // ---- dq ----

  /// Issues this group's half of the part of dq that the stage before left in `buffer`, over the keys of both groups.
  __device__ __forceinline__ void issue_queries(float (&dq)[kHalf / 2], uint32_t buffer) const {
#pragma unroll
    for (int keys_of = 0; keys_of < 2; ++keys_of) {
      const uint64_t ds = matrix_descriptor<8192, 1024>(Shape::scores(base, buffer, keys_of));
      const uint64_t k = matrix_descriptor<8192, 1024>(Shape::keys(base, keys_of) +
                                                       kGroup * (kD == 128 ? 8192 : 64));
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        wgmma_shared<Element, kHalf, 1, 1>(dq, ds + c * 2048 / 16, k + c * 2048 / 16,
                                           keys_of > 0 || c > 0);
      }
    }
    wgmma_commit();
  }

  /// Gives back the buffer of the stage before and leaves this group's half of its part of dq in shared memory, each warp its 16
  /// rows; send() adds it once the writes are ordered before the copy.
  __device__ __forceinline__ void stash(const float (&dq)[kHalf / 2], const Due& due) {
    if (due.row < 0) return;
    arrive(Shape::scores_empty(base, (step - 1) & 1));
    if (lane == 0) bulk_wait_read<0>();
    __syncwarp();
    // Row lane / 4 (and 8 below), chunk 2 (j % 4) + (lane & 3) / 2 of 16 bytes, swizzled by the row.
    const uint32_t at = Shape::part(base, kGroup, warp) + lane / 4 * 128 +
                        (((lane & 3) / 2) ^ lane / 4) * 16 + (lane & 1) * 8;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t chunk = exclusive_or(at, j * 32);
#pragma unroll
      for (int i = j; i < kHalf / 8; i += 4) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          store_shared_f2(chunk + i / 4 * 2048 + r * 1024, dq[4 * i + 2 * r] * late_scale(),
                          dq[4 * i + 2 * r + 1] * late_scale());
        }
      }
    }
    stashed = due;
  }

  /// After fence_async_shared() of all lanes and __syncwarp().
  __device__ __forceinline__ void send() {
    if (stashed.row >= 0 && lane == 0) {
      tensor_reduce_add_5d(&args.dq, Shape::part(base, kGroup, warp), 0,
                           stashed.q_block * 64 + 16 * warp, kGroup * (kD / 64),
                           stashed.row & 0xffff, stashed.row >> 16);
      bulk_commit();
    }
    stashed.row = -1;
  }

  /// Waits until both groups have written the score gradients of the stage before.
  __device__ __forceinline__ void wait_for_scores(const Due& due) const {
    const uint32_t before = step - 1;
    if (due.row >= 0) mbarrier_wait(Shape::scores_full(base, before & 1), before >> 1 & 1);
  }

  /// The part of dq that is due, with nothing else in flight.
  __device__ __forceinline__ void finish(const Due& due) {
    if (due.row < 0) return;
    float dq[kHalf / 2];
    wait_for_scores(due);
    wgmma_fence();
    issue_queries(dq, (step - 1) & 1);
    wgmma_wait<0>();
    pin(dq);
    stash(dq, due);
    fence_async_shared();
    __syncwarp();
    send();
  }

  // ---- stages ----

  /// This group's flags of the ring's next stage, once it is there.
  __device__ __forceinline__ uint32_t look() const {
    mbarrier_wait(Shape::full(base, ring.slot), ring.parity);
    const uint32_t flags = load_shared_s32(Shape::note(base, ring.slot));
    return (flags & kEnd) != 0 ? kEnd : flags >> (kGroup * kGroupFlags) & ((1 << kGroupFlags) - 1);
  }
  /// Gives the ring's next stage back; its part of dq is due.
  __device__ __forceinline__ Due give_back() {
    const uint4 note = load_shared_v4(Shape::note(base, ring.slot));
    arrive(Shape::empty(base, ring.slot));
    ring.advance();
    return {static_cast<int32_t>(note.z), static_cast<int32_t>(note.w)};
  }

  /// Passes stages that this group does not need; only its half of dq is computed. Stops at one that it needs, or the end.
  __device__ __forceinline__ uint32_t pass(Due& due) {
    uint32_t flags = look();
    while ((flags & (kNeeded | kEnd)) == 0) {
      if constexpr (kWithQueries) {
        mbarrier_wait(Shape::scores_empty(base, step & 1), (step >> 1 & 1) ^ 1);
        clear_scores(step & 1);
        fence_async_shared();
        arrive(Shape::scores_full(base, step & 1));
        send();
        finish(due);
        ++step;
      }
      due = give_back();
      flags = look();
    }
    return flags;
  }

  /// Stages that this group needs, one after the other; ends before the first that it does not need, or the end.
  __device__ __forceinline__ void work(float (&dk)[kD / 2], float (&dv)[kD / 2], uint32_t flags,
                                       Due& due) {
    float s[32];
    wgmma_fence();
    issue_scores(s, Shape::keys(base, kGroup), Shape::queries(base, ring.slot));
    for (;;) {  // scores on their way into s
      const uint32_t statistics = Shape::statistics(base, ring.slot);
      float dp[32], dq[kHalf / 2];
      float2 lse[8], delta[8];
      load_statistics(lse, statistics);
      wgmma_fence();
      issue_scores(dp, Shape::values(base, kGroup), Shape::dout(base, ring.slot));
      wgmma_wait<1>();
      pin(s);
      const bool masked = (flags & (kMaskBits | kMaskEach)) != 0;
      if (masked) mask(s, flags);
      probabilities(s, lse);
      wgmma_wait<0>();
      pin(dp);
      if (masked) {
        masked_score_gradients(dp, s, statistics);
      } else {
        load_statistics(delta, statistics + 256);
        score_gradients(dp, s, delta);
      }
      uint32_t rounded[4][4], gradients[4][4];
      round(rounded, s);
      round(gradients, dp);
      wgmma_fence();
      issue_keys(dv, rounded, Shape::dout(base, ring.slot));
      if constexpr (kWithQueries) {
        mbarrier_wait(Shape::scores_empty(base, step & 1), (step >> 1 & 1) ^ 1);
        store_scores(gradients, step & 1);
      }
      wgmma_fence();
      issue_keys(dk, gradients, Shape::queries(base, ring.slot));
      if constexpr (kWithQueries) {
        fence_async_shared();
        arrive(Shape::scores_full(base, step & 1));
        send();
        // Where nothing is due, a product of whatever is there, added to nothing: the products in flight are then always the same.
        wait_for_scores(due);
        wgmma_fence();
        issue_queries(dq, (step - 1) & 1);
        wgmma_wait<1>();
      } else {
        wgmma_wait<0>();
      }
      pin(dk);
      pin(dv);
      const Due left = give_back();
      flags = look();
      if ((flags & kNeeded) == 0) {
        if constexpr (kWithQueries) {
          wgmma_wait<0>();
          pin(dq);
          stash(dq, due);
          ++step;
        }
        due = left;
        return;
      }
      wgmma_fence();
      issue_scores(s, Shape::keys(base, kGroup), Shape::queries(base, ring.slot));
      if constexpr (kWithQueries) {
        wgmma_wait<0>();
        pin(dq);
        pin(s);
        stash(dq, due);
        ++step;
      }
      due = left;
    }
  }

  // ---- items ----

  /// whole: all there is of these gradients, to memory that holds nothing yet.
  __device__ __forceinline__ void store(const float (&dk)[kD / 2], const float (&dv)[kD / 2],
                                        const uint4& item, bool whole) const {
    const int limit = static_cast<int>(item.w);
    const int source = static_cast<int>(item.x >> 8);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int key = 64 * kGroup + 16 * warp + lane / 4 + 8 * r;
      if (key >= limit) continue;
      const int64_t token = static_cast<int64_t>(item.z) + key;
      float *dk_at, *dv_at;
      if ((item.x & 255) == kItemColumns) {
        const int64_t at = (static_cast<int64_t>(item.y) * args.gathered_rows +
                            args.sources[source].gathered_begin + token) *
                           kD;
        dk_at = args.gathered_dk + at;
        dv_at = args.gathered_dv + at;
      } else {
        const GradientArgs& to = args.gradients[source];
        const int64_t batch = static_cast<int>(item.y) / args.num_kv_heads,
                      head = static_cast<int>(item.y) % args.num_kv_heads;
        dk_at = to.dk + batch * to.dk_stride_batch + token * to.dk_stride_token +
                head * to.dk_stride_head;
        dv_at = to.dv + batch * to.dv_stride_batch + token * to.dv_stride_token +
                head * to.dv_stride_head;
      }
      dk_at += 2 * (lane & 3);
      dv_at += 2 * (lane & 3);
      const bool whole =
          (item.x & 255) == kItemColumns && args.column_q_blocks >= args.num_q_blocks;
#pragma unroll
      for (int j = 0; j < kD / 8; ++j) {
        const float2 k = make_float2(dk[4 * j + 2 * r] * late_scale(),
                                     dk[4 * j + 2 * r + 1] * late_scale()),
                     v = make_float2(dv[4 * j + 2 * r], dv[4 * j + 2 * r + 1]);
        if (whole) {
          *reinterpret_cast<float2*>(dk_at + 8 * j) = k;
          *reinterpret_cast<float2*>(dv_at + 8 * j) = v;
        } else {  // blocks: one addition per place and launch, in whatever order
          reduce_add_f2(dk_at + 8 * j, k.x, k.y);
          reduce_add_f2(dv_at + 8 * j, v.x, v.y);
        }
      }
    }
  }

  __device__ __forceinline__ void run() {
    for (uint32_t parity = 0;; parity ^= 1) {
      mbarrier_wait(Shape::keys_full(base), parity);
      if (load_shared_s32(Shape::item(base)) == kItemEnd) break;
      float dk[kD / 2], dv[kD / 2];
#pragma unroll
      for (int i = 0; i < kD / 2; ++i) dk[i] = dv[i] = 0;
      Due due;
      bool any = false;
      for (uint32_t flags = pass(due); (flags & kEnd) == 0; flags = pass(due)) {
        any = true;
        work(dk, dv, flags, due);
      }
      arrive(Shape::empty(base, ring.slot));
      ring.advance();
      if constexpr (kWithQueries) {
        fence_async_shared();
        __syncwarp();
        send();
        finish(due);
      }
      const uint4 item = load_shared_v4(Shape::item(base));
      arrive(Shape::keys_empty(base));
      const bool whole =
          (item.x & 255) == kItemColumns && args.column_q_blocks >= args.num_q_blocks;
      if (any || whole) store(dk, dv, item, whole);
    }
    // Shared memory must outlive the copies that read it.
    if (kWithQueries && lane == 0) bulk_wait();
  }
};

}  // namespace mtraining::kernels::sm90
