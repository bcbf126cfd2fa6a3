#include "mtraining/sim/latency_model.h"

#include <gtest/gtest.h>

#include <limits>

#include "mtraining/base/check.h"

namespace mtraining::sim {
namespace {

using topology::Topology;

constexpr StepTimes kPaper{
    .compute_ms = .51, .intra_ms = .13, .inter_ms = .98, .index_ms = 1.13, .cpu_ms = 2.08};

TEST(LatencyModel, PaperNumbersOfThirtyTwoRanks) {
  EXPECT_NEAR(flat_ring_ms({4, 8}, kPaper), 34.10, 0.005);
  EXPECT_NEAR(hierarchical_ring_ms({4, 8}, kPaper), 19.53, 0.005);
}

TEST(LatencyModel, OneNodeNeverPaysForOuterHops) {
  StepTimes slow = kPaper;
  slow.inter_ms = 1000;
  EXPECT_DOUBLE_EQ(flat_ring_ms({1, 8}, slow), flat_ring_ms({1, 8}, kPaper));
  EXPECT_DOUBLE_EQ(hierarchical_ring_ms({1, 8}, slow), hierarchical_ring_ms({1, 8}, kPaper));
  EXPECT_DOUBLE_EQ(flat_ring_ms({1, 1}, slow), slow.compute_ms + slow.index_ms + slow.cpu_ms);
  EXPECT_DOUBLE_EQ(hierarchical_ring_ms({1, 1}, slow), flat_ring_ms({1, 1}, slow));
}

TEST(LatencyModel, OuterHopsThatDoNotHideBoundTheOuterStep) {
  StepTimes slow = kPaper;
  slow.inter_ms = 10;  // 8 visits take 4.08
  EXPECT_NEAR(hierarchical_ring_ms({4, 8}, slow), 3 * 10 + 8 * .51 + 1.13 + 2.08, 1e-9);
  EXPECT_NEAR(flat_ring_ms({4, 8}, slow), 31 * 10 + .51 + 1.13 + 2.08, 1e-9);
}

TEST(LatencyModel, HierarchicalIsNeverSlowerWhereComputationHidesInnerHops) {
  for (int nodes : {1, 2, 4, 16}) {
    for (int ranks : {1, 2, 8}) {
      for (double inter : {.1, .5, 1.0, 8.0}) {
        StepTimes times = kPaper;
        times.inter_ms = inter;
        EXPECT_LE(hierarchical_ring_ms({nodes, ranks}, times),
                  flat_ring_ms({nodes, ranks}, times) + 1e-9);
      }
    }
  }
}

TEST(LatencyModel, NegativeAndNonFiniteTimesAreRefused) {
  for (double wrong :
       {-1.0, std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
    StepTimes times = kPaper;
    times.intra_ms = wrong;
    EXPECT_THROW(flat_ring_ms({4, 8}, times), InvalidArgument);
    EXPECT_THROW(hierarchical_ring_ms({4, 8}, times), InvalidArgument);
  }
}

}  // namespace
}  // namespace mtraining::sim
