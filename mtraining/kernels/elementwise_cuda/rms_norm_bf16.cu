#include "mtraining/kernels/elementwise_cuda/rms_norm_kernel.cuh"

namespace mtraining::kernels::elementwise_cuda {

void rms_norm_bf16(const RmsNormForward& params) {
  with_norm<__nv_bfloat16>(params.width, [&](auto norm) { norm.forward(params); });
}
void rms_norm_backward_bf16(const RmsNormBackward& params) {
  with_norm<__nv_bfloat16>(params.width, [&](auto norm) { norm.backward(params); });
}
int64_t rms_norm_partial_rows_bf16(int64_t rows, int64_t width) {
  return with_norm<__nv_bfloat16>(width, [&](auto norm) { return norm.partial_rows(rows); });
}

}  // namespace mtraining::kernels::elementwise_cuda
