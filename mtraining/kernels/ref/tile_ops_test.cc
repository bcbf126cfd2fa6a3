// The arithmetic of tiles, for every instruction set that this processor has.
#include "mtraining/kernels/ref/tile_ops.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "mtraining/base/rng.h"
#include "mtraining/kernels/ref/walk.h"
#include "mtraining/testing/rounding.h"

namespace mtraining::kernels::ref {
namespace {

template <typename T>
std::vector<const TileOps<T>*> all_ops() {
  std::vector<const TileOps<T>*> all;
  for (const char* isa : {"baseline", "v3", "v4"}) {
    if (const TileOps<T>* ops = find_tile_ops<T>(isa)) all.push_back(ops);
  }
  return all;
}

TEST(TileOps, OneIsChosen) {
  EXPECT_FALSE(all_ops<float>().empty());
  EXPECT_STREQ(tile_ops<float>().isa, tile_ops<double>().isa);
  EXPECT_EQ(find_tile_ops<float>("v9"), nullptr);
}

TEST(Exponential, IsWithinTwoUnitsInTheLastPlaceOverAllOfFloat) {
  for (const TileOps<float>* ops : all_ops<float>()) {
    // Every 61st float from -104 to 89, both signs: about 35 million / 61 values a sign.
    std::vector<float> x;
    for (uint32_t bits = 0; std::bit_cast<float>(bits) < 104.0f; bits += 6101) {
      x.push_back(std::bit_cast<float>(bits));
      x.push_back(-std::bit_cast<float>(bits));
    }
    std::vector<float> y = x;
    ops->exponential(static_cast<int64_t>(y.size()), y.data());
    double worst = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      const double truth = std::exp(static_cast<double>(x[i]));
      if (truth < 0x1.0001p-126) {  // subnormal results are flushed
        EXPECT_TRUE(y[i] == 0 || std::fabs(y[i] - truth) < 1e-44 + truth * 3e-7) << x[i];
      } else if (truth > std::numeric_limits<float>::max()) {
        EXPECT_EQ(y[i], std::numeric_limits<float>::infinity()) << x[i];
      } else {
        const double ulp = std::ldexp(1.0, std::ilogb(truth) - 23);
        worst = std::max(worst, std::fabs(y[i] - truth) / ulp);
      }
    }
    EXPECT_LE(worst, 1.5) << ops->isa;
  }
}

TEST(Exponential, IsAccurateInDouble) {
  const Rng rng(2);
  for (const TileOps<double>* ops : all_ops<double>()) {
    std::vector<double> x, y;
    for (int i = 0; i < 20'000; ++i) x.push_back((2 * rng.uniform(i) - 1) * (i % 2 ? 700 : 1));
    y = x;
    ops->exponential(static_cast<int64_t>(y.size()), y.data());
    for (size_t i = 0; i < x.size(); ++i) {
      const double truth = std::exp(x[i]);
      EXPECT_NEAR(y[i], truth, truth * 4e-16) << x[i];
    }
  }
}

template <typename T>
void expect_exact_ends() {
  const T inf = std::numeric_limits<T>::infinity();
  for (const TileOps<T>* ops : all_ops<T>()) {
    T x[] = {-inf, inf, 0, -T{0}, std::numeric_limits<T>::quiet_NaN(), T{-1e6}, T{1e6}};
    ops->exponential(7, x);
    EXPECT_EQ(x[0], 0) << ops->isa;
    EXPECT_FALSE(std::signbit(x[0]));
    EXPECT_EQ(x[1], inf);
    EXPECT_EQ(x[2], 1);
    EXPECT_EQ(x[3], 1);
    EXPECT_TRUE(std::isnan(x[4]));
    EXPECT_EQ(x[5], 0);
    EXPECT_EQ(x[6], inf);
  }
}
TEST(Exponential, IsExactAtTheEndsFloat32) { expect_exact_ends<float>(); }
TEST(Exponential, IsExactAtTheEndsFloat64) { expect_exact_ends<double>(); }

TEST(Exponential, KeepsEveryNaN) {
  // Devices and file formats write NaN with other low bits than this processor does.
  for (const TileOps<float>* ops : all_ops<float>()) {
    for (const uint32_t bits : {0x7fc00000u, 0x7fffffffu, 0xffffffffu, 0x7fc00123u, 0x7f800001u}) {
      float x = std::bit_cast<float>(bits);
      ops->exponential(1, &x);
      EXPECT_TRUE(std::isnan(x)) << ops->isa << " " << bits << " gave " << x;
    }
  }
  for (const TileOps<double>* ops : all_ops<double>()) {
    for (const uint64_t bits : {0x7ff8000000000000u, 0x7fffffffffffffffu, 0x7ff8000000000123u}) {
      double x = std::bit_cast<double>(bits);
      ops->exponential(1, &x);
      EXPECT_TRUE(std::isnan(x)) << ops->isa << " " << bits << " gave " << x;
    }
  }
}

TEST(Exponential, DoesNotDependOnThePlaceInTheVector) {
  const Rng rng(8);
  for (const TileOps<float>* ops : all_ops<float>()) {
    std::vector<float> x(133);
    for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(rng.normal(i) * 20);
    std::vector<float> all = x;
    ops->exponential(static_cast<int64_t>(all.size()), all.data());
    for (size_t i = 0; i < x.size(); ++i) {
      float one = x[i];
      ops->exponential(1, &one);
      EXPECT_EQ(one, all[i]);
    }
  }
}

TEST(LoadRows, ConvertsEveryHalfPrecisionNumberExactly) {
  std::vector<uint16_t> bits(1 << 16);
  for (size_t i = 0; i < bits.size(); ++i) bits[i] = static_cast<uint16_t>(i);
  std::vector<int32_t> rows(bits.size() / 64);
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<int32_t>(i);
  for (const TileOps<float>* ops : all_ops<float>()) {
    Scratch<float> tile(static_cast<int64_t>(bits.size()));
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
      ops->load_rows(dtype, bits.data(), 64, rows.data(), static_cast<int64_t>(rows.size()), 64, 64,
                     tile);
      for (size_t i = 0; i < bits.size(); ++i) {
        const float truth = dtype == DType::kBFloat16 ? mtraining::testing::from_bf16(bits[i])
                                                      : mtraining::testing::from_fp16(bits[i]);
        if (std::isnan(truth)) {
          EXPECT_TRUE(std::isnan(tile[i])) << i;
        } else {
          EXPECT_EQ(std::bit_cast<uint32_t>(tile[i]), std::bit_cast<uint32_t>(truth)) << i;
        }
      }
    }
  }
}

TEST(LoadRows, PadsWithZerosAndSkipsNegativeRows) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const TileOps<float>* ops : all_ops<float>()) {
    std::vector<float> memory(3 * 24, nan);
    for (int d = 0; d < 24; ++d) memory[2 * 24 + d] = static_cast<float>(d + 1);
    const int32_t rows[] = {-1, 2};
    Scratch<float> tile(2 * 32);
    std::fill(tile.get(), tile + 64, nan);
    ops->load_rows(DType::kFloat32, memory.data(), 24, rows, 2, 24, 32, tile);
    for (int d = 0; d < 32; ++d) {
      EXPECT_EQ(tile[d], 0);
      EXPECT_EQ(tile[32 + d], d < 24 ? d + 1 : 0);
    }
  }
}

