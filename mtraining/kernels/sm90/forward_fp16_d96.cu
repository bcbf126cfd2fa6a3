// forward, fp16, head_dim 96.
#include "mtraining/kernels/sm90/forward_kernel.cuh"

namespace mtraining::kernels::sm90 {

cudaError_t launch_forward_fp16_d96(const ForwardArgs& args, int num_sms, cudaStream_t stream) {
  return launch_forward<__half, 96>(args, num_sms, stream);
}

}  // namespace mtraining::kernels::sm90
