#include "mtraining/testing/comparator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>

#include "mtraining/base/check.h"
#include "mtraining/testing/generator.h"
#include "mtraining/testing/oracle.h"
#include "mtraining/testing/plain.h"
#include "mtraining/testing/random.h"
#include "mtraining/testing/rounding.h"

namespace mtraining::testing {
namespace {

constexpr int64_t kSeqLen = 320, kHeads = 2, kDim = 32;
const std::vector<int32_t> kColumns = {2, 70, 100, 131};

Mask mask_without(int32_t missing, int64_t reach = 0) {
  std::vector<int32_t> columns;
  for (int32_t column : kColumns)
    if (column != missing) columns.push_back(column);
  const Mask mask = vertical_slash_mask({{0, 2}, {0, 1}}, {columns, columns}, kHeads, {}, kSeqLen);
  return [mask, reach](int64_t b, int64_t h, int64_t i, int64_t j) {
    if (reach < 0) return j <= i + reach && mask(b, h, i, j);
    return mask(b, h, i, j) || (j > i && j <= i + reach && j < kSeqLen);
  };
}

// What the tests share: a problem, its truth and its plain solution in each precision.
struct Case {
  Precision precision;
  Problem problem;
  Solution truth, plain;
};
const Case& shared_case(Precision precision) {
  static std::vector<std::unique_ptr<Case>> cases(4);
  auto& made = cases[static_cast<size_t>(precision)];
  if (!made) {
    const Qkv qkv = make_qkv({.seq_len = kSeqLen,
                              .num_q_heads = kHeads,
                              .num_kv_heads = 1,
                              .head_dim = kDim,
                              .vertical_keys = 0});
    made = std::make_unique<Case>();
    made->precision = precision;
    made->problem = {.num_queries = kSeqLen,
                     .num_keys = kSeqLen,
                     .num_q_heads = kHeads,
                     .num_kv_heads = 1,
                     .head_dim = kDim,
                     .q = round_to(precision, qkv.q),
                     .k = round_to(precision, qkv.k),
                     .v = round_to(precision, qkv.v),
                     .dout = round_to(precision, qkv.dout)};
    made->truth = solve(made->problem, mask_without(-1));
    made->plain = solve_plain(made->problem, mask_without(-1), precision);
  }
  return *made;
}

constexpr Precision kPrecisions[] = {Precision::kFloat64, Precision::kFloat32, Precision::kFloat16,
                                     Precision::kBFloat16};
using Field = std::vector<double> Solution::*;
constexpr std::pair<const char*, Field> kFields[] = {
    {"out", &Solution::out}, {"dq", &Solution::dq}, {"dk", &Solution::dk}, {"dv", &Solution::dv}};

// Judges `got` in every precision; it is rounded to the precision first, as a result in memory is.
void expect(bool accepted, const char* what,
            const std::function<std::vector<double>(const Case&, Field)>& got,
            const std::vector<const char*>& fields = {"out", "dq", "dk", "dv"}) {
  for (Precision precision : kPrecisions) {
    const Case& c = shared_case(precision);
    for (const auto& [name, field] : kFields) {
      if (std::find_if(fields.begin(), fields.end(), [&, n = name](const char* f) {
            return std::string(f) == n;
          }) == fields.end())
        continue;
      const std::vector<double> values =
          round_to(precision, std::span<const double>(got(c, field)));
      const Verdict verdict =
          compare(name, values, c.truth.*field, c.plain.*field, kDim, precision);
      EXPECT_EQ(verdict.ok, accepted)
          << what << ", precision " << static_cast<int>(precision) << ": " << verdict.text;
    }
  }
}

std::vector<double> moved(std::vector<double> values, int64_t first, int64_t second, int64_t rows,
                          int64_t width) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t d = 0; d < width; ++d)
      std::swap(values[(first + r) * width + d], values[(second + r) * width + d]);
  return values;
}

TEST(Comparator, AcceptsTheTruthRoundedOnce) {
  expect(true, "truth", [](const Case& c, Field f) { return c.truth.*f; });
}

TEST(Comparator, AcceptsAPlainComputationInTheSamePrecision) {
  expect(true, "plain", [](const Case& c, Field f) { return c.plain.*f; });
}

