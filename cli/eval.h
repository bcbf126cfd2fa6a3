// Eval: what weights are worth: the loss of a checkpoint over a token file, dense and with sparse patterns.
//
// In:   the command line after `mtraining`. Out: one JSON object a pattern. Next: docs/training.md, Evaluating weights.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cli/config_file.h"

namespace mtraining::cli {

/// The configuration of a verb that runs the weights of a folder on one rank.
struct WeightsRun {
  LoadedConfig loaded;
  train::ResolvedRun resolved;
};
/// `data` is named in it and not opened; `set`: key=value as the command line has them. Errors: InvalidArgument, Unsupported naming
/// the key: those of load_config, choose_device and train::resolve, a key that an option of the verb gives.
WeightsRun configure_weights(const std::string& weights, const std::string& data,
                             const std::string& attention, int64_t seq_len,
                             const std::vector<std::string>& set);

/// Errors: InvalidArgument, Unsupported for what the command line or its files have wrong.
int run_eval(int argc, char** argv);

}  // namespace mtraining::cli
