// WeightsRun: what verbs that run the weights of a folder on one rank have in common: their options, their configuration, their device.
//
// In:   --checkpoint, --set, --threads, a pattern. Out: a checked configuration, this process ready to run it.
// Next: eval.cc, eval_tasks.cc, generate.cc.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>
#include <vector>

#include "cli/config_file.h"
#include "mtraining/base/parallel.h"

namespace mtraining::cli {

struct WeightsOptions {
  std::string checkpoint;
  std::vector<std::string> set;
  int threads = num_threads();
};
/// --checkpoint, --set, --threads.
void add_weights_options(CLI::App& app, WeightsOptions& options);
/// Errors: InvalidArgument: no --checkpoint (the message begins with `verb`), threads out of range.
void check_weights_options(const std::string& verb, const WeightsOptions& options);

/// Errors: InvalidArgument unless the flag is absent or its value at least 1.
void check_positive(const CLI::App& app, const char* flag, int64_t value);

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
/// Threads and device of this process.
void enter(const WeightsRun& run, int threads);

}  // namespace mtraining::cli
