// Window estimation. Every pass recomputes the scores of (row, key) with the same chain of
// operations, so they are the same bits in every pass, on every rank and thread; maxima and integer
// sums do not depend on order.
#include "mtraining/kernels/window.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <memory>
#include <mutex>
#include <vector>

#include "mtraining/base/check.h"
#include "mtraining/base/parallel.h"
#include "mtraining/kernels/ref/tile_ops.h"
#include "mtraining/kernels/ref/walk.h"
#include "mtraining/kernels/validate.h"

namespace mtraining::kernels::ref {
namespace {

constexpr int64_t kChunkBlocks = 32;  // key blocks of one task

struct WindowScratch {
  explicit WindowScratch(int64_t depth)
      : rows(kTile * depth), q_lanes(kTile * depth), scores(kTile * kTile), masses(kTile * kTile) {}
  Scratch<float> rows, q_lanes, scores;
  Scratch<int64_t> masses;  // [key][row]
  QueryTile<float> q;
  KeyTile<float> k;
  alignas(64) float row_max[kTile];
  alignas(64) double factor[kTile];
  alignas(64) int64_t sums[kTile];
};

void add_atomically(int64_t& target, int64_t value) {
  if (value != 0) std::atomic_ref<int64_t>(target).fetch_add(value, std::memory_order_relaxed);
}

class Window {
 public:
  explicit Window(const WindowParams& params)
      : p_(params),
        ops_(tile_ops<float>()),
        depth_(padded_depth(params.head_dim)),
        group_(params.num_q_heads / params.num_kv_heads) {
    check(params);
    for (int64_t r = 0; r < p_.num_rows; ++r) {
      MT_CHECK_ARG(p_.row_positions[r] >= 0 && p_.row_positions[r] < p_.seq_len, "row_positions[",
                   r, "]: expected 0 .. seq_len - 1 = ", p_.seq_len - 1, ", got ",
                   p_.row_positions[r]);
    }
  }

  /// For every (sample, head), block of 64 rows and run of key blocks: begin(scratch, first output
  /// row), tile(scratch, first key) for every tile with a visible pair, end(scratch, first output
  /// row). Runs of one head go to different threads.
  template <typename Begin, typename Tile, typename End>
  void run(const Begin& begin, const Tile& tile, const End& end) const {
    const int64_t num_blocks = blocks_of(p_.num_keys),
                  chunks = (num_blocks + kChunkBlocks - 1) / kChunkBlocks;
    std::vector<std::unique_ptr<WindowScratch>> scratch(num_threads());
    parallel_for(p_.batch * p_.num_q_heads * chunks, [&](int64_t task, int worker) {
      if (!scratch[worker]) scratch[worker] = std::make_unique<WindowScratch>(depth_);
      WindowScratch& s = *scratch[worker];
      const int64_t row = task / chunks, batch = row / p_.num_q_heads, head = row % p_.num_q_heads;
      const int64_t first_block = task % chunks * kChunkBlocks;
      for (int64_t r = 0; r < p_.num_rows; r += kTile) {
        load_rows(batch, head, r, s);
        begin(s, row * p_.num_rows + r);
        for (int64_t block = first_block; block < std::min(num_blocks, first_block + kChunkBlocks);
             ++block) {
          if (score_tile(batch, head, block, s)) tile(s, row, block * kBlock);
        }
        end(s, row * p_.num_rows + r);
      }
    });
  }

  const TileOps<float>& ops() const { return ops_; }

  void load_softmax(const float* row_max, const int64_t* row_sum, int64_t at,
                    WindowScratch& s) const {
    for (int i = 0; i < kTile; ++i) {
      s.sums[i] = 0;
      s.row_max[i] = s.q.rows[i] < 0 ? -std::numeric_limits<float>::infinity() : row_max[at + i];
      const int64_t sum = s.q.rows[i] < 0 || row_sum == nullptr ? 0 : row_sum[at + i];
      s.factor[i] = sum > 0 ? 0x1p80 / static_cast<double>(sum) : 0.0;
    }
  }

 private:
  void load_rows(int64_t batch, int64_t head, int64_t first, WindowScratch& s) const {
    s.q.first = first;
    s.q.num_rows = static_cast<int>(std::min<int64_t>(kTile, p_.num_rows - first));
    for (int i = 0; i < kTile; ++i) {
      if (i >= s.q.num_rows) {
        s.q.hide(i);
        continue;
      }
      s.q.position[i] = p_.row_positions[first + i];
      s.q.begin[i] = p_.row_document_start == nullptr
                         ? 0
                         : p_.row_document_start[batch * p_.num_rows + first + i];
      s.q.rows[i] = static_cast<int32_t>(first + i);
    }
    s.q.measure();
    ops_.load_rows(p_.dtype, head_of(p_.q, batch, head, p_.dtype), p_.q.stride_token, s.q.rows,
                   kTile, p_.head_dim, depth_, s.rows);
    ops_.transpose_to_lanes(s.rows, depth_, static_cast<float>(p_.softmax_scale), s.q_lanes);
  }

