// The forward kernel. A thread block takes two neighbouring query blocks of one head at a time from a queue (longest first): one
// consumer warpgroup each. The producer warp walks the union of their lists, so that a key block both need is loaded once; each
// stage of the ring in shared memory is one block of 64 keys and values with a note saying who needs it and what is masked.
//
// In:   ForwardArgs. Out: out, lse. Next: one instantiation a file, forward_<dtype>_d<head_dim>.cu.
//
// A consumer does the exponentials of one stage while the tensor cores compute S = Q K^T of its next and O += P V of the one before. Maxima are raised only where they grow by more than 2^8 (exact: the same
// stale maximum divides out), so that rescaling O is rare.
#pragma once

#include <atomic>
#include <climits>

#include "mtraining/kernels/sm90/forward_args.cuh"
#include "mtraining/kernels/sm90/ptx.cuh"

namespace mtraining::kernels::sm90 {

template <int kD>
struct ForwardShape {
  static constexpr int kStages = kD == 128 ? 6 : 8;
  static constexpr int kTileBytes = 64 * kD * 2;  // [D / 64][64 rows][64 of D], 128-byte swizzle
  static constexpr int kQ = kStages * 2 * kTileBytes;
  static constexpr int kNotes = kQ + 2 * kTileBytes;
  static constexpr int kPositions = kNotes + kStages * 32;
  static constexpr int kItem = kPositions + kStages * 256;
  static constexpr int kBarriers = kItem + 16;
  static constexpr int kBytes = kBarriers + (2 * kStages + 2) * 8;
  static constexpr int kThreads = 384;
  static constexpr int kConsumerWarps = 8;
};

// A stage's note for one warpgroup: {flags, position of the first key, 64 bits of keys that count}.
inline constexpr uint32_t kNeeded = 1;    // this warpgroup uses the stage
inline constexpr uint32_t kMaskBits = 2;  // only the keys whose bit is set count
inline constexpr uint32_t kMaskEach = 4;  // also compare positions pair by pair
inline constexpr uint32_t kColumns = 8;   // key positions are in the stage's list
inline constexpr uint32_t kEnd = 16;      // no stage: the item is complete
inline constexpr uint32_t kNoSlot = ~0u;

/// Positions of a query block's real rows, and its documents' starts.
struct QueryBounds {
  int32_t first = 0, last = -1;  // last < 0: no real row
  int32_t document_min = 0, document_max = 0;
};

/// The ring position of the next stage.
template <int kStages>
struct RingCursor {
  uint32_t index = 0, slot = 0, parity = 0;
  __device__ __forceinline__ void advance() {
    ++index;
    if (++slot == kStages) {
      slot = 0;
      parity ^= 1;
    }
  }
};

// ---- producer ----

template <int kD>
struct Producer {
  using Shape = ForwardShape<kD>;
  const ForwardArgs& args;
  uint32_t base;
  int lane;
  RingCursor<Shape::kStages> ring;
  uint64_t read_once = evict_first_policy(), read_again = evict_normal_policy();

  __device__ __forceinline__ uint32_t full(uint32_t slot) const {
    return base + Shape::kBarriers + slot * 8;
  }
  __device__ __forceinline__ uint32_t empty(uint32_t slot) const {
    return base + Shape::kBarriers + (Shape::kStages + slot) * 8;
  }

  __device__ __forceinline__ void write_notes(uint32_t flags0, uint32_t flags1, int32_t start,
                                              uint64_t bits0, uint64_t bits1) {
    const uint32_t notes = base + Shape::kNotes + ring.slot * 32;
    store_shared_v4(notes, flags0, start, static_cast<uint32_t>(bits0),
                    static_cast<uint32_t>(bits0 >> 32));
    store_shared_v4(notes + 16, flags1, start, static_cast<uint32_t>(bits1),
                    static_cast<uint32_t>(bits1 >> 32));
  }

