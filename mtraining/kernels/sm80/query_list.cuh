// QueryList: the key tiles that a set of neighbouring query blocks of one head needs, a few dozen at a time.
//
// In:   AttentionArgs, a row (sample, head), the first query block. Out: stages in shared memory, each a tile of 64 keys with
//       who needs it and how it is masked, in the same order on every run. Next: forward_kernel.cuh, backward_queries_kernel.cuh.
//
// A key block that two query blocks of the set need is one stage. All threads of the block call every function.
#pragma once

#include <climits>

#include "mtraining/kernels/sm80/attention_args.cuh"
#include "mtraining/kernels/sm80/tile.cuh"

namespace mtraining::kernels::sm80 {

/// A tile of the walk. Query lists: key is the key block or the first column, start the position of its first key. Key lists:
/// key is the query block, start the position of its first row, row the sample and head.
struct alignas(16) Stage {
  int32_t key;
  uint32_t info;
  int32_t start;
  int32_t row;
};
// Stage::info: the source in the low byte, and for each group of 64 queries:
inline constexpr uint32_t kColumns = 1u << 8;  // of the whole stage: keys are columns
inline constexpr uint32_t kNeeded = 1u << 9;   // << group
inline constexpr uint32_t kMasked = 1u << 11;  // << group: some pair does not count
inline constexpr uint32_t kEach = 1u << 13;    // << group: columns, compared pair by pair
inline constexpr int kStagesHeld = 256;        // of the list in shared memory
inline constexpr int kBitsHeld = 32;

template <int kGroups, int kWarps>
struct QueryListMemory {
  Stage stages[kStagesHeld];
  uint64_t bits[kBitsHeld][2];  // of column stages: which keys may count, per group
  QueryBounds bounds[2];
  int32_t warp_counts[kWarps];
  int32_t item;
};

template <int kGroups, int kWarps>
class QueryList {
 public:
  using Memory = QueryListMemory<kGroups, kWarps>;
  static constexpr int kThreads = 32 * kWarps;

  __device__ __forceinline__ QueryList(const AttentionArgs& args, Memory& memory)
      : args_(args), memory_(memory) {}

  /// Before: a barrier after the last use of the item before.
  __device__ __forceinline__ void begin(int row, int q_block) {
    row_ = row;
    q_block_ = q_block;
    source_ = next_ = built_ = 0;
    columns_ = finished_ = false;
    if (threadIdx.x < kGroups) {
      QueryBounds bounds{0, -1, 0, 0};
      const int block = q_block + static_cast<int>(threadIdx.x);
      if (block < args_.num_q_blocks)
        bounds = args_.bounds[int64_t{row / args_.num_heads} * args_.num_q_blocks + block];
      memory_.bounds[threadIdx.x] = bounds;
    }
    __syncthreads();
  }

  __device__ __forceinline__ int built() const { return built_; }
  __device__ __forceinline__ bool finished() const { return finished_; }
  __device__ __forceinline__ const Stage& stage(int i) const {
    return memory_.stages[i % kStagesHeld];
  }
  __device__ __forceinline__ uint64_t bits(int i, int group) const {
    return memory_.bits[i % kBitsHeld][group];
  }
  __device__ __forceinline__ const QueryBounds& bounds(int group) const {
    return memory_.bounds[group];
  }

  /// Until more than `ahead` stages follow stage i - 1, or there are no more.
  __device__ __forceinline__ void refill(int i, int ahead) {
    while (built_ - i <= ahead && !finished_) append();
  }

  /// Rows of k (v) that stage i needs.
  __device__ __forceinline__ TileRows tile_rows(const Stage& stage, bool values) const {
    const SourceArgs& source = args_.sources[stage.info & 0xFF];
    const Rows& rows = values ? source.v : source.k;
    const char* head =
        head_of(rows, row_ / args_.num_heads, row_ % args_.num_heads / args_.heads_per_kv_head);
    if ((stage.info & kColumns) != 0) {
      return {head,
              rows.stride_token,
              source.column_rows + row_ * source.column_capacity + stage.key,
              0,
              source.column_counts[row_] - stage.key,
              0,
              0,
              0,
              0};
    }
    int lowest = INT_MAX, highest = -1;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      if (bounds(g).last < 0) continue;
      lowest = min(lowest, bounds(g).document_min);
      highest = max(highest, bounds(g).last);
    }
    return {head,
            rows.stride_token,
            nullptr,
            stage.key * 64,
            source.num_keys - stage.key * 64,
            stage.start,
            args_.position_stride,
            lowest,
            highest};
  }

