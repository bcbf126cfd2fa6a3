#include "cli/device.h"

#include <ATen/DeviceAccelerator.h>

#include "mtraining/base/check.h"

namespace mtraining::cli {
namespace {

#ifdef MT_WITH_CUDA
constexpr bool kBuiltWithCuda = true;
#else
constexpr bool kBuiltWithCuda = false;
#endif

int visible_gpus() { return kBuiltWithCuda ? at::accelerator::deviceCount() : 0; }

}  // namespace

void choose_device(LoadedConfig& loaded, const topology::LaunchEnvironment& launch) {
  train::RunConfig& config = loaded.config;
  const auto is_given = [&](const char* key) { return loaded.where.contains(key); };
  const int ranks = launch.local_world_size.value_or(launch.world_size);
  const bool any_dtype = !is_given("model.dtype");
  if (!is_given("train.device")) {
    const bool fits = any_dtype || config.model.dtype != at::kFloat;
    config.train.device =
        fits && visible_gpus() >= ranks ? train::DeviceKind::kCuda : train::DeviceKind::kCpu;
  } else if (config.train.device == train::DeviceKind::kCuda) {
    MT_CHECK_SUPPORTED(kBuiltWithCuda,
                       "train.device: \"cuda\" needs a build with CUDA; this one has none");
    const int gpus = visible_gpus();
    MT_CHECK_ARG(gpus >= ranks, "train.device: \"cuda\" needs a GPU for each of the ", ranks,
                 " ranks of this machine, got ", gpus);
  }
  if (any_dtype && config.train.device == train::DeviceKind::kCuda)
    config.model.dtype = at::kBFloat16;
}

train::ResolvedRun resolve_here(LoadedConfig& loaded, const topology::LaunchEnvironment& launch) {
  try {
    choose_device(loaded, launch);
    return train::resolve(loaded.config, launch);
  } catch (const InvalidArgument& error) {
    throw InvalidArgument(with_place(loaded, error.what()));
  } catch (const Unsupported& error) {
    throw Unsupported(with_place(loaded, error.what()));
  }
}

}  // namespace mtraining::cli
