// The key-stationary backward kernel: a warp that lists stages, one that loads them, two warpgroups of keys and, where dq is asked for, one that computes it on
// every SM, until the queue is empty.
//
// In:   BackwardArgs. Out: dk, dv; dq where it is asked for. Next: one instantiation a file, backward_<dtype>_d<head_dim>.cu.
#pragma once

#include <atomic>

#include "mtraining/kernels/sm90/backward_consumer.cuh"
#include "mtraining/kernels/sm90/backward_lister.cuh"
#include "mtraining/kernels/sm90/backward_producer.cuh"
#include "mtraining/kernels/sm90/backward_query_gradients.cuh"

namespace mtraining::kernels::sm90 {

template <typename Element, int kD, bool kWithQueries>
__global__ void __launch_bounds__(BackwardShape<kD, kWithQueries>::kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardArgs args) {
  using Shape = BackwardShape<kD, kWithQueries>;
  extern __shared__ __align__(1024) char memory[];
  const uint32_t base = shared_address(memory);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  // Through a shuffle: else the special register would be read again, slowly, at every use.
  const int lane = __shfl_sync(~0u, threadIdx.x % 32, threadIdx.x % 32);
  if (threadIdx.x == 0) {
    constexpr int kConsumers = Shape::kConsumerWarps * kArrivals;
    for (int s = 0; s < Shape::kStages; ++s) {
      mbarrier_init(Shape::full(base, s), kArrivals);
      mbarrier_init(Shape::empty(base, s), kConsumers);
    }
    mbarrier_init(Shape::keys_full(base), kArrivals);
    mbarrier_init(Shape::keys_empty(base), kConsumers);
    mbarrier_init(Shape::uncleaned(base), 1);
    for (int s = 0; s < Shape::kListed; ++s) {
      mbarrier_init(Shape::listed(base, s), kArrivals);
      mbarrier_init(Shape::taken(base, s), kArrivals);
    }
    for (int b = 0; b < 2; ++b) {
      for (int g = 0; g < Shape::kGroups; ++g) {
        mbarrier_init(Shape::scores_full(base, b, g), 4 * kArrivals);
        mbarrier_init(Shape::scores_empty(base, b, g), 4 * kArrivals);
      }
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  if constexpr (!kWithQueries) let_next_launch_begin();  // the walk by query blocks
  if (warp >= Shape::kConsumerWarps) {
    registers_decrease<Shape::kProducerRegisters>();
    if (warp == Shape::kConsumerWarps) {
      KeyProducer<kD, kWithQueries> producer{args, base, lane};
      producer.run();
    } else if (warp == Shape::kConsumerWarps + 1) {
      KeyLister<kD, kWithQueries> lister{args, base, lane};
      lister.run();
    }
  } else if (kWithQueries && warp >= Shape::kKeyWarps) {
    registers_decrease<Shape::kQueryRegisters>();
    if constexpr (kWithQueries) {
      QueryGradients<Element, kD> queries{args, base, warp - Shape::kKeyWarps, lane};
      queries.run();
    }
  } else {
    registers_increase<Shape::kKeyRegisters>();
    if (warp < 4) {
      KeyConsumer<Element, kD, kWithQueries, 0> consumer{args, base, warp, lane};
      consumer.run();
    } else {
      KeyConsumer<Element, kD, kWithQueries, 1> consumer{args, base, warp - 4, lane};
      consumer.run();
    }
  }
}

template <typename Element, int kD, bool kWithQueries>
cudaError_t launch_backward(const BackwardArgs& args, int num_sms, cudaStream_t stream) {
  using Shape = BackwardShape<kD, kWithQueries>;
  static_assert(Shape::kBytes <= 227 * 1024);
  static std::atomic<uint64_t> ready{0};  // bit per device
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  if ((ready.load(std::memory_order_acquire) >> (device & 63) & 1) == 0) {
    error = cudaFuncSetAttribute(backward_kernel<Element, kD, kWithQueries>,
                                 cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kBytes);
    if (error != cudaSuccess) return error;
    ready.fetch_or(uint64_t{1} << (device & 63), std::memory_order_release);
  }
  const int blocks = args.num_items < num_sms ? args.num_items : num_sms;
  // clang-format off
  backward_kernel<Element, kD, kWithQueries><<<blocks, Shape::kThreads, Shape::kBytes, stream>>>(args);
  // clang-format on
  return cudaGetLastError();
}

template <typename Element, int kD>
cudaError_t launch_backward(const BackwardArgs& args, bool with_queries, int num_sms,
                            cudaStream_t stream) {
  return with_queries ? launch_backward<Element, kD, true>(args, num_sms, stream)
                      : launch_backward<Element, kD, false>(args, num_sms, stream);
}

}  // namespace mtraining::kernels::sm90
