// RMSNorm: a group of threads a row, kVectors vectors of 8 elements a thread; thread blocks loop over rows.
//
// One instantiation a dtype is a file (rms_norm_bf16.cu, rms_norm_float32.cu); elementwise.cc chooses.
#pragma once

#include <algorithm>

#include "mtraining/kernels/elementwise_cuda/launches.h"
#include "mtraining/kernels/elementwise_cuda/vector.cuh"

namespace mtraining::kernels::elementwise_cuda {

constexpr int kNormThreads = 256;
constexpr int kWide = 8;

__device__ __forceinline__ int64_t row_offset(int64_t row, const Rows& rows, int64_t width) {
  if (rows.heads == 1) return row * rows.token_stride;
  return row / rows.heads * rows.token_stride + row % rows.heads * width;
}

/// Sum over the kGroup threads of a row. `parity` alternates from row to row, so that one barrier a row is enough.
template <int kGroup>
__device__ __forceinline__ float group_sum(float value, int parity) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2)
    value += __shfl_xor_sync(0xffffffffu, value, offset);
  if constexpr (kGroup > 32) {
    constexpr int kWarps = kGroup / 32;
    __shared__ float warps[2][kWarps];
    if (threadIdx.x % 32 == 0) warps[parity][threadIdx.x / 32] = value;
    __syncthreads();
    value = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) value += warps[parity][w];
  }
  return value;
}

/// Blocks of a multiprocessor: one load a thread is too little to keep memory busy, unless there are many threads.
constexpr int forward_blocks(int vectors, bool adds) { return vectors > 1 ? 1 : adds ? 5 : 8; }

template <typename T, int kGroup, int kVectors, bool kAdds>
__global__ void __launch_bounds__(kNormThreads, forward_blocks(kVectors, kAdds))
    forward_kernel(RmsNormForward p) {
  constexpr int kRows = kNormThreads / kGroup;
  const int lane = threadIdx.x % kGroup;
  const auto* weight = static_cast<const T*>(p.weight);
  Packed<T, kWide> w[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int64_t column = static_cast<int64_t>(v * kGroup + lane) * kWide;
    if (column < p.width) w[v] = load<kWide>(weight + column);
  }
  const float scale = 1.0f / static_cast<float>(p.width), eps = static_cast<float>(p.eps);
  int parity = 0;
  // All groups of a block go round equally often: the barrier counts on it.
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * kRows; first < p.rows;
       first += static_cast<int64_t>(gridDim.x) * kRows, parity ^= 1) {
    const int64_t row = first + threadIdx.x / kGroup;
    const bool exists = row < p.rows;
    const auto* x = static_cast<const T*>(p.x) + (exists ? row_offset(row, p.x_rows, p.width) : 0);
    Packed<T, kWide> values[kVectors], added[kVectors];
    float squares = 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int64_t column = static_cast<int64_t>(v * kGroup + lane) * kWide;
      if (!exists || column >= p.width) continue;
      values[v] = load<kWide>(x + column);
      if constexpr (kAdds)
        added[v] = load<kWide>(static_cast<const T*>(p.added) + row * p.width + column);
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int64_t column = static_cast<int64_t>(v * kGroup + lane) * kWide;
      if (!exists || column >= p.width) continue;
#pragma unroll
      for (int i = 0; i < kWide; ++i) {
        if constexpr (kAdds) values[v].set(i, values[v][i] + added[v][i]);
        squares += values[v][i] * values[v][i];
      }
      if constexpr (kAdds) store(static_cast<T*>(p.sum) + row * p.width + column, values[v]);
    }
    const float root = rsqrtf(group_sum<kGroup>(squares, parity) * scale + eps);
    if (exists && lane == 0) p.inverse_root[row] = root;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int64_t column = static_cast<int64_t>(v * kGroup + lane) * kWide;
      if (!exists || column >= p.width) continue;
      Packed<T, kWide> out;
#pragma unroll
      for (int i = 0; i < kWide; ++i) out.set(i, values[v][i] * root * w[v][i]);
      store(static_cast<T*>(p.out) + row * p.width + column, out);
    }
  }
}

