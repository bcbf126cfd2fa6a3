// LatencyModel: the closed form of one attention layer's forward time on a ring.
//
// In:   a topology and five times: one shard's computation, one hop inside a node, one hop between
//       nodes, the index, the host.
// Out:  the layer's time with a flat and with a hierarchical ring.
// Next: cli/ prints it; event_simulation.h arrives at the same numbers from the schedules.
//
// Source: paper appendix C, generalised from 4x8 to any topology.
#pragma once

#include "mtraining/topology/topology.h"

namespace mtraining::sim {

/// All in ms; of one ring step except index and cpu, which are paid once a layer.
struct StepTimes {
  double compute_ms = 0;
  double intra_ms = 0;  ///< K and V of one shard to a rank of the same node
  double inter_ms = 0;  ///< the same to a rank of another node
  double index_ms = 0;
  double cpu_ms = 0;
};

/// Every step waits for the slowest of its computation and the hops that the ring contains:
/// (W - 1) max(compute, intra, inter) + compute + index + cpu. Errors: InvalidArgument on a
/// negative or non-finite time.
double flat_ring_ms(const topology::Topology& topology, const StepTimes& times);

/// An outer hop runs under the L visits of its node: (nodes - 1) max(L max(compute, intra), inter)
/// + L max(compute, intra) + index + cpu; W max(compute, intra) + index + cpu where outer hops
/// hide.
double hierarchical_ring_ms(const topology::Topology& topology, const StepTimes& times);

}  // namespace mtraining::sim
