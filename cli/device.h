// Device: whether a run trains on the GPUs of this machine.
//
// In:   a loaded configuration, the launcher's environment. Out: train.device and model.dtype filled where the file leaves them out;
//       or one sentence why the GPUs that it asks for cannot be had. Next: train::resolve().
//
// train.device absent: "cuda" where the build has CUDA and the machine shows a GPU for each of its ranks, unless model.dtype is
// "float32", else "cpu". model.dtype absent: "bf16" on a GPU, "float32" on the CPU. What was decided is in the run's config.toml.
#pragma once

#include "cli/config_file.h"
#include "mtraining/topology/topology.h"

namespace mtraining::cli {

/// Errors: Unsupported: a build without CUDA; InvalidArgument: fewer GPUs than ranks on this machine.
void choose_device(LoadedConfig& loaded, const topology::LaunchEnvironment& launch);

/// choose_device, then train::resolve. Errors of both, with the place of the key that they begin with.
train::ResolvedRun resolve_here(LoadedConfig& loaded, const topology::LaunchEnvironment& launch);

}  // namespace mtraining::cli
