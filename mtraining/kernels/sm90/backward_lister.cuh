// The lister warp of the key-stationary backward: takes items (two key blocks of a kv head and some of its query heads, or 128 columns
// of a head) from the queue and walks the query blocks that list them, so that a query block that both need becomes one stage.
//
// In:   BackwardArgs. Out: entries (items, then their stages) in a ring in shared memory. Next: backward_producer.cuh, which loads them.
//
// A warp of its own, so that the latencies of lists, which follow each other, hide behind the stages listed before, over the ends of
// heads and items. An entry is held back until the next is known: an item's last stage says that it is the last.
#pragma once

#include <climits>

#include "mtraining/kernels/sm90/backward_args.cuh"
#include "mtraining/kernels/sm90/backward_shape.cuh"
#include "mtraining/kernels/sm90/ptx.cuh"

namespace mtraining::kernels::sm90 {

template <int kD, bool kWithQueries>
struct KeyLister {
  using Shape = BackwardShape<kD, kWithQueries>;
  const BackwardArgs& args;
  uint32_t base;
  int lane;
  RingCursor<Shape::kListed> ring;
  bool held = false;  // the entry at the ring's cursor is written and not handed over

  // of the item
  uint32_t kind = kItemBlocks;
  int source = 0, unit = 0;  // unit: row, or batch * num_kv_heads + kv head
  int first = 0;             // key row or column
  int keys = 0;              // that exist from there on
  int first_q_block = 0;     // of columns
  int first_head = 0;        // of those that share the kv head
  bool item_due = false;     // not listed yet: it has no stage so far

  // ---- entries ----

  __device__ __forceinline__ void hand_over() {
    __syncwarp();
    if (lane < kArrivals) mbarrier_arrive(Shape::listed(base, ring.slot));
    ring.advance();
    held = false;
  }
  __device__ __forceinline__ void append(uint32_t x, uint32_t y, uint32_t z, uint32_t w,
                                         uint64_t bits_0, uint64_t bits_1) {
    if (held) hand_over();
    mbarrier_wait(Shape::taken(base, ring.slot), ring.parity ^ 1);
    if (lane == 0) {
      const uint32_t entry = Shape::entry(base, ring.slot);
      store_shared_v4(entry, x, y, z, w);
      store_shared_v4(entry + 16, static_cast<uint32_t>(bits_0),
                      static_cast<uint32_t>(bits_0 >> 32), static_cast<uint32_t>(bits_1),
                      static_cast<uint32_t>(bits_1 >> 32));
    }
    held = true;
  }
  __device__ __forceinline__ void append_item() {
    item_due = false;
    append(kItemEntry | kind | static_cast<uint32_t>(source) << 8, unit, first, keys, 0, 0);
  }
  /// 64 queries of a row. flags: of both groups.
  __device__ __forceinline__ void append_stage(int row, int q_block, int32_t q_start,
                                               uint32_t flags, uint64_t bits_0, uint64_t bits_1) {
    if (item_due) append_item();
    append(flags, q_start, q_block, row % args.num_heads | row / args.num_heads << 16, bits_0,
           bits_1);
  }
  __device__ __forceinline__ void end_item() {
    constexpr uint32_t kEnds = kEnd | kEnd << kGroupFlags;
    if (item_due) {
      // Where sums are stored, not added, those of no stage are stored too.
      if (kind == kItemBlocks || args.column_q_blocks < args.num_q_blocks) return;
      append_item();
      append(kEnds, 0, 0, 0, 0, 0);
    } else if (lane == 0) {
      const uint32_t entry = Shape::entry(base, ring.slot);
      store_shared_s32(entry, static_cast<int32_t>(load_shared_s32(entry) | kEnds));
    }
    hand_over();
  }

  // ---- key blocks ----

  /// The query blocks of one head that list one key block, ascending, 32 at a time, one a lane.
  struct Window {
    int32_t block;            // query block
    int32_t start, document;  // of it: x and w of its bounds
    uint32_t pending;         // lanes not taken yet
    int32_t next;
  };

