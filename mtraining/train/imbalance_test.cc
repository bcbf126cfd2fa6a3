#include "mtraining/train/imbalance.h"

#include <gtest/gtest.h>

namespace mtraining::train {
namespace {

TEST(Imbalance, EvenWorkIsOne) {
  const std::vector<std::vector<double>> even(4, {10, 1, 20, 2, 30, 3});
  EXPECT_DOUBLE_EQ(imbalance_of(even, 4, 0).worker, 1);
  EXPECT_DOUBLE_EQ(imbalance_of(even, 4, 0).step, 1);
}

TEST(Imbalance, LockstepCostsWhatWorkersAloneDoNotShow) {
  // Both ranks do 40 in all, but each is slow in the step where the other is fast.
  const std::vector<std::vector<double>> crossed = {{30, 0, 10, 0}, {10, 0, 30, 0}};
  EXPECT_DOUBLE_EQ(imbalance_of(crossed, 2, 0).worker, 1);
  EXPECT_DOUBLE_EQ(imbalance_of(crossed, 2, 0).step, 1.5);
  const std::vector<std::vector<double>> uneven = {{30, 1, 30, 1}, {10, 1, 10, 1}};
  EXPECT_DOUBLE_EQ(imbalance_of(uneven, 2, 0).worker, 1.5);
  EXPECT_DOUBLE_EQ(imbalance_of(uneven, 2, 0).step, 1.5);
  EXPECT_DOUBLE_EQ(imbalance_of(uneven, 2, 1).worker, 1);  // time, not pairs
}

TEST(Imbalance, GroupsOfRanksAreJudgedEachForItself) {
  // Two groups of two: different amounts between groups are no imbalance.
  const std::vector<std::vector<double>> groups = {{10, 0}, {10, 0}, {90, 0}, {90, 0}};
  EXPECT_DOUBLE_EQ(imbalance_of(groups, 2, 0).worker, 1);
  const std::vector<std::vector<double>> idle = {{0, 0}, {0, 0}};
  EXPECT_DOUBLE_EQ(imbalance_of(idle, 2, 0).worker, 1);
}

}  // namespace
}  // namespace mtraining::train
