// Convert: a Hugging Face folder becomes a checkpoint, a checkpoint a Hugging Face folder, a training state one of other ranks.
//
// In:   the command line after `mtraining`. Out: a new folder, published whole or not at all. Next: train --resume, transformers.
#pragma once

#include <filesystem>
#include <string>

namespace mtraining::cli {

/// The folder with weights that a user names: a Hugging Face folder, a checkpoint, or the last checkpoint of a run's folder.
/// Errors: InvalidArgument where it is none.
std::filesystem::path find_weights(const std::string& from);

/// Errors: InvalidArgument for what cannot be read or is there already; ExternalError where the disk fails.
int run_convert(int argc, char** argv);

}  // namespace mtraining::cli
