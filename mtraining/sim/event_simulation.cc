#include "mtraining/sim/event_simulation.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "mtraining/base/check.h"

namespace mtraining::sim {
namespace {

using ring::Channel;
using ring::Op;
using ring::OpKind;

double hop_us(const LinkCost& link, int64_t bytes) {
  const double transfer_us =
      link.bytes_per_us > 0 ? static_cast<double>(bytes) / link.bytes_per_us : 0;
  return link.latency_us + transfer_us;
}

/// Ranks issue in list order; times follow from `after` and from the stream, so that the order in
/// which this loop comes to an operation changes no time.
class Simulation {
 public:
  Simulation(const std::vector<ring::Schedule>& ranks, const topology::Topology& topology,
             const ComputeTimes& compute, const CostModel& cost)
      : ranks_(ranks), topology_(topology), compute_(compute), cost_(cost) {
    for (const ring::Schedule& schedule : ranks) {
      state_.push_back({});
      state_.back().ended.resize(schedule.ops.size(), false);
      timeline_.ops.emplace_back(schedule.ops.size());
    }
    timeline_.compute_us = compute.columns_us;
    timeline_.compute_us.resize(ranks.size(), 0);
  }

  Timeline run() {
    for (bool progress = true; progress;) {
      progress = false;
      for (size_t rank = 0; rank < ranks_.size(); ++rank) {
        while (post_next(static_cast<int>(rank))) progress = true;
      }
    }
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
      const auto& ended = state_[rank].ended;
      const auto stuck = std::find(ended.begin(), ended.end(), false);
      MT_ASSERT(stuck == ended.end(), "rank ", rank, ": operation ", stuck - ended.begin(),
                " waits for a partner that never comes");
      for (const OpTime& time : timeline_.ops[rank]) {
        timeline_.total_us = std::max(timeline_.total_us, time.end_us);
      }
    }
    add_columns();
    return std::move(timeline_);
  }

 private:
  static constexpr int kComputeStream = -1;

  struct RankState {
    size_t next = 0;
    size_t launches = 0;
    std::vector<bool> ended;
    std::map<int, int> last_of_stream;  // stream -> operation
  };
  /// One end of a transfer, or one rank's part in a collective.
  struct Post {
    int rank, op;
  };

  /// When the compute stream of a rank is free for its first launch.
  double columns_before_us(int rank) const {
    return compute_.columns_first && !compute_.columns_us.empty() ? compute_.columns_us[rank] : 0;
  }
  void add_columns() {
    for (size_t rank = 0; rank < compute_.columns_us.size(); ++rank) {
      double begin_us = 0;
      if (!compute_.columns_first) {
        for (const Op& op : ranks_[rank].ops) {
          if (op.kind == OpKind::kLaunch) begin_us = timeline_.ops[rank][op.id].end_us;
        }
      }
      timeline_.columns.push_back({begin_us, begin_us + compute_.columns_us[rank]});
      timeline_.total_us = std::max(timeline_.total_us, timeline_.columns.back().end_us);
    }
  }

  /// Begins the next operation of a rank if the times that it depends on are known.
  bool post_next(int rank) {
    RankState& state = state_[rank];
    const auto& ops = ranks_[rank].ops;
    if (state.next == ops.size()) return false;
    const Op& op = ops[state.next];
    const bool computes = op.kind == OpKind::kLaunch || op.kind == OpKind::kZeroGrad;
    const int stream = computes ? kComputeStream : static_cast<int>(op.channel);
    double begin_us = stream == kComputeStream ? columns_before_us(rank) : 0;
    const auto wait_for = [&](int id) {
      if (!state.ended[id]) return false;
      begin_us = std::max(begin_us, timeline_.ops[rank][id].end_us);
      return true;
    };
    const auto last = state.last_of_stream.find(stream);
    if (last != state.last_of_stream.end() && !wait_for(last->second)) return false;
    for (int id : op.after) {
      if (!wait_for(id)) return false;
    }
    ++state.next;
    state.last_of_stream[stream] = op.id;
    timeline_.ops[rank][op.id].begin_us = begin_us;
    switch (op.kind) {
      case OpKind::kLaunch: {
        const std::vector<double>& launch_us = compute_.launch_us[rank];
        MT_CHECK_ARG(state.launches < launch_us.size(), "simulate: rank ", rank,
                     ": expected a time for each launch, got ", launch_us.size());
        const double duration_us = launch_us[state.launches++];
        timeline_.compute_us[rank] += duration_us;
        end(rank, op.id, begin_us + duration_us);
        break;
      }
      case OpKind::kZeroGrad:
      case OpKind::kAddGrad:
        end(rank, op.id, begin_us + cost_.grad_pass_us);
        break;
      case OpKind::kExchange:
        post_exchange(rank, op);
        break;
      case OpKind::kAllGather:
      case OpKind::kReduceScatter:
        post_collective(rank, op);
        break;
    }
    return true;
  }

