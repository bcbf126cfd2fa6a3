// The Hopper backward against the float64 oracle, rank by rank: dq, dk, dv apart, both modes, over the forward's table of cases.
#include "mtraining/kernels/sm90/backward.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "mtraining/kernels/sm90/device_case.h"
#include "mtraining/kernels/sm90/forward.h"
#include "mtraining/testing/comparator.h"
#include "mtraining/testing/oracle.h"
#include "mtraining/testing/plain.h"
#include "mtraining/testing/shards.h"

namespace mtraining::kernels::sm90 {
namespace {

constexpr uint16_t kNanBits = 0x7FFF;  // in both 16-bit types

/// What the deterministic mode gave, put together; dout as the kernels saw it.
struct Gradients {
  std::vector<double> dq, dk, dv, dout;
  std::vector<double> default_dq;  // of the default mode
};

/// Gradients begin at 1: the kernels add. Guard rows before and behind them.
DeviceMemory ones(int64_t rows, int64_t width) {
  std::vector<float> values((rows + 2 * kGuardRows) * width, NAN);
  std::fill_n(values.begin() + kGuardRows * width, rows * width, 1.0f);
  return DeviceMemory(values);
}
float* inside_guard(const DeviceMemory& memory, int64_t width) {
  return memory.get<float>() + kGuardRows * width;
}

/// Less the 1 of the beginning; fails where the guard was written.
std::vector<float> read_gradient(const DeviceMemory& memory, int64_t count, const char* name) {
  const std::vector<float> all = memory.read<float>();
  const int64_t size = static_cast<int64_t>(all.size()), guard = (size - count) / 2;
  for (int64_t i = 0; i < size; ++i) {
    if (i >= guard && i < guard + count) continue;
    EXPECT_TRUE(std::isnan(all[i])) << name << ": guard element " << i - guard << " of " << count;
  }
  std::vector<float> values(all.begin() + guard, all.begin() + guard + count);
  for (float& x : values) x -= 1;
  return values;
}

/// A workspace with guards before and behind it.
class GuardedWorkspace {
 public:
  explicit GuardedWorkspace(BackwardParams& params)
      : memory_(backward_workspace_bytes(params) + 2 * kGuard) {
    params.workspace = memory_.get<char>() + kGuard;
    params.workspace_bytes = memory_.bytes() - 2 * kGuard;
  }
  void expect_guards() const {
    const std::vector<uint8_t> all = memory_.read<uint8_t>();
    const auto written = [](uint8_t byte) { return byte != 0xFF; };
    EXPECT_EQ(std::count_if(all.begin(), all.begin() + kGuard, written), 0)
        << "before the workspace";
    EXPECT_EQ(std::count_if(all.end() - kGuard, all.end(), written), 0) << "behind the workspace";
  }

