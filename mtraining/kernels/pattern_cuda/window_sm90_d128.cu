// Estimation on Hopper for head_dim 128.
#include "mtraining/kernels/pattern_cuda/window_sm90_kernel.cuh"

namespace mtraining::kernels::pattern_cuda {

cudaError_t launch_hopper_d128(Pass pass, DType dtype, const HopperArgs& args, int64_t grid,
                               cudaStream_t stream) {
  return dtype == DType::kBFloat16 ? launch_hopper_of<__nv_bfloat16, 128>(pass, args, grid, stream)
                                   : launch_hopper_of<__half, 128>(pass, args, grid, stream);
}

}  // namespace mtraining::kernels::pattern_cuda
