// The producer warp of the key-stationary backward: takes items (two key blocks of a kv head and some of its query heads, or 128 columns
// of a head) from the queue and walks the query blocks that list them, so that a query block that both need is loaded once.
//
// In:   BackwardArgs. Out: keys and values, stages of 64 queries and dout, notes, in shared memory. Next: backward_kernel.cuh.
#pragma once

#include <climits>

#include "mtraining/kernels/sm90/backward_args.cuh"
#include "mtraining/kernels/sm90/backward_shape.cuh"
#include "mtraining/kernels/sm90/ptx.cuh"

namespace mtraining::kernels::sm90 {

template <int kD, bool kWithQueries>
struct KeyProducer {
  using Shape = BackwardShape<kD, kWithQueries>;
  const BackwardArgs& args;
  uint32_t base;
  int lane;
  RingCursor<Shape::kStages> ring;
  uint64_t read_again = evict_normal_policy();
  uint32_t keys_parity = 1;  // with which the groups give back the keys of the item before
  uint32_t uncleaned_parity = 0;

  // of the item
  uint32_t kind = kItemBlocks;
  int source = 0, unit = 0;  // unit: row, or batch * num_kv_heads + kv head
  int first = 0;             // key row or column
  int keys = 0;              // that exist from there on
  int first_q_block = 0;     // of columns
  int first_head = 0;        // of those that share the kv head
  bool keys_due = false;     // its keys are still to be loaded

  // ---- stages ----

  /// Lane 0 for the warp, after what the warp wrote.
  __device__ __forceinline__ void arrive(uint32_t barrier) const {
    __syncwarp();
    if (lane < kArrivals) mbarrier_arrive(barrier);
  }

  /// Zeros to rows of a tile whose bit is set: 0 times what padding holds may not be 0.
  __device__ __forceinline__ void clean(uint32_t tile, uint32_t low, uint32_t high) const {
    for (int row = 0; row < 64; ++row) {
      if (((row < 32 ? low : high) >> (row % 32) & 1) == 0) continue;
      if (lane < kD / 8)
        store_shared_v4(tile + lane / 8 * 8192 + row * 128 + lane % 8 * 16, 0, 0, 0, 0);
    }
  }

  /// Where the copies of a stage or an item report: directly, or to this warp, which then cleans rows.
  __device__ __forceinline__ uint32_t destination(uint32_t barrier, bool cleans) const {
    return cleans ? Shape::uncleaned(base) : barrier;
  }
  __device__ __forceinline__ void wait_uncleaned() {
    mbarrier_wait(Shape::uncleaned(base), uncleaned_parity);
    uncleaned_parity ^= 1;
  }

  /// The next stage: 64 queries of a row. flags: of both groups.
  __device__ __forceinline__ void emit(int row, int q_block, int32_t q_start, uint32_t flags,
                                       uint64_t bits_0, uint64_t bits_1) {
    // The item's first stage is on its way before the groups give back the keys of the item before.
    emit_stage(row, q_block, q_start, flags, bits_0, bits_1);
    if (keys_due) load_keys();
  }
  __device__ __forceinline__ void emit_stage(int row, int q_block, int32_t q_start, uint32_t flags,
                                             uint64_t bits_0, uint64_t bits_1) {
    const uint32_t full = Shape::full(base, ring.slot), tile = Shape::queries(base, ring.slot),
                   statistics = Shape::statistics(base, ring.slot);
    const bool cleans = q_start < 0;
    mbarrier_wait(Shape::empty(base, ring.slot), ring.parity ^ 1);
    if (lane == 0) {
      const uint32_t note = Shape::note(base, ring.slot);
      const int head = row % args.num_heads, batch = row / args.num_heads;
      store_shared_v4(note, flags, static_cast<uint32_t>(q_start & INT_MAX), q_block,
                      head | batch << 16);
      store_shared_v4(note + 16, static_cast<uint32_t>(bits_0), static_cast<uint32_t>(bits_0 >> 32),
                      static_cast<uint32_t>(bits_1), static_cast<uint32_t>(bits_1 >> 32));
      const uint32_t barrier = destination(full, cleans);
      mbarrier_arrive_expect(barrier, 2 * Shape::kTileBytes + Shape::kStatisticsBytes);
      tensor_load_5d(tile, &args.q, barrier, read_again, 0, q_block * 64, 0,
                     head * args.q_head_step, batch * args.q_batch_step);
      tensor_load_5d(Shape::dout(base, ring.slot), &args.dout, barrier, read_again, 0, q_block * 64,
                     0, head * args.dout_head_step, batch * args.dout_batch_step);
      bulk_load(statistics,
                args.statistics + (static_cast<int64_t>(row) * args.num_q_blocks + q_block) * 128,
                Shape::kStatisticsBytes, barrier);
    }
    if (cleans) {
      __syncwarp();
      wait_uncleaned();
      const bool low = load_shared_f32(statistics + lane * 4) == -INFINITY,
                 high = load_shared_f32(statistics + lane * 4 + 128) == -INFINITY;
      const uint32_t rows_low = __ballot_sync(~0u, low), rows_high = __ballot_sync(~0u, high);
      clean(tile, rows_low, rows_high);
      clean(tile + Shape::kTileBytes, rows_low, rows_high);
      fence_async_shared();
      arrive(full);
    } else if (kArrivals > 1 && lane > 0) {
      mbarrier_arrive(full);
    }
    __syncwarp();
    ring.advance();
  }

