// The current CUDA device, and CUDA's errors as this project's.
//
// In:   nothing. Out: what the current device is, asked once a device. Next: every host function of this folder, launch.h.
#pragma once

#include <cuda_runtime.h>

#include "mtraining/kernels/dispatch.h"

namespace mtraining::kernels::pattern_cuda {

/// ExternalError "what: cause".
void check_cuda(cudaError_t error, const char* what);
/// Of the thread's current device, to which streams and memory of a call belong. Thread-safe.
const DeviceKind& device_of_stream();

}  // namespace mtraining::kernels::pattern_cuda
