#include "mtraining/train/device.h"

#include <ATen/ATen.h>
#include <ATen/DeviceAccelerator.h>
#include <c10/core/AllocatorConfig.h>

#include <cstdlib>

namespace mtraining::train {

void enter_device(at::Device device) {
  if (device.is_cpu()) return;
  // Pinned memory is touched by several threads: one would take minutes for a hundred gigabytes.
  const bool given = std::getenv("PYTORCH_ALLOC_CONF") != nullptr ||
                     std::getenv("PYTORCH_CUDA_ALLOC_CONF") != nullptr;
  if (!given) {
    c10::CachingAllocator::setAllocatorSettings(
        "expandable_segments:True,pinned_use_cuda_host_register:True,"
        "pinned_num_register_threads:8");
  }
  at::accelerator::setDeviceIndex(device.index());
}

at::Tensor to_device(const at::Tensor& tensor, at::Device device) {
  if (tensor.device() == device) return tensor;
  if (!tensor.is_cpu()) return tensor.to(device);
  return tensor.pin_memory().to(tensor.options().device(device), /*non_blocking=*/true);
}

DeviceMemory peak_memory(at::Device device) {
  if (device.is_cpu()) return {};
  const auto stats = at::accelerator::getDeviceStats(device.index());
  constexpr size_t kAll = 0;  // of the allocator's pools
  return {stats.allocated_bytes[kAll].peak, stats.reserved_bytes[kAll].peak};
}

void release_cached_memory(at::Device device) {
  if (!device.is_cpu()) at::accelerator::emptyCache();
}

void reset_peak_memory(at::Device device) {
  if (!device.is_cpu()) at::accelerator::resetPeakStats(device.index());
}

}  // namespace mtraining::train