  /// Keys at seq_len and beyond are in the future of every row.
  bool score_tile(int64_t batch, int64_t head, int64_t block, WindowScratch& s) const {
    const int64_t first = block * kBlock;
    int count = 0;
    for (; count < kBlock && first + count < p_.num_keys; ++count) {
      const int64_t position = p_.k_block_starts[block] + count * p_.position_stride;
      s.k.position[count] = static_cast<int32_t>(position);
      s.k.rows[count] = static_cast<int32_t>(first + count);
    }
    if (count == 0 || !finish_key_tile(s.q, count, s.k)) return false;
    ops_.load_rows(p_.dtype, head_of(p_.k, batch, head / group_, p_.dtype), p_.k.stride_token,
                   s.k.rows, s.k.num_keys, p_.head_dim, depth_, s.rows);
    const float* rows[kTile];
    for (int j = 0; j < s.k.num_keys; ++j) rows[j] = s.rows + j * depth_;
    ops_.scores(s.k.num_keys, depth_, rows, s.q_lanes, s.scores);
    if (s.k.needs_mask) ops_.mask(s.k.num_keys, s.k.position, s.q.position, s.q.begin, s.scores);
    return true;
  }

  const WindowParams& p_;
  const TileOps<float>& ops_;
  const int64_t depth_;
  const int64_t group_;  // query heads of a kv head
};

/// Adds masses of neighbouring offsets: the 64-shares of one diagonal are summed here first, since
/// all threads of a head write to the same few words.
class OffsetSums {
 public:
  OffsetSums(int64_t* diagonals, int64_t* offsets) : diagonals_(diagonals), offsets_(offsets) {}
  ~OffsetSums() { flush(); }
  OffsetSums(const OffsetSums&) = delete;
  OffsetSums& operator=(const OffsetSums&) = delete;

  void add(int64_t offset, int64_t mass) {
    if (mass == 0) return;  // pairs that are not visible: their offset may be negative
    if (offsets_ != nullptr) add_atomically(offsets_[offset], mass);
    if (diagonals_ == nullptr) return;
    if (offset / kBlock != diagonal_) {
      flush();
      diagonal_ = offset / kBlock;
    }
    own_ += mass * (kBlock - offset % kBlock);
    next_ += mass * (offset % kBlock);
  }

 private:
  void flush() {
    if (diagonal_ < 0) return;
    add_atomically(diagonals_[diagonal_], own_);
    add_atomically(diagonals_[diagonal_ + 1], next_);
    own_ = next_ = 0;
  }

