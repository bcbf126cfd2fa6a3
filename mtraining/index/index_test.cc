#include "mtraining/index/index.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <string>

#include "mtraining/base/check.h"
#include "mtraining/index/index_cases.h"
#include "mtraining/testing/error_of.h"

namespace mtraining::index {
namespace {

/// A head as benchmark patterns give it: half-open ranges of token offsets, and columns.
struct OffsetHead {
  std::vector<std::pair<int64_t, int64_t>> offset_ranges;
  std::vector<int32_t> columns;
};

/// Block diagonals that an offset touches: from the first and the last query of a block.
std::vector<int32_t> touched_diagonals(const OffsetHead& head, int64_t seq_len) {
  const int64_t num_blocks = seq_len / 64;
  std::vector<uint8_t> touched(num_blocks + 1, 0);
  for (const auto& [begin, end] : head.offset_ranges) {
    for (int64_t offset = begin; offset < end; ++offset) {
      for (const int64_t i : {64 * ((offset + 63) / 64), 64 * ((offset + 63) / 64) + 63}) {
        touched[i / 64 - (i - offset) / 64] = 1;
      }
    }
  }
  std::vector<int32_t> diagonals;
  for (int64_t c = 0; c < num_blocks; ++c) {
    if (touched[c]) diagonals.push_back(static_cast<int32_t>(c));
  }
  return diagonals;
}

/// Pairs as benchmarks count them, block by block: whole causal blocks on the diagonals, 64 pairs
/// for each query block at or after a column's block that has no chosen diagonal with it.
int64_t counted_pairs(const std::vector<int32_t>& diagonals, const std::vector<int32_t>& columns,
                      int64_t num_blocks) {
  std::vector<uint8_t> chosen(num_blocks, 0);
  for (const int32_t c : diagonals) chosen[c] = 1;
  int64_t pairs = 0;
  for (int64_t query = 0; query < num_blocks; ++query) {
    for (int64_t key = 0; key <= query; ++key) pairs += chosen[query - key] * 4096;
    for (const int32_t column : columns) {
      if (column / 64 <= query && !chosen[query - column / 64]) pairs += 64;
    }
  }
  return pairs;
}

TEST(MakeIndex, SortsAndRemovesDuplicates) {
  const Index index = make_index(1, 2, 300, {{4, 0, 4, 1}, {}}, {{}, {299, 0, 7, 7}});
  EXPECT_EQ(std::vector<int32_t>(index.diagonals.row(0).begin(), index.diagonals.row(0).end()),
            (std::vector<int32_t>{0, 1, 4}));
  EXPECT_TRUE(index.diagonals.row(1).empty());
  EXPECT_TRUE(index.columns.row(0).empty());
  EXPECT_EQ(std::vector<int32_t>(index.columns.row(1).begin(), index.columns.row(1).end()),
            (std::vector<int32_t>{0, 7, 299}));
  EXPECT_EQ(index.num_blocks(), 5);
}

TEST(MakeIndex, AValueOutOfRangeIsNamedWithHeadListAndRange) {
  const std::string diagonal = testing::error_of<InvalidArgument>([] {
    make_index(2, 2, 300, {{}, {}, {}, {0, 5}}, {{}, {}, {}, {}});
  });
  for (const char* part : {"diagonals", "sample 1", "head 1", "[0, 5)", "got 5"}) {
    EXPECT_NE(diagonal.find(part), std::string::npos) << diagonal;
  }
  const std::string column = testing::error_of<InvalidArgument>([] {
    make_index(1, 2, 300, {{}, {}}, {{300, 2}, {}});
  });
  for (const char* part : {"columns", "sample 0", "head 0", "[0, 300)", "got 300"}) {
    EXPECT_NE(column.find(part), std::string::npos) << column;
  }
  EXPECT_NE(testing::error_of<InvalidArgument>([] {
              make_index(1, 1, 300, {{3, -1}}, {{}});
            }).find("got -1"),
            std::string::npos);
  EXPECT_NE(testing::error_of<InvalidArgument>([] {
              make_index(1, 2, 300, {{}}, {{}, {}});
            }).find("2 lists, got 1"),
            std::string::npos);
  EXPECT_NE(
      testing::error_of<InvalidArgument>([] { make_index(1, 1, 0, {{}}, {{}}); }).find("seq_len"),
      std::string::npos);
  EXPECT_NE(testing::error_of<InvalidArgument>([] { dense_index(0, 1, 10); }).find("batch"),
            std::string::npos);
}

TEST(MakeLists, EmptyRowsHaveCapacityOne) {
  const Lists lists = make_lists({{}, {}});
  EXPECT_EQ(lists.rows, 2);
  EXPECT_EQ(lists.capacity, 1);
  EXPECT_TRUE(lists.row(0).empty() && lists.row(1).empty());
  EXPECT_EQ(make_lists({}).rows, 0);
}

TEST(Mask, IsTheDefinitionElementByElement) {
  for (const int64_t seq_len : {1, 64, 65, 200, 333}) {
    const cases::Chosen chosen = cases::six_heads(5, seq_len);
    const Index index = cases::make_six_heads(5, seq_len);
    // No documents; one that starts mid-block; every token its own; sample 1 differs from sample 0.
    std::vector<std::vector<int32_t>> starts(4);
    for (int b = 0; b < 2; ++b) {
      for (int64_t i = 0; i < seq_len; ++i) {
        starts[1].push_back(i < 77 + b ? 0 : 77 + b);
        starts[2].push_back(static_cast<int32_t>(i));
        starts[3].push_back(static_cast<int32_t>(b == 0 ? 0 : i / 50 * 50));
      }
    }
    for (const auto& document_starts : starts) {
      const std::vector<uint8_t> got = mask(index, document_starts);
      ASSERT_EQ(static_cast<int64_t>(got.size()), 6 * seq_len * seq_len);
      for (int64_t r = 0; r < 6; ++r) {
        const auto& diagonals = chosen.diagonals[r];
        const auto& columns = chosen.columns[r];
        for (int64_t i = 0; i < seq_len; ++i) {
          const int64_t start = document_starts.empty() ? 0 : document_starts[r / 3 * seq_len + i];
          for (int64_t j = 0; j < seq_len; ++j) {
            const bool reached =
                std::count(diagonals.begin(), diagonals.end(), i / 64 - j / 64) > 0 ||
                std::binary_search(columns.begin(), columns.end(), j);
            ASSERT_EQ(got[(r * seq_len + i) * seq_len + j], start <= j && j <= i && reached)
                << "row " << r << " query " << i << " key " << j << " N " << seq_len;
          }
        }
      }
    }
  }
  EXPECT_THROW(mask(dense_index(2, 1, 10), std::vector<int32_t>(10, 0)), InvalidArgument);
}

TEST(DiagonalBitmap, HasExactlyTheChosenBits) {
  for (const int64_t seq_len : {1, 64 * 64, 64 * 64 + 1, 64 * 200 + 3}) {
    const Index index = cases::make_six_heads(9, seq_len);
    const DiagonalBitmap bitmap = diagonal_bitmap(index);
    EXPECT_EQ(bitmap.words, (index.num_blocks() + 63) / 64);
    for (int64_t r = 0; r < 6; ++r) {
      const auto row = index.diagonals.row(r);
      for (int64_t c = 0; c < bitmap.words * 64; ++c) {
        const bool bit = bitmap.bits[r * bitmap.words + c / 64] >> (c % 64) & 1;
        ASSERT_EQ(bit, std::binary_search(row.begin(), row.end(), c)) << c;
      }
    }
  }
}

TEST(DenseIndex, HasEveryCausalPairInWholeBlocks) {
  for (const int64_t seq_len : {1, 64, 65, 640}) {
    const Index index = dense_index(2, 3, seq_len);
    const int64_t num_blocks = index.num_blocks();
    EXPECT_EQ(computed_pairs(index, 1, 2), num_blocks * (num_blocks + 1) / 2 * 4096);
    EXPECT_EQ(index.dense_heads, std::vector<uint8_t>(6, 1));
    const std::vector<uint8_t> dense = mask(index, {});
    for (int64_t i = 0; i < seq_len; ++i) {
      for (int64_t j = 0; j < seq_len; ++j)
        ASSERT_EQ(dense[(5 * seq_len + i) * seq_len + j], j <= i);
    }
  }
  EXPECT_DOUBLE_EQ(density(dense_index(1, 1, 64 * 100)), 101.0 / 100);
}

TEST(ComputedPairs, CountsWholeBlocksAndColumnsOutsideThem) {
  for (const int64_t seq_len : {1, 63, 64, 65, 1000, 64 * 41, 6007}) {
    const cases::Chosen chosen = cases::six_heads(21, seq_len);
    const Index index = cases::make_six_heads(21, seq_len);
    double sum = 0;
    for (int64_t r = 0; r < 6; ++r) {
      const int64_t expected =
          counted_pairs(chosen.diagonals[r], chosen.columns[r], index.num_blocks());
      ASSERT_EQ(computed_pairs(index, static_cast<int>(r / 3), static_cast<int>(r % 3)), expected)
          << r;
      sum += static_cast<double>(expected);
    }
    const double length = static_cast<double>(seq_len);
    EXPECT_DOUBLE_EQ(density(index), sum / (6 * length * length / 2));
  }
}

// The worked example of docs/math/index.md.
TEST(ComputedPairs, WorkedExample) {
  const Index index = make_index(1, 2, 2048, {{0, 5, 9}, {0, 5, 9}}, {{}, {700}});
  EXPECT_EQ(computed_pairs(index, 0, 0), (32 + 27 + 23) * 4096);
  EXPECT_EQ(computed_pairs(index, 0, 0), 335872);
  EXPECT_EQ(computed_pairs(index, 0, 1), 335872 + 19 * 64);  // 22 query blocks, 3 on a diagonal
}

// A column inside a chosen diagonal is not counted again: with all diagonals, columns cost nothing.
TEST(ComputedPairs, AColumnOnAChosenDiagonalCostsNothing) {
  std::vector<int32_t> all(50), every(64 * 50);
  std::iota(all.begin(), all.end(), 0);
  std::iota(every.begin(), every.end(), 0);
  const Index with = make_index(1, 1, 64 * 50, {all}, {every});
  EXPECT_EQ(computed_pairs(with, 0, 0), computed_pairs(dense_index(1, 1, 64 * 50), 0, 0));
  // One gap at diagonal 7: each column pays for the one query block 7 after its own.
  all.erase(all.begin() + 7);
  const Index gap = make_index(1, 1, 64 * 50, {all}, {every});
  EXPECT_EQ(computed_pairs(gap, 0, 0), computed_pairs(with, 0, 0));
}

TEST(ComputedPairs, AgreesWithTheBenchmarkPatternsCount) {
  // Shapes of the benchmark patterns: a band, runs of 256 offsets, single offsets, columns drawn
  // towards the start.
  std::mt19937_64 random(1);
  const int64_t seq_len = 32768;
  const auto below = [&](int64_t end) { return static_cast<int64_t>(random() % end); };
  for (const int64_t band : {1, 64, 65, 1024, 4096}) {
    OffsetHead head;
    head.offset_ranges.emplace_back(0, band);
    for (int run = 0; run < 6; ++run) {
      const int64_t begin = band + below(seq_len - 256 - band);
      head.offset_ranges.emplace_back(begin, begin + 256);
    }
    for (int line = 0; line < 16; ++line) {
      const int64_t offset = band + below(seq_len - band);
      head.offset_ranges.emplace_back(offset, offset + 1);
    }
    for (int32_t j = 0; j < 64; ++j) head.columns.push_back(j);
    for (int n = 0; n < 500; ++n) {
      const double x = static_cast<double>(below(1 << 20)) / (1 << 20);
      head.columns.push_back(static_cast<int32_t>(static_cast<double>(seq_len) * x * x));
    }
    std::sort(head.columns.begin(), head.columns.end());
    head.columns.erase(std::unique(head.columns.begin(), head.columns.end()), head.columns.end());
    const auto diagonals = touched_diagonals(head, seq_len);
    const Index index = make_index(1, 1, seq_len, {diagonals}, {head.columns});
    EXPECT_EQ(computed_pairs(index, 0, 0), counted_pairs(diagonals, head.columns, seq_len / 64));
  }
}

TEST(ComputedPairs, OfDocumentsAreTheBlocksAndColumnsThatSomeRowOfTheBlockMaySee) {
  std::mt19937 random(3);
  for (const int64_t n : {1, 64, 130, 700, 1000}) {
    for (const int64_t longest : {1, 40, 64, 300, 2000}) {
      std::vector<int32_t> starts;
      while (static_cast<int64_t>(starts.size()) < 2 * n) {
        const auto at = static_cast<int32_t>(starts.size() % n);
        const int64_t left = n - at;
        starts.insert(starts.end(), std::min<int64_t>(left, 1 + random() % longest), at);
      }
      for (const bool as_blocks : {false, true}) {
        Index index = cases::make_six_heads(static_cast<uint32_t>(n), n);
        const int64_t blocks = index.num_blocks();
        if (as_blocks) {
          BlockRows rows;
          rows.row_begin.push_back(0);
          for (int64_t i = 0; i < 6 * blocks; ++i) {
            for (int32_t k = 0; k <= i % blocks; ++k)
              if (random() % 3 == 0) rows.key_blocks.push_back(k);
            rows.row_begin.push_back(static_cast<int64_t>(rows.key_blocks.size()));
          }
          index = make_block_index(2, 3, n, rows);
        }
        double all = 0, dense = 0;
        for (int b = 0; b < 2; ++b) {
          const std::span<const int32_t> sample(starts.data() + b * n, n);
          for (int h = 0; h < 3; ++h) {
            const auto d = index.diagonals.row(index.row(b, h));
            int64_t pairs = 0;
            for (int64_t q = 0; q < blocks; ++q) {
              const int64_t from = sample[q * 64];
              for (int64_t k = from / 64; k <= q; ++k) {
                dense += 64 * 64;
                if (as_blocks) {
                  const auto row = index.blocks.row(index.row(b, h), q, blocks);
                  pairs += std::find(row.begin(), row.end(), k) != row.end() ? 64 * 64 : 0;
                  continue;
                }
                if (std::find(d.begin(), d.end(), q - k) != d.end()) {
                  pairs += 64 * 64;
                  continue;
                }
                for (const int64_t j : index.columns.row(index.row(b, h)))
                  pairs += j / 64 == k && (j >= from || k == q) ? 64 : 0;
              }
            }
            ASSERT_EQ(computed_pairs(index, b, h, sample), pairs) << n << " " << longest;
            all += static_cast<double>(pairs);
          }
        }
        EXPECT_NEAR(density(index, starts), all / dense, 1e-12);
        if (longest == 2000) continue;
        const std::vector<int32_t> one(2 * n, 0);
        EXPECT_EQ(computed_pairs(index, 1, 0, std::span(one).first(n)),
                  computed_pairs(index, 1, 0));
      }
      EXPECT_EQ(density(dense_index(2, 3, n), starts), 1);
    }
  }
}

TEST(BlockIndex, RefusesListsThatAreNotAscendingOrNotCausal) {
  const auto said = [](std::vector<int64_t> begin, std::vector<int32_t> blocks) {
    return testing::error_of<InvalidArgument>([&] {
      make_block_index(1, 1, 130, {std::move(begin), std::move(blocks)});
    });
  };
  EXPECT_EQ(said({0, 1, 2, 4}, {0, 1, 0, 2}), "");
  EXPECT_NE(said({0, 1, 2, 4}, {0, 1, 2, 0}).find("query block 2: expected ascending"),
            std::string::npos);
  EXPECT_NE(said({0, 1, 2, 3}, {1, 1, 1}).find("query block 0"), std::string::npos);
  EXPECT_NE(said({0, 1, 2}, {0, 1}).find("expected 4 values, got 3"), std::string::npos);
  EXPECT_NE(said({0, 2, 1, 3}, {0, 1, 1}).find("row_begin"), std::string::npos);
}

}  // namespace
}  // namespace mtraining::index
