#include <cuda_runtime.h>

#include <limits>

#include "mtraining/base/check.h"
#include "mtraining/kernels/lists_cuda/expand.h"

namespace mtraining::kernels::lists_cuda {
namespace {

constexpr int kThreads = 256, kScanThreads = 1024;
constexpr int kBlock = 64;

/// A warp a query block. fn(ballot of 32 key blocks, the first of them).
template <typename Fn>
__device__ __forceinline__ void walk(const ChosenBlocks& p, int64_t row, int64_t q, const Fn& fn) {
  const int query_block = p.q_block_starts[q] / kBlock;
  if (query_block >= p.num_blocks) return;
  const int64_t units = (p.num_blocks + p.query_blocks_per_unit - 1) / p.query_blocks_per_unit;
  const uint32_t* bits = p.bits + (row * units + query_block / p.query_blocks_per_unit) * p.words;
  const int lane = threadIdx.x % 32, wide = static_cast<int>(p.key_blocks_per_unit);
  for (int64_t first = 0; first < p.num_k_blocks; first += 32) {
    const int64_t k = first + lane;
    const int key_block =
        k < p.num_k_blocks ? p.k_block_starts[k] / kBlock : static_cast<int>(p.num_blocks);
    const bool before = key_block <= query_block;
    const int unit = before ? key_block / wide : 0;
    const uint32_t votes = __ballot_sync(~0u, before && (bits[unit / 32] >> (unit % 32) & 1) != 0);
    if (votes != 0) fn(votes, first);
    if (!__any_sync(~0u, before)) return;  // blocks ascend
  }
}

/// row_begin[row][q + 1] = entries of query block q.
__global__ void __launch_bounds__(kThreads) count(const ChosenBlocks p, int64_t* row_begin) {
  const int64_t warps = int64_t{gridDim.x} * (kThreads / 32);
  for (int64_t i = int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32;
       i < p.rows * p.num_q_blocks; i += warps) {
    const int64_t row = i / p.num_q_blocks, q = i % p.num_q_blocks;
    int entries = 0;
    walk(p, row, q, [&](uint32_t votes, int64_t) { entries += __popc(votes); });
    if (threadIdx.x % 32 == 0) row_begin[row * (p.num_q_blocks + 1) + q + 1] = entries;
  }
}

/// A block a row: counts become begins, none more than `room` after the row's; the row's sum goes to `longest`, where that is given.
__global__ void __launch_bounds__(kScanThreads)
    scan(int64_t num_q_blocks, int64_t capacity, int64_t room, int64_t* row_begin,
         int32_t* longest) {
  __shared__ int32_t of_warp[32];
  const int64_t row = blockIdx.x;
  int64_t* mine = row_begin + row * (num_q_blocks + 1);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int64_t before = row * capacity;
  for (int64_t first = 0; first < num_q_blocks; first += kScanThreads) {
    const int64_t q = first + threadIdx.x;
    int32_t sum = q < num_q_blocks ? static_cast<int32_t>(mine[q + 1]) : 0;  // inclusive
    for (int i = 1; i < 32; i *= 2) {
      const int32_t other = __shfl_up_sync(~0u, sum, i);
      if (lane >= i) sum += other;
    }
    if (lane == 31) of_warp[warp] = sum;
    __syncthreads();
    int32_t all = 0;
    for (int w = 0; w < kScanThreads / 32; ++w) {
      if (w < warp) sum += of_warp[w];
      all += of_warp[w];
    }
    if (q < num_q_blocks) mine[q + 1] = min(before + sum, row * capacity + room);
    before += all;
    __syncthreads();
  }
  if (threadIdx.x != 0) return;
  mine[0] = row * capacity;
  if (longest != nullptr) atomicMax(longest, static_cast<int32_t>(before - row * capacity));
}

__global__ void __launch_bounds__(kThreads)
    fill(const ChosenBlocks p, const int64_t* row_begin, int32_t* key_blocks) {
  const int64_t warps = int64_t{gridDim.x} * (kThreads / 32);
  const int lane = threadIdx.x % 32;
  for (int64_t i = int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32;
       i < p.rows * p.num_q_blocks; i += warps) {
    const int64_t row = i / p.num_q_blocks, q = i % p.num_q_blocks;
    int64_t at = row_begin[row * (p.num_q_blocks + 1) + q];
    const int64_t end = row_begin[row * (p.num_q_blocks + 1) + q + 1];
    walk(p, row, q, [&](uint32_t votes, int64_t first) {
      const int64_t to = at + __popc(votes & ((1u << lane) - 1));
      if ((votes >> lane & 1) != 0 && to < end) key_blocks[to] = static_cast<int32_t>(first) + lane;
      at += __popc(votes);
    });
  }
}

/// Blocks of a launch that walks; 0: there is nothing to walk.
unsigned walkers(const ChosenBlocks& p) {
  MT_CHECK_ARG(p.rows >= 0 && p.num_blocks >= 0 && p.num_q_blocks >= 0 && p.num_k_blocks >= 0 &&
                   p.query_blocks_per_unit > 0 && p.key_blocks_per_unit > 0,
               "block lists: expected sizes >= 0 and units > 0, got ", p.rows, " rows, ",
               p.num_blocks, " blocks, ", p.num_q_blocks, " query blocks, ", p.num_k_blocks,
               " key blocks, units of ", p.query_blocks_per_unit, " and ", p.key_blocks_per_unit);
  const int64_t blocks = (p.rows * p.num_q_blocks + kThreads / 32 - 1) / (kThreads / 32);
  MT_CHECK_ARG(blocks == 0 || (p.bits != nullptr && p.q_block_starts != nullptr &&
                               (p.num_k_blocks == 0 || p.k_block_starts != nullptr)),
               "block lists: expected bits and block starts, got null");
  return static_cast<unsigned>(blocks < 8192 ? blocks : 8192);
}

void count_and_scan(const ChosenBlocks& p, int64_t capacity, int64_t room, int64_t* row_begin,
                    int32_t* longest, cudaStream_t stream) {
  MT_CHECK_ARG(row_begin != nullptr, "block lists: expected row_begin, got null");
  if (const unsigned blocks = walkers(p); blocks > 0)
    count<<<blocks, kThreads, 0, stream>>>(p, row_begin);
  scan<<<static_cast<unsigned>(p.rows), kScanThreads, 0, stream>>>(p.num_q_blocks, capacity, room,
                                                                   row_begin, longest);
}

void check_launches() {
  const cudaError_t error = cudaGetLastError();
  MT_CHECK_EXTERNAL(error == cudaSuccess, "making block lists: ", cudaGetErrorString(error));
}

}  // namespace

void expand_lists(const ExpandParams& params) {
  const unsigned blocks = walkers(params.chosen);
  if (params.chosen.rows == 0) return;
  const auto stream = static_cast<cudaStream_t>(params.stream);
  count_and_scan(params.chosen, params.capacity, params.capacity, params.row_begin, params.longest,
                 stream);
  if (blocks > 0)
    fill<<<blocks, kThreads, 0, stream>>>(params.chosen, params.row_begin, params.key_blocks);
  check_launches();
}

void longest_row(const ChosenBlocks& chosen, int64_t* row_begin, int32_t* longest, void* stream) {
  MT_CHECK_ARG(longest != nullptr, "block lists: expected memory of the longest row, got null");
  walkers(chosen);
  if (chosen.rows == 0) return;
  count_and_scan(chosen, 0, std::numeric_limits<int32_t>::max(), row_begin, longest,
                 static_cast<cudaStream_t>(stream));
  check_launches();
}

}  // namespace mtraining::kernels::lists_cuda