 private:
  __device__ __forceinline__ void append() {
    while (source_ < args_.num_sources) {
      const SourceArgs& source = args_.sources[source_];
      if (!columns_) {
        const int total = source.block_starts == nullptr ? 0 : candidates(source);
        if (next_ < total) return append_blocks(source);
      } else if (source.column_counts != nullptr) {
        const int count = source.column_counts[row_];
        if (next_ * 64 < count) return append_columns(source, count);
      }
      if (columns_) ++source_;
      columns_ = !columns_;
      next_ = 0;
    }
    finished_ = true;
  }

  // ---- blocks ----

  __device__ __forceinline__ int list_length(const SourceArgs& source, int group) const {
    if (q_block_ + group >= args_.num_q_blocks) return 0;
    if (source.kind == BlockListKind::kEntries) return source.num_entries[row_];
    const int64_t* begin =
        source.row_begin + int64_t{row_} * (args_.num_q_blocks + 1) + q_block_ + group;
    return static_cast<int>(begin[1] - begin[0]);
  }
  __device__ __forceinline__ int candidates(const SourceArgs& source) const {
    int most = 0;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) most = max(most, list_length(source, g));
    return most * kGroups;
  }

  /// The e-th key block of a group's list, descending; -1 where there is none.
  __device__ __forceinline__ int key_block(const SourceArgs& source, int group, int e) const {
    if (e < 0 || e >= list_length(source, group)) return -1;
    if (source.kind == BlockListKind::kEntries) {
      const Entry entry = source.entries[row_ * source.entry_capacity + e];
      const int m = source.blocks_per_stripe;
      const int inside = (q_block_ + group) % m - entry.delta;
      const int block = q_block_ + group - (entry.lambda * m + entry.delta);
      return inside < 0 || inside >= m || block < 0 || block >= source.num_blocks ? -1 : block;
    }
    const int64_t end =
        source.row_begin[int64_t{row_} * (args_.num_q_blocks + 1) + q_block_ + group + 1];
    return source.key_blocks[end - 1 - e];
  }

  /// Whether the other group's list has the block that this group's list has at e.
  __device__ __forceinline__ bool other_has(const SourceArgs& source, int group, int e,
                                            int block) const {
    if (memory_.bounds[1 - group].last < 0) return false;
    if (source.kind == BlockListKind::kEntries) {
      // The distance to the other group's query block is one more (less): at most three entries on, since a list is ascending
      // and has a distance at most twice.
      const int step = group == 0 ? 1 : -1;
#pragma unroll
      for (int i = 1; i <= 3; ++i) {
        if (key_block(source, 1 - group, e + i * step) == block) return true;
      }
      return false;
    }
    const int64_t* begin =
        source.row_begin + int64_t{row_} * (args_.num_q_blocks + 1) + q_block_ + 1 - group;
    int64_t low = begin[0], high = begin[1];
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      const int found = source.key_blocks[middle];
      if (found == block) return true;
      if (found < block)
        low = middle + 1;
      else
        high = middle;
    }
    return false;
  }

  __device__ __forceinline__ uint32_t block_flags(const SourceArgs& source, int group, int block,
                                                  int start) const {
    const QueryBounds& query = memory_.bounds[group];
    const int keys = min(64, source.num_keys - block * 64);
    const int last = start + (keys - 1) * args_.position_stride;
    if (query.last < 0 || start > query.last || last < query.document_min) return 0;
    const bool masked = last > query.first || start < query.document_max || keys < 64;
    return (kNeeded | (masked ? kMasked : 0)) << group;
  }

  __device__ __forceinline__ void append_blocks(const SourceArgs& source) {
    const int candidate = next_ + static_cast<int>(threadIdx.x);
    next_ += kThreads;
    const int group = candidate % kGroups, e = candidate / kGroups;
    Stage stage{-1, static_cast<uint32_t>(source_), 0, row_};
    if (memory_.bounds[group].last >= 0) stage.key = key_block(source, group, e);
    uint32_t flags = 0;
    if (stage.key >= 0) {
      stage.start = source.block_starts[stage.key];
      const bool shared = kGroups > 1 && other_has(source, group, e, stage.key);
      if (!shared || group == 0) flags = block_flags(source, group, stage.key, stage.start);
      if (shared && group == 0) flags |= block_flags(source, 1, stage.key, stage.start);
    }
    stage.info |= flags;
    const uint32_t needed = __ballot_sync(~0u, flags != 0);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (lane == 0) memory_.warp_counts[warp] = __popc(needed);
    __syncthreads();
    int before = 0, total = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const int count = memory_.warp_counts[w];
      if (w < warp) before += count;
      total += count;
    }
    if (flags != 0)
      memory_.stages[(built_ + before + __popc(needed & ((1u << lane) - 1))) % kStagesHeld] = stage;
    built_ += total;
    __syncthreads();
  }

  // ---- columns ----

  /// A warp looks at two tiles of 64 columns, two columns a lane.
  __device__ __forceinline__ void append_columns(const SourceArgs& source, int count) {
    constexpr int kTiles = 2;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int32_t* positions = source.column_positions + row_ * source.column_capacity;
    const int first_tile = next_ + warp * kTiles;
    next_ += kWarps * kTiles;
    int position[kTiles][2];
#pragma unroll
    for (int u = 0; u < kTiles; ++u) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int column = (first_tile + u) * 64 + 32 * h + lane;
        position[u][h] = column < count ? positions[column] : INT_MAX;
      }
    }
    uint32_t flags[kTiles];
    uint64_t bits[kTiles][kGroups];
    bool beyond = false;
