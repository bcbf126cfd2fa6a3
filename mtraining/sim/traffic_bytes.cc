#include "mtraining/sim/traffic_bytes.h"

namespace mtraining::sim {

std::vector<LinkBytes> ring_bytes(const ring::ScheduleOptions& options, const ShardSizes& sizes,
                                  bool backward) {
  std::vector<LinkBytes> result;
  for (int rank = 0; rank < options.topology.cp_size(); ++rank) {
    const ring::Schedule schedule =
        backward ? ring::backward_schedule(options, rank) : ring::forward_schedule(options, rank);
    const ring::Traffic units = ring::traffic(schedule, options.topology, rank);
    result.push_back(
        {.inner = units.kv_inner * sizes.kv_bytes() + units.grad_inner * sizes.grad_bytes(),
         .outer = units.kv_outer * sizes.kv_bytes() + units.grad_outer * sizes.grad_bytes()});
  }
  return result;
}

int64_t column_bytes(const index::ColumnPlan& plan, int cp_size, const ShardSizes& sizes,
                     bool backward) {
  int64_t rows = 0;
  for (const index::ColumnSlice& slice : plan.slices) rows += slice.rows_per_rank;
  const int64_t row_bytes =
      2 * sizes.head_dim * (sizes.kv_element_bytes + (backward ? sizes.grad_element_bytes : 0));
  return rows * row_bytes * (cp_size - 1);
}

}  // namespace mtraining::sim
