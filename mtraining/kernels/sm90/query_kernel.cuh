// The backward by query blocks: the forward's producer, two consumer warpgroups that sum dq.
//
// In:   QueryArgs. Out: dq. Next: one instantiation a file, queries_<dtype>_d<head_dim>.cu.
#pragma once

#include <atomic>

#include "mtraining/kernels/sm90/forward_producer.cuh"
#include "mtraining/kernels/sm90/query_consumer.cuh"

namespace mtraining::kernels::sm90 {

template <typename Element, int kD>
__global__ void __launch_bounds__(ForwardShape<kD, true>::kThreads, 1)
    query_kernel(const __grid_constant__ QueryArgs args) {
  using Shape = ForwardShape<kD, true>;
  extern __shared__ __align__(1024) char memory[];
  const uint32_t base = shared_address(memory);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int s = 0; s < Shape::kStages; ++s) {
      mbarrier_init(Shape::full(base, s), kArrivals);
      mbarrier_init(Shape::empty(base, s), Shape::kConsumerWarps * kArrivals);
    }
    for (int g = 0; g < Shape::kGroups; ++g) {
      mbarrier_init(Shape::q_full(base, g), 1);
      mbarrier_init(Shape::q_empty(base, g), 4 * kArrivals);
    }
    mbarrier_init(Shape::uncleaned(base), 1);
    mbarrier_init_fence();
  }
  __syncthreads();
  if (warp >= Shape::kConsumerWarps) {
    registers_decrease<Shape::kProducerRegisters>();
    if (warp == Shape::kConsumerWarps) {
      Producer<Shape, QueryArgs> producer{args, base, lane};
      producer.run();
    }
  } else {
    registers_increase<Shape::kConsumerRegisters>();
    QueryConsumer<Element, kD> consumer{args, base, warp / 4, warp % 4, lane};
    consumer.run();
  }
  // What comes after this launch comes after both.
  wait_for_launch_before();
}

template <typename Element, int kD>
cudaError_t launch_queries(const QueryArgs& args, bool beside, int num_sms, cudaStream_t stream) {
  using Shape = ForwardShape<kD, true>;
  static_assert(Shape::kBytes <= 227 * 1024);
  static std::atomic<uint64_t> ready{0};  // bit per device
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  if ((ready.load(std::memory_order_acquire) >> (device & 63) & 1) == 0) {
    error = cudaFuncSetAttribute(query_kernel<Element, kD>,
                                 cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kBytes);
    if (error != cudaSuccess) return error;
    ready.fetch_or(uint64_t{1} << (device & 63), std::memory_order_release);
  }
  const int items = args.num_rows * ((args.num_q_blocks + Shape::kGroups - 1) / Shape::kGroups);
  const int blocks = items < num_sms ? items : num_sms;
  cudaLaunchAttribute begins_early;
  begins_early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  begins_early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = blocks;
  config.blockDim = Shape::kThreads;
  config.dynamicSmemBytes = Shape::kBytes;
  config.stream = stream;
  config.attrs = &begins_early;
  config.numAttrs = beside ? 1 : 0;
  return cudaLaunchKernelEx(&config, query_kernel<Element, kD>, args);
}

}  // namespace mtraining::kernels::sm90