  /// Loads one block of keys and values; all lanes call with equal arguments, after the slot is free.
  __device__ __forceinline__ void load(const CUtensorMap* k, const CUtensorMap* v, int token,
                                       int k_head, int k_batch, int v_head, int v_batch) {
    const uint32_t stage = base + ring.slot * 2 * Shape::kTileBytes;
    mbarrier_arrive_expect(full(ring.slot), 2 * Shape::kTileBytes);
    tensor_load_5d(stage, k, full(ring.slot), read_again, 0, token, 0, k_head, k_batch);
    tensor_load_5d(stage + Shape::kTileBytes, v, full(ring.slot), read_again, 0, token, 0, v_head,
                   v_batch);
  }

  __device__ __forceinline__ QueryBounds query_bounds(int q_block, int batch) const {
    QueryBounds bounds;
    if (q_block >= args.num_q_blocks) return bounds;
    const int first_row = q_block * 64;
    const int rows = min(64, args.num_queries - first_row);
    bounds.first = args.q_block_starts[q_block];
    bounds.last = min(bounds.first + (rows - 1) * args.position_stride, args.seq_len - 1);
    if (bounds.last < bounds.first) {
      bounds.last = -1;
      return bounds;
    }
    if (args.document_start != nullptr) {
      const int32_t* starts = args.document_start + batch * args.document_stride_batch + first_row;
      int lowest = INT_MAX, highest = 0;
#pragma unroll
      for (int r = lane; r < 64; r += 32) {
        if (r < rows && bounds.first + r * args.position_stride <= bounds.last) {
          lowest = min(lowest, starts[r]);
          highest = max(highest, starts[r]);
        }
      }
      bounds.document_min = __reduce_min_sync(~0u, lowest);
      bounds.document_max = __reduce_max_sync(~0u, highest);
    }
    return bounds;
  }

  /// One warpgroup's key blocks in descending order, 32 at a time, one a lane.
  struct Window {
    int32_t code;      // key block * 8 + flags
    int32_t start;     // position of its first key
    uint32_t pending;  // lanes not taken yet
    int32_t next, total;
  };

  __device__ __forceinline__ void refill(Window& window, const SourceArgs& source, int row,
                                         int q_block, int64_t csr_end,
                                         const QueryBounds& bounds) const {
    while (window.pending == 0 && window.next < window.total) {
      const int i = window.next + lane;
      window.next += 32;
      bool needed = i < window.total;
      int block = 0;
      if (source.kind == BlockListKind::kEntries) {
        if (needed) {
          const Entry entry = source.entries[row * source.entry_capacity + i];
          const int m = source.blocks_per_stripe;
          const int inside = q_block % m - entry.delta;
          block = q_block - (entry.lambda * m + entry.delta);
          needed = inside >= 0 && inside < m && block >= 0 && block < source.num_blocks;
        }
      } else if (needed) {
        block = source.key_blocks[csr_end - 1 - i];
      }
      uint32_t flags = kNeeded;
      int start = 0;
      if (needed) {
        start = source.block_starts[block];
        const int keys = min(64, source.num_keys - block * 64);
        const int last = start + (keys - 1) * args.position_stride;
        needed = start <= bounds.last && last >= bounds.document_min;
        if (last > bounds.first || start < bounds.document_max) flags |= kMaskEach;
        if (keys < 64) flags |= kMaskBits;
      }
      window.code = block * 32 + static_cast<int>(flags);
      window.start = start;
      window.pending = __ballot_sync(~0u, needed);
    }
  }

  __device__ __forceinline__ void open(Window& window, int64_t& csr_end, const SourceArgs& source,
                                       int row, int q_block, const QueryBounds& bounds) const {
    window.pending = 0;
    window.next = 0;
    window.total = 0;
    csr_end = 0;
    if (bounds.last < 0) return;
    if (source.kind == BlockListKind::kEntries) {
      window.total = source.num_entries[row];
    } else {
      const int64_t* begin =
          source.row_begin + static_cast<int64_t>(row) * (args.num_q_blocks + 1) + q_block;
      csr_end = begin[1];
      window.total = static_cast<int>(begin[1] - begin[0]);
    }
  }

