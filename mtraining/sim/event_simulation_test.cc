#include "mtraining/sim/event_simulation.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "mtraining/base/check.h"
#include "mtraining/sim/latency_model.h"
#include "mtraining/sim/pattern_shapes.h"

namespace mtraining::sim {
namespace {

using ring::InnerKind;
using ring::RingKind;
using ring::ScheduleOptions;
using topology::Topology;

std::vector<ring::Schedule> schedules(const ScheduleOptions& options, bool backward) {
  std::vector<ring::Schedule> all;
  for (int rank = 0; rank < options.topology.cp_size(); ++rank) {
    all.push_back(backward ? ring::backward_schedule(options, rank)
                           : ring::forward_schedule(options, rank));
  }
  return all;
}

int launches(const ring::Schedule& schedule) {
  return static_cast<int>(
      std::count_if(schedule.ops.begin(), schedule.ops.end(),
                    [](const ring::Op& op) { return op.kind == ring::OpKind::kLaunch; }));
}

CostModel by_latency(double intra_us, double inter_us) {
  return {.inner = {.latency_us = intra_us, .bytes_per_us = 0},
          .outer = {.latency_us = inter_us, .bytes_per_us = 0}};
}

double uniform_total_us(const ScheduleOptions& options, double shard_us, const CostModel& cost,
                        bool backward = false) {
  const auto ranks = schedules(options, backward);
  const int count = launches(ranks[0]);
  const double launch_us = shard_us * options.topology.cp_size() / count;
  const std::vector<std::vector<double>> times(ranks.size(), std::vector<double>(count, launch_us));
  return simulate(ranks, options.topology, {.launch_us = times}, cost).total_us;
}

TEST(EventSimulation, FlatRingArrivesAtTheClosedForm) {
  for (const Topology& topology :
       {Topology{4, 8}, Topology{2, 2}, Topology{2, 3}, Topology{1, 4}, Topology{4, 1}}) {
    for (double inter : {20.0, 510.0, 980.0}) {
      for (double compute : {100.0, 510.0, 2000.0}) {
        const StepTimes times{.compute_ms = compute, .intra_ms = 130, .inter_ms = inter};
        // Where a hop inside a node is the slowest, only a ring of such hops is bound by it
        // throughout.
        if (topology.nodes > 1 && inter < 130) continue;
        EXPECT_NEAR(uniform_total_us({.topology = topology, .ring = RingKind::kFlat}, compute,
                                     by_latency(130, inter)),
                    flat_ring_ms(topology, times), 1e-6)
            << topology::to_string(topology) << " " << inter << " " << compute;
      }
    }
  }
}

TEST(EventSimulation, PaperNumbersComeOutOfTheSchedules) {
  const CostModel cost = by_latency(130, 980);
  const ScheduleOptions flat{.topology = {4, 8}, .ring = RingKind::kFlat};
  EXPECT_NEAR(uniform_total_us(flat, 510, cost) / 1000 + 1.13 + 2.08, 34.10, 0.005);
  const ScheduleOptions inner_ring{
      .topology = {4, 8}, .ring = RingKind::kHierarchical, .inner = InnerKind::kRing};
  EXPECT_NEAR(uniform_total_us(inner_ring, 510, cost) / 1000 + 1.13 + 2.08, 19.53, 0.005);
  // The first gather has nothing to hide under; the others do.
  const ScheduleOptions gather{
      .topology = {4, 8}, .ring = RingKind::kHierarchical, .inner = InnerKind::kGather};
  EXPECT_NEAR(uniform_total_us(gather, 510, cost), 32 * 510.0 + 7 * 130, 1e-6);
}

TEST(EventSimulation, OuterTransferHidesUnderTheNodeOnBothRingsAndBothDirections) {
  for (InnerKind inner : {InnerKind::kRing, InnerKind::kGather}) {
    const ScheduleOptions options{
        .topology = {4, 8}, .ring = RingKind::kHierarchical, .inner = inner};
    const double hidden = uniform_total_us(options, 510, by_latency(0, 0));
    EXPECT_NEAR(uniform_total_us(options, 510, by_latency(0, 4000)), hidden, 1e-6);
    EXPECT_GT(uniform_total_us(options, 510, by_latency(0, 5000)), hidden + 2000);
    // Backward: (dk, dv) of the last outer step go home with nothing to hide under.
    const double backward = uniform_total_us(options, 510, by_latency(0, 0), true);
    EXPECT_NEAR(uniform_total_us(options, 510, by_latency(0, 4000), true), backward + 4000, 1e-6);
  }
}

TEST(EventSimulation, NothingIsFasterThanComputationAndNothingSlowerThanOneAfterTheOther) {
  for (const Topology& topology :
       {Topology{1, 1}, Topology{2, 3}, Topology{3, 3}, Topology{4, 8}}) {
    for (RingKind kind : {RingKind::kFlat, RingKind::kHierarchical}) {
      for (InnerKind inner : {InnerKind::kGather, InnerKind::kRing}) {
        for (int prefetch : {1, 2, 3}) {
          for (bool backward : {false, true}) {
            const ScheduleOptions options{
                .topology = topology, .ring = kind, .inner = inner, .prefetch_steps = prefetch};
            const auto ranks = schedules(options, backward);
            std::vector<std::vector<double>> times(ranks.size());
            double largest = 0, all = 0;
            for (size_t r = 0; r < ranks.size(); ++r) {
              double sum = 0;
              for (int t = 0; t < launches(ranks[r]); ++t) {
                times[r].push_back(10.0 + static_cast<double>((r * 7 + t * 13) % 11));
                sum += times[r].back();
              }
              largest = std::max(largest, sum);
              all += sum;
            }
            const Timeline timeline =
                simulate(ranks, topology, {.launch_us = times}, by_latency(3, 30));
            double serial = all;
            for (const auto& schedule : ranks)
              serial += 100.0 * static_cast<double>(schedule.ops.size());
            EXPECT_GE(timeline.total_us, largest);
            EXPECT_LE(timeline.total_us, serial);
            for (size_t r = 0; r < ranks.size(); ++r) {
              for (const ring::Op& op : ranks[r].ops) {
                const OpTime& time = timeline.ops[r][op.id];
                EXPECT_GE(time.end_us, time.begin_us);
                for (int earlier : op.after)
                  EXPECT_GE(time.begin_us, timeline.ops[r][earlier].end_us);
              }
            }
          }
        }
      }
    }
  }
}

TEST(EventSimulation, PrefetchAbsorbsAlternatingLoads) {
  // Every second launch is heavy. With one transfer ahead the light launches wait for hops that
  // could have run before.
  const ScheduleOptions near{.topology = {1, 8}, .ring = RingKind::kFlat, .prefetch_steps = 1};
  ScheduleOptions far = near;
  far.prefetch_steps = 3;
  std::vector<std::vector<double>> times(8);
  for (auto& rank : times) {
    for (int t = 0; t < 8; ++t) rank.push_back(t % 2 == 0 ? 100 : 10);
  }
  const CostModel cost = by_latency(50, 0);
  const double one =
      simulate(schedules(near, false), near.topology, {.launch_us = times}, cost).total_us;
  const double three =
      simulate(schedules(far, false), far.topology, {.launch_us = times}, cost).total_us;
  EXPECT_LT(three, one - 50);
}

TEST(EventSimulation, RingStrideEvensOutABandInBothDirections) {
  // A near band lies on few consecutive steps of a ring of neighbours: heavy steps follow each other
  // and hops cannot hide under the light ones that follow. With stride 15 they alternate.
  const Topology topology{1, 32};
  const index::Index index = to_index(make_pattern("local", 131072, 16));
  const layout::Layout layout({.seq_len = 131072, .cp_size = 32});
  const PairTable pairs = count_pairs(index, layout);
  const auto total_us = [&](int stride, bool backward) {
    const ScheduleOptions options{
        .topology = topology, .ring = RingKind::kFlat, .ring_stride = stride};
    const StepLoads loads = step_loads(pairs, options, ColumnCost::kOnce);
    const double world = 32;
    const double shard_us = 500;
    const LaunchCost launch{.us_per_pair =
                                shard_us * world * world /
                                static_cast<double>(measure(loads, options).total_pairs) *
                                (backward ? 2.5 : 1)};
    const CostModel cost{
        .inner = {.latency_us = 0, .bytes_per_us = 1}, .kv_bytes = 450, .grad_bytes = 900};
    return simulate(schedules(options, backward), topology, compute_times(loads, launch, backward),
                    cost)
        .total_us;
  };
  const double ideal_us = 32 * 500;
  EXPECT_GT(total_us(1, false), 1.2 * ideal_us);
  EXPECT_LT(total_us(15, false), 1.1 * ideal_us);
  EXPECT_GT(total_us(1, true), 1.2 * 2.5 * ideal_us);
  EXPECT_LT(total_us(15, true), 1.1 * 2.5 * ideal_us);
}

TEST(EventSimulation, BytesAndLatencyMakeAHop) {
  CostModel cost;
  cost.kv_bytes = 16 << 20;
  EXPECT_DOUBLE_EQ(kv_hop_us({.latency_us = 5, .bytes_per_us = 25e3}, cost), 5 + (16 << 20) / 25e3);
}

TEST(EventSimulation, ListsThatDoNotMatchAreAnErrorOfOurs) {
  const ScheduleOptions options{.topology = {1, 2}, .ring = RingKind::kFlat};
  auto ranks = schedules(options, false);
  std::erase_if(ranks[1].ops,
                [](const ring::Op& op) { return op.kind == ring::OpKind::kExchange; });
  for (size_t i = 0; i < ranks[1].ops.size(); ++i) {
    ranks[1].ops[i].id = static_cast<int>(i);
    ranks[1].ops[i].after.clear();
  }
  const ComputeTimes times{.launch_us = {{1, 1}, {1, 1}}};
  EXPECT_THROW(simulate(ranks, options.topology, times, by_latency(1, 1)), InternalError);
  EXPECT_THROW(simulate(ranks, {1, 3}, times, by_latency(1, 1)), InvalidArgument);
  const ComputeTimes few{.launch_us = {{1}, {1}}};
  EXPECT_THROW(simulate(schedules(options, false), options.topology, few, by_latency(1, 1)),
               InvalidArgument);
  const ComputeTimes columns{.launch_us = {{1, 1}, {1, 1}}, .columns_us = {1}};
  EXPECT_THROW(simulate(schedules(options, false), options.topology, columns, by_latency(1, 1)),
               InvalidArgument);
}

TEST(EventSimulation, ColumnsFollowAForwardRingAndPrecedeABackwardOne) {
  const StepLoads loads{
      .outer_step = {0, 0}, .by_step = {{10, 20}, {30, 5}}, .columns_once = {7, 9}};
  const ScheduleOptions options{.topology = {1, 2}, .ring = RingKind::kFlat};
  const LaunchCost cost{.us_per_pair = 2, .fixed_us = 1};
  const ComputeTimes forward = compute_times(loads, cost, false);
  EXPECT_EQ(forward.launch_us, (std::vector<std::vector<double>>{{21, 41}, {61, 11}}));
  EXPECT_EQ(forward.columns_us, (std::vector<double>{15, 19}));
  const Timeline after = simulate(schedules(options, false), options.topology, forward, {});
  EXPECT_DOUBLE_EQ(after.columns[1].begin_us, 72);
  EXPECT_DOUBLE_EQ(after.total_us, 91);
  EXPECT_DOUBLE_EQ(after.compute_us[0], 77);
  const Timeline before =
      simulate(schedules(options, true), options.topology, compute_times(loads, cost, true), {});
  EXPECT_DOUBLE_EQ(before.columns[0].end_us, 15);
  EXPECT_DOUBLE_EQ(before.total_us, 91);
}

}  // namespace
}  // namespace mtraining::sim
