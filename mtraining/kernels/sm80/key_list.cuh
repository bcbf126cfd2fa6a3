// KeyList: the query blocks that need a tile of 64 keys, of all query heads of its kv head in order, a few dozen at a time.
//
// In:   BackwardArgs and what the tile is: a key block of a source, or 64 columns of one head. Out: stages in shared memory, in
//       the same order on every run. Next: backward_keys_kernel.cuh.
//
// The transpose of QueryList. Entries are solved for the query block; in a CSR list every query block is asked whether it has
// the key block (binary search), so that no transposed list is ever stored. All threads of the block call every function.
#pragma once

#include <climits>

#include "mtraining/kernels/sm80/attention_args.cuh"
#include "mtraining/kernels/sm80/query_list.cuh"

namespace mtraining::kernels::sm80 {

/// 64 keys whose gradients one thread block sums.
struct KeyTile {
  int32_t source;
  int32_t first;       // key block (blocks), first column (columns)
  int32_t keys;        // of the 64 that exist
  int32_t row;         // first (sample, head) that walks
  int32_t num_rows;    // heads that walk
  int32_t start;       // position of the first key
  int32_t last;        // of the last one
  int32_t begin, end;  // query blocks
  int32_t turn;        // of columns: heads and chunks of query blocks, in order
  bool columns;
};

/// Where a whole stage's rows lie in memory.
struct alignas(16) WalkedRows {
  const char *q, *dout;
};

template <int kWarps>
struct KeyListMemory {
  static constexpr uint32_t kStagesHeld = 32 * kWarps + kStagesKept;
  Stage stages[kStagesHeld];
  WalkedRows rows[kStagesHeld];
  KeyTile tile;
  int32_t warp_counts[kWarps];
  int32_t item;
};

template <int kWarps>
class KeyList {
 public:
  using Memory = KeyListMemory<kWarps>;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr uint32_t kStagesHeld = Memory::kStagesHeld;

  __device__ __forceinline__ KeyList(const BackwardArgs& args, Memory& memory)
      : args_(args), memory_(memory), stages_(shared_address(memory.stages)) {}

  /// Before: a barrier after the last use of the item before.
  __device__ __forceinline__ void begin(const KeyTile& tile) {
    if (threadIdx.x == 0) memory_.tile = tile;
    head_ = built_ = 0;
    next_ = 0;
    finished_ = false;
    __syncthreads();
  }
  __device__ __forceinline__ const KeyTile& tile() const { return memory_.tile; }
  __device__ __forceinline__ int built() const { return built_; }
  __device__ __forceinline__ Stage stage(int i) const {
    const int4 v = load_shared_v4(stages_ + i % kStagesHeld * kStageBytes);
    return {v.x, static_cast<uint32_t>(v.y), v.z, v.w};
  }
  /// Of a whole stage.
  __device__ __forceinline__ WalkedRows rows(int i) const { return memory_.rows[i % kStagesHeld]; }
  /// Until more than `ahead` (less than kStagesKept) stages follow stage i - 1, or there are no more.
  __device__ __forceinline__ void refill(int i, int ahead) {
    while (built_ - i <= ahead && !finished_) append();
  }

 private:
  __device__ __forceinline__ void append() {
    const SourceArgs& source = args_.sources[memory_.tile.source];
    const bool entries = !memory_.tile.columns && source.kind == BlockListKind::kEntries;
    while (head_ < memory_.tile.num_rows) {
      const int total = entries ? source.num_entries[memory_.tile.row + head_]
                                : memory_.tile.end - memory_.tile.begin;
      if (next_ < total) return append_blocks(source, entries, total);
      ++head_;
      next_ = 0;
    }
    finished_ = true;
  }

  /// The query block that the i-th entry of the row meets this key block with, or -1.
  __device__ __forceinline__ int by_entry(const SourceArgs& source, int row, int i) const {
    const Entry entry = source.entries[row * source.entry_capacity + i];
    const int m = source.blocks_per_stripe;
    const int inside = memory_.tile.first % m + entry.delta;
    const int block = memory_.tile.first + entry.lambda * m + entry.delta;
    return inside < 0 || inside >= m || block < 0 || block >= args_.num_q_blocks ? -1 : block;
  }

  __device__ __forceinline__ bool has_key_block(const SourceArgs& source, int row,
                                                int q_block) const {
    const int64_t* begin = source.row_begin + int64_t{row} * (args_.num_q_blocks + 1) + q_block;
    int64_t low = begin[0], high = begin[1];
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      const int found = source.key_blocks[middle];
      if (found == memory_.tile.first) return true;
      if (found < memory_.tile.first)
        low = middle + 1;
      else
        high = middle;
    }
    return false;
  }

  __device__ __forceinline__ void append_blocks(const SourceArgs& source, bool entries, int total) {
    const int row = memory_.tile.row + head_;
    const int i = next_ + static_cast<int>(threadIdx.x);
    next_ += kThreads;
    Stage stage{-1, 0, 0, row};
    if (i < total) stage.key = entries ? by_entry(source, row, i) : memory_.tile.begin + i;
    bool needed = false;
    if (stage.key >= 0) {
      const QueryBounds query =
          args_.bounds[int64_t{row / args_.num_heads} * args_.num_q_blocks + stage.key];
      stage.start = query.first;
      needed = query.last >= 0 && memory_.tile.start <= query.last &&
               memory_.tile.last >= query.document_min;
      if (needed && !entries && !memory_.tile.columns)
        needed = has_key_block(source, row, stage.key);
      const bool masked = memory_.tile.last > query.first ||
                          memory_.tile.start < query.document_max || memory_.tile.keys < 64;
      if (masked) stage.info |= kMasked;
      if (memory_.tile.columns) stage.info |= kColumns;
      if (query.first / 64 != query.last / 64) stage.info |= kEach;
      if (args_.vectors && query.last - query.first == 63 * args_.position_stride)
        stage.info |= kWhole;
    }
    const uint32_t votes = __ballot_sync(~0u, needed);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (lane == 0) memory_.warp_counts[warp] = __popc(votes);
    __syncthreads();
    int before = 0, added = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const int count = memory_.warp_counts[w];
      if (w < warp) before += count;
      added += count;
    }
    if (needed) {
      const uint32_t at = (built_ + before + __popc(votes & ((1u << lane) - 1))) % kStagesHeld;
      const int batch = row / args_.num_heads, head = row % args_.num_heads;
      const int64_t token = int64_t{stage.key} * 64;
      memory_.stages[at] = stage;
      memory_.rows[at] = {head_of(args_.q, batch, head) + token * args_.q.stride_token,
                          head_of(args_.dout, batch, head) + token * args_.dout.stride_token};
    }
    built_ += added;
    __syncthreads();
  }

  const BackwardArgs& args_;
  Memory& memory_;
  uint32_t stages_;  // shared address
  int head_ = 0, next_ = 0, built_ = 0;
  bool finished_ = false;
};

}  // namespace mtraining::kernels::sm80
