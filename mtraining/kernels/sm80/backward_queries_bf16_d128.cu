// backward, queries pass, bf16, head_dim up to 128.
#include "mtraining/kernels/sm80/backward_queries_kernel.cuh"

namespace mtraining::kernels::sm80 {

cudaError_t launch_backward_queries_bf16_d128(const BackwardArgs& args, const Launch& l) {
  return launch_backward_queries<__nv_bfloat16, 128>(args, l);
}

}  // namespace mtraining::kernels::sm80
