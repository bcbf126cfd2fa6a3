// A consumer warpgroup of the backward by query blocks: dq of 64 query rows from the stages that its notes say it needs.
//
// In:   queries, dout, statistics, stages, notes in shared memory. Out: dq. Next: query_kernel.cuh.
//
// The product dq += dS K of one stage runs beside the scores of the next. The sum goes through the lists in their order: nothing depends
// on what runs when.
#pragma once

#include <climits>
#include <type_traits>

#include "mtraining/kernels/device/rounded_rows.cuh"
#include "mtraining/kernels/sm90/backward_args.cuh"
#include "mtraining/kernels/sm90/forward_shape.cuh"
#include "mtraining/kernels/sm90/ptx.cuh"
#include "mtraining/kernels/sm90/query_mask.cuh"
#include "mtraining/kernels/sm90/wgmma_shared.cuh"

namespace mtraining::kernels::sm90 {

template <typename Element, int kD>
struct QueryConsumer {
  using Shape = ForwardShape<kD, true>;
  const QueryArgs& args;
  uint32_t base;
  int group, warp, lane;  // warp within the group
  RingCursor<Shape::kStages> ring;

  // of the item: two rows a thread, lane / 4 and 8 below
  int32_t q_position[2];
  int32_t q_document[2];
  float lse[2], delta[2];  // statistics

  __device__ __forceinline__ void arrive(uint32_t barrier) const {
    __syncwarp();
    if (lane < kArrivals) mbarrier_arrive(barrier);
  }
  __device__ __forceinline__ void release(uint32_t slot) const { arrive(Shape::empty(base, slot)); }

  /// As in the forward's consumer: the next stage that this group needs, or the end, no further than the ring reaches.
  __device__ __forceinline__ Stage find(uint32_t oldest_held) {
    while (ring.index - oldest_held < Shape::kStages) {
      mbarrier_wait(Shape::full(base, ring.slot), ring.parity);
      const uint4 note = load_shared_v4(Shape::note(base, ring.slot, group));
      const Stage stage{ring.index, ring.slot, note.x, static_cast<int32_t>(note.y),
                        note.z,     note.w};
      ring.advance();
      if ((stage.flags & kNeeded) != 0) return stage;
      release(stage.slot);
      if ((stage.flags & kEnd) != 0) return stage;
    }
    return {0, 0, 0, 0, 0, 0};
  }
  __device__ __forceinline__ Stage find_any() {
    Stage stage;
    do {
      stage = find(ring.index);
    } while (stage.flags == 0);
    return stage;
  }

  // At head_dim 64 the assembler (nvcc 13.0) gives registers of the loop-invariant queries to the product of dq, and the scores are
  // wrong [Sm90Backward.OtherTypesAndHeadSizes]: there they are read from shared memory.
  static constexpr bool kQueriesInRegisters = kD == 128;

  __device__ __forceinline__ void load_queries(uint32_t (&q)[kD / 16][4]) const {
    const int row = 16 * warp + lane / 8 % 2 * 8 + lane % 8;
    const uint32_t tile = Shape::queries(base, group) + row * 128;
#pragma unroll
    for (int c = 0; c < kD / 16; ++c) {
      const int chunk = c % 4 * 2 + lane / 16;
      ldmatrix_x4(tile + c / 4 * 8192 + (chunk ^ row % 8) * 16, q[c]);
    }
  }

  /// d = q K^T over D, q in registers.
  __device__ __forceinline__ void issue_scores(float (&d)[32], const uint32_t (&q)[kD / 16][4],
                                               uint32_t keys) const {
    const uint64_t right = matrix_descriptor<16, 1024>(keys);
#pragma unroll
    for (int c = 0; c < kD / 16; ++c)
      wgmma<Element, 64, 0>(d, q[c], right + (c / 4 * 8192 + c % 4 * 32) / 16, c > 0);
    wgmma_commit();
  }

  /// d = a b^T over D, both [64][D] in shared memory.
  __device__ __forceinline__ void issue_scores(float (&d)[32], uint32_t a, uint32_t b) const {
    const uint64_t left = matrix_descriptor<16, 1024>(a), right = matrix_descriptor<16, 1024>(b);
#pragma unroll
    for (int c = 0; c < kD / 16; ++c) {
      const int at = (c / 4 * 8192 + c % 4 * 32) / 16;
      wgmma_shared<Element, 64, 0, 0>(d, left + at, right + at, c > 0);
    }
    wgmma_commit();
  }

  static constexpr bool kScaleLast = std::is_same_v<Element, __half>;  // see KeyConsumer

