// The producer warp: takes items (as many neighbouring query blocks of one head as there are consumer groups) from the queue and
// walks the union of their lists, so that a key block that several need is loaded once.
//
// In:   ForwardArgs. Out: queries, stages of 64 keys and values, notes, in shared memory. Next: forward_kernel.cuh.
#pragma once

#include <climits>

#include "mtraining/kernels/sm90/forward_args.cuh"
#include "mtraining/kernels/sm90/forward_shape.cuh"
#include "mtraining/kernels/sm90/ptx.cuh"

namespace mtraining::kernels::sm90 {

/// Args: ForwardArgs, or QueryArgs where Shape has gradients.
template <typename Shape, typename Args>
struct Producer {
  static constexpr int kGroups = Shape::kGroups;
  const Args& args;
  uint32_t base;
  int lane;
  RingCursor<Shape::kStages> ring;
  uint32_t uncleaned_parity = 0;
  uint64_t read_once = evict_first_policy(), read_again = evict_normal_policy();

  /// Positions of a query block's real rows, and its documents' starts.
  struct QueryBounds {
    int32_t first = 0, last = -1;  // last < 0: no real row
    int32_t document_min = 0, document_max = 0;
  };
  // of the item
  int row = 0, q_block = 0;
  QueryBounds bounds[kGroups];
  uint32_t queries_due = 0;     // bit per group whose queries are not loaded yet
  uint32_t queries_parity = 1;  // with which the groups give back the queries of the item before

  // ---- queries ----

