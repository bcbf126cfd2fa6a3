// Device: the GPU that a rank trains on, and what its allocator says of memory.
//
// In:   ResolvedRun.device. Out: the process's current device, set up; peaks in bytes. Next: trainer.cc, step_metrics.cc.
//
// Everything here goes through torch's interfaces for any accelerator: the library needs no CUDA to be built.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>

namespace mtraining::train {

/// Makes it the calling thread's, and, where the environment does not say otherwise, lets its allocator grow segments, so that
/// long runs do not fragment; before the first allocation. Nothing on the CPU.
void enter_device(at::Device device);

/// The tensor itself where it is there already; else a copy that the device makes in its turn, without the host waiting for it.
at::Tensor to_device(const at::Tensor& tensor, at::Device device);

struct DeviceMemory {
  int64_t tensors = 0;  ///< most bytes of live tensors
  int64_t reserved =
      0;  ///< most bytes that the allocator held: what the run needs of the GPU, but for libraries
};
/// Since the last reset. Zeros on the CPU.
DeviceMemory peak_memory(at::Device device);
void reset_peak_memory(at::Device device);
/// Gives what the allocator holds and nobody uses back to the device. Waits for it.
void release_cached_memory(at::Device device);

}  // namespace mtraining::train
