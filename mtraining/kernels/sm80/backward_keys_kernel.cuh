// The key pass of the backward: dk and dv of 64 keys, summed over the query heads of their kv head in order.
//
// In:   BackwardArgs. Out: dk, dv. Next: one instantiation a file, backward_keys_<dtype>_d<head_dim>.cu.
//
// Scores are computed transposed, keys x queries: P^T and dS^T, rounded, are left operands from shared memory.
#pragma once

#include "mtraining/kernels/sm80/backward_products.cuh"
#include "mtraining/kernels/sm80/key_list.cuh"
#include "mtraining/kernels/sm80/launch_shared.cuh"

namespace mtraining::kernels::sm80 {

/// lse, delta and documents of a stage's 64 queries; of masked blocks of keys the only one that a query sees, or -1.
struct alignas(16) QueryRowValues {
  float lse[64];  // in powers of two, +inf where the row does not count
  float delta[64];
  int32_t document[64];
  int32_t lone_key[64];
};

template <int kD>
struct BackwardKeysShape : BackwardShape<kD> {
  using List = KeyList<BackwardShape<kD>::kWarps>;
  // Steps of the keys' and the values' rows that registers have room for.
  static constexpr int kKeysHeld = kD == 64 ? 4 : 0;
  static constexpr int kValuesHeld = kD == 64 ? 2 : 0;
  struct Memory {
    typename List::Memory list;
    QueryRowValues values[BackwardShape<kD>::kMaxStages];
  };
  static constexpr int shared_bytes(int stages) {
    return (2 + 2 * stages) * Tile<kD>::kBytes + BackwardShape<kD>::kPassedBytes +
           static_cast<int>(sizeof(Memory));
  }
};

template <typename Element, int kD>
struct BackwardKeys {
  using Shape = BackwardKeysShape<kD>;
  using List = typename Shape::List;
  const BackwardArgs& args;
  uint32_t keys, values, walked, passed;  // shared addresses; passed: P^T, then dS^T of a stage
  typename Shape::Memory& memory;
  List list;
  int row, column, summed, lane;  // of the warp: first key, query, gradient column
  float dk[Shape::kSummed], dv[Shape::kSummed];
  LeftRows<kD, Shape::kKeysHeld> key_left;
  LeftRows<kD, Shape::kValuesHeld> value_left;
  int batch = 0;        // of the item
  int32_t position[4];  // of rows row + lane / 4 and each 8 below, INT_MAX where there is no key
  float next_lse = 0, next_delta = 0;  // thread r: row r of the stage on its way
  int32_t next_document = 0;

  __device__ __forceinline__ BackwardKeys(const BackwardArgs& a, char* shared)
      : args(a),
        keys(shared_address(shared)),
        values(keys + Tile<kD>::kBytes),
        walked(values + Tile<kD>::kBytes),
        passed(walked + 2 * a.stages * Tile<kD>::kBytes),
        memory(*reinterpret_cast<typename Shape::Memory*>(
            shared + (2 + 2 * a.stages) * Tile<kD>::kBytes + Shape::kPassedBytes)),
        list(a, memory.list),
        row(Shape::row()),
        column(Shape::share() * Shape::kColumns),
        summed(Shape::share() * Shape::kSummed),
        lane(threadIdx.x % 32) {
    key_left.at = Tile<kD>::left(keys, row, lane);
    value_left.at = Tile<kD>::left(values, row, lane);
  }

  // ---- stages ----

  __device__ __forceinline__ uint32_t queries(int i) const {
    return walked + (i & (args.stages - 1)) * 2 * Tile<kD>::kBytes;
  }

