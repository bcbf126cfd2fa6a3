// Forward, backward and delta against the float64 oracle, swept over sizes, layouts, memory orders
// and precisions.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "mtraining/base/parallel.h"
#include "mtraining/kernels/ref/launch_case.h"
#include "mtraining/testing/comparator.h"
#include "mtraining/testing/oracle.h"
#include "mtraining/testing/plain.h"

namespace mtraining::kernels::testing {
namespace {

using layout::LayoutKind;
using mtraining::testing::Documents;
using mtraining::testing::Precision;
using mtraining::testing::Solution;

void expect_equals_oracle(const LaunchOptions& options) {
  SCOPED_TRACE(to_string(options));
  LaunchCase launch(options);
  const Solution got = launch.run();
  EXPECT_EQ(launch.broken_guard(), "");
  const Solution truth = mtraining::testing::solve(launch.problem(), launch.mask());
  // bf16 and fp16 inputs are exact in float32, and everything inside is float32: so is the allowed
  // error.
  const Precision precision =
      options.dtype == DType::kFloat64 ? Precision::kFloat64 : Precision::kFloat32;
  const Solution plain = mtraining::testing::solve_plain(launch.problem(), launch.mask(), precision,
                                                         mtraining::testing::Delta::kFromOut);
  const int64_t d = options.head_dim;
  const auto expect = [&](const char* name, const std::vector<double>& a,
                          const std::vector<double>& b, const std::vector<double>& c) {
    const auto verdict = mtraining::testing::compare(name, a, b, c, d, precision);
    EXPECT_TRUE(verdict.ok) << verdict.text;
  };
  // Where one key has nearly all the weight, dq and dk are what the rounding of out leaves of a
  // difference: a few random bits, of which plain has other ones on each processor. Three times
  // plain's error there, instead of twice; more for bf16, of which rounded + residual keep 17 bits
  // of out, while plain keeps 24.
  const double more = options.dtype == DType::kBFloat16 ? 8 : 0.5;
  const auto widened = [&](const std::vector<double>& center, std::vector<double> values) {
    for (size_t i = 0; i < values.size(); ++i) values[i] += more * (values[i] - center[i]);
    return values;
  };
  expect("out", got.out, truth.out, plain.out);
  expect("dq", got.dq, truth.dq, widened(truth.dq, plain.dq));
  expect("dk", got.dk, truth.dk, widened(truth.dk, plain.dk));
  expect("dv", got.dv, truth.dv, plain.dv);
  const auto lse = mtraining::testing::compare_lse("lse", got.lse, truth.lse, plain.lse, precision);
  EXPECT_TRUE(lse.ok) << lse.text;
}

LaunchOptions options_of(int64_t seq_len, LayoutKind kind = LayoutKind::kContiguous,
                         int cp_size = 1, int64_t stripe = 64) {
  LaunchOptions options;
  options.layout = {.kind = kind, .seq_len = seq_len, .cp_size = cp_size, .stripe = stripe};
  return options;
}

TEST(Attention, EqualsTheOracleForEveryLength) {
  for (const int64_t n : {1, 5, 63, 64, 65, 127, 129, 300}) {
    for (const bool csr : {false, true}) {
      LaunchOptions options = options_of(n);
      options.csr = csr;
      options.seed = static_cast<uint64_t>(n);
      expect_equals_oracle(options);
    }
  }
}

TEST(Attention, EqualsTheOracleForEveryHeadCountAndHeadDim) {
  const int64_t heads[][2] = {{2, 2}, {2, 1}, {8, 2}, {14, 2}, {8, 1}, {28, 4}};
  for (const auto& h : heads) {
    for (const int64_t d : {16, 64, 96, 128}) {
      LaunchOptions options = options_of(h[0] == 28 ? 65 : 129);
      options.num_q_heads = h[0];
      options.num_kv_heads = h[1];
      options.head_dim = d;
      expect_equals_oracle(options);
    }
  }
  for (const int64_t d : {8, 24, 40, 256, 320}) {
    LaunchOptions options = options_of(70);
    options.head_dim = d;
    expect_equals_oracle(options);
  }
}

TEST(Attention, EqualsTheOracleForEveryDtypeAndMemoryOrder) {
  for (const DType dtype : {DType::kFloat64, DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const Memory memory : {Memory::kContiguous, Memory::kHeadMajor, Memory::kSlice}) {
      LaunchOptions options = options_of(150, LayoutKind::kBlockStriped, 2);
      options.batch = 2;
      options.dtype = dtype;
      options.memory = memory;
      expect_equals_oracle(options);
      options.columns = Columns::kGathered;
      options.expanded_dout = true;
      expect_equals_oracle(options);
    }
  }
}

TEST(Attention, EqualsTheOracleForEveryLayout) {
  struct Shape {
    LayoutKind kind;
    int cp_size;
    int64_t stripe;
  };
  const Shape shapes[] = {{LayoutKind::kContiguous, 3, 64},    {LayoutKind::kZigzag, 2, 64},
                          {LayoutKind::kZigzag, 3, 64},        {LayoutKind::kBlockStriped, 2, 64},
                          {LayoutKind::kBlockStriped, 3, 128}, {LayoutKind::kBlockStriped, 2, 192}};
  for (const Shape& shape : shapes) {
    for (const bool one_launch : {true, false}) {
      for (const Columns columns : {Columns::kPerStep, Columns::kGathered}) {
        LaunchOptions options = options_of(500, shape.kind, shape.cp_size, shape.stripe);
        options.num_q_heads = 2;
        options.num_kv_heads = 1;
        options.head_dim = 32;
        options.one_launch = one_launch;
        options.columns = columns;
        options.csr = one_launch;
        expect_equals_oracle(options);
      }
    }
  }
}

TEST(Attention, EqualsTheOracleWhereNeighbouringTokensAreStriped) {
  for (const int64_t n : {1, 100, 300}) {
    for (const Documents documents : {Documents::kOne, Documents::kMidBlock}) {
      LaunchOptions options = options_of(n, LayoutKind::kStriped, 3);
      options.chosen_diagonals = 1;
      options.chosen_columns = 0;
      options.documents = documents;
      expect_equals_oracle(options);
    }
  }
}

TEST(Attention, EqualsTheOracleForEveryKindOfDocuments) {
  for (const Documents documents : mtraining::testing::kAllDocuments) {
    for (const double diagonals : {0.3, 1.0}) {
      LaunchOptions options = options_of(300, LayoutKind::kBlockStriped, 2);
      options.batch = 2;
      options.documents = documents;
      options.chosen_diagonals = diagonals;
      expect_equals_oracle(options);
    }
  }
}

TEST(Attention, EqualsTheOracleForEmptyFullAndColumnOnlyLists) {
  for (const double diagonals : {-1.0, 0.0, 0.2, 1.0}) {
    for (const double columns : {0.0, 0.02, 1.0}) {
      LaunchOptions options = options_of(300, LayoutKind::kBlockStriped, 2);
      options.chosen_diagonals = diagonals;
      options.chosen_columns = columns;
      expect_equals_oracle(options);
      options.columns = Columns::kGathered;
      options.one_launch = false;
      expect_equals_oracle(options);
    }
  }
}

// One kv head and twenty tiles a query block: backward is cut into several key ranges, whose parts
// of dq must arrive in order.
TEST(Attention, GivesTheSameBitsForEveryThreadCount) {
  for (const int64_t kv_heads : {1, 4}) {
    LaunchOptions options = options_of(2500, LayoutKind::kBlockStriped, 2, 128);
    options.num_kv_heads = kv_heads;
    options.head_dim = 16;
    options.chosen_diagonals = 0.9;
    options.columns = kv_heads == 1 ? Columns::kPerStep : Columns::kGathered;
    Solution first;
    for (const int threads : {1, 2, 3, 7, 3}) {
      const ThreadCountScope scope(threads);
      LaunchCase launch(options);
      const Solution got = launch.run();
      if (threads == 1) first = got;
      EXPECT_EQ(got.out, first.out) << threads;
      EXPECT_EQ(got.lse, first.lse) << threads;
      EXPECT_EQ(got.dq, first.dq) << threads;
      EXPECT_EQ(got.dk, first.dk) << threads;
      EXPECT_EQ(got.dv, first.dv) << threads;
    }
  }
}

}  // namespace
}  // namespace mtraining::kernels::testing
