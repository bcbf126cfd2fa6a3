// Estimation on Hopper for head_dim 64.
#include "mtraining/kernels/pattern_cuda/window_sm90_kernel.cuh"

namespace mtraining::kernels::pattern_cuda {

cudaError_t launch_hopper_d64(Pass pass, DType dtype, const HopperArgs& args, int64_t grid,
                              cudaStream_t stream) {
  return dtype == DType::kBFloat16 ? launch_hopper_of<__nv_bfloat16, 64>(pass, args, grid, stream)
                                   : launch_hopper_of<__half, 64>(pass, args, grid, stream);
}

}  // namespace mtraining::kernels::pattern_cuda
