// Forward, backward and delta of the sm_80 kernels against the float64 oracle, swept over sizes, layouts, lists, memory orders and
// types; both modes of the backward.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <string>
#include <thread>
#include <vector>

#include "mtraining/kernels/device/device_mirror.h"
#include "mtraining/kernels/ref/launch_case.h"
#include "mtraining/kernels/sm80/backward.h"
#include "mtraining/kernels/sm80/forward.h"
#include "mtraining/testing/comparator.h"
#include "mtraining/testing/gpu.h"
#include "mtraining/testing/oracle.h"
#include "mtraining/testing/plain.h"

namespace mtraining::kernels::sm80 {
namespace {

using device::DeviceMirror;
using kernels::testing::Backend;
using kernels::testing::Columns;
using kernels::testing::LaunchCase;
using kernels::testing::LaunchOptions;
using kernels::testing::Memory;
using kernels::testing::MemoryRange;
using layout::LayoutKind;
using mtraining::testing::Documents;
using mtraining::testing::Solution;

#define MT_NEEDS_DEVICE()                             \
  if (mtraining::testing::gpu_major_capability() < 8) \
  GTEST_SKIP() << "needs a device of compute capability 8.0 or newer"

class DeviceBackend : public Backend {
 public:
  void forward(const ForwardParams& params, std::span<const MemoryRange> memory) override {
    ForwardParams p = params;
    p.workspace_bytes = forward_workspace_bytes(p);
    const DeviceMirror mirror(memory, p.workspace_bytes);
    mirror.translate(p, sources_);
    p.out = mirror.at(p.out);
    p.rounded = mirror.at(p.rounded);
    p.residual = mirror.at(p.residual);
    p.lse = mirror.at(static_cast<char*>(p.lse));
    sm80::forward(p);
    mirror.download();
  }
  void backward(const BackwardParams& params, std::span<const MemoryRange> memory) override {
    BackwardParams p = params;
    p.workspace_bytes = backward_workspace_bytes(p);
    const DeviceMirror mirror(memory, p.workspace_bytes);
    translate(mirror, p);
    sm80::backward(p);
    mirror.download();
  }
  void delta(const BackwardParams& params, const RoundedOut& out, void* delta,
             std::span<const MemoryRange> memory) override {
    BackwardParams p = params;
    const DeviceMirror mirror(memory, 0);
    translate(mirror, p);
    sm80::delta(p, {mirror.at(out.rounded), mirror.at(out.residual)},
                mirror.at(static_cast<char*>(delta)));
    mirror.download();
  }
  bool rounds_dq(const BackwardParams& params) const override { return sm80::rounds_dq(params); }
  bool needs_out(const ForwardParams& params) const override { return sm80::needs_out(params); }

