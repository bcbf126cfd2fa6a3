// backward, fp16, head_dim 64.
#include "mtraining/kernels/sm90/backward_kernel.cuh"

namespace mtraining::kernels::sm90 {

cudaError_t launch_backward_fp16_d64(const BackwardArgs& args, bool with_queries, int num_sms,
                                     cudaStream_t stream) {
  return launch_backward<__half, 64>(args, with_queries, num_sms, stream);
}

}  // namespace mtraining::kernels::sm90
