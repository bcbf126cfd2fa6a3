// Ring attention over real processes: Gloo gives the bits that loopback gives, and a process that dies ends the others.

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <thread>

#include "mtraining/attention/ring_case.h"
#include "mtraining/base/check.h"
#include "mtraining/comm/c10d.h"
#include "mtraining/testing/process_ranks.h"

namespace mtraining::attention {
namespace {

using layout::LayoutKind;
using mtraining::testing::ProcessRun;
using mtraining::testing::RankProcess;
using mtraining::testing::run_processes;
using testing::Precision;
using testing::RankInputs;
using testing::RankResult;
using testing::ring_options;
using testing::RingProblem;

std::unique_ptr<comm::Transport> connect(const RankProcess& process) {
  return comm::make_c10d({.master_port = process.port,
                          .rank = process.rank,
                          .size = process.size,
                          .timeout = std::chrono::minutes(2)});
}

struct Setting {
  ring::RingKind ring;
  ring::InnerKind inner;
  ColumnMode columns;
  GradientTransport transport;
  Precision precision;
};

TEST(RingAttentionOverGloo, GivesTheBitsOfLoopback) {
  const std::vector<Setting> settings = {
      {ring::RingKind::kHierarchical, ring::InnerKind::kGather, ColumnMode::kOnce,
       GradientTransport::kFloat32, Precision::kFloat32},
      {ring::RingKind::kHierarchical, ring::InnerKind::kRing, ColumnMode::kPerStep,
       GradientTransport::kFloat32, Precision::kBFloat16},
      {ring::RingKind::kFlat, ring::InnerKind::kRing, ColumnMode::kOnce,
       GradientTransport::kBFloat16, Precision::kBFloat16},
      {ring::RingKind::kHierarchical, ring::InnerKind::kGather, ColumnMode::kOnce,
       GradientTransport::kBFloat16, Precision::kBFloat16}};
  const ProcessRun run = run_processes(4, comm::free_port, [&](const RankProcess& process) {
    auto transport = connect(process);
    for (const Setting& setting : settings) {
      const RingProblem problem({.seq_len = 500, .precision = setting.precision});
      RingOptions options = ring_options(2, 2, LayoutKind::kBlockStriped, 64, 500);
      options.ring = setting.ring;
      options.inner = setting.inner;
      options.columns = setting.columns;
      options.gradient_transport = setting.transport;
      options.max_column_rows_per_rank = 10;
      SCOPED_TRACE(testing::to_string(options));
      testing::use_one_thread();
      RankResult over_gloo;
      int64_t gloo_bytes = 0;
      {
        RingContext context(options, *transport);
        over_gloo = run_rank(context, problem);
        gloo_bytes = context.bytes_sent();
      }
      testing::run_ring(
          problem, options,
          [&](RingContext& context, const RankInputs&, const RankResult& over_threads) {
            if (context.cp_rank() != process.rank) return;
            EXPECT_TRUE(at::equal(over_gloo.forward.out, over_threads.forward.out));
            EXPECT_TRUE(at::equal(over_gloo.forward.lse, over_threads.forward.lse));
            EXPECT_TRUE(at::equal(over_gloo.backward.dq, over_threads.backward.dq));
            EXPECT_TRUE(at::equal(over_gloo.backward.dk, over_threads.backward.dk));
            EXPECT_TRUE(at::equal(over_gloo.backward.dv, over_threads.backward.dv));
            EXPECT_EQ(gloo_bytes, context.bytes_sent());
          });
    }
  });
  if (!run.in_child) mtraining::testing::expect_all_passed(run);
}

TEST(RingAttentionOverGloo, AProcessThatDiesInBackwardEndsTheOthers) {
  const RingProblem problem({.seq_len = 500});
  const ProcessRun run = run_processes(4, comm::free_port, [&](const RankProcess& process) {
    auto transport = connect(process);
    testing::use_one_thread();
    try {
      RingContext context(ring_options(2, 2, LayoutKind::kBlockStriped, 64, 500), *transport);
      context.set_observer([&](const StepTiming& step) {
        if (process.rank == 1 && std::string(step.what) == "backward") kill(getpid(), SIGKILL);
      });
      run_rank(context, problem);
      ADD_FAILURE() << "rank " << process.rank << " got through";
    } catch (const ExternalError& e) {
      std::cerr << e.what() << std::endl;
      transport->abort(e.what());
    }
  });
  if (run.in_child) return;
  EXPECT_LT(run.seconds, 30);
  EXPECT_EQ(run.ranks[1].exit_code, 128 + SIGKILL);
  for (int rank : {0, 2, 3})
    EXPECT_EQ(run.ranks[rank].exit_code, 0) << "rank " << rank << ":\n" << run.ranks[rank].output;
}

TEST(RingAttentionOverGloo, ARankWithALongerShardIsNamedBeforeAnyShardMoves) {
  const RingProblem problem({.seq_len = 500});
  const ProcessRun run = run_processes(2, comm::free_port, [&](const RankProcess& process) {
    auto transport = connect(process);
    testing::use_one_thread();
    // One rank believes in another sequence length, so its shard is a stripe longer.
    const RingOptions options =
        ring_options(1, 2, LayoutKind::kBlockStriped, 64, process.rank == 1 ? 513 : 500);
    try {
      RingContext context(options, *transport);
      ADD_FAILURE() << "expected an error";
    } catch (const InvalidArgument& e) {
      EXPECT_NE(std::string(e.what()).find("seq_len: ranks differ"), std::string::npos) << e.what();
    }
  });
  if (!run.in_child) mtraining::testing::expect_all_passed(run);
}

}  // namespace
}  // namespace mtraining::attention