/// Reference for the five products, in double.
template <typename T>
void expect_products() {
  const Rng rng(4);
  for (const TileOps<T>* ops : all_ops<T>()) {
    for (const int64_t depth : {16, 48, 64, 128}) {
      for (const int64_t keys : {8, 24, 64}) {
        Scratch<T> rows(kTile * depth), lanes(kTile * depth), queries(kTile * depth),
            weights(kTile * kTile);
        Scratch<T> tile(kTile * kTile), out(kTile * depth), dq(kTile * depth), dk(kTile * depth);
        uint64_t draw = 0;
        for (Scratch<T>* x : {&rows, &lanes, &queries, &dk, &out, &dq}) {
          for (int64_t i = 0; i < kTile * depth; ++i) (*x)[i] = static_cast<T>(rng.normal(draw++));
        }
        for (int64_t i = 0; i < kTile * kTile; ++i) weights[i] = static_cast<T>(rng.normal(draw++));
        const T* pointers[kTile];
        T* dk_pointers[kTile];
        std::vector<double> dk_before(dk.get(), dk + kTile * depth),
            out_before(out.get(), out + kTile * depth);
        std::vector<double> dq_before(dq.get(), dq + kTile * depth);
        for (int64_t j = 0; j < keys; ++j) {
          pointers[j] = rows + (keys - 1 - j) * depth;  // rows lie anywhere
          dk_pointers[j] = dk + (keys - 1 - j) * depth;
        }
        const bool add = keys != 24;
        ops->scores(keys, depth, pointers, lanes, tile);
        ops->weighted_values(keys, depth, pointers, weights, add, out);
        ops->key_gradients(keys, depth, weights, queries, dk_pointers);
        ops->query_gradients(keys, depth, weights, pointers, add, dq);
        const double close = sizeof(T) == 8 ? 1e-13 : 4e-5;
        for (int64_t i = 0; i < kTile; ++i) {
          for (int64_t j = 0; j < keys; ++j) {
            double sum = 0;
            for (int64_t d = 0; d < depth; ++d)
              sum += double{pointers[j][d]} * lanes[d * kTile + i];
            ASSERT_NEAR(tile[j * kTile + i], sum, close) << ops->isa;
          }
          for (int64_t d = 0; d < depth; ++d) {
            double o = add ? out_before[d * kTile + i] : 0, g = add ? dq_before[i * depth + d] : 0;
            for (int64_t j = 0; j < keys; ++j) {
              o += double{pointers[j][d]} * weights[j * kTile + i];
              g += double{pointers[j][d]} * weights[j * kTile + i];
            }
            ASSERT_NEAR(out[d * kTile + i], o, close) << ops->isa;
            ASSERT_NEAR(dq[i * depth + d], g, close) << ops->isa;
          }
        }
        for (int64_t j = 0; j < kTile; ++j) {
          for (int64_t d = 0; d < depth; ++d) {
            double g = dk_before[j * depth + d];
            for (int64_t i = 0; i < kTile && j < keys; ++i) {
              g += double{weights[(keys - 1 - j) * kTile + i]} * queries[i * depth + d];
            }
            ASSERT_NEAR(dk[j * depth + d], g, close) << ops->isa << " " << j;
          }
        }
      }
    }
  }
}
TEST(TileOps, ProductsFloat32) { expect_products<float>(); }
TEST(TileOps, ProductsFloat64) { expect_products<double>(); }