  __device__ __forceinline__ void blocks(const SourceArgs& source, int row, int q_block,
                                         const QueryBounds& bounds0, const QueryBounds& bounds1) {
    const int batch = row / args.num_heads;
    const int kv_head = row % args.num_heads / args.heads_per_kv_head;
    Window window0, window1;
    int64_t end0, end1;
    open(window0, end0, source, row, q_block, bounds0);
    open(window1, end1, source, row, q_block + 1, bounds1);
    for (;;) {
      refill(window0, source, row, q_block, end0, bounds0);
      refill(window1, source, row, q_block + 1, end1, bounds1);
      const int lane0 = __ffs(window0.pending) - 1, lane1 = __ffs(window1.pending) - 1;
      int code0 = __shfl_sync(~0u, window0.code, lane0 & 31),
          code1 = __shfl_sync(~0u, window1.code, lane1 & 31);
      if (lane0 < 0) code0 = -32;
      if (lane1 < 0) code1 = -32;
      const int block = max(code0 >> 5, code1 >> 5);
      if (block < 0) break;
      const bool take0 = code0 >> 5 == block, take1 = code1 >> 5 == block;
      if (take0) window0.pending &= window0.pending - 1;
      if (take1) window1.pending &= window1.pending - 1;
      const int start =
          __shfl_sync(~0u, take0 ? window0.start : window1.start, (take0 ? lane0 : lane1) & 31);
      const int keys = source.num_keys - block * 64;
      const uint64_t bits = keys >= 64 ? ~uint64_t{0} : (uint64_t{1} << keys) - 1;
      mbarrier_wait(empty(ring.slot), ring.parity ^ 1);
      if (lane == 0) {
        write_notes(take0 ? code0 & 31 : 0, take1 ? code1 & 31 : 0, start, bits, bits);
        load(&source.k, &source.v, block * 64, kv_head * source.k_head_step,
             batch * source.k_batch_step, kv_head * source.v_head_step,
             batch * source.v_batch_step);
      }
      __syncwarp();
      ring.advance();
    }
  }

  /// 64 columns on their way through the producer, two a lane.
  struct ColumnTile {
    int position[2];      // INT_MAX beyond the count
    uint32_t word[2][2];  // of the head's bitmap: [warpgroup][column]
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
  __device__ __forceinline__ void fetch_words(ColumnTile& tile, const uint32_t* words,
                                              const QueryBounds& bounds0,
                                              const QueryBounds& bounds1) const {
#pragma unroll
    for (int w = 0; w < 2; ++w) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int diagonal = (w == 0 ? bounds0.first : bounds1.first) / 64 - tile.position[i] / 64;
        tile.word[w][i] = words != nullptr && diagonal >= 0 && diagonal < args.diagonal_words * 64
                              ? words[diagonal >> 5]
                              : 0;
      }
    }
  }

