// The launch before the attention kernels: see launch_prepare.
#include <climits>

#include "mtraining/kernels/sm80/attention_args.cuh"

namespace mtraining::kernels::sm80 {
namespace {

constexpr int kThreads = 128;

/// A warp a query block.
__global__ void __launch_bounds__(kThreads) prepare(const PrepareArgs args) {
  const int64_t thread = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t threads = int64_t{gridDim.x} * kThreads;
  for (int64_t i = thread; i < args.num_counters; i += threads) args.counters[i] = 0;
  const int lane = threadIdx.x % 32;
  const int64_t blocks = int64_t{args.batch} * args.num_q_blocks;
  for (int64_t b = thread / 32; b < blocks; b += threads / 32) {
    const int64_t batch = b / args.num_q_blocks;
    const int block = static_cast<int>(b % args.num_q_blocks);
    const int rows = min(64, args.num_queries - block * 64);
    QueryBounds bounds{args.q_block_starts[block], -1, 0, 0};
    const int64_t last = bounds.first + int64_t{rows - 1} * args.position_stride;
    // Positions beyond the sequence are padding: the last real row is the last one at or below seq_len - 1.
    if (bounds.first < args.seq_len) {
      const int64_t real = last < args.seq_len ? last
                                               : bounds.first + (args.seq_len - 1 - bounds.first) /
                                                                    args.position_stride *
                                                                    int64_t{args.position_stride};
      bounds.last = static_cast<int32_t>(real);
    }
    if (args.document_start != nullptr && bounds.last >= 0) {
      const int32_t* starts = args.document_start + batch * args.document_stride_batch + block * 64;
      int lowest = INT_MAX, highest = 0;
      for (int r = lane; r < rows; r += 32) {
        if (bounds.first + int64_t{r} * args.position_stride > bounds.last) break;
        lowest = min(lowest, starts[r]);
        highest = max(highest, starts[r]);
      }
      bounds.document_min = __reduce_min_sync(~0u, lowest);
      bounds.document_max = __reduce_max_sync(~0u, highest);
    }
    if (lane == 0) args.bounds[b] = bounds;
  }
}

}  // namespace

cudaError_t launch_prepare(const PrepareArgs& args, cudaStream_t stream) {
  const int64_t warps = int64_t{args.batch} * args.num_q_blocks;
  const int64_t blocks = (warps + kThreads / 32 - 1) / (kThreads / 32);
  prepare<<<static_cast<unsigned>(blocks < 1024 ? (blocks > 0 ? blocks : 1) : 1024), kThreads, 0,
            stream>>>(args);
  return cudaGetLastError();
}

}  // namespace mtraining::kernels::sm80
