#include "mtraining/testing/oracle.h"

#include <gtest/gtest.h>

#include <cmath>

#include "mtraining/base/check.h"
#include "mtraining/testing/comparator.h"
#include "mtraining/testing/documents.h"
#include "mtraining/testing/plain.h"
#include "mtraining/testing/random.h"
#include "mtraining/testing/shards.h"

namespace mtraining::testing {
namespace {

Problem random_problem(int64_t batch, int64_t queries, int64_t keys, int64_t heads,
                       int64_t kv_heads, int64_t dim) {
  Problem problem{.batch = batch,
                  .num_queries = queries,
                  .num_keys = keys,
                  .num_q_heads = heads,
                  .num_kv_heads = kv_heads,
                  .head_dim = dim};
  Random random(7);
  problem.q.resize(batch * queries * heads * dim);
  problem.k.resize(batch * keys * kv_heads * dim);
  problem.v.resize(problem.k.size());
  problem.dout.resize(problem.q.size());
  for (auto* values : {&problem.q, &problem.k, &problem.v, &problem.dout})
    for (double& value : *values) value = random.normal();
  return problem;
}

double loss(const Problem& problem, const Mask& mask) {
  Problem forward = problem;
  forward.dout.clear();
  const Solution solution = solve(forward, mask);
  double sum = 0;
  for (size_t i = 0; i < solution.out.size(); ++i) sum += solution.out[i] * problem.dout[i];
  return sum;
}

TEST(Oracle, TwoKeysByHand) {
  Problem problem{.num_queries = 1,
                  .num_keys = 2,
                  .head_dim = 2,
                  .softmax_scale = 1,
                  .q = {1, 0},
                  .k = {std::log(3.0), 5, 0, 7},
                  .v = {1, 0, 0, 1},
                  .dout = {}};
  const Solution solution = solve(problem, [](int64_t, int64_t, int64_t, int64_t) { return true; });
  EXPECT_NEAR(solution.out[0], 0.75, 1e-15);
  EXPECT_NEAR(solution.out[1], 0.25, 1e-15);
  EXPECT_NEAR(solution.lse[0], std::log(4.0), 1e-15);
}

TEST(Oracle, GradientsAreFiniteDifferencesOfTheMaskedLoss) {
  Problem problem = random_problem(2, 7, 9, 4, 2, 3);
  const Mask mask = [](int64_t b, int64_t h, int64_t i, int64_t j) {
    return j <= i + 2 && (i * 5 + j * 3 + h + b) % 4 != 0;
  };
  const Solution solution = solve(problem, mask);
  const double step = 1e-5;
  const auto check_gradient = [&](std::vector<double>& values, const std::vector<double>& gradient,
                                  const char* name) {
    ASSERT_EQ(values.size(), gradient.size());
    for (size_t i = 0; i < values.size(); i += 3) {
      const double saved = values[i];
      values[i] = saved + step;
      const double up = loss(problem, mask);
      values[i] = saved - step;
      const double down = loss(problem, mask);
      values[i] = saved;
      EXPECT_NEAR(gradient[i], (up - down) / (2 * step), 1e-8) << name << " " << i;
    }
  };
  check_gradient(problem.q, solution.dq, "dq");
  check_gradient(problem.k, solution.dk, "dk");
  check_gradient(problem.v, solution.dv, "dv");
}

TEST(Oracle, EmptyRowIsZeroWithMinusInfinityAndGivesNoGradient) {
  const Problem problem = random_problem(1, 5, 2, 1, 1, 4);
  const Solution solution = solve(problem, [](int64_t, int64_t, int64_t i, int64_t j) {
    return j <= i - 3;
  });  // causal, bottom right
  for (int64_t i = 0; i < 3; ++i) {
    EXPECT_EQ(solution.lse[i], -INFINITY);
    for (int64_t d = 0; d < 4; ++d) {
      EXPECT_EQ(solution.out[i * 4 + d], 0);
      EXPECT_EQ(solution.dq[i * 4 + d], 0);
    }
  }
  EXPECT_TRUE(std::isfinite(solution.lse[3]));
  for (int64_t d = 0; d < 4; ++d) EXPECT_EQ(solution.dq[3 * 4 + d], 0) << "a single key: exactly 0";
}

TEST(Oracle, QueryHeadReadsItsGroupsKvHead) {
  for (const auto& [heads, kv_heads] : {std::pair{16, 2}, {32, 8}, {28, 4}, {12, 2}}) {
    Problem problem = random_problem(1, 3, 3, heads, kv_heads, 2);
    for (int64_t j = 0; j < 3; ++j)
      for (int64_t kv = 0; kv < kv_heads; ++kv)
        for (int64_t d = 0; d < 2; ++d)
          problem.v[(j * kv_heads + kv) * 2 + d] = static_cast<double>(kv);
    const Solution solution =
        solve(problem, [](int64_t, int64_t, int64_t i, int64_t j) { return j <= i; });
    for (int64_t i = 0; i < 3; ++i)
      for (int64_t h = 0; h < heads; ++h)
        EXPECT_NEAR(solution.out[(i * heads + h) * 2], static_cast<double>(h / (heads / kv_heads)),
                    1e-12);
  }
}

TEST(Oracle, RefusesArraysOfTheWrongSize) {
  Problem problem = random_problem(1, 4, 4, 2, 1, 4);
  problem.k.pop_back();
  try {
    solve(problem, [](int64_t, int64_t, int64_t, int64_t) { return true; });
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("k: expected 16 values, got 15"), std::string::npos)
        << error.what();
  }
}

TEST(VerticalSlashMask, IsDiagonalsOrColumnsCutByCausalityAndDocuments) {
  const int64_t seq_len = 200;
  std::vector<int32_t> starts = make_document_starts(Documents::kMidBlock, 1, seq_len);
  const Mask mask = vertical_slash_mask({{0, 2}, {}}, {{70}, {0, 150}}, 2, starts, seq_len);
  EXPECT_TRUE(mask(0, 0, 199, 192));  // diagonal 0
  EXPECT_TRUE(mask(0, 0, 195, 195));
  EXPECT_FALSE(mask(0, 0, 195, 196));  // the very next key
  EXPECT_FALSE(mask(0, 0, 191, 192));  // the future
  EXPECT_TRUE(mask(0, 0, 180, 63));    // diagonal 2, document starts at 37
  EXPECT_FALSE(mask(0, 0, 180, 36));   // another document
  EXPECT_FALSE(mask(0, 0, 180, 71));   // diagonal 1 is not chosen
  EXPECT_TRUE(mask(0, 0, 180, 70));    // column
  EXPECT_FALSE(mask(0, 0, 190, 70));   // column of an earlier document
  EXPECT_FALSE(mask(0, 1, 180, 179));  // nothing but columns
  EXPECT_TRUE(mask(0, 1, 186, 150));
  EXPECT_FALSE(mask(0, 1, 187, 150));
}

TEST(Plain, IsTheOracleInFloat64AndNearItInLowerPrecisions) {
  const Problem problem = random_problem(2, 70, 70, 4, 2, 16);
  const Mask causal = [](int64_t, int64_t, int64_t i, int64_t j) { return j <= i; };
  const Solution truth = solve(problem, causal);
  const Solution same = solve_plain(problem, causal, Precision::kFloat64);
  EXPECT_TRUE(compare("out", same.out, truth.out, {}, 16, Precision::kFloat64));
  EXPECT_TRUE(compare("dk", same.dk, truth.dk, {}, 16, Precision::kFloat64));
  EXPECT_TRUE(compare("dq", same.dq, truth.dq, {}, 16, Precision::kFloat64));
  EXPECT_TRUE(compare("dv", same.dv, truth.dv, {}, 16, Precision::kFloat64));
  const Solution from_out = solve_plain(problem, causal, Precision::kFloat64, Delta::kFromOut);
  EXPECT_TRUE(compare("dq", from_out.dq, truth.dq, {}, 16, Precision::kFloat64));
  EXPECT_TRUE(compare("dk", from_out.dk, truth.dk, {}, 16, Precision::kFloat64));
  double previous = 0;
  for (Precision precision :
       {Precision::kFloat64, Precision::kFloat32, Precision::kFloat16, Precision::kBFloat16}) {
    const Solution plain = solve_plain(problem, causal, precision);
    double worst = 0;
    for (size_t i = 0; i < truth.out.size(); ++i)
      worst = std::max(worst, std::fabs(plain.out[i] - truth.out[i]));
    EXPECT_GT(worst, previous);  // each step down costs accuracy: the rounding really takes place
    EXPECT_LT(worst, 0.05);
    previous = worst;
  }
}

TEST(Shards, PutUndoesTake) {
  std::vector<int> values(2 * 7 * 3);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<int>(i) + 1;
  std::vector<int> back(values.size(), 0);
  for (const std::vector<int64_t>& positions :
       {std::vector<int64_t>{0, 3, 4, 9}, std::vector<int64_t>{1, 2, 5, 6}}) {
    const std::vector<int> rows = take_rows(values, 2, 7, positions, -1);
    EXPECT_EQ(rows.size(), 2u * 4 * 3);
    if (positions[3] == 9) {
      EXPECT_EQ(rows[3 * 3], -1);
    }
    put_rows(rows, 2, 7, positions, back);
  }
  EXPECT_EQ(back, values);
}

TEST(Documents, StartsAreWhereTheySay) {
  for (Documents kind : kAllDocuments) {
    const std::vector<int32_t> starts = make_document_starts(kind, 3, 500);
    if (kind == Documents::kOne) {
      EXPECT_TRUE(starts.empty());
      continue;
    }
    ASSERT_EQ(starts.size(), 1500u);
    int documents = 0;
    for (int64_t b = 0; b < 3; ++b)
      for (int64_t i = 0; i < 500; ++i) {
        const int32_t start = starts[b * 500 + i];
        documents += start == i;
        EXPECT_TRUE(start == i || (i > 0 && start == starts[b * 500 + i - 1]));
      }
    if (kind == Documents::kAtZero) {
      EXPECT_EQ(documents, 3);
    }
    if (kind == Documents::kMidBlock) {
      EXPECT_GT(documents, 9);
    }
    if (kind == Documents::kEveryToken) {
      EXPECT_EQ(documents, 1500);
    }
  }
}

}  // namespace
}  // namespace mtraining::testing
