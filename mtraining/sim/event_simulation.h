// EventSimulation: runs all ranks' schedules on a cost model instead of a machine.
//
// In:   every rank's ring::Schedule, the duration of each launch, costs of links and of gradient
//       sums.
// Out:  begin and end of every operation on every rank; the layer's time.
// Next: cli/ prints and draws it.
//
// It reads the same lists as attention/ does. Launches and zeroings of a rank follow each other on one
// compute stream, the other operations of a channel on that channel's stream; each starts when its
// stream is free and everything in `after` has ended. A transfer starts when both ends have come to
// it. Channels do not share bandwidth. That ranks wait for each other is an outcome, not an input.
#pragma once

#include <cstdint>
#include <vector>

#include "mtraining/ring/schedule.h"
#include "mtraining/sim/imbalance.h"

namespace mtraining::sim {

struct LinkCost {
  double latency_us = 0;
  double bytes_per_us = 0;  ///< of one rank's link, one way; 0: only latency counts
};

struct CostModel {
  LinkCost inner = {}, outer = {};  ///< between ranks of a node, between nodes
  int64_t kv_bytes = 0;             ///< K and V of one shard
  int64_t grad_bytes = 0;           ///< dk and dv of one shard as they travel
  /// Zeroing or adding one shard's gradients.
  double grad_pass_us = 0;
};

/// The hop of one kv shard on a link.
double kv_hop_us(const LinkCost& link, const CostModel& cost);

struct OpTime {
  double begin_us = 0, end_us = 0;
};

/// What the ranks compute, apart from the schedule.
struct ComputeTimes {
  std::vector<std::vector<double>> launch_us;  ///< [cp_size][launches], in list order
  /// [cp_size] the launch over all columns at once, or empty: after a forward ring, before a
  /// backward one. Its transfers run beside the ring and are taken to hide there.
  std::vector<double> columns_us = {};
  bool columns_first = false;  ///< backward
};

struct Timeline {
  std::vector<std::vector<OpTime>> ops;  ///< [cp_size][operations of the rank's schedule]
  std::vector<OpTime> columns;           ///< [cp_size] or empty
  double total_us = 0;                   ///< the last operation of all ranks ends
  std::vector<double> compute_us;        ///< [cp_size] sum of launches, columns included
};

/// An all-gather or reduce-scatter over L ranks takes L - 1 hops of one shard.
/// Errors: InvalidArgument where sizes differ; InternalError where the lists deadlock or do not
/// match.
Timeline simulate(const std::vector<ring::Schedule>& ranks, const topology::Topology& topology,
                  const ComputeTimes& compute, const CostModel& cost);

/// How long a launch of so many pairs takes.
struct LaunchCost {
  double us_per_pair = 0;
  double fixed_us = 0;
};
ComputeTimes compute_times(const StepLoads& loads, const LaunchCost& cost, bool backward);

}  // namespace mtraining::sim
