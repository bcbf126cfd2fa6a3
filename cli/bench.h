// `mtraining bench`: measures attention, the ring or the trainer on this machine.
//
// In:   the command line. Out: one JSON object a line on standard output. Next: docs/benchmarks/, python/mtraining/benchmarks.py.
#pragma once

namespace mtraining::cli {

/// argv[0] is "bench". Returns the exit code; throws what base/check.h names.
int run_bench(int argc, char** argv);

int bench_attention(int argc, char** argv);  ///< argv[0] is "attention"
int bench_ring(int argc, char** argv);       ///< argv[0] is "ring"
int bench_train(int argc, char** argv);      ///< argv[0] is "train"

}  // namespace mtraining::cli
