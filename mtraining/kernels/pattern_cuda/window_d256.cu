// The estimation kernels for head_dim 256.
#include "mtraining/kernels/pattern_cuda/window_kernel.cuh"

namespace mtraining::kernels::pattern_cuda {

cudaError_t launch_window_d256(Pass pass, bool consecutive, DType dtype, int warps,
                               const WindowArgs& args, int64_t grid, cudaStream_t stream) {
  return launch_window_of<256>(pass, consecutive, dtype, warps, args, grid, stream);
}

}  // namespace mtraining::kernels::pattern_cuda
