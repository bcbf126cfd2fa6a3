// Estimation on Hopper: what window.cu launches in place of window_kernel.cuh where the device and the call allow it.
//
// In:   WindowArgs and a tensor map of the keys. Out: as window_kernel.cuh. Next: window_sm90_kernel.cuh.
#pragma once

#include <cuda.h>

#include "mtraining/kernels/pattern_cuda/key_walk.h"
#include "mtraining/kernels/pattern_cuda/window_kernel.cuh"

namespace mtraining::kernels::pattern_cuda {

/// Key blocks of a thread block at most.
inline constexpr int kMostBlocks = 512;

struct HopperArgs {
  WindowArgs window;
  CUtensorMap keys;
  // Of 64 stacked rows that a thread block owns (key_walk.h); those beyond the rows are idle.
  int32_t tiles;
};

/// One instantiation a file. kScan, or kMasses of consecutive rows without offsets.
using HopperLauncher = cudaError_t (*)(Pass pass, DType dtype, const HopperArgs& args, int64_t grid,
                                       cudaStream_t stream);
cudaError_t launch_hopper_d64(Pass, DType, const HopperArgs&, int64_t, cudaStream_t);
cudaError_t launch_hopper_d128(Pass, DType, const HopperArgs&, int64_t, cudaStream_t);

}  // namespace mtraining::kernels::pattern_cuda
