// Weights: copies a model's parameters out of a Hugging Face folder and into one.
//
// In:   a WeightFolder and the parameters by name; or parameters and a folder. Out: parameters filled; or safetensors files.
// Next: the trainer's start and saving; transformers and servers load what is written.
//
// Every tensor of the files is used and every parameter is filled, or nothing is touched: a bias that is left out, or a head
// that starts from random numbers, trains without an error and to a worse model. One tensor is copied at a time out of the
// mapped file, so that the model is never held twice.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "mtraining/checkpoint/publication.h"
#include "mtraining/checkpoint/weight_folder.h"
#include "mtraining/model/decoder.h"
#include "mtraining/model/hf_config.h"

namespace mtraining::checkpoint {

/// Errors: Unsupported naming the type where there is no counterpart.
StoredType stored_type_of(at::ScalarType type);
at::ScalarType scalar_type_of(StoredType type);

/// Fills parameters in place, converting between float types; tensors that share storage go on sharing it. Parameters may be on
/// any device and of any float type (float32 masters are filled as exactly as the file has them).
/// tied_head: parameters hold no lm_head.weight, for it is the embedding; a file may still hold one, if it is the same bytes.
/// rotary_emb.inv_freq, which older files carry, follows from the configuration and is passed over.
/// Errors: InvalidArgument, before anything is copied, naming up to five each of: parameters that no file holds, tensors that no
/// parameter wants, shapes that differ (expected, got), types that are no floats; a head that differs from the embedding.
void load_weights(const WeightFolder& folder, const std::vector<model::Parameter>& parameters,
                  bool tied_head);
/// The checks of load_weights alone; parameters may be on the meta device.
void check_weights(const WeightFolder& folder, const std::vector<model::Parameter>& parameters,
                   bool tied_head);

/// A tensor as the file has it, to be read from only: the mapped bytes themselves (aligned memory of its own where a file has
/// them unaligned), so that it lives no longer than the folder. Errors: InvalidArgument where there is none of this name.
at::Tensor mapped_weight(const WeightFolder& folder, const std::string& name);

/// Writes the parameters as `type`, in their order, one on the host at a time. The folder must exist.
/// Errors: ExternalError (disk full, ..).
void save_weights(const std::filesystem::path& folder,
                  const std::vector<model::Parameter>& parameters, at::ScalarType type,
                  int64_t max_shard_bytes = 5'000'000'000);

/// Writes a whole Hugging Face folder: config.json for the trained length and `type`, the weights, and the companion files. The
/// folder must exist. Errors: those of save_weights, model::to_json and write_companion_files.
void save_model_folder(const std::filesystem::path& folder, const model::HfConfig& config,
                       int64_t trained_length, const std::vector<model::Parameter>& parameters,
                       at::ScalarType type, const CompanionFiles& companions);

}  // namespace mtraining::checkpoint
