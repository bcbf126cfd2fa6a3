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

Index make_block_index(int batch, int num_q_heads, int64_t seq_len, BlockRows blocks) {
  check_sizes("make_block_index", batch, num_q_heads, seq_len);
  Index index;
  index.batch = batch;
  index.num_q_heads = num_q_heads;
  index.seq_len = seq_len;
  const int64_t rows = static_cast<int64_t>(batch) * num_q_heads, num_blocks = index.num_blocks();
  const std::vector<int64_t>& begin = blocks.row_begin;
  MT_CHECK_ARG(static_cast<int64_t>(begin.size()) == rows * num_blocks + 1,
               "make_block_index: row_begin: expected ", rows * num_blocks + 1, " values, got ",
               begin.size());
  MT_CHECK_ARG(begin.front() == 0 && std::is_sorted(begin.begin(), begin.end()) &&
                   begin.back() == static_cast<int64_t>(blocks.key_blocks.size()),
               "make_block_index: row_begin: expected ascending values from 0 to ",
               blocks.key_blocks.size());
  for (int64_t at = 0; at < rows * num_blocks; ++at) {
    const int64_t query_block = at % num_blocks, r = at / num_blocks;
    int64_t before = -1;
    for (int64_t e = begin[at]; e < begin[at + 1]; ++e) {
      const int64_t block = blocks.key_blocks[e];
      MT_CHECK_ARG(block > before && block <= query_block, "make_block_index: sample ",
                   r / num_q_heads, ", head ", r % num_q_heads, ", query block ", query_block,
                   ": expected ascending key blocks up to it, got ", block, " after ", before);
      before = block;
    }
  }
  index.blocks = std::move(blocks);
  index.diagonals = make_lists(std::vector<std::vector<int32_t>>(rows));
  index.columns = index.diagonals;
  index.dense_heads.assign(rows, 0);
  return index;
}

Index sample_of(const Index& index, int b) {
  MT_CHECK_ARG(b >= 0 && b < index.batch, "sample_of: expected a sample below ", index.batch,
               ", got ", b);
  Index sample;
  sample.num_q_heads = index.num_q_heads;
  sample.seq_len = index.seq_len;
  const auto rows = [&](const Lists& lists) {
    std::vector<std::vector<int32_t>> some;
    for (int h = 0; h < index.num_q_heads; ++h) {
      const std::span<const int32_t> row = lists.row(index.row(b, h));
      some.emplace_back(row.begin(), row.end());
    }
    return make_lists(some);
  };
  sample.diagonals = rows(index.diagonals);
  sample.columns = rows(index.columns);
  if (index.has_blocks()) {
    const int64_t per_sample = index.num_q_heads * index.num_blocks();
    const auto begin = index.blocks.row_begin.begin() + b * per_sample;
    sample.blocks.row_begin.assign(begin, begin + per_sample + 1);
    const auto keys = index.blocks.key_blocks.begin();
    sample.blocks.key_blocks.assign(keys + begin[0], keys + begin[per_sample]);
    const int64_t first = begin[0];
    for (int64_t& at : sample.blocks.row_begin) at -= first;
  }
  const auto dense = index.dense_heads.begin() + index.row(b, 0);
  sample.dense_heads.assign(dense, dense + index.num_q_heads);
  return sample;
}

int64_t computed_pairs(const Index& index, int b, int h) {
  MT_CHECK_ARG(b >= 0 && b < index.batch && h >= 0 && h < index.num_q_heads,
               "computed_pairs: expected sample < ", index.batch, " and head < ", index.num_q_heads,
               ", got ", b, " and ", h);
  const int64_t num_blocks = index.num_blocks();
  if (index.has_blocks()) {
    const int64_t* begin = index.blocks.row_begin.data() + index.row(b, h) * num_blocks;
    return (begin[num_blocks] - begin[0]) * kBlockPairs;
  }
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

int64_t computed_pairs(const Index& index, int b, int h, std::span<const int32_t> document_starts) {
  if (document_starts.empty()) return computed_pairs(index, b, h);
  MT_CHECK_ARG(static_cast<int64_t>(document_starts.size()) == index.seq_len,
               "computed_pairs: document_starts: expected seq_len = ", index.seq_len,
               " values, got ", document_starts.size());
  const int64_t num_blocks = index.num_blocks(), r = index.row(b, h);
  const std::span<const int32_t> diagonals = index.diagonals.row(r);
  const auto diagonals_to = [&](int64_t last) {
    return std::upper_bound(diagonals.begin(), diagonals.end(), last) - diagonals.begin();
  };
  // Starts ascend, so that the first row of a query block sees furthest back.
  const auto first_start = [&](int64_t query_block) {
    return document_starts[query_block * kBlock];
  };
  int64_t pairs = 0;
  for (int64_t q = 0; q < num_blocks; ++q) {
    const int64_t lowest = first_start(q) / kBlock;
    if (index.has_blocks()) {
      const std::span<const int32_t> row = index.blocks.row(r, q, num_blocks);
      pairs += (row.end() - std::lower_bound(row.begin(), row.end(), lowest)) * kBlockPairs;
    } else {
      pairs += diagonals_to(q - lowest) * kBlockPairs;
    }
  }
  int64_t last = 0;  // query block whose rows still see the column
  for (const int64_t position : index.columns.row(r)) {
    const int64_t key_block = position / kBlock;
    last = std::max(last, key_block);
    while (last + 1 < num_blocks && first_start(last + 1) <= position) ++last;
    // The column's own block meets it, whatever document its first row is of.
    pairs += (last - key_block + 1 - diagonals_to(last - key_block)) * kBlock;
  }
  return pairs;
}

int64_t dense_pairs(int64_t seq_len, std::span<const int32_t> document_starts) {
  int64_t blocks = 0;
  for (int64_t first = 0; first < seq_len; first += kBlock)
    blocks += first / kBlock + 1 - (document_starts.empty() ? 0 : document_starts[first] / kBlock);
  return blocks * kBlockPairs;
}

double density(const Index& index, std::span<const int32_t> document_starts) {
  if (document_starts.empty()) return density(index);
  MT_CHECK_ARG(static_cast<int64_t>(document_starts.size()) == index.batch * index.seq_len,
               "density: document_starts: expected batch * seq_len = ", index.batch * index.seq_len,
               " values or none, got ", document_starts.size());
  double computed = 0, dense = 0;
  for (int b = 0; b < index.batch; ++b) {
    const auto starts = document_starts.subspan(b * index.seq_len, index.seq_len);
    dense += static_cast<double>(dense_pairs(index.seq_len, starts)) * index.num_q_heads;
    for (int h = 0; h < index.num_q_heads; ++h)
      computed += static_cast<double>(computed_pairs(index, b, h, starts));
  }
  return computed / dense;
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
      if (index.has_blocks()) {
        for (const int64_t block : index.blocks.row(r, i / kBlock, index.num_blocks())) {
          for (int64_t j = std::max(start, block * kBlock); j <= std::min(i, block * kBlock + 63);
               ++j) {
            row[j] = 1;
          }
        }
        continue;
      }
      for (int64_t j = start; j <= i; ++j)
        row[j] = on_column[j] | on_diagonal[i / kBlock - j / kBlock];
    }
  }
  return out;
}

}  // namespace mtraining::index
