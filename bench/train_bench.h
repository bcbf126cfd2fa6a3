// TrainBench: train steps of a configuration on random tokens, over ranks that are threads of this process.
//
// In:   a configuration, nodes x ranks, a number of steps. Out: a row: steps per second, time by part, bytes, memory.
// Next: cli/bench_train.cc prints it.
//
// The trainer itself runs, with token files of random ids in a folder that goes away. Parts are the spans of its trace.
#pragma once

#include <string>
#include <vector>

#include "bench/rows.h"
#include "mtraining/topology/topology.h"
#include "mtraining/train/config.h"

namespace mtraining::bench {

struct TrainBenchOptions {
  train::RunConfig
      config;  ///< data, steps, evaluation, preflight, recall and trace are the bench's own
  topology::Topology ranks = {1, 1};
  int64_t warm_up = 1, steps = 3;
};
/// The run's row, and with spans in the trace a row a part: ms a train step of the busiest and of the mean rank.
/// Errors: those of train::resolve, and of the trainer.
std::vector<std::string> bench_train(const TrainBenchOptions& options, const Provenance& from);

}  // namespace mtraining::bench
