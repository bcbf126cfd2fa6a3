// Gpu: what a test asks of the machine before it touches a GPU.
//
// In:   nothing. Out: the kind of device 0; a test that needs another one is skipped. Next: the tests of kernels/*_cuda, sm80, sm90.
//
// For tests that are built with CUDA only.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

namespace mtraining::testing {

/// Of device 0; 0 where there is none.
inline int gpu_major_capability() {
  int major = 0;
  return cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) == cudaSuccess ? major
                                                                                             : 0;
}

}  // namespace mtraining::testing

#define MT_NEEDS_GPU() \
  if (::mtraining::testing::gpu_major_capability() == 0) GTEST_SKIP() << "needs a CUDA device"
