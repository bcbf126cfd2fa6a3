// `mtraining plan`: memory per GPU, bytes per link, time of a train step, the best split of the ranks, and what binds.
//
// In:   a configuration, nodes x GPUs, rates of the machine. Out: text or one JSON object. Next: docs/math/plan.md has the formulas.
#pragma once

#include "mtraining/sim/step_plan.h"
#include "mtraining/train/config.h"

namespace mtraining::cli {

/// argv[0] is "plan". Returns the exit code; throws what base/check.h names.
int run_plan(int argc, char** argv);

/// The sizes that the formulas take, of a resolved run.
sim::DecoderSizes decoder_sizes(const model::DecoderConfig& model);
sim::RunShape run_shape(const train::RunConfig& config, const train::ResolvedRun& resolved);

}  // namespace mtraining::cli
