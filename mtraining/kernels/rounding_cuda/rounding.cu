#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "mtraining/base/check.h"
#include "mtraining/kernels/dispatch.h"
#include "mtraining/kernels/rounding_cuda/rounding.h"

namespace mtraining::kernels::rounding_cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kAtOnce = 4;  // values of a thread's step

template <typename Half>
__device__ __forceinline__ Half narrow(float x) {
  if constexpr (sizeof(Half) == 2 && std::is_same_v<Half, __half>)
    return __float2half_rn(x);
  else
    return __float2bfloat16_rn(x);
}
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename Half>
union Four {
  uint2 words;
  Half values[kAtOnce];
};

template <typename Half>
__global__ void __launch_bounds__(kThreads)
    split_kernel(const float* values, int64_t count, Half* rounded, Half* residual) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads * kAtOnce;
  for (int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kAtOnce; i < count;
       i += step) {
    if (i + kAtOnce <= count) {
      const float4 v = *reinterpret_cast<const float4*>(values + i);
      const float x[kAtOnce] = {v.x, v.y, v.z, v.w};
      Four<Half> near, rest;
#pragma unroll
      for (int e = 0; e < kAtOnce; ++e) {
        near.values[e] = narrow<Half>(x[e]);
        rest.values[e] = narrow<Half>(x[e] - widen(near.values[e]));
      }
      *reinterpret_cast<uint2*>(rounded + i) = near.words;
      if (residual != nullptr) *reinterpret_cast<uint2*>(residual + i) = rest.words;
    } else {
      for (int64_t j = i; j < count; ++j) {
        rounded[j] = narrow<Half>(values[j]);
        if (residual != nullptr) residual[j] = narrow<Half>(values[j] - widen(rounded[j]));
      }
    }
  }
}

template <typename Half>
__global__ void __launch_bounds__(kThreads)
    join_kernel(const Half* rounded, const Half* residual, int64_t count, float* values) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads * kAtOnce;
  for (int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kAtOnce; i < count;
       i += step) {
    if (i + kAtOnce <= count) {
      Four<Half> near, rest;
      near.words = *reinterpret_cast<const uint2*>(rounded + i);
      rest.words =
          residual == nullptr ? uint2{0, 0} : *reinterpret_cast<const uint2*>(residual + i);
      float x[kAtOnce];
#pragma unroll
      for (int e = 0; e < kAtOnce; ++e) x[e] = widen(near.values[e]) + widen(rest.values[e]);
      *reinterpret_cast<float4*>(values + i) = float4{x[0], x[1], x[2], x[3]};
    } else {
      for (int64_t j = i; j < count; ++j)
        values[j] = widen(rounded[j]) + (residual == nullptr ? 0.0f : widen(residual[j]));
    }
  }
}

unsigned grid_for(int64_t count) {
  // Enough to fill any device; each thread loops.
  return static_cast<unsigned>(
      std::clamp<int64_t>((count / kAtOnce + kThreads - 1) / kThreads, 1, 4096));
}

void check_launch(const char* what) {
  const cudaError_t error = cudaGetLastError();
  MT_CHECK_EXTERNAL(error == cudaSuccess, what, ": ", cudaGetErrorString(error));
}

void check_half(DType dtype) {
  MT_CHECK_SUPPORTED(dtype == DType::kBFloat16 || dtype == DType::kFloat16,
                     "rounding: expected bf16 or fp16, got ", to_string(dtype));
}

}  // namespace

void split(const float* values, int64_t count, DType dtype, void* rounded, void* residual,
           void* stream) {
  check_half(dtype);
  if (count == 0) return;
  const auto on = static_cast<cudaStream_t>(stream);
  if (dtype == DType::kBFloat16) {
    using Half = __nv_bfloat16;
    split_kernel<Half><<<grid_for(count), kThreads, 0, on>>>(
        values, count, static_cast<Half*>(rounded), static_cast<Half*>(residual));
  } else {
    split_kernel<__half><<<grid_for(count), kThreads, 0, on>>>(
        values, count, static_cast<__half*>(rounded), static_cast<__half*>(residual));
  }
  check_launch("rounding");
}

void join(const void* rounded, const void* residual, int64_t count, DType dtype, float* values,
          void* stream) {
  check_half(dtype);
  if (count == 0) return;
  const auto on = static_cast<cudaStream_t>(stream);
  if (dtype == DType::kBFloat16) {
    using Half = __nv_bfloat16;
    join_kernel<Half><<<grid_for(count), kThreads, 0, on>>>(
        static_cast<const Half*>(rounded), static_cast<const Half*>(residual), count, values);
  } else {
    join_kernel<__half><<<grid_for(count), kThreads, 0, on>>>(
        static_cast<const __half*>(rounded), static_cast<const __half*>(residual), count, values);
  }
  check_launch("rounding");
}

}  // namespace mtraining::kernels::rounding_cuda
