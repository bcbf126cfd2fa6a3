// forward, bf16, head_dim up to 256.
#include "mtraining/kernels/sm80/forward_kernel.cuh"

namespace mtraining::kernels::sm80 {

cudaError_t launch_forward_bf16_d256(const ForwardArgs& args, const Launch& l) {
  return launch_forward<__nv_bfloat16, 256>(args, l);
}

}  // namespace mtraining::kernels::sm80
