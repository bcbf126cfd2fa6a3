// What forward and backward share: a tile's queries, the key tiles that a query tile meets, where
// rows start in memory.
//
// In:   AttentionParams. Out: QueryTile; KeyTiles in a fixed order (sources in order; a source's
//       blocks in list order, then its columns in tiles of up to 64). Next: forward.cc,
//       backward.cc.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>

#include "mtraining/kernels/params.h"
#include "mtraining/kernels/ref/tile_ops.h"

namespace mtraining::kernels::ref {

inline int64_t blocks_of(int64_t tokens) { return (tokens + kBlock - 1) / kBlock; }
inline int64_t padded_depth(int64_t head_dim) {
  return (head_dim + kDepthGranule - 1) / kDepthGranule * kDepthGranule;
}

/// First element of (batch, head) of a view.
inline const void* head_of(const ConstView& view, int64_t batch, int64_t head, DType dtype) {
  return static_cast<const char*>(view.data) +
         (batch * view.stride_batch + head * view.stride_head) * size_of(dtype);
}
template <typename T>
T* head_of(const View& view, int64_t batch, int64_t head) {
  return static_cast<T*>(view.data) + batch * view.stride_batch + head * view.stride_head;
}

/// 64-byte aligned scratch of one thread.
template <typename T>
class Scratch {
 public:
  explicit Scratch(int64_t count)
      : data_(new (std::align_val_t{64}) T[static_cast<size_t>(count)]()) {}
  T* get() const { return data_.get(); }
  operator T*() const { return data_.get(); }

 private:
  struct Free {
    void operator()(T* p) const { ::operator delete[](p, std::align_val_t{64}); }
  };
  std::unique_ptr<T[], Free> data_;
};

/// 64 query rows of one sample. Rows that are not computed have position -1, which sees no key.
template <typename T>
struct QueryTile {
  alignas(64) LanePosition<T> position[kTile];
  alignas(64) LanePosition<T> begin[kTile];  ///< document start
  int32_t rows[kTile];                       ///< row in memory, -1 where not computed
  int64_t first = 0;                         ///< first row in memory
  int num_rows = 0;                          ///< rows in memory
  int num_computed = 0;
  int64_t min_position = 0, max_position = -1, min_begin = 0,
          max_begin = 0;  ///< over computed rows
  int64_t block = -1;     ///< position / 64 where all computed rows share it, else -1

