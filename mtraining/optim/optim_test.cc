#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <mutex>

#include "mtraining/base/check.h"
#include "mtraining/comm/loopback.h"
#include "mtraining/optim/adamw.h"
#include "mtraining/optim/flat_parameters.h"
#include "mtraining/optim/schedule.h"

namespace mtraining::optim {
namespace {

at::Tensor leaf(at::Tensor value) { return value.clone().set_requires_grad(true); }

TEST(FlatParameters, Float32ParametersAreViewsOfTheMaster) {
  at::manual_seed(1);
  const at::Tensor a = at::randn({3, 4}), b = at::randn({5});
  at::Tensor pa = leaf(a), pb = leaf(b);
  FlatParameters flat({{"a", pa}, {"b", pb}});
  EXPECT_EQ(flat.size(), 17);
  EXPECT_TRUE(at::equal(pa.detach(), a));
  EXPECT_TRUE(at::equal(flat.master().narrow(0, 12, 5), b));
  flat.master().mul_(2);
  EXPECT_TRUE(at::equal(pa.detach(), a * 2));
  EXPECT_TRUE(flat.segments()[0].decays);
  EXPECT_FALSE(flat.segments()[1].decays);
}

TEST(FlatParameters, GradientsAccumulateInTheirPlaceWhateverTheOrder) {
  at::manual_seed(2);
  const at::Tensor a = at::randn({4, 4}), b = at::randn({4, 4}), x = at::randn({4, 4});
  at::Tensor reference;
  for (const bool reversed : {false, true}) {
    at::Tensor pa = leaf(a), pb = leaf(b);
    FlatParameters flat({{"a", pa}, {"b", pb}});
    flat.zero_gradient();
    for (int twice = 0; twice < 2; ++twice) {
      // a is used twice, like a tied head; the order of use is reversed in the second run.
      const at::Tensor y =
          reversed ? at::mm(at::mm(x, pa), pb) + pa : pa + at::mm(at::mm(x, pa), pb);
      (y * y).sum().backward();
      flat.collect_gradient();
    }
    const at::Tensor qa = leaf(a), qb = leaf(b);
    const at::Tensor y = qa + at::mm(at::mm(x, qa), qb);
    (y * y).sum().backward();
    EXPECT_TRUE(
        at::allclose(flat.gradient().narrow(0, 0, 16).view({4, 4}), 2 * qa.grad(), 1e-5, 1e-5));
    EXPECT_TRUE(
        at::allclose(flat.gradient().narrow(0, 16, 16).view({4, 4}), 2 * qb.grad(), 1e-5, 1e-5));
  }
}

TEST(FlatParameters, ATensorListedTwiceIsRefused) {
  at::Tensor p = leaf(at::ones({2}));
  EXPECT_THROW(FlatParameters({{"embed", p}, {"head", p}}), InvalidArgument);
  EXPECT_THROW(FlatParameters({{"no leaf", at::ones({2})}}), InvalidArgument);
}

TEST(FlatParameters, LowPrecisionGradientsAccumulateInFloat32) {
  at::Tensor p = leaf(at::ones({1}, at::kBFloat16));
  FlatParameters flat({{"p", p}});
  flat.zero_gradient();
  for (int i = 0; i < 300; ++i) {  // a bfloat16 sum of ones stops at 256
    p.sum().backward();
    flat.collect_gradient();
  }
  EXPECT_EQ(flat.gradient().item<float>(), 300.0f);
}

TEST(AdamW, FollowsTheFormulaInFloat64) {
  at::manual_seed(3);
  const at::Tensor start = at::randn({6, 2});
  at::Tensor p = leaf(start);
  FlatParameters flat({{"p", p}});
  AdamW adamw({0.9, 0.95, 1e-8, 0.1}, flat);
  at::Tensor x = start.to(at::kDouble), m = at::zeros_like(x), v = at::zeros_like(x);
  for (int t = 1; t <= 20; ++t) {
    const at::Tensor g = at::randn({6, 2});
    flat.gradient().copy_(g.view({-1}));
    const double lr = 0.01 * t;
    adamw.step(lr);
    const at::Tensor wide = g.to(at::kDouble);
    m = 0.9 * m + 0.1 * wide;
    v = 0.95 * v + 0.05 * wide * wide;
    x = x - lr * (m / (1 - std::pow(0.9, t)) / (at::sqrt(v / (1 - std::pow(0.95, t))) + 1e-8) +
                  0.1 * x);
    ASSERT_TRUE(at::allclose(p.detach().to(at::kDouble), x, 1e-5, 1e-6)) << t;
  }
  EXPECT_EQ(adamw.steps_taken(), 20);
}

TEST(AdamW, MasterWeightsKeepSmallUpdatesThatBFloat16Loses) {
  at::Tensor p = leaf(at::ones({1}, at::kBFloat16));
  FlatParameters flat({{"p", p}});
  AdamW adamw({0, 0, 1e-12, 0}, flat);  // with betas 0 an update is lr exactly
  for (int i = 0; i < 100; ++i) {
    flat.gradient().fill_(1);
    adamw.step(1e-3);
  }
  EXPECT_NEAR(flat.master().item<float>(), 0.9, 1e-5);
  EXPECT_NEAR(p.item<float>(), 0.8984, 1e-4);
  EXPECT_EQ(adamw.first_moment().scalar_type(), at::kFloat);
}

TEST(GradientReduction, EveryRankEndsWithTheSameSumForEveryBucketSize) {
  for (const int64_t bucket_bytes : {4, 40, 1000, 1 << 20}) {
    std::mutex mutex;
    std::vector<at::Tensor> results(4);
    comm::run_loopback(4, [&](comm::Transport& transport) {
      const auto group = transport.open("gradients", {0, 1, 2, 3});
      at::Tensor flat = at::arange(57, at::kFloat) * (transport.rank() + 1);
      all_reduce_buckets(flat, *group, bucket_bytes);
      const std::lock_guard lock(mutex);
      results[transport.rank()] = flat;
    });
    for (const auto& result : results)
      EXPECT_TRUE(at::equal(result, at::arange(57, at::kFloat) * 10));
  }
}

TEST(ClipFactor, BringsTheNormToTheLimitAndLeavesShorterOnes) {
  const at::Tensor g = at::full({100}, 3.0f);
  const double norm = std::sqrt(sum_of_squares(g));
  EXPECT_NEAR(norm, 30.0, 1e-9);
  EXPECT_EQ(clip_factor(norm, 0), 1);
  EXPECT_EQ(clip_factor(norm, 40.0), 1);
  EXPECT_NEAR(std::sqrt(sum_of_squares(g * clip_factor(norm, 1.0))), 1.0, 1e-6);
}

TEST(AdamW, ScalesTheGradientBeforeTheMoments) {
  at::manual_seed(4);
  const at::Tensor start = at::randn({50, 3}), g = at::randn({150});
  at::Tensor a = leaf(start), b = leaf(start);
  FlatParameters scaled({{"p", a}}), plain({{"p", b}});
  AdamW one({}, scaled), two({}, plain);
  for (int t = 0; t < 3; ++t) {
    scaled.gradient().copy_(g * (t + 1) * 4);
    plain.gradient().copy_(g * (t + 1));
    one.step(1e-2, 0.25);  // a power of two: no rounding
    two.step(1e-2);
  }
  EXPECT_TRUE(at::equal(a, b));
  EXPECT_TRUE(at::equal(one.second_moment(), two.second_moment()));
}

TEST(AdamW, BFloat16GradientsAndHostStorageGiveTheSameUpdateOfTheSameNumbers) {
  at::manual_seed(5);
  const at::Tensor start = at::randn({40, 5}).to(at::kBFloat16);
  std::vector<at::Tensor> results;
  for (const bool offload : {false, true}) {
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      at::manual_seed(6);
      at::Tensor p = leaf(start);
      FlatParameters flat({{"p", p}}, {.grad_dtype = dtype, .offload = offload});
      EXPECT_EQ(flat.gradient().scalar_type(), dtype);
      EXPECT_EQ(flat.master().scalar_type(), at::kFloat);
      AdamW adamw({0.9, 0.95, 1e-8, 0.1}, flat);
      for (int t = 0; t < 5; ++t) {
        flat.gradient().copy_(at::randn({200}).to(at::kBFloat16));
        adamw.step(1e-2, 0.5);
      }
      EXPECT_TRUE(at::equal(p.detach().reshape({-1}), flat.master().to(at::kBFloat16)));
      results.push_back(flat.master().clone());
    }
  }
  for (const at::Tensor& result : results) EXPECT_TRUE(at::equal(result, results[0]));
}

TEST(LearningRate, WarmsUpThenHoldsOrFollowsTheCosineToItsEnd) {
  ScheduleOptions o{ScheduleKind::kConstant, 2.0, 4, 20, 0.1};
  EXPECT_DOUBLE_EQ(learning_rate(o, 0), 0.5);
  EXPECT_DOUBLE_EQ(learning_rate(o, 3), 2.0);
  EXPECT_DOUBLE_EQ(learning_rate(o, 19), 2.0);
  o.kind = ScheduleKind::kCosine;
  EXPECT_DOUBLE_EQ(learning_rate(o, 4), 2.0);
  EXPECT_NEAR(learning_rate(o, 19), 0.2, 1e-12);
  EXPECT_NEAR(learning_rate(o, 500), 0.2, 1e-12);
  for (int64_t s = 5; s < 20; ++s) EXPECT_LT(learning_rate(o, s), learning_rate(o, s - 1));
  EXPECT_THROW(parse_schedule_kind("step"), InvalidArgument);
}

TEST(LearningRate, LinearFallsByTheSameAmountEachStep) {
  const ScheduleOptions o{ScheduleKind::kLinear, 2.0, 4, 20, 0.1};
  EXPECT_DOUBLE_EQ(learning_rate(o, 0), 0.5);
  EXPECT_DOUBLE_EQ(learning_rate(o, 4), 2.0);
  EXPECT_NEAR(learning_rate(o, 19), 0.2, 1e-12);
  EXPECT_NEAR(learning_rate(o, 500), 0.2, 1e-12);
  for (int64_t s = 5; s < 20; ++s)
    EXPECT_NEAR(learning_rate(o, s - 1) - learning_rate(o, s), 1.8 / 15, 1e-12);
  for (const char* name : {"constant", "cosine", "linear"})
    EXPECT_EQ(to_string(parse_schedule_kind(name)), name);
}

}  // namespace
}  // namespace mtraining::optim