  __device__ __forceinline__ uint32_t column_flags(const QueryBounds& bounds,
                                                   const int (&position)[2],
                                                   const uint32_t (&word)[2],
                                                   uint64_t& bits) const {
    bool counts[2];
    bool each = false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int diagonal = bounds.first / 64 - position[i] / 64;
      counts[i] = position[i] <= bounds.last && position[i] >= bounds.document_min &&
                  (word[i] >> (diagonal & 31) & 1) == 0;
      each |= counts[i] && (position[i] > bounds.first || position[i] < bounds.document_max);
    }
    bits = __ballot_sync(~0u, counts[0]) | static_cast<uint64_t>(__ballot_sync(~0u, counts[1]))
                                               << 32;
    const bool any_each = __any_sync(~0u, each);
    if (bits == 0) return 0;
    return kNeeded | kColumns | (bits == ~uint64_t{0} ? 0 : kMaskBits) | (any_each ? kMaskEach : 0);
  }

  __device__ __forceinline__ void columns(const SourceArgs& source, int row,
                                          const QueryBounds& bounds0, const QueryBounds& bounds1) {
    const int count = source.column_counts[row];
    const int32_t* positions = source.column_positions + row * source.column_capacity;
    const auto* words =
        args.diagonal_bits == nullptr
            ? nullptr
            : reinterpret_cast<const uint32_t*>(args.diagonal_bits + row * args.diagonal_words);
    const int last = max(bounds0.last, bounds1.last);
    const int token = row * args.gathered_rows + source.gathered_begin;
    // Positions are fetched two tiles ahead and bitmap words one ahead, so that their latencies hide behind other tiles.
    ColumnTile tile, ahead;
    fetch_positions(tile, positions, 0, count);
    fetch_positions(ahead, positions, 64, count);
    fetch_words(tile, words, bounds0, bounds1);
    for (int first = 0; first < count; first += 64) {
      if (__shfl_sync(~0u, tile.position[0], 0) > last) break;  // ascending
      ColumnTile beyond;
      fetch_positions(beyond, positions, first + 128, count);
      fetch_words(ahead, words, bounds0, bounds1);
      uint64_t bits0, bits1;
      const uint32_t flags0 = column_flags(bounds0, tile.position, tile.word[0], bits0);
      const uint32_t flags1 = column_flags(bounds1, tile.position, tile.word[1], bits1);
      if ((flags0 | flags1) != 0) {
        mbarrier_wait(empty(ring.slot), ring.parity ^ 1);
        const uint32_t list = base + Shape::kPositions + ring.slot * 256;
        store_shared_s32(list + lane * 4, tile.position[0]);
        store_shared_s32(list + lane * 4 + 128, tile.position[1]);
        __syncwarp();
        if (lane == 0) {
          write_notes(flags0, flags1, 0, bits0, bits1);
          load(&args.gathered_k, &args.gathered_v, token + first, 0, 0, 0, 0);
        }
        __syncwarp();
        ring.advance();
      }
      tile = ahead;
      ahead = beyond;
    }
  }

  __device__ __forceinline__ void run() {
    const uint32_t q_full = full(2 * Shape::kStages), q_empty = q_full + 8;
    if (lane == 0) {
      prefetch_tensor_map(&args.q);
      for (int s = 0; s < args.num_sources; ++s) {
        prefetch_tensor_map(&args.sources[s].k);
        prefetch_tensor_map(&args.sources[s].v);
      }
    }
    int item = 0;
    if (lane == 0) item = atomicAdd(args.next_item, 1);
    for (uint32_t parity = 1;; parity ^= 1) {
      const int current = __shfl_sync(~0u, item, 0);
      mbarrier_wait(q_empty, parity);
      if (current >= args.num_items) {
        if (lane == 0) {
          store_shared_v4(base + Shape::kItem, ~0u, 0, 0, 0);
          mbarrier_arrive(q_full);
        }
        return;
      }
      if (lane == 0) item = atomicAdd(args.next_item, 1);
      // Rows of a group together, its last query blocks, which have the most keys, first.
      const int pairs = (args.num_q_blocks + 1) / 2, inside = current % (args.group_rows * pairs);
      const int row =
          current / (args.group_rows * pairs) * args.group_rows + inside % args.group_rows;
      const int q_block = 2 * (pairs - 1 - inside / args.group_rows);
      const int batch = row / args.num_heads, head = row % args.num_heads;
      if (lane == 0) {
        store_shared_v4(base + Shape::kItem, row, q_block, 0, 0);
        mbarrier_arrive_expect(q_full, 2 * Shape::kTileBytes);
        for (int w = 0; w < 2; ++w) {
          tensor_load_5d(base + Shape::kQ + w * Shape::kTileBytes, &args.q, q_full, read_once, 0,
                         (q_block + w) * 64, 0, head * args.q_head_step, batch * args.q_batch_step);
        }
      }
      __syncwarp();
      const QueryBounds bounds0 = query_bounds(q_block, batch),
                        bounds1 = query_bounds(q_block + 1, batch);
      for (int s = 0; s < args.num_sources; ++s) {
        const SourceArgs& source = args.sources[s];
        if (source.block_starts != nullptr) blocks(source, row, q_block, bounds0, bounds1);
      }
      for (int s = 0; s < args.num_sources; ++s) {
        const SourceArgs& source = args.sources[s];
        if (source.column_counts != nullptr) columns(source, row, bounds0, bounds1);
      }
      mbarrier_wait(empty(ring.slot), ring.parity ^ 1);
      if (lane == 0) {
        write_notes(kEnd, kEnd, 0, 0, 0);
        mbarrier_arrive(full(ring.slot));
      }
      __syncwarp();
      ring.advance();
    }
  }
};