TEST(Comparator, AcceptsAnotherOrderOfSummation) {
  // Keys and queries turned round: the same sums from the other end.
  for (Precision precision : {Precision::kFloat32, Precision::kBFloat16}) {
    const Case& c = shared_case(precision);
    Problem turned = c.problem;
    const auto turn = [](const std::vector<double>& values, int64_t width) {
      std::vector<double> out(values.size());
      const int64_t rows = static_cast<int64_t>(values.size()) / width;
      for (int64_t r = 0; r < rows; ++r)
        std::copy_n(&values[r * width], width, &out[(rows - 1 - r) * width]);
      return out;
    };
    turned.q = turn(c.problem.q, kHeads * kDim);
    turned.dout = turn(c.problem.dout, kHeads * kDim);
    turned.k = turn(c.problem.k, kDim);
    turned.v = turn(c.problem.v, kDim);
    const Mask mask = mask_without(-1);
    const Solution got = solve_plain(
        turned,
        [&](int64_t b, int64_t h, int64_t i, int64_t j) {
          return mask(b, h, kSeqLen - 1 - i, kSeqLen - 1 - j);
        },
        precision);
    EXPECT_NE(turn(got.dk, kDim), c.plain.dk);
    for (const auto& [name, field] : kFields) {
      const int64_t width =
          std::string(name) == "out" || std::string(name) == "dq" ? kHeads * kDim : kDim;
      const Verdict verdict =
          compare(name, turn(got.*field, width), c.truth.*field, c.plain.*field, kDim, precision);
      EXPECT_TRUE(verdict) << verdict.text;
    }
  }
}

TEST(Comparator, RejectsZeros) {
  expect(false, "zeros",
         [](const Case& c, Field f) { return std::vector<double>((c.truth.*f).size(), 0.0); });
}

TEST(Comparator, RejectsTwoSwappedStripes) {
  expect(false, "swapped", [](const Case& c, Field f) {
    const int64_t width = static_cast<int64_t>((c.truth.*f).size()) / kSeqLen;
    return moved(c.truth.*f, 64, 192, 64, width);
  });
}

TEST(Comparator, RejectsAShiftByOneBlock) {
  expect(false, "shift", [](const Case& c, Field f) {
    std::vector<double> values = c.truth.*f;
    std::rotate(values.begin(), values.begin() + static_cast<int64_t>(values.size()) / kSeqLen * 64,
                values.end());
    return values;
  });
}

TEST(Comparator, RejectsACausalEdgeOffByOneEitherWay) {
  for (int64_t reach : {-1, 1})
    expect(false, "edge", [reach](const Case& c, Field f) {
      return solve(c.problem, mask_without(-1, reach)).*f;
    });
}

TEST(Comparator, RejectsAMissingColumn) {
  for (int32_t missing : {2, 100})
    expect(false, "column", [missing](const Case& c, Field f) {
      return solve(c.problem, mask_without(missing)).*f;
    });
}

TEST(Comparator, RejectsASingleWrongElement) {
  expect(false, "element", [](const Case& c, Field f) {
    std::vector<double> values = c.truth.*f;
    const size_t row =
        values.size() / kDim / 2 + 5;  // an ordinary row: its own norm is the measure
    double norm = 0;
    for (int64_t d = 0; d < kDim; ++d) norm += values[row * kDim + d] * values[row * kDim + d];
    values[row * kDim + 3] += 0.6 * std::sqrt(norm);
    return values;
  });
}

TEST(Comparator, RejectsAWrongScaleOfASingleSmallRow) {
  // The out row with the smallest norm: an absolute measure over the whole tensor would hide it.
  expect(false, "scale",
         [](const Case& c, Field f) {
           std::vector<double> values = c.truth.*f;
           size_t smallest = 0;
           double best = INFINITY;
           for (size_t r = 0; r < values.size() / kDim; ++r) {
             double norm = 0;
             for (int64_t d = 0; d < kDim; ++d) norm += values[r * kDim + d] * values[r * kDim + d];
             if (norm < best) best = norm, smallest = r;
           }
           for (int64_t d = 0; d < kDim; ++d) values[smallest * kDim + d] *= 1.25;
           return values;
         },
         {"out"});
}