  void hide(int i) {
    position[i] = -1;
    begin[i] = 0;
    rows[i] = -1;
  }
  /// After rows were hidden or set.
  void measure() {
    num_computed = 0;
    min_position = min_begin = std::numeric_limits<int64_t>::max();
    max_position = max_begin = -1;
    for (int i = 0; i < kTile; ++i) {
      if (rows[i] < 0) continue;
      ++num_computed;
      min_position = std::min<int64_t>(min_position, position[i]);
      max_position = std::max<int64_t>(max_position, position[i]);
      min_begin = std::min<int64_t>(min_begin, begin[i]);
      max_begin = std::max<int64_t>(max_begin, begin[i]);
    }
    block = num_computed > 0 && min_position / kBlock == max_position / kBlock
                ? min_position / kBlock
                : -1;
  }
};

template <typename T>
void make_query_tile(const AttentionParams& p, int64_t batch, int64_t q_block, QueryTile<T>& q) {
  q.first = q_block * kBlock;
  q.num_rows = static_cast<int>(std::min<int64_t>(kBlock, p.num_queries - q.first));
  for (int i = 0; i < kTile; ++i) {
    const int64_t position = p.q_block_starts[q_block] + i * p.position_stride;
    if (i >= q.num_rows || position >= p.seq_len) {
      q.hide(i);
      continue;
    }
    q.position[i] = static_cast<LanePosition<T>>(position);
    q.begin[i] = p.document_start == nullptr
                     ? 0
                     : p.document_start[batch * p.document_stride_batch + q.first + i];
    q.rows[i] = static_cast<int32_t>(q.first + i);
  }
  q.measure();
}

/// Up to 64 keys of one source. Keys that no query of the tile may see have row -1 and are never
/// read.
template <typename T>
struct KeyTile {
  alignas(64) LanePosition<T> position[kTile];
  int32_t rows[kTile];
  int source = 0;
  int num_keys = 0;  ///< padded to a multiple of kRowGranule
  bool needs_mask =
      false;  ///< some (query, key) pair of the tile is hidden by position, document or padding
  bool is_columns = false;
};

inline bool diagonal_chosen(const AttentionParams& p, int64_t row, int64_t diagonal) {
  if (p.diagonal_bits == nullptr || diagonal < 0 || diagonal >= p.diagonal_words * 64) return false;
  return (p.diagonal_bits[row * p.diagonal_words + diagonal / 64] >> (diagonal % 64)) & 1;
}

/// Fills up with padding and finds out whether a mask is needed. False where no pair is visible.
template <typename T>
bool finish_key_tile(const QueryTile<T>& q, int count, KeyTile<T>& k) {
  int64_t lowest = std::numeric_limits<int64_t>::max(), highest = -1;
  int visible = 0;
  for (int j = 0; j < count; ++j) {
    const int64_t position = k.position[j];
    lowest = std::min(lowest, position);
    highest = std::max(highest, position);
    if (position > q.max_position || position < q.min_begin)
      k.rows[j] = -1;
    else
      visible = j + 1;
  }
  if (visible == 0) return false;
  k.num_keys = (visible + kRowGranule - 1) / kRowGranule * kRowGranule;
  for (int j = count; j < kTile; ++j) {
    k.position[j] = std::numeric_limits<LanePosition<T>>::max();
    k.rows[j] = -1;
  }
  k.needs_mask = q.num_computed < kTile || k.num_keys > count || highest > q.min_position ||
                 lowest < q.max_begin;
  return true;
}

/// Calls fn(key_block) for the local key blocks of `source` in [begin, end) that (row, q_block)
/// attends to, in list order.
template <typename Fn>
void for_each_key_block(const AttentionParams& p, const KeySource& source, int64_t row,
                        int64_t q_block, int64_t begin, int64_t end, const Fn& fn) {
  const BlockLists& lists = source.blocks;
  if (lists.kind == BlockListKind::kEntries) {
    const int64_t m = lists.blocks_per_stripe;
    const int64_t stripe = q_block / m, a = q_block % m;
    const Entry* entries = lists.entries + row * lists.capacity;
    for (int64_t e = 0; e < lists.num_entries[row]; ++e) {
      const int64_t key_stripe = stripe - entries[e].lambda, b = a - entries[e].delta;
      if (key_stripe < 0 || b < 0 || b >= m) continue;
      const int64_t block = key_stripe * m + b;
      if (block >= begin && block < end) fn(block);
    }
  } else if (lists.kind == BlockListKind::kCsr) {
    const int64_t* bounds = lists.row_begin + row * (blocks_of(p.num_queries) + 1) + q_block;
    for (int64_t e = bounds[0]; e < bounds[1]; ++e) {
      const int64_t block = lists.key_blocks[e];
      if (block >= begin && block < end) fn(block);
    }
  }
}

/// Key rows of all sources, in units of 64 rows of one source after the other.
struct KeyRange {
  int64_t begin = 0;
  int64_t end = std::numeric_limits<int64_t>::max();
};

/// Calls visit(key_tile) for every tile with key rows in `range` that has a visible pair. ahead(t+1)
/// runs before visit(t), so that a tile's memory can be fetched while the one before is computed.
template <typename T, typename Ahead, typename Visit>
void for_each_key_tile(const AttentionParams& p, int64_t row, int64_t q_block,
                       const QueryTile<T>& q, const KeyRange& range, KeyTile<T> (&tiles)[2],
                       const Ahead& ahead, const Visit& visit) {
  if (q.num_computed == 0) return;
  int current = 0;
  bool pending = false;  // tiles[1 - current] waits for its successor
  const auto finish = [&](int count, int source, bool is_columns) {
    KeyTile<T>& k = tiles[current];
    if (!finish_key_tile(q, count, k)) return;
    k.source = source;
    k.is_columns = is_columns;
    ahead(k);
    current = 1 - current;
    if (pending) visit(tiles[current]);
    pending = true;
  };
  int64_t first_unit = 0;
  for (int n = 0; n < p.num_sources; ++n) {
    const KeySource& source = p.sources[n];
    const int64_t units = blocks_of(source.num_keys);
    const int64_t begin = std::max<int64_t>(range.begin - first_unit, 0);
    const int64_t end = std::min(range.end - first_unit, units);
    first_unit += units;
    if (begin >= end) continue;
    for_each_key_block(p, source, row, q_block, begin, end, [&](int64_t block) {
      KeyTile<T>& k = tiles[current];
      const int64_t first = block * kBlock;
      const int count = static_cast<int>(std::min<int64_t>(kBlock, source.num_keys - first));
      for (int j = 0; j < count; ++j) {
        k.position[j] =
            static_cast<LanePosition<T>>(source.block_starts[block] + j * p.position_stride);
        k.rows[j] = static_cast<int32_t>(first + j);
      }
      finish(count, n, false);
    });
    if (source.columns.counts == nullptr) continue;
    const int32_t* positions = source.columns.positions + row * source.columns.capacity;
    const int32_t* key_rows = source.columns.key_rows + row * source.columns.capacity;
    const int64_t count = source.columns.counts[row];
    int filled = 0;
    for (int64_t c = std::lower_bound(positions, positions + count, q.min_begin) - positions;
         c < count && positions[c] <= q.max_position; ++c) {
      if (key_rows[c] < begin * kBlock || key_rows[c] >= end * kBlock) continue;
      if (q.block >= 0 && diagonal_chosen(p, row, q.block - positions[c] / kBlock)) continue;
      tiles[current].position[filled] = static_cast<LanePosition<T>>(positions[c]);
      tiles[current].rows[filled] = key_rows[c];
      if (++filled == kTile) {
        finish(filled, n, true);
        filled = 0;
      }
    }
    if (filled > 0) finish(filled, n, true);
  }
  if (pending) visit(tiles[1 - current]);
}

/// Asks for the lines of one row; not aligned to lines perhaps.
template <bool kWrite>
inline void prefetch_row(const void* row, int64_t bytes) {
  constexpr int64_t kLine = 64;
  constexpr int kSecondLevel = 2;
  const char* at = static_cast<const char*>(row);
  const char* const last = at + bytes - 1;
  for (; at < last; at += kLine) __builtin_prefetch(at, kWrite ? 1 : 0, kSecondLevel);
  __builtin_prefetch(last, kWrite ? 1 : 0, kSecondLevel);
}

/// A key tile's rows; stride and head_dim in elements.
template <bool kWrite>
inline void prefetch_rows(const void* base, int64_t stride, const int32_t* rows, int num_rows,
                          int64_t head_dim, int64_t element_bytes) {
  for (int j = 0; j < num_rows; ++j) {
    if (rows[j] < 0) continue;
    prefetch_row<kWrite>(static_cast<const char*>(base) + rows[j] * stride * element_bytes,
                         head_dim * element_bytes);
  }
}

/// A query block's rows of one (batch, head); nothing where there is no such block.
inline void prefetch_block(const AttentionParams& p, const ConstView& view, DType dtype,
                           int64_t batch, int64_t head, int64_t q_block) {
  if (q_block < 0) return;
  const char* row = static_cast<const char*>(head_of(view, batch, head, dtype)) +
                    q_block * kBlock * view.stride_token * size_of(dtype);
  for (int64_t i = q_block * kBlock; i < std::min(p.num_queries, (q_block + 1) * kBlock); ++i) {
    prefetch_row<false>(row, p.head_dim * size_of(dtype));
    row += view.stride_token * size_of(dtype);
  }
}

/// The rows of a key tile as float (or double) rows of `depth` values: where they are, if they are
/// that already, else in a converted copy. Rows that no query sees are zeros.
template <typename T>
class KeyRows {
 public:
  explicit KeyRows(int64_t depth) : copy_(kTile * depth), zeros_(depth), depth_(depth) {}