  /// Both windows at once: their latencies overlap.
  __device__ __forceinline__ void refill(Window (&windows)[2], const SourceArgs& from, int row,
                                         const int (&total)[2], const int64_t (&csr_begin)[2],
                                         const int (&inside)[2], const int32_t (&start)[2],
                                         const int32_t (&last)[2]) const {
    for (;;) {
      bool due[2];
      int32_t block[2];
#pragma unroll
      for (int g = 0; g < 2; ++g) due[g] = windows[g].pending == 0 && windows[g].next < total[g];
      if (!due[0] && !due[1]) return;
      if (from.kind == BlockListKind::kEntries) {
        Entry entry[2];
#pragma unroll
        for (int g = 0; g < 2; ++g) {
          const int i = windows[g].next + lane;
          if (due[g] && i < total[g]) entry[g] = from.entries[row * from.entry_capacity + i];
        }
        const int m = from.blocks_per_stripe;
#pragma unroll
        for (int g = 0; g < 2; ++g) {
          const int at = inside[g] + entry[g].delta;
          block[g] = first / 64 + g + entry[g].lambda * m + entry[g].delta;
          if (!due[g] || windows[g].next + lane >= total[g] || at < 0 || at >= m ||
              block[g] >= args.num_q_blocks)
            block[g] = -1;
        }
      } else {
#pragma unroll
        for (int g = 0; g < 2; ++g) {
          const int i = windows[g].next + lane;
          block[g] = due[g] && i < total[g] ? from.query_blocks[csr_begin[g] + i] : -1;
        }
      }
      int4 bounds[2];
#pragma unroll
      for (int g = 0; g < 2; ++g) {
        bounds[g] = make_int4(0, -1, 0, 0);
        if (block[g] >= 0) {
          bounds[g] = args.query_bounds[static_cast<int64_t>(row) * args.num_q_blocks + block[g]];
        }
      }
#pragma unroll
      for (int g = 0; g < 2; ++g) {
        const uint32_t found =
            __ballot_sync(~0u, start[g] <= bounds[g].y && last[g] >= bounds[g].z && block[g] >= 0);
        if (!due[g]) continue;
        windows[g] = {block[g], bounds[g].x, bounds[g].w, found, windows[g].next + 32};
      }
    }
  }

  __device__ __forceinline__ void walk_blocks() {
    const SourceArgs& from = args.sources[source];
    const int batch = unit / args.num_kv_heads, kv_head = unit % args.num_kv_heads;
    const int groups = keys > 64 ? 2 : 1;
    int32_t start[2], last[2];
    int inside[2];
    uint64_t bits[2];
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      const int here = min(64, keys - 64 * g);
      start[g] = g < groups ? from.block_starts[first / 64 + g] : INT_MAX;
      last[g] = g < groups ? start[g] + (here - 1) * args.position_stride : -1;
      bits[g] = here >= 64 ? ~uint64_t{0} : here > 0 ? (uint64_t{1} << here) - 1 : 0;
      inside[g] =
          from.kind == BlockListKind::kEntries ? (first / 64 + g) % from.blocks_per_stripe : 0;
    }
    const int end = min(first_head + args.heads_per_item, args.heads_per_kv_head);
    for (int h = first_head; h < end; ++h) {
      const int row = batch * args.num_heads + kv_head * args.heads_per_kv_head + h;
      Window windows[2];
      int total[2] = {0, 0};
      int64_t csr_begin[2] = {0, 0};
      if (from.kind == BlockListKind::kEntries) {
        total[0] = from.num_entries[row];
        total[1] = groups > 1 ? total[0] : 0;
      } else {
        const int64_t* begin =
            from.key_row_begin + static_cast<int64_t>(row) * (from.num_blocks + 1) + first / 64;
#pragma unroll
        for (int g = 0; g < 2; ++g) {
          if (g >= groups) continue;
          csr_begin[g] = begin[g];
          total[g] = static_cast<int>(begin[g + 1] - begin[g]);
        }
      }
#pragma unroll
      for (int g = 0; g < 2; ++g) windows[g] = {0, 0, 0, 0, 0};
      for (;;) {
        refill(windows, from, row, total, csr_begin, inside, start, last);
        int block = INT_MAX, own[2];
#pragma unroll
        for (int g = 0; g < 2; ++g) {
          own[g] = __shfl_sync(~0u, windows[g].block, (__ffs(windows[g].pending) - 1) & 31);
          if (windows[g].pending == 0) own[g] = INT_MAX;
          block = min(block, own[g]);
        }
        if (block == INT_MAX) break;
        uint32_t flags = 0;
        int32_t q_start = 0;
#pragma unroll
        for (int g = 0; g < 2; ++g) {
          const int from_lane = (__ffs(windows[g].pending) - 1) & 31;
          const int32_t its_start = __shfl_sync(~0u, windows[g].start, from_lane),
                        its_document = __shfl_sync(~0u, windows[g].document, from_lane);
          if (own[g] != block) continue;
          windows[g].pending &= windows[g].pending - 1;
          q_start = its_start;
          uint32_t mine = kNeeded;
          if (last[g] > (its_start & INT_MAX) || start[g] < its_document || __popcll(bits[g]) < 2)
            mine |= kMaskEach;
          if (bits[g] != ~uint64_t{0}) mine |= kMaskBits;
          flags |= mine << (g * kGroupFlags);
        }
        append_stage(row, block, q_start, flags, bits[0], bits[1]);
      }
    }
  }

  // ---- columns ----

