#include "mtraining/testing/rounding.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>

namespace mtraining::testing {
namespace {

TEST(Rounding, EveryBf16AndFp16ValueIsItsOwnNearest) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const uint16_t half = static_cast<uint16_t>(bits);
    if (!std::isnan(from_bf16(half))) {
      ASSERT_EQ(to_bf16(from_bf16(half)), half);
    }
    if (!std::isnan(from_fp16(half))) {
      ASSERT_EQ(to_fp16(from_fp16(half)), half);
    }
  }
  EXPECT_TRUE(std::isnan(from_bf16(to_bf16(NAN))));
  EXPECT_TRUE(std::isnan(from_fp16(to_fp16(NAN))));
}

TEST(Rounding, MidpointsGoToTheEvenNeighbourAndBothSidesOfThemToTheirOwn) {
  for (uint32_t bits = 1; bits + 1 < 0x7c00; ++bits) {  // positive finite fp16 neighbours
    const float low = from_fp16(static_cast<uint16_t>(bits)),
                high = from_fp16(static_cast<uint16_t>(bits + 1));
    const float middle = (low + high) / 2;
    ASSERT_EQ(to_fp16(middle), bits % 2 == 0 ? bits : bits + 1) << bits;
    ASSERT_EQ(to_fp16(std::nextafterf(middle, 0)), bits) << bits;
    ASSERT_EQ(to_fp16(std::nextafterf(middle, INFINITY)), bits + 1) << bits;
    ASSERT_EQ(to_fp16(-middle), 0x8000 + (bits % 2 == 0 ? bits : bits + 1));
  }
  for (uint32_t bits = 0x80; bits + 1 < 0x7f80; ++bits) {  // positive normal bf16 neighbours
    const float low = from_bf16(static_cast<uint16_t>(bits)),
                high = from_bf16(static_cast<uint16_t>(bits + 1));
    const float middle = low + (high - low) / 2;
    ASSERT_EQ(to_bf16(middle), bits % 2 == 0 ? bits : bits + 1) << bits;
    ASSERT_EQ(to_bf16(std::nextafterf(middle, INFINITY)), bits + 1) << bits;
  }
  EXPECT_EQ(from_fp16(to_fp16(65519.f)), 65504.f);
  EXPECT_TRUE(std::isinf(from_fp16(to_fp16(65520.f))));
  EXPECT_EQ(from_bf16(to_bf16(257.f)), 256.f);
  EXPECT_EQ(from_bf16(to_bf16(15962.f)), 15936.f);
}

TEST(Rounding, UnpackUndoesPack) {
  const std::vector<double> values = {0.0, -1.5, 3.25, 1e-3, -INFINITY};
  for (Precision precision :
       {Precision::kFloat64, Precision::kFloat32, Precision::kBFloat16, Precision::kFloat16}) {
    const std::vector<uint8_t> bytes = pack(precision, values);
    EXPECT_EQ(static_cast<int64_t>(bytes.size()), 5 * bytes_of(precision));
    EXPECT_EQ(unpack(precision, bytes), round_to(precision, std::span<const double>(values)));
  }
}

}  // namespace
}  // namespace mtraining::testing