template <typename T, int kGroup, int kVectors, bool kAdds>
__global__ void __launch_bounds__(kNormThreads) backward_kernel(RmsNormBackward p) {
  constexpr int kRows = kNormThreads / kGroup;
  const int lane = threadIdx.x % kGroup;
  Packed<T, kWide> w[kVectors];
  float dweight[kVectors][kWide] = {};
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int64_t column = static_cast<int64_t>(v * kGroup + lane) * kWide;
    if (column < p.width) w[v] = load<kWide>(static_cast<const T*>(p.weight) + column);
  }
  const float scale = 1.0f / static_cast<float>(p.width);
  int parity = 0;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * kRows; first < p.rows;
       first += static_cast<int64_t>(gridDim.x) * kRows, parity ^= 1) {
    const int64_t row = first + threadIdx.x / kGroup;
    const bool exists = row < p.rows;
    const auto* x = static_cast<const T*>(p.x) + (exists ? row_offset(row, p.x_rows, p.width) : 0);
    const auto* dout =
        static_cast<const T*>(p.dout) + (exists ? row_offset(row, p.dout_rows, p.width) : 0);
    const float root = exists ? p.inverse_root[row] : 0;
    Packed<T, kWide> xs[kVectors], ds[kVectors], added[kVectors];
    float product = 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int64_t column = static_cast<int64_t>(v * kGroup + lane) * kWide;
      if (!exists || column >= p.width) continue;
      xs[v] = load<kWide>(x + column);
      ds[v] = load<kWide>(dout + column);
      if constexpr (kAdds)
        added[v] = load<kWide>(static_cast<const T*>(p.added) + row * p.width + column);
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int64_t column = static_cast<int64_t>(v * kGroup + lane) * kWide;
      if (!exists || column >= p.width) continue;
#pragma unroll
      for (int i = 0; i < kWide; ++i) {
        const float normed = xs[v][i] * root;
        dweight[v][i] += ds[v][i] * normed;
        product += ds[v][i] * w[v][i] * normed;
      }
    }
    const float mean = group_sum<kGroup>(product, parity) * scale;
    auto* dx = static_cast<T*>(p.dx) + (exists ? row_offset(row, p.dx_rows, p.width) : 0);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int64_t column = static_cast<int64_t>(v * kGroup + lane) * kWide;
      if (!exists || column >= p.width) continue;
      Packed<T, kWide> out;
#pragma unroll
      for (int i = 0; i < kWide; ++i) {
        float d = root * (ds[v][i] * w[v][i] - xs[v][i] * root * mean);
        if constexpr (kAdds) d += added[v][i];
        out.set(i, d);
      }
      store(dx + column, out);
    }
  }
  // Groups of a block one after the other, so that the order is fixed.
  float* partial = p.partials + static_cast<int64_t>(blockIdx.x) * p.width;
  for (int group = 0; group < kRows; ++group) {
    if (static_cast<int>(threadIdx.x) / kGroup == group) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int64_t column = static_cast<int64_t>(v * kGroup + lane) * kWide;
        if (column >= p.width) continue;
#pragma unroll
        for (int i = 0; i < kWide; ++i)
          partial[column + i] = dweight[v][i] + (group == 0 ? 0 : partial[column + i]);
      }
    }
    __syncthreads();
  }
}

/// Blocks that a launch over `rows` has.
template <typename Kernel>
int norm_blocks(Kernel* kernel, int64_t rows, int rows_a_block) {
  return static_cast<int>(std::clamp<int64_t>((rows + rows_a_block - 1) / rows_a_block, 1,
                                              resident_blocks(kernel, kNormThreads)));
}

template <typename T, int kGroup, int kVectors>
struct Norm {
  static constexpr int kRows = kNormThreads / kGroup;

  static void forward(const RmsNormForward& p) {
    const auto run = [&](auto* kernel) {
      kernel<<<norm_blocks(kernel, p.rows, kRows), kNormThreads, 0,
               static_cast<cudaStream_t>(p.stream)>>>(p);
    };
    p.added == nullptr ? run(forward_kernel<T, kGroup, kVectors, false>)
                       : run(forward_kernel<T, kGroup, kVectors, true>);
    check_cuda(cudaGetLastError(), "rms_norm");
  }
  static int64_t partial_rows(int64_t rows) {
    // Enough for either kernel, or the caller would have to know which one runs.
    return std::max(norm_blocks(backward_kernel<T, kGroup, kVectors, false>, rows, kRows),
                    norm_blocks(backward_kernel<T, kGroup, kVectors, true>, rows, kRows));
  }
  static void backward(const RmsNormBackward& p) {
    const auto stream = static_cast<cudaStream_t>(p.stream);
    const auto run = [&](auto* kernel) {
      const int blocks = norm_blocks(kernel, p.rows, kRows);
      kernel<<<blocks, kNormThreads, 0, stream>>>(p);
      check_cuda(cudaGetLastError(), "rms_norm backward");
      sum_rows(p.partials, blocks, p.width, p.wide_dweight ? DType::kFloat32 : p.dtype, p.dweight,
               stream);
    };
    p.added == nullptr ? run(backward_kernel<T, kGroup, kVectors, false>)
                       : run(backward_kernel<T, kGroup, kVectors, true>);
  }
};

/// Calls body(Norm<T, ..>()) of the narrowest group that holds a row.
template <typename T, typename Body>
auto with_norm(int64_t width, const Body& body) {
  if (width <= 32 * kWide) return body(Norm<T, 32, 1>());
  if (width <= 256 * kWide) return body(Norm<T, 256, 1>());
  if (width <= 2 * 256 * kWide) return body(Norm<T, 256, 2>());
  if (width <= 4 * 256 * kWide) return body(Norm<T, 256, 4>());
  return body(Norm<T, 256, 8>());
}

}  // namespace mtraining::kernels::elementwise_cuda
