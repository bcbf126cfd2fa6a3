#include <algorithm>

#include "mtraining/kernels/elementwise_cuda/vector.cuh"

namespace mtraining::kernels::elementwise_cuda {
namespace {

constexpr int kColumns = 32, kLanes = 32;

template <typename T>
__global__ void __launch_bounds__(kColumns* kLanes)
    sum_rows_kernel(const float* partials, int64_t rows, int64_t width, T* sums) {
  __shared__ float lanes[kLanes][kColumns + 1];
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kColumns + threadIdx.x;
  float sum = 0;
  if (column < width) {
    for (int64_t row = threadIdx.y; row < rows; row += kLanes)
      sum += partials[row * width + column];
  }
  lanes[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= width) return;
  sum = 0;
  for (int lane = 0; lane < kLanes; ++lane) sum += lanes[lane][threadIdx.x];
  sums[column] = narrow<T>(sum);
}

}  // namespace

void sum_rows(const float* partials, int64_t rows, int64_t width, DType dtype, void* sums,
              cudaStream_t stream) {
  const dim3 threads(kColumns, kLanes);
  const auto blocks = static_cast<unsigned>((width + kColumns - 1) / kColumns);
  if (dtype == DType::kFloat32) {
    sum_rows_kernel<float>
        <<<blocks, threads, 0, stream>>>(partials, rows, width, static_cast<float*>(sums));
  } else {
    sum_rows_kernel<__nv_bfloat16>
        <<<blocks, threads, 0, stream>>>(partials, rows, width, static_cast<__nv_bfloat16*>(sums));
  }
  check_cuda(cudaGetLastError(), "sum of partial sums");
}

}  // namespace mtraining::kernels::elementwise_cuda
