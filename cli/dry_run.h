// DryRun: all that can be said of a run before its data is opened and its ranks have met.
//
// In:   a resolved configuration, the launch, what --resume found. Out: text on standard output: the configuration as TOML, then
//       comments. Next: the reader.
#pragma once

#include <string>

#include "cli/resume.h"
#include "mtraining/topology/topology.h"
#include "mtraining/train/config.h"

namespace mtraining::cli {

/// `launching`: --nproc starts the ranks. Errors: ExternalError where the run's folder cannot be written; Unsupported where no kernel serves the
/// configuration.
void print_dry_run(const train::RunConfig& config, const train::ResolvedRun& resolved,
                   const topology::LaunchEnvironment& launch, bool launching, const Start& start);

/// Trainable values of the model.
int64_t count_parameters(const model::DecoderConfig& model);

}  // namespace mtraining::cli
