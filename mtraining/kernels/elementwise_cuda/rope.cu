#include <algorithm>

#include "mtraining/kernels/elementwise_cuda/launches.h"
#include "mtraining/kernels/elementwise_cuda/vector.cuh"

namespace mtraining::kernels::elementwise_cuda {
namespace {

// A thread keeps one pair of runs of kWide elements, half a head apart, of every token that its block walks over.
template <typename T, int kWide>
__global__ void __launch_bounds__(1024) rope_kernel(Rope p) {
  const int half = static_cast<int>(p.head_dim) / 2;
  const int runs = half / kWide;
  if (static_cast<int64_t>(threadIdx.x) >= p.rotated_heads * runs) return;
  const int run = threadIdx.x % runs * kWide;
  auto* x = static_cast<T*>(p.x) + static_cast<int64_t>(threadIdx.x / runs) * p.head_dim + run;
#pragma unroll 2
  for (int64_t token = blockIdx.x; token < p.tokens; token += gridDim.x) {
    const int64_t row = (p.table_tokens == p.tokens ? token : token % p.table_tokens) * half + run;
    T* first = x + token * p.token_stride;
    Packed<T, kWide> a = load<kWide>(first), b = load<kWide>(first + half);
    const Packed<float, kWide> cos = load<kWide>(p.cos + row), sin = load<kWide>(p.sin + row);
#pragma unroll
    for (int i = 0; i < kWide; ++i) {
      const float one = a[i], other = b[i];
      a.set(i, one * cos[i] - other * sin[i]);
      b.set(i, other * cos[i] + one * sin[i]);
    }
    store(first, a);
    store(first + half, b);
  }
}

template <typename T, int kWide, bool kBias>
__global__ void __launch_bounds__(1024) rope_backward_kernel(RopeBackward p) {
  const int head_dim = static_cast<int>(p.head_dim), half = head_dim / 2;
  const int runs = half / kWide;
  const int q_heads = static_cast<int>(p.q_heads), kv_heads = static_cast<int>(p.kv_heads);
  const int head = threadIdx.x / runs, run = threadIdx.x % runs * kWide;
  if (head >= q_heads + 2 * kv_heads) return;
  const bool turns = head < q_heads + kv_heads;
  const T* from;
  int64_t from_stride;
  if (head < q_heads) {
    from = static_cast<const T*>(p.dq) + head * head_dim;
    from_stride = p.dq_token_stride;
  } else if (turns) {
    from = static_cast<const T*>(p.dk) + (head - q_heads) * head_dim;
    from_stride = p.dk_token_stride;
  } else {
    from = static_cast<const T*>(p.dv) + (head - q_heads - kv_heads) * head_dim;
    from_stride = p.dv_token_stride;
  }
  const int64_t width = static_cast<int64_t>(q_heads + 2 * kv_heads) * head_dim;
  const int column = head * head_dim + run;
  float sums[2][kWide] = {};
#pragma unroll 2
  for (int64_t token = blockIdx.x; token < p.tokens; token += gridDim.x) {
    const T* source = from + token * from_stride + run;
    Packed<T, kWide> a = load<kWide>(source), b = load<kWide>(source + half);
    if (turns) {
      const int64_t row =
          (p.table_tokens == p.tokens ? token : token % p.table_tokens) * half + run;
      const Packed<float, kWide> cos = load<kWide>(p.cos + row), sin = load<kWide>(p.sin + row);
#pragma unroll
      for (int i = 0; i < kWide; ++i) {
        const float one = a[i], other = b[i];
        a.set(i, one * cos[i] + other * sin[i]);
        b.set(i, other * cos[i] - one * sin[i]);
      }
    }
    if constexpr (kBias) {
#pragma unroll
      for (int i = 0; i < kWide; ++i) {
        sums[0][i] += a[i];
        sums[1][i] += b[i];
      }
    }
    T* to = static_cast<T*>(p.drow) + token * width + column;
    store(to, a);
    store(to + half, b);
  }
  if constexpr (kBias) {
    float* partial = p.partials + static_cast<int64_t>(blockIdx.x) * width + column;
#pragma unroll
    for (int i = 0; i < kWide; ++i) {
      partial[i] = sums[0][i];
      partial[half + i] = sums[1][i];
    }
  }
}

/// Runs are of 8 elements where half a head holds whole ones, else of 4.
template <typename T, typename Body>
auto with_width(int64_t head_dim, const Body& body) {
  return head_dim % 16 == 0 ? body(T(), std::integral_constant<int, 8>())
                            : body(T(), std::integral_constant<int, 4>());
}
template <typename Body>
auto with_type(DType dtype, int64_t head_dim, const Body& body) {
  return dtype == DType::kFloat32 ? with_width<float>(head_dim, body)
                                  : with_width<__nv_bfloat16>(head_dim, body);
}

unsigned threads_for(int64_t heads, int64_t head_dim) {
  const int64_t runs = heads * head_dim / (head_dim % 16 == 0 ? 16 : 8);
  MT_CHECK_SUPPORTED(runs <= 1024, "rope: expected at most 1024 runs of a token, got ", heads,
                     " heads of ", head_dim);
  return static_cast<unsigned>((runs + 31) / 32 * 32);
}

// Each block walks over tokens.
template <typename Kernel>
unsigned blocks_for(Kernel* kernel, int64_t tokens, unsigned threads) {
  return static_cast<unsigned>(
      std::clamp<int64_t>(tokens, 1, resident_blocks(kernel, static_cast<int>(threads))));
}

}  // namespace

void rope_launch(const Rope& p) {
  with_type(p.dtype, p.head_dim, [&](auto type, auto wide) {
    const unsigned threads = threads_for(p.rotated_heads, p.head_dim);
    auto* kernel = rope_kernel<decltype(type), decltype(wide)::value>;
    kernel<<<blocks_for(kernel, p.tokens, threads), threads, 0,
             static_cast<cudaStream_t>(p.stream)>>>(p);
  });
  check_cuda(cudaGetLastError(), "rope");
}

int64_t rope_partial_rows(const RopeBackward& p) {
  return with_type(p.dtype, p.head_dim, [&](auto type, auto wide) -> int64_t {
    auto* kernel = rope_backward_kernel<decltype(type), decltype(wide)::value, true>;
    return blocks_for(kernel, p.tokens, threads_for(p.q_heads + 2 * p.kv_heads, p.head_dim));
  });
}

void rope_backward_launch(const RopeBackward& p) {
  const int64_t heads = p.q_heads + 2 * p.kv_heads;
  const auto stream = static_cast<cudaStream_t>(p.stream);
  with_type(p.dtype, p.head_dim, [&](auto type, auto wide) {
    const unsigned threads = threads_for(heads, p.head_dim);
    const auto run = [&](auto* kernel) {
      kernel<<<blocks_for(kernel, p.tokens, threads), threads, 0, stream>>>(p);
    };
    p.dbias == nullptr ? run(rope_backward_kernel<decltype(type), decltype(wide)::value, false>)
                       : run(rope_backward_kernel<decltype(type), decltype(wide)::value, true>);
  });
  check_cuda(cudaGetLastError(), "rope backward");
  if (p.dbias != nullptr)
    sum_rows(p.partials, rope_partial_rows(p), heads * p.head_dim, p.dtype, p.dbias, stream);
}

}  // namespace mtraining::kernels::elementwise_cuda
