// TrainBench: train steps of a configuration on random tokens, over ranks that are threads of this process, on one GPU, or over the
// processes of a job.
//
// In:   a configuration, nodes x ranks, a number of steps. Out: a row: steps per second, time by phase, bytes, memory, MFU.
// Next: cli/bench_train.cc prints it.
//
// The trainer itself runs, with token files of random ids in a folder that goes away. Phases are the spans of its trace: by the host's
// clock, on a GPU by the device's.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "bench/rows.h"
#include "mtraining/comm/transport.h"
#include "mtraining/topology/topology.h"
#include "mtraining/train/config.h"

namespace mtraining::bench {

struct TrainBenchOptions {
  train::RunConfig
      config;  ///< data, steps, evaluation, preflight, recall and trace are the bench's own
  topology::Topology ranks = {1, 1};
  /// This process is one rank of a job of ranks.cp_size() processes, each on its own GPU if on any; null: all ranks are here.
  comm::Transport* job = nullptr;
  topology::LaunchEnvironment launch;  ///< of that process
  int64_t warm_up = 1, steps = 3;
  /// Fewer layers than the configuration's are run, and the step of all of them is computed (docs/training.md); 0: all are run.
  int64_t layers = 0;
  bool dense_arm = false;  ///< the same with dense attention too, and the ratio
  bool kernels = false;    ///< a GPU: one step more, with the time of each kernel
  /// Called on rank 0 with a row of each train step, warm-up included, as it ends; may be empty.
  std::function<void(const std::string&)> step_ended = {};
};
/// The run's row, then (with `dense_arm`) the dense run's and the ratio's, then of each run a row a phase, and on the CPU a row a span
/// of the trace: ms a train step of the busiest and of the mean rank. In a job phases and kernels are rank 0's, which alone gets
/// the rows. Collective over the job. Errors: those of train::resolve, and of the trainer; InvalidArgument: more than one rank on a
/// GPU, more layers than the configuration has.
std::vector<std::string> bench_train(const TrainBenchOptions& options, const Provenance& from);

}  // namespace mtraining::bench
