// Resume: what a launch does with the run that its folder holds.
//
// In:   --resume, the configuration, the folder's checkpoints. Out: begin anew, go on from a checkpoint, or nothing is left to do.
// Next: train.cc.
//
// Keys fall into three kinds. The state means nothing under another model, other data or another batch: such a key is refused. Another
// pattern or learning rate would silently make another run: refused too, unless a checkpoint is named with --resume. How the
// work is split, measured and saved is free, and train.steps may grow.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "mtraining/train/config.h"

namespace mtraining::cli {

enum class StartKind { kAnew, kResume, kFinished };

struct Start {
  StartKind kind = StartKind::kAnew;
  std::string checkpoint;            ///< folder; kResume, kFinished
  int64_t steps_done = 0;            ///< of the checkpoint
  std::vector<std::string> notices;  ///< sentences for the reader
};

/// `resume`: "auto" (the last complete checkpoint of config.out, if it holds any), "never", or a path: a checkpoint, or a run's folder.
/// Reads only; every rank finds the same. `steps`: how many the run wants.
/// Errors: InvalidArgument: the folder holds a run that is not this one (the key is named), no run's checkpoint, or with
/// "never" any run; what train::read_checkpoint_info refuses.
Start choose_start(const std::string& resume, const train::RunConfig& config, int64_t steps);

}  // namespace mtraining::cli