  /// Scores and dp to rounded dS. Where compared, as in KeyConsumer, hidden pairs and keys that have all of a row's weight get 0.
  __device__ __forceinline__ void gradients(uint32_t (&ds)[4][4], const float (&p)[32],
                                            float (&dp)[32], bool compared) const {
    const float scale = kScaleLast ? 1.0f : args.scale;
#pragma unroll
    for (int i = 0; i < 32; ++i) dp[i] = p[i] * fmaf(dp[i], scale, delta[i / 2 % 2]);
    if (compared) {
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        const float all = 1.0f - 1e-6f - 3e-7f * fabsf(lse[i / 2 % 2]);
        if (!(p[i] > 0 && p[i] < all)) dp[i] = 0;
      }
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        ds[c][i] = pack<Element>(dp[8 * c + 2 * i], dp[8 * c + 2 * i + 1]);
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
      const uint32_t at = Shape::statistics(base, group) + inside * 4;
      lse[r] = real ? load_shared_f32(at) : -INFINITY;
      delta[r] = real ? load_shared_f32(at + 256) : 0;
    }
  }

  __device__ __forceinline__ void store(const float (&dq)[kD / 2], int row, int q_block) const {
    const int64_t batch = row / args.num_heads, head = row % args.num_heads;
    const float scale = kScaleLast ? args.scale : 1.0f;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int token = q_block * 64 + 16 * warp + lane / 4 + 8 * r;
      // Rows that see no key have no gradient, whatever their q and dout hold.
      const bool none = lse[r] == -INFINITY;
      if (args.rounded.data != nullptr) {
        device::store_rounded<Element, kD>(
            args.rounded.row(batch, token, head), nullptr, token < args.num_queries, kD, true, lane,
            [&](int j) {
              return none ? make_float2(0, 0)
                          : make_float2(dq[4 * j + 2 * r] * scale, dq[4 * j + 2 * r + 1] * scale);
            });
        continue;
      }
      if (token >= args.num_queries || none) continue;
      float* at = args.dq + batch * args.dq_stride_batch + token * args.dq_stride_token +
                  head * args.dq_stride_head + 2 * (lane & 3);
#pragma unroll
      for (int j = 0; j < kD / 8; ++j)
        reduce_add_f2(at + 8 * j, dq[4 * j + 2 * r] * scale, dq[4 * j + 2 * r + 1] * scale);
    }
  }

  /// Stages from `stage` on as long as they follow within reach. Returns what comes after: none within reach (flags 0), or the end.
  __device__ __forceinline__ Stage work(float (&dq)[kD / 2], const uint32_t (&q)[kD / 16][4],
                                        Stage stage) {
    uint32_t held = kNoSlot;  // the slot whose product is still being added
    for (;;) {
      float s[32], dp[32];
      wgmma_fence();
      if constexpr (kQueriesInRegisters) {
        issue_scores(s, q, Shape::keys(base, stage.slot));
      } else {
        issue_scores(s, Shape::queries(base, group), Shape::keys(base, stage.slot));
      }
      issue_scores(dp, Shape::dout(base, group), Shape::values(base, stage.slot));
      wgmma_wait<1>();
      pin(s);
      pin(dq);
      if (held != kNoSlot) release(held);
      const bool masked = (stage.flags & (kMaskBits | kMaskEach)) != 0;
      if (masked) {
        mask_scores(s, stage, Shape::positions(base, stage.slot), lane, q_position, q_document,
                    args.position_stride);
      }
#pragma unroll
      for (int i = 0; i < 32; ++i) s[i] = exp2_approx(fmaf(s[i], args.scale_log2, lse[i / 2 % 2]));
      wgmma_wait<0>();
      pin(dp);
      uint32_t ds[4][4];
      // A tile that shows two keys or more to every row is not compared: it holds no row that sees one key alone.
      const bool compared = (stage.flags & kMaskEach) != 0 ||
                            (masked && __popc(stage.bits_low) + __popc(stage.bits_high) < 2);
      gradients(ds, s, dp, compared);
      wgmma_fence();
      const uint64_t k = matrix_descriptor<8192, 1024>(Shape::keys(base, stage.slot));
#pragma unroll
      for (int c = 0; c < 4; ++c) wgmma<Element, kD, 1>(dq, ds[c], k + c * 2048 / 16, true);
      wgmma_commit();
      held = stage.slot;
      const Stage next = find(stage.index);
      if ((next.flags & kNeeded) == 0) {
        wgmma_wait<0>();
        pin(dq);
        release(held);
        return next;
      }
      stage = next;
    }
  }

  __device__ __forceinline__ void run() {
    for (uint32_t parity = 0;; parity ^= 1) {
      mbarrier_wait(Shape::q_full(base, group), parity);
      const uint4 item = load_shared_v4(Shape::item(base, group));
      if (item.x == kNoRow) return;
      const int row = static_cast<int>(item.x), q_block = static_cast<int>(item.y);
      uint32_t q[kD / 16][4];
      if constexpr (kQueriesInRegisters) load_queries(q);
      begin_rows(row, q_block);
      float dq[kD / 2];
#pragma unroll
      for (int i = 0; i < kD / 2; ++i) dq[i] = 0;
      Stage stage = find_any();
      while ((stage.flags & kEnd) == 0) {
        stage = work(dq, q, stage);
        if (stage.flags == 0) stage = find_any();
      }
      arrive(Shape::q_empty(base, group));
      store(dq, row, q_block);
    }
  }
};

}  // namespace mtraining::kernels::sm90
