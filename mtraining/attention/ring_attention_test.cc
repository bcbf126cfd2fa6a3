#include "mtraining/attention/ring_attention.h"

#include <gtest/gtest.h>

#include "mtraining/attention/ring_case.h"
#include "mtraining/base/check.h"

namespace mtraining::attention {
namespace {

using layout::LayoutKind;
using testing::Choice;
using testing::compare_with_truth;
using testing::Documents;
using testing::Precision;
using testing::RankInputs;
using testing::RankResult;
using testing::ring_options;
using testing::RingProblem;
using testing::run_ring;
using testing::Solution;

TEST(RingAttention, EqualsTheOracle) {
  const RingProblem problem({.seq_len = 500});
  const auto result = compare_with_truth(
      run_ring(problem, ring_options(2, 2, LayoutKind::kBlockStriped, 64, 500)), problem);
  EXPECT_EQ(result.fault, "");
}

}  // namespace
}  // namespace mtraining::attention
