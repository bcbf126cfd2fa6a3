// A consumer warpgroup of the key-stationary backward: 64 keys against the stages of queries that its notes say it needs.
//
// In:   keys, values, stages of queries and dout, notes in shared memory. Out: dk, dv of its keys; score gradients in shared memory.
// Next: backward_query_gradients.cuh, which makes dq of them.
//
// Scores are kept transposed, S^T[key][query]: the probabilities and their gradients leave the accumulators as the left operands of
// dv += P^T dO and dk += dS^T Q. A group waits for nobody but the producer; stages that it does not need cost it a look at a note.
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
  const BackwardArgs& args;
  uint32_t base;
  int warp, lane;  // warp within the group
  CountedCursor<Shape::kStages> ring;
  CountedCursor<2>
      buffers;  // of score gradients: counts the stages that this group needed, over all items

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

  // At head_dim 64 there are registers for most of the item's keys and values: shared memory is what limits it.
  static constexpr bool kKeysInRegisters = kD == 64;
  static constexpr int kHeld = kKeysInRegisters ? 3 : 1;
  __device__ __forceinline__ void hold(uint32_t (&a)[kHeld][4], uint32_t tile) const {
    if constexpr (kKeysInRegisters) {
      const int row = 16 * warp + lane / 8 % 2 * 8 + lane % 8;
#pragma unroll
      for (int c = 1; c < 4; ++c) {
        const int chunk = c * 2 + lane / 16;
        ldmatrix_x4(tile + row * 128 + (chunk ^ row % 8) * 16, a[c - 1]);
      }
    }
  }

  /// d = a b^T over D, both [64][D]. The first product does not read d: else its old values would keep registers.
  __device__ __forceinline__ void issue_scores(float (&d)[32], uint32_t a,
                                               const uint32_t (&held)[kHeld][4], uint32_t b) const {
    const uint64_t left = matrix_descriptor<16, 1024>(a), right = matrix_descriptor<16, 1024>(b);
#pragma unroll
    for (int c = 0; c < kD / 16; ++c) {
      const int at = (c / 4 * 8192 + c % 4 * 32) / 16;
      if (c == 0) {
        wgmma_first<Element, 64, 0, 0>(d, left, right);
      } else if constexpr (kKeysInRegisters) {
        wgmma<Element, 64, 0>(d, held[c - 1], right + at, true);
      } else {
        wgmma_shared<Element, 64, 0, 0>(d, left + at, right + at, true);
      }
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
    const uint4 note = load_shared_v4(Shape::note(base, ring.slot()));
    const int32_t q_start = static_cast<int32_t>(note.y), q_block = static_cast<int32_t>(note.z);
    const int first = 16 * (warp & 1) + lane / 4;
    const uint32_t bits = static_cast<uint32_t>(
        load_shared_s32(Shape::note(base, ring.slot()) + 16 + kGroup * 8 + warp / 2 * 4));
    int32_t position[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      position[r] =
          load_shared_s32(Shape::positions(base, kGroup) + (16 * warp + lane / 4 + 8 * r) * 4);
      if ((bits >> (first + 8 * r) & 1) == 0) position[r] = INT_MAX;
    }
    if ((flags & kMaskEach) == 0) {  // whole keys
#pragma unroll
      for (int i = 0; i < 32; ++i)
        if (position[i / 2 % 2] == INT_MAX) s[i] = -INFINITY;
      return;
    }
    const bool documents = args.document_start != nullptr;
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

  /// Four pairs of this thread's 16 queries, from the first or second half of a stage's statistics.
  __device__ __forceinline__ void load_statistics(float2 (&of)[4], uint32_t statistics,
                                                  int half) const {
#pragma unroll
    for (int j = 0; j < 4; ++j)
      of[j] = load_shared_f2(statistics + (8 * (4 * half + j) + 2 * (lane & 3)) * 4);
  }

  __device__ __forceinline__ void probabilities(float (&s)[32], uint32_t statistics) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float2 lse[4];
      load_statistics(lse, statistics, half);
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        float& x = s[16 * half + i];
        x = exp2_approx(fmaf(x, args.scale_log2, i % 2 == 0 ? lse[i / 4].x : lse[i / 4].y));
      }
    }
  }

  // fp16 has too few exponents for small gradients times the scale: there the scale comes last.
  static constexpr bool kScaleLast = std::is_same_v<Element, __half>;
  __device__ __forceinline__ float early_scale() const { return kScaleLast ? 1.0f : args.scale; }
  __device__ __forceinline__ float late_scale() const { return kScaleLast ? args.scale : 1.0f; }

  /// Probabilities and their gradients, p (dp - delta), rounded: operands of the products. Times softmax_scale unless that comes last.
  __device__ __forceinline__ void score_gradients(const float (&dp)[32], const float (&p)[32],
                                                  uint32_t deltas, uint32_t (&rounded)[4][4],
                                                  uint32_t (&gradients)[4][4]) const {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float2 delta = load_shared_f2(deltas + (8 * (2 * c + j) + 2 * (lane & 3)) * 4);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int i = 8 * c + 4 * j + 2 * r;
          gradients[c][2 * j + r] =
              pack<Element>(p[i] * fmaf(dp[i], early_scale(), delta.x),
                            p[i + 1] * fmaf(dp[i + 1], early_scale(), delta.y));
          rounded[c][2 * j + r] = pack<Element>(p[i], p[i + 1]);
          asm volatile("" : "+r"(gradients[c][2 * j + r]), "+r"(rounded[c][2 * j + r]));
        }
      }
    }
  }

  /// The same for kMaskEach. Hidden pairs get 0 whatever dp holds. So do keys that have all of a row's weight to the rounding of lse:
  /// there dp - delta is 0 but for rounding, and a row that sees one key has no gradient. Such a row is in no other tile.
  __device__ __forceinline__ void masked_score_gradients(const float (&dp)[32],
                                                         const float (&p)[32], uint32_t statistics,
                                                         uint32_t (&rounded)[4][4],
                                                         uint32_t (&gradients)[4][4]) const {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const uint32_t at = statistics + (8 * (2 * c + j) + 2 * (lane & 3)) * 4;
        const float2 lse = load_shared_f2(at), delta = load_shared_f2(at + 256);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float gradient[2];
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int i = 8 * c + 4 * j + 2 * r + e;
            const float all = 1.0f - 1e-6f - 3e-7f * fabsf(e == 0 ? lse.x : lse.y);
            const float x = p[i] * fmaf(dp[i], early_scale(), e == 0 ? delta.x : delta.y);
            gradient[e] = p[i] > 0 && p[i] < all ? x : 0.0f;
          }
          gradients[c][2 * j + r] = pack<Element>(gradient[0], gradient[1]);
          rounded[c][2 * j + r] =
              pack<Element>(p[8 * c + 4 * j + 2 * r], p[8 * c + 4 * j + 2 * r + 1]);
          asm volatile("" : "+r"(gradients[c][2 * j + r]), "+r"(rounded[c][2 * j + r]));
        }
      }
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

  // ---- stages ----

  /// This group's flags of the ring's next stage, once it is there.
  __device__ __forceinline__ uint32_t look() const {
    mbarrier_wait(Shape::full(base, ring.slot()), ring.parity());
    const uint32_t flags = load_shared_s32(Shape::note(base, ring.slot()));
    return flags >> (kGroup * kGroupFlags) & ((1 << kGroupFlags) - 1);
  }

  /// Score gradients of a stage to the warpgroup that computes dq.
  __device__ __forceinline__ void leave_scores(const uint32_t (&gradients)[4][4]) {
    mbarrier_wait(Shape::scores_empty(base, buffers.slot(), kGroup), buffers.parity() ^ 1);
    store_scores(gradients, buffers.slot());
    fence_async_shared();
    arrive(Shape::scores_full(base, buffers.slot(), kGroup));
    buffers.advance();
  }

  /// Stages that this group needs, one after the other; ends before the first that it does not need, or behind the item's last: kEnd.
  __device__ __forceinline__ uint32_t work(float (&dk)[kD / 2], float (&dv)[kD / 2],
                                           const uint32_t (&k)[kHeld][4],
                                           const uint32_t (&v)[kHeld][4], uint32_t flags) {
    wgmma_fence();
    float s[32];
    issue_scores(s, Shape::keys(base, kGroup), k, Shape::queries(base, ring.slot()));
    wgmma_wait<0>();
    pin(s);
    for (;;) {  // nothing in flight; s holds scores
      const uint32_t slot = ring.slot();
      if ((flags & (kMaskBits | kMaskEach)) != 0) mask(s, flags);
      probabilities(s, Shape::statistics(base, slot));
      float dp[32];
      wgmma_fence();
      issue_scores(dp, Shape::values(base, kGroup), v, Shape::dout(base, slot));
      wgmma_wait<0>();
      pin(dp);
      uint32_t rounded[4][4], gradients[4][4];
      if ((flags & kMaskEach) != 0) {
        masked_score_gradients(dp, s, Shape::statistics(base, slot), rounded, gradients);
      } else {
        score_gradients(dp, s, Shape::statistics(base, slot) + 256, rounded, gradients);
      }
      wgmma_fence();
      issue_keys(dv, rounded, Shape::dout(base, slot));
      issue_keys(dk, gradients, Shape::queries(base, slot));
      if constexpr (kWithQueries) leave_scores(gradients);
      ring.advance();
      const uint32_t end = flags & kEnd;
      flags = end != 0 ? 0 : look();
      if constexpr (kWithQueries) {
        wgmma_wait<0>();
        pin(dk);
        pin(dv);
        arrive(Shape::empty(base, slot));
        if ((flags & kNeeded) == 0) return end;
        wgmma_fence();
        issue_scores(s, Shape::keys(base, kGroup), k, Shape::queries(base, ring.slot()));
      } else {
        if ((flags & kNeeded) == 0) {
          wgmma_wait<0>();
          pin(dk);
          pin(dv);
          arrive(Shape::empty(base, slot));
          return end;
        }
        wgmma_fence();
        issue_scores(s, Shape::keys(base, kGroup), k, Shape::queries(base, ring.slot()));
        wgmma_wait<1>();
        pin(dk);
        pin(dv);
        arrive(Shape::empty(base, slot));
      }
      wgmma_wait<0>();
      pin(s);
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
        } else {  // where the mode is deterministic: one addition per place and launch
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
      uint32_t k[kHeld][4], v[kHeld][4];
      hold(k, Shape::keys(base, kGroup));
      hold(v, Shape::values(base, kGroup));
      bool any = false;
      for (uint32_t end = 0; end == 0;) {
        const uint32_t flags = look();
        if ((flags & kNeeded) != 0) {
          any = true;
          end = work(dk, dv, k, v, flags);
        } else {
          end = flags & kEnd;
          arrive(Shape::empty(base, ring.slot()));
          ring.advance();
        }
      }
      const uint4 item = load_shared_v4(Shape::item(base));
      arrive(Shape::keys_empty(base));
      const bool whole =
          (item.x & 255) == kItemColumns && args.column_q_blocks >= args.num_q_blocks;
      if (any || whole) store(dk, dv, item, whole);
    }
  }
};

}  // namespace mtraining::kernels::sm90
