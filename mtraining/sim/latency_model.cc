#include "mtraining/sim/latency_model.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "mtraining/base/check.h"

namespace mtraining::sim {
namespace {

void check(const topology::Topology& topology, const StepTimes& times) {
  MT_CHECK_ARG(topology.nodes >= 1 && topology.ranks_per_node >= 1,
               "topology: expected at least 1x1, got ", topology::to_string(topology));
  const std::pair<const char*, double> all[] = {{"compute", times.compute_ms},
                                                {"intra", times.intra_ms},
                                                {"inter", times.inter_ms},
                                                {"index", times.index_ms},
                                                {"cpu", times.cpu_ms}};
  for (const auto& [name, value] : all) {
    MT_CHECK_ARG(std::isfinite(value) && value >= 0, name, " time: expected ms >= 0, got ", value);
  }
}

/// A shard's visit and the inner hop beside it, where there is one.
double inner_step_ms(const topology::Topology& topology, const StepTimes& times) {
  return topology.ranks_per_node > 1 ? std::max(times.compute_ms, times.intra_ms)
                                     : times.compute_ms;
}

}  // namespace

double flat_ring_ms(const topology::Topology& topology, const StepTimes& times) {
  check(topology, times);
  const double hop_ms = topology.nodes > 1 ? times.inter_ms : 0;
  const double step_ms = std::max(inner_step_ms(topology, times), hop_ms);
  return (topology.cp_size() - 1) * step_ms + times.compute_ms + times.index_ms + times.cpu_ms;
}

double hierarchical_ring_ms(const topology::Topology& topology, const StepTimes& times) {
  check(topology, times);
  const double node_ms = topology.ranks_per_node * inner_step_ms(topology, times);
  return (topology.nodes - 1) * std::max(node_ms, times.inter_ms) + node_ms + times.index_ms +
         times.cpu_ms;
}

}  // namespace mtraining::sim
