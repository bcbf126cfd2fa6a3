#include <algorithm>
#include <cmath>

#include "mtraining/kernels/elementwise_cuda/launches.h"
#include "mtraining/kernels/elementwise_cuda/vector.cuh"

namespace mtraining::kernels::elementwise_cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kVectors = 4;  // of a thread at a time, kThreads apart
constexpr float kLog2E = 1.44269504088896340736f;

/// e^x, x a difference of logits: subtracted first, so that a large logit costs nothing of its neighbours' digits.
__device__ __forceinline__ float exponential(float x) { return exp2f(x * kLog2E); }

/// Sum of exponentials relative to the largest.
struct Sum {
  float largest, sum;
};
__device__ __forceinline__ Sum join(Sum a, Sum b) {
  const float largest = fmaxf(a.largest, b.largest);
  if (largest == -INFINITY) return {largest, a.sum + b.sum};
  return {largest,
          a.sum * exponential(a.largest - largest) + b.sum * exponential(b.largest - largest)};
}

// One block a row: once over the logits for the sum, once more for the gradient.
template <typename T, typename G, int kWide>
__global__ void __launch_bounds__(kThreads) cross_entropy_kernel(CrossEntropy p) {
  const int64_t row = blockIdx.x;
  const auto vocab = static_cast<int32_t>(p.vocab);
  T* logits = static_cast<T*>(p.logits) + row * p.row_stride;
  // A row of G begins where the row of T does, and G is no wider: what is written has been read.
  G* gradient = reinterpret_cast<G*>(logits);
  const int64_t label = p.labels[row];
  if (label == p.ignored) {
    if (threadIdx.x == 0) p.loss[row] = 0;
    if (!p.gradient) return;
    Packed<G, kWide> zero;
#pragma unroll
    for (int i = 0; i < kWide; ++i) zero.set(i, 0);
    for (int32_t at = threadIdx.x * kWide; at < vocab; at += kThreads * kWide)
      store(gradient + at, zero);
    return;
  }
  constexpr int32_t kStep = kThreads * kWide;
  Sum mine{-INFINITY, 0};
  for (int32_t begin = threadIdx.x * kWide; begin < vocab; begin += kStep * kVectors) {
    Packed<T, kWide> x[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int32_t at = begin + v * kStep;
      if (at < vocab) x[v] = load<kWide>(logits + at);
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (begin + v * kStep >= vocab) break;
      float largest = x[v][0];
#pragma unroll
      for (int i = 1; i < kWide; ++i) largest = fmaxf(largest, x[v][i]);
      if (largest > mine.largest) {
        mine.sum *= exponential(mine.largest - largest);
        mine.largest = largest;
      }
      if (mine.largest == -INFINITY) {
        // NaN among them, for fmaxf passes it over.
#pragma unroll
        for (int i = 0; i < kWide; ++i) mine.sum += x[v][i] == -INFINITY ? 0 : x[v][i];
        continue;
      }
#pragma unroll
      for (int i = 0; i < kWide; ++i) mine.sum += exponential(x[v][i] - mine.largest);
    }
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    mine = join(mine, {__shfl_xor_sync(0xffffffffu, mine.largest, offset),
                       __shfl_xor_sync(0xffffffffu, mine.sum, offset)});
  }
  __shared__ Sum warps[kThreads / 32];
  __shared__ float label_logit;
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = mine;
  const bool inside = label >= 0 && label < p.vocab;
  if (threadIdx.x == 0) label_logit = inside ? widen(logits[label]) : NAN;
  __syncthreads();
  Sum all = warps[0];
#pragma unroll
  for (int w = 1; w < kThreads / 32; ++w) all = join(all, warps[w]);
  if (threadIdx.x == 0) p.loss[row] = logf(all.sum) + (all.largest - label_logit);
  if (!p.gradient) return;
  const float share = 1.0f / all.sum;
  for (int32_t begin = 0; begin < vocab; begin += kStep * kVectors) {
    Packed<T, kWide> x[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int32_t at = begin + v * kStep + threadIdx.x * kWide;
      if (at < vocab) x[v] = load<kWide>(logits + at);
    }
    // What is written lies at or before what all threads have read.
    if constexpr (!std::is_same_v<T, G>) __syncthreads();
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int32_t at = begin + v * kStep + threadIdx.x * kWide;
      if (at >= vocab) break;
      Packed<G, kWide> d;
#pragma unroll
      for (int i = 0; i < kWide; ++i)
        d.set(i, exponential(x[v][i] - all.largest) * share - (at + i == label ? 1.0f : 0.0f));
      store(gradient + at, d);
    }
  }
}

template <typename T, typename G>
void launch(const CrossEntropy& p) {
  constexpr int kWide = 16 / sizeof(T);
  const auto stream = static_cast<cudaStream_t>(p.stream);
  const auto rows = static_cast<unsigned>(p.rows);
  if (p.vocab % kWide == 0 && p.row_stride % kWide == 0)
    cross_entropy_kernel<T, G, kWide><<<rows, kThreads, 0, stream>>>(p);
  else
    cross_entropy_kernel<T, G, 1><<<rows, kThreads, 0, stream>>>(p);
}

}  // namespace

void cross_entropy_launch(const CrossEntropy& p) {
  if (p.logits_dtype == DType::kBFloat16)
    launch<__nv_bfloat16, __nv_bfloat16>(p);
  else if (p.gradient_dtype == DType::kBFloat16)
    launch<float, __nv_bfloat16>(p);
  else
    launch<float, float>(p);
  check_cuda(cudaGetLastError(), "cross entropy");
}

}  // namespace mtraining::kernels::elementwise_cuda