TEST(TileOps, AScoreDoesNotDependOnWhereItsKeySits) {
  const Rng rng(6);
  const int64_t depth = 96;
  for (const TileOps<float>* ops : all_ops<float>()) {
    Scratch<float> rows(kTile * depth), lanes(kTile * depth), whole(kTile * kTile),
        part(kTile * kTile);
    for (int64_t i = 0; i < kTile * depth; ++i) {
      rows[i] = static_cast<float>(rng.normal(2 * i));
      lanes[i] = static_cast<float>(rng.normal(2 * i + 1));
    }
    const float* pointers[kTile];
    for (int j = 0; j < kTile; ++j) pointers[j] = rows + j * depth;
    ops->scores(kTile, depth, pointers, lanes, whole);
    for (int first = 1; first < 56; first += 5) {
      ops->scores(8, depth, pointers + first, lanes, part);
      EXPECT_EQ(std::memcmp(part.get(), whole + first * kTile, 8 * kTile * sizeof(float)), 0)
          << ops->isa;
    }
  }
}

TEST(TileOps, FusedInstructionSetsAgreeToTheBit) {
  const TileOps<float>* v3 = find_tile_ops<float>("v3");
  const TileOps<float>* v4 = find_tile_ops<float>("v4");
  if (v3 == nullptr || v4 == nullptr) GTEST_SKIP() << "this processor has one of them at most";
  const Rng rng(6);
  Scratch<float> a(kTile * kTile), b(kTile * kTile);
  alignas(64) float max_a[kTile], sum_a[kTile], scale_a[kTile], max_b[kTile], sum_b[kTile],
      scale_b[kTile];
  for (int i = 0; i < kTile; ++i) {
    max_a[i] = max_b[i] =
        i % 3 == 0 ? -std::numeric_limits<float>::infinity() : static_cast<float>(i % 5);
    sum_a[i] = sum_b[i] = i % 3 == 0 ? 0.0f : 1.5f;
  }
  for (int i = 0; i < kTile * kTile; ++i) a[i] = b[i] = static_cast<float>(rng.normal(i) * 5);
  EXPECT_EQ(v3->online_softmax(kTile, a, max_a, sum_a, scale_a),
            v4->online_softmax(kTile, b, max_b, sum_b, scale_b));
  EXPECT_EQ(std::memcmp(a.get(), b.get(), kTile * kTile * sizeof(float)), 0);
  EXPECT_EQ(std::memcmp(sum_a, sum_b, sizeof(sum_a)), 0);
  EXPECT_EQ(std::memcmp(max_a, max_b, sizeof(max_a)), 0);
  EXPECT_EQ(std::memcmp(scale_a, scale_b, sizeof(scale_a)), 0);
}

TEST(TileOps, HiddenLanesAreSelectedNotMultiplied) {
  const float inf = std::numeric_limits<float>::infinity(),
              nan = std::numeric_limits<float>::quiet_NaN();
  for (const TileOps<float>* ops : all_ops<float>()) {
    Scratch<float> scores(8 * kTile), dp(8 * kTile);
    alignas(64) int32_t key[8], query[kTile], begin[kTile];
    alignas(64) float lse[kTile] = {}, delta[kTile] = {};
    for (int j = 0; j < 8; ++j) key[j] = j;
    for (int i = 0; i < kTile; ++i) {
      query[i] = i % 8;
      begin[i] = i % 8 / 2;
    }
    for (int i = 0; i < 8 * kTile; ++i) {
      const bool visible = i / kTile <= query[i % kTile] && i / kTile >= begin[i % kTile];
      scores[i] = visible ? -1.0f : (i % 3 == 0 ? 500.0f : i % 3 == 1 ? nan : inf);
      dp[i] = visible ? 2.0f : nan;
    }
    ops->mask(8, key, query, begin, scores);
    ops->probabilities(8, lse, scores);
    ops->score_gradients(8, scores, delta, 0.5f, dp);
    for (int i = 0; i < 8 * kTile; ++i) {
      const bool visible = i / kTile <= query[i % kTile] && i / kTile >= begin[i % kTile];
      EXPECT_NEAR(scores[i], visible ? std::exp(-1.0) : 0.0, visible ? 1e-7 : 0.0);
      EXPECT_NEAR(dp[i], visible ? std::exp(-1.0) : 0.0, visible ? 1e-7 : 0.0);
    }
  }
}

}  // namespace
}  // namespace mtraining::kernels::ref
