// dq by query blocks, fp16, head_dim 64.
#include "mtraining/kernels/sm90/query_kernel.cuh"

namespace mtraining::kernels::sm90 {

cudaError_t launch_queries_fp16_d64(const QueryArgs& args, bool beside, int num_sms,
                                    cudaStream_t stream) {
  return launch_queries<__half, 64>(args, beside, num_sms, stream);
}

}  // namespace mtraining::kernels::sm90
