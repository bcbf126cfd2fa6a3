#include "mtraining/model/mlp.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <vector>

#include "mtraining/base/check.h"

namespace mtraining::model {
namespace {

struct Case {
  at::Tensor x, gate, up, down, dy;

  Case(int64_t tokens, at::ScalarType dtype, int64_t hidden = 24, int64_t ffn = 40) {
    at::manual_seed(1);
    const auto make = [&](at::IntArrayRef shape) {
      return (at::randn(shape) * 0.4).to(dtype).set_requires_grad(true);
    };
    x = make({1, tokens, hidden});
    gate = make({ffn, hidden});
    up = make({ffn, hidden});
    down = make({hidden, ffn});
    dy = at::randn({1, tokens, hidden}).to(dtype);
  }
};

/// y and the gradients of x and the three weights.
std::vector<at::Tensor> run(const Case& c, int64_t tile) {
  const at::Tensor y = mlp(c.x, c.gate, c.up, c.down, tile);
  std::vector<at::Tensor> all = torch::autograd::grad({y}, {c.x, c.gate, c.up, c.down}, {c.dy});
  all.insert(all.begin(), y.detach());
  return all;
}

std::vector<at::Tensor> plain(const Case& given, at::ScalarType dtype) {
  const auto in = [&](const at::Tensor& t) { return t.detach().to(dtype).set_requires_grad(true); };
  const at::Tensor x = in(given.x), gate = in(given.gate), up = in(given.up), down = in(given.down);
  const at::Tensor y = at::linear(at::silu(at::linear(x, gate)) * at::linear(x, up), down);
  std::vector<at::Tensor> all =
      torch::autograd::grad({y}, {x, gate, up, down}, {given.dy.to(dtype)});
  all.insert(all.begin(), y.detach());
  return all;
}

double error(const at::Tensor& a, const at::Tensor& b) {
  return ((a.to(at::kDouble) - b.to(at::kDouble)).norm() / b.to(at::kDouble).norm()).item<double>();
}

TEST(Mlp, EqualsFloat64AsWellAsThePlainFormulaForEveryTile) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const Case c(301, dtype);
    const auto exact = plain(c, at::kDouble), usual = plain(c, dtype);
    for (const int64_t tile : {0, 1, 7, 64, 300, 301, 1000}) {
      const auto got = run(c, tile);
      for (size_t i = 0; i < got.size(); ++i) {
        EXPECT_EQ(got[i].scalar_type(), dtype);
        EXPECT_LT(error(got[i], exact[i]), 2 * error(usual[i], exact[i]) + 1e-7)
            << dtype << ", tile " << tile << ", tensor " << i;
      }
    }
  }
}

TEST(Mlp, TilesAreTheSameBitsAsUntiledWhereTheRunsAreTheSame) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    // Three runs, the last one short; and one short run with tiles that hold it whole.
    for (const auto& [tokens, tile] : std::vector<std::pair<int64_t, int64_t>>{
             {2 * kMlpRun + 77, kMlpRun}, {300, 300}, {300, 5000}}) {
      const Case c(tokens, dtype);
      const auto whole = run(c, 0), tiled = run(c, tile);
      for (size_t i = 0; i < whole.size(); ++i)
        EXPECT_TRUE(at::equal(whole[i], tiled[i])) << dtype << ' ' << tokens << ", tensor " << i;
    }
  }
}

TEST(Mlp, WeightGradientsOfManyTilesAreSummedInFloat32) {
  // 3000 tiles of one token, each adding 1 to a gradient: a bf16 sum stops at 256.
  const int64_t tokens = 3000;
  const auto ones = [](at::IntArrayRef shape) {
    return at::ones(shape, at::kBFloat16).set_requires_grad(true);
  };
  const at::Tensor x = ones({tokens, 1}), gate = ones({1, 1}), up = ones({1, 1}),
                   down = ones({1, 1});
  const at::Tensor product = at::silu(at::ones({1}, at::kBFloat16));
  const auto gradients = torch::autograd::grad({mlp(x, gate, up, down, 1)}, {down},
                                               {at::ones({tokens, 1}, at::kBFloat16)});
  EXPECT_NEAR(gradients[0].item<double>() / (tokens * product.item<double>()), 1, 0.01);
}

TEST(Mlp, WithoutGradientsNothingIsKeptAndTheRowsAreTheSame) {
  const Case c(200, at::kFloat);
  const auto with = run(c, 0);
  const at::NoGradGuard no_grad;
  for (const int64_t tile : {0, 200}) {
    EXPECT_TRUE(at::equal(mlp(c.x, c.gate, c.up, c.down, tile), with[0]));
  }
  EXPECT_THROW(mlp(c.x, c.gate, c.up, c.down, -1), InvalidArgument);
}

}  // namespace
}  // namespace mtraining::model