  __device__ __forceinline__ void emit_end() {
    if (keys_due) load_keys();
    mbarrier_wait(Shape::empty(base, ring.slot), ring.parity ^ 1);
    if (lane == 0) store_shared_v4(Shape::note(base, ring.slot), kEnd, 0, 0, 0);
    arrive(Shape::full(base, ring.slot));
    ring.advance();
  }

  // ---- keys ----

  /// The item's keys, values and their positions.
  __device__ __forceinline__ void load_keys() {
    keys_due = false;
    mbarrier_wait(Shape::keys_empty(base), keys_parity);
    const SourceArgs& from = args.sources[source];
    bool padding[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = lane + 32 * i;
      int32_t position = INT_MAX;
      if (key < keys) {
        position = kind == kItemColumns
                       ? from.column_positions[unit * from.column_capacity + first + key]
                       : from.block_starts[(first + key) / 64] + key % 64 * args.position_stride;
      }
      padding[i] = key < keys && position >= args.seq_len;
      store_shared_s32(Shape::positions(base, 0) + key * 4, position);
    }
    uint32_t rows[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) rows[i] = __ballot_sync(~0u, padding[i]);
    const bool cleans = (rows[0] | rows[1] | rows[2] | rows[3]) != 0;
    if (lane == 0) {
      store_shared_v4(Shape::item(base), kind | static_cast<uint32_t>(source) << 8, unit, first,
                      keys);
      const uint32_t barrier = destination(Shape::keys_full(base), cleans);
      const int groups = keys > 64 ? 2 : 1;
      mbarrier_arrive_expect(barrier, groups * 2 * Shape::kTileBytes);
      for (int g = 0; g < groups; ++g) {
        if (kind == kItemColumns) {
          const int token = unit * args.gathered_rows + from.gathered_begin + first + 64 * g;
          tensor_load_5d(Shape::keys(base, g), &args.gathered_k, barrier, read_again, 0, token, 0,
                         0, 0);
          tensor_load_5d(Shape::values(base, g), &args.gathered_v, barrier, read_again, 0, token, 0,
                         0, 0);
        } else {
          const int head = unit % args.num_kv_heads, batch = unit / args.num_kv_heads;
          tensor_load_5d(Shape::keys(base, g), &from.k, barrier, read_again, 0, first + 64 * g, 0,
                         head * from.k_head_step, batch * from.k_batch_step);
          tensor_load_5d(Shape::values(base, g), &from.v, barrier, read_again, 0, first + 64 * g, 0,
                         head * from.v_head_step, batch * from.v_batch_step);
        }
      }
    }
    if (cleans) {
      __syncwarp();
      wait_uncleaned();
      clean(Shape::keys(base, 0), rows[0], rows[1]);
      clean(Shape::keys(base, 1), rows[2], rows[3]);
      fence_async_shared();
      arrive(Shape::keys_full(base));
    } else if (kArrivals > 1 && lane > 0) {
      mbarrier_arrive(Shape::keys_full(base));
    }
    __syncwarp();
    keys_parity ^= 1;
  }

  // ---- key blocks ----

  /// The query blocks of one head that list one key block, ascending, 32 at a time, one a lane.
  struct Window {
    int32_t block;         // query block
    int4 bounds;           // of it
    uint32_t pending = 0;  // lanes not taken yet
    int32_t next = 0, total = 0;
    int64_t csr_begin = 0;
  };

  __device__ __forceinline__ void refill(Window& window, const SourceArgs& from, int row,
                                         int key_block, int32_t start, int32_t last) const {
    while (window.pending == 0 && window.next < window.total) {
      const int i = window.next + lane;
      window.next += 32;
      int block = -1;
      if (i < window.total) {
        if (from.kind == BlockListKind::kEntries) {
          const Entry entry = from.entries[row * from.entry_capacity + i];
          const int m = from.blocks_per_stripe;
          const int inside = key_block % m + entry.delta;
          block = key_block + entry.lambda * m + entry.delta;
          if (inside < 0 || inside >= m || block >= args.num_q_blocks) block = -1;
        } else {
          block = from.query_blocks[window.csr_begin + i];
        }
      }
      window.block = block;
      window.bounds = make_int4(0, -1, 0, 0);
      if (block >= 0) {
        window.bounds = args.query_bounds[static_cast<int64_t>(row) * args.num_q_blocks + block];
      }
      window.pending =
          __ballot_sync(~0u, start <= window.bounds.y && last >= window.bounds.z && block >= 0);
    }
  }

