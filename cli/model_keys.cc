#include "cli/model_keys.h"

#include <filesystem>
#include <optional>
#include <set>

#include "cli/config_file.h"
#include "mtraining/base/check.h"

namespace mtraining::cli {
namespace {

using model::RopeType;

constexpr const char* kPrefix = "model.rope_scaling.";

std::optional<RopeType> rope_type_of(const train::RopeScalingSection& keys) {
  if (!keys.rope_type) return std::nullopt;
  if (*keys.rope_type == "none") return RopeType::kDefault;
  for (const RopeType type :
       {RopeType::kDefault, RopeType::kLinear, RopeType::kYarn, RopeType::kLlama3}) {
    if (model::to_string(type) == *keys.rope_type) return type;
  }
  throw InvalidArgument(concat(kPrefix,
                               "rope_type: expected \"none\", \"linear\", \"yarn\" or "
                               "\"llama3\", got \"",
                               *keys.rope_type, '"'));
}

/// Names of the fields that are given.
std::set<std::string> given_fields(const train::RopeScalingSection& k) {
  std::set<std::string> names;
  const auto add = [&](const char* name, bool given) {
    if (given) names.insert(name);
  };
  add("factor", k.factor.has_value());
  add("original_max_position_embeddings", k.original_max_position_embeddings.has_value());
  add("beta_fast", k.beta_fast.has_value());
  add("beta_slow", k.beta_slow.has_value());
  add("attention_factor", k.attention_factor.has_value());
  add("mscale", k.mscale.has_value());
  add("mscale_all_dim", k.mscale_all_dim.has_value());
  add("truncate", k.truncate.has_value());
  add("low_freq_factor", k.low_freq_factor.has_value());
  add("high_freq_factor", k.high_freq_factor.has_value());
  return names;
}

std::set<std::string> fields_of(RopeType type) {
  switch (type) {
    case RopeType::kDefault:
      return {};
    case RopeType::kLinear:
      return {"factor"};
    case RopeType::kYarn:
      return {"factor",           "original_max_position_embeddings",
              "beta_fast",        "beta_slow",
              "attention_factor", "mscale",
              "mscale_all_dim",   "truncate"};
    case RopeType::kLlama3:
      return {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"};
  }
  return {};
}

}  // namespace

model::RopeParameters merged_rope(const train::RopeScalingSection& keys,
                                  const model::RopeParameters& base, int64_t length) {
  const std::set<std::string> given = given_fields(keys);
  const std::optional<RopeType> type = rope_type_of(keys);
  if (!type) {
    MT_CHECK_ARG(given.empty(), kPrefix, given.empty() ? "" : *given.begin(),
                 ": expected model.rope_scaling.rope_type beside it, got none");
    return base;
  }
  const std::set<std::string> read = fields_of(*type);
  for (const std::string& name : given) {
    MT_CHECK_ARG(read.contains(name), kPrefix, name, ": is no field of rope_type \"",
                 *keys.rope_type, '"');
  }
  model::RopeParameters rope;
  rope.type = *type;
  rope.rope_theta = base.rope_theta;
  if (read.contains("factor")) {
    MT_CHECK_ARG(keys.factor.has_value(), kPrefix, "rope_type: \"", *keys.rope_type,
                 "\" needs model.rope_scaling.factor, got none");
    rope.factor = *keys.factor;
  }
  if (read.contains("original_max_position_embeddings")) {
    rope.original_max_position_embeddings = keys.original_max_position_embeddings.value_or(
        base.type != RopeType::kDefault && base.original_max_position_embeddings > 0
            ? base.original_max_position_embeddings
            : length);
    MT_CHECK_ARG(keys.original_max_position_embeddings.has_value() ||
                     rope.original_max_position_embeddings > 0,
                 kPrefix, "rope_type: \"", *keys.rope_type,
                 "\" needs model.rope_scaling.original_max_position_embeddings, got none");
  }
  rope.beta_fast = keys.beta_fast.value_or(rope.beta_fast);
  rope.beta_slow = keys.beta_slow.value_or(rope.beta_slow);
  rope.attention_factor = keys.attention_factor;
  rope.mscale = keys.mscale;
  rope.mscale_all_dim = keys.mscale_all_dim;
  rope.truncate = keys.truncate.value_or(rope.truncate);
  rope.low_freq_factor = keys.low_freq_factor.value_or(rope.low_freq_factor);
  rope.high_freq_factor = keys.high_freq_factor.value_or(rope.high_freq_factor);
  try {
    model::check(rope);
  } catch (const InvalidArgument& error) {  // model/ says "rope factor: .."
    const std::string message = error.what();
    const std::string field = message.substr(message.find(' ') + 1);
    throw InvalidArgument(field.starts_with("rope_theta") ? concat("model.", field)
                                                          : concat(kPrefix, field));
  }
  return rope;
}

train::RopeScalingSection rope_keys(const model::RopeParameters& rope) {
  train::RopeScalingSection keys;
  if (rope.type == RopeType::kDefault) {
    keys.rope_type = "none";
    return keys;
  }
  keys.rope_type = std::string(model::to_string(rope.type));
  keys.factor = rope.factor;
  if (rope.type == RopeType::kLinear) return keys;
  keys.original_max_position_embeddings = rope.original_max_position_embeddings;
  if (rope.type == RopeType::kYarn) {
    keys.beta_fast = rope.beta_fast;
    keys.beta_slow = rope.beta_slow;
    keys.attention_factor = rope.attention_factor;
    keys.mscale = rope.mscale;
    keys.mscale_all_dim = rope.mscale_all_dim;
    keys.truncate = rope.truncate;
  } else {
    keys.low_freq_factor = rope.low_freq_factor;
    keys.high_freq_factor = rope.high_freq_factor;
  }
  return keys;
}

int64_t take_model_from(train::RunConfig& config, const KeyPlaces& given) {
  const std::string folder = *config.init_from;
  const std::string where = given.at("model.init_from");
  std::error_code ignored;
  MT_CHECK_ARG(
      std::filesystem::is_regular_file(std::filesystem::path(folder) / "config.json", ignored),
      where, ": model.init_from: expected a folder with config.json, got \"", folder, '"');
  train::RunConfig from_file;
  int64_t length = 0;
  try {
    const model::HfConfig hf = model::read_hf_config(folder);
    length = hf.max_position_embeddings;
    from_file.model = model::decoder_config(hf, config.model.dtype);
  } catch (const InvalidArgument& error) {
    throw InvalidArgument(concat(where, ": model.init_from: ", error.what()));
  } catch (const Unsupported& error) {
    throw Unsupported(concat(where, ": model.init_from: ", error.what()));
  }
  const std::map<std::string, std::string> mine = keys_of(to_toml(config));
  const std::map<std::string, std::string> theirs = keys_of(to_toml(from_file));
  for (const auto& [key, place] : given) {
    if (!key.starts_with("model.") || key.starts_with(kPrefix) || key == "model.init_from" ||
        key == "model.dtype" || key == "model.rope_theta")
      continue;
    MT_CHECK_ARG(mine.at(key) == theirs.at(key), place, ": ", key, ": expected ", theirs.at(key),
                 ", which ", folder, "/config.json has, or no key; got ", mine.at(key));
  }
  const double theta = config.model.rope.rope_theta;
  config.model = from_file.model;
  if (given.contains("model.rope_theta")) config.model.rope.rope_theta = theta;
  return length;
}

}  // namespace mtraining::cli
