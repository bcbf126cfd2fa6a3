// Counts what the index allocates.
#include <gtest/gtest.h>

#include <random>

#include "mtraining/index/columns.h"
#include "mtraining/index/index.h"
#include "mtraining/index/step_index.h"
#include "mtraining/testing/allocation_counter.h"

namespace mtraining::index {
namespace {

using layout::Layout;
using layout::LayoutKind;

constexpr int kHeads = 16;

/// `count` distinct values of [0, end), one in each of `count` equal ranges.
std::vector<int32_t> spread(std::mt19937_64& random, int64_t end, int64_t count) {
  std::vector<int32_t> values;
  for (int64_t n = 0; n < count; ++n) {
    const int64_t begin = n * end / count;
    const int64_t width = (n + 1) * end / count - begin;
    values.push_back(static_cast<int32_t>(begin + static_cast<int64_t>(random() % width)));
  }
  return values;
}

struct Lengths {
  std::vector<std::vector<int32_t>> diagonals, columns;
};

Lengths choice(int64_t seq_len, int64_t diagonals, int64_t columns) {
  std::mt19937_64 random(4);
  Lengths lists;
  for (int h = 0; h < kHeads; ++h) {
    lists.diagonals.push_back(spread(random, seq_len / 64, diagonals));
    lists.columns.push_back(spread(random, seq_len, columns));
  }
  return lists;
}

/// Bytes that one rank allocates for a layer: index, bitmap, the entries of every source, the plan.
int64_t bytes_of_a_layer(int64_t seq_len, int cp_size, int64_t stripe) {
  Lengths lists = choice(seq_len, 256, 4096);
  const Layout layout({LayoutKind::kBlockStriped, seq_len, cp_size, stripe, 1});
  const int64_t before = testing::allocated_bytes;
  const Index index =
      make_index(1, kHeads, seq_len, std::move(lists.diagonals), std::move(lists.columns));
  const DiagonalBitmap bitmap = diagonal_bitmap(index);
  for (int source = 0; source < cp_size; ++source) {
    const StepBlocks step = step_blocks(index, layout, cp_size - 1, source);
    const StepBlocks flipped = transpose(step, layout.blocks_per_rank());
    EXPECT_GE(flipped.num_entries.size(), size_t{kHeads});
  }
  const ColumnPlan plan = plan_columns(index, layout, 2, 16384);
  EXPECT_GT(plan.union_rows, 4096);
  return testing::allocated_bytes - before;
}

TEST(Allocation, TheCounterCounts) {
  const int64_t before = testing::allocated_bytes;
  std::vector<int64_t> values(1000);
  EXPECT_EQ(values.front(), 0);
  EXPECT_GE(testing::allocated_bytes - before, 8000);
}

TEST(Allocation, AMillionTokensOfSixteenHeadsIndexInLessThanFourMegabytes) {
  const int64_t seq_len = 1 << 20;
  Lengths lists = choice(seq_len, 256, 4096);
  const int64_t before = testing::allocated_bytes;
  const Index index =
      make_index(1, kHeads, seq_len, std::move(lists.diagonals), std::move(lists.columns));
  const int64_t allocated = testing::allocated_bytes - before;
  for (int64_t r = 0; r < kHeads; ++r) {
    ASSERT_EQ(index.diagonals.counts[r], 256);
    ASSERT_EQ(index.columns.counts[r], 4096);
  }
  RecordProperty("index_bytes", std::to_string(index.bytes()));
  RecordProperty("allocated_bytes", std::to_string(allocated));
  EXPECT_LT(index.bytes(), 4 << 20);
  EXPECT_LT(allocated, 4 << 20);
  // 16 heads x (256 + 4096) values and two counts a head, of 4 bytes.
  EXPECT_EQ(index.bytes(), 16 * (256 + 4096 + 2) * 4);
}

// Of the same choice, eight times the tokens: lists do not grow, only the bitmap (N / 64 bits)
// does. N^2 would grow 64 times.
TEST(Allocation, NothingGrowsWithTheSquareOfTheLength) {
  for (const int cp_size : {8, 32}) {
    for (const int64_t stripe : {64, 128}) {
      const int64_t shorter = bytes_of_a_layer(1 << 17, cp_size, stripe);
      const int64_t longer = bytes_of_a_layer(1 << 20, cp_size, stripe);
      RecordProperty("bytes_" + std::to_string(cp_size) + "_" + std::to_string(stripe),
                     std::to_string(shorter) + " to " + std::to_string(longer));
      EXPECT_LT(longer, 2 * shorter) << "W " << cp_size << " stripe " << stripe;
      EXPECT_LT(longer, 16 << 20) << "W " << cp_size << " stripe " << stripe;
    }
  }
}

// Where the choice itself grows with N (a fixed share of the diagonals), bytes grow with N.
TEST(Allocation, ADenseIndexGrowsWithTheLength) {
  const auto bytes = [](int64_t seq_len) {
    const Layout layout({LayoutKind::kBlockStriped, seq_len, 8, 64, 1});
    const int64_t before = testing::allocated_bytes;
    const Index index = dense_index(1, kHeads, seq_len);
    for (int source = 0; source < 8; ++source) {
      EXPECT_GT(step_blocks(index, layout, 7, source).capacity, 1);
    }
    return testing::allocated_bytes - before;
  };
  EXPECT_LE(static_cast<double>(bytes(1 << 20)), 8.1 * static_cast<double>(bytes(1 << 17)));
}

}  // namespace
}  // namespace mtraining::index