// ---- consumer ----

/// A stage as one warpgroup sees it. flags 0: none within reach.
struct Stage {
  uint32_t index, slot, flags;
  int32_t start;
  uint32_t bits_low, bits_high;
};

template <typename Element, int kD>
struct Consumer {
  using Shape = ForwardShape<kD>;
  const ForwardArgs& args;
  uint32_t base;
  int warpgroup, warp, lane;  // warp within the warpgroup
  RingCursor<Shape::kStages> ring;

  // of the item: two rows a thread, lane / 4 and 8 below
  int32_t q_position[2];
  int32_t q_document[2];
  float row_max[2], row_sum[2];
  float row_shift[2];  // row_max in powers of two, 0 where there is none
  float row_limit[2];  // scores above it raise row_max

  __device__ __forceinline__ uint32_t full(uint32_t slot) const {
    return base + Shape::kBarriers + slot * 8;
  }

  __device__ __forceinline__ void release(uint32_t slot) const {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(base + Shape::kBarriers + (Shape::kStages + slot) * 8);
  }

  __device__ __forceinline__ uint4 read_note() const {
    return load_shared_v4(base + Shape::kNotes + ring.slot * 32 + warpgroup * 16);
  }

  /// The next stage that this warpgroup needs, or the end. Stages it does not need are given back unread. Looks no further than
  /// the ring reaches from the oldest stage still held: the producer cannot refill that one, and waiting for more would hang.
  __device__ __forceinline__ Stage find(uint32_t oldest_held) {
    Stage stage;
    while (ring.index - oldest_held < Shape::kStages) {
      mbarrier_wait(full(ring.slot), ring.parity);
      const uint4 note = read_note();
      stage = {ring.index, ring.slot, note.x, static_cast<int32_t>(note.y), note.z, note.w};
      ring.advance();
      if ((note.x & kNeeded) != 0) return stage;
      release(stage.slot);
      if ((note.x & kEnd) != 0) return stage;
    }
    stage = {0, 0, 0, 0, 0, 0};
    return stage;
  }

  /// The same holding no stage: always finds one.
  __device__ __forceinline__ Stage find_any() {
    Stage stage;
    do {
      stage = find(ring.index);
    } while (stage.flags == 0);
    return stage;
  }

