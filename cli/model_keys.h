// ModelKeys: [model] keys that stretch the rotary positions, and what config.json of model.init_from says beside keys of the file.
//
// In:   keys as given; a config.json. Out: the model's rope; the model, or the key that disagrees.
// Next: config_file.h.
#pragma once

#include <map>
#include <string>

#include "mtraining/model/hf_config.h"
#include "mtraining/train/config.h"

namespace mtraining::cli {

/// Where each given key came from, for messages.
using KeyPlaces = std::map<std::string, std::string>;

/// `base`: what holds without keys; `length`: the original length where neither a key nor `base` names one (0: a key must).
/// rope_type "none" and "default" remove a scaling. Errors: InvalidArgument naming the key: another type, a field without
/// rope_type, a field that the type does not read or that it lacks, faults of model::check().
model::RopeParameters merged_rope(const train::RopeScalingSection& keys,
                                  const model::RopeParameters& base, int64_t length);
/// Keys from which merged_rope() makes the same.
train::RopeScalingSection rope_keys(const model::RopeParameters& rope);

/// Fills config.model from the config.json of config.init_from, its rope without rope_scaling's keys; returns the length that the
/// weights were trained for. Keys that were given beside it must say the same, but for
/// dtype, rope_theta and rope_scaling, which win. Errors: InvalidArgument, Unsupported: what model::read_hf_config refuses, a key
/// that disagrees.
int64_t take_model_from(train::RunConfig& config, const KeyPlaces& given);

}  // namespace mtraining::cli