  __device__ __forceinline__ void walk_columns() {
    const int row = unit;
    const SourceArgs& from = args.sources[source];
    const auto* words =
        args.diagonal_bits == nullptr
            ? nullptr
            : reinterpret_cast<const uint32_t*>(args.diagonal_bits + row * args.diagonal_words);
    int32_t position[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = lane + 32 * i;
      position[i] =
          key < keys ? from.column_positions[row * from.column_capacity + first + key] : INT_MAX;
    }
    const int32_t lowest = __shfl_sync(~0u, position[0], 0);  // ascending
    const int end = min(first_q_block + args.column_q_blocks, args.num_q_blocks);
    for (int window = first_q_block; window < end; window += 32) {
      int4 bounds = make_int4(0, -1, 0, 0);
      if (window + lane < end) {
        bounds = args.query_bounds[static_cast<int64_t>(row) * args.num_q_blocks + window + lane];
      }
      uint32_t pending = __ballot_sync(~0u, bounds.y >= lowest);
      for (; pending != 0; pending &= pending - 1) {
        const int at = __ffs(pending) - 1;
        const int32_t q_start = __shfl_sync(~0u, bounds.x, at),
                      q_last = __shfl_sync(~0u, bounds.y, at),
                      document_min = __shfl_sync(~0u, bounds.z, at),
                      document_max = __shfl_sync(~0u, bounds.w, at);
        const int32_t q_first = q_start & INT_MAX;
        uint32_t counting[4], each[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int diagonal = q_first / 64 - position[i] / 64;
          bool counts = position[i] <= q_last && position[i] >= document_min;
          if (counts && words != nullptr && diagonal >= 0 && diagonal < args.diagonal_words * 64)
            counts = (words[diagonal >> 5] >> (diagonal & 31) & 1) == 0;
          counting[i] = __ballot_sync(~0u, counts);
          each[i] =
              __ballot_sync(~0u, counts && (position[i] > q_first || position[i] < document_max));
        }
        uint32_t flags = 0;
        uint64_t bits[2];
#pragma unroll
        for (int g = 0; g < 2; ++g) {
          bits[g] = counting[2 * g] | static_cast<uint64_t>(counting[2 * g + 1]) << 32;
          uint32_t mine = bits[g] == 0 ? 0 : kNeeded;
          if (bits[g] != ~uint64_t{0} && bits[g] != 0) mine |= kMaskBits;
          // Rows that see one key alone are compared pair by pair.
          if ((each[2 * g] | each[2 * g + 1]) != 0 || __popcll(bits[g]) == 1) mine |= kMaskEach;
          flags |= mine << (g * kGroupFlags);
        }
        if (flags != 0) append_stage(row, window + at, q_start, flags, bits[0], bits[1]);
      }
    }
  }

  // ---- items ----

  /// False: there is no such item.
  __device__ __forceinline__ bool decode(int item) {
    const bool columns = args.columns_first != 0 ? item < args.column_items
                                                 : item >= args.num_items - args.column_items;
    if (columns) {
      // The tiles of one head over the same queries together.
      int rest = args.columns_first != 0 ? item : item - (args.num_items - args.column_items);
      first = rest % args.column_tiles * 128;
      rest /= args.column_tiles;
      source = args.column_sources[rest % args.num_column_sources];
      rest /= args.num_column_sources;
      unit = rest % args.num_rows;
      first_q_block = rest / args.num_rows * args.column_q_blocks;
      kind = kItemColumns;
      const SourceArgs& from = args.sources[source];
      if (first >= from.column_capacity) return false;
      keys = min(128, from.column_counts[unit] - first);
      return keys > 0;
    }
    const int inside = args.columns_first != 0 ? item - args.column_items : item;
    const int pairs = args.block_pairs * args.num_block_sources;
    kind = kItemBlocks;
    unit = inside / pairs;
    first_head = unit % args.head_parts * args.heads_per_item;
    unit /= args.head_parts;
    first = inside % pairs / args.num_block_sources * 128;
    source = args.block_sources[inside % args.num_block_sources];
    keys = min(128, args.sources[source].num_keys - first);
    return keys > 0;
  }

  __device__ __forceinline__ void run() {
    for (;;) {
      // Not before it is due: an item taken early waits here while other SMs have nothing left to do.
      int item = 0;
      if (lane == 0) item = atomicAdd(args.next_item, 1);
      item = __shfl_sync(~0u, item, 0);
      if (item >= args.num_items) break;
      if (!decode(item)) continue;
      item_due = true;
      if (kind == kItemColumns) {
        walk_columns();
      } else {
        walk_blocks();
      }
      end_item();
    }
    kind = kItemEnd;
    append_item();
    hand_over();
  }
};

}  // namespace mtraining::kernels::sm90