  /// A stage that ends the item before and brings the next; last: there is none.
  __device__ __forceinline__ void begin_item(bool last) {
    wait_for_slot();
    if (lane == 0) {
      const uint32_t barrier = Shape::full(base, ring.slot);
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        store_shared_v4(Shape::note(base, ring.slot, g), kEnd, last ? kNoRow : row, q_block + g, 0);
      }
      if (last) {
        mbarrier_arrive(barrier);
      } else {
        const int head = row % args.num_heads, batch = row / args.num_heads;
        mbarrier_arrive_expect(barrier, kGroups * Shape::kTileBytes);
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          tensor_load_5d(Shape::item_queries(base, ring.slot, g), &args.q, barrier, read_once, 0,
                         (q_block + g) * 64, 0, head * args.q_head_step, batch * args.q_batch_step);
        }
      }
    }
    next_stage();
  }

  __device__ __forceinline__ void load_queries(int group) {
    if (lane == 0) {
      const uint32_t barrier = Shape::q_full(base, group);
      store_shared_v4(Shape::item(base, group), row, q_block + group, 0, 0);
      const int head = row % args.num_heads, batch = row / args.num_heads;
      mbarrier_arrive_expect(
          barrier, Shape::kQueryTiles * Shape::kTileBytes +
                       (q_block + group < args.num_q_blocks ? Shape::kStatisticsBytes : 0));
      tensor_load_5d(Shape::queries(base, group), &args.q, barrier, read_once, 0,
                     (q_block + group) * 64, 0, head * args.q_head_step, batch * args.q_batch_step);
      if constexpr (Shape::kWithGradients) {
        tensor_load_5d(Shape::dout(base, group), &args.dout, barrier, read_once, 0,
                       (q_block + group) * 64, 0, head * args.dout_head_step,
                       batch * args.dout_batch_step);
        if (q_block + group < args.num_q_blocks) {
          bulk_load(Shape::statistics(base, group),
                    args.statistics +
                        (static_cast<int64_t>(row) * args.num_q_blocks + q_block + group) * 128,
                    Shape::kStatisticsBytes, barrier);
        }
      }
    }
    __syncwarp();
    queries_due &= ~(1u << group);
  }

  /// Loads the queries of groups that are done with the item before.
  __device__ __forceinline__ void load_queries_due() {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      if ((queries_due >> g & 1) != 0 &&
          __all_sync(~0u, mbarrier_test_wait(Shape::q_empty(base, g), queries_parity))) {
        load_queries(g);
      }
    }
  }

  /// Waits for the next slot. Queries come first where they are due: without them nobody would give slots back.
  __device__ __forceinline__ void wait_for_slot() {
    const uint32_t barrier = Shape::empty(base, ring.slot);
    if constexpr (!Shape::kQueriesInRing) {
      while (queries_due != 0) {
        load_queries_due();
        if (__all_sync(~0u, mbarrier_test_wait(barrier, ring.parity ^ 1))) return;
      }
    }
    mbarrier_wait(barrier, ring.parity ^ 1);
  }

  // ---- stages ----

  // Of kValuesApart: values of the stage before, not asked for yet. due_map null: that stage has none.
  bool due = false;
  const CUtensorMap* due_map;
  int due_token, due_head, due_batch;
  uint32_t due_slot, due_parity, due_unneeded;

  __device__ __forceinline__ void load_values_due() {
    if (!due) return;
    const uint32_t empty = Shape::values_empty(base, due_slot),
                   full = Shape::values_full(base, due_slot);
    mbarrier_wait(empty, due_parity ^ 1);
    if (lane == 0) {
      // Groups that do not need them look at the keys' note only.
      if (due_unneeded > 0) mbarrier_arrive(empty, due_unneeded * 4 * kArrivals);
      if (due_map == nullptr) {
        mbarrier_arrive(full);
      } else {
        mbarrier_arrive_expect(full, Shape::kTileBytes);
        tensor_load_5d(Shape::values(base, due_slot), due_map, full, read_again, 0, due_token, 0,
                       due_head, due_batch);
      }
    }
    __syncwarp();
  }
  /// The next stage's values, whose keys are asked for.
  __device__ __forceinline__ void next_values(const CUtensorMap* map, int token, int head,
                                              int batch, uint32_t unneeded) {
    load_values_due();
    due = true;
    due_map = map;
    due_token = token;
    due_head = head;
    due_batch = batch;
    due_slot = ring.slot;
    due_parity = ring.parity;
    due_unneeded = unneeded;
  }

  __device__ __forceinline__ void write_note(int group, uint32_t flags, int32_t start,
                                             uint64_t bits) const {
    store_shared_v4(Shape::note(base, ring.slot, group), flags, start, static_cast<uint32_t>(bits),
                    static_cast<uint32_t>(bits >> 32));
  }

  /// barrier: where the copies report. unneeded: groups that do not use the stage.
  __device__ __forceinline__ void load(const CUtensorMap* k, const CUtensorMap* v, int token,
                                       int k_head, int k_batch, int v_head, int v_batch,
                                       uint32_t barrier, uint32_t unneeded) {
    if (lane == 0) {
      mbarrier_arrive_expect(barrier, (Shape::kValuesApart ? 1 : 2) * Shape::kTileBytes);
      tensor_load_5d(Shape::keys(base, ring.slot), k, barrier, read_again, 0, token, 0, k_head,
                     k_batch);
    }
    if constexpr (Shape::kValuesApart) {
      next_values(v, token, v_head, v_batch, unneeded);
    } else if (lane == 0) {
      tensor_load_5d(Shape::values(base, ring.slot), v, barrier, read_again, 0, token, 0, v_head,
                     v_batch);
    }
  }

  /// Zeros to the rows of keys beyond the sequence, in the product of dq: 0 times what padding holds may not be 0.
  __device__ __forceinline__ void clean_keys(int32_t start) {
    __syncwarp();
    mbarrier_wait(Shape::uncleaned(base), uncleaned_parity);
    uncleaned_parity ^= 1;
    const uint32_t tile = Shape::keys(base, ring.slot);
    for (int key = 0; key < 64; ++key) {
      if (start + key * args.position_stride < args.seq_len) continue;
      for (int chunk = lane; chunk < Shape::kTileBytes / 1024; chunk += 32)
        store_shared_v4(tile + chunk / 8 * 8192 + key * 128 + chunk % 8 * 16, 0, 0, 0, 0);
    }
    fence_async_shared();
    __syncwarp();
    if (lane == 0) mbarrier_arrive(Shape::full(base, ring.slot));
  }

  /// A stage that ends an item, where begin_item() does not.
  __device__ __forceinline__ void end_item() {
    while (queries_due != 0) load_queries_due();
    wait_for_slot();
    if (lane == 0) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) write_note(g, kEnd, 0, 0);
      mbarrier_arrive(Shape::full(base, ring.slot));
    }
    if constexpr (Shape::kValuesApart) next_values(nullptr, 0, 0, 0, kGroups);
    next_stage();
  }

  /// Ends a stage that lane 0 filled.
  __device__ __forceinline__ void next_stage() {
    if (kArrivals > 1 && lane > 0) mbarrier_arrive(Shape::full(base, ring.slot));
    __syncwarp();
    ring.advance();
  }

  // ---- key blocks ----

  __device__ __forceinline__ QueryBounds query_bounds(int block) const {
    QueryBounds found;
    if (block >= args.num_q_blocks) return found;
    const int first_row = block * 64;
    const int rows = min(64, args.num_queries - first_row);
    found.first = args.q_block_starts[block];
    found.last = min(found.first + (rows - 1) * args.position_stride, args.seq_len - 1);
    if (found.last < found.first) {
      found.last = -1;
      return found;
    }
    if (args.document_start != nullptr) {
      const int32_t* starts =
          args.document_start + row / args.num_heads * args.document_stride_batch + first_row;
      int lowest = INT_MAX, highest = 0;
#pragma unroll
      for (int r = lane; r < 64; r += 32) {
        if (r < rows && found.first + r * args.position_stride <= found.last) {
          lowest = min(lowest, starts[r]);
          highest = max(highest, starts[r]);
        }
      }
      found.document_min = __reduce_min_sync(~0u, lowest);
      found.document_max = __reduce_max_sync(~0u, highest);
    }
    return found;
  }

  /// One group's key blocks in descending order, 32 at a time, one a lane.
  struct Window {
    int32_t code;          // key block << kFlagBits | flags
    int32_t start;         // position of its first key
    uint32_t pending = 0;  // lanes not taken yet
    int32_t next = 0, total = 0;
    int64_t csr_end = 0;
  };

  /// Entries of the source's list that the item's head has; the first 32, one a lane.
  struct EntryList {
    int32_t count = 0;
    Entry first;
  };

  __device__ __forceinline__ void open(Window& window, const SourceArgs& source,
                                       const EntryList& list, int group) const {
    if (bounds[group].last < 0) return;
    if (source.kind == BlockListKind::kEntries) {
      window.total = list.count;
    } else {
      const int64_t* begin =
          source.row_begin + static_cast<int64_t>(row) * (args.num_q_blocks + 1) + q_block + group;
      window.csr_end = begin[1];
      window.total = static_cast<int>(begin[1] - begin[0]);
    }
  }

  /// The window's next 32 key blocks and where they start; -1 where there is none.
  __device__ __forceinline__ void locate(Window& window, const SourceArgs& source,
                                         const EntryList& list, int group) const {
    const int i = window.next + lane;
    window.next += 32;
    int block = -1;
    if (i < window.total) {
      if (source.kind == BlockListKind::kEntries) {
        const Entry entry = i < 32 ? list.first : source.entries[row * source.entry_capacity + i];
        const int m = source.blocks_per_stripe;
        const int inside = (q_block + group) % m - entry.delta;
        block = q_block + group - (entry.lambda * m + entry.delta);
        if (inside < 0 || inside >= m || block >= source.num_blocks) block = -1;
      } else {
        block = source.key_blocks[window.csr_end - 1 - i];
      }
    }
    window.code = block;
    window.start = block >= 0 ? source.block_starts[block] : 0;
  }

  /// Which of them the group needs, and how masked.
  __device__ __forceinline__ void classify(Window& window, const SourceArgs& source,
                                           int group) const {
    const int block = window.code, start = window.start;
    const int keys = min(64, source.num_keys - block * 64);
    const int last = start + (keys - 1) * args.position_stride;
    const bool needed =
        block >= 0 && start <= bounds[group].last && last >= bounds[group].document_min;
    uint32_t flags = kNeeded;
    if (last > bounds[group].first || start < bounds[group].document_max) flags |= kMaskEach;
    if (keys < 64) flags |= kMaskBits;
    window.code = block << kFlagBits | static_cast<int>(flags);
    window.pending = __ballot_sync(~0u, needed);
  }

  /// Fills the windows that are used up; their loads overlap.
  __device__ __forceinline__ void refill(Window (&windows)[kGroups], const SourceArgs& source,
                                         const EntryList& list) const {
    bool again;
    do {
      bool fresh[kGroups];
      again = false;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        fresh[g] = windows[g].pending == 0 && windows[g].next < windows[g].total;
        if (fresh[g]) locate(windows[g], source, list, g);
      }
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        if (fresh[g]) classify(windows[g], source, g);
        again |= windows[g].pending == 0 && windows[g].next < windows[g].total;
      }
    } while (again);
  }

  __device__ __forceinline__ void blocks(const SourceArgs& source, const EntryList& list) {
    const int batch = row / args.num_heads;
    const int kv_head = row % args.num_heads / args.heads_per_kv_head;
    Window windows[kGroups];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) open(windows[g], source, list, g);
    for (;;) {
      int code[kGroups];
      int block = -1;
      refill(windows, source, list);
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        code[g] = __shfl_sync(~0u, windows[g].code, (__ffs(windows[g].pending) - 1) & 31);
        if (windows[g].pending == 0) code[g] = -1;
        block = max(block, code[g] >> kFlagBits);
      }
      if (block < 0) break;
      int start = 0;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const int own = __shfl_sync(~0u, windows[g].start, (__ffs(windows[g].pending) - 1) & 31);
        if (code[g] >> kFlagBits == block) {
          windows[g].pending &= windows[g].pending - 1;
          start = own;
        } else {
          code[g] = 0;
        }
      }
      wait_for_slot();
      bool cleans = false;
      if constexpr (Shape::kWithGradients)
        cleans = start + 63 * args.position_stride >= args.seq_len;
      uint32_t unneeded = 0;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) unneeded += code[g] == 0 ? 1 : 0;
      if (lane == 0) {
        const int keys = source.num_keys - block * 64;
        const uint64_t bits = keys >= 64 ? ~uint64_t{0} : (uint64_t{1} << keys) - 1;
#pragma unroll
        for (int g = 0; g < kGroups; ++g)
          write_note(g, code[g] & ((1 << kFlagBits) - 1), start, bits);
      }
      load(&source.k, &source.v, block * 64, kv_head * source.k_head_step,
           batch * source.k_batch_step, kv_head * source.v_head_step, batch * source.v_batch_step,
           cleans ? Shape::uncleaned(base) : Shape::full(base, ring.slot), unneeded);
      if constexpr (Shape::kWithGradients) {
        if (cleans) clean_keys(start);
      }
      next_stage();
    }
  }

  /// counts: of source `lane`.
  __device__ __forceinline__ EntryList begin_list(int source, int counts) const {
    EntryList list;
    list.count = __shfl_sync(~0u, counts, source & 31);
    if (source >= args.num_sources) list.count = 0;
    if (lane < list.count) {
      list.first = args.sources[source].entries[row * args.sources[source].entry_capacity + lane];
    }
    return list;
  }

  // ---- columns ----

  /// 64 columns on their way through the producer, two a lane.
  struct ColumnTile {
    int position[2];            // INT_MAX beyond the count
    uint32_t word[kGroups][2];  // of the head's bitmap
  };

  __device__ __forceinline__ void fetch_positions(ColumnTile& tile, const int32_t* positions,
                                                  int first, int count) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int column = first + lane + 32 * i;
      tile.position[i] = column < count ? positions[column] : INT_MAX;
    }
  }

  /// The bitmap's words with the diagonals from the columns' blocks to the query blocks.
  __device__ __forceinline__ void fetch_words(ColumnTile& tile, const uint32_t* words) const {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int diagonal = bounds[g].first / 64 - tile.position[i] / 64;
        tile.word[g][i] = words != nullptr && diagonal >= 0 && diagonal < args.diagonal_words * 64
                              ? words[diagonal >> 5]
                              : 0;
      }
    }
  }

  __device__ __forceinline__ uint32_t column_flags(const QueryBounds& query,
                                                   const int (&position)[2],
                                                   const uint32_t (&word)[2],
                                                   uint64_t& bits) const {
    bool counts[2];
    bool each = false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int diagonal = query.first / 64 - position[i] / 64;
      counts[i] = position[i] <= query.last && position[i] >= query.document_min &&
                  (word[i] >> (diagonal & 31) & 1) == 0;
      each |= counts[i] && (position[i] > query.first || position[i] < query.document_max);
    }
    bits = __ballot_sync(~0u, counts[0]) | static_cast<uint64_t>(__ballot_sync(~0u, counts[1]))
                                               << 32;
    const bool any_each = __any_sync(~0u, each);
    if (bits == 0) return 0;
    return kNeeded | kColumns | (bits == ~uint64_t{0} ? 0 : kMaskBits) | (any_each ? kMaskEach : 0);
  }

  __device__ __forceinline__ void columns(const SourceArgs& source) {
    const int count = source.column_counts[row];
    const int32_t* positions = source.column_positions + row * source.column_capacity;
    const auto* words =
        args.diagonal_bits == nullptr
            ? nullptr
            : reinterpret_cast<const uint32_t*>(args.diagonal_bits + row * args.diagonal_words);
    const int token = row * args.gathered_rows + source.gathered_begin;
    int last = -1;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) last = max(last, bounds[g].last);
    // Positions are fetched two tiles ahead and bitmap words one ahead, so that their latencies hide behind other tiles.
    ColumnTile tile, ahead;
    fetch_positions(tile, positions, 0, count);
    fetch_positions(ahead, positions, 64, count);
    fetch_words(tile, words);
    for (int first = 0; first < count; first += 64) {
      if (__shfl_sync(~0u, tile.position[0], 0) > last) break;  // ascending
      ColumnTile beyond;
      fetch_positions(beyond, positions, first + 128, count);
      fetch_words(ahead, words);
      uint64_t bits[kGroups];
      uint32_t flags[kGroups], any = 0;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        flags[g] = column_flags(bounds[g], tile.position, tile.word[g], bits[g]);
        any |= flags[g];
      }
      if (any != 0) {
        wait_for_slot();
        const uint32_t list = Shape::positions(base, ring.slot);
        store_shared_s32(list + lane * 4, tile.position[0]);
        store_shared_s32(list + lane * 4 + 128, tile.position[1]);
        __syncwarp();
        uint32_t unneeded = 0;
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          unneeded += flags[g] == 0 ? 1 : 0;
          if (lane == 0) write_note(g, flags[g], 0, bits[g]);
        }
        load(&args.gathered_k, &args.gathered_v, token + first, 0, 0, 0, 0,
             Shape::full(base, ring.slot), unneeded);
        next_stage();
      }
      tile = ahead;
      ahead = beyond;
    }
  }

  // ---- items ----

  __device__ __forceinline__ void run() {
    if (lane == 0) {
      prefetch_tensor_map(&args.q);
      if constexpr (Shape::kWithGradients) prefetch_tensor_map(&args.dout);
      for (int s = 0; s < args.num_sources; ++s) {
        prefetch_tensor_map(&args.sources[s].k);
        prefetch_tensor_map(&args.sources[s].v);
      }
    }
    const int sets = (args.num_q_blocks + kGroups - 1) / kGroups;
    int item = 0;
    if (lane == 0) item = atomicAdd(args.next_item, 1);
    for (;; queries_parity ^= 1) {
      const int current = __shfl_sync(~0u, item, 0);
      if (current >= args.num_rows * sets) break;
      if (lane == 0)
        item = atomicAdd(args.next_item, 1);  // early: its latency hides behind the item
      // Rows of a group together, its last query blocks, which have the most keys, first.
      const int inside = current % (args.group_rows * sets);
      row = current / (args.group_rows * sets) * args.group_rows + inside % args.group_rows;
      q_block = kGroups * (sets - 1 - inside / args.group_rows);
      if constexpr (!Shape::kQueriesInRing) {
        queries_due = (1u << kGroups) - 1;
        load_queries_due();
      } else {
        begin_item(false);
      }
#pragma unroll
      for (int g = 0; g < kGroups; ++g) bounds[g] = query_bounds(q_block + g);
      // Lengths of all lists at once, and each list's beginning while the one before is worked on.
      int counts = 0;
      if (lane < args.num_sources && args.sources[lane].block_starts != nullptr &&
          args.sources[lane].kind == BlockListKind::kEntries) {
        counts = args.sources[lane].num_entries[row];
      }
      EntryList ahead = begin_list(0, counts);
      for (int s = 0; s < args.num_sources; ++s) {
        const EntryList list = ahead;
        ahead = begin_list(s + 1, counts);
        if (args.sources[s].block_starts != nullptr) blocks(args.sources[s], list);
      }
      for (int s = 0; s < args.num_sources; ++s) {
        if (args.sources[s].column_counts != nullptr) columns(args.sources[s]);
      }
      if constexpr (!Shape::kQueriesInRing) end_item();
    }
    if constexpr (!Shape::kQueriesInRing) {
      for (int g = 0; g < kGroups; ++g) {
        mbarrier_wait(Shape::q_empty(base, g), queries_parity);
        if (lane == 0) {
          store_shared_v4(Shape::item(base, g), kNoRow, 0, 0, 0);
          mbarrier_arrive(Shape::q_full(base, g));
        }
      }
    } else {
      begin_item(true);
    }
  }
};

}  // namespace mtraining::kernels::sm90