 protected:
  void translate(const DeviceMirror& mirror, BackwardParams& p) {
    mirror.translate(p, sources_);
    p.dout = mirror.at(p.dout);
    p.dq = mirror.at(p.dq);
    p.dq_rounded = mirror.at(p.dq_rounded);
    p.lse = mirror.at(static_cast<const char*>(p.lse));
    p.delta = mirror.at(static_cast<const char*>(p.delta));
  }
  std::vector<KeySource> sources_;
};

Solution run(LaunchOptions options, bool deterministic, std::string* broken_guard = nullptr) {
  options.deterministic = deterministic;
  LaunchCase launch(options);
  DeviceBackend backend;
  const Solution got = launch.run(backend);
  if (broken_guard != nullptr) *broken_guard = launch.broken_guard();
  return got;
}

void expect_equals_oracle(const LaunchOptions& options) {
  SCOPED_TRACE(to_string(options));
  const LaunchCase launch(options);
  const Solution truth = mtraining::testing::solve(launch.problem(), launch.mask());
  const auto precision = kernels::testing::precision_of(options.dtype);
  const Solution plain = mtraining::testing::solve_plain(launch.problem(), launch.mask(), precision,
                                                         mtraining::testing::Delta::kFromOut);
  for (const bool deterministic : {true, false}) {
    SCOPED_TRACE(deterministic ? "deterministic" : "default");
    std::string broken_guard;
    const Solution got = run(options, deterministic, &broken_guard);
    EXPECT_EQ(broken_guard, "");
    const auto expect = [&](const char* name, const std::vector<double>& a,
                            const std::vector<double>& b, const std::vector<double>& c) {
      const auto verdict = mtraining::testing::compare(name, a, b, c, options.head_dim, precision);
      EXPECT_TRUE(verdict.ok) << verdict.text;
    };
    expect("out", got.out, truth.out, plain.out);
    expect("dq", got.dq, truth.dq, plain.dq);
    expect("dk", got.dk, truth.dk, plain.dk);
    expect("dv", got.dv, truth.dv, plain.dv);
    const auto lse = mtraining::testing::compare_lse("lse", got.lse, truth.lse, {}, precision);
    EXPECT_TRUE(lse.ok) << lse.text;
  }
}

/// Several cases at a time: oracles take nearly all of the time.
void expect_equal_oracles(const std::vector<LaunchOptions>& cases) {
  std::atomic<size_t> next{0};
  const auto work = [&] {
    for (size_t i; (i = next++) < cases.size();) {
      try {
        expect_equals_oracle(cases[i]);
      } catch (const std::exception& error) {
        ADD_FAILURE() << to_string(cases[i]) << ": " << error.what();
      }
    }
  };
  std::vector<std::thread> threads(std::clamp(std::thread::hardware_concurrency(), 1u, 8u));
  for (std::thread& thread : threads) thread = std::thread(work);
  for (std::thread& thread : threads) thread.join();
}

LaunchOptions options_of(int64_t seq_len, LayoutKind kind = LayoutKind::kContiguous,
                         int cp_size = 1, int64_t stripe = 64) {
  LaunchOptions options;
  options.dtype = DType::kBFloat16;
  options.head_dim = 128;
  options.layout = {.kind = kind, .seq_len = seq_len, .cp_size = cp_size, .stripe = stripe};
  return options;
}

TEST(Sm80Attention, EqualsTheOracleForEveryLength) {
  MT_NEEDS_DEVICE();
  std::vector<LaunchOptions> cases;
  for (const int64_t n : {1, 5, 63, 64, 65, 127, 128, 129, 300, 449, 700}) {
    for (const bool csr : {false, true}) {
      LaunchOptions options = options_of(n);
      options.csr = csr;
      options.unequal_heads = n > 128;
      options.seed = static_cast<uint64_t>(n);
      cases.push_back(options);
    }
  }
  expect_equal_oracles(cases);
}

TEST(Sm80Attention, EqualsTheOracleForEveryHeadCount) {
  MT_NEEDS_DEVICE();
  std::vector<LaunchOptions> cases;
  for (const auto& [heads, kv_heads] :
       {std::pair<int64_t, int64_t>{4, 4}, {2, 1}, {8, 2}, {14, 2}, {8, 1}, {28, 4}, {16, 2}}) {
    LaunchOptions options = options_of(257);
    options.num_q_heads = heads;
    options.num_kv_heads = kv_heads;
    options.columns = heads % 4 == 0 ? Columns::kPerStep : Columns::kGathered;
    cases.push_back(options);
  }
  expect_equal_oracles(cases);
}

TEST(Sm80Attention, EqualsTheOracleForEveryHeadDimAndType) {
  MT_NEEDS_DEVICE();
  std::vector<LaunchOptions> cases;
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    for (const int64_t d : {8, 24, 64, 80, 96, 128, 136, 192, 256}) {
      LaunchOptions options = options_of(200, LayoutKind::kBlockStriped, 2);
      options.head_dim = d;
      options.dtype = dtype;
      options.columns = d % 16 == 0 ? Columns::kPerStep : Columns::kGathered;
      options.documents = d == 64 || d == 256 ? Documents::kMidBlock : Documents::kOne;
      cases.push_back(options);
    }
  }
  expect_equal_oracles(cases);
}

TEST(Sm80Attention, EqualsTheOracleForEveryMemoryOrder) {
  MT_NEEDS_DEVICE();
  std::vector<LaunchOptions> cases;
  for (const Memory memory : {Memory::kContiguous, Memory::kHeadMajor, Memory::kSlice}) {
    for (const int64_t misalign : {0, 1, 4}) {
      LaunchOptions options = options_of(150, LayoutKind::kBlockStriped, 2);
      options.batch = 2;
      options.head_dim = misalign == 1 ? 64 : 128;
      options.memory = memory;
      options.misalign = misalign;
      options.sm_margin = 100;
      cases.push_back(options);
      options.columns = Columns::kGathered;
      options.expanded_dout = true;
      cases.push_back(options);
    }
  }
  expect_equal_oracles(cases);
}

TEST(Sm80Attention, EqualsTheOracleForEveryLayout) {
  MT_NEEDS_DEVICE();
  std::vector<LaunchOptions> cases;
  struct Shape {
    LayoutKind kind;
    int cp_size;
    int64_t stripe;
  };
  for (const Shape& shape :
       {Shape{LayoutKind::kContiguous, 3, 64}, Shape{LayoutKind::kZigzag, 2, 64},
        Shape{LayoutKind::kZigzag, 4, 64}, Shape{LayoutKind::kBlockStriped, 2, 64},
        Shape{LayoutKind::kBlockStriped, 8, 64}, Shape{LayoutKind::kBlockStriped, 3, 128},
        Shape{LayoutKind::kBlockStriped, 2, 192}}) {
    for (const bool one_launch : {true, false}) {
      LaunchOptions options = options_of(600, shape.kind, shape.cp_size, shape.stripe);
      options.num_q_heads = 4;
      options.num_kv_heads = 2;
      options.unequal_heads = true;
      options.one_launch = one_launch;
      options.columns = one_launch ? Columns::kGathered : Columns::kPerStep;
      options.csr = !one_launch && shape.stripe == 128;
      cases.push_back(options);
    }
  }
  // More sources than one launch takes.
  LaunchOptions options = options_of(2100, LayoutKind::kBlockStriped, 33);
  options.num_q_heads = 2;
  options.num_kv_heads = 1;
  options.head_dim = 64;
  cases.push_back(options);
  expect_equal_oracles(cases);
}

TEST(Sm80Attention, EqualsTheOracleWhereNeighbouringTokensAreStriped) {
  MT_NEEDS_DEVICE();
  std::vector<LaunchOptions> cases;
  for (const int64_t n : {1, 100, 500}) {
    for (const Documents documents : {Documents::kOne, Documents::kMidBlock}) {
      LaunchOptions options = options_of(n, LayoutKind::kStriped, 3);
      options.chosen_diagonals = 1;
      options.chosen_columns = 0;
      options.documents = documents;
      cases.push_back(options);
    }
  }
  expect_equal_oracles(cases);
}

TEST(Sm80Attention, EqualsTheOracleForEveryKindOfDocuments) {
  MT_NEEDS_DEVICE();
  std::vector<LaunchOptions> cases;
  for (const Documents documents : mtraining::testing::kAllDocuments) {
    for (const double diagonals : {0.3, 1.0}) {
      LaunchOptions options = options_of(400, LayoutKind::kBlockStriped, 2, 128);
      options.batch = 2;
      options.documents = documents;
      options.chosen_diagonals = diagonals;
      options.columns = diagonals < 1 ? Columns::kPerStep : Columns::kGathered;
      cases.push_back(options);
    }
  }
  expect_equal_oracles(cases);
}

TEST(Sm80Attention, EqualsTheOracleForEmptyFullAndColumnOnlyLists) {
  MT_NEEDS_DEVICE();
  std::vector<LaunchOptions> cases;
  for (const double diagonals : {-1.0, 0.0, 0.2, 1.0}) {
    for (const double columns : {0.0, 0.02, 1.0}) {
      LaunchOptions options = options_of(300, LayoutKind::kBlockStriped, 2);
      options.chosen_diagonals = diagonals;
      options.chosen_columns = columns;
      options.columns = Columns::kGathered;
      cases.push_back(options);
      options.columns = Columns::kPerStep;
      options.one_launch = false;
      cases.push_back(options);
    }
  }
  expect_equal_oracles(cases);
}

TEST(Sm80Attention, EqualsTheOracleForOutlierChannelsAndHugeHiddenScores) {
  MT_NEEDS_DEVICE();
  std::vector<LaunchOptions> cases;
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    LaunchOptions options = options_of(500);
    options.dtype = dtype;
    options.outlier_channel = 20;
    cases.push_back(options);
    // Scores of +500 and -500 on pairs of different documents, which do not see each other.
    options = options_of(300);
    options.dtype = dtype;
    options.documents = Documents::kMidBlock;
    options.huge_hidden_scores = true;
    for (const int64_t d : {64, 128, 256}) {
      options.head_dim = d;
      cases.push_back(options);
    }
  }
  expect_equal_oracles(cases);
}