  __device__ __forceinline__ void issue(int i) {
    if (i < list.built()) {
      const Stage stage = list.stage(i);
      const bool whole = (stage.info & kWhole) != 0;
      QueryBounds bounds{};
      if (whole) {
        const WalkedRows from = list.rows(i);
        load_whole_tile<kD, Shape::kThreads>(queries(i), from.q, args.q.stride_token,
                                             args.head_dim);
        load_whole_tile<kD, Shape::kThreads>(queries(i) + Tile<kD>::kBytes, from.dout,
                                             args.dout.stride_token, args.head_dim);
      } else {
        const int head = stage.row - batch * args.num_heads;
        bounds = args.bounds[int64_t{batch} * args.num_q_blocks + stage.key];
#pragma unroll 1
        for (int x = 0; x < 2; ++x)
          load_any_tile<kD, Shape::kThreads>(
              queries(i) + x * Tile<kD>::kBytes,
              query_rows(args, x == 0 ? args.q : args.dout, batch, head, stage.key, bounds),
              args.head_dim, args.vectors);
      }
      if (threadIdx.x < 64) {
        const int token = stage.key * 64 + static_cast<int>(threadIdx.x);
        const bool real = whole || (token < args.num_queries &&
                                    bounds.first + static_cast<int>(threadIdx.x) *
                                                       int64_t{args.position_stride} <=
                                        bounds.last);
        const int64_t at = int64_t{stage.row} * args.num_queries + token;
        next_lse = real ? args.lse[at] : INFINITY;
        next_delta = real ? args.delta[at] : 0;
        next_document = real && args.document_start != nullptr
                            ? args.document_start[batch * args.document_stride_batch + token]
                            : 0;
      }
    }
    copy_async_commit();
  }

  /// Waits for stage i; its rows without keys become zeros, whatever was saved for them.
  __device__ __forceinline__ void arrive(int i) {
    QueryRowValues& of = memory.values[(i & (args.stages - 1))];
    bool empty = false;
    if (threadIdx.x < 64) {
      empty = next_lse == -INFINITY;
      of.lse[threadIdx.x] = empty ? INFINITY : next_lse * 1.4426950408889634f;
      of.delta[threadIdx.x] = empty ? 0 : next_delta;
      of.document[threadIdx.x] = next_document;
      const Stage stage = list.stage(i);
      if ((stage.info & (kMasked | kColumns)) == kMasked)
        of.lone_key[threadIdx.x] =
            lone_key(stage.start + static_cast<int>(threadIdx.x) * args.position_stride,
                     next_document, list.tile().start, args.position_stride, list.tile().keys);
    }
    copy_async_wait<0>();
    if (!__syncthreads_or(empty)) return;
    for (int x = threadIdx.x; x < 64 * Tile<kD>::kChunks; x += Shape::kThreads) {
      const int r = x / Tile<kD>::kChunks;
      if (of.lse[r] != INFINITY) continue;
      const uint32_t at = queries(i) + x * 16;
      store_shared_v4(at, make_uint4(0, 0, 0, 0));
      store_shared_v4(at + Tile<kD>::kBytes, make_uint4(0, 0, 0, 0));
    }
    __syncthreads();
  }

  // ---- one stage ----

