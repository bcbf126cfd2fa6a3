// Scores of a warp's query rows against keys of a tile: which pairs count.
//
// In:   a stage of a QueryList. Out: -inf where a pair does not count. Next: forward_kernel.cuh, backward_queries_kernel.cuh.
#pragma once

#include <climits>

#include "mtraining/kernels/sm80/query_list.cuh"

namespace mtraining::kernels::sm80 {

/// s[2 kRows j + 2 r + e]: row first_row + lane / 4 + 8 r of the group's queries, key first_key + 8 j + 2 (lane % 4) + e of the tile.
template <int kRows, int kKeys, typename List>
__device__ __forceinline__ void mask_scores(float (&s)[kRows * kKeys / 4],
                                            const AttentionArgs& args, const List& list, int i,
                                            int group, int q_block, int first_row, int first_key,
                                            int lane) {
  constexpr int kElements = kRows * kKeys / 4;
  static_assert(kElements <= 32);
  const Stage stage = list.stage(i);
  const SourceArgs& source = args.sources[stage.info & 0xFF];
  const QueryBounds bounds = list.bounds(group);
  const int first = first_key + 2 * (lane % 4);
  const bool columns = (stage.info & kColumns) != 0;
  const uint64_t bits = columns ? list.bits(i, group) >> first : 0;
  if (columns && (stage.info & (kEach << group)) == 0) {
#pragma unroll
    for (int x = 0; x < kElements; ++x) {
      if ((bits >> (x / (2 * kRows) * 8 + x % 2) & 1) == 0) s[x] = -INFINITY;
    }
    return;
  }
  // Pair by pair, in a loop of its own: rare, and short code.
  int position[kRows], document[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int inside = first_row + lane / 4 + 8 * r;
    const int token = q_block * 64 + inside;
    position[r] = bounds.first + inside * args.position_stride;
    document[r] =
        args.document_start != nullptr && token < args.num_queries
            ? args.document_start[stage.row / args.num_heads * args.document_stride_batch + token]
            : 0;
  }
  const bool straddles = columns && bounds.first / 64 != bounds.last / 64;
  const int32_t* positions =
      source.column_positions + stage.row * source.column_capacity + stage.key;
  const int keys = source.num_keys - stage.key * 64;
  uint32_t hidden = 0;  // bit x: of s[x]
#pragma unroll 1
  for (int c = 0; c < kKeys / 4; ++c) {
    const int key = c / 2 * 8 + first + c % 2;
    const bool exists = columns ? (bits >> (key - first) & 1) != 0 : key < keys;
    int at = INT_MAX;
    if (exists) at = columns ? positions[key] : stage.start + key * args.position_stride;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (at > position[r] || at < document[r] ||
          (straddles && diagonal_chosen(args, stage.row, position[r], at)))
        hidden |= 1u << (c / 2 * 2 * kRows + 2 * r + c % 2);
    }
  }
#pragma unroll
  for (int x = 0; x < kElements; ++x)
    if ((hidden >> x & 1) != 0) s[x] = -INFINITY;
}

}  // namespace mtraining::kernels::sm80