// Every token a document; blocks of the diagonal alone, of which the first row sees itself alone.
TEST(Sm80Attention, ARowOfOneKeyHasNoScoreGradient) {
  MT_NEEDS_DEVICE();
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    for (const int64_t d : {16, 64, 96, 128, 256}) {
      for (const bool alone : {true, false}) {
        LaunchOptions options = options_of(200);
        options.dtype = dtype;
        options.head_dim = d;
        options.num_q_heads = options.num_kv_heads = 1;
        options.chosen_diagonals = options.chosen_columns = 0;
        options.documents = alone ? Documents::kEveryToken : Documents::kOne;
        options.outlier_channel = 20;
        const std::vector<double> dout = LaunchCase(options).problem().dout;
        for (const bool deterministic : {true, false}) {
          SCOPED_TRACE(to_string(options) + (deterministic ? ", deterministic" : ""));
          const Solution got = run(options, deterministic);
          for (size_t i = 0; i < got.dq.size(); ++i) {
            if (alone || static_cast<int64_t>(i) / d % 64 == 0) {
              ASSERT_EQ(got.dq[i], 0) << i;
            }
            if (!alone) continue;
            ASSERT_EQ(got.dk[i], 0) << i;
            ASSERT_NEAR(got.dv[i], dout[i], 1e-6) << i;
          }
        }
      }
    }
  }
}