  __device__ __forceinline__ void walk_blocks() {
    const SourceArgs& from = args.sources[source];
    const int batch = unit / args.num_kv_heads, kv_head = unit % args.num_kv_heads;
    const int groups = keys > 64 ? 2 : 1;
    int32_t start[2], last[2];
    uint64_t bits[2];
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      const int here = min(64, keys - 64 * g);
      start[g] = g < groups ? from.block_starts[first / 64 + g] : INT_MAX;
      last[g] = g < groups ? start[g] + (here - 1) * args.position_stride : -1;
      bits[g] = here >= 64 ? ~uint64_t{0} : here > 0 ? (uint64_t{1} << here) - 1 : 0;
    }
    const int end = min(first_head + args.heads_per_item, args.heads_per_kv_head);
    for (int h = first_head; h < end; ++h) {
      const int row = batch * args.num_heads + kv_head * args.heads_per_kv_head + h;
      Window windows[2];
#pragma unroll
      for (int g = 0; g < 2; ++g) {
        if (g >= groups) continue;
        if (from.kind == BlockListKind::kEntries) {
          windows[g].total = from.num_entries[row];
        } else {
          const int64_t* begin = from.key_row_begin +
                                 static_cast<int64_t>(row) * (from.num_blocks + 1) + first / 64 + g;
          windows[g].csr_begin = begin[0];
          windows[g].total = static_cast<int>(begin[1] - begin[0]);
        }
      }
      for (;;) {
        int block = INT_MAX, own[2];
#pragma unroll
        for (int g = 0; g < 2; ++g) {
          refill(windows[g], from, row, first / 64 + g, start[g], last[g]);
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
          const int32_t its_start = __shfl_sync(~0u, windows[g].bounds.x, from_lane),
                        its_document = __shfl_sync(~0u, windows[g].bounds.w, from_lane);
          if (own[g] != block) continue;
          windows[g].pending &= windows[g].pending - 1;
          q_start = its_start;
          uint32_t mine = kNeeded;
          if (last[g] > (its_start & INT_MAX) || start[g] < its_document || __popcll(bits[g]) < 2)
            mine |= kMaskEach;
          if (bits[g] != ~uint64_t{0}) mine |= kMaskBits;
          flags |= mine << (g * kGroupFlags);
        }
        emit(row, block, q_start, flags, bits[0], bits[1]);
      }
    }
  }

  // ---- columns ----

  __device__ __forceinline__ void walk_columns() {
    const int row = unit;
    const auto* words =
        args.diagonal_bits == nullptr
            ? nullptr
            : reinterpret_cast<const uint32_t*>(args.diagonal_bits + row * args.diagonal_words);
    int32_t position[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      position[i] = load_shared_s32(Shape::positions(base, 0) + (lane + 32 * i) * 4);
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
        if (flags != 0) emit(row, window + at, q_start, flags, bits[0], bits[1]);
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
      source = rest % args.num_sources;
      rest /= args.num_sources;
      unit = rest % args.num_rows;
      first_q_block = rest / args.num_rows * args.column_q_blocks;
      kind = kItemColumns;
      const SourceArgs& from = args.sources[source];
      if (from.column_counts == nullptr || first >= from.column_capacity) return false;
      keys = min(128, from.column_counts[unit] - first);
      return keys > 0;
    }
    const int inside = args.columns_first != 0 ? item - args.column_items : item;
    const int pairs = args.block_pairs * args.num_sources;
    kind = kItemBlocks;
    unit = inside / pairs;
    first_head = unit % args.head_parts * args.heads_per_item;
    unit /= args.head_parts;
    first = inside % pairs / args.num_sources * 128;
    source = inside % args.num_sources;
    const SourceArgs& from = args.sources[source];
    if (from.block_starts == nullptr) return false;
    keys = min(128, from.num_keys - first);
    return keys > 0;
  }

  __device__ __forceinline__ void run() {
    if (lane == 0) {
      prefetch_tensor_map(&args.q);
      prefetch_tensor_map(&args.dout);
    }
    int item = 0;
    if (lane == 0) item = atomicAdd(args.next_item, 1);
    for (;;) {
      const int current = __shfl_sync(~0u, item, 0);
      if (current >= args.num_items) break;
      if (lane == 0)
        item = atomicAdd(args.next_item, 1);  // early: its latency hides behind the item
      if (!decode(current)) continue;
      keys_due = true;
      if (kind == kItemColumns) {
        load_keys();  // and the positions that the walk reads
        walk_columns();
      } else {
        walk_blocks();
      }
      emit_end();
    }
    mbarrier_wait(Shape::keys_empty(base), keys_parity);
    if (lane == 0) store_shared_v4(Shape::item(base), kItemEnd, 0, 0, 0);
    arrive(Shape::keys_full(base));
  }
};

}  // namespace mtraining::kernels::sm90
