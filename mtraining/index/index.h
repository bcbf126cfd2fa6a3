// Index: what a pattern chose, O(diagonals + columns) per head, global (the same on every rank).
//
// In:   per (sample, query head) a sorted list of block diagonals and a sorted list of column
//       positions; or, for patterns that choose blocks one by one, key blocks per query block.
// Out:  density, pairs, mask, bitmaps; step indices (step_index.h) and the union of columns per kv
//       head (columns.h).
// Next: attention/ hands rank-local parts to kernels/.
//
// Source: docs/math/index.md. Mask of head h (positions i, j of one sample, block 64):
//   document_start[i] <= j <= i  and  (i/64 - j/64 in diagonals[h]  or  j in columns[h]);
//   reached both ways counts once.
// In block form (has_blocks): document_start[i] <= j <= i and j/64 in the list of query block i/64.
// Storage is of fixed capacity with counts, so that the same struct describes device memory. Host
// memory, movable.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace mtraining::index {

/// rows x capacity int32 lists with a count each, row-major.
struct Lists {
  int64_t rows = 0;
  int64_t capacity = 0;
  std::vector<int32_t> values;  ///< [rows, capacity]; unspecified at and beyond the count
  std::vector<int32_t> counts;  ///< [rows]

  std::span<const int32_t> row(int64_t r) const {
    return {values.data() + r * capacity, static_cast<size_t>(counts[r])};
  }
  int64_t bytes() const {
    return static_cast<int64_t>((values.size() + counts.size()) * sizeof(int32_t));
  }
};

/// From ragged rows; capacity = longest row (at least 1).
Lists make_lists(const std::vector<std::vector<int32_t>>& rows);

/// Key blocks per (head row, query block), of the whole sequence. Memory: O(blocks chosen).
struct BlockRows {
  std::vector<int64_t>
      row_begin;  ///< [rows * num_blocks + 1] into key_blocks; empty: not this form
  std::vector<int32_t> key_blocks;  ///< ascending within a query block, none after it

  std::span<const int32_t> row(int64_t r, int64_t query_block, int64_t num_blocks) const {
    const int64_t at = r * num_blocks + query_block;
    return {key_blocks.data() + row_begin[at],
            static_cast<size_t>(row_begin[at + 1] - row_begin[at])};
  }
  int64_t bytes() const {
    return static_cast<int64_t>(row_begin.size() * sizeof(int64_t) +
                                key_blocks.size() * sizeof(int32_t));
  }
};

struct Index {
  int batch = 1;
  int num_q_heads = 1;
  int64_t seq_len = 0;  ///< real tokens N
  Lists diagonals;   ///< rows = batch * num_q_heads; ascending block diagonals c in [0, num_blocks)
  Lists columns;     ///< rows = batch * num_q_heads; ascending positions in [0, seq_len)
  BlockRows blocks;  ///< block form: then diagonals and columns have rows, all of them empty
  /// [batch * num_q_heads] 1 where the head was made dense: all diagonals, no columns. dense_index
  /// sets it, make_index leaves 0 for the pattern to set.
  std::vector<uint8_t> dense_heads;
  int64_t caps_hit = 0;  ///< heads whose choice was cut by max_columns or max_diagonals

  bool has_blocks() const { return !blocks.row_begin.empty(); }
  int64_t num_blocks() const { return (seq_len + 63) / 64; }
  int64_t row(int b, int h) const { return static_cast<int64_t>(b) * num_q_heads + h; }
  int64_t bytes() const { return diagonals.bytes() + columns.bytes() + blocks.bytes(); }
};

/// All diagonals for every head.
Index dense_index(int batch, int num_q_heads, int64_t seq_len);

/// Sorts, removes duplicates and checks ranges. Errors: InvalidArgument naming head, list, value
/// and range.
Index make_index(int batch, int num_q_heads, int64_t seq_len,
                 std::vector<std::vector<int32_t>> diagonals,
                 std::vector<std::vector<int32_t>> columns);

/// Block form. Errors: InvalidArgument naming sample, head and query block: key blocks not ascending, or
/// after their query block; row_begin of another length, not ascending.
Index make_block_index(int batch, int num_q_heads, int64_t seq_len, BlockRows blocks);

/// Sample b alone, batch 1.
Index sample_of(const Index& index, int b);

/// (query, key) pairs of one head on the real sequence, one document: blocks of a chosen diagonal
/// counted whole (64x64, diagonal 0 included, the ragged last block row counted whole) plus column
/// pairs outside chosen diagonals counted per query block row whole (64 each). As peers' benchmarks
/// count.
int64_t computed_pairs(const Index& index, int b, int h);
/// The same where sample b is a row of documents ([N], or empty: one): blocks and columns before the document of a query block's
/// first row do not count. Cost: O((num_blocks + columns) log diagonals).
int64_t computed_pairs(const Index& index, int b, int h, std::span<const int32_t> document_starts);
/// What dense attention would compute, counted so, of one head.
int64_t dense_pairs(int64_t seq_len, std::span<const int32_t> document_starts);
/// computed_pairs summed over all heads / (batch * heads * N^2 / 2).
double density(const Index& index);
/// With documents ([batch, N]; empty: as above): computed_pairs / dense_pairs, so that dense is exactly 1.
double density(const Index& index, std::span<const int32_t> document_starts);

/// bit c of row r set: diagonal c chosen. words = ceil(num_blocks / 64).
struct DiagonalBitmap {
  int64_t words = 0;
  std::vector<uint64_t> bits;  ///< [rows, words]
};
DiagonalBitmap diagonal_bitmap(const Index& index);

/// Small sequences only: bool [batch, heads, N, N] as bytes, from the definition above
/// (document_starts [batch, N] or empty).
std::vector<uint8_t> mask(const Index& index, std::span<const int32_t> document_starts);

}  // namespace mtraining::index
