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
/// key is the query block, start the position of its first row. row: the sample and head.
struct alignas(16) Stage {
  int32_t key;
  uint32_t info;
  int32_t start;
  int32_t row;
};
/// Where a query list's stage lies in memory: its first row where it is whole, else row 0 of the source.
struct alignas(16) StageRows {
  const char *k, *v;
};
// Stage::info: the source in the low byte, and for each group of 64 queries:
inline constexpr uint32_t kColumns = 1u << 8;  // of the whole stage: keys are columns
inline constexpr uint32_t kNeeded = 1u << 9;   // << group
inline constexpr uint32_t kMasked = 1u << 11;  // << group: some pair does not count
inline constexpr uint32_t kEach = 1u << 13;    // << group: columns, compared pair by pair
inline constexpr uint32_t kWhole = 1u
                                   << 15;  // of the whole stage: 64 consecutive rows that all count
inline constexpr uint32_t kStageBytes = sizeof(Stage);
/// Stages that a list keeps behind those it adds at a time: those still to be used when it is filled again.
inline constexpr uint32_t kStagesKept = 4;
inline constexpr int kQueryColumns = 2;  // tiles of columns that a warp looks at at a time

/// Of a tile of `keys` keys from position `start` on, step apart: the only one that a query sees, or -1.
__device__ __forceinline__ int lone_key(int position, int document, int start, int step, int keys) {
  if (position < start) return -1;
  const int low = document > start ? (document - start + step - 1) / step : 0;
  return low == min(keys - 1, (position - start) / step) ? low : -1;
}

/// kStagesHeld: in shared memory, of which kColumnsHeld of columns in a row.
template <int kGroups, int kWarps, uint32_t kStagesHeld, uint32_t kColumnsHeld>
struct QueryListMemory {
  Stage stages[kStagesHeld];
  StageRows rows[kStagesHeld];
  uint64_t bits[kColumnsHeld][2];    // of column stages: which keys may count, per group
  int32_t tokens[kColumnsHeld][64];  // of column stages: rows of k and v
  QueryBounds bounds[2];
  int32_t source, next,
      columns;  // where the walk goes on; next: candidates (blocks), tiles (columns)
  int32_t warp_counts[kWarps];
  int32_t item;
};

template <int kGroups, int kWarps, uint32_t kStagesHeld, uint32_t kColumnsHeld>
class QueryList {
 public:
  using Memory = QueryListMemory<kGroups, kWarps, kStagesHeld, kColumnsHeld>;
  static constexpr int kThreads = 32 * kWarps;
  static_assert(kStagesHeld >= kThreads + kStagesKept);
  static_assert(kColumnsHeld >= kQueryColumns * kWarps + kStagesKept);

  __device__ __forceinline__ QueryList(const AttentionArgs& args, Memory& memory)
      : args_(args), memory_(memory), stages_(shared_address(memory.stages)) {}

  /// Before: a barrier after the last use of the item before.
  __device__ __forceinline__ void begin(int row, int q_block) {
    row_ = row;
    q_block_ = q_block;
    built_ = 0;
    finished_ = false;
    if (threadIdx.x == 0) memory_.source = memory_.next = memory_.columns = 0;
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
  __device__ __forceinline__ Stage stage(int i) const {
    const int4 v = load_shared_v4(stages_ + i % kStagesHeld * kStageBytes);
    return {v.x, static_cast<uint32_t>(v.y), v.z, v.w};
  }
  __device__ __forceinline__ uint64_t bits(int i, int group) const {
    return memory_.bits[i % kColumnsHeld][group];
  }
  __device__ __forceinline__ const QueryBounds& bounds(int group) const {
    return memory_.bounds[group];
  }

  /// Until more than `ahead` (less than kStagesKept) stages follow stage i - 1, or there are no more.
  __device__ __forceinline__ void refill(int i, int ahead) {
    while (built_ - i <= ahead && !finished_) append();
  }

  /// Starts the copy of stage i's keys or values.
  template <int kD>
  __device__ __forceinline__ void load(int i, bool values, uint32_t tile) const {
    const Stage stage = this->stage(i);
    const SourceArgs& source = args_.sources[stage.info & 0xFF];
    const int4 at = load_shared_v4(stages_ + (kStagesHeld + i % kStagesHeld) * kStageBytes);
    const uint64_t address = static_cast<uint32_t>(values ? at.z : at.x) |
                             static_cast<uint64_t>(static_cast<uint32_t>(values ? at.w : at.y))
                                 << 32;
    const char* rows = reinterpret_cast<const char*>(address);
    const int64_t stride = values ? source.v.stride_token : source.k.stride_token;
    if ((stage.info & kWhole) != 0) {
      load_whole_tile<kD, kThreads>(tile, rows, stride, args_.head_dim);
      return;
    }
    if ((stage.info & kColumns) != 0) {
      const int32_t* tokens = memory_.tokens[i % kColumnsHeld];
      const int count = source.column_counts[row_] - stage.key;
      if (args_.vectors)
        load_listed_tile<kD, kThreads>(tile, rows, stride, tokens, count, args_.head_dim);
      else
        load_any_tile<kD, kThreads>(tile, {rows, stride, tokens, 0, count, 0, 0, 0, 0},
                                    args_.head_dim, false);
      return;
    }
    const TileRows from{rows,
                        stride,
                        nullptr,
                        stage.key * 64,
                        source.num_keys - stage.key * 64,
                        stage.start,
                        args_.position_stride,
                        lowest(),
                        highest()};
    load_any_tile<kD, kThreads>(tile, from, args_.head_dim, args_.vectors);
  }

 private:
  /// Positions outside these no query of the set may see.
  __device__ __forceinline__ int lowest() const {
    int lowest = INT_MAX;
#pragma unroll
    for (int g = 0; g < kGroups; ++g)
      if (memory_.bounds[g].last >= 0) lowest = min(lowest, memory_.bounds[g].document_min);
    return lowest;
  }
  __device__ __forceinline__ int highest() const {
    int highest = -1;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) highest = max(highest, memory_.bounds[g].last);
    return highest;
  }