  int64_t* diagonals_;
  int64_t* offsets_;
  int64_t diagonal_ = -1, own_ = 0, next_ = 0;
};

/// Masses of one tile by offset o = row position - key position.
void add_by_offset(const WindowParams& p, const WindowScratch& s, int64_t* diagonals,
                   int64_t* offsets) {
  OffsetSums sums(diagonals, offsets);
  bool consecutive = p.position_stride == 1;
  for (int i = 1; i < s.q.num_rows; ++i) {
    consecutive = consecutive && s.q.position[i] == s.q.position[0] + i;
  }
  if (!consecutive) {
    for (int i = 0; i < s.q.num_rows; ++i) {
      for (int j = 0; j < s.k.num_keys; ++j) {
        sums.add(int64_t{s.q.position[i]} - s.k.position[j], s.masses[j * kTile + i]);
      }
    }
    return;
  }
  // Offsets differ by row - key: sum the tile's 127 anti-diagonals first.
  int64_t lines[2 * kTile] = {};
  for (int j = 0; j < s.k.num_keys; ++j) {
    const int64_t* masses = s.masses + j * kTile;
    int64_t* to = lines + (kTile - 1 - j);
    for (int i = 0; i < kTile; ++i) to[i] += masses[i];
  }
  const int64_t base = int64_t{s.q.position[0]} - s.k.position[0] - (kTile - 1);
  for (int i = 0; i < 2 * kTile; ++i) sums.add(base + i, lines[i]);
}

}  // namespace

void window_row_max(const WindowParams& params, float* row_max) {
  const Window window(params);
  const int64_t outputs = params.batch * params.num_q_heads * params.num_rows;
  MT_CHECK_ARG(outputs == 0 || row_max != nullptr, "row_max: expected a pointer, got null");
  std::fill(row_max, row_max + outputs, -std::numeric_limits<float>::infinity());
  std::mutex mutex;
  window.run(
      [&](WindowScratch& s, int64_t) {
        for (float& x : s.row_max) x = -std::numeric_limits<float>::infinity();
      },
      [&](WindowScratch& s, int64_t, int64_t) {
        window.ops().window_max(s.k.num_keys, s.scores, s.row_max);
      },
      [&](WindowScratch& s, int64_t at) {
        const std::lock_guard<std::mutex> lock(mutex);
        for (int i = 0; i < s.q.num_rows; ++i)
          row_max[at + i] = std::max(row_max[at + i], s.row_max[i]);
      });
}

void window_row_sum(const WindowParams& params, const float* row_max, int64_t* row_sum) {
  const Window window(params);
  MT_CHECK_ARG(params.batch * params.num_rows == 0 || (row_max != nullptr && row_sum != nullptr),
               "row_max, row_sum: expected pointers, got a null one");
  window.run([&](WindowScratch& s, int64_t at) { window.load_softmax(row_max, nullptr, at, s); },
             [&](WindowScratch& s, int64_t, int64_t) {
               window.ops().window_sum(s.k.num_keys, s.scores, s.row_max, s.sums);
             },
             [&](WindowScratch& s, int64_t at) {
               for (int i = 0; i < s.q.num_rows; ++i) add_atomically(row_sum[at + i], s.sums[i]);
             });
}

void window_masses(const WindowParams& params, const float* row_max, const int64_t* row_sum,
                   const WindowMasses& masses) {
  const Window window(params);
  MT_CHECK_ARG(params.batch * params.num_rows == 0 || (row_max != nullptr && row_sum != nullptr),
               "row_max, row_sum: expected pointers, got a null one");
  const int64_t num_diagonals = blocks_of(params.seq_len) + 1;
  window.run([&](WindowScratch& s, int64_t at) { window.load_softmax(row_max, row_sum, at, s); },
             [&](WindowScratch& s, int64_t row, int64_t first_key) {
               window.ops().window_mass(s.k.num_keys, s.scores, s.row_max, s.factor, s.masses);
               if (masses.columns != nullptr) {
                 // A task owns its keys.
                 for (int j = 0; j < s.k.num_keys && first_key + j < params.num_keys; ++j) {
                   int64_t sum = 0;
                   for (int i = 0; i < kTile; ++i) sum += s.masses[j * kTile + i];
                   masses.columns[row * params.num_keys + first_key + j] += sum;
                 }
               }
               if (masses.diagonals != nullptr || masses.offsets != nullptr) {
                 add_by_offset(
                     params, s,
                     masses.diagonals == nullptr ? nullptr : masses.diagonals + row * num_diagonals,
                     masses.offsets == nullptr ? nullptr : masses.offsets + row * params.seq_len);
               }
             },
             [](WindowScratch&, int64_t) {});
}

void window_covered(const WindowParams& params, const float* row_max, const int64_t* row_sum,
                    const uint64_t* diagonal_bits, int64_t diagonal_words,
                    const ColumnLists& columns, int64_t* covered) {
  const Window window(params);
  MT_CHECK_ARG(params.batch * params.num_rows == 0 ||
                   (row_max != nullptr && row_sum != nullptr && covered != nullptr),
               "row_max, row_sum, covered: expected pointers, got a null one");
  MT_CHECK_ARG(columns.counts == nullptr || columns.capacity == 0 || columns.positions != nullptr,
               "columns.positions: expected a pointer, got null");
  check_columns(columns, params.batch * params.num_q_heads, 0, false, "columns");
  AttentionParams diagonals;
  diagonals.diagonal_bits = diagonal_bits;
  diagonals.diagonal_words = diagonal_words;
  window.run(
      [&](WindowScratch& s, int64_t at) { window.load_softmax(row_max, row_sum, at, s); },
      [&](WindowScratch& s, int64_t row, int64_t) {
        window.ops().window_mass(s.k.num_keys, s.scores, s.row_max, s.factor, s.masses);
        const int32_t* column =
            columns.counts == nullptr ? nullptr : columns.positions + row * columns.capacity;
        const int32_t* last = columns.counts == nullptr ? nullptr : column + columns.counts[row];
        if (column != nullptr) column = std::lower_bound(column, last, s.k.position[0]);
        int64_t key_block = -1;
        alignas(64) int64_t chosen[kTile] =
            {};  // all bits set where the row's diagonal to key_block is chosen
        for (int j = 0; j < s.k.num_keys; ++j) {
          const int64_t position = s.k.position[j];
          if (position / kBlock != key_block) {
            key_block = position / kBlock;
            for (int i = 0; i < s.q.num_rows; ++i) {
              chosen[i] =
                  -int64_t{diagonal_chosen(diagonals, row, s.q.position[i] / kBlock - key_block)};
            }
          }
          while (column != last && *column < position) ++column;
          const int64_t is_column = column != last && *column == position ? -1 : 0;
          const int64_t* masses = s.masses + j * kTile;
          for (int i = 0; i < kTile; ++i) s.sums[i] += masses[i] & (chosen[i] | is_column);
        }
      },
      [&](WindowScratch& s, int64_t at) {
        for (int i = 0; i < s.q.num_rows; ++i) add_atomically(covered[at + i], s.sums[i]);
      });
}

}  // namespace mtraining::kernels::ref