 private:
  static constexpr int64_t kGuard = 4096;
  DeviceMemory memory_;
};

double distance(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
  return std::sqrt(sum);
}

struct Solved {
  testing::Solution truth, plain;
};

/// Layouts, lists and launches do not change the problem: solved once for neighbouring cases that differ in nothing else.
const Solved& solved(const Case& c, const testing::Problem& problem, const testing::Mask& mask) {
  static std::string last;
  static Solved kept;
  const std::string key =
      concat(c.seq_len, " ", c.batch, " ", c.num_q_heads, " ", c.num_kv_heads, " ", c.head_dim, " ",
             static_cast<int>(c.dtype), " ", c.columns != Columns::kNone, " ",
             static_cast<int>(c.documents), " ", c.dense, " ", c.without_diagonal, " ",
             c.num_columns, " ", c.outlier_channel, " ", c.huge_scores);
  if (key != last && c.seq_len <= 4096) {
    kept.truth = testing::solve(problem, mask);
    kept.plain =
        testing::solve_plain(problem, mask, precision_of(c.dtype), testing::Delta::kFromOut);
    last = key;
  }
  return kept;
}

/// dq given in dtype is dq rounded, to the last bit, in every row, and no row more. g: deterministic, over all sources of the rank.
void expect_rounded_dq(const Case& c, BackwardParams g, std::vector<KeySource> sources) {
  const int64_t n = g.num_queries, H = c.num_q_heads, D = c.head_dim, count = c.batch * n * H * D;
  std::vector<DeviceMemory> elsewhere;  // gradients of keys, which nobody looks at
  for (KeySource& source : sources) {
    const int64_t rows = source.num_keys * (source.dk.stride_batch == 0 ? 1 : c.batch);
    for (View* view : {&source.dk, &source.dv}) {
      elsewhere.emplace_back(rows * view->stride_token * 4 + 4 * D);
      view->data = elsewhere.back().get();
    }
  }
  g.sources = sources.data();
  g.num_sources = static_cast<int>(sources.size());
  const DeviceMemory workspace(backward_workspace_bytes(g));
  g.workspace = workspace.get();
  g.workspace_bytes = workspace.bytes();
  const DeviceMemory dq(std::vector<float>(count, 0)), rounded((count + kGuardRows * D) * 2);
  g.dq = {dq.get(), n * H * D, H * D, D};
  backward(g);
  g.dq = {};
  g.dq_rounded = {rounded.get(), n * H * D, H * D, D};
  backward(g);
  check_device(cudaDeviceSynchronize(), "the backward");
  const std::vector<float> wanted = dq.read<float>();
  const std::vector<uint16_t> got = rounded.read<uint16_t>();
  for (int64_t i = 0; i < static_cast<int64_t>(got.size()); ++i) {
    const uint16_t right = i >= count                   ? 0xFFFF
                           : c.dtype == DType::kFloat16 ? testing::to_fp16(wanted[i])
                                                        : testing::to_bf16(wanted[i]);
    // Zeros may differ in their sign: a sum begins with +0.
    ASSERT_TRUE(got[i] == right || ((got[i] | right) & 0x7FFF) == 0)
        << "dq_rounded, element " << i << " of " << count;
  }
}

/// Runs the backward again into cleared memory, beside products of matrices (a forward) and copies on another stream. Deterministic:
/// compares bits; else: the order of sums may differ, nothing else.
void repeat(BackwardParams g, ForwardParams f, const std::vector<const DeviceMemory*>& gradients,
            int count) {
  std::vector<std::vector<float>> first;
  std::vector<DeviceMemory> start;
  for (const DeviceMemory* memory : gradients) {
    first.push_back(memory->read<float>());
    std::vector<float> begin = first.back();
    for (float& x : begin)
      if (!std::isnan(x)) x = 1;
    start.emplace_back(begin);
  }
  cudaStream_t other;
  check_device(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), "cudaStreamCreate");
  const DeviceMemory busy(int64_t{64} << 20);
  const int64_t rows = f.batch * f.num_queries * f.num_q_heads;
  const DeviceMemory out(rows * f.head_dim * 4), lse(rows * 4),
      forward_workspace(forward_workspace_bytes(f));
  f.out.data = out.get();
  f.lse = lse.get();
  f.rounded = f.residual = {};
  f.workspace = forward_workspace.get();
  f.stream = other;
  GuardedWorkspace workspace(g);
  for (int i = 0; i < count; ++i) {
    for (size_t n = 0; n < gradients.size(); ++n) {
      check_device(cudaMemcpy(gradients[n]->get(), start[n].get(), start[n].bytes(),
                              cudaMemcpyDeviceToDevice),
                   "cudaMemcpy");
    }
    if (i % 3 == 1)
      check_device(cudaMemsetAsync(busy.get(), i, busy.bytes(), other), "cudaMemsetAsync");
    f.sm_margin = i * 11 % 100;
    for (int launch = 0; launch < i % 4; ++launch) forward(f);
    g.sm_margin = i * 7 % 130;
    backward(g);
    check_device(cudaDeviceSynchronize(), "the backward");
    for (size_t n = 0; n < gradients.size(); ++n) {
      const std::vector<float> got = gradients[n]->read<float>();
      if (g.deterministic) {
        ASSERT_EQ(std::memcmp(got.data(), first[n].data(), got.size() * sizeof(float)), 0)
            << "repeat " << i << ", gradient " << n;
        continue;
      }
      double apart = 0, norm = 0;
      for (size_t x = 0; x < got.size(); ++x) {
        const float a = first[n][x], b = got[x];
        ASSERT_EQ(std::isnan(a), std::isnan(b))
            << "repeat " << i << ", gradient " << n << " at " << x;
        if (std::isnan(a)) continue;
        apart = std::max(apart, std::abs(static_cast<double>(a) - b));
        norm = std::max(norm, std::abs(a - 1.0));
      }
      ASSERT_LE(apart, 1e-5 * norm + 1e-6) << "repeat " << i << ", gradient " << n;
    }
  }
  workspace.expect_guards();
  cudaStreamDestroy(other);
}

Gradients run_case(const Case& c) {
  SCOPED_TRACE(c.name);
  const WholeCase whole(c);
  const int64_t B = c.batch, H = c.num_q_heads, Hk = c.num_kv_heads, D = c.head_dim;
  const Precision precision = whole.precision;
  const testing::Problem& problem = whole.problem;
  const bool solvable = c.seq_len <= 4096;  // else the modes are held against each other
  const Solved& right = solved(c, problem, whole.mask);
  const testing::Solution &truth = right.truth, &plain = right.plain;

  Gradients result;
  for (const bool deterministic : {false, true}) {
    Gradients got;
    got.dq.assign(problem.q.size(), NAN);
    got.dk.assign(problem.k.size(), 0);
    got.dv.assign(problem.k.size(), 0);
    std::vector<DeviceMemory> dk, dv, gathered_dk, gathered_dv;
    for (int rank = 0; rank < c.cp_size; ++rank) {
      const int64_t rows = static_cast<int64_t>(rows_of(c, whole.layout, rank).size()) * B;
      dk.push_back(ones(rows, Hk * D));
      dv.push_back(ones(rows, Hk * D));
    }
    for (const GatheredColumns& slice : whole.gathered) {
      gathered_dk.push_back(ones(static_cast<int64_t>(slice.owner.size()), D));
      gathered_dv.push_back(ones(static_cast<int64_t>(slice.owner.size()), D));
    }
    for (int rank = 0; rank < c.cp_size; ++rank) {
      const std::unique_ptr<RankCase> made = whole.rank(rank);
      const std::vector<int64_t>& positions = made->positions;
      const int64_t n = static_cast<int64_t>(positions.size());
      std::vector<KeySource>& sources = made->sources;
      for (size_t s = 0; s < sources.size(); ++s) {
        if (s < dk.size()) {
          sources[s].dk = {inside_guard(dk[s], Hk * D), sources[s].num_keys * Hk * D, Hk * D, D};
          sources[s].dv = {inside_guard(dv[s], Hk * D), sources[s].num_keys * Hk * D, Hk * D, D};
        } else {
          sources[s].dk = {inside_guard(gathered_dk[s - dk.size()], D), 0, D, 0};
          sources[s].dv = {inside_guard(gathered_dv[s - dk.size()], D), 0, D, 0};
        }
      }
      ForwardParams f = made->params;
      const DeviceMemory rounded(B * n * H * D * 2), residual(B * n * H * D * 2);
      f.rounded = {rounded.get(), n * H * D, H * D, D};
      f.residual = {residual.get(), n * H * D, H * D, D};
      const DeviceMemory forward_workspace(forward_workspace_bytes(f));
      f.workspace = forward_workspace.get();
      f.workspace_bytes = forward_workspace.bytes();
      forward(f);
      check_device(cudaDeviceSynchronize(), "the forward");

      // What was saved for an empty row, and its dout, must not matter.
      std::vector<uint16_t> near = rounded.read<uint16_t>(), rest = residual.read<uint16_t>();
      const std::vector<float> row_lse = made->lse.read<float>();
      std::vector<double> row_dout =
          testing::take_rows<double>(problem.dout, B, c.seq_len, positions, NAN);
      for (int64_t r = 0; r < B * n * H; ++r) {
        const int64_t b = r / H / n, t = r / H % n, h = r % H;
        if (row_lse[(b * H + h) * n + t] != -INFINITY) continue;
        std::fill_n(near.begin() + r * D, D, kNanBits);
        std::fill_n(rest.begin() + r * D, D, kNanBits);
        std::fill_n(row_dout.begin() + r * D, D, NAN);
      }
      const DeviceMemory saved(near), saved_rest(rest);
      const DeviceMemory dout(testing::pack(precision, row_dout));
      const DeviceMemory row_delta(B * H * n * 4), dq = ones(B * n, H * D);
      BackwardParams g;
      static_cast<AttentionParams&>(g) = f;
      g.dout = {dout.get(), n * H * D, H * D, D};
      g.lse = made->lse.get();
      g.delta = row_delta.get();
      g.dq = {inside_guard(dq, H * D), n * H * D, H * D, D};
      g.deterministic = deterministic;
      delta(g, {{saved.get(), n * H * D, H * D, D}, {saved_rest.get(), n * H * D, H * D, D}},
            row_delta.get());
      const size_t step = c.launches == Launches::kOne ? sources.size() : 1;
      for (size_t first = 0; first < sources.size(); first += step) {
        g.sources = sources.data() + first;
        g.num_sources = static_cast<int>(std::min(step, sources.size() - first));
        const GuardedWorkspace workspace(g);
        backward(g);
        check_device(cudaDeviceSynchronize(), "the backward");
        workspace.expect_guards();
      }
      if (deterministic && sources.size() <= 32) expect_rounded_dq(c, g, sources);
      if (c.repeats > 0) {
        EXPECT_EQ(c.cp_size, 1);
        repeat(g, f, {&dq, &dk[0], &dv[0]}, c.repeats);
      }
      const std::vector<float> rank_dq = read_gradient(dq, B * n * H * D, "dq");
      for (int64_t b = 0; b < B; ++b) {
        for (int64_t t = 0; t < n; ++t) {
          const float* row = rank_dq.data() + (b * n + t) * H * D;
          if (positions[t] >= c.seq_len) {
            for (int64_t x = 0; x < H * D; ++x)
              EXPECT_EQ(row[x], 0.0f) << "dq of padding row " << t;
          } else {
            std::copy_n(row, H * D, got.dq.begin() + (b * c.seq_len + positions[t]) * H * D);
          }
        }
      }
    }
    for (int rank = 0; rank < c.cp_size; ++rank) {
      const std::vector<int64_t> positions = rows_of(c, whole.layout, rank);
      const int64_t n = static_cast<int64_t>(positions.size());
      const std::vector<float> rank_dk = read_gradient(dk[rank], B * n * Hk * D, "dk"),
                               rank_dv = read_gradient(dv[rank], B * n * Hk * D, "dv");
      for (int64_t r = 0; r < B * n; ++r) {
        for (int64_t x = 0; x < Hk * D; ++x) {
          const float a = rank_dk[r * Hk * D + x], b = rank_dv[r * Hk * D + x];
          if (positions[r % n] >= c.seq_len) {
            EXPECT_TRUE(a == 0 && b == 0) << "dk, dv of padding row " << r % n;
          } else {
            got.dk[(r / n * c.seq_len + positions[r % n]) * Hk * D + x] += a;
            got.dv[(r / n * c.seq_len + positions[r % n]) * Hk * D + x] += b;
          }
        }
      }
    }
    for (size_t s = 0; s < whole.gathered.size(); ++s) {
      const int64_t rows = static_cast<int64_t>(whole.gathered[s].owner.size());
      const std::vector<float> slice_dk = read_gradient(gathered_dk[s], rows * D, "gathered dk"),
                               slice_dv = read_gradient(gathered_dv[s], rows * D, "gathered dv");
      for (int64_t i = 0; i < rows * D; ++i) {
        const index::PackedRow& owner = whole.gathered[s].owner[i / D];
        if (owner.batch < 0) {
          EXPECT_TRUE(slice_dk[i] == 0 && slice_dv[i] == 0) << "gradient of a padding row";
          continue;
        }
        const int64_t at =
            ((owner.batch * c.seq_len + whole.gathered[s].position[i / D]) * Hk + owner.kv_head) *
                D +
            i % D;
        got.dk[at] += slice_dk[i];
        got.dv[at] += slice_dv[i];
      }
    }
    if (!solvable) {
      if (deterministic) {
        for (const auto& [name, a, b] : {std::tuple{"dq", &got.dq, &result.dq},
                                         {"dk", &got.dk, &result.dk},
                                         {"dv", &got.dv, &result.dv}}) {
          const std::vector<double> zeros(a->size(), 0.0);
          EXPECT_GT(distance(*a, zeros), 0) << name;
          EXPECT_LT(distance(*a, *b), 2e-3 * distance(*a, zeros)) << name;
        }
      }
      result = std::move(got);
      continue;
    }
    const auto expect = [&](const char* name, const std::vector<double>& values,
                            const std::vector<double>& right, const std::vector<double>& low) {
      const std::string title = concat(c.name, deterministic ? ", deterministic, " : ", ", name);
      const testing::Verdict verdict = testing::compare(title, values, right, low, D, precision);
      // Where keys are large and one has nearly all of a row's weight, delta's rounding is not cancelled, and a plain computation itself
      // is beyond the comparator's cap. There: no worse than plain, in the worst row and over all rows. Nowhere else.
      const bool beyond_plain = c.outlier_channel > 0 || c.cp_size > 32;
      if (beyond_plain && !verdict.ok && std::isfinite(verdict.worst)) {
        const testing::Verdict of_low = testing::compare(title, low, right, {}, D, precision);
        EXPECT_GT(2 * of_low.worst, verdict.allowed) << verdict.text;
        EXPECT_LE(verdict.worst, 1.1 * of_low.worst) << verdict.text;
        EXPECT_LE(distance(values, right), distance(low, right)) << verdict.text;
        return concat(name, " ", verdict.worst, " where plain has ", of_low.worst);
      }
      EXPECT_TRUE(verdict) << verdict.text;
      return concat(name, " ", verdict.worst, " of ", verdict.allowed);
    };
    const std::string line = concat(expect("dq", got.dq, truth.dq, plain.dq), ", ",
                                    expect("dk", got.dk, truth.dk, plain.dk), ", ",
                                    expect("dv", got.dv, truth.dv, plain.dv));
    std::printf("%-44s%s %s\n", c.name.c_str(), deterministic ? " det" : "    ", line.c_str());
    if (deterministic) got.default_dq = std::move(result.dq);
    result = std::move(got);
  }
  result.dout = problem.dout;
  return result;
}

TEST(Sm90Backward, OneRankMatchesTheOracleAtEveryRaggedLength) {
  MT_NEEDS_HOPPER();
  for (const int64_t seq_len : {1, 5, 63, 64, 65, 127, 128, 129, 300, 449, 1000}) {
    run_case({.name = concat("contiguous ", seq_len), .seq_len = seq_len, .ragged_memory = true});
    run_case({.name = concat("contiguous, columns ", seq_len),
              .seq_len = seq_len,
              .columns = Columns::kPerStep,
              .ragged_memory = true});
  }
}

TEST(Sm90Backward, DenseMatchesTheOracle) {
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

TEST(Sm90Backward, EveryGroupSizeReadsItsKvHead) {
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

TEST(Sm90Backward, StripesOverRanksMatchTheOracle) {
  MT_NEEDS_HOPPER();
  for (const int64_t stripe : {64, 128, 192}) {
    for (const int cp_size : {1, 2, 3, 8}) {
      run_case({.name = concat("block_striped ", stripe, " W ", cp_size),
                .layout = LayoutKind::kBlockStriped,
                .seq_len = 1100,
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

TEST(Sm90Backward, CsrMatchesTheOracle) {
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

TEST(Sm90Backward, LaunchesAddUp) {
  MT_NEEDS_HOPPER();
  for (const bool without_diagonal : {false, true}) {
    run_case({.name = concat("one launch a source, without diagonal ", without_diagonal),
              .layout = LayoutKind::kBlockStriped,
              .seq_len = 1000,
              .cp_size = 4,
              .columns = Columns::kOnce,
              .launches = Launches::kOnePerSource,
              .without_diagonal = without_diagonal});
  }
}

TEST(Sm90Backward, DocumentsAreSeparate) {
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

TEST(Sm90Backward, EmptyRowsHaveNoGradient) {
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

TEST(Sm90Backward, OtherTypesAndHeadSizes) {
  MT_NEEDS_HOPPER();
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    for (const int64_t head_dim : {64, 128}) {
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

TEST(Sm90Backward, ManySources) {
  MT_NEEDS_HOPPER();
  run_case({.name = "40 sources",
            .layout = LayoutKind::kBlockStriped,
            .seq_len = 3000,
            .cp_size = 40,
            .num_q_heads = 2,
            .num_kv_heads = 1,
            .columns = Columns::kPerStep});
}

TEST(Sm90Backward, OutlierChannels) {
  MT_NEEDS_HOPPER();
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    for (const int64_t head_dim : {64, 128}) {
      run_case(
          {.name = concat("outlier channels, dtype ", static_cast<int>(dtype), " D ", head_dim),
           .seq_len = 500,
           .head_dim = head_dim,
           .dtype = dtype,
           .columns = Columns::kPerStep,
           .outlier_channel = 20});
    }
  }
}

TEST(Sm90Backward, HugeScoresOnMaskedLanesLeaveNoTrace) {
  MT_NEEDS_HOPPER();
  for (const int64_t head_dim : {64, 128}) {
    for (const int64_t seq_len : {70, 400}) {
      run_case({.name = concat("masked scores of +500, ", seq_len, " D ", head_dim),
                .seq_len = seq_len,
                .batch = 2,
                .head_dim = head_dim,
                .columns = Columns::kPerStep,
                .documents = Documents::kMidBlock,
                .ragged_memory = true,
                .huge_scores = true});
    }
  }
}

/// Beyond 128 query blocks the default mode cuts a column tile's queries into several items, the deterministic one does not.
TEST(Sm90Backward, BothModesAgreeOnLongSequences) {
  MT_NEEDS_HOPPER();
  run_case({.name = "long",
            .seq_len = 17000,
            .num_q_heads = 2,
            .num_kv_heads = 1,
            .columns = Columns::kPerStep,
            .num_columns = 300});
}

/// Five hundred times each, beside other work: the deterministic mode to the bit, the default but for the order of its sums.
TEST(Sm90Backward, RepeatsAreEqualBesideOtherWork) {
  MT_NEEDS_HOPPER();
  for (const int64_t head_dim : {64, 128}) {
    run_case({.name = concat("repeated, D ", head_dim),
              .seq_len = 700,
              .batch = 2,
              .num_q_heads = 6,
              .head_dim = head_dim,
              .columns = Columns::kPerStep,
              .documents = Documents::kMidBlock,
              .num_columns = 100,
              .repeats = 500});
  }
}

/// B = S = H = 1: out is v, so dq and dk are 0 exactly and dv is dout.
TEST(Sm90Backward, ASingleKeyHasNoScoreGradient) {
  MT_NEEDS_HOPPER();
  for (const double outliers : {0.0, 20.0}) {
    for (const int64_t head_dim : {64, 128}) {
      const Gradients got = run_case({.name = concat("a single key, D ", head_dim),
                                      .seq_len = 300,
                                      .num_q_heads = 1,
                                      .num_kv_heads = 1,
                                      .head_dim = head_dim,
                                      .documents = Documents::kEveryToken,
                                      .outlier_channel = outliers});
      for (const double x : got.dq) ASSERT_EQ(x, 0);
      for (const double x : got.default_dq) ASSERT_EQ(x, 0);
      for (const double x : got.dk) ASSERT_EQ(x, 0);
      for (size_t i = 0; i < got.dv.size(); ++i)
        ASSERT_NEAR(got.dv[i], got.dout[i], 1e-6) << i;  // the sum began at 1
    }
  }
}

/// Heads of which a column is all that many rows see: in tiles where nothing else hides keys, too.
TEST(Sm90Backward, ALoneColumnHasNoScoreGradient) {
  MT_NEEDS_HOPPER();
  const Case c{.name = "a lone column",
               .seq_len = 900,
               .num_q_heads = 16,
               .columns = Columns::kPerStep,
               .without_diagonal = true,
               .num_columns = 1};
  const Choice choice = choose(c);
  const testing::Mask mask =
      testing::vertical_slash_mask(choice.diagonals, choice.columns, c.num_q_heads, {}, c.seq_len);
  const Gradients got = run_case(c);
  int64_t in_other_blocks = 0;
  for (int64_t h = 0; h < c.num_q_heads; ++h) {
    for (int64_t i = 0; i < c.seq_len; ++i) {
      int64_t keys = 0, key = 0;
      for (int64_t j = 0; j <= i; ++j) {
        if (!mask(0, h, i, j)) continue;
        ++keys;
        key = j;
      }
      if (keys != 1) continue;
      if (key / 64 < i / 64) ++in_other_blocks;
      for (int64_t d = 0; d < c.head_dim; ++d) {
        const int64_t at = (i * c.num_q_heads + h) * c.head_dim + d;
        ASSERT_EQ(got.dq[at], 0) << "head " << h << ", row " << i;
        ASSERT_EQ(got.default_dq[at], 0) << "head " << h << ", row " << i;
      }
    }
  }
  EXPECT_GT(in_other_blocks, 64);
}

TEST(Sm90Backward, RefusesWhatItCannotDo) {
  const auto message = [](BackwardParams params, int64_t dout_stride_token, bool transposed) {
    alignas(256) static char memory[256];
    KeySource source;
    const int64_t begin = 0;
    source.num_keys = params.num_queries;
    source.k = source.v = {memory, 0, params.head_dim, 0};
    source.dk = {memory, 2, params.head_dim, 2};
    source.dv = {memory, 2, params.head_dim, 2};
    source.block_starts = reinterpret_cast<const int32_t*>(memory);
    source.blocks.kind = BlockListKind::kCsr;
    source.blocks.row_begin = &begin;
    if (transposed) source.blocks.key_row_begin = &begin;
    params.sources = &source;
    params.num_sources = 1;
    params.q = {memory, 0, params.head_dim, 0};
    params.dout = {memory, 0, dout_stride_token, 0};
    params.q_block_starts = reinterpret_cast<const int32_t*>(memory);
    params.lse = params.delta = memory;
    params.dq = {memory, 2, params.head_dim, 2};
    params.workspace = memory;  // never reached
    params.workspace_bytes = int64_t{1} << 40;
    try {
      backward(params);
    } catch (const std::exception& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  const auto expect = [](const std::string& got, const std::string& part) {
    EXPECT_NE(got.find(part), std::string::npos) << got;
  };
  BackwardParams params;
  params.batch = params.num_q_heads = params.num_kv_heads = 1;
  params.num_queries = params.seq_len = 64;
  params.head_dim = 128;
  params.softmax_scale = 1;
  params.dtype = DType::kFloat32;
  expect(message(params, 128, true), "expected bf16 or fp16 with head_dim 64 or 128");
  params.dtype = DType::kBFloat16;
  params.head_dim = 96;
  expect(message(params, 96, true), "head_dim 96");
  params.head_dim = 128;
  expect(message(params, 128, false), "CSR lists need their transpose");
  if (!has_hopper()) return;  // the last check asks the driver
  expect(message(params, 0, true), "dout: tokens expanded with stride 0 are not supported");
}

}  // namespace
}  // namespace mtraining::kernels::sm90
