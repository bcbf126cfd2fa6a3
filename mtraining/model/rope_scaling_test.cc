#include "mtraining/model/rope_scaling.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <string>

#include "mtraining/base/check.h"
#include "mtraining/testing/error_of.h"

namespace mtraining::model {
namespace {

/// Qwen2.5-3B from 32K to 512K: head_dim 128, theta 1e6.
RopeParameters qwen_512k() {
  RopeParameters rope;
  rope.type = RopeType::kYarn;
  rope.rope_theta = 1e6;
  rope.factor = 16;
  rope.original_max_position_embeddings = 32768;
  return rope;
}

RopeParameters llama31() {
  RopeParameters rope;
  rope.type = RopeType::kLlama3;
  rope.rope_theta = 5e5;
  rope.factor = 8;
  rope.original_max_position_embeddings = 8192;
  return rope;
}

double plain(double theta, int64_t head_dim, int64_t d) {
  return std::pow(theta, -2.0 * static_cast<double>(d) / static_cast<double>(head_dim));
}

std::string error_of(const RopeParameters& rope, int64_t head_dim = 64) {
  return testing::error_of<InvalidArgument>([&] { rope_frequencies(rope, head_dim); });
}

TEST(RopeScaling, Qwen512KRampRunsOverDimensions23To40) {
  const YarnRamp ramp = yarn_ramp(qwen_512k(), 128);
  EXPECT_EQ(ramp.low, 23);
  EXPECT_EQ(ramp.high, 40);
  const RopeFrequencies got = rope_frequencies(qwen_512k(), 128);
  EXPECT_DOUBLE_EQ(got.attention_factor, 0.1 * std::log(16.0) + 1);
  ASSERT_EQ(got.inverse.size(), 64u);
  for (int64_t d = 0; d < 64; ++d) {
    const double share = std::clamp((static_cast<double>(d) - 23) / 17, 0.0, 1.0);
    const double want = plain(1e6, 128, d) * (1 - share + share / 16);
    EXPECT_NEAR(got.inverse[d] / want, 1, 1e-6) << d;
  }
  // Recorded from transformers 5.24.0: ROPE_INIT_FUNCTIONS["yarn"] on this configuration.
  EXPECT_FLOAT_EQ(got.inverse[1], 0x1.9c975ap-1f);
  EXPECT_FLOAT_EQ(got.inverse[16], 0x1.030dc6p-5f);
}

TEST(RopeScaling, DefaultAndLinearFollowTheirFormulaForEveryHeadSize) {
  for (const int64_t head_dim : {2, 16, 64, 80, 96, 128, 256})
    for (const double theta : {1e4, 5e5, 1e6, 1.28e8}) {
      RopeParameters rope;
      rope.rope_theta = theta;
      const RopeFrequencies whole = rope_frequencies(rope, head_dim);
      rope.type = RopeType::kLinear;
      rope.factor = 4;
      const RopeFrequencies quarter = rope_frequencies(rope, head_dim);
      ASSERT_EQ(static_cast<int64_t>(whole.inverse.size()), head_dim / 2);
      for (int64_t d = 0; d < head_dim / 2; ++d) {
        // A float32 exponent is off by up to 2^-25, times ln(theta).
        EXPECT_NEAR(whole.inverse[d] / plain(theta, head_dim, d), 1, 8e-7);
        EXPECT_EQ(quarter.inverse[d], whole.inverse[d] / 4);
      }
      EXPECT_EQ(whole.attention_factor, 1);
      EXPECT_EQ(quarter.attention_factor, 1);
    }
}

TEST(RopeScaling, YarnReadsEachOfItsFields) {
  const RopeFrequencies base = rope_frequencies(qwen_512k(), 128);
  const auto changed = [&](auto change) {
    RopeParameters rope = qwen_512k();
    change(rope);
    return rope_frequencies(rope, 128);
  };
  EXPECT_NE(changed([](auto& r) { r.factor = 8; }).inverse, base.inverse);
  EXPECT_NE(changed([](auto& r) { r.original_max_position_embeddings = 8192; }).inverse,
            base.inverse);
  EXPECT_NE(changed([](auto& r) { r.beta_fast = 64; }).inverse, base.inverse);
  EXPECT_NE(changed([](auto& r) { r.beta_slow = 2; }).inverse, base.inverse);
  EXPECT_NE(changed([](auto& r) { r.truncate = false; }).inverse, base.inverse);
  EXPECT_EQ(changed([](auto& r) { r.attention_factor = 1.5; }).attention_factor, 1.5);
  EXPECT_EQ(changed([](auto& r) { r.mscale = 2; }).attention_factor, base.attention_factor)
      << "one mscale alone changes nothing";
  EXPECT_DOUBLE_EQ(changed([](auto& r) {
                     r.mscale = 2;
                     r.mscale_all_dim = 0.5;
                   }).attention_factor,
                   (0.2 * std::log(16.0) + 1) / (0.05 * std::log(16.0) + 1));
  RopeParameters untruncated = qwen_512k();
  untruncated.truncate = false;
  const YarnRamp ramp = yarn_ramp(untruncated, 128);
  EXPECT_GT(ramp.low, 23);
  EXPECT_LT(ramp.low, 24);
  EXPECT_GT(ramp.high, 39);
  EXPECT_LT(ramp.high, 40);
}

TEST(RopeScaling, YarnByFactorOneChangesNothing) {
  RopeParameters rope = qwen_512k();
  rope.factor = 1;
  const RopeFrequencies got = rope_frequencies(rope, 128);
  EXPECT_EQ(got.attention_factor, 1);
  for (int64_t d = 0; d < 64; ++d) EXPECT_NEAR(got.inverse[d] / plain(1e6, 128, d), 1, 4e-7);
}

TEST(RopeScaling, AYarnRampOfNoWidthIsAStep) {
  RopeParameters rope = qwen_512k();
  rope.rope_theta = 1e4;
  rope.original_max_position_embeddings = 4;  // no dimension turns even once over it
  EXPECT_EQ(yarn_ramp(rope, 16).low, 0);
  EXPECT_EQ(yarn_ramp(rope, 16).high, 0);
  const RopeFrequencies got = rope_frequencies(rope, 16);
  EXPECT_EQ(got.inverse[0], 1);
  for (int64_t d = 1; d < 8; ++d) EXPECT_NEAR(got.inverse[d] * 16 / plain(1e4, 16, d), 1, 1e-6);
}

TEST(RopeScaling, Llama3KeepsShortWavelengthsAndStretchesLongOnes) {
  const RopeFrequencies got = rope_frequencies(llama31(), 128);
  int kept = 0, blended = 0, stretched = 0;
  for (int64_t d = 0; d < 64; ++d) {
    const double f = plain(5e5, 128, d), turns = 8192 * f / (2 * std::numbers::pi);
    double want = 0;
    if (turns > 4) {
      want = f;
      ++kept;
    } else if (turns < 1) {
      want = f / 8;
      ++stretched;
    } else {
      const double smooth = (turns - 1) / 3;
      want = (1 - smooth) * f / 8 + smooth * f;
      ++blended;
    }
    EXPECT_NEAR(got.inverse[d] / want, 1, 1e-6) << d;
  }
  EXPECT_GT(kept, 10);
  EXPECT_GT(blended, 3);
  EXPECT_GT(stretched, 10);
  EXPECT_EQ(got.attention_factor, 1);
}

TEST(RopeScaling, FaultyFieldsAreNamed) {
  const auto says = [](RopeParameters rope, auto change, const std::string& field) {
    change(rope);
    const std::string error = error_of(rope);
    EXPECT_NE(error.find(field), std::string::npos) << "expected " << field << ", got: " << error;
  };
  const double nan = std::numeric_limits<double>::quiet_NaN();
  says(
      {}, [](auto& r) { r.rope_theta = 1; }, "rope_theta");
  says(
      {}, [&](auto& r) { r.rope_theta = nan; }, "rope_theta");
  says(
      qwen_512k(), [](auto& r) { r.factor = 0.5; }, "factor");
  says(
      qwen_512k(), [](auto& r) { r.original_max_position_embeddings = 0; }, "original_max");
  says(
      qwen_512k(), [](auto& r) { r.beta_fast = 0.5; }, "beta_fast");
  says(
      qwen_512k(), [](auto& r) { r.beta_slow = -1; }, "beta_slow");
  says(
      qwen_512k(), [](auto& r) { r.attention_factor = 0; }, "attention_factor");
  says(
      qwen_512k(), [&](auto& r) { r.mscale = nan; }, "mscale");
  says(
      llama31(), [](auto& r) { r.high_freq_factor = 1; }, "high_freq_factor");
  says(
      llama31(), [](auto& r) { r.low_freq_factor = 0; }, "low_freq_factor");
  EXPECT_NE(error_of({}, 63).find("head_dim"), std::string::npos);
  EXPECT_NE(error_of({}, 0).find("head_dim"), std::string::npos);
}

}  // namespace
}  // namespace mtraining::model