  __device__ __forceinline__ void issue_scores(float (&s)[32], const uint32_t (&q)[kD / 16][4],
                                               uint32_t slot) const {
    const uint32_t tile = base + slot * 2 * Shape::kTileBytes;
    const uint64_t descriptor = matrix_descriptor<16, 1024>(tile);
#pragma unroll
    for (int c = 0; c < kD / 16; ++c) {
      wgmma<Element, 64, 0>(s, q[c], descriptor + (c / 4 * 8192 + c % 4 * 32) / 16, c > 0);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void issue_output(float (&o)[kD / 2], const uint32_t (&p)[4][4],
                                               uint32_t slot) const {
    const uint32_t tile = base + (slot * 2 + 1) * Shape::kTileBytes;
    const uint64_t descriptor = matrix_descriptor<8192, 1024>(tile);
#pragma unroll
    for (int c = 0; c < 4; ++c) wgmma<Element, kD, 1>(o, p[c], descriptor + c * 2048 / 16, true);
    wgmma_commit();
  }

  __device__ __forceinline__ void mask(float (&s)[32], const Stage& stage) const {
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
    const uint32_t list = base + Shape::kPositions + stage.slot * 256;
#pragma unroll
    for (int c = 0; c < 16; ++c) {
      const int j = c / 2, e = c % 2;
      const int key = 8 * j + first + e;
      const bool counts = ((j < 4 ? low : high) >> (8 * (j % 4) + e) & 1) != 0;
      const int position = (stage.flags & kColumns) != 0 ? load_shared_s32(list + key * 4)
                                                         : stage.start + key * args.position_stride;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (!counts || position > q_position[r] || position < q_document[r])
          s[4 * j + 2 * r + e] = -INFINITY;
      }
    }
  }

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
    if ((stage.flags & (kMaskBits | kMaskEach)) != 0) mask(s, stage);
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
    }
    const bool raised = __any_sync(~0u, top[0] > row_limit[0] || top[1] > row_limit[1]);
    if (raised) raise_maxima(top, rescale);
    float sum[4] = {0, 0, 0, 0};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = s[4 * j + i];
        const float y = fmaf(x, args.scale_log2, -row_shift[i / 2]);
        x = exp2_approx(y);
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
    const bool ready = mbarrier_test_wait(full(ring.slot), ring.parity) &&
                       ring.index - current.index < Shape::kStages;
    wgmma_wait<2>();
    pin(s);
    float rescale[2];
    uint4 note;
    const bool raised = probabilities(s, current, rescale);
    note = read_note();  // means nothing unless ready
    RingCursor<Shape::kStages> beyond = ring;
    beyond.advance();
    const bool taken = ready && (note.x & kNeeded) != 0;
    const Stage following = {ring.index, ring.slot, note.x, static_cast<int32_t>(note.y),
                             note.z,     note.w};
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

  __device__ __forceinline__ void load_queries(uint32_t (&q)[kD / 16][4]) const {
    const int row = 16 * warp + lane / 8 % 2 * 8 + lane % 8;
    const uint32_t tile = base + Shape::kQ + warpgroup * Shape::kTileBytes + row * 128;
#pragma unroll
    for (int c = 0; c < kD / 16; ++c) {
      const int chunk = c % 4 * 2 + lane / 16;
      ldmatrix_x4(tile + c / 4 * 8192 + (chunk ^ row % 8) * 16, q[c]);
    }
  }