  /// Where the rows of a stage lie, in their place in shared memory.
  __device__ __forceinline__ void put(int at, Stage stage) const {
    const SourceArgs& source = args_.sources[stage.info & 0xFF];
    const int batch = row_ / args_.num_heads;
    const int kv_head = row_ % args_.num_heads / args_.heads_per_kv_head;
    StageRows rows{head_of(source.k, batch, kv_head), head_of(source.v, batch, kv_head)};
    const bool block = (stage.info & kColumns) == 0;
    if (block && args_.vectors && source.num_keys - stage.key * 64 >= 64 &&
        stage.start >= lowest() && stage.start + 63 * args_.position_stride <= highest()) {
      stage.info |= kWhole;
      rows.k += stage.key * 64 * source.k.stride_token;
      rows.v += stage.key * 64 * source.v.stride_token;
    }
    memory_.stages[at % kStagesHeld] = stage;
    memory_.rows[at % kStagesHeld] = rows;
  }

  __device__ __forceinline__ void append() {
    int next = memory_.next;
    bool columns = memory_.columns != 0;
    for (int s = memory_.source; s < args_.num_sources;) {
      const SourceArgs& source = args_.sources[s];
      if (!columns) {
        const int total = source.block_starts == nullptr ? 0 : candidates(source);
        if (next < total) return append_blocks(source, s, next);
      } else if (source.column_counts != nullptr) {
        const int count = source.column_counts[row_];
        if (next * 64 < count) return append_columns(source, s, next, count);
      }
      if (columns) ++s;
      columns = !columns;
      next = 0;
    }
    finished_ = true;
  }

  /// Where the next append() goes on. Between two barriers.
  __device__ __forceinline__ void go_on(int source, int next, bool columns) const {
    if (threadIdx.x != 0) return;
    memory_.source = source;
    memory_.next = next;
    memory_.columns = columns ? 1 : 0;
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

  __device__ __forceinline__ void append_blocks(const SourceArgs& source, int s, int next) {
    const int candidate = next + static_cast<int>(threadIdx.x);
    const int group = candidate % kGroups, e = candidate / kGroups;
    Stage stage{-1, static_cast<uint32_t>(s), 0, row_};
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
    go_on(s, next + kThreads, false);
    int before = 0, total = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const int count = memory_.warp_counts[w];
      if (w < warp) before += count;
      total += count;
    }
    if (flags != 0) put(built_ + before + __popc(needed & ((1u << lane) - 1)), stage);
    built_ += total;
    __syncthreads();
  }

  // ---- columns ----

  /// A warp looks at two tiles of 64 columns, two columns a lane.
  __device__ __forceinline__ void append_columns(const SourceArgs& source, int s, int next,
                                                 int count) {
    constexpr int kTiles = kQueryColumns;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int32_t* positions = source.column_positions + row_ * source.column_capacity;
    const int first_tile = next + warp * kTiles;
    const int32_t* tokens = source.column_rows + row_ * source.column_capacity;
    int position[kTiles][2], token[kTiles][2];
#pragma unroll
    for (int u = 0; u < kTiles; ++u) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int column = (first_tile + u) * 64 + 32 * h + lane;
        position[u][h] = column < count ? positions[column] : INT_MAX;
        token[u][h] = column < count ? tokens[column] : 0;
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
    const bool last = __syncthreads_or(beyond) != 0;
    go_on(s, last ? (count + 63) / 64 : next + kWarps * kTiles, true);
    int before = 0, total = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const int tiles = memory_.warp_counts[w];
      if (w < warp) before += tiles;
      total += tiles;
    }
    int at = built_ + before;
#pragma unroll
    for (int u = 0; u < kTiles; ++u) {
      if (flags[u] == 0) continue;
      memory_.tokens[at % kColumnsHeld][lane] = token[u][0];
      memory_.tokens[at % kColumnsHeld][lane + 32] = token[u][1];
      if (lane == 0) {
        put(at, {(first_tile + u) * 64, static_cast<uint32_t>(s) | kColumns | flags[u], 0, row_});
#pragma unroll
        for (int g = 0; g < kGroups; ++g) memory_.bits[at % kColumnsHeld][g] = bits[u][g];
      }
      ++at;
    }
    built_ += total;
    __syncthreads();
  }

  const AttentionArgs& args_;
  Memory& memory_;
  uint32_t stages_;  // shared address; rows follow
  int row_ = 0, q_block_ = 0;
  bool finished_ = false;
  int built_ = 0;
};

}  // namespace mtraining::kernels::sm80
