// delta: see launch_delta.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "mtraining/kernels/sm80/attention_args.cuh"

namespace mtraining::kernels::sm80 {
namespace {

constexpr int kThreads = 256;
constexpr int kLanes = 16;  // of a row

__device__ __forceinline__ float widen(uint16_t x, bool bf16) {
  return bf16 ? __bfloat162float(__ushort_as_bfloat16(x)) : __half2float(__ushort_as_half(x));
}

__device__ __forceinline__ void load(uint16_t (&to)[8], const uint16_t* from, bool aligned) {
  if (aligned) {
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    return;
  }
#pragma unroll
  for (int e = 0; e < 8; ++e) to[e] = from[e];
}

__global__ void __launch_bounds__(kThreads) delta(const DeltaArgs args) {
  const int64_t rows = args.batch * args.num_queries * args.num_heads;
  const int lane = threadIdx.x % kLanes;
  const int64_t step = int64_t{gridDim.x} * (kThreads / kLanes);
  for (int64_t i = int64_t{blockIdx.x} * (kThreads / kLanes) + threadIdx.x / kLanes; i < rows;
       i += step) {
    const int64_t head = i % args.num_heads, token = i / args.num_heads % args.num_queries,
                  batch = i / args.num_heads / args.num_queries;
    const int64_t at = (batch * args.num_heads + head) * args.num_queries + token;
    const auto row_of = [&](const Rows& rows) {
      return reinterpret_cast<const uint16_t*>(rows.data + batch * rows.stride_batch +
                                               token * rows.stride_token + head * rows.stride_head);
    };
    const uint16_t *dout = row_of(args.dout), *rounded = row_of(args.rounded),
                   *residual = row_of(args.residual);
    const bool empty = args.lse[at] == -INFINITY;
    float sum = 0;
    if (!empty) {
      for (int d = lane * 8; d < args.head_dim; d += kLanes * 8) {
        alignas(16) uint16_t x[8], near[8], rest[8] = {};
        load(x, dout + d, args.vectors);
        load(near, rounded + d, args.vectors);
        if (args.residual.data != nullptr) load(rest, residual + d, args.vectors);
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          sum = fmaf(widen(x[e], args.bf16), widen(near[e], args.bf16) + widen(rest[e], args.bf16),
                     sum);
        }
      }
    }
#pragma unroll
    for (int m = kLanes / 2; m > 0; m /= 2)
      sum += __shfl_xor_sync(0xFFFFu << (threadIdx.x % 32 / kLanes * kLanes), sum, m);
    if (lane == 0) args.delta[at] = sum;
  }
}

}  // namespace

cudaError_t launch_delta(const DeltaArgs& args, cudaStream_t stream) {
  const int64_t rows = args.batch * args.num_queries * args.num_heads;
  const int64_t blocks = (rows + kThreads / kLanes - 1) / (kThreads / kLanes);
  delta<<<static_cast<unsigned>(blocks < 8192 ? blocks : 8192), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace mtraining::kernels::sm80
