#include <algorithm>

#include "mtraining/base/check.h"
#include "mtraining/kernels/dispatch.h"
#include "mtraining/kernels/elementwise_cuda/random_normal.h"
#include "mtraining/kernels/elementwise_cuda/vector.cuh"

namespace mtraining::kernels::elementwise_cuda {
namespace {

constexpr int kThreads = 256;

template <typename T>
__global__ void __launch_bounds__(kThreads)
    random_normal_kernel(const Rng rng, double deviation, int64_t count, T* values) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count; i += step)
    values[i] = narrow<T>(static_cast<float>(deviation * rng.normal(static_cast<uint64_t>(i))));
}

}  // namespace

void random_normal(const Rng& rng, double deviation, int64_t count, DType dtype, void* values,
                   void* stream) {
  MT_CHECK_SUPPORTED(dtype == DType::kFloat32 || dtype == DType::kBFloat16,
                     "random values on a GPU: expected float32 or bf16, got ", to_string(dtype));
  if (count == 0) return;
  // Enough to fill any device; each thread loops.
  const auto blocks =
      static_cast<unsigned>(std::clamp<int64_t>((count + kThreads - 1) / kThreads, 1, 8192));
  const auto on = static_cast<cudaStream_t>(stream);
  if (dtype == DType::kFloat32) {
    random_normal_kernel<<<blocks, kThreads, 0, on>>>(rng, deviation, count,
                                                      static_cast<float*>(values));
  } else {
    random_normal_kernel<<<blocks, kThreads, 0, on>>>(rng, deviation, count,
                                                      static_cast<__nv_bfloat16*>(values));
  }
  check_cuda(cudaGetLastError(), "random values");
}

}  // namespace mtraining::kernels::elementwise_cuda
