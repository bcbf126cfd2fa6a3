// SymbolicRun: runs all ranks' schedules together on symbolic contents and says the first fault.
// For tests only.
//
// In:   a Job (every rank's list of one direction). Out: "" or one sentence.
// Next: schedule_test.cc; anything that makes schedules of its own can be checked the same way.
#pragma once

#include <string>
#include <vector>

#include "mtraining/ring/schedule.h"

namespace mtraining::ring {

/// All ranks' lists of one direction.
struct Job {
  topology::Topology topology;
  bool backward = false;
  std::vector<Schedule> ranks;
};
Job make_job(const ScheduleOptions& options, bool backward);

/// Exchange, all-gather or reduce-scatter.
bool is_transfer(OpKind kind);

/// Proves of any executor that honours `after`, channel order and launch order:
/// no slot is overwritten while in use or in flight; transfers match; no deadlock where waits block
/// and transfers are rendezvous; each rank attends to every shard once, its own first; gradients
/// are complete at home, each contribution once.
std::string verify(const Job& job, int random_orders = 3);

}  // namespace mtraining::ring