  /// s[8 j + 2 r + e]: key row + lane / 4 + 8 r, query column + 8 j + 2 (lane % 4) + e.
  __device__ __forceinline__ void mask(float (&s)[Shape::kColumns], const Stage& stage,
                                       const QueryRowValues& of, const uint32_t (&words)[4]) const {
    const bool each = (stage.info & kColumns) != 0 && (stage.info & kEach) != 0;
    uint32_t bits = 0;  // bit x: of s[x]
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      if (position[r] == INT_MAX || diagonal_bit(words[r], stage.start, position[r]))
        bits |= 0x03030303u << (2 * r);
    }
    if (each || (stage.info & kMasked) != 0) {
      // Pair by pair, in a loop of its own: rare, and short code.
#pragma unroll 1
      for (int c = 0; c < Shape::kColumns / 4; ++c) {
        const int query = column + c / 2 * 8 + 2 * (lane % 4) + c % 2;
        const int at = stage.start + query * args.position_stride;
        const int document = of.document[query];
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          if (position[r] > at || position[r] < document ||
              (each && diagonal_chosen(args, stage.row, at, position[r])))
            bits |= 1u << (c / 2 * 8 + 2 * r + c % 2);
        }
      }
    }
#pragma unroll
    for (int x = 0; x < Shape::kColumns; ++x)
      if ((bits >> x & 1) != 0) s[x] = -INFINITY;
  }

  /// delta to gradients of probabilities of queries that see one key: their difference is exactly 0.
  __device__ __forceinline__ void forget_lone_keys(float (&dp)[Shape::kColumns],
                                                   const float (&p)[Shape::kColumns],
                                                   const QueryRowValues& of) const {
#pragma unroll
    for (int c = 0; c < Shape::kColumns / 4; ++c) {
      const int query = column + 2 * (lane % 4) + c / 2 * 8 + c % 2;
      const int lone = of.lone_key[query] - row - lane / 4;
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int x = c / 2 * 8 + 2 * r + c % 2;
        if (lone == 8 * r && p[x] >= all_weight(of.lse[query])) dp[x] = of.delta[query];
      }
    }
  }

  __device__ __forceinline__ void compute(int i) {
    constexpr int kElements = Shape::kColumns;
    if (i == 0) {
      key_left.hold();
      value_left.hold();
    }
    const Stage stage = list.stage(i);
    const QueryRowValues& of = memory.values[(i & (args.stages - 1))];
    const uint32_t of_values = shared_address(&of) + 4 * column + lane % 4 * 8;
    // Bitmap words are asked for before the products and looked at after them.
    uint32_t words[4] = {0, 0, 0, 0};
    if ((stage.info & kColumns) != 0 && (stage.info & kEach) == 0) {
#pragma unroll
      for (int r = 0; r < 4; ++r)
        words[r] = diagonal_word(args, stage.row, stage.start, position[r]);
    }
    const uint32_t right = Tile<kD>::right(queries(i), lane) + column * Tile<kD>::kRowBytes;
    float s[kElements], dp[kElements];
    transposed_product<Element, kD>(s, key_left, right, Nothing{});
    if ((stage.info & (kMasked | kColumns)) != 0) mask(s, stage, of, words);
    // Pairs of lse and delta, each read a few elements before it is used.
    float2 pair, pair_ahead = load_shared_f2(of_values);
    transposed_product<Element, kD>(dp, value_left, right + Tile<kD>::kBytes, [&](int x) {
      if (x % 8 == 0) {
        pair = pair_ahead;
        pair_ahead =
            load_shared_f2(x < kElements - 8 ? of_values + 4 * x + 32 : of_values + sizeof(of.lse));
      }
      s[x] = exp2_approx(fmaf(s[x], args.scale_log2, x % 2 == 0 ? -pair.x : -pair.y));
    });
    if ((stage.info & (kMasked | kColumns)) == kMasked) forget_lone_keys(dp, s, of);
    const uint32_t left = Tile<64>::left(passed, row, lane);
    typename Shape::Packed own;
    pack_rows<Element, kElements>(own, s);
    store_rows(passed, own, row, column, lane);
    const auto meet = [] { Shape::meet(); };
    add_product<Element, kD, Shape::kSummed, kElements>(
        dv, own, left, column, Tile<kD>::summed(queries(i) + Tile<kD>::kBytes, lane), summed, meet,
        [&](int x) {
          if (x % 8 == 0) {
            pair = pair_ahead;
            if (x < kElements - 8)
              pair_ahead = load_shared_f2(of_values + sizeof(of.lse) + 4 * x + 32);
          }
          dp[x] = s[x] * (dp[x] - (x % 2 == 0 ? pair.x : pair.y));
        });
    pack_rows<Element, kElements>(own, dp);
    meet();  // the others have read P
    store_rows(passed, own, row, column, lane);
    add_product<Element, kD, Shape::kSummed, kElements>(
        dk, own, left, column, Tile<kD>::summed(queries(i), lane), summed, meet, Nothing{});
  }

  // ---- items ----

  /// What item `item` is; false: nothing.
  __device__ __forceinline__ bool find_tile(int item, KeyTile& tile) const {
    const int groups = args.batch * args.num_kv_heads;
    if (item < args.num_column_items) {
      int rest = item % args.column_tiles_all;
      const int turn = item / args.column_tiles_all;
      int s = 0;
      while (rest >= args.column_tiles[s] * groups) rest -= args.column_tiles[s++] * groups;
      const int group = rest / args.column_tiles[s];
      const SourceArgs& source = args.sources[s];
      tile.source = s;
      tile.columns = true;
      tile.first = rest % args.column_tiles[s] * 64;
      tile.row = group * args.heads_per_kv_head + turn / args.num_chunks;
      tile.num_rows = 1;
      const int count = source.column_counts[tile.row];
      tile.keys = min(64, count - tile.first);
      if (tile.keys <= 0) return false;
      const int32_t* positions =
          source.column_positions + tile.row * source.column_capacity + tile.first;
      tile.start = positions[0];
      tile.last = positions[tile.keys - 1];
      tile.begin = turn % args.num_chunks * args.chunk_blocks;
      tile.end = min(args.num_q_blocks, tile.begin + args.chunk_blocks);
      tile.turn = turn;
      return true;
    }
    item -= args.num_column_items;
    const int rest = item % (args.num_sources * groups);
    const int group = rest % groups;
    tile.source = rest / groups;
    tile.columns = false;
    tile.first = item / (args.num_sources * groups);
    const SourceArgs& source = args.sources[tile.source];
    if (source.block_starts == nullptr || tile.first >= source.num_blocks) return false;
    tile.row = group * args.heads_per_kv_head;
    tile.num_rows = args.heads_per_kv_head;
    tile.keys = min(64, source.num_keys - tile.first * 64);
    tile.start = source.block_starts[tile.first];
    tile.last = tile.start + (tile.keys - 1) * args.position_stride;
    tile.begin = 0;
    tile.end = args.num_q_blocks;
    return true;
  }

  /// Rows of k (v) of the tile.
  __device__ __forceinline__ TileRows tile_rows(const KeyTile& tile, bool of_values) const {
    const SourceArgs& source = args.sources[tile.source];
    const Rows& rows = of_values ? source.v : source.k;
    const char* head = head_of(rows, tile.row / args.num_heads,
                               tile.row % args.num_heads / args.heads_per_kv_head);
    if (tile.columns)
      return {head,
              rows.stride_token,
              source.column_rows + tile.row * source.column_capacity + tile.first,
              0,
              tile.keys,
              0,
              0,
              0,
              0};
    return {head,       rows.stride_token,    nullptr, tile.first * 64, tile.keys,
            tile.start, args.position_stride, 0,       args.seq_len - 1};
  }

  __device__ __forceinline__ void write(const FloatRows& rows, const float (&sum)[Shape::kSummed],
                                        float scale, const KeyTile& tile) const {
    const SourceArgs& source = args.sources[tile.source];
    const int64_t batch = tile.row / args.num_heads,
                  kv_head = tile.row % args.num_heads / args.heads_per_kv_head;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int inside = row + lane / 4 + 8 * r;
      if (inside >= tile.keys) continue;
      const int64_t token =
          tile.columns ? source.column_rows[tile.row * source.column_capacity + tile.first + inside]
                       : tile.first * 64 + inside;
      float* at = rows.data + batch * rows.stride_batch + token * rows.stride_token +
                  kv_head * rows.stride_head + summed + 2 * (lane % 4);
#pragma unroll
      for (int j = 0; j < Shape::kSummed / 8; ++j) {
        if (summed + 8 * j >= args.head_dim) break;
        const float x = sum[8 * j + 2 * r] * scale, y = sum[8 * j + 2 * r + 1] * scale;
        if (args.deterministic) {
          // Past L1: other SMs have added before.
          __stcg(at + 8 * j, __ldcg(at + 8 * j) + x);
          __stcg(at + 8 * j + 1, __ldcg(at + 8 * j + 1) + y);
        } else {
          add_pair(at + 8 * j, x, y, false);
        }
      }
    }
  }

  /// Column tiles of the tile's source and kv head that have been added.
  __device__ __forceinline__ int32_t* turns_of(const KeyTile& tile) const {
    return args.turns + tile.source * args.batch * args.num_kv_heads +
           tile.row / args.heads_per_kv_head;
  }
  /// Waits until all column tiles of earlier turns have been added.
  __device__ __forceinline__ void wait_for_turn(const KeyTile& tile) const {
    if (threadIdx.x == 0) {
      const SourceArgs& source = args.sources[tile.source];
      const int turn = tile.turn;
      const int first_row = tile.row - turn / args.num_chunks;
      int before = 0;
      for (int g = 0; g <= turn / args.num_chunks; ++g) {
        const int tiles = (source.column_counts[first_row + g] + 63) / 64;
        before += tiles * (first_row + g < tile.row ? args.num_chunks : turn % args.num_chunks);
      }
      volatile int32_t* added = turns_of(tile);
      while (*added < before) __nanosleep(200);
      __threadfence();
    }
    __syncthreads();
  }
  __device__ __forceinline__ void end_turn(const KeyTile& tile) const {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) atomicAdd(turns_of(tile), 1);
  }

  __device__ __forceinline__ void run_item(int item) {
    KeyTile tile;
    if (!find_tile(item, tile)) return;
    list.begin(tile);
    batch = tile.row / args.num_heads;
    load_any_tile<kD, Shape::kThreads>(keys, tile_rows(tile, false), args.head_dim, args.vectors);
    load_any_tile<kD, Shape::kThreads>(values, tile_rows(tile, true), args.head_dim, args.vectors);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int inside = row + lane / 4 + 8 * r;
      position[r] = INT_MAX;
      if (inside < tile.keys) {
        const SourceArgs& source = args.sources[tile.source];
        position[r] =
            tile.columns
                ? source.column_positions[tile.row * source.column_capacity + tile.first + inside]
                : tile.start + inside * args.position_stride;
      }
    }
