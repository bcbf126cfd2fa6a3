#include "mtraining/train/loss.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "mtraining/base/check.h"
#include "mtraining/data/batches.h"
#include "mtraining/train/tensor_memory.h"

namespace mtraining::train {
namespace {

struct Gradients {
  double loss;
  int64_t count;
  at::Tensor hidden, weight;
};

Gradients run(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& labels,
              int64_t chunk) {
  const at::Tensor x = hidden.clone().set_requires_grad(true),
                   w = weight.clone().set_requires_grad(true);
  const SummedLoss loss = chunked_loss(x, w, labels, chunk);
  (loss.sum * 0.5).backward();  // an upstream gradient other than 1
  return {loss.sum.item<double>(), loss.count, x.grad(), w.grad()};
}

TEST(ChunkedLoss, EqualsWholeLogitsForEveryChunk) {
  at::manual_seed(1);
  const at::Tensor hidden = at::randn({57, 24}), weight = at::randn({37, 24});
  at::Tensor labels = at::randint(37, {57}, at::kLong);
  for (const int64_t i : {0, 13, 14, 56}) labels[i] = data::kIgnored;

  const at::Tensor x = hidden.to(at::kDouble).set_requires_grad(true);
  const at::Tensor w = weight.to(at::kDouble).set_requires_grad(true);
  const at::Tensor whole =
      at::cross_entropy_loss(at::linear(x, w), labels, {}, at::Reduction::Sum, data::kIgnored);
  (whole * 0.5).backward();
  for (const int64_t chunk : {1, 2, 7, 56, 57, 1000}) {
    const Gradients got = run(hidden, weight, labels, chunk);
    EXPECT_EQ(got.count, 53);
    EXPECT_NEAR(got.loss, whole.item<double>(), 1e-4) << chunk;
    EXPECT_TRUE(at::allclose(got.hidden.to(at::kDouble), x.grad(), 1e-5, 1e-6)) << chunk;
    EXPECT_TRUE(at::allclose(got.weight.to(at::kDouble), w.grad(), 1e-5, 1e-5)) << chunk;
    const at::NoGradGuard no_grad;
    EXPECT_NEAR(chunked_loss(hidden, weight, labels, chunk).sum.item<double>(),
                whole.item<double>(), 1e-4);
  }
}

TEST(ChunkedLoss, IgnoredRowsAddNothingEvenWhereTheyAreNotFinite) {
  at::manual_seed(2);
  at::Tensor hidden = at::randn({8, 4});
  const at::Tensor weight = at::randn({5, 4});
  at::Tensor labels = at::full({8}, data::kIgnored, at::kLong);
  const Gradients none = run(hidden, weight, labels, 3);
  EXPECT_EQ(none.count, 0);
  EXPECT_EQ(none.loss, 0);
  EXPECT_EQ(none.hidden.abs().sum().item<double>(), 0);
  EXPECT_EQ(none.weight.abs().sum().item<double>(), 0);
  labels[2] = 1;
  const Gradients one = run(hidden, weight, labels, 3);
  EXPECT_EQ(one.count, 1);
  hidden[5].fill_(1e38);
  const Gradients huge = run(hidden, weight, labels, 3);
  EXPECT_EQ(huge.loss, one.loss);
  EXPECT_EQ(huge.hidden[5].abs().sum().item<double>(), 0);
}

TEST(ChunkedLoss, LabelsOutsideTheVocabularyAreNamed) {
  const at::Tensor hidden = at::zeros({2, 4}), weight = at::zeros({5, 4});
  EXPECT_THROW(chunked_loss(hidden, weight, at::tensor(std::vector<int64_t>{0, 5})),
               InvalidArgument);
  EXPECT_THROW(chunked_loss(hidden, weight, at::tensor(std::vector<int64_t>{0, -1})),
               InvalidArgument);
  EXPECT_THROW(chunked_loss(hidden, weight, at::tensor(std::vector<int64_t>{0})), InvalidArgument);
}

TEST(ChunkedLoss, BFloat16WeightsGetTheLossInFloat32) {
  at::manual_seed(3);
  const at::Tensor hidden = at::randn({300, 16}).to(at::kBFloat16),
                   weight = at::randn({50, 16}).to(at::kBFloat16);
  const at::Tensor labels = at::randint(50, {300}, at::kLong);
  const at::Tensor whole = at::cross_entropy_loss(
      at::linear(hidden.to(at::kDouble), weight.to(at::kDouble)), labels, {}, at::Reduction::Sum);
  const at::NoGradGuard no_grad;
  EXPECT_NEAR(chunked_loss(hidden, weight, labels, 64).sum.item<double>() / whole.item<double>(), 1,
              1e-6);
}

TEST(ChunkedLoss, NeverHoldsMoreThanAFewChunksOfLogits) {
  at::manual_seed(4);
  const int64_t tokens = 4096, vocab = 512, width = 16, chunk = 64;
  const at::Tensor hidden = at::randn({tokens, width}).set_requires_grad(true);
  const at::Tensor weight = at::randn({vocab, width}).set_requires_grad(true);
  const at::Tensor labels = at::randint(vocab, {tokens}, at::kLong);
  TensorMemory memory;
  const TensorMemory::Scope scope(memory);
  const SummedLoss loss = chunked_loss(hidden, weight, labels, chunk);
  const int64_t gradients = 4 * (tokens * width + 2 * vocab * width);
  const int64_t one_chunk = 4 * chunk * vocab, masks = 4 * tokens;
  EXPECT_LT(memory.peak_bytes(), gradients + masks + 4 * one_chunk);
  EXPECT_LT(memory.live_bytes(), gradients + one_chunk);  // between forward and backward
  loss.sum.backward();
  EXPECT_LT(memory.peak_bytes(), 2 * gradients + masks + 4 * one_chunk);
  EXPECT_LT(2 * gradients + masks + 4 * one_chunk,
            4 * tokens * vocab / 4);  // whole logits: far more
}

TEST(ChunkedLoss, ChunksChangeRoundingAloneAndTheSameChunkNothing) {
  at::manual_seed(5);
  const at::Tensor hidden = at::randn({1000, 24}), weight = at::randn({90, 24});
  const at::Tensor labels = at::randint(90, {1000}, at::kLong);
  const Gradients reference = run(hidden, weight, labels, 128);
  const Gradients again = run(hidden, weight, labels, 128);
  EXPECT_EQ(again.loss, reference.loss);
  EXPECT_TRUE(at::equal(again.hidden, reference.hidden));
  EXPECT_TRUE(at::equal(again.weight, reference.weight));
  const auto off = [](const at::Tensor& a, const at::Tensor& b) {
    return ((a - b).norm() / b.norm()).item<double>();
  };
  for (const int64_t chunk : {7, 64, 500, 5000}) {
    const Gradients other = run(hidden, weight, labels, chunk);
    EXPECT_NEAR(other.loss / reference.loss, 1, 2e-7) << chunk;
    EXPECT_LT(off(other.hidden, reference.hidden), 1e-6) << chunk;
    EXPECT_LT(off(other.weight, reference.weight), 1e-6) << chunk;
  }
}

}  // namespace
}  // namespace mtraining::train