  const T* const* point(const TileOps<T>& ops, const AttentionParams& p, const ConstView& view,
                        int64_t batch, int64_t kv_head, const KeyTile<T>& k) {
    const void* head = head_of(view, batch, kv_head, p.dtype);
    const bool in_place = state_dtype(p.dtype) == p.dtype && p.head_dim == depth_;
    if (!in_place) {
      ops.load_rows(p.dtype, head, view.stride_token, k.rows, k.num_keys, p.head_dim, depth_,
                    copy_);
    }
    for (int j = 0; j < k.num_keys; ++j) {
      if (!in_place)
        rows_[j] = copy_ + j * depth_;
      else
        rows_[j] = k.rows[j] < 0 ? zeros_.get()
                                 : static_cast<const T*>(head) + k.rows[j] * view.stride_token;
    }
    return rows_;
  }

 private:
  Scratch<T> copy_, zeros_;
  int64_t depth_;
  const T* rows_[kTile];
};

/// The same for rows of gradients, which are added to. Where head_dim is not a multiple of 16 they
/// are summed in a tile and added by finish(); rows that no query sees go where nobody looks.
template <typename T>
class GradientRows {
 public:
  explicit GradientRows(int64_t depth) : tile_(kTile * depth), unused_(depth), depth_(depth) {}

