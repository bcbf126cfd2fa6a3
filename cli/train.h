// `mtraining train`.
//
// In:   the command line. Out: a run's folder, an exit code. Next: train/job.h; with --nproc first launcher.h.
#pragma once

namespace mtraining::cli {

/// argv[0] is "train". Returns the exit code; throws what base/check.h names.
int run_train(int argc, char** argv);

}  // namespace mtraining::cli
