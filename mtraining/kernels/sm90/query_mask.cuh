// The mask of a tile of 64 queries and 64 keys whose rows are queries.
//
// In:   scores in registers, a stage's note. Out: hidden pairs at -inf. Next: forward_consumer.cuh, query_consumer.cuh.
#pragma once

#include <cmath>
#include <cstdint>

#include "mtraining/kernels/sm90/forward_shape.cuh"
#include "mtraining/kernels/sm90/ptx.cuh"

namespace mtraining::kernels::sm90 {

/// A stage as one group sees it. flags 0: none within reach.
struct Stage {
  uint32_t index, slot, flags;
  int32_t start;
  uint32_t bits_low, bits_high;
};

/// Hidden pairs of a tile of scores to -inf. lane: its columns are 8 j + 2 (lane & 3) + {0, 1}; its two rows are at q_position and belong
/// to documents that begin at q_document. list: the stage's key positions where it has columns.
__device__ __forceinline__ void mask_scores(float (&s)[32], const Stage& stage, uint32_t list,
                                            int lane, const int32_t (&q_position)[2],
                                            const int32_t (&q_document)[2],
                                            int32_t position_stride) {
  const int first = 2 * (lane & 3);
  const uint32_t low = stage.bits_low >> first, high = stage.bits_high >> first;
  if ((stage.flags & kMaskEach) == 0) {
#pragma unroll
    for (int c = 0; c < 16; ++c) {
      const int j = c / 2, e = c % 2;
      if (((j < 4 ? low : high) >> (8 * (j % 4) + e) & 1) == 0) {
        s[4 * j + e] = -INFINITY;
        s[4 * j + 2 + e] = -INFINITY;
      }
    }
    return;
  }
  // Products with the stride are cheap here and would take registers of every other path if they were kept.
  asm volatile("" : "+r"(position_stride));
  const int32_t start = stage.start + first * position_stride;
#pragma unroll
  for (int c = 0; c < 16; ++c) {
    const int j = c / 2, e = c % 2;
    const bool counts = ((j < 4 ? low : high) >> (8 * (j % 4) + e) & 1) != 0;
    const int position = (stage.flags & kColumns) != 0
                             ? load_shared_s32(list + (8 * j + first + e) * 4)
                             : start + (8 * j + e) * position_stride;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (!counts || position > q_position[r] || position < q_document[r])
        s[4 * j + 2 * r + e] = -INFINITY;
    }
  }
}

}  // namespace mtraining::kernels::sm90
