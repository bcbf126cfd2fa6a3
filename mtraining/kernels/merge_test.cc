#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "mtraining/base/check.h"
#include "mtraining/base/rng.h"
#include "mtraining/kernels/attention_kernels.h"

namespace mtraining::kernels {
namespace {

template <typename T>
constexpr T kEmpty = -std::numeric_limits<T>::infinity();

template <typename T>
struct Partial {
  std::vector<T> out;
  T lse;
};

template <typename T>
void merge_into(Partial<T>& a, const Partial<T>& b) {
  merge(sizeof(T) == 8 ? DType::kFloat64 : DType::kFloat32, 1, static_cast<int64_t>(a.out.size()),
        a.out.data(), &a.lse, b.out.data(), &b.lse);
}

// B01: exp of a gap of 100 overflows float where the formula is lse + log(1 + exp(new - lse)).
TEST(Merge, AGapOfAHundredGivesTheLargerPart) {
  const Partial<float> low{{1, 2, 3}, -100}, high{{-4, 5, 6}, 0};
  for (const bool swapped : {false, true}) {
    Partial<float> a = swapped ? high : low;
    merge_into(a, swapped ? low : high);
    EXPECT_NEAR(a.lse, 0, 1e-6);
    for (int d = 0; d < 3; ++d) EXPECT_NEAR(a.out[d], high.out[d], 1e-6);
  }
}

// B01: eight partials with lse in [-300, 300], in random orders.
TEST(Merge, EveryOrderAgreesWithOneLogSumExp) {
  const Rng rng(3);
  uint64_t draw = 0;
  for (int round = 0; round < 200; ++round) {
    std::vector<Partial<float>> parts(8);
    // Every other round the partials are close, so that all of them count.
    const double spread = round % 2 == 0 ? 300 : 3;
    for (auto& part : parts) {
      part.lse = static_cast<float>((2 * rng.uniform(draw++) - 1) * spread);
      for (int d = 0; d < 4; ++d) part.out.push_back(static_cast<float>(rng.normal(draw++)));
    }
    double top = kEmpty<double>, sum = 0;
    for (const auto& part : parts) top = std::max<double>(top, part.lse);
    for (const auto& part : parts) sum += std::exp(part.lse - top);
    const double lse = top + std::log(sum);
    double out[4] = {};
    for (const auto& part : parts) {
      for (int d = 0; d < 4; ++d) out[d] += std::exp(part.lse - lse) * part.out[d];
    }
    std::vector<int> order(8);
    std::iota(order.begin(), order.end(), 0);
    for (int i = 7; i > 0; --i) std::swap(order[i], order[rng.below(draw++, i + 1)]);
    Partial<float> all = parts[order[0]];
    for (int i = 1; i < 8; ++i) merge_into(all, parts[order[i]]);
    EXPECT_NEAR(all.lse, lse, 1e-4);
    for (int d = 0; d < 4; ++d) EXPECT_NEAR(all.out[d], out[d], 1e-4 * spread / 3);
  }
}

// B02: (0, -inf) is the neutral element, to the last bit.
template <typename T>
void expect_neutral_element() {
  const Partial<T> empty{std::vector<T>(5, 0), kEmpty<T>};
  Partial<T> both = empty;
  merge_into(both, empty);
  EXPECT_EQ(both.lse, kEmpty<T>);
  EXPECT_EQ(both.out, empty.out);
  const Rng rng(11);
  for (const double lse : {-1e30, -700.0, -3.25, 0.0, 0.1, 88.8, 1e30}) {
    Partial<T> x{{}, static_cast<T>(lse)};
    for (int d = 0; d < 5; ++d) x.out.push_back(static_cast<T>(rng.normal(d) / 3));
    Partial<T> left = x, right = empty;
    merge_into(left, empty);
    merge_into(right, x);
    for (const Partial<T>& merged : {left, right}) {
      EXPECT_EQ(std::memcmp(&merged.lse, &x.lse, sizeof(T)), 0);
      EXPECT_EQ(std::memcmp(merged.out.data(), x.out.data(), 5 * sizeof(T)), 0);
    }
  }
}
TEST(Merge, TheEmptyPartialChangesNothingFloat32) { expect_neutral_element<float>(); }
TEST(Merge, TheEmptyPartialChangesNothingFloat64) { expect_neutral_element<double>(); }

// What is saved for an empty row is not read.
TEST(Merge, AnEmptyPartialMayHoldAnything) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  Partial<float> a{{1, 2}, 3};
  merge_into(a, {{nan, nan}, kEmpty<float>});
  EXPECT_EQ(a.out, (std::vector<float>{1, 2}));
  Partial<float> b{{nan, nan}, kEmpty<float>};
  merge_into(b, {{1, 2}, 3});
  EXPECT_EQ(b.out, (std::vector<float>{1, 2}));
}

TEST(Merge, NamesAStateThatIsNoFloat) {
  Partial<float> a{{1}, 0};
  try {
    merge(DType::kBFloat16, 1, 1, a.out.data(), &a.lse, a.out.data(), &a.lse);
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("float32 state"), std::string::npos) << error.what();
  }
  EXPECT_THROW(merge(DType::kFloat32, 1, 1, nullptr, &a.lse, a.out.data(), &a.lse),
               InvalidArgument);
}

}  // namespace
}  // namespace mtraining::kernels
