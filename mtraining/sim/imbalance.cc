#include "mtraining/sim/imbalance.h"

#include <algorithm>
#include <numeric>

#include "mtraining/base/check.h"
#include "mtraining/index/step_pairs.h"

namespace mtraining::sim {
namespace {

/// max / mean; 1 where nothing is computed.
double degree(const std::vector<int64_t>& values) {
  const double sum = std::accumulate(values.begin(), values.end(), 0.0);
  if (sum == 0) return 1;
  return static_cast<double>(*std::max_element(values.begin(), values.end())) *
         static_cast<double>(values.size()) / sum;
}

}  // namespace

PairTable count_pairs(const index::Index& index, const layout::Layout& layout) {
  PairTable table;
  table.cp_size = layout.cp_size();
  const size_t cells = static_cast<size_t>(table.cp_size) * table.cp_size;
  table.blocks.assign(cells, 0);
  table.columns.assign(cells, 0);
  for (int64_t row = 0; row < index.diagonals.rows; ++row) {
    const std::vector<int64_t> blocks = index::step_pair_table(index, layout, row, false);
    for (size_t i = 0; i < cells; ++i) table.blocks[i] += blocks[i];
    if (index.columns.row(row).empty()) continue;
    const std::vector<int64_t> all = index::step_pair_table(index, layout, row, true);
    for (size_t i = 0; i < cells; ++i) table.columns[i] += all[i] - blocks[i];
  }
  return table;
}

StepLoads step_loads(const PairTable& pairs, const ring::ScheduleOptions& ring,
                     ColumnCost columns) {
  const int world = ring.topology.cp_size();
  MT_CHECK_ARG(pairs.cp_size == world, "step_loads: expected pairs of ", world,
               " ranks as in the topology, got ", pairs.cp_size);
  StepLoads loads;
  loads.by_step.resize(static_cast<size_t>(world));
  loads.columns_once.assign(static_cast<size_t>(world), 0);
  for (int rank = 0; rank < world; ++rank) {
    const ring::Schedule schedule = ring::forward_schedule(ring, rank);
    for (const ring::Op& op : schedule.ops) {
      if (op.kind != ring::OpKind::kLaunch) continue;
      int64_t launch = 0;
      for (const ring::SourceRef& source : op.sources) {
        launch += pairs.block_pairs(rank, source.source_rank);
        const int64_t column_pairs = pairs.column_pairs(rank, source.source_rank);
        if (columns == ColumnCost::kPerStep) launch += column_pairs;
        if (columns == ColumnCost::kOnce) loads.columns_once[rank] += column_pairs;
      }
      loads.by_step[rank].push_back(launch);
      if (rank == 0) loads.outer_step.push_back(op.outer_step);
    }
  }
  return loads;
}

Imbalance measure(const StepLoads& loads, const ring::ScheduleOptions& ring) {
  const int world = ring.topology.cp_size();
  const size_t launches = loads.outer_step.size();
  Imbalance result;
  std::vector<int64_t> totals;
  double steps = 0;
  result.step_worst = 1;
  for (int rank = 0; rank < world; ++rank) {
    const std::vector<int64_t>& mine = loads.by_step[rank];
    totals.push_back(std::accumulate(mine.begin(), mine.end(), loads.columns_once[rank]));
    steps += degree(mine) / world;
    result.step_worst = std::max(result.step_worst, degree(mine));
  }
  result.step = steps;
  result.worker = degree(totals);
  result.total_pairs = std::accumulate(totals.begin(), totals.end(), int64_t{0});
  if (result.total_pairs == 0) return result;

  const bool hierarchical = ring.ring == ring::RingKind::kHierarchical;
  const int groups = hierarchical ? ring.topology.nodes : 1;
  const int group_size = world / groups;
  int64_t time = *std::max_element(loads.columns_once.begin(), loads.columns_once.end());
  for (size_t launch = 0; launch < launches;) {
    // One outer step: its launches, each as long as the slowest rank of the group.
    size_t end = launch + 1;
    while (end < launches && loads.outer_step[end] == loads.outer_step[launch]) ++end;
    int64_t slowest = 0;
    for (int group = 0; group < groups; ++group) {
      int64_t group_time = 0;
      for (size_t at = launch; at < end; ++at) {
        int64_t longest = 0;
        for (int i = 0; i < group_size; ++i) {
          longest = std::max(longest, loads.by_step[group * group_size + i][at]);
        }
        group_time += longest;
      }
      slowest = std::max(slowest, group_time);
    }
    time += slowest;
    launch = end;
  }
  result.lockstep = static_cast<double>(time) * world / static_cast<double>(result.total_pairs);
  return result;
}

}  // namespace mtraining::sim
