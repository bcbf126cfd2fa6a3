#include "mtraining/ring/schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <set>

#include "mtraining/base/check.h"
#include "mtraining/ring/symbolic_run.h"

namespace mtraining::ring {
namespace {

using topology::Topology;

constexpr Topology kTopologies[] = {{1, 1}, {1, 2}, {2, 1}, {1, 4}, {2, 2}, {4, 1},
                                    {2, 3}, {2, 4}, {3, 3}, {5, 2}, {4, 8}, {8, 16}};
constexpr InnerKind kInnerKinds[] = {InnerKind::kGather, InnerKind::kRing};

std::string describe(const ScheduleOptions& options, bool backward) {
  return concat(to_string(options.ring), " ", to_string(options.inner), " ",
                topology::to_string(options.topology), " stride ", options.ring_stride,
                " prefetch ", options.prefetch_steps, " shards ", options.launch_shards,
                backward ? " backward" : " forward");
}

/// Every ring, inner kind, prefetch and (up to 9 ranks) stride over the topologies; both
/// directions.
template <typename Check>
void sweep(const Check& check, int max_ranks = 128) {
  for (const Topology& topology : kTopologies) {
    const int world = topology.cp_size();
    if (world > max_ranks) continue;
    std::vector<ScheduleOptions> all;
    for (int prefetch : {1, 2, 3}) {
      for (InnerKind inner : kInnerKinds) {
        all.push_back({.topology = topology,
                       .ring = RingKind::kHierarchical,
                       .inner = inner,
                       .prefetch_steps = prefetch});
        if (inner == InnerKind::kGather && topology.ranks_per_node > 1) continue;
        for (int shards : {2, 5}) {
          all.push_back(all.back());
          all.back().launch_shards = shards;
        }
      }
      for (int stride = 1; stride <= world; ++stride) {
        if (std::gcd(stride, world) != 1 || (world > 9 && stride != 1 && stride != 15)) continue;
        all.push_back({.topology = topology,
                       .ring = RingKind::kFlat,
                       .ring_stride = stride,
                       .prefetch_steps = prefetch});
        for (int shards : {3, world + 1}) {
          if (stride != 1 && shards > world) continue;
          all.push_back(all.back());
          all.back().launch_shards = shards;
        }
      }
    }
    for (const ScheduleOptions& options : all) {
      for (bool backward : {false, true}) {
        SCOPED_TRACE(describe(options, backward));
        check(options, backward);
        if (::testing::Test::HasFailure()) return;
      }
    }
  }
}

/// One launch takes all shards, not the own one by itself.
bool takes_all(const ScheduleOptions& options) {
  return options.launch_shards >= options.topology.cp_size() &&
         (options.ring == RingKind::kFlat || options.topology.ranks_per_node == 1);
}
/// Launches of one ring of `size` ranks: the own shard's, and so many that each takes launch_shards.
int launches_of(int size, const ScheduleOptions& options) {
  if (takes_all(options)) return 1;
  return 1 + (size - 1 + options.launch_shards - 1) / options.launch_shards;
}

int count(const Schedule& schedule, OpKind kind, Channel channel) {
  return static_cast<int>(
      std::count_if(schedule.ops.begin(), schedule.ops.end(),
                    [&](const Op& op) { return op.kind == kind && op.channel == channel; }));
}

TEST(Schedule, EveryShardIsAttendedOnceAndEveryGradientComesHomeComplete) {
  sweep([](const ScheduleOptions& options, bool backward) {
    EXPECT_EQ(verify(make_job(options, backward), options.topology.cp_size() > 32 ? 0 : 3), "");
  });
}

TEST(Schedule, HopsAreExactlyThoseOfTheRing) {
  sweep([](const ScheduleOptions& options, bool backward) {
    const Topology& topology = options.topology;
    const int world = topology.cp_size(), nodes = topology.nodes, ranks = topology.ranks_per_node;
    for (int rank : {0, world / 2, world - 1}) {
      const Schedule schedule =
          backward ? backward_schedule(options, rank) : forward_schedule(options, rank);
      const auto hops = [&](Channel channel) {
        return count(schedule, OpKind::kExchange, channel);
      };
      const bool flat = options.ring == RingKind::kFlat;
      const bool gather = !flat && options.inner == InnerKind::kGather && ranks > 1;
      EXPECT_EQ(hops(Channel::kFlatKv), flat ? world - 1 : 0);
      EXPECT_EQ(hops(Channel::kOuterKv), flat ? 0 : nodes - 1);
      EXPECT_EQ(hops(Channel::kInnerKv), flat || gather ? 0 : nodes * (ranks - 1));
      EXPECT_EQ(count(schedule, OpKind::kAllGather, Channel::kInnerKv), gather ? nodes : 0);
      const int fewer = takes_all(options) ? 1 : 0;
      EXPECT_EQ(hops(Channel::kFlatGrad), flat && backward && world > 1 ? world - fewer : 0);
      EXPECT_EQ(hops(Channel::kOuterGrad), !flat && backward && nodes > 1 ? nodes - fewer : 0);
      EXPECT_EQ(hops(Channel::kInnerGrad),
                !flat && !gather && backward && ranks > 1 ? nodes * ranks : 0);
      EXPECT_EQ(count(schedule, OpKind::kReduceScatter, Channel::kInnerGrad),
                gather && backward ? nodes : 0);
      const auto launches = std::count_if(schedule.ops.begin(), schedule.ops.end(),
                                          [](const Op& op) { return op.kind == OpKind::kLaunch; });
      EXPECT_EQ(launches, gather       ? nodes
                          : flat       ? launches_of(world, options)
                          : ranks == 1 ? launches_of(nodes, options)
                                       : nodes * launches_of(ranks, options));
    }
  });
}

TEST(Schedule, TransfersAreIssuedPrefetchStepsAheadAndNoFurther) {
  sweep([](const ScheduleOptions& options, bool backward) {
    const Topology& topology = options.topology;
    const int nodes = topology.nodes, ranks = topology.ranks_per_node,
              prefetch = options.prefetch_steps;
    const Schedule schedule =
        backward ? backward_schedule(options, 0) : forward_schedule(options, 0);
    const bool one_ring = options.ring == RingKind::kFlat || ranks == 1;
    const int shards = std::min(options.launch_shards, topology.cp_size());
    const int in_node = launches_of(ranks, options);
    int ring = 0, inner = 0, outer = 0, gathers = 0, launches = 0;
    for (const Op& op : schedule.ops) {
      if (op.kind == OpKind::kAllGather) ++gathers;
      if (op.kind == OpKind::kExchange) {
        ring += is_kv(op.channel);
        inner += op.channel == Channel::kInnerKv;
        outer += op.channel == Channel::kOuterKv;
      }
      if (op.kind != OpKind::kLaunch) continue;
      const int t = launches++;
      EXPECT_EQ(op.ring_step, t);
      if (one_ring) {
        EXPECT_EQ(ring, std::min((t + prefetch) * shards, topology.cp_size() - 1));
        EXPECT_EQ(std::ssize(op.sources),
                  takes_all(options) ? topology.cp_size()
                  : t == 0           ? 1
                                     : std::min(shards, topology.cp_size() - 1 - (t - 1) * shards));
      } else if (options.inner == InnerKind::kRing) {
        EXPECT_EQ(op.outer_step, t / in_node);
        EXPECT_EQ(outer, std::min(t / in_node + 1, nodes - 1))
            << "the outer transfer runs under the node's visits";
        EXPECT_EQ(inner, t / in_node * (ranks - 1) +
                             std::min((t % in_node + prefetch) * shards, ranks - 1));
      } else {
        EXPECT_EQ(op.outer_step, t);
        EXPECT_EQ(outer, std::min(t + prefetch, nodes - 1));
        EXPECT_EQ(gathers, std::min(t + prefetch, nodes));
      }
    }
  });
}

TEST(Schedule, MoreStepsAheadThanThereAreRanksAreAllOfThem) {
  sweep(
      [](ScheduleOptions options, bool backward) {
        const auto make = backward ? backward_schedule : forward_schedule;
        options.prefetch_steps = options.topology.cp_size();
        const Schedule all = make(options, 0);
        options.prefetch_steps = std::numeric_limits<int>::max();
        const Schedule more = make(options, 0);
        EXPECT_EQ(more.ops.size(), all.ops.size());
        EXPECT_EQ(more.num_kv_slots, all.num_kv_slots);
        EXPECT_EQ(more.num_grad_slots, all.num_grad_slots);
      },
      9);
}

TEST(Schedule, SlotsAreFewAndReused) {
  sweep([](const ScheduleOptions& options, bool backward) {
    const int nodes = options.topology.nodes, ranks = options.topology.ranks_per_node,
              world = nodes * ranks;
    const int prefetch = options.prefetch_steps;
    const Schedule schedule =
        backward ? backward_schedule(options, 0) : forward_schedule(options, 0);
    const int outer = std::min(2, nodes - 1);
    const bool flat = options.ring == RingKind::kFlat || ranks == 1;
    const int shards = std::min(options.launch_shards, world);
    const int ahead = (prefetch + 1) * shards;
    const int kv = flat                                ? std::min(ahead, world - 1)
                   : options.inner == InnerKind::kRing ? outer + std::min(ahead, ranks - 1)
                                                       : outer + std::min(prefetch, nodes) * ranks;
    EXPECT_EQ(schedule.num_kv_slots, 1 + kv);
    const int node_sums = std::min(2, nodes) + (nodes > 1);
    const auto computed = [&](int size) {
      return prefetch + 1 >= launches_of(size, options) ? size : std::min(ahead, size - 1);
    };
    const int grad = flat                                ? computed(world) + (world > 1)
                     : options.inner == InnerKind::kRing ? node_sums + computed(ranks) + 1
                                                         : node_sums + std::min(2, nodes) * ranks;
    EXPECT_EQ(schedule.num_grad_slots, backward ? grad : 0);
  });
}

TEST(Schedule, OuterSendIsNeverAnInnerReceiveBuffer) {
  sweep([](const ScheduleOptions& options, bool backward) {
    const Schedule schedule =
        backward ? backward_schedule(options, 0) : forward_schedule(options, 0);
    std::set<int> inner_receives, outer_sends;
    for (const Op& op : schedule.ops) {
      if (op.channel == Channel::kInnerKv && op.kind == OpKind::kExchange)
        inner_receives.insert(op.recv_slot);
      if (op.kind == OpKind::kAllGather) inner_receives.insert(op.slots.begin(), op.slots.end());
      if (op.channel == Channel::kOuterKv) outer_sends.insert(op.send_slot);
    }
    for (int slot : outer_sends) EXPECT_EQ(inner_receives.count(slot), 0u);
  });
}

TEST(Schedule, GatheredSlotsAreConsecutiveInLocalRankOrder) {
  sweep([](const ScheduleOptions& options, bool backward) {
    const Schedule schedule =
        backward ? backward_schedule(options, 0) : forward_schedule(options, 0);
    for (const Op& op : schedule.ops) {
      for (size_t i = 1; i < op.slots.size(); ++i) EXPECT_EQ(op.slots[i], op.slots[i - 1] + 1);
    }
  });
}

TEST(Schedule, InnerNeighboursStayInTheNodeAndOuterOnesKeepTheLocalRank) {
  sweep(
      [](const ScheduleOptions& options, bool backward) {
        const Topology& topology = options.topology;
        for (int rank = 0; rank < topology.cp_size(); ++rank) {
          const Schedule schedule =
              backward ? backward_schedule(options, rank) : forward_schedule(options, rank);
          for (const Op& op : schedule.ops) {
            if (op.kind != OpKind::kExchange) continue;
            for (int peer : {op.to, op.from}) {
              if (op.channel == Channel::kInnerKv || op.channel == Channel::kInnerGrad) {
                ASSERT_EQ(topology.node(peer), topology.node(rank));
              }
              if (op.channel == Channel::kOuterKv || op.channel == Channel::kOuterGrad) {
                ASSERT_EQ(topology.local_rank(peer), topology.local_rank(rank));
              }
            }
          }
        }
      },
      32);
}

TEST(Schedule, FlatAndHierarchicalVisitTheSameShardsOwnFirst) {
  for (const Topology& topology : {Topology{1, 4}, Topology{2, 2}, Topology{4, 1}}) {
    for (InnerKind inner : kInnerKinds) {
      for (int rank = 0; rank < 4; ++rank) {
        std::vector<int> visited;
        for (const Op& op :
             forward_schedule(
                 {.topology = topology, .ring = RingKind::kHierarchical, .inner = inner}, rank)
                 .ops) {
          for (const SourceRef& source : op.sources) visited.push_back(source.source_rank);
        }
        EXPECT_EQ(visited.front(), rank);
        std::sort(visited.begin(), visited.end());
        EXPECT_EQ(visited, (std::vector<int>{0, 1, 2, 3}));
      }
    }
  }
}

TEST(Schedule, FlatRingVisitsByItsStride) {
  std::vector<int> visited;
  for (const Op& op :
       forward_schedule({.topology = {4, 8}, .ring = RingKind::kFlat, .ring_stride = 15}, 3).ops) {
    for (const SourceRef& source : op.sources) visited.push_back(source.source_rank);
  }
  ASSERT_EQ(visited.size(), 32u);
  for (int step = 0; step < 32; ++step) EXPECT_EQ(visited[step], (3 + 32 * 15 - step * 15) % 32);
}

TEST(Schedule, HierarchicalSendsFewUnitsBetweenNodes) {
  const Topology topology{4, 8};
  for (InnerKind inner : kInnerKinds) {
    const ScheduleOptions options{
        .topology = topology, .ring = RingKind::kHierarchical, .inner = inner};
    const Traffic forward = traffic(forward_schedule(options, 9), topology, 9);
    EXPECT_EQ(forward.kv_outer, 3);
    EXPECT_EQ(forward.kv_inner, 4 * 7);
    EXPECT_EQ(forward.grad_inner + forward.grad_outer, 0);
    const Traffic backward = traffic(backward_schedule(options, 9), topology, 9);
    EXPECT_EQ(backward.kv_outer, 3);
    EXPECT_EQ(backward.grad_outer, 4);
    EXPECT_EQ(backward.grad_inner, inner == InnerKind::kRing ? 32 : 28);
  }
  const ScheduleOptions flat{.topology = topology, .ring = RingKind::kFlat};
  EXPECT_EQ(traffic(forward_schedule(flat, 7), topology, 7).kv_outer, 31)
      << "the last rank of a node sends to the next";
  EXPECT_EQ(traffic(forward_schedule(flat, 6), topology, 6).kv_outer, 0);
  EXPECT_EQ(traffic(backward_schedule(flat, 7), topology, 7).grad_outer, 32);
}

TEST(Schedule, WrongOptionsAreRefusedByName) {
  const auto fails = [](const ScheduleOptions& options, int rank, const char* named) {
    try {
      forward_schedule(options, rank);
      ADD_FAILURE() << named;
    } catch (const InvalidArgument& error) {
      EXPECT_EQ(std::string(error.what()).rfind(named, 0), 0u) << error.what();
    }
    EXPECT_THROW(backward_schedule(options, rank), InvalidArgument);
  };
  fails({.topology = {1, 4}, .ring = RingKind::kFlat, .ring_stride = 2}, 0, "ring_stride");
  fails({.topology = {1, 4}, .ring = RingKind::kFlat, .ring_stride = 0}, 0, "ring_stride");
  fails({.topology = {1, 4}, .ring = RingKind::kFlat, .ring_stride = -1}, 0, "ring_stride");
  fails({.topology = {2, 2}, .ring = RingKind::kHierarchical, .ring_stride = 3}, 0, "ring_stride");
  fails({.topology = {2, 2}, .prefetch_steps = 0}, 0, "prefetch_steps");
  fails({.topology = {2, 2}, .launch_shards = 0}, 0, "launch_shards");
  fails({.topology = {2, 2}}, 4, "cp_rank");
  fails({.topology = {2, 2}}, -1, "cp_rank");
  fails({.topology = {0, 2}}, 0, "topology");
  EXPECT_THROW(parse_ring_kind("ring"), InvalidArgument);
  EXPECT_THROW(parse_inner_kind("flat"), InvalidArgument);
  for (RingKind kind : {RingKind::kFlat, RingKind::kHierarchical})
    EXPECT_EQ(parse_ring_kind(to_string(kind)), kind);
  for (InnerKind kind : kInnerKinds) EXPECT_EQ(parse_inner_kind(to_string(kind)), kind);
}

// The verifier itself: a fault in otherwise right lists must be found.

std::vector<ScheduleOptions> verifier_cases() {
  std::vector<ScheduleOptions> cases = {
      {.topology = {2, 3}, .ring = RingKind::kFlat, .prefetch_steps = 2},
      {.topology = {2, 3}, .ring = RingKind::kFlat, .prefetch_steps = 1, .launch_shards = 2}};
  for (InnerKind inner : kInnerKinds) {
    cases.push_back(
        {.topology = {3, 3}, .ring = RingKind::kHierarchical, .inner = inner, .prefetch_steps = 2});
  }
  return cases;
}

TEST(Verifier, FindsEveryDroppedDependency) {
  for (const ScheduleOptions& options : verifier_cases()) {
    for (bool backward : {false, true}) {
      Job job = make_job(options, backward);
      for (Op& op : job.ranks[1].ops) {
        const std::vector<int> whole = op.after;
        for (size_t drop = 0; drop < whole.size(); ++drop) {
          op.after = whole;
          op.after.erase(op.after.begin() + static_cast<int64_t>(drop));
          EXPECT_NE(verify(job), "")
              << describe(options, backward) << " op " << op.id << " without " << whole[drop];
        }
        op.after = whole;
      }
    }
  }
}

TEST(Verifier, FindsADroppedOperationAndAWrongPeer) {
  for (const ScheduleOptions& options : verifier_cases()) {
    for (bool backward : {false, true}) {
      const Job whole = make_job(options, backward);
      for (size_t id = 0; id < whole.ranks[0].ops.size(); ++id) {
        Job job = whole;
        for (Schedule& schedule : job.ranks) {  // on all ranks, so that partners still match
          schedule.ops.erase(schedule.ops.begin() + static_cast<int64_t>(id));
          for (size_t i = 0; i < schedule.ops.size(); ++i) {
            Op& op = schedule.ops[i];
            op.id = static_cast<int>(i);
            std::erase(op.after, static_cast<int>(id));
            for (int& earlier : op.after) earlier -= earlier > static_cast<int>(id);
          }
        }
        EXPECT_NE(verify(job), "") << describe(options, backward) << " without op " << id;
        if (whole.ranks[0].ops[id].kind != OpKind::kExchange) continue;
        job = whole;
        const int world = job.topology.cp_size();
        for (Schedule& schedule : job.ranks) {
          schedule.ops[id].to = (schedule.ops[id].to + 1) % world;
          schedule.ops[id].from = (schedule.ops[id].from + world - 1) % world;
        }
        EXPECT_NE(verify(job), "")
            << describe(options, backward) << " op " << id << " with other peers";
      }
    }
  }
}

TEST(Verifier, FindsSharedSlots) {
  for (const ScheduleOptions& options : verifier_cases()) {
    for (bool backward : {false, true}) {
      const Job whole = make_job(options, backward);
      const Schedule& first = whole.ranks[0];
      const auto merge = [&](bool grad, int from, int into) {
        Job job = whole;
        const auto rename = [&](int& slot) { slot = slot == from ? into : slot; };
        for (Schedule& schedule : job.ranks) {
          for (Op& op : schedule.ops) {
            if (is_transfer(op.kind) || op.kind == OpKind::kZeroGrad ||
                op.kind == OpKind::kAddGrad) {
              if (grad == !is_kv(op.channel)) {
                rename(op.send_slot);
                rename(op.recv_slot);
                for (int& slot : op.slots) rename(slot);
              }
            }
            for (SourceRef& source : op.sources) rename(grad ? source.grad_slot : source.kv_slot);
          }
        }
        return job;
      };
      for (int from = 2; from < first.num_kv_slots; ++from) {
        EXPECT_NE(verify(merge(false, from, 1)), "")
            << describe(options, backward) << " kv " << from;
      }
      for (int from = 1; from < first.num_grad_slots; ++from) {
        EXPECT_NE(verify(merge(true, from, 0)), "")
            << describe(options, backward) << " grad " << from;
      }
    }
  }
}

TEST(Verifier, FindsADeadlockOfBlockingWaits) {
  // Rank 0 waits for its exchange before it posts the one that rank 1 waits for.
  Job job{.topology = {1, 2}, .backward = false, .ranks = {}};
  for (int rank : {0, 1}) {
    Schedule schedule;
    schedule.num_kv_slots = 3;
    const Channel order[] = {rank == 0 ? Channel::kInnerKv : Channel::kOuterKv,
                             rank == 0 ? Channel::kOuterKv : Channel::kInnerKv};
    for (int id : {0, 1}) {
      Op op{.kind = OpKind::kExchange,
            .id = id,
            .after = {},
            .channel = order[id],
            .to = 1 - rank,
            .from = 1 - rank,
            .send_slot = 0,
            .recv_slot = id + 1,
            .slots = {},
            .sources = {}};
      if (id == 1) op.after = {0};
      schedule.ops.push_back(op);
    }
    job.ranks.push_back(schedule);
  }
  EXPECT_NE(verify(job).find("deadlock"), std::string::npos);
}

}  // namespace
}  // namespace mtraining::ring
