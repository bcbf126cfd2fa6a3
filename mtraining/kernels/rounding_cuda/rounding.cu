#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "mtraining/base/check.h"
#include "mtraining/kernels/device/rounded_rows.cuh"
#include "mtraining/kernels/dispatch.h"
#include "mtraining/kernels/rounding_cuda/rounding.h"

namespace mtraining::kernels::rounding_cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kAtOnce = 8;  // values of a thread's step: 16 bytes are written

struct Arrays {
  Rounded array[kMaxRounded];
  int64_t first_step[kMaxRounded + 1];  // of the array, in steps
  int count;
};

template <typename Half>
__device__ __forceinline__ uint16_t round_one(float x) {
  return static_cast<uint16_t>(device::round_pair<Half>(make_float2(x, 0)));
}

template <typename Half>
__global__ void __launch_bounds__(kThreads) round_kernel(const __grid_constant__ Arrays arrays) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t steps = arrays.first_step[arrays.count];
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < steps;
       i += step) {
    int a = 0;
    while (i >= arrays.first_step[a + 1]) ++a;
    const Rounded& array = arrays.array[a];
    const int64_t first = (i - arrays.first_step[a]) * kAtOnce;
    auto* const to = static_cast<uint16_t*>(array.to);
    if (first + kAtOnce <= array.count) {
      const float4* from = reinterpret_cast<const float4*>(array.values + first);
      const float4 x = __ldcs(from), y = __ldcs(from + 1);
      __stcs(reinterpret_cast<uint4*>(to + first),
             make_uint4(device::round_pair<Half>(make_float2(x.x, x.y)),
                        device::round_pair<Half>(make_float2(x.z, x.w)),
                        device::round_pair<Half>(make_float2(y.x, y.y)),
                        device::round_pair<Half>(make_float2(y.z, y.w))));
    } else {
      for (int64_t j = first; j < array.count; ++j) to[j] = round_one<Half>(array.values[j]);
    }
  }
}

}  // namespace

void round(std::span<const Rounded> given, DType dtype, void* stream) {
  MT_CHECK_SUPPORTED(dtype == DType::kBFloat16 || dtype == DType::kFloat16,
                     "rounding: expected bf16 or fp16, got ", to_string(dtype));
  MT_CHECK_SUPPORTED(given.size() <= kMaxRounded, "rounding: expected at most ", kMaxRounded,
                     " arrays, got ", given.size());
  Arrays arrays = {};
  for (const Rounded& array : given) {
    if (array.count == 0) continue;
    arrays.array[arrays.count] = array;
    arrays.first_step[arrays.count + 1] =
        arrays.first_step[arrays.count] + (array.count + kAtOnce - 1) / kAtOnce;
    ++arrays.count;
  }
  if (arrays.count == 0) return;
  // Enough to fill any device; each thread loops.
  const auto blocks = static_cast<unsigned>(
      std::clamp<int64_t>((arrays.first_step[arrays.count] + kThreads - 1) / kThreads, 1, 8192));
  const auto on = static_cast<cudaStream_t>(stream);
  if (dtype == DType::kBFloat16) {
    round_kernel<__nv_bfloat16><<<blocks, kThreads, 0, on>>>(arrays);
  } else {
    round_kernel<__half><<<blocks, kThreads, 0, on>>>(arrays);
  }
  const cudaError_t error = cudaGetLastError();
  MT_CHECK_EXTERNAL(error == cudaSuccess, "rounding: ", cudaGetErrorString(error));
}

}  // namespace mtraining::kernels::rounding_cuda