  __device__ __forceinline__ void store(const float (&o)[kD / 2], int row, int q_block) const {
    const int64_t batch = row / args.num_heads, head = row % args.num_heads;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum = row_sum[r];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      const int token = q_block * 64 + 16 * warp + lane / 4 + 8 * r;
      if (token >= args.num_queries) continue;
      const bool none = !(sum > 0) || q_position[r] >= args.seq_len;
      float* lse_at = args.lse + static_cast<int64_t>(row) * args.num_queries + token;
      float2* out_at =
          reinterpret_cast<float2*>(args.out + batch * args.out_stride_batch +
                                    token * args.out_stride_token + head * args.out_stride_head) +
          (lane & 3);
      if (args.first != 0) {
        const float factor = none ? 0.0f : 1.0f / sum;
        if ((lane & 3) == 0) {
          *lse_at =
              none ? -INFINITY : (row_max[r] * args.scale_log2 + log2f(sum)) * 0.69314718055994531f;
        }
#pragma unroll
        for (int j = 0; j < kD / 8; ++j) {
          __stcs(out_at + 4 * j,
                 none ? make_float2(0, 0)
                      : make_float2(o[4 * j + 2 * r] * factor, o[4 * j + 2 * r + 1] * factor));
        }
      } else if (!none) {
        const float lse = (row_max[r] * args.scale_log2 + log2f(sum)) * 0.69314718055994531f;
        const float before = *lse_at;
        const float top = fmaxf(lse, before);
        const float weight = expf(lse - top), weight_before = expf(before - top);
        const float total = weight + weight_before;
        const float factor = weight / total / sum, factor_before = weight_before / total;
        const bool fresh = before == -INFINITY;
#pragma unroll
        for (int j = 0; j < kD / 8; ++j) {
          const float2 old = fresh ? make_float2(0, 0) : __ldcs(out_at + 4 * j);
          __stcs(out_at + 4 * j,
                 make_float2(fmaf(o[4 * j + 2 * r], factor, old.x * factor_before),
                             fmaf(o[4 * j + 2 * r + 1], factor, old.y * factor_before)));
        }
        __syncwarp(0xFu << (lane & 28));  // the four lanes of the row have read it
        if ((lane & 3) == 0) *lse_at = top + logf(total);
      }
    }
  }

  __device__ __forceinline__ void run() {
    const uint32_t q_full = full(2 * Shape::kStages), q_empty = q_full + 8;
    for (uint32_t parity = 0;; parity ^= 1) {
      mbarrier_wait(q_full, parity);
      const uint4 item = load_shared_v4(base + Shape::kItem);
      if (item.x == ~0u) return;
      const int row = static_cast<int>(item.x);
      const int q_block = static_cast<int>(item.y) + warpgroup;
      uint32_t q[kD / 16][4];
      load_queries(q);
      release_queries(q_empty);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int inside = 16 * warp + lane / 4 + 8 * r;
        const int token = q_block * 64 + inside;
        const bool real = token < args.num_queries;
        q_position[r] =
            real ? args.q_block_starts[q_block] + inside * args.position_stride : INT_MAX;
        q_document[r] =
            real && args.document_start != nullptr
                ? args.document_start[row / args.num_heads * args.document_stride_batch + token]
                : 0;
        row_max[r] = row_limit[r] = -INFINITY;
        row_sum[r] = row_shift[r] = 0;
      }
      float o[kD / 2], s0[32], s1[32];
      uint32_t p[4][4];
#pragma unroll
      for (int i = 0; i < kD / 2; ++i) o[i] = 0;

      Stage next = find_any();
      while ((next.flags & kEnd) == 0) {
        Stage current = next;
        uint32_t held = kNoSlot;  // the slot whose product is still being added
        wgmma_fence();
        issue_scores(s0, q, current.slot);
        next = find(current.index);
        wgmma_commit();  // an empty group in place of the product that later steps have in flight here
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

  __device__ __forceinline__ void release_queries(uint32_t q_empty) const {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(q_empty);
  }
};

template <typename Element, int kD>
__global__ void __launch_bounds__(ForwardShape<kD>::kThreads, 1)
    forward_kernel(const __grid_constant__ ForwardArgs args) {
  using Shape = ForwardShape<kD>;
  extern __shared__ __align__(1024) char memory[];
  const uint32_t base = shared_address(memory);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int s = 0; s < Shape::kStages; ++s) {
      mbarrier_init(base + Shape::kBarriers + s * 8, 1);
      mbarrier_init(base + Shape::kBarriers + (Shape::kStages + s) * 8, Shape::kConsumerWarps);
    }
    mbarrier_init(base + Shape::kBarriers + 2 * Shape::kStages * 8, 1);
    mbarrier_init(base + Shape::kBarriers + (2 * Shape::kStages + 1) * 8, Shape::kConsumerWarps);
    mbarrier_init_fence();
  }
  __syncthreads();
  if (warp >= Shape::kConsumerWarps) {
    registers_decrease<40>();
    if (warp == Shape::kConsumerWarps) Producer<kD>{args, base, lane, {}}.run();
  } else {
    registers_increase<232>();
    Consumer<Element, kD> consumer{args, base, warp / 4, warp % 4, lane, {},
                                   {},   {},   {},       {},       {},   {}};
    consumer.run();
  }
}

template <typename Element, int kD>
cudaError_t launch_forward(const ForwardArgs& args, int num_sms, cudaStream_t stream) {
  using Shape = ForwardShape<kD>;
  static std::atomic<uint64_t> ready{0};  // bit per device
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  if ((ready.load(std::memory_order_acquire) >> (device & 63) & 1) == 0) {
    error = cudaFuncSetAttribute(forward_kernel<Element, kD>,
                                 cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kBytes);
    if (error != cudaSuccess) return error;
    ready.fetch_or(uint64_t{1} << (device & 63), std::memory_order_release);
  }
  const int blocks = args.num_items < num_sms ? args.num_items : num_sms;
  forward_kernel<Element, kD><<<blocks, Shape::kThreads, Shape::kBytes, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace mtraining::kernels::sm90