#pragma unroll
    for (int x = 0; x < Shape::kSummed; ++x) dk[x] = dv[x] = 0;
    for (int i = 0;; ++i) {
      list.refill(i, args.stages);
      if (i == 0 && args.stages > 1) issue(0);
      if (i >= list.built()) break;
      if (args.stages > 1) {
        arrive(i);
        issue(i + 1);
      } else {
        __syncthreads();
        issue(i);
        arrive(i);
      }
      compute(i);
    }
    copy_async_wait<0>();
    const KeyTile& summed = list.tile();
    const bool turns = args.deterministic && summed.columns;
    if (turns) wait_for_turn(summed);
    if (list.built() > 0) {
      write(args.dk[summed.source], dk, args.scale, summed);
      write(args.dv[summed.source], dv, 1, summed);
    }
    if (turns) end_turn(summed);
  }

  __device__ __forceinline__ void run() {
    int taken = 0;
    if (threadIdx.x == 0) taken = atomicAdd(args.next_item, 1);
    for (;;) {
      __syncthreads();
      if (threadIdx.x == 0) {
        memory.list.item = taken;
        // Not earlier in deterministic launches: an item must not wait for one that nobody works on yet.
        if (!args.deterministic) taken = atomicAdd(args.next_item, 1);
      }
      __syncthreads();
      const int item = memory.list.item;
      if (item >= args.num_items) return;
      run_item(args.first_item + item);
      if (args.deterministic && threadIdx.x == 0) taken = atomicAdd(args.next_item, 1);
    }
  }
};

template <typename Element, int kD>
__global__ void __launch_bounds__(BackwardShape<kD>::kThreads, BackwardShape<kD>::kBlocksPerSm)
    backward_keys_kernel(const __grid_constant__ BackwardArgs args) {
  extern __shared__ __align__(1024) char memory[];
  BackwardKeys<Element, kD> pass(args, memory);
  pass.run();
}

template <typename Element, int kD>
cudaError_t launch_backward_keys(const BackwardArgs& args, const Launch& l) {
  static std::atomic<uint64_t> ready{0};  // bit per device
  const cudaError_t error = allow_shared_memory(backward_keys_kernel<Element, kD>, ready);
  if (error != cudaSuccess) return error;
  // clang-format off
  backward_keys_kernel<Element, kD>
      <<<l.blocks, BackwardShape<kD>::kThreads, l.shared_bytes, l.stream>>>(args);
  // clang-format on
  return cudaGetLastError();
}

}  // namespace mtraining::kernels::sm80
