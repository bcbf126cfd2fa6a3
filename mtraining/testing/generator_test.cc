#include "mtraining/testing/generator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

namespace mtraining::testing {
namespace {

// Probabilities of row i of head h over keys 0..i.
std::vector<double> row_of(const Qkv& made, const QkvOptions& o, int64_t h, int64_t i) {
  std::vector<double> p(i + 1);
  double top = -INFINITY;
  for (int64_t j = 0; j <= i; ++j) {
    for (int64_t d = 0; d < o.head_dim; ++d)
      p[j] += static_cast<double>(made.q[(i * o.num_q_heads + h) * o.head_dim + d]) *
              made.k[(j * o.num_kv_heads + h / (o.num_q_heads / o.num_kv_heads)) * o.head_dim + d];
    p[j] /= std::sqrt(static_cast<double>(o.head_dim));
    top = std::max(top, p[j]);
  }
  double sum = 0;
  for (double& x : p) sum += x = std::exp(x - top);
  for (double& x : p) x /= sum;
  return p;
}

// Mean share of the visible keys that hold .9 of the attention.
double share_of_keys(const Qkv& made, const QkvOptions& o, int64_t h) {
  double share = 0;
  int rows = 0;
  for (int64_t i = o.seq_len - 1; i > o.seq_len / 2; i -= o.seq_len / 20, ++rows) {
    std::vector<double> p = row_of(made, o, h, i);
    std::sort(p.rbegin(), p.rend());
    double sum = 0;
    int64_t count = 0;
    while (sum < 0.9) sum += p[count++];
    share += static_cast<double>(count) / static_cast<double>(i + 1);
  }
  return share / rows;
}

TEST(Generator, AttentionIsSparseForSomeHeadsAndDiffuseForOthers) {
  for (int64_t seq_len : {300, 2048, 8192}) {
    const QkvOptions options{.seq_len = seq_len, .num_q_heads = 4, .num_kv_heads = 2};
    const Qkv made = make_qkv(options);
    EXPECT_LT(share_of_keys(made, options, 0), 0.05) << seq_len;
    EXPECT_GT(share_of_keys(made, options, 3), 0.5) << seq_len;
    EXPECT_LT(share_of_keys(made, options, 1), share_of_keys(made, options, 2)) << seq_len;
  }
}

TEST(Generator, SharpHeadsLookAtABandAndAtTheSinks) {
  const QkvOptions options{.seq_len = 1500, .num_q_heads = 8, .num_kv_heads = 2};
  const Qkv made = make_qkv(options);
  double local = 0, band = 0, between = 0, sinks = 0;
  for (int64_t i = 1000; i < 1500; i += 25) {
    const std::vector<double> zero = row_of(made, options, 0, i), one = row_of(made, options, 1, i);
    for (int64_t o = 0; o < 4; ++o) local += zero[i - o] / 20;
    for (int64_t o = 67; o < 74; ++o) band += one[i - o] / 20;  // head 1 looks back by 70
    for (int64_t o = 20; o < 60; ++o) between += one[i - o] / 20;
    for (int64_t j = 0; j < 4; ++j) sinks += one[j] / 20;
  }
  EXPECT_GT(local, 0.4);
  EXPECT_GT(band, 0.3);
  EXPECT_LT(between, band / 3);
  EXPECT_GT(sinks, 0.02);
}

TEST(Generator, IsAFunctionOfItsSeedAndBatchesDiffer) {
  const QkvOptions options{
      .batch = 2, .seq_len = 65, .num_q_heads = 2, .num_kv_heads = 1, .head_dim = 16, .seed = 5};
  const Qkv a = make_qkv(options), b = make_qkv(options);
  EXPECT_EQ(a.q, b.q);
  EXPECT_EQ(a.dout, b.dout);
  QkvOptions other = options;
  other.seed = 6;
  EXPECT_NE(a.q, make_qkv(other).q);
  EXPECT_FALSE(std::equal(a.k.begin(), a.k.begin() + a.k.size() / 2, a.k.begin() + a.k.size() / 2));
  for (float value : a.q) ASSERT_TRUE(std::isfinite(value));
}

TEST(Generator, OutlierChannelScalesTwoChannelsOnly) {
  QkvOptions options{.seq_len = 40, .num_q_heads = 2, .num_kv_heads = 2, .head_dim = 8};
  const Qkv base = make_qkv(options);
  options.outlier_channel = 30;
  const Qkv loud = make_qkv(options);
  for (size_t i = 0; i < base.k.size(); ++i)
    EXPECT_EQ(loud.k[i], base.k[i] * (i % 8 == 1 || i % 8 == 4 ? 30.f : 1.f));
}

}  // namespace
}  // namespace mtraining::testing