  void end(int rank, int op, double end_us) {
    timeline_.ops[rank][op].end_us = end_us;
    state_[rank].ended[op] = true;
  }
  double begin_us(const Post& post) const { return timeline_.ops[post.rank][post.op].begin_us; }
  int64_t bytes(const Op& op) const {
    return ring::is_kv(op.channel) ? cost_.kv_bytes : cost_.grad_bytes;
  }

  /// The n-th send of a to b on a channel meets the n-th receive of b from a.
  void post_exchange(int rank, const Op& op) {
    halves_left_[{rank, op.id}] = 2;
    meet({op.channel, rank, op.to}, {rank, op.id}, true, op);
    meet({op.channel, op.from, rank}, {rank, op.id}, false, op);
  }
  struct Route {
    Channel channel;
    int from, to;
    auto operator<=>(const Route&) const = default;
  };
  void meet(const Route& route, const Post& post, bool sends, const Op& op) {
    auto& [senders, receivers] = waiting_[route];
    auto& mine = sends ? senders : receivers;
    auto& theirs = sends ? receivers : senders;
    if (theirs.empty()) {
      mine.push_back(post);
      return;
    }
    const Post partner = theirs.front();
    theirs.erase(theirs.begin());
    const bool inside = topology_.node(route.from) == topology_.node(route.to);
    const double end_us = std::max(begin_us(post), begin_us(partner)) +
                          hop_us(inside ? cost_.inner : cost_.outer, bytes(op));
    for (const Post& half : {post, partner}) {
      double& latest_us = timeline_.ops[half.rank][half.op].end_us;
      latest_us = std::max(latest_us, end_us);
      if (--halves_left_[{half.rank, half.op}] == 0) end(half.rank, half.op, latest_us);
    }
  }

  /// The n-th call of every rank of a node on a channel is one collective.
  void post_collective(int rank, const Op& op) {
    auto& calls = collectives_[{op.channel, topology_.node(rank)}];
    const size_t call = calls_of_[{op.channel, rank}]++;
    if (calls.size() <= call) calls.resize(call + 1);
    calls[call].push_back({rank, op.id});
    if (static_cast<int>(calls[call].size()) < topology_.ranks_per_node) return;
    double start_us = 0;
    for (const Post& post : calls[call]) start_us = std::max(start_us, begin_us(post));
    const double end_us =
        start_us + (topology_.ranks_per_node - 1) * hop_us(cost_.inner, bytes(op));
    for (const Post& post : calls[call]) end(post.rank, post.op, end_us);
  }

  const std::vector<ring::Schedule>& ranks_;
  const topology::Topology& topology_;
  const ComputeTimes& compute_;
  const CostModel& cost_;
  std::vector<RankState> state_;
  std::map<Route, std::pair<std::vector<Post>, std::vector<Post>>> waiting_;
  std::map<std::pair<int, int>, int> halves_left_;
  std::map<std::pair<Channel, int>, std::vector<std::vector<Post>>> collectives_;
  std::map<std::pair<Channel, int>, size_t> calls_of_;
  Timeline timeline_;
};

}  // namespace

double kv_hop_us(const LinkCost& link, const CostModel& cost) {
  return hop_us(link, cost.kv_bytes);
}

Timeline simulate(const std::vector<ring::Schedule>& ranks, const topology::Topology& topology,
                  const ComputeTimes& compute, const CostModel& cost) {
  MT_CHECK_ARG(static_cast<int>(ranks.size()) == topology.cp_size(), "simulate: expected ",
               topology.cp_size(), " schedules as in topology ", topology::to_string(topology),
               ", got ", ranks.size());
  MT_CHECK_ARG(compute.launch_us.size() == ranks.size(), "simulate: expected launch times of ",
               ranks.size(), " ranks, got ", compute.launch_us.size());
  MT_CHECK_ARG(compute.columns_us.empty() || compute.columns_us.size() == ranks.size(),
               "simulate: expected column times of ", ranks.size(), " ranks or none, got ",
               compute.columns_us.size());
  return Simulation(ranks, topology, compute, cost).run();
}

ComputeTimes compute_times(const StepLoads& loads, const LaunchCost& cost, bool backward) {
  const auto duration_us = [&](int64_t pairs) {
    return cost.fixed_us + cost.us_per_pair * static_cast<double>(pairs);
  };
  ComputeTimes times;
  times.columns_first = backward;
  for (const auto& steps : loads.by_step) {
    times.launch_us.emplace_back();
    for (int64_t pairs : steps) times.launch_us.back().push_back(duration_us(pairs));
  }
  if (std::any_of(loads.columns_once.begin(), loads.columns_once.end(),
                  [](int64_t pairs) { return pairs > 0; })) {
    for (int64_t pairs : loads.columns_once) times.columns_us.push_back(duration_us(pairs));
  }
  return times;
}

}  // namespace mtraining::sim
