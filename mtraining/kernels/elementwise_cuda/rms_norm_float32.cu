#include "mtraining/kernels/elementwise_cuda/rms_norm_kernel.cuh"

namespace mtraining::kernels::elementwise_cuda {

void rms_norm_float32(const RmsNormForward& params) {
  with_norm<float>(params.width, [&](auto norm) { norm.forward(params); });
}
void rms_norm_backward_float32(const RmsNormBackward& params) {
  with_norm<float>(params.width, [&](auto norm) { norm.backward(params); });
}
int64_t rms_norm_partial_rows_float32(int64_t rows, int64_t width) {
  return with_norm<float>(width, [&](auto norm) { return norm.partial_rows(rows); });
}

}  // namespace mtraining::kernels::elementwise_cuda