/// Runs each backward many times beside other work, and looks whether any bit of memory differs.
class RepeatingBackend : public DeviceBackend {
 public:
  explicit RepeatingBackend(int repeats) : repeats_(repeats) {}
  void backward(const BackwardParams& params, std::span<const MemoryRange> memory) override {
    cudaStream_t other;
    ASSERT_EQ(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), cudaSuccess);
    void* busy = nullptr;
    ASSERT_EQ(cudaMalloc(&busy, kBusyBytes), cudaSuccess);
    BackwardParams p = params;
    p.workspace_bytes = backward_workspace_bytes(p);
    const DeviceMirror mirror(memory, p.workspace_bytes);
    translate(mirror, p);
    std::vector<char> first;
    for (int repeat = 0; repeat < repeats_; ++repeat) {
      p.sm_margin = 7 * (repeat % 16);
      mirror.upload();
      for (int i = 0; i < repeat % 4; ++i) cudaMemsetAsync(busy, i, kBusyBytes, other);
      sm80::backward(p);
      std::vector<char> bytes = mirror.read();
      if (repeat == 0) first.swap(bytes);
      ASSERT_TRUE(repeat == 0 || bytes == first) << "repeat " << repeat;
    }
    cudaFree(busy);
    cudaStreamDestroy(other);
    mirror.download();
  }

 private:
  static constexpr int64_t kBusyBytes = 64 << 20;
  int repeats_;
};

// Several chunks of query blocks, heads and tiles take turns on the same rows.
TEST(Sm80Attention, TheDeterministicBackwardGivesTheSameBits) {
  MT_NEEDS_DEVICE();
  for (const Columns columns : {Columns::kPerStep, Columns::kGathered}) {
    LaunchOptions options = options_of(700);
    options.num_q_heads = 8;
    options.num_kv_heads = 1;
    options.unequal_heads = true;
    options.columns = columns;
    LaunchCase launch(options);
    RepeatingBackend backend(500);
    launch.run(backend);
    EXPECT_EQ(launch.broken_guard(), "");
  }
}

}  // namespace
}  // namespace mtraining::kernels::sm80
