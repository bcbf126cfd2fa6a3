// forward, fp16, head_dim up to 128.
#include "mtraining/kernels/sm80/forward_kernel.cuh"

namespace mtraining::kernels::sm80 {

cudaError_t launch_forward_fp16_d128(const ForwardArgs& args, const Launch& l) {
  return launch_forward<__half, 128>(args, l);
}

}  // namespace mtraining::kernels::sm80
