#include "mtraining/index/step_pairs.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <random>

#include "mtraining/base/check.h"
#include "mtraining/index/contract_reader.h"
#include "mtraining/index/index_cases.h"
#include "mtraining/index/step_index.h"

namespace mtraining::index {
namespace {

using layout::Layout;
using layout::LayoutKind;
using layout::LayoutOptions;

int64_t total(const std::vector<int64_t>& table) {
  return std::accumulate(table.begin(), table.end(), int64_t{0});
}

/// Pairs by (rank, source) counted block by block over owners of positions.
std::vector<int64_t> counted_table(const Index& index, const Layout& layout, int64_t row,
                                   bool with_columns) {
  const int64_t ranks = layout.cp_size();
  std::vector<int64_t> table(ranks * ranks, 0);
  std::vector<uint8_t> chosen(index.num_blocks(), 0);
  for (const int32_t c : index.diagonals.row(row)) chosen[c] = 1;
  std::vector<int64_t> columns_in(index.num_blocks(), 0);
  if (with_columns) {
    for (const int32_t position : index.columns.row(row)) ++columns_in[position / 64];
  }
  for (int64_t query = 0; query < index.num_blocks(); ++query) {
    const int64_t rank = layout.owner(query * 64).cp_rank;
    for (int64_t key = 0; key <= query; ++key) {
      const int64_t source = layout.owner(key * 64).cp_rank;
      table[rank * ranks + source] += chosen[query - key] ? 4096 : columns_in[key] * 64;
    }
  }
  return table;
}

TEST(StepPairs, TableEqualsCountingBlockByBlock) {
  for (const int64_t seq_len : {1, 64, 100, 1000, 64 * 48, 7001}) {
    const Index index = cases::make_six_heads(31, seq_len);
    for (const Layout& layout : cases::layouts(seq_len)) {
      for (int64_t r = 0; r < 6; ++r) {
        for (const bool with_columns : {false, true}) {
          const std::vector<int64_t> table = step_pair_table(index, layout, r, with_columns);
          ASSERT_EQ(table, counted_table(index, layout, r, with_columns))
              << cases::name(layout) << " row " << r << " columns " << with_columns;
        }
      }
    }
  }
}

TEST(StepPairs, EachPairOfRanksIsItsCellOfTheTable) {
  for (const int64_t seq_len : {100, 5003}) {
    const Index index = cases::make_six_heads(32, seq_len);
    for (const Layout& layout : cases::layouts(seq_len)) {
      const int ranks = layout.cp_size();
      for (int64_t r = 0; r < 6; ++r) {
        for (const bool with_columns : {false, true}) {
          const std::vector<int64_t> table = step_pair_table(index, layout, r, with_columns);
          for (int rank = 0; rank < ranks; ++rank) {
            for (int source = 0; source < ranks; ++source) {
              ASSERT_EQ(step_pairs(index, layout, rank, source, r, with_columns),
                        table[rank * ranks + source])
                  << cases::name(layout);
            }
          }
        }
      }
    }
  }
}

TEST(StepPairs, ARanksPairsAreItsRowsOfAllHeadsTables) {
  const auto expect_rows = [](const Index& index, const Layout& layout) {
    const int ranks = layout.cp_size();
    for (const bool with_columns : {false, true}) {
      std::vector<int64_t> all(ranks * ranks, 0);
      for (int64_t r = 0; r < index.diagonals.rows; ++r) {
        const std::vector<int64_t> table = step_pair_table(index, layout, r, with_columns);
        for (int cell = 0; cell < ranks * ranks; ++cell) all[cell] += table[cell];
      }
      for (int rank = 0; rank < ranks; ++rank) {
        ASSERT_EQ(
            rank_step_pairs(index, layout, rank, with_columns),
            std::vector<int64_t>(all.begin() + rank * ranks, all.begin() + (rank + 1) * ranks))
            << cases::name(layout);
      }
    }
  };
  for (const int64_t seq_len : {100, 5003}) {
    const Index index = cases::make_six_heads(35, seq_len);
    for (const Layout& layout : cases::layouts(seq_len)) expect_rows(index, layout);
    expect_rows(dense_index(2, 3, seq_len), Layout({LayoutKind::kStriped, seq_len, 4}));
  }
}

TEST(StepPairs, SumOverEverythingIsComputedPairs) {
  for (const int64_t seq_len : {1, 65, 4096, 64 * 192 * 3, 50021}) {
    const Index index = cases::make_six_heads(33, seq_len);
    for (const Layout& layout : cases::layouts(seq_len, {1, 3, 8, 32})) {
      for (int64_t r = 0; r < 6; ++r) {
        ASSERT_EQ(total(step_pair_table(index, layout, r, true)),
                  computed_pairs(index, static_cast<int>(r / 3), static_cast<int>(r % 3)))
            << cases::name(layout) << " row " << r;
      }
    }
  }
}

TEST(StepPairs, AreTheBlocksThatTheStepLists) {
  const int64_t seq_len = 5003;
  const Index index = cases::make_six_heads(34, seq_len);
  std::vector<Layout> layouts = cases::layouts(seq_len, {1, 2, 3, 8});
  for (const Layout& layout : layouts) {
    const int64_t blocks = layout.blocks_per_rank();
    for (int rank = 0; rank < layout.cp_size(); ++rank) {
      const auto starts = layout.block_starts(rank);
      for (int source = 0; source < layout.cp_size(); ++source) {
        const StepBlocks step = step_blocks(index, layout, rank, source);
        for (int64_t r = 0; r < 6; ++r) {
          int64_t listed = 0;
          contract::read_blocks(step.view(), r, blocks, blocks,
                                [&](int64_t q, int64_t) { listed += starts[q] < seq_len; });
          ASSERT_EQ(step_pairs(index, layout, rank, source, r, false), listed * 4096)
              << cases::name(layout);
        }
      }
    }
  }
}

TEST(StepPairs, StripedCountsItsUnitsWhole) {
  for (const int64_t seq_len : {1, 100, 64 * 24, 1501}) {
    const Index index = dense_index(1, 1, seq_len);
    for (const int cp_size : {1, 2, 3, 8}) {
      const Layout layout({LayoutKind::kStriped, seq_len, cp_size});
      const std::vector<int64_t> table = step_pair_table(index, layout, 0, true);
      for (int rank = 0; rank < cp_size; ++rank) {
        for (int source = 0; source < cp_size; ++source) {
          const StepBlocks step = step_blocks(index, layout, rank, source);
          const int64_t listed = static_cast<int64_t>(step.key_blocks.size());
          ASSERT_EQ(table[rank * cp_size + source], listed * 4096);
          ASSERT_EQ(step_pairs(index, layout, rank, source, 0, true), listed * 4096);
        }
      }
      if (seq_len % (64 * cp_size) == 0) {
        const int64_t units = seq_len / 64 / cp_size;  // of a rank
        EXPECT_EQ(total(table), cp_size * cp_size * units * (units + 1) / 2 * 4096);
      }
    }
  }
}

/// A band, runs and lines, columns drawn towards the start: 256 diagonals and `columns` columns.
Index vertical_slash(int heads, int64_t seq_len, int64_t columns) {
  std::mt19937_64 random(2);
  std::vector<std::vector<int32_t>> diagonals(heads), positions(heads);
  const int64_t num_blocks = (seq_len + 63) / 64;
  for (int h = 0; h < heads; ++h) {
    std::vector<uint8_t> seen(num_blocks, 0);
    for (int32_t c = 0; c < 32; ++c) seen[c] = 1;
    for (int n = 32; n < 256;) {
      const int64_t c = static_cast<int64_t>(random() % num_blocks);
      if (!seen[c]) seen[c] = 1, ++n;
    }
    for (int64_t c = 0; c < num_blocks; ++c) {
      if (seen[c]) diagonals[h].push_back(static_cast<int32_t>(c));
    }
    std::vector<uint8_t> column(seq_len, 0);
    for (int64_t n = 0; n < columns;) {
      const double x = static_cast<double>(random() % (1 << 30)) / (1 << 30);
      const int64_t j = static_cast<int64_t>(static_cast<double>(seq_len) * x * x);
      if (!column[j]) column[j] = 1, ++n;
    }
    for (int64_t j = 0; j < seq_len; ++j) {
      if (column[j]) positions[h].push_back(static_cast<int32_t>(j));
    }
  }
  return make_index(1, heads, seq_len, std::move(diagonals), std::move(positions));
}

TEST(StepPairs, TablesOfHalfAMillionTokensOver128RanksTakeLittleTime) {
  const int64_t seq_len = 512 * 1024;
  const Index index = vertical_slash(16, seq_len, 4096);
  const auto begin = std::chrono::steady_clock::now();
  for (const LayoutKind kind :
       {LayoutKind::kBlockStriped, LayoutKind::kZigzag, LayoutKind::kContiguous}) {
    for (const int cp_size : {32, 128}) {
      const Layout layout({kind, seq_len, cp_size});
      for (int h = 0; h < 16; ++h) {
        ASSERT_EQ(total(step_pair_table(index, layout, h, true)), computed_pairs(index, 0, h));
      }
    }
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  RecordProperty("seconds_for_96_tables", std::to_string(seconds.count()));
  EXPECT_LT(seconds.count(), 10.0);  // measured 0.6
}

// Cost of a flat ring in lockstep: the sum over launches of the slowest rank over the mean total.
// Blocks step by step; columns in one launch (once), or at their source's step (per_step).
TEST(StepPairs, BlockStripedKeepsTheRingInBalanceWhereZigzagDoesNot) {
  const int64_t seq_len = 512 * 1024;
  const Index index = vertical_slash(4, seq_len, 4096);
  const auto lockstep = [&](const Layout& layout, bool columns_once) {
    const int ranks = layout.cp_size();
    std::vector<int64_t> steps(ranks * ranks, 0);
    std::vector<int64_t> column_launch(ranks, 0);
    int64_t all = 0;
    for (int h = 0; h < 4; ++h) {
      const auto blocks = step_pair_table(index, layout, h, false);
      const auto both = step_pair_table(index, layout, h, true);
      for (int cell = 0; cell < ranks * ranks; ++cell) {
        steps[cell] += columns_once ? blocks[cell] : both[cell];
        column_launch[cell / ranks] += both[cell] - blocks[cell];
      }
      all += total(both);
    }
    int64_t slowest =
        columns_once ? *std::max_element(column_launch.begin(), column_launch.end()) : 0;
    for (int step = 0; step < ranks; ++step) {
      int64_t most = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        most = std::max(most, steps[rank * ranks + (rank - step + ranks) % ranks]);
      }
      slowest += most;
    }
    return static_cast<double>(slowest) * ranks / static_cast<double>(all);
  };
  const Layout block_striped({LayoutKind::kBlockStriped, seq_len, 32, 64, 1});
  const Layout zigzag({LayoutKind::kZigzag, seq_len, 32});
  for (const bool columns_once : {true, false}) {
    const double ours = lockstep(block_striped, columns_once);
    const double theirs = lockstep(zigzag, columns_once);
    const std::string how = columns_once ? "once" : "per_step";
    RecordProperty("block_striped_" + how, std::to_string(ours));
    RecordProperty("zigzag_" + how, std::to_string(theirs));
    EXPECT_LT(ours, columns_once ? 1.01 : 1.07) << how;
    EXPECT_GT(theirs, columns_once ? 1.1 : 1.5) << how;
  }
}

TEST(StepPairs, RowsOutOfRangeAreNamed) {
  const Layout layout({LayoutKind::kBlockStriped, 1000, 4});
  const Index index = dense_index(1, 2, 1000);
  EXPECT_THROW(step_pairs(index, layout, 0, 0, 2, true), InvalidArgument);
  EXPECT_THROW(step_pair_table(index, layout, -1, true), InvalidArgument);
  EXPECT_THROW(step_pair_table(dense_index(1, 1, 999), layout, 0, true), InvalidArgument);
}

}  // namespace
}  // namespace mtraining::index
