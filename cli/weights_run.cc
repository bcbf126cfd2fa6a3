#include "cli/weights_run.h"

#include <ATen/Parallel.h>

#include <nlohmann/json.hpp>

#include "cli/device.h"
#include "mtraining/base/check.h"
#include "mtraining/train/device.h"

namespace mtraining::cli {

void add_weights_options(CLI::App& app, WeightsOptions& options) {
  app.add_option("--checkpoint", options.checkpoint, "The weights (required)");
  app.add_option("--set", options.set,
                 "A key of the configuration: attention.p_slash=0.95, model.dtype=bf16")
      ->expected(1)
      ->take_all();
  app.add_option("--threads", options.threads, "Of this process")->capture_default_str();
}

void check_weights_options(const std::string& verb, const WeightsOptions& options) {
  MT_CHECK_ARG(!options.checkpoint.empty(), verb, ": expected --checkpoint DIR, got none");
  MT_CHECK_ARG(options.threads >= 1 && options.threads <= 1024,
               "--threads: expected 1 to 1024, got ", options.threads);
}

void check_positive(const CLI::App& app, const char* flag, int64_t value) {
  MT_CHECK_ARG(app.count(flag) == 0 || value >= 1, flag, ": expected at least 1, got ", value);
}

WeightsRun configure_weights(const std::string& weights, const std::string& data,
                             const std::string& attention, int64_t seq_len,
                             const std::vector<std::string>& set) {
  using Json = nlohmann::json;
  std::vector<Override> overrides = {{"model.init_from", Json(weights).dump()},
                                     {"data.train", Json(data).dump()},
                                     {"train.seq_len", std::to_string(seq_len)},
                                     {"train.steps", "1"},
                                     {"attention.pattern", Json(attention).dump()}};
  for (const std::string& text : set) {
    const size_t equals = text.find('=');
    MT_CHECK_ARG(equals != std::string::npos && equals > 0, "--set: expected key=value, got '",
                 text, "'");
    const Override given{text.substr(0, equals), text.substr(equals + 1)};
    for (const Override& ours : overrides)
      MT_CHECK_ARG(ours.key != given.key, "--set ", given.key, ": this verb has an option for it");
    overrides.push_back(given);
  }
  WeightsRun made{configure(overrides), {}};
  topology::LaunchEnvironment launch;
  launch.local_world_size = 1;
  made.resolved = resolve_here(made.loaded, launch);
  return made;
}

void enter(const WeightsRun& run, int threads) {
  set_num_threads(threads);
  at::set_num_threads(threads);
  train::enter_device(run.resolved.device);
}

}  // namespace mtraining::cli
