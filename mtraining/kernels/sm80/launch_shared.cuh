// What every launch of a kernel with much shared memory does first.
//
// In:   a kernel. Out: its attributes on the current device. Next: *_kernel.cuh.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

namespace mtraining::kernels::sm80 {

/// Lets a kernel use as much shared memory as the device has, once a device.
template <typename Kernel>
cudaError_t allow_shared_memory(Kernel kernel, std::atomic<uint64_t>& ready) {
  int device = 0, most = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  if ((ready.load(std::memory_order_acquire) >> (device & 63) & 1) != 0) return cudaSuccess;
  error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error != cudaSuccess) return error;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
  if (error != cudaSuccess) return error;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                               cudaSharedmemCarveoutMaxShared);
  if (error == cudaSuccess) ready.fetch_or(uint64_t{1} << (device & 63), std::memory_order_release);
  return error;
}

}  // namespace mtraining::kernels::sm80
