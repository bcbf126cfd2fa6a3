// The forward kernel: one producer warp and two consumer warpgroups on every SM, until the queue is empty.
//
// In:   ForwardArgs. Out: out, lse. Next: one instantiation a file, forward_<dtype>_d<head_dim>.cu.
#pragma once

#include <atomic>

#include "mtraining/kernels/sm90/forward_consumer.cuh"
#include "mtraining/kernels/sm90/forward_producer.cuh"
#include "mtraining/kernels/sm90/forward_wide_consumer.cuh"

namespace mtraining::kernels::sm90 {

template <typename Element, int kD>
__global__ void __launch_bounds__(ForwardShape<kD>::kThreads, 1)
    forward_kernel(const __grid_constant__ ForwardArgs args) {
  using Shape = ForwardShape<kD>;
  extern __shared__ __align__(1024) char memory[];
  const uint32_t base = shared_address(memory);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int s = 0; s < Shape::kStages; ++s) {
      mbarrier_init(Shape::full(base, s), kArrivals);
      mbarrier_init(Shape::empty(base, s), Shape::kConsumerWarps * kArrivals);
      if constexpr (Shape::kValuesApart) {
        mbarrier_init(Shape::values_full(base, s), 1);
        mbarrier_init(Shape::values_empty(base, s), Shape::kConsumerWarps * kArrivals);
      }
    }
    for (int g = 0; g < Shape::kGroups && !Shape::kQueriesInRing; ++g) {
      mbarrier_init(Shape::q_full(base, g), 1);
      mbarrier_init(Shape::q_empty(base, g), 4 * kArrivals);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  if (warp >= Shape::kConsumerWarps) {
    registers_decrease<Shape::kProducerRegisters>();
    if (warp == Shape::kConsumerWarps) {
      Producer<Shape, ForwardArgs> producer{args, base, lane};
      producer.run();
    }
  } else {
    registers_increase<Shape::kConsumerRegisters>();
    if constexpr (Shape::kValuesApart) {
      WideConsumer<Element, kD> consumer{{args, base, warp / 4, warp % 4, lane}};
      consumer.run();
    } else {
      Consumer<Element, kD> consumer{args, base, warp / 4, warp % 4, lane};
      consumer.run();
    }
  }
}

template <typename Element, int kD>
cudaError_t launch_forward(const ForwardArgs& args, int num_sms, cudaStream_t stream) {
  using Shape = ForwardShape<kD>;
  static_assert(Shape::kBytes <= 227 * 1024);
  static std::atomic<uint64_t> ready{0};  // bit per device
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  if ((ready.load(std::memory_order_acquire) >> (device & 63) & 1) == 0) {
    error = cudaFuncSetAttribute(forward_kernel<Element, kD>,
                                 cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kBytes);
    if (error != cudaSuccess) return error;
    ready.fetch_or(uint64_t{1} << (device & 63), std::memory_order_release);
  }
  const int items = args.num_rows * ((args.num_q_blocks + Shape::kGroups - 1) / Shape::kGroups);
  const int blocks = items < num_sms ? items : num_sms;
  // clang-format off
  forward_kernel<Element, kD><<<blocks, Shape::kThreads, Shape::kBytes, stream>>>(args);
  // clang-format on
  return cudaGetLastError();
}

}  // namespace mtraining::kernels::sm90
