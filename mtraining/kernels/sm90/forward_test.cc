// The Hopper forward against the float64 oracle, rank by rank, over layouts, lists, columns, documents, ragged ends, merges.
#include "mtraining/kernels/sm90/forward.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "mtraining/kernels/sm90/device_case.h"
#include "mtraining/testing/comparator.h"
#include "mtraining/testing/oracle.h"
#include "mtraining/testing/plain.h"

namespace mtraining::kernels::sm90 {
namespace {

#ifdef MTRAINING_ALL_KERNELS
constexpr int64_t kHeadDims[] = {64, 96, 128, 256};
#else
constexpr int64_t kHeadDims[] = {64, 128};
#endif

/// The largest error of an element over what rounding of the probabilities explains. The largest of a row must not show any: with it, out
/// would not fit lse, and the gradient's differences of dout * v and dout * out would not cancel where one key has all the weight.
double worst_beyond_rounding(const WholeCase& whole, const std::vector<float>& out) {
  const Case& c = whole.c;
  const int64_t S = c.seq_len, H = c.num_q_heads, Hk = c.num_kv_heads, D = c.head_dim;
  const double unit = c.dtype == DType::kBFloat16 ? 0x1p-9 : 0x1p-12;
  double worst = 0;
  std::vector<double> p(S);
  for (int64_t row = 0; row < c.batch * S * H; ++row) {
    const int64_t b = row / (S * H), i = row / H % S, h = row % H;
    double top = -INFINITY, sum = 0, most = 0;
    for (int64_t j = 0; j < S; ++j) {
      p[j] = -INFINITY;
      if (!whole.mask(b, h, i, j)) continue;
      double score = 0;
      for (int64_t d = 0; d < D; ++d)
        score += whole.problem.q[row * D + d] *
                 whole.problem.k[((b * S + j) * Hk + h / (H / Hk)) * D + d];
      p[j] = score / std::sqrt(static_cast<double>(D));
      top = std::max(top, p[j]);
    }
    if (top == -INFINITY) continue;
    std::vector<double> right(D, 0);
    double largest = 0;
    for (int64_t j = 0; j < S; ++j) {
      if (p[j] == -INFINITY) continue;
      p[j] = std::exp(p[j] - top);
      sum += p[j];
      most = std::max(most, p[j]);
      for (int64_t d = 0; d < D; ++d) {
        const double v = whole.problem.v[((b * S + j) * Hk + h / (H / Hk)) * D + d];
        right[d] += p[j] * v;
        largest = std::max(largest, std::fabs(v));
      }
    }
    const double others = 1 - most / sum;
    for (int64_t d = 0; d < D; ++d) {
      // Values differ by up to twice the largest.
      const double allowed = ((4.2 * unit + 4e-4) * others + 4e-6) * largest;
      worst = std::max(worst, std::fabs(out[row * D + d] - right[d] / sum) / allowed);
    }
  }
  return worst;
}

void run_case(const Case& c) {
  SCOPED_TRACE(c.name);
  const WholeCase whole(c);
  const int64_t B = c.batch, H = c.num_q_heads, D = c.head_dim;
  const testing::Solution truth = testing::solve(whole.problem, whole.mask);
  const testing::Solution plain = testing::solve_plain(whole.problem, whole.mask, whole.precision);

  std::vector<float> got_out(B * c.seq_len * H * D, NAN), got_lse(B * H * c.seq_len, NAN);
  for (int rank = 0; rank < c.cp_size; ++rank) {
    const std::unique_ptr<RankCase> made = whole.rank(rank);
    const std::vector<int64_t>& positions = made->positions;
    const int64_t n = static_cast<int64_t>(positions.size());
    const auto run = [&](ForwardParams params, const View& rounded, const View& residual) {
      const View out = params.out;
      const size_t step = c.launches == Launches::kOne ? made->sources.size() : 1;
      for (size_t first = 0; first < made->sources.size(); first += step) {
        params.sources = made->sources.data() + first;
        params.num_sources = static_cast<int>(std::min(step, made->sources.size() - first));
        params.first = first == 0;
        if (first + step >= made->sources.size()) {
          params.rounded = rounded;
          params.residual = residual;
        }
        params.out = needs_out(params) ? out : View{};
        const DeviceMemory workspace(forward_workspace_bytes(params));
        params.workspace = workspace.get();
        params.workspace_bytes = workspace.bytes();
        forward(params);
        check_device(cudaDeviceSynchronize(), "the kernel");
      }
    };
    run(made->params, {}, {});
    const std::vector<float> rank_out = made->out.read<float>(), rank_lse = made->lse.read<float>();
    {
      // The result in 16 bits is that result rounded, to the last bit, and what that loses.
      const int64_t count = B * n * H * D;
      const DeviceMemory state(count * 4), near((count + kGuardRows * D) * 2),
          rest((count + kGuardRows * D) * 2);
      ForwardParams params = made->params;
      params.out.data = state.get();
      const auto view = [&](const DeviceMemory& m) { return View{m.get(), n * H * D, H * D, D}; };
      run(params, view(near), view(rest));
      ASSERT_EQ(std::memcmp(made->lse.read<float>().data(), rank_lse.data(), 4 * rank_lse.size()),
                0);
      const bool half = c.dtype == DType::kFloat16;
      const std::vector<uint16_t> got = near.read<uint16_t>(), lost = rest.read<uint16_t>();
      for (int64_t i = 0; i < static_cast<int64_t>(got.size()); ++i) {
        uint16_t right = 0xFFFF, right_rest = 0xFFFF;
        if (i < count) {
          right = half ? testing::to_fp16(rank_out[i]) : testing::to_bf16(rank_out[i]);
          const float x =
              rank_out[i] - (half ? testing::from_fp16(right) : testing::from_bf16(right));
          right_rest = half ? testing::to_fp16(x) : testing::to_bf16(x);
        }
        ASSERT_EQ(got[i], right) << "rounded, element " << i << " of " << count;
        ASSERT_EQ(lost[i], right_rest) << "residual, element " << i << " of " << count;
      }
      // Without the residual, the same.
      const DeviceMemory alone((count + kGuardRows * D) * 2);
      run(params, view(alone), {});
      ASSERT_EQ(alone.read<uint16_t>(), got);
    }
    for (int64_t i = B * n * H * D; i < static_cast<int64_t>(rank_out.size()); ++i)
      ASSERT_TRUE(std::isnan(rank_out[i]));
    for (int64_t i = B * H * n; i < static_cast<int64_t>(rank_lse.size()); ++i)
      ASSERT_TRUE(std::isnan(rank_lse[i]));
    for (int64_t b = 0; b < B; ++b) {
      for (int64_t t = 0; t < n; ++t) {
        for (int64_t h = 0; h < H; ++h) {
          const float* row = rank_out.data() + ((b * n + t) * H + h) * D;
          const float row_lse = rank_lse[(b * H + h) * n + t];
          if (positions[t] >= c.seq_len) {
            ASSERT_EQ(row_lse, -INFINITY) << "padding row " << t;
            for (int64_t d = 0; d < D; ++d) ASSERT_EQ(row[d], 0.0f);
            continue;
          }
          std::copy_n(row, D, got_out.begin() + ((b * c.seq_len + positions[t]) * H + h) * D);
          got_lse[(b * H + h) * c.seq_len + positions[t]] = row_lse;
        }
      }
    }
  }
  const testing::Verdict out =
      testing::compare(c.name + " out", widened(got_out), truth.out, plain.out, D, whole.precision);
  EXPECT_TRUE(out) << out.text;
  const testing::Verdict lse =
      testing::compare_lse(c.name + " lse", widened(got_lse), truth.lse, {}, whole.precision);
  EXPECT_TRUE(lse) << lse.text;
  if (c.rising_peaks || c.outlier_channel > 0) {
    const double beyond = worst_beyond_rounding(whole, got_out);
    EXPECT_LE(beyond, 1);
    std::printf("%-44s %.2f of what rounding explains\n", c.name.c_str(), beyond);
  }
  std::printf("%-44s out %.2e of %.2e, lse %.2e of %.2e\n", c.name.c_str(), out.worst, out.allowed,
              lse.worst, lse.allowed);
}

TEST(Sm90Forward, OneRankMatchesTheOracleAtEveryRaggedLength) {
  MT_NEEDS_HOPPER();
  for (const int64_t seq_len : {1, 5, 63, 64, 65, 127, 128, 129, 300, 449, 1000}) {
    run_case({.name = concat("contiguous ", seq_len), .seq_len = seq_len, .ragged_memory = true});
    run_case({.name = concat("contiguous, columns ", seq_len),
              .seq_len = seq_len,
              .columns = Columns::kPerStep,
              .ragged_memory = true});
  }
}

TEST(Sm90Forward, DenseMatchesTheOracle) {
  MT_NEEDS_HOPPER();
  run_case({.name = "dense contiguous", .seq_len = 700, .dense = true});
  run_case({.name = "dense zigzag",
            .layout = LayoutKind::kZigzag,
            .seq_len = 700,
            .cp_size = 2,
            .dense = true});
  run_case({.name = "dense striped",
            .layout = LayoutKind::kStriped,
            .seq_len = 700,
            .cp_size = 3,
            .csr = true,
            .dense = true});
}

TEST(Sm90Forward, EveryGroupSizeReadsItsKvHead) {
  MT_NEEDS_HOPPER();
  for (const auto& [heads, kv_heads] :
       {std::pair<int64_t, int64_t>{4, 4}, {8, 1}, {14, 2}, {16, 2}}) {
    run_case({.name = concat("heads ", heads, "/", kv_heads),
              .seq_len = 400,
              .num_q_heads = heads,
              .num_kv_heads = kv_heads,
              .columns = Columns::kPerStep});
  }
}

TEST(Sm90Forward, StripesOverRanksMatchTheOracle) {
  MT_NEEDS_HOPPER();
  for (const int64_t stripe : {64, 128, 192}) {
    for (const int cp_size : {1, 2, 3, 8}) {
      run_case({.name = concat("block_striped ", stripe, " W ", cp_size),
                .layout = LayoutKind::kBlockStriped,
                .seq_len = 1500,
                .stripe = stripe,
                .cp_size = cp_size,
                .columns = Columns::kOnce});
    }
  }
  run_case({.name = "block_striped 128 W 4 of 2 nodes",
            .layout = LayoutKind::kBlockStriped,
            .seq_len = 1111,
            .stripe = 128,
            .cp_size = 4,
            .nodes = 2,
            .columns = Columns::kPerStep});
  run_case({.name = "zigzag W 4",
            .layout = LayoutKind::kZigzag,
            .seq_len = 1111,
            .cp_size = 4,
            .columns = Columns::kOnce});
}

TEST(Sm90Forward, CsrMatchesTheOracle) {
  MT_NEEDS_HOPPER();
  run_case({.name = "csr contiguous", .seq_len = 900, .columns = Columns::kPerStep, .csr = true});
  run_case({.name = "csr block_striped 128 W 2",
            .layout = LayoutKind::kBlockStriped,
            .seq_len = 900,
            .stripe = 128,
            .cp_size = 2,
            .columns = Columns::kOnce,
            .csr = true});
}

TEST(Sm90Forward, LaunchesMerge) {
  MT_NEEDS_HOPPER();
  for (const bool without_diagonal : {false, true}) {
    run_case({.name = concat("merged, without diagonal ", without_diagonal),
              .layout = LayoutKind::kBlockStriped,
              .seq_len = 1000,
              .cp_size = 4,
              .columns = Columns::kOnce,
              .launches = Launches::kOnePerSource,
              .without_diagonal = without_diagonal});
  }
}

TEST(Sm90Forward, DocumentsAreSeparate) {
  MT_NEEDS_HOPPER();
  for (const Documents documents : testing::kAllDocuments) {
    run_case({.name = concat("documents ", static_cast<int>(documents)),
              .layout = LayoutKind::kBlockStriped,
              .seq_len = 700,
              .stripe = 128,
              .cp_size = 2,
              .batch = 2,
              .columns = Columns::kOnce,
              .documents = documents});
  }
}

TEST(Sm90Forward, EmptyRowsAreZeroAndMinusInfinity) {
  MT_NEEDS_HOPPER();
  run_case({.name = "without diagonal 0", .seq_len = 500, .without_diagonal = true});
  run_case({.name = "without diagonal 0, columns",
            .seq_len = 500,
            .columns = Columns::kPerStep,
            .without_diagonal = true});
  run_case({.name = "without diagonal 0, columns, documents",
            .seq_len = 500,
            .columns = Columns::kPerStep,
            .documents = Documents::kMidBlock,
            .without_diagonal = true});
}

TEST(Sm90Forward, OtherTypesAndHeadSizes) {
  MT_NEEDS_HOPPER();
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    for (const int64_t head_dim : kHeadDims) {
      run_case({.name = concat("dtype ", static_cast<int>(dtype), " D ", head_dim),
                .layout = LayoutKind::kBlockStriped,
                .seq_len = 777,
                .stripe = 128,
                .cp_size = 2,
                .batch = 2,
                .num_q_heads = 6,
                .num_kv_heads = 2,
                .head_dim = head_dim,
                .dtype = dtype,
                .columns = Columns::kOnce,
                .documents = Documents::kMidBlock});
    }
  }
}

TEST(Sm90Forward, AKeyWithNearlyAllTheWeightGivesItsValue) {
  MT_NEEDS_HOPPER();
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    for (const int64_t head_dim : kHeadDims) {
      for (const bool csr : {false, true}) {
        run_case({.name = concat("rising peaks, dtype ", static_cast<int>(dtype), " D ", head_dim),
                  .seq_len = 1000,
                  .num_q_heads = 2,
                  .num_kv_heads = 1,
                  .head_dim = head_dim,
                  .dtype = dtype,
                  .columns = csr ? Columns::kPerStep : Columns::kNone,
                  .csr = csr,
                  .dense = !csr,
                  .rising_peaks = true});
      }
    }
    run_case({.name = concat("outlier channels, dtype ", static_cast<int>(dtype)),
              .seq_len = 500,
              .dtype = dtype,
              .columns = Columns::kPerStep,
              .outlier_channel = 20});
  }
}

/// Scores that rise by more than any exponent holds between two blocks of a row, and masked ones.
TEST(Sm90Forward, ScoresMayRiseByAnything) {
  MT_NEEDS_HOPPER();
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    for (const int64_t head_dim : kHeadDims) {
      run_case({.name = concat("scores of +500 and -500, dtype ", static_cast<int>(dtype), " D ",
                               head_dim),
                .seq_len = 400,
                .batch = 2,
                .head_dim = head_dim,
                .dtype = dtype,
                .columns = Columns::kPerStep,
                .documents = Documents::kMidBlock,
                .ragged_memory = true,
                .huge_scores = true});
    }
  }
}

TEST(Sm90Forward, ManySources) {
  MT_NEEDS_HOPPER();
  run_case({.name = "40 sources",
            .layout = LayoutKind::kBlockStriped,
            .seq_len = 3000,
            .cp_size = 40,
            .num_q_heads = 2,
            .num_kv_heads = 1,
            .columns = Columns::kPerStep});
}

}  // namespace
}  // namespace mtraining::kernels::sm90
