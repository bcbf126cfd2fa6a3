#include "mtraining/base/rng.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>

namespace mtraining {
namespace {

// The values that every machine must give: computed at compile time here.
static_assert(mix_bits(0) == 0);
static_assert(Rng(1, 2).bits(3) == Rng(1, 2).bits(3));
static_assert(Rng(1, 2).bits(3) != Rng(2, 1).bits(3));

TEST(Rng, SeedsStreamsAndCountersAllMatter) {
  std::set<uint64_t> seen;
  for (uint64_t seed = 0; seed < 10; ++seed) {
    for (uint64_t stream = 0; stream < 10; ++stream) {
      for (uint64_t i = 0; i < 100; ++i) seen.insert(Rng(seed, stream).bits(i));
    }
  }
  EXPECT_EQ(seen.size(), 10'000u);
}

TEST(Rng, NormalHasMeanZeroVarianceOneAndThinTails) {
  const Rng rng(5);
  const int n = 200'000;
  double sum = 0, squares = 0, fourth = 0;
  for (int i = 0; i < n; ++i) {
    const double x = rng.normal(i);
    sum += x;
    squares += x * x;
    fourth += x * x * x * x;
  }
  EXPECT_NEAR(sum / n, 0, 4 / std::sqrt(n));
  EXPECT_NEAR(squares / n, 1, 4 * std::sqrt(2.0 / n));
  EXPECT_NEAR(fourth / n, 2.9, 0.1);  // twelve uniforms: 3 - 6/60
}

TEST(Rng, UniformAndBelowStayInRangeAndAreEven) {
  const Rng rng(9, 1);
  int low = 0, counts[7] = {};
  for (int i = 0; i < 70'000; ++i) {
    const double x = rng.uniform(i);
    ASSERT_GE(x, 0);
    ASSERT_LT(x, 1);
    low += x < 0.25;
    const uint64_t y = rng.below(i, 7);
    ASSERT_LT(y, 7u);
    ++counts[y];
  }
  EXPECT_NEAR(low, 17'500, 600);
  for (const int count : counts) EXPECT_NEAR(count, 10'000, 500);
}

}  // namespace
}  // namespace mtraining
