// backward, queries pass, fp16, head_dim up to 64.
#include "mtraining/kernels/sm80/backward_queries_kernel.cuh"

namespace mtraining::kernels::sm80 {

cudaError_t launch_backward_queries_fp16_d64(const BackwardArgs& args, const Launch& l) {
  return launch_backward_queries<__half, 64>(args, l);
}

}  // namespace mtraining::kernels::sm80
