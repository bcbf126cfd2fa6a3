#include "mtraining/index/columns.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "mtraining/base/check.h"
#include "mtraining/index/index_cases.h"

namespace mtraining::index {
namespace {

using layout::Layout;
using layout::LayoutKind;

/// An index of random columns, some heads without any.
Index random_columns(int batch, int num_q_heads, int64_t seq_len, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<std::vector<int32_t>> diagonals(batch * num_q_heads), columns(batch * num_q_heads);
  for (size_t r = 0; r < columns.size(); ++r) {
    columns[r] =
        cases::some_of(random, seq_len, r % 5 == 3 ? 0.0 : 0.04 * static_cast<double>(r % 3 + 1));
    for (int32_t sink = 0; sink < std::min<int64_t>(8, seq_len); ++sink) columns[r].push_back(sink);
    if (r % 5 == 3) columns[r].clear();
  }
  return make_index(batch, num_q_heads, seq_len, std::move(diagonals), std::move(columns));
}

/// All laws of a plan at once.
void expect_sound(const Index& index, const Layout& layout, int num_kv_heads, int64_t max_rows) {
  const std::string where = cases::name(layout) + " heads " + std::to_string(index.num_q_heads) +
                            "/" + std::to_string(num_kv_heads) + " max " + std::to_string(max_rows);
  const ColumnPlan plan = plan_columns(index, layout, num_kv_heads, max_rows);
  const int group = index.num_q_heads / num_kv_heads;

  // What must be there, from the lists alone.
  std::set<std::tuple<int64_t, int, int>> wanted;  // (position, batch, kv head)
  for (int64_t r = 0; r < index.columns.rows; ++r) {
    const int b = static_cast<int>(r / index.num_q_heads);
    const int h = static_cast<int>(r % index.num_q_heads);
    for (const int32_t position : index.columns.row(r)) wanted.emplace(position, b, h / group);
  }
  ASSERT_EQ(plan.union_rows, static_cast<int64_t>(wanted.size())) << where;

  std::set<std::tuple<int64_t, int, int>> packed;
  std::vector<std::vector<int32_t>> heads(index.columns.rows);
  std::tuple<int64_t, int, int> last{-1, 0, 0};
  for (const ColumnSlice& slice : plan.slices) {
    ASSERT_EQ(static_cast<int>(slice.rows.size()), layout.cp_size());
    ASSERT_GE(slice.rows_per_rank, 1);
    ASSERT_LE(slice.rows_per_rank, max_rows) << where;
    size_t most = 0;
    std::set<std::tuple<int64_t, int, int>> here;
    for (int rank = 0; rank < layout.cp_size(); ++rank) {
      most = std::max(most, slice.rows[rank].size());
      for (const PackedRow& row : slice.rows[rank]) {
        const std::tuple<int64_t, int, int> key{layout.position(rank, row.offset), row.batch,
                                                row.kv_head};
        ASSERT_TRUE(here.insert(key).second) << where;
        ASSERT_TRUE(packed.insert(key).second)
            << "packed twice: position " << std::get<0>(key) << ", " << where;
      }
    }
    ASSERT_EQ(static_cast<int64_t>(most), slice.rows_per_rank) << where;
    ASSERT_GT(*here.begin(), last) << "slices must ascend, " << where;
    last = *here.rbegin();

    // The gathered buffer as an all-gather lays it out; padding belongs to nobody.
    for (int64_t r = 0; r < index.columns.rows; ++r) {
      ASSERT_LE(slice.counts[r], slice.capacity);
      for (int32_t n = 0; n < slice.counts[r]; ++n) {
        const int64_t gathered = slice.gathered_rows[r * slice.capacity + n];
        const int rank = static_cast<int>(gathered / slice.rows_per_rank);
        const auto at = static_cast<size_t>(gathered % slice.rows_per_rank);
        ASSERT_LT(at, slice.rows[rank].size()) << "points into padding, " << where;
        const PackedRow& row = slice.rows[rank][at];
        const int32_t position = slice.positions[r * slice.capacity + n];
        ASSERT_EQ(layout.position(rank, row.offset), position) << where;
        ASSERT_EQ(row.batch, r / index.num_q_heads);
        ASSERT_EQ(row.kv_head, r % index.num_q_heads / group)
            << where;  // query head h reads h / (H / Hk)
        heads[r].push_back(position);
      }
    }
    const kernels::ColumnLists view = slice.view();
    ASSERT_EQ(view.key_rows, slice.gathered_rows.data());
    ASSERT_EQ(view.positions, slice.positions.data());
    ASSERT_EQ(view.counts, slice.counts.data());
    ASSERT_EQ(view.capacity, slice.capacity);
  }
  ASSERT_EQ(packed, wanted) << where;
  for (int64_t r = 0; r < index.columns.rows; ++r) {
    const auto row = index.columns.row(r);
    ASSERT_EQ(heads[r], std::vector<int32_t>(row.begin(), row.end()))
        << "each column once, ascending; " << where;
  }
}

TEST(ColumnPlan, TheUnionHoldsEachColumnOnceAndHeadsPointAtTheirRows) {
  const std::vector<std::pair<int, int>> heads = {{16, 2}, {32, 8}, {28, 4}, {12, 2},
                                                  {4, 4},  {4, 1},  {28, 7}};
  const int64_t seq_len = 1003;
  for (const auto& [num_q_heads, num_kv_heads] : heads) {
    const Index index = random_columns(2, num_q_heads, seq_len, 77);
    for (const Layout& layout : cases::layouts(seq_len, {1, 3, 4, 8})) {
      expect_sound(index, layout, num_kv_heads, 1 << 20);
      expect_sound(index, layout, num_kv_heads, 29);
    }
  }
}

TEST(ColumnPlan, SlicesMayBeAsSmallAsOneRowARank) {
  for (const int64_t seq_len : {1, 65, 300}) {
    const Index index = random_columns(2, 6, seq_len, 78);
    for (const int cp_size : {1, 4}) {
      for (const int64_t max_rows : {1, 2, 5}) {
        expect_sound(index, Layout({LayoutKind::kBlockStriped, seq_len, cp_size}), 2, max_rows);
        expect_sound(index, Layout({LayoutKind::kStriped, seq_len, cp_size}), 3, max_rows);
      }
    }
  }
}

// Every slice but the last is full on some rank: no exchange is split needlessly.
TEST(ColumnPlan, SlicesAreFull) {
  const Index index = random_columns(1, 8, 4000, 79);
  const ColumnPlan plan = plan_columns(index, Layout({LayoutKind::kBlockStriped, 4000, 4}), 2, 50);
  ASSERT_GT(plan.slices.size(), 2u);
  for (size_t s = 0; s + 1 < plan.slices.size(); ++s) EXPECT_EQ(plan.slices[s].rows_per_rank, 50);
}

TEST(ColumnPlan, EveryRankComputesTheSamePlan) {
  // A rank has its own copy of the index and of the layout, and its lists may have more capacity.
  const Index index = random_columns(2, 8, 2000, 80);
  Index copy = index;
  copy.columns.capacity = index.columns.capacity + 13;
  copy.columns.values.assign(copy.columns.rows * copy.columns.capacity, -7);
  for (int64_t r = 0; r < index.columns.rows; ++r) {
    const auto row = index.columns.row(r);
    std::copy(row.begin(), row.end(), copy.columns.values.begin() + r * copy.columns.capacity);
  }
  const ColumnPlan a =
      plan_columns(index, Layout({LayoutKind::kBlockStriped, 2000, 8, 64, 2}), 2, 40);
  const ColumnPlan b =
      plan_columns(copy, Layout({LayoutKind::kBlockStriped, 2000, 8, 64, 2}), 2, 40);
  ASSERT_EQ(a.slices.size(), b.slices.size());
  ASSERT_EQ(a.union_rows, b.union_rows);
  for (size_t s = 0; s < a.slices.size(); ++s) {
    EXPECT_EQ(a.slices[s].rows_per_rank, b.slices[s].rows_per_rank);
    EXPECT_EQ(a.slices[s].gathered_rows, b.slices[s].gathered_rows);
    EXPECT_EQ(a.slices[s].positions, b.slices[s].positions);
    EXPECT_EQ(a.slices[s].counts, b.slices[s].counts);
  }
}

// The worked example of docs/math/index.md.
TEST(ColumnPlan, WorkedExample) {
  const Index index =
      make_index(1, 4, 2048, {{}, {}, {}, {}}, {{0, 5, 130, 700}, {0, 131}, {5}, {5, 600}});
  const ColumnPlan plan =
      plan_columns(index, Layout({LayoutKind::kBlockStriped, 2048, 4, 128, 1}), 2, 16384);
  ASSERT_EQ(plan.union_rows, 7);
  ASSERT_EQ(plan.slices.size(), 1u);
  const ColumnSlice& slice = plan.slices[0];
  EXPECT_EQ(slice.rows_per_rank, 4);
  std::vector<std::vector<std::pair<int, int>>> packed(4);  // (kv head, offset)
  for (int rank = 0; rank < 4; ++rank) {
    for (const PackedRow& row : slice.rows[rank])
      packed[rank].emplace_back(row.kv_head, row.offset);
  }
  using Rows = std::vector<std::pair<int, int>>;
  EXPECT_EQ(packed[0], (Rows{{0, 0}, {0, 5}, {1, 5}, {1, 216}}));
  EXPECT_EQ(packed[1], (Rows{{0, 2}, {0, 3}, {0, 188}}));
  EXPECT_TRUE(packed[2].empty() && packed[3].empty());
  const std::vector<std::vector<int32_t>> gathered = {{0, 1, 4, 6}, {0, 5}, {2}, {2, 3}};
  for (int h = 0; h < 4; ++h) {
    const auto begin = slice.gathered_rows.begin() + h * slice.capacity;
    EXPECT_EQ(std::vector<int32_t>(begin, begin + slice.counts[h]), gathered[h]) << h;
  }
}

TEST(ColumnPlan, NoColumnsNoSlices) {
  const ColumnPlan plan =
      plan_columns(dense_index(2, 4, 500), Layout({LayoutKind::kBlockStriped, 500, 4}), 2, 10);
  EXPECT_TRUE(plan.slices.empty());
  EXPECT_EQ(plan.union_rows, 0);
}

TEST(ColumnPlan, WrongInputIsNamed) {
  const Index index = dense_index(1, 6, 500);
  const Layout layout({LayoutKind::kBlockStriped, 500, 4});
  EXPECT_THROW(plan_columns(index, layout, 4, 10), InvalidArgument);
  EXPECT_THROW(plan_columns(index, layout, 0, 10), InvalidArgument);
  EXPECT_THROW(plan_columns(index, layout, 2, 0), InvalidArgument);
  EXPECT_THROW(plan_columns(index, Layout({LayoutKind::kBlockStriped, 501, 4}), 2, 10),
               InvalidArgument);
}

TEST(UnionTooLarge, IsMoreThanHalfOfTheSequenceOnAverage) {
  std::vector<int32_t> half, other_half, quarter;
  for (int32_t j = 0; j < 100; ++j) (j < 50 ? half : other_half).push_back(j);
  quarter.assign(half.begin(), half.begin() + 25);
  const std::vector<std::vector<int32_t>> none(4);
  // Two kv heads: exactly half each is not more than half.
  EXPECT_FALSE(union_too_large(make_index(1, 4, 100, none, {half, quarter, other_half, {}}), 2));
  EXPECT_TRUE(union_too_large(make_index(1, 4, 100, none, {half, {50}, other_half, {}}), 2));
  // The same heads under one kv head: the union of both halves is everything.
  EXPECT_TRUE(union_too_large(make_index(1, 4, 100, none, {half, quarter, other_half, {}}), 1));
  // Heads of a group that choose alike cost once.
  EXPECT_FALSE(union_too_large(make_index(1, 4, 100, none, {half, half, half, half}), 1));
}

}  // namespace
}  // namespace mtraining::index
