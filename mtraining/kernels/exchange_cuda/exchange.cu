#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

#include "mtraining/base/check.h"
#include "mtraining/kernels/exchange_cuda/exchange.h"

namespace mtraining::kernels::exchange_cuda {
namespace {

constexpr int kThreads = 256;

struct Arrays {
  const void* sources[kMaxArrays];
  void* destinations[kMaxArrays];
  int num_sources, num_destinations;
};

template <typename T>
__device__ __forceinline__ T widened(T x) {
  return x;
}
__device__ __forceinline__ float widened(__nv_bfloat16 x) { return __bfloat162float(x); }
template <typename T>
__device__ __forceinline__ void put(T* to, T x) {
  *to = x;
}
__device__ __forceinline__ void put(__nv_bfloat16* to, float x) { *to = __float2bfloat16_rn(x); }

template <typename T>
__global__ void __launch_bounds__(kThreads)
    reduce_kernel(const __grid_constant__ Arrays arrays, int64_t count, bool max) {
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * kThreads) {
    auto sum = widened(static_cast<const T*>(arrays.sources[0])[i]);
    for (int s = 1; s < arrays.num_sources; ++s) {
      const auto x = widened(static_cast<const T*>(arrays.sources[s])[i]);
      if (max) {
        sum = x > sum || x != x ? x : sum;
      } else if constexpr (std::is_integral_v<T>) {  // wraps
        using U = std::make_unsigned_t<T>;
        sum = static_cast<T>(static_cast<U>(sum) + static_cast<U>(x));
      } else {
        sum += x;
      }
    }
    for (int d = 0; d < arrays.num_destinations; ++d)
      put(static_cast<T*>(arrays.destinations[d]) + i, sum);
  }
}

__device__ __forceinline__ uint64_t now_ns() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
  return ns;
}

__global__ void take_link_kernel(unsigned long long* free_at, uint64_t* deadline, uint64_t ns) {
  unsigned long long seen = *free_at, until;
  for (;;) {
    const uint64_t now = now_ns();
    until = (seen > now ? seen : now) + ns;
    const unsigned long long before = atomicCAS(free_at, seen, until);
    if (before == seen) break;
    seen = before;
  }
  *deadline = until;
}

__global__ void hold_until_kernel(const uint64_t* deadline) {
  const uint64_t until = *deadline;
  while (now_ns() < until) __nanosleep(500);
}

void check_launch(const char* what) {
  const cudaError_t error = cudaGetLastError();
  MT_CHECK_EXTERNAL(error == cudaSuccess, what, ": ", cudaGetErrorString(error));
}

}  // namespace

void reduce_in_order(Element element, bool max, int64_t count, std::span<const void* const> sources,
                     std::span<void* const> destinations, void* stream) {
  MT_ASSERT(!sources.empty() && !destinations.empty(), "nothing to reduce");
  MT_CHECK_SUPPORTED(std::max(sources.size(), destinations.size()) <= kMaxArrays,
                     "reducing on a GPU: expected at most ", kMaxArrays, " ranks, got ",
                     std::max(sources.size(), destinations.size()));
  if (count == 0) return;
  Arrays arrays{};
  std::copy(sources.begin(), sources.end(), arrays.sources);
  std::copy(destinations.begin(), destinations.end(), arrays.destinations);
  arrays.num_sources = static_cast<int>(sources.size());
  arrays.num_destinations = static_cast<int>(destinations.size());
  const auto on = static_cast<cudaStream_t>(stream);
  const auto grid =
      static_cast<unsigned>(std::clamp<int64_t>((count + kThreads - 1) / kThreads, 1, 2048));
  switch (element) {
    case Element::kInt64:
      reduce_kernel<int64_t><<<grid, kThreads, 0, on>>>(arrays, count, max);
      break;
    case Element::kInt32:
      reduce_kernel<int32_t><<<grid, kThreads, 0, on>>>(arrays, count, max);
      break;
    case Element::kFloat32:
      reduce_kernel<float><<<grid, kThreads, 0, on>>>(arrays, count, max);
      break;
    case Element::kFloat64:
      reduce_kernel<double><<<grid, kThreads, 0, on>>>(arrays, count, max);
      break;
    case Element::kBFloat16:
      reduce_kernel<__nv_bfloat16><<<grid, kThreads, 0, on>>>(arrays, count, max);
      break;
  }
  check_launch("reducing");
}

void take_link(uint64_t* free_at, uint64_t* deadline, int64_t ns, void* stream) {
  take_link_kernel<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(
      reinterpret_cast<unsigned long long*>(free_at), deadline, static_cast<uint64_t>(ns));
  check_launch("taking a link");
}

void hold_until(const uint64_t* deadline, void* stream) {
  hold_until_kernel<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(deadline);
  check_launch("holding a link");
}

}  // namespace mtraining::kernels::exchange_cuda
