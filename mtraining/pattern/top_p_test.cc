#include "mtraining/pattern/top_p.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "mtraining/base/check.h"
#include "mtraining/comm/loopback.h"
#include "mtraining/testing/random.h"

namespace mtraining::pattern {
namespace {

using Masses = std::vector<int64_t>;
using Indices = std::vector<int32_t>;

TEST(TopP, TakesTheFewestEntriesThatReachTheShareLowerIndexFirstOnTies) {
  EXPECT_EQ(top_p(Masses{5, 40, 5, 50}, 0.5), (Indices{3}));
  EXPECT_EQ(top_p(Masses{5, 40, 5, 50}, 0.51), (Indices{1, 3}));
  EXPECT_EQ(top_p(Masses{5, 40, 5, 50}, 0.9), (Indices{1, 3}));
  EXPECT_EQ(top_p(Masses{5, 40, 5, 50}, 0.91), (Indices{0, 1, 3}));
  EXPECT_EQ(top_p(Masses{7, 7, 7, 7}, 0.5), (Indices{0, 1}));
  EXPECT_EQ(top_p(Masses{7, 7, 7, 7}, 0.500001), (Indices{0, 1, 2}));
}

TEST(TopP, OneTakesAllOfTwelveEqualWeightsAndZeroTakesNone) {
  const Masses twelve(12, (int64_t{1} << 40) / 12);
  EXPECT_EQ(top_p(twelve, 1.0).size(), 12u);
  EXPECT_TRUE(top_p(twelve, 0.0).empty());
  EXPECT_EQ(top_p(twelve, 1.0 - 1e-9).size(), 12u);
  EXPECT_EQ(top_p(twelve, 11.0 / 12).size(), 11u);
  EXPECT_EQ(top_p(Masses{0, 3, 0}, 1.0), (Indices{0, 1, 2})) << "every entry, those of no mass too";
}

TEST(TopP, EmptyAndMasslessListsChooseNothingBelowOne) {
  EXPECT_TRUE(top_p(Masses{}, 1.0).empty());
  EXPECT_TRUE(top_p(Masses{}, 0.5).empty());
  EXPECT_TRUE(top_p(Masses{0, 0, 0}, 0.9).empty());
  EXPECT_EQ(top_p(Masses{0}, 1.0), (Indices{0}));
}

TEST(TopP, ThresholdNeverPassesTheTotal) {
  for (int64_t total : {int64_t{0}, int64_t{1}, (int64_t{1} << 53) + 1, (int64_t{1} << 62) + 3,
                        int64_t{12345678901}}) {
    for (double p : {0.0, 1e-12, 0.5, 0.9, 1 - 1e-16, 1.0}) {
      EXPECT_LE(top_p_threshold(total, p), total);
      EXPECT_GE(top_p_threshold(total, p), 0);
    }
    if (total > 0) {
      EXPECT_GT(top_p_threshold(total, 1e-12), 0);
    }
  }
  EXPECT_EQ(top_p_threshold(10, 0.25), 3);
}

TEST(TopP, CapKeepsTheHighest) {
  EXPECT_EQ(top_p(Masses{5, 40, 5, 50}, 1.0, 3), (Indices{0, 1, 3}));
  EXPECT_EQ(top_p(Masses{5, 40, 5, 50}, 0.9, 1), (Indices{3}));
  EXPECT_EQ(top_p(Masses{5, 40, 5, 50}, 0.5, 3), (Indices{3}));
  EXPECT_TRUE(top_p(Masses{5, 40, 5, 50}, 1.0, 0).empty());
}

// masses [rows][n]; key j is held by rank owner[j].
void expect_distributed_equals_top_p(const std::vector<Masses>& masses, const Indices& positions,
                                     const std::vector<int>& owner, int ranks, int64_t seq_len,
                                     double p, int64_t cap) {
  const int64_t rows = static_cast<int64_t>(masses.size()),
                keys = static_cast<int64_t>(positions.size());
  std::vector<std::vector<SelectedKeys>> got(ranks);
  comm::run_loopback(ranks, [&](comm::Transport& transport) {
    std::vector<int> members(ranks);
    std::iota(members.begin(), members.end(), 0);
    const auto group = transport.open("index", members);
    Indices local_positions;
    Masses local;
    for (int64_t j = 0; j < keys; ++j)
      if (owner[j] == transport.rank()) local_positions.push_back(positions[j]);
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t j = 0; j < keys; ++j)
        if (owner[j] == transport.rank()) local.push_back(masses[row][j]);
    got[transport.rank()] =
        distributed_top_p(local, local_positions, rows, seq_len, p, cap, *group);
  });
  for (int64_t row = 0; row < rows; ++row) {
    Indices expected;
    for (int32_t place : top_p(masses[row], p, cap)) expected.push_back(positions[place]);
    const bool cut = expected.size() < top_p(masses[row], p).size();
    for (int rank = 0; rank < ranks; ++rank) {
      ASSERT_EQ(got[rank].size(), masses.size());
      ASSERT_EQ(got[rank][row].positions, expected)
          << "rank " << rank << " of " << ranks << ", row " << row << ", p " << p << ", cap "
          << cap;
      ASSERT_EQ(got[rank][row].cut, cut) << "row " << row << ", p " << p << ", cap " << cap;
    }
  }
}

TEST(DistributedTopP, EqualsTopPOfTheGatheredListHoweverKeysAreSpread) {
  testing::Random random(3);
  for (int ranks : {1, 2, 3, 4, 8}) {
    for (int64_t keys : {1, 2, 63, 700}) {
      std::vector<Masses> masses(6, Masses(keys));
      for (int64_t j = 0; j < keys; ++j) {
        masses[0][j] = static_cast<int64_t>(random.next() >> 24);  // all different
        masses[1][j] = 12345;                                      // all the same
        masses[2][j] = random.below(3);                            // ties and zeros
        masses[3][j] = 0;
        masses[4][j] = j == keys / 2 ? int64_t{1} << 46 : random.below(2);  // one stands out
        masses[5][j] = (int64_t{1} << 40) + random.below(2) * 256 +
                       random.below(2);  // differ in a low digit only
      }
      // Positions with gaps, so that position and place in the list differ.
      Indices positions(keys);
      for (int64_t j = 0; j < keys; ++j)
        positions[j] = static_cast<int32_t>(3 * j + random.below(3));
      std::vector<int> scattered(keys), blocks(keys), last(keys, ranks - 1);
      for (int64_t j = 0; j < keys; ++j) {
        scattered[j] = static_cast<int>(random.below(ranks));
        blocks[j] = static_cast<int>(j * ranks / keys);
      }
      for (const auto& owner : {scattered, blocks, last})  // last: all other ranks hold nothing
        for (double p : {0.0, 1e-9, 0.3, 0.5, 0.9, 0.999999, 1.0})
          for (int64_t cap : {int64_t{-1}, int64_t{0}, int64_t{1}, keys / 3, keys, keys + 5})
            expect_distributed_equals_top_p(masses, positions, owner, ranks, 3 * keys, p, cap);
    }
  }
}

TEST(DistributedTopP, TwelveEqualWeightsOverThreeRanks) {
  const std::vector<Masses> masses(1, Masses(12, (int64_t{1} << 40) / 12));
  Indices positions(12);
  std::iota(positions.begin(), positions.end(), 0);
  const std::vector<int> owner = {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2};
  for (double p : {0.0, 0.25, 11.0 / 12, 1.0})
    expect_distributed_equals_top_p(masses, positions, owner, 3, 12, p, -1);
}

TEST(DistributedTopP, LargePositionsAndMassesShareOneKey) {
  const int64_t seq_len = int64_t{1} << 31;
  const std::vector<Masses> masses = {
      {int64_t{1} << 61, (int64_t{1} << 61) + 1, int64_t{1} << 61, 1}};
  const Indices positions = {0, 5, static_cast<int32_t>(seq_len / 2),
                             static_cast<int32_t>(seq_len - 1)};
  for (double p : {0.2, 0.34, 0.67, 0.999999999999, 1.0})
    expect_distributed_equals_top_p(masses, positions, {1, 0, 1, 0}, 2, seq_len, p, -1);
}

TEST(DistributedTopP, NoRowsNoExchange) {
  const auto single = comm::make_single();
  const auto group = single->open("index", {0});
  EXPECT_TRUE(distributed_top_p({}, Indices{0, 1}, 0, 2, 0.9, -1, *group).empty());
  EXPECT_THROW(distributed_top_p(Masses{1}, Indices{0, 1}, 1, 2, 0.9, -1, *group), InvalidArgument);
}

// What a rank sends grows with the choice, not with the keys.
TEST(DistributedTopP, NeverGathersTheMasses) {
  const int64_t keys = 100000;
  Masses masses(keys / 2, 1);
  std::vector<int64_t> sent(2);
  comm::run_loopback(2, [&](comm::Transport& transport) {
    const auto group = transport.open("index", {0, 1});
    Indices positions(keys / 2);
    for (int64_t j = 0; j < keys / 2; ++j)
      positions[j] = static_cast<int32_t>(2 * j + transport.rank());
    Masses local = masses;
    local[7] = keys;
    local[9] = keys;
    const auto chosen = distributed_top_p(local, positions, 1, keys, 0.7, -1, *group);
    EXPECT_EQ(chosen[0].positions, (Indices{14, 15, 18, 19}));
    sent[transport.rank()] = group->counters().bytes_sent;
  });
  EXPECT_LT(sent[0], 64 * 1024);
}

}  // namespace
}  // namespace mtraining::pattern