#pragma unroll
    for (int u = 0; u < kTiles; ++u) {
      flags[u] = 0;
      bool later = true;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const QueryBounds& query = memory_.bounds[g];
        const bool straddles = query.first / 64 != query.last / 64;
        bool counts[2], each = false;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int p = position[u][h];
          counts[h] = p <= query.last && p >= query.document_min &&
                      (straddles || !diagonal_chosen(args_, row_, query.first, p));
          each |= counts[h] && (straddles || p > query.first || p < query.document_max);
        }
        later &= position[u][0] > query.last;
        bits[u][g] = __ballot_sync(~0u, counts[0]) |
                     static_cast<uint64_t>(__ballot_sync(~0u, counts[1])) << 32;
        const bool any_each = __any_sync(~0u, each);
        if (bits[u][g] != 0)
          flags[u] |= (kNeeded | (bits[u][g] != ~uint64_t{0} || any_each ? kMasked : 0) |
                       (any_each ? kEach : 0))
                      << g;
      }
      beyond |= lane == 0 && later;  // positions ascend: nor does any later column count
    }
    if (lane == 0) memory_.warp_counts[warp] = (flags[0] != 0) + (flags[1] != 0);
    if (__syncthreads_or(beyond)) next_ = (count + 63) / 64;
    int before = 0, total = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const int tiles = memory_.warp_counts[w];
      if (w < warp) before += tiles;
      total += tiles;
    }
    if (lane == 0) {
      int at = built_ + before;
#pragma unroll
      for (int u = 0; u < kTiles; ++u) {
        if (flags[u] == 0) continue;
        memory_.stages[at % kStagesHeld] = {
            (first_tile + u) * 64, static_cast<uint32_t>(source_) | kColumns | flags[u], 0, row_};
#pragma unroll
        for (int g = 0; g < kGroups; ++g) memory_.bits[at % kBitsHeld][g] = bits[u][g];
        ++at;
      }
    }
    built_ += total;
    __syncthreads();
  }

  const AttentionArgs& args_;
  Memory& memory_;
  int row_ = 0, q_block_ = 0;
  int source_ = 0, next_ = 0;  // next_: candidates (blocks), tiles (columns)
  bool columns_ = false, finished_ = false;
  int built_ = 0;
};

}  // namespace mtraining::kernels::sm80
