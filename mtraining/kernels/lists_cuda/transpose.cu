#include <cuda_runtime.h>

#include <algorithm>

#include "mtraining/base/check.h"
#include "mtraining/kernels/lists_cuda/transpose.h"

namespace mtraining::kernels::lists_cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kScanThreads = 1024;
constexpr int64_t kMostChunks = 32, kLeastChunk = 64;

/// A row's query blocks in chunks: a thread block counts one, and later fills in its query blocks one after the other.
struct Chunks {
  int64_t size, count;
};
Chunks chunks_of(const TransposeParams& p) {
  const int64_t size = std::max(kLeastChunk, (p.num_q_blocks + kMostChunks - 1) / kMostChunks);
  return {size, (p.num_q_blocks + size - 1) / size};
}

/// counts[row][chunk][key block]: how many query blocks of the chunk list it.
__global__ void __launch_bounds__(kThreads)
    count(const TransposeParams p, const Chunks chunks, int32_t* counts) {
  const int64_t row = blockIdx.x / chunks.count, chunk = blockIdx.x % chunks.count;
  int32_t* mine = counts + static_cast<int64_t>(blockIdx.x) * p.num_k_blocks;
  for (int64_t k = threadIdx.x; k < p.num_k_blocks; k += kThreads) mine[k] = 0;
  __syncthreads();
  const int64_t* begin = p.row_begin + row * (p.num_q_blocks + 1);
  const int64_t first = begin[chunk * chunks.size],
                last = begin[min((chunk + 1) * chunks.size, p.num_q_blocks)];
  for (int64_t i = first + threadIdx.x; i < last; i += kThreads) {
    const int32_t k = p.key_blocks[i];
    if (k >= 0 && k < p.num_k_blocks) atomicAdd(mine + k, 1);
  }
}

/// A block a row: key_row_begin; counts become where a chunk's first query block of a key block goes, from the row's begin.
__global__ void __launch_bounds__(kScanThreads)
    scan(const TransposeParams p, const Chunks chunks, int32_t* counts) {
  __shared__ int32_t of_warp[32];
  const int64_t row = blockIdx.x;
  int32_t* mine = counts + row * chunks.count * p.num_k_blocks;
  const int64_t base = p.row_begin[row * (p.num_q_blocks + 1)];
  int64_t* out = p.key_row_begin + row * (p.num_k_blocks + 1);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int32_t before = 0;  // of the key blocks of earlier rounds
  for (int64_t first = 0; first < p.num_k_blocks; first += kScanThreads) {
    const int64_t k = first + threadIdx.x;
    int32_t total = 0;
    for (int64_t c = 0; c < chunks.count && k < p.num_k_blocks; ++c)
      total += mine[c * p.num_k_blocks + k];
    int32_t sum = total;  // inclusive
    for (int i = 1; i < 32; i *= 2) {
      const int32_t other = __shfl_up_sync(~0u, sum, i);
      if (lane >= i) sum += other;
    }
    if (lane == 31) of_warp[warp] = sum;
    __syncthreads();
    int32_t warps = 0, all = 0;
    for (int w = 0; w < kScanThreads / 32; ++w) {
      if (w < warp) warps += of_warp[w];
      all += of_warp[w];
    }
    __syncthreads();
    int32_t at = before + warps + sum - total;
    if (k < p.num_k_blocks) {
      out[k] = base + at;
      for (int64_t c = 0; c < chunks.count; ++c) {
        const int32_t here = mine[c * p.num_k_blocks + k];
        mine[c * p.num_k_blocks + k] = at;
        at += here;
      }
    }
    before += all;
  }
  if (threadIdx.x == 0) out[p.num_k_blocks] = base + before;
}

__global__ void __launch_bounds__(kThreads)
    fill(const TransposeParams p, const Chunks chunks, int32_t* next) {
  const int64_t row = blockIdx.x / chunks.count, chunk = blockIdx.x % chunks.count;
  int32_t* mine = next + static_cast<int64_t>(blockIdx.x) * p.num_k_blocks;
  const int64_t* begin = p.row_begin + row * (p.num_q_blocks + 1);
  const int64_t end = min((chunk + 1) * chunks.size, p.num_q_blocks);
  for (int64_t q = chunk * chunks.size; q < end; ++q) {
    for (int64_t i = begin[q] + threadIdx.x; i < begin[q + 1]; i += kThreads) {
      const int32_t k = p.key_blocks[i];
      if (k >= 0 && k < p.num_k_blocks)
        p.query_blocks[begin[0] + mine[k]++] = static_cast<int32_t>(q);
    }
    __syncthreads();  // a key block is once in a query block's list
  }
}

}  // namespace

int64_t transpose_workspace_bytes(const TransposeParams& p) {
  return p.rows * chunks_of(p).count * p.num_k_blocks * 4;
}

void transpose_lists(const TransposeParams& p) {
  MT_CHECK_ARG(p.rows >= 0 && p.num_q_blocks >= 0 && p.num_k_blocks >= 0,
               "transpose of block lists: expected sizes >= 0, got ", p.rows, " rows, ",
               p.num_q_blocks, " query blocks, ", p.num_k_blocks, " key blocks");
  if (p.rows == 0) return;
  MT_CHECK_ARG(p.row_begin != nullptr && p.key_row_begin != nullptr,
               "transpose of block lists: expected row_begin and key_row_begin, got null");
  const Chunks chunks = chunks_of(p);
  MT_CHECK_SUPPORTED(p.rows * std::max<int64_t>(chunks.count, 1) < (int64_t{1} << 31),
                     "transpose of block lists: expected fewer than 2^31 chunks, got ",
                     p.rows * chunks.count);
  const auto stream = static_cast<cudaStream_t>(p.stream);
  auto* counts = static_cast<int32_t*>(p.workspace);
  const auto blocks = static_cast<unsigned>(p.rows * chunks.count);
  if (blocks > 0) count<<<blocks, kThreads, 0, stream>>>(p, chunks, counts);
  scan<<<static_cast<unsigned>(p.rows), kScanThreads, 0, stream>>>(p, chunks, counts);
  if (blocks > 0) fill<<<blocks, kThreads, 0, stream>>>(p, chunks, counts);
  const cudaError_t error = cudaGetLastError();
  MT_CHECK_EXTERNAL(error == cudaSuccess, "transposing block lists: ", cudaGetErrorString(error));
}

}  // namespace mtraining::kernels::lists_cuda
