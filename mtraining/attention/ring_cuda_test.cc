// Rings of any shape on one GPU: ranks are threads with a stream each, over the device loopback.

#include <ATen/core/grad_mode.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "mtraining/attention/autograd.h"
#include "mtraining/attention/device_ring_case.h"
#include "mtraining/attention/ring_call.h"
#include "mtraining/attention/ring_case.h"
#include "mtraining/base/check.h"
#include "mtraining/comm/loopback_device.h"
#include "mtraining/kernels/exchange_cuda/exchange.h"

namespace mtraining::attention {
namespace {

using layout::LayoutKind;
using std::chrono::milliseconds;
using testing::Choice;
using testing::compare_with_truth;
using testing::Documents;
using testing::on_ranks;
using testing::Precision;
using testing::ProblemOptions;
using testing::ring_options;
using testing::RingProblem;
using testing::same_bits;
using testing::Solution;

constexpr auto kFlat = ring::RingKind::kFlat;
constexpr auto kHierarchical = ring::RingKind::kHierarchical;

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

Solution run_ring_on_gpu(const RingProblem& problem, const RingOptions& options,
                         const comm::DeviceLoopbackOptions& links = {}) {
  Solution whole = testing::empty_solution(problem);
  std::mutex mutex;
  on_ranks(
      options,
      [&](RingContext& context, comm::Transport&) {
        const auto inputs = testing::on_device(
            testing::rank_inputs(problem, context.layout(), context.cp_rank()), at::kCUDA);
        const testing::RankResult result = testing::run_rank(context, problem, inputs);
        const std::lock_guard lock(mutex);
        testing::put_rank(result, problem, context.layout(), context.cp_rank(), whole);
      },
      links);
  return whole;
}

struct Shape {
  int nodes, ranks_per_node;
  ring::RingKind ring;
  ring::InnerKind inner = ring::InnerKind::kGather;
  int stride = 1;
};
const std::vector<Shape> kShapes = {
    {1, 1, kFlat},
    {1, 2, kFlat},
    {2, 2, kFlat},
    {2, 2, kHierarchical},
    {2, 2, kHierarchical, ring::InnerKind::kRing},
    {2, 4, kFlat, ring::InnerKind::kGather, 3},
    {2, 4, kHierarchical},
    {2, 4, kHierarchical, ring::InnerKind::kRing},
    {4, 2, kHierarchical},
    {1, 8, kHierarchical},
    {8, 1, kHierarchical},
    {4, 8, kFlat},
    {4, 8, kFlat, ring::InnerKind::kGather, 15},
    {4, 8, kHierarchical},
    {4, 8, kHierarchical, ring::InnerKind::kRing},
};

struct Placement {
  LayoutKind kind;
  int64_t stripe;
};
const std::vector<Placement> kPlacements = {{LayoutKind::kBlockStriped, 64},
                                            {LayoutKind::kBlockStriped, 128},
                                            {LayoutKind::kZigzag, 64},
                                            {LayoutKind::kContiguous, 64}};

struct Columns {
  ColumnMode mode;
  int64_t max_rows;
};
const std::vector<Columns> kColumns = {
    {ColumnMode::kOnce, 16384}, {ColumnMode::kPerStep, 16384}, {ColumnMode::kOnce, 7}};

std::vector<ProblemOptions> problems() {
  using enum Documents;
  using enum Choice;
  const auto make = [](int64_t batch, int64_t n, int64_t h, int64_t hk, int64_t d,
                       Documents documents, Choice choice,
                       Precision precision = Precision::kBFloat16) {
    return ProblemOptions{.batch = batch,
                          .seq_len = n,
                          .num_q_heads = h,
                          .num_kv_heads = hk,
                          .head_dim = d,
                          .precision = precision,
                          .documents = documents,
                          .choice = choice,
                          .seed = static_cast<uint64_t>(n)};
  };
  return {make(1, 1100, 4, 2, 64, kOne, kSparse),
          make(1, 830, 2, 1, 128, kOne, kSparse),
          make(2, 500, 4, 1, 64, kMidBlock, kSparse),
          make(1, 700, 2, 2, 128, kOne, kDense),
          make(1, 640, 4, 2, 64, kOnBlock, kFew),
          make(1, 300, 3, 1, 64, kOne, kEmpty),
          make(1, 500, 2, 1, 128, kEveryToken, kMany, Precision::kFloat16),
          make(2, 450, 4, 2, 64, kMidBlock, kBlocks)};
}

TEST(RingOnGpu, EqualsTheOracleOverEveryRing) {
  // Every problem with every second shape; what else there is goes round.
  const std::vector<ProblemOptions> all = problems();
  size_t turn = 0;
  for (const ProblemOptions& problem_options : all) {
    const RingProblem problem(problem_options);
    for (const Shape& shape : kShapes) {
      if (++turn % 2 == 0) continue;
      const Placement& placement = kPlacements[turn / 2 % kPlacements.size()];
      const Columns& columns = kColumns[turn % kColumns.size()];
      RingOptions options = ring_options(shape.nodes, shape.ranks_per_node, placement.kind,
                                         placement.stripe, problem_options.seq_len);
      options.ring = shape.ring;
      options.inner = shape.inner;
      options.ring_stride = shape.stride;
      options.columns = columns.mode;
      options.max_column_rows_per_rank = columns.max_rows;
      options.prefetch_steps = static_cast<int>(1 + turn % 5 % 3);
      options.launch_shards = static_cast<int>(turn / 2 % 5 % 4);  // 0: chosen
      options.deterministic = turn / 2 % 2 == 0;
      SCOPED_TRACE(to_string(problem_options) + ", " + testing::to_string(options));
      EXPECT_EQ(compare_with_truth(run_ring_on_gpu(problem, options), problem).fault, "");
    }
  }
}

/// Distance from the truth over its length, of a whole tensor. Rows that weights cancel in can be as far off as they are long: dq of
/// dense attention in bf16 has such rows, torch's own too.
double distance(const std::vector<double>& got, const std::vector<double>& truth) {
  double difference = 0, length = 0;
  for (size_t i = 0; i < truth.size(); ++i) {
    difference += (got[i] - truth[i]) * (got[i] - truth[i]);
    length += truth[i] * truth[i];
  }
  return std::isfinite(difference) ? std::sqrt(difference / length)
                                   : std::numeric_limits<double>::infinity();
}
void expect_near_truth(const Solution& got, const RingProblem& problem) {
  const Solution& truth = problem.truth();
  EXPECT_LT(distance(got.out, truth.out), 0.01);
  EXPECT_LT(distance(got.lse, truth.lse), 1e-3);
  EXPECT_LT(distance(got.dq, truth.dq), 0.02);
  EXPECT_LT(distance(got.dk, truth.dk), 0.02);
  EXPECT_LT(distance(got.dv, truth.dv), 0.02);
}

TEST(RingOnGpu, AStaleOrSwappedShardWouldShow) {
  const RingProblem problem({.seq_len = 64 * 8 * 4,
                             .num_q_heads = 2,
                             .num_kv_heads = 1,
                             .precision = Precision::kBFloat16,
                             .choice = Choice::kDense,
                             .scale_by_block = 0.1});
  for (const Shape& shape : kShapes) {
    RingOptions options = ring_options(shape.nodes, shape.ranks_per_node, LayoutKind::kBlockStriped,
                                       64, problem.options().seq_len);
    options.ring = shape.ring;
    options.inner = shape.inner;
    options.ring_stride = shape.stride;
    SCOPED_TRACE(testing::to_string(options));
    // Where links are slow, whoever does not wait for a transfer reads what was there before.
    expect_near_truth(
        run_ring_on_gpu(problem, options,
                        {.current_stream = {}, .inner_bytes_per_s = 1e9, .outer_bytes_per_s = 2e8}),
        problem);
  }
}

TEST(RingOnGpu, RepeatsAreTheSameBits) {
  const RingProblem problem({.batch = 1,
                             .seq_len = 1200,
                             .num_q_heads = 4,
                             .num_kv_heads = 2,
                             .precision = Precision::kBFloat16});
  for (const Shape& shape : {Shape{1, 1, kFlat}, Shape{2, 2, kFlat}, Shape{2, 4, kHierarchical},
                             Shape{2, 4, kHierarchical, ring::InnerKind::kRing}}) {
    for (const ColumnMode columns : {ColumnMode::kOnce, ColumnMode::kPerStep}) {
      RingOptions options =
          ring_options(shape.nodes, shape.ranks_per_node, LayoutKind::kBlockStriped, 128, 1200);
      options.ring = shape.ring;
      options.inner = shape.inner;
      options.columns = columns;
      const Solution first = run_ring_on_gpu(problem, options);
      for (int repeat = 0; repeat < 3; ++repeat)
        EXPECT_TRUE(same_bits(run_ring_on_gpu(problem, options), first))
            << testing::to_string(options);
    }
  }
}

/// One choice, attended by what the device made of it, and again by what the host makes of its copy: the same bits. Returns it.
std::shared_ptr<const index::Index> expect_the_hosts_lists_do_the_same(
    RingContext& context, const testing::RankInputs& in, AttentionCall call) {
  const AttentionOutput one = sparse_ring_attention(context, in.q, in.k, in.v, call);
  call.index = std::make_shared<const index::Index>(*one.index);  // another object: no plan
  const AttentionOutput two = sparse_ring_attention(context, in.q, in.k, in.v, call);
  EXPECT_TRUE(at::equal(one.out, two.out));
  EXPECT_TRUE(at::equal(one.lse, two.lse));
  EXPECT_TRUE(at::equal(one.out_residual, two.out_residual));
  RingContext::State& state = context.state();
  const auto gradients = [&](const AttentionOutput& output) {
    const auto plan = state.plans.find_or_make(output.index, state.layout, state.cp_rank);
    return checked_backward(
        state, *plan, {in.dout, in.q, in.k, in.v, {output.out, output.lse, output.out_residual}}, 0,
        call.document_starts);
  };
  const BackwardResult a = gradients(one), b = gradients(two);
  EXPECT_TRUE(at::equal(a.dq, b.dq));
  EXPECT_TRUE(at::equal(a.dk, b.dk));
  EXPECT_TRUE(at::equal(a.dv, b.dv));
  return one.index;
}

TEST(RingOnGpu, ListsThatTheDeviceMakesAreThoseOfTheHost) {
  const RingProblem problem({.batch = 2, .seq_len = 900, .precision = Precision::kBFloat16});
  for (const Shape& shape : {Shape{1, 1, kFlat}, Shape{1, 3, kFlat}, Shape{2, 2, kHierarchical}}) {
    for (const Placement& placement : kPlacements) {
      for (const std::optional<int64_t> max_columns : {std::optional<int64_t>(), {200}, {0}}) {
        RingOptions options = ring_options(shape.nodes, shape.ranks_per_node, placement.kind,
                                           placement.stripe, problem.options().seq_len);
        options.ring = shape.ring;
        // Exchanged, of the sources, and again.
        options.columns = max_columns ? ColumnMode::kPerStep : ColumnMode::kOnce;
        on_ranks(options, [&](RingContext& context, comm::Transport&) {
          SCOPED_TRACE(testing::to_string(options));
          const at::NoGradGuard no_grad;
          const auto in = testing::on_device(
              testing::rank_inputs(problem, context.layout(), context.cp_rank()), at::kCUDA);
          AttentionCall call;
          call.pattern.vertical_slash.p_vertical = call.pattern.vertical_slash.p_slash = 0.5;
          call.pattern.vertical_slash.dense_threshold = 1;
          call.pattern.vertical_slash.sink_tokens = max_columns == 0 ? 0 : 5;
          call.pattern.vertical_slash.max_columns = max_columns;
          const auto index = expect_the_hosts_lists_do_the_same(context, in, call);
          int64_t columns = 0;
          for (const int32_t count : index->columns.counts) columns += count;
          EXPECT_EQ(columns > 0, max_columns != 0);
        });
      }
    }
  }
}

TEST(RingOnGpu, ListsOfBlocksThatTheDeviceMakesAreThoseOfTheHost) {
  for (const Documents documents : {Documents::kOne, Documents::kMidBlock}) {
    const RingProblem problem(
        {.batch = 2, .seq_len = 900, .precision = Precision::kBFloat16, .documents = documents});
    for (const Shape& shape :
         {Shape{1, 1, kFlat}, Shape{1, 3, kFlat}, Shape{2, 2, kHierarchical}}) {
      for (const Placement& placement : kPlacements) {
        RingOptions options = ring_options(shape.nodes, shape.ranks_per_node, placement.kind,
                                           placement.stripe, problem.options().seq_len);
        options.ring = shape.ring;
        on_ranks(options, [&](RingContext& context, comm::Transport&) {
          SCOPED_TRACE(testing::to_string(options));
          const at::NoGradGuard no_grad;
          const auto in = testing::on_device(
              testing::rank_inputs(problem, context.layout(), context.cp_rank()), at::kCUDA);
          AttentionCall call;
          call.document_starts = in.document_starts;
          call.pattern.kind = pattern::PatternKind::kXAttention;
          call.pattern.xattention.threshold = 0.5;
          EXPECT_TRUE(expect_the_hosts_lists_do_the_same(context, in, call)->has_blocks());
          call.pattern.kind = pattern::PatternKind::kMoba;
          call.pattern.moba = {128, 3};
          EXPECT_TRUE(expect_the_hosts_lists_do_the_same(context, in, call)->has_blocks());
        });
      }
    }
  }
}

TEST(RingOnGpu, KAndVAreUnderWayWhileTheIndexIsChosen) {
  const RingProblem problem({.seq_len = 2048, .precision = Precision::kBFloat16});
  for (const Shape& shape :
       {Shape{1, 2, kHierarchical}, Shape{2, 2, kHierarchical}, Shape{1, 3, kFlat},
        Shape{2, 2, kHierarchical, ring::InnerKind::kRing}}) {
    RingOptions options = ring_options(shape.nodes, shape.ranks_per_node, LayoutKind::kBlockStriped,
                                       128, problem.options().seq_len);
    options.ring = shape.ring;
    options.inner = shape.inner;
    on_ranks(options, [&](RingContext& context, comm::Transport&) {
      SCOPED_TRACE(testing::to_string(options));
      const at::NoGradGuard no_grad;
      const auto in = testing::on_device(
          testing::rank_inputs(problem, context.layout(), context.cp_rank()), at::kCUDA);
      StepTiming index, transfer, launch;
      context.set_observer([&](const StepTiming& timing) {
        const std::string what = timing.what;
        StepTiming* const seen = what == "index"      ? &index
                                 : what == "transfer" ? &transfer
                                 : what == "forward"  ? &launch
                                                      : nullptr;
        if (seen != nullptr && seen->what[0] == '\0') *seen = timing;
      });
      sparse_ring_attention(context, in.q, in.k, in.v, {});
      context.finish_observing();
      ASSERT_EQ(std::string(index.what), "index");
      ASSERT_EQ(std::string(transfer.what), "transfer");
      EXPECT_LE(transfer.begin_us, index.begin_us);
      EXPECT_LE(index.end_us, launch.begin_us);
      EXPECT_NE(transfer.channel.find("kv"), std::string_view::npos) << transfer.channel;
    });
  }
}

/// A transfer whose peer has not come: whoever waits for it waits on the host.
class LateWork : public comm::Work {
 public:
  explicit LateWork(std::vector<Then>& thens) : thens_(thens) {}
  void wait() override { FAIL() << "somebody waited on the host"; }
  void when_enqueued(const Then& then) override { thens_.push_back(then); }