  T* const* point(const AttentionParams& p, const View& view, int64_t batch, int64_t kv_head,
                  const KeyTile<T>& k) {
    head_ = head_of<T>(view, batch, kv_head);
    stride_ = view.stride_token;
    in_place_ = p.head_dim == depth_;
    if (!in_place_) std::fill(tile_.get(), tile_ + k.num_keys * depth_, T{0});
    for (int j = 0; j < k.num_keys; ++j) {
      if (!in_place_)
        rows_[j] = tile_ + j * depth_;
      else
        rows_[j] = k.rows[j] < 0 ? unused_.get() : head_ + k.rows[j] * stride_;
    }
    return rows_;
  }
  void finish(const TileOps<T>& ops, const AttentionParams& p, const KeyTile<T>& k) {
    if (!in_place_) ops.add_rows(tile_, depth_, k.rows, k.num_keys, p.head_dim, head_, stride_);
  }

 private:
  Scratch<T> tile_, unused_;
  int64_t depth_, stride_ = 0;
  T* head_ = nullptr;
  bool in_place_ = false;
  T* rows_[kTile];
};

/// scores = k q^T, hidden pairs -inf. q_lanes: [depth, 64], already scaled.
template <typename T>
void compute_scores(const TileOps<T>& ops, const AttentionParams& p, int64_t row,
                    const QueryTile<T>& q, const KeyTile<T>& k, int64_t depth,
                    const T* const* k_rows, const T* q_lanes, T* scores) {
  ops.scores(k.num_keys, depth, k_rows, q_lanes, scores);
  if (k.needs_mask) ops.mask(k.num_keys, k.position, q.position, q.begin, scores);
  if (!k.is_columns || q.block >= 0) return;
  // Queries of several blocks: whether a column lies on a chosen diagonal differs from row to row.
  for (int j = 0; j < k.num_keys; ++j) {
    for (int i = 0; i < kTile && k.rows[j] >= 0; ++i) {
      if (q.rows[i] >= 0 &&
          diagonal_chosen(p, row, q.position[i] / kBlock - k.position[j] / kBlock)) {
        scores[j * kTile + i] = -std::numeric_limits<T>::infinity();
      }
    }
  }
}

}  // namespace mtraining::kernels::ref
