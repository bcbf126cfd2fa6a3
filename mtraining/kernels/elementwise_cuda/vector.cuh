// Vectors: 4 or 8 consecutive elements as float, loaded and stored 16 bytes at a time. Shared by the kernels of this folder.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "mtraining/base/check.h"
#include "mtraining/kernels/elementwise_cuda/elementwise.h"

namespace mtraining::kernels::elementwise_cuda {

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
template <typename T>
__device__ __forceinline__ T narrow(float x) {
  if constexpr (std::is_same_v<T, float>)
    return x;
  else
    return __float2bfloat16_rn(x);
}

/// kWide elements in registers as they are stored.
template <typename T, int kWide>
struct alignas(kWide * sizeof(T) < 16 ? kWide * sizeof(T) : 16) Packed {
  T values[kWide];

  __device__ __forceinline__ float operator[](int i) const { return widen(values[i]); }
  __device__ __forceinline__ void set(int i, float x) { values[i] = narrow<T>(x); }
};

template <int kWide, typename T>
__device__ __forceinline__ Packed<T, kWide> load(const T* from) {
  return *reinterpret_cast<const Packed<T, kWide>*>(from);
}
template <int kWide, typename T>
__device__ __forceinline__ void store(T* to, const Packed<T, kWide>& packed) {
  *reinterpret_cast<Packed<T, kWide>*>(to) = packed;
}

inline void check_cuda(cudaError_t error, const char* what) {
  MT_CHECK_EXTERNAL(error == cudaSuccess, what, ": ", cudaGetErrorString(error));
}

/// Thread blocks of `kernel` that the current device holds at once: a grid of them loops over the rows.
template <typename Kernel>
int resident_blocks(Kernel* kernel, int threads) {
  int device = 0, processors = 0, each = 0;
  check_cuda(cudaGetDevice(&device), "elementwise");
  check_cuda(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device),
             "elementwise");
  check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, threads, 0),
             "elementwise");
  return processors * each;
}

/// Sums the rows of partials [rows, width] in a fixed order (sum_rows.cu).
void sum_rows(const float* partials, int64_t rows, int64_t width, DType dtype, void* sums,
              cudaStream_t stream);

}  // namespace mtraining::kernels::elementwise_cuda
