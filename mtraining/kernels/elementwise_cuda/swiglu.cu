#include "mtraining/kernels/elementwise_cuda/launches.h"
#include "mtraining/kernels/elementwise_cuda/vector.cuh"

namespace mtraining::kernels::elementwise_cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWide = 8;
constexpr int kVectors = 4;  // of a thread, kThreads apart

struct Place {
  int64_t row, column;
};

/// Calls body(row, column of the first element) for this thread's vectors.
template <typename Body>
__device__ __forceinline__ void for_each_vector(int64_t rows, int64_t width, const Body& body) {
  const auto per_row = static_cast<uint32_t>(width / kWide);
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * (kThreads * kVectors);
  const int64_t first_row = begin / per_row;
  const auto first_column = static_cast<uint32_t>(begin % per_row);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const uint32_t at = first_column + v * kThreads + threadIdx.x;
    const Place place{first_row + at / per_row, static_cast<int64_t>(at % per_row) * kWide};
    if (place.row < rows) body(v, place);
  }
}

/// As exact as T can show.
template <typename T>
__device__ __forceinline__ float sigmoid(float x) {
  if constexpr (std::is_same_v<T, float>)
    return 1.0f / (1.0f + expf(-x));
  else
    return __fdividef(1.0f, 1.0f + __expf(-x));
}

template <typename T>
__global__ void __launch_bounds__(kThreads) forward_kernel(Swiglu p) {
  Packed<T, kWide> gate[kVectors], up[kVectors];
  const auto* gate_up = static_cast<const T*>(p.gate_up);
  for_each_vector(p.rows, p.width, [&](int v, const Place& at) {
    const T* from = gate_up + at.row * 2 * p.width + at.column;
    gate[v] = load<kWide>(from);
    up[v] = load<kWide>(from + p.width);
  });
  for_each_vector(p.rows, p.width, [&](int v, const Place& at) {
    Packed<T, kWide> out;
#pragma unroll
    for (int i = 0; i < kWide; ++i) out.set(i, gate[v][i] * sigmoid<T>(gate[v][i]) * up[v][i]);
    store(static_cast<T*>(p.product) + at.row * p.width + at.column, out);
  });
}

template <typename T>
__global__ void __launch_bounds__(kThreads) backward_kernel(SwigluBackward p) {
  Packed<T, kWide> gate[kVectors], up[kVectors], d[kVectors];
  const auto* gate_up = static_cast<const T*>(p.gate_up);
  for_each_vector(p.rows, p.width, [&](int v, const Place& at) {
    const T* from = gate_up + at.row * 2 * p.width + at.column;
    gate[v] = load<kWide>(from);
    up[v] = load<kWide>(from + p.width);
    d[v] = load<kWide>(static_cast<const T*>(p.dproduct) + at.row * p.width + at.column);
  });
  for_each_vector(p.rows, p.width, [&](int v, const Place& at) {
    Packed<T, kWide> dgate, dup, product;
#pragma unroll
    for (int i = 0; i < kWide; ++i) {
      const float g = gate[v][i], u = up[v][i], s = sigmoid<T>(g), a = g * s;
      product.set(i, a * u);
      dup.set(i, d[v][i] * a);
      dgate.set(i, d[v][i] * u * s * (1.0f + g * (1.0f - s)));
    }
    T* to = static_cast<T*>(p.dgate_up) + at.row * 2 * p.width + at.column;
    store(to, dgate);
    store(to + p.width, dup);
    store(static_cast<T*>(p.product) + at.row * p.width + at.column, product);
  });
}

unsigned blocks_for(int64_t rows, int64_t width) {
  constexpr int64_t kEach = kThreads * kVectors;
  const int64_t blocks = (rows * (width / kWide) + kEach - 1) / kEach;
  MT_CHECK_SUPPORTED(blocks < int64_t{1} << 31, "swiglu: too many elements, ", rows, " x ", width);
  return static_cast<unsigned>(blocks);
}

}  // namespace

void swiglu_launch(const Swiglu& p) {
  const unsigned blocks = blocks_for(p.rows, p.width);
  const auto stream = static_cast<cudaStream_t>(p.stream);
  if (p.dtype == DType::kFloat32)
    forward_kernel<float><<<blocks, kThreads, 0, stream>>>(p);
  else
    forward_kernel<__nv_bfloat16><<<blocks, kThreads, 0, stream>>>(p);
  check_cuda(cudaGetLastError(), "swiglu");
}

void swiglu_backward_launch(const SwigluBackward& p) {
  const unsigned blocks = blocks_for(p.rows, p.width);
  const auto stream = static_cast<cudaStream_t>(p.stream);
  if (p.dtype == DType::kFloat32)
    backward_kernel<float><<<blocks, kThreads, 0, stream>>>(p);
  else
    backward_kernel<__nv_bfloat16><<<blocks, kThreads, 0, stream>>>(p);
  check_cuda(cudaGetLastError(), "swiglu backward");
}

}  // namespace mtraining::kernels::elementwise_cuda