 private:
  std::vector<Then>& thens_;
};

TEST(RingOnGpu, AWatchedTransferKeepsNobodyAndIsTimedWhenItsPeerHasCome) {
  const RingOptions options = ring_options(1, 1, LayoutKind::kBlockStriped, 64, 512);
  on_ranks(options, [&](RingContext& context, comm::Transport&) {
    const at::Device device(at::kCUDA, c10::cuda::current_device());
    std::vector<StepTiming> seen;
    context.set_observer([&](const StepTiming& timing) { seen.push_back(timing); });
    std::vector<comm::Work::Then> thens, never;
    std::vector<comm::WorkPtr> two, dropped;
    for (int i = 0; i < 2; ++i) two.push_back(std::make_unique<LateWork>(thens));
    dropped.push_back(std::make_unique<LateWork>(never));
    context.state().watch_transfer(two, device, "inner kv", 3);
    context.state().watch_transfer(dropped, device, "inner grad", 4);
    context.state().report_stretches(/*wait=*/false);
    EXPECT_TRUE(seen.empty());
    ASSERT_EQ(thens.size(), 2);
    const auto before = c10::cuda::getCurrentCUDAStream();
    int waits = 0;
    std::thread peer([&] {
      std::this_thread::sleep_for(milliseconds(30));
      for (const auto& then : thens) {
        then([&] {
          ++waits;
          EXPECT_NE(c10::cuda::getCurrentCUDAStream().stream(), before.stream());
        });
      }
    });
    peer.join();
    context.finish_observing();
    EXPECT_EQ(waits, 2);
    ASSERT_EQ(seen.size(), 1);  // the other one never came
    EXPECT_EQ(seen[0].channel, "inner kv");
    EXPECT_EQ(seen[0].ring_step, 3);
    EXPECT_GE(seen[0].end_us - seen[0].begin_us, 25000);
    context.set_observer({});
  });
}

TEST(RingOnGpu, DenseAloneIsTorchsAndIsTheOracle) {
  for (const bool deterministic : {true, false}) {
    for (const int64_t seq_len : {300, 512}) {
      for (const int64_t head_dim : {64, 128}) {
        const RingProblem problem({.batch = 2,
                                   .seq_len = seq_len,
                                   .num_q_heads = 4,
                                   .num_kv_heads = 2,
                                   .head_dim = head_dim,
                                   .precision = Precision::kBFloat16,
                                   .choice = Choice::kDense});
        RingOptions options =
            ring_options(1, 1, LayoutKind::kBlockStriped, 128, problem.options().seq_len);
        options.deterministic = deterministic;
        const index::Index dense = index::dense_index(2, 4, seq_len);
        Solution whole = testing::empty_solution(problem);
        on_ranks(options, [&](RingContext& context, comm::Transport&) {
          const auto in = testing::on_device(
              testing::rank_inputs(problem, context.layout(), context.cp_rank()), at::kCUDA);
          const ForwardResult forward = ring_forward(context, in.q, in.k, in.v, dense, 0);
          EXPECT_FALSE(forward.out_residual.defined());  // whose kernels ran
          const BackwardResult backward =
              ring_backward(context, in.dout, in.q, in.k, in.v, forward.out, forward.lse, dense, 0);
          testing::put_rank({forward, backward}, problem, context.layout(), 0, whole);
        });
        SCOPED_TRACE(concat(seq_len, " ", head_dim));
        expect_near_truth(whole, problem);
      }
    }
  }
}

/// Keeps the current stream busy.
void keep_busy(milliseconds time, const at::Tensor& clock) {
  void* stream = c10::cuda::getCurrentCUDAStream().stream();
  auto* at = reinterpret_cast<uint64_t*>(clock.data_ptr<int64_t>());
  kernels::exchange_cuda::take_link(at, at + 1, time.count() * 1000000, stream);
  kernels::exchange_cuda::hold_until(at + 1, stream);
}

TEST(RingOnGpu, TheHostNeverWaitsForTheDevice) {
  for (const Shape& shape : {Shape{1, 1, kFlat}, Shape{2, 2, kFlat}, Shape{2, 2, kHierarchical}}) {
    const RingProblem problem({.seq_len = 1500, .precision = Precision::kBFloat16});
    RingOptions options = ring_options(shape.nodes, shape.ranks_per_node, LayoutKind::kBlockStriped,
                                       64, problem.options().seq_len);
    options.ring = shape.ring;
    on_ranks(options, [&](RingContext& context, comm::Transport& transport) {
      const auto inputs = testing::on_device(
          testing::rank_inputs(problem, context.layout(), context.cp_rank()), at::kCUDA);
      const at::Tensor clock =
          at::zeros({2}, at::TensorOptions().dtype(at::kLong).device(at::kCUDA));
      for (int warm_up = 0; warm_up < 3; ++warm_up) testing::run_rank(context, problem, inputs);
      c10::cuda::getCurrentCUDAStream().synchronize();
      std::vector<int> everyone;
      for (int r = 0; r < transport.size(); ++r) everyone.push_back(r);
      const auto all = transport.open_host("start", everyone);
      all->barrier();
      keep_busy(milliseconds(1500), clock);
      const auto start = std::chrono::steady_clock::now();
      for (int layer = 0; layer < 2; ++layer) testing::run_rank(context, problem, inputs);
      EXPECT_LT(seconds_since(start), 1.0) << testing::to_string(options);
      all->barrier();
    });
  }
}

TEST(RingOnGpu, MemoryDoesNotGrowOverLayersAndSteps) {
  const RingProblem problem({.seq_len = 1500, .precision = Precision::kBFloat16});
  RingOptions options = ring_options(2, 2, LayoutKind::kBlockStriped, 64, 1500);
  std::mutex mutex;
  const auto allocated = [] {
    return c10::cuda::CUDACachingAllocator::getDeviceStats(c10::cuda::current_device())
        .allocated_bytes[0]
        .current;
  };
  on_ranks(options, [&](RingContext& context, comm::Transport& transport) {
    const auto inputs = testing::on_device(
        testing::rank_inputs(problem, context.layout(), context.cp_rank()), at::kCUDA);
    std::vector<int> everyone = {0, 1, 2, 3};
    const auto all = transport.open_host("steps", everyone);
    std::vector<int64_t> buffers, device;
    for (int step = 0; step < 6; ++step) {
      testing::run_rank(context, problem, inputs);
      c10::cuda::getCurrentCUDAStream().synchronize();
      all->barrier();
      buffers.push_back(context.buffer_bytes());
      device.push_back(allocated());
      all->barrier();
    }
    EXPECT_EQ(std::set<int64_t>(buffers.begin(), buffers.end()).size(), 1u);
    EXPECT_EQ(device.back(), device[1]);
  });
}

TEST(RingOnGpu, StepsAreTimedByTheDevice) {
  const RingProblem problem({.seq_len = 1500, .precision = Precision::kBFloat16});
  const RingOptions options = ring_options(2, 2, LayoutKind::kBlockStriped, 64, 1500);
  std::mutex mutex;
  // 20 ms an outer hop, 2 ms a gather: launches take far less.
  const int64_t shard = 2 * 384 * 2 * 64 * 2;
  on_ranks(options,
           [&](RingContext& context, comm::Transport&) {
             const auto inputs = testing::on_device(
                 testing::rank_inputs(problem, context.layout(), context.cp_rank()), at::kCUDA);
             testing::run_rank(context, problem, inputs);
             std::map<std::string, int64_t> us, count;
             std::set<int64_t> tags;
             int64_t pairs = 0, last_end = 0;
             context.set_observer([&](const StepTiming& timing) {
               us[timing.what] += timing.end_us - timing.begin_us;
               ++count[timing.what];
               tags.insert(timing.tag);
               pairs += timing.pairs;
               EXPECT_LE(timing.begin_us, timing.end_us);
               if (std::string(timing.what) == "transfer") return;  // beside the rank's stream
               EXPECT_GE(timing.end_us, last_end - 100);
               last_end = timing.end_us;
             });
             context.set_tag(7);
             testing::run_rank(context, problem, inputs);
             context.finish_observing();
             EXPECT_EQ(tags, std::set<int64_t>{7});
             EXPECT_EQ(count["forward"], 2);
             EXPECT_EQ(count["backward"], 2);
             EXPECT_GT(pairs, 0);
             EXPECT_GT(us["wait"], 20000);  // the first outer hop at least
             EXPECT_LT(us["forward"] + us["backward"], us["wait"]);
             context.set_observer({});
           },
           {.current_stream = {},
            .inner_bytes_per_s = static_cast<double>(shard) / 2e-3,
            .outer_bytes_per_s = static_cast<double>(shard) / 20e-3});
}

}  // namespace
}  // namespace mtraining::attention
