// Cases of the Hopper backward: both modes rank by rank against the float64 oracle, dq, dk, dv apart, between guards, again and again.
//
// In:   a Case. Out: expectations; gradients put together from all ranks. Next: backward_test.cc.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "mtraining/kernels/sm90/backward.h"
#include "mtraining/kernels/sm90/device_case.h"
#include "mtraining/kernels/sm90/forward.h"
#include "mtraining/testing/comparator.h"
#include "mtraining/testing/oracle.h"
#include "mtraining/testing/plain.h"
#include "mtraining/testing/shards.h"

namespace mtraining::kernels::sm90 {

inline constexpr uint16_t kNanBits = 0x7FFF;  // in both 16-bit types

/// What the deterministic mode gave, put together; dout as the kernels saw it.
struct Gradients {
  std::vector<double> dq, dk, dv, dout;
  std::vector<double> default_dq;  // of the default mode
};

/// Gradients begin at 1: the kernels add. Guard rows before and behind them.
inline DeviceMemory ones(int64_t rows, int64_t width) {
  std::vector<float> values((rows + 2 * kGuardRows) * width, NAN);
  std::fill_n(values.begin() + kGuardRows * width, rows * width, 1.0f);
  return DeviceMemory(values);
}
inline float* inside_guard(const DeviceMemory& memory, int64_t width) {
  return memory.get<float>() + kGuardRows * width;
}

/// Less the 1 of the beginning; fails where the guard was written.
inline std::vector<float> read_gradient(const DeviceMemory& memory, int64_t count,
                                        const char* name) {
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

inline double distance(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
  return std::sqrt(sum);
}

struct Solved {
  testing::Solution truth, plain;
};

/// Layouts, lists and launches do not change the problem: solved once for neighbouring cases that differ in nothing else.
inline const Solved& solved(const Case& c, const testing::Problem& problem,
                            const testing::Mask& mask) {
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
inline void expect_rounded_dq(const Case& c, BackwardParams g, std::vector<KeySource> sources) {
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
    // Zeros may differ in their sign: a sum begins with +0. Reductions take what is below the least normal float32 for 0.
    const auto wide = [&](uint16_t bits) {
      return c.dtype == DType::kFloat16 ? 0.0f : std::bit_cast<float>(uint32_t{bits} << 16);
    };
    const bool tiny = c.dtype == DType::kBFloat16 && i < count &&
                      std::abs(wide(got[i])) <= FLT_MIN && std::abs(wide(right)) <= FLT_MIN;
    ASSERT_TRUE(got[i] == right || ((got[i] | right) & 0x7FFF) == 0 || tiny)
        << "dq_rounded, element " << i << " of " << count << ": bits " << std::hex << got[i]
        << ", expected " << right;
  }
}

/// Runs the backward again into cleared memory, beside products of matrices (a forward) and copies on another stream. Deterministic:
/// compares bits; else: the order of sums may differ, nothing else.
inline void repeat(BackwardParams g, ForwardParams f,
                   const std::vector<const DeviceMemory*>& gradients, int count) {
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
    // With no SM to be left alone, a deterministic launch's second walk begins while its first is at work.
    g.sm_margin = i % 2 == 0 ? 0 : i * 7 % 130;
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

inline Gradients run_case(const Case& c) {
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
      // is beyond the comparator's cap. There: no worse than plain over all rows, and little worse in the worst one. Nowhere else.
      const bool beyond_plain = c.outlier_channel > 0 || c.cp_size > 32;
      if (beyond_plain && !verdict.ok && std::isfinite(verdict.worst)) {
        const testing::Verdict of_low = testing::compare(title, low, right, {}, D, precision);
        EXPECT_GT(2 * of_low.worst, verdict.allowed) << verdict.text;
        EXPECT_LE(verdict.worst, 1.25 * of_low.worst) << verdict.text;
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

}  // namespace mtraining::kernels::sm90
