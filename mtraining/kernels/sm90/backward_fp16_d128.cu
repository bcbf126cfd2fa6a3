// backward, fp16, head_dim 128.
#include "mtraining/kernels/sm90/backward_kernel.cuh"

namespace mtraining::kernels::sm90 {

cudaError_t launch_backward_fp16_d128(const BackwardArgs& args, bool with_queries, int num_sms,
                                      cudaStream_t stream) {
  return launch_backward<__half, 128>(args, with_queries, num_sms, stream);
}

}  // namespace mtraining::kernels::sm90