TEST(Comparator, RejectsNanAndInfinityWhereTheTruthIsFiniteAndTheReverse) {
  for (double bad :
       {static_cast<double>(NAN), static_cast<double>(INFINITY), -static_cast<double>(INFINITY)}) {
    expect(false, "special", [bad](const Case& c, Field f) {
      std::vector<double> values = c.truth.*f;
      values[values.size() / 2] = bad;
      return values;
    });
    const std::vector<double> truth = {1, bad, 3, 4}, finite = {1, 2, 3, 4},
                              other = {1, bad == INFINITY ? -bad : INFINITY, 3, 4};
    EXPECT_FALSE(compare("x", finite, truth, {}, 2, Precision::kFloat32));
    EXPECT_FALSE(compare("x", other, truth, {}, 2, Precision::kFloat32));
    EXPECT_TRUE(compare("x", truth, truth, {}, 2, Precision::kFloat32));
    EXPECT_FALSE(compare("x", std::vector<double>{9, bad, 3, 4}, truth, {}, 2, Precision::kFloat32))
        << "the finite rest still counts";
  }
}

TEST(Comparator, APlainComputationThatIsNonsenseAllowsNothing) {
  const Case& c = shared_case(Precision::kBFloat16);
  const std::vector<double> nonsense(c.truth.out.size(), 1e6), zeros(c.truth.out.size(), 0.0);
  EXPECT_FALSE(compare("out", zeros, c.truth.out, nonsense, kDim, Precision::kBFloat16));
}

TEST(Comparator, ACancelledRowDoesNotLoosenTheOthers) {
  // Row 0 is 0 in truth and rounding noise in plain, as dq of a query with one key is.
  std::vector<double> truth(8, 1.0), plain(8, 1.0 + 1e-7), got(8, 1.0);
  truth[0] = truth[1] = 0;
  plain[0] = plain[1] = got[0] = got[1] = 1e-7;
  EXPECT_TRUE(compare("dq", got, truth, plain, 2, Precision::kFloat32));
  got[5] = 1.001;
  const Verdict verdict = compare("dq", got, truth, plain, 2, Precision::kFloat32);
  EXPECT_FALSE(verdict);
  EXPECT_EQ(verdict.worst_row, 2);
  EXPECT_NE(verdict.text.find("dq: row 2 of 4 element 1: expected 1, got 1.001"), std::string::npos)
      << verdict.text;
}

TEST(Comparator, AllZeroTruthAllowsTheFloorOnly) {
  const std::vector<double> truth(4, 0.0);
  EXPECT_TRUE(compare("dq", truth, truth, {}, 2, Precision::kFloat32));
  EXPECT_TRUE(compare("dq", std::vector<double>{1e-7, 0, 0, 0}, truth, {}, 2, Precision::kFloat32));
  EXPECT_FALSE(
      compare("dq", std::vector<double>{1e-4, 0, 0, 0}, truth, {}, 2, Precision::kFloat32));
}

TEST(Comparator, RefusesSizesThatDoNotFit) {
  const std::vector<double> four(4, 1.0), three(3, 1.0);
  EXPECT_THROW(compare("x", three, four, {}, 2, Precision::kFloat32), InvalidArgument);
  EXPECT_THROW(compare("x", four, four, three, 2, Precision::kFloat32), InvalidArgument);
  EXPECT_THROW(compare("x", three, three, {}, 2, Precision::kFloat32), InvalidArgument);
  EXPECT_THROW(compare_lse("x", three, four, {}, Precision::kFloat32), InvalidArgument);
}

TEST(CompareLse, AcceptsFloat32AndRejectsWrongBaseOrEmptyRows) {
  const Case& c = shared_case(Precision::kBFloat16);
  const std::vector<double>& truth = c.truth.lse;
  EXPECT_TRUE(compare_lse("lse", round_to(Precision::kFloat32, std::span<const double>(truth)),
                          truth, {}, Precision::kBFloat16));
  std::vector<double> base2 = truth;
  for (double& value : base2) value /= std::log(2.0);
  EXPECT_FALSE(compare_lse("lse", base2, truth, c.plain.lse, Precision::kBFloat16));
  std::vector<double> empty = truth;
  empty[3] = -INFINITY;
  EXPECT_FALSE(compare_lse("lse", empty, truth, c.plain.lse, Precision::kBFloat16));
  EXPECT_FALSE(compare_lse("lse", truth, empty, c.plain.lse, Precision::kBFloat16));
  EXPECT_TRUE(compare_lse("lse", empty, empty, c.plain.lse, Precision::kBFloat16));
  std::vector<double> off = truth;
  off[7] += 1e-3;
  EXPECT_FALSE(compare_lse("lse", off, truth, {}, Precision::kFloat32));
}

}  // namespace
}  // namespace mtraining::testing
