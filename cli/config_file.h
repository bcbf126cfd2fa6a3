// ConfigFile: a TOML file and overrides from the command line become a train::RunConfig, and a RunConfig becomes TOML.
//
// In:   path, overrides "train.steps=10". Out: RunConfig, and for each key where it came from (for messages).
// Next: train::resolve().
//
// One list of keys (visit_keys in the source) serves reading, writing and the search for the nearest key. Unknown keys and
// keys of parts that are not built are refused.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "mtraining/train/config.h"

namespace mtraining::cli {

struct LoadedConfig {
  train::RunConfig config;
  std::map<std::string, std::string> where;  ///< key -> "file:line" or "--set key=value"
};

struct Override {
  std::string key, value;
};

/// Errors: InvalidArgument / Unsupported, one sentence, beginning with where.
LoadedConfig load_config(const std::string& path, const std::vector<Override>& overrides);

/// The same without a file: overrides alone.
LoadedConfig configure(const std::vector<Override>& overrides);

/// The text of `message`, with the place of the key that it begins with put in front, where it begins with a key.
std::string with_place(const LoadedConfig& loaded, const std::string& message);

/// All keys with their values, absent ones left out.
std::string to_toml(const train::RunConfig& config);

/// Key -> value, both as text, of what to_toml() wrote.
std::map<std::string, std::string> keys_of(const std::string& toml);

/// Names of all keys.
std::vector<std::string> known_keys();

}  // namespace mtraining::cli
