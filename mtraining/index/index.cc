#include "mtraining/index/index.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <string>
#include <utility>

#include "mtraining/base/check.h"

namespace mtraining::index {
namespace {

constexpr int64_t kBlock = 64;
constexpr int64_t kBlockPairs = kBlock * kBlock;

void check_sizes(const char* where, int batch, int num_q_heads, int64_t seq_len) {
  MT_CHECK_ARG(batch >= 1, where, ": expected batch >= 1, got ", batch);
  MT_CHECK_ARG(num_q_heads >= 1, where, ": expected num_q_heads >= 1, got ", num_q_heads);
  MT_CHECK_ARG(seq_len >= 1 && seq_len <= std::numeric_limits<int32_t>::max(), where,
               ": expected seq_len in [1, 2^31), got ", seq_len);
}

/// Sorts, removes duplicates, checks the range [0, end).
void normalise(std::vector<int32_t>& values, const char* list, const char* what, int b, int h,
               int64_t end) {
  if (!std::is_sorted(values.begin(), values.end())) std::sort(values.begin(), values.end());
  values.erase(std::unique(values.begin(), values.end()), values.end());
  if (values.empty()) return;
  const int32_t bad = values.front() < 0 ? values.front() : values.back();
  MT_CHECK_ARG(bad >= 0 && bad < end, "make_index: ", list, " of sample ", b, ", head ", h,
               ": expected ", what, " in [0, ", end, "), got ", bad);
}

}  // namespace

Lists make_lists(const std::vector<std::vector<int32_t>>& rows) {
  Lists lists;
  lists.rows = static_cast<int64_t>(rows.size());
  lists.capacity = 1;
  for (const auto& row : rows)
    lists.capacity = std::max(lists.capacity, static_cast<int64_t>(row.size()));
  lists.values.assign(lists.rows * lists.capacity, 0);
  lists.counts.resize(lists.rows);
  for (int64_t r = 0; r < lists.rows; ++r) {
    std::copy(rows[r].begin(), rows[r].end(), lists.values.begin() + r * lists.capacity);
    lists.counts[r] = static_cast<int32_t>(rows[r].size());
  }
  return lists;
}

Index dense_index(int batch, int num_q_heads, int64_t seq_len) {
  check_sizes("dense_index", batch, num_q_heads, seq_len);
  Index index;
  index.batch = batch;
  index.num_q_heads = num_q_heads;
  index.seq_len = seq_len;
  const int64_t rows = static_cast<int64_t>(batch) * num_q_heads;
  const int64_t num_blocks = index.num_blocks();
  index.diagonals.rows = rows;
  index.diagonals.capacity = num_blocks;
  index.diagonals.values.resize(rows * num_blocks);
  for (int64_t r = 0; r < rows; ++r) {
    const auto begin = index.diagonals.values.begin() + r * num_blocks;
    std::iota(begin, begin + num_blocks, 0);
  }
  index.diagonals.counts.assign(rows, static_cast<int32_t>(num_blocks));
  index.columns = make_lists(std::vector<std::vector<int32_t>>(rows));
  index.dense_heads.assign(rows, 1);
  return index;
}

Index make_index(int batch, int num_q_heads, int64_t seq_len,
                 std::vector<std::vector<int32_t>> diagonals,
                 std::vector<std::vector<int32_t>> columns) {
  check_sizes("make_index", batch, num_q_heads, seq_len);
  Index index;
  index.batch = batch;
  index.num_q_heads = num_q_heads;
  index.seq_len = seq_len;
  const size_t rows = static_cast<size_t>(batch) * num_q_heads;
  MT_CHECK_ARG(diagonals.size() == rows,
               "make_index: diagonals: expected batch * num_q_heads = ", rows, " lists, got ",
               diagonals.size());
  MT_CHECK_ARG(columns.size() == rows, "make_index: columns: expected batch * num_q_heads = ", rows,
               " lists, got ", columns.size());
  for (int b = 0; b < batch; ++b) {
    for (int h = 0; h < num_q_heads; ++h) {
      const int64_t r = index.row(b, h);
      normalise(diagonals[r], "diagonals", "block diagonals", b, h, index.num_blocks());
      normalise(columns[r], "columns", "positions", b, h, seq_len);
    }
  }
  index.diagonals = make_lists(diagonals);
  index.columns = make_lists(columns);
  index.dense_heads.assign(rows, 0);
  return index;
}

int64_t computed_pairs(const Index& index, int b, int h) {
  MT_CHECK_ARG(b >= 0 && b < index.batch && h >= 0 && h < index.num_q_heads,
               "computed_pairs: expected sample < ", index.batch, " and head < ", index.num_q_heads,
               ", got ", b, " and ", h);
  const int64_t num_blocks = index.num_blocks();
  const std::span<const int32_t> diagonals = index.diagonals.row(index.row(b, h));
  const std::span<const int32_t> columns = index.columns.row(index.row(b, h));
  int64_t pairs = 0;
  for (const int64_t c : diagonals) pairs += (num_blocks - c) * kBlockPairs;
  // A column of key block kb is met by num_blocks - kb query blocks, of which one per diagonal
  // below that number has it already.
  size_t below = diagonals.size();
  for (const int64_t position : columns) {
    const int64_t met = num_blocks - position / kBlock;
    while (below > 0 && diagonals[below - 1] >= met) --below;
    pairs += (met - static_cast<int64_t>(below)) * kBlock;
  }
  return pairs;
}

double density(const Index& index) {
  double pairs = 0;
  for (int b = 0; b < index.batch; ++b) {
    for (int h = 0; h < index.num_q_heads; ++h)
      pairs += static_cast<double>(computed_pairs(index, b, h));
  }
  const double length = static_cast<double>(index.seq_len);
  return pairs / (static_cast<double>(index.batch) * index.num_q_heads * length * length / 2);
}

DiagonalBitmap diagonal_bitmap(const Index& index) {
  DiagonalBitmap bitmap;
  bitmap.words = (index.num_blocks() + 63) / 64;
  bitmap.bits.assign(index.diagonals.rows * bitmap.words, 0);
  for (int64_t r = 0; r < index.diagonals.rows; ++r) {
    for (const int32_t c : index.diagonals.row(r))
      bitmap.bits[r * bitmap.words + c / 64] |= uint64_t{1} << (c % 64);
  }
  return bitmap;
}

std::vector<uint8_t> mask(const Index& index, std::span<const int32_t> document_starts) {
  const int64_t length = index.seq_len;
  MT_CHECK_ARG(document_starts.empty() ||
                   static_cast<int64_t>(document_starts.size()) == index.batch * length,
               "mask: document_starts: expected batch * seq_len = ", index.batch * length,
               " values or none, got ", document_starts.size());
  std::vector<uint8_t> out(index.diagonals.rows * length * length, 0);
  std::vector<uint8_t> on_diagonal(index.num_blocks());
  std::vector<uint8_t> on_column(length);
  for (int64_t r = 0; r < index.diagonals.rows; ++r) {
    std::fill(on_diagonal.begin(), on_diagonal.end(), 0);
    std::fill(on_column.begin(), on_column.end(), 0);
    for (const int32_t c : index.diagonals.row(r)) on_diagonal[c] = 1;
    for (const int32_t position : index.columns.row(r)) on_column[position] = 1;
    const int64_t b = r / index.num_q_heads;
    for (int64_t i = 0; i < length; ++i) {
      const int64_t start = document_starts.empty() ? 0 : document_starts[b * length + i];
      uint8_t* row = out.data() + (r * length + i) * length;
      for (int64_t j = start; j <= i; ++j)
        row[j] = on_column[j] | on_diagonal[i / kBlock - j / kBlock];
    }
  }
  return out;
}

}  // namespace mtraining::index
