#include <algorithm>

#include "mtraining/base/check.h"
#include "mtraining/kernels/dispatch.h"
#include "mtraining/kernels/params.h"
#include "mtraining/kernels/pattern_cuda/device.h"
#include "mtraining/kernels/pattern_cuda/select.cuh"
#include "mtraining/kernels/pattern_cuda/select.h"

namespace mtraining::kernels::pattern_cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kPickThreads = 1024;

__global__ void __launch_bounds__(kThreads) first_histogram(Keys keys, int64_t* histogram) {
  __shared__ FirstBins bins;
  const int64_t row = blockIdx.x / keys.chunks;
  const int begin = static_cast<int>(blockIdx.x % keys.chunks) * keys.chunk_keys;
  fill_first_bins<kThreads>(keys, row, begin, min(keys.num_keys, begin + keys.chunk_keys), 0, bins,
                            [](int, int64_t) {});
  add_first_bins<kThreads>(bins, histogram + row * kFirstBins * 2);
}

/// A thread block a row. caps: by row, in place of `cap`, or null.
__global__ void __launch_bounds__(kPickThreads)
    pick_of_first_histogram(const int64_t* histogram, Search* searches, double p, int64_t cap,
                            const int64_t* caps) {
  __shared__ int64_t warp_sums[2 * kPickThreads / 32];
  __shared__ Search s;
  const int64_t row = blockIdx.x;
  pick_first_bin<kPickThreads>(histogram + row * kFirstBins * 2, s, warp_sums, p,
                               caps == nullptr ? cap : caps[row]);
  if (threadIdx.x == 0) searches[row] = s;
}

__global__ void __launch_bounds__(kThreads)
    collect_matches(Keys keys, Search* searches, int32_t* candidates) {
  const int64_t row = blockIdx.x / keys.chunks;
  if (!searches[row].open) return;
  const int begin = static_cast<int>(blockIdx.x % keys.chunks) * keys.chunk_keys;
  collect_keys<kThreads>(keys, row, begin, min(keys.num_keys, begin + keys.chunk_keys),
                         searches[row].bin, candidates, &searches[row].num_matches);
}

__global__ void __launch_bounds__(512)
    search_matches(Keys keys, Search* searches, const int32_t* candidates) {
  __shared__ RadixBins bins;
  __shared__ Search s;
  const int64_t row = blockIdx.x;
  if (!searches[row].open) return;
  if (threadIdx.x == 0) s = searches[row];
  __syncthreads();
  search_items(s, bins, s.num_matches, Matches{keys, candidates, row}, kInverseBits);
  if (threadIdx.x == 0) searches[row] = s;
}

/// One round over several ranks: this rank's bins, [rows, 256, 2].
__global__ void __launch_bounds__(512)
    round_histogram(Keys keys, const Search* searches, const int32_t* candidates,
                    int64_t* histogram) {
  __shared__ RadixBins bins;
  __shared__ Search s;
  const int64_t row = blockIdx.x;
  if (threadIdx.x == 0) s = searches[row];
  __syncthreads();
  fill_bins(s, bins, s.open ? s.num_matches : 0, Matches{keys, candidates, row});
  if (threadIdx.x < 256) {
    histogram[(row * 256 + threadIdx.x) * 2] = bins.mass(threadIdx.x);
    histogram[(row * 256 + threadIdx.x) * 2 + 1] = bins.count[threadIdx.x];
  }
}

__global__ void __launch_bounds__(256) round_pick(const int64_t* histogram, Search* searches) {
  __shared__ RadixBins bins;
  __shared__ Search s;
  const int64_t row = blockIdx.x;
  if (!searches[row].open) return;
  if (threadIdx.x == 0) s = searches[row];
  __syncthreads();
  pick_round(
      s, bins,
      [&](int b, long long* mass, int* count) {
        *mass = histogram[(row * 256 + b) * 2];
        *count = static_cast<int>(histogram[(row * 256 + b) * 2 + 1]);
      },
      kInverseBits);
  if (threadIdx.x == 0) searches[row] = s;
}

__global__ void __launch_bounds__(kThreads)
    mark_chosen(Keys keys, const Search* searches, uint32_t* bits, int64_t words, int32_t* cut) {
  const int64_t row = blockIdx.x / keys.chunks;
  const Search s = searches[row];
  const int begin = static_cast<int>(blockIdx.x % keys.chunks) * keys.chunk_keys;
  mark_keys<kThreads>(keys, row, begin, min(keys.num_keys, begin + keys.chunk_keys), s, bits,
                      words);
  if (blockIdx.x % keys.chunks == 0 && threadIdx.x == 0) cut[row] = s.cut;
}

Keys keys_of(const SelectionParams& p) {
  const LaunchPlanner planner(device_of_stream());
  Keys keys = {p.masses,
               p.block_starts,
               static_cast<int32_t>(p.num_keys),
               static_cast<int32_t>(p.seq_len),
               1,
               64};
  if (p.rows == 0 || p.num_keys == 0) return keys;
  const int64_t chunks = planner.chunks(p.rows, p.num_keys, 2048);
  keys.chunk_keys = static_cast<int32_t>(((p.num_keys + chunks - 1) / chunks + 63) / 64 * 64);
  keys.chunks = static_cast<int32_t>((p.num_keys + keys.chunk_keys - 1) / keys.chunk_keys);
  return keys;
}

unsigned grid_of(const char* what, int64_t rows, int64_t chunks) {
  return static_cast<unsigned>(LaunchPlanner(device_of_stream()).flat(what, rows, chunks).x);
}

int64_t align(int64_t bytes) { return (bytes + 255) / 256 * 256; }

}  // namespace

int64_t KeySelection::workspace_bytes(int64_t rows, int64_t num_keys) {
  return align(rows * kFirstBins * 2 * 8) + align(rows * num_keys * 4) +
         align(rows * static_cast<int64_t>(sizeof(Search)));
}

KeySelection::KeySelection(const SelectionParams& params)
    : p_(params), words_((params.seq_len + 31) / 32) {
  MT_CHECK_ARG(p_.rows == 0 || (p_.bits != nullptr && p_.cut != nullptr && p_.workspace != nullptr),
               "choosing columns: bits, cut, workspace: expected pointers, got a null one");
  MT_CHECK_ARG(p_.rows * p_.num_keys == 0 || (p_.masses != nullptr && p_.block_starts != nullptr),
               "choosing columns: masses, block_starts: expected pointers, got a null one");
  char* memory = static_cast<char*>(p_.workspace);
  histogram_ = reinterpret_cast<int64_t*>(memory);
  memory += align(p_.rows * kFirstBins * 2 * 8);
  candidates_ = reinterpret_cast<int32_t*>(memory);
  state_ = memory + align(p_.rows * p_.num_keys * 4);
}

Summed KeySelection::begin() {
  const auto stream = static_cast<cudaStream_t>(p_.stream);
  const Summed summed{histogram_, p_.rows * kFirstBins * 2};
  if (p_.rows == 0) return summed;
  check_cuda(cudaMemsetAsync(histogram_, 0, summed.count * sizeof(int64_t), stream),
             "choosing columns: resetting the histogram");
  const Keys keys = keys_of(p_);
  if (p_.num_keys > 0)
    first_histogram<<<grid_of("columns", p_.rows, keys.chunks), kThreads, 0, stream>>>(keys,
                                                                                       histogram_);
  check_cuda(cudaGetLastError(), "choosing columns: histogram");
  return summed;
}

int KeySelection::rounds() const {
  // 56 bits of mass below the first bins' (masses below 2^62), then the position.
  return 7 + (kInverseBits + 7) / 8;
}

Summed KeySelection::round(int number) {
  const auto stream = static_cast<cudaStream_t>(p_.stream);
  auto* searches = static_cast<Search*>(state_);
  const Summed summed{histogram_, p_.rows * 256 * 2};
  if (p_.rows == 0) return summed;
  const Keys keys = keys_of(p_);
  const auto rows = grid_of("columns", p_.rows, 1);
  if (number == 0) {
    pick_of_first_histogram<<<rows, kPickThreads, 0, stream>>>(histogram_, searches, p_.p, p_.cap,
                                                               p_.caps);
    if (p_.num_keys > 0)
      collect_matches<<<grid_of("columns", p_.rows, keys.chunks), kThreads, 0, stream>>>(
          keys, searches, candidates_);
  } else {
    round_pick<<<rows, 256, 0, stream>>>(histogram_, searches);
  }
  round_histogram<<<rows, 512, 0, stream>>>(keys, searches, candidates_, histogram_);
  check_cuda(cudaGetLastError(), "choosing columns: a round");
  return summed;
}

void KeySelection::finish() {
  if (p_.rows == 0) return;
  const auto stream = static_cast<cudaStream_t>(p_.stream);
  auto* searches = static_cast<Search*>(state_);
  const Keys keys = keys_of(p_);
  const auto rows = grid_of("columns", p_.rows, 1);
  pick_of_first_histogram<<<rows, kPickThreads, 0, stream>>>(histogram_, searches, p_.p, p_.cap,
                                                             p_.caps);
  if (p_.num_keys > 0) {
    collect_matches<<<grid_of("columns", p_.rows, keys.chunks), kThreads, 0, stream>>>(
        keys, searches, candidates_);
    search_matches<<<rows, 512, 0, stream>>>(keys, searches, candidates_);
  }
  check_cuda(cudaGetLastError(), "choosing columns: search");
  round_is_last_ = false;
  mark();
}

void KeySelection::mark() {
  if (p_.rows == 0) return;
  const auto stream = static_cast<cudaStream_t>(p_.stream);
  auto* searches = static_cast<Search*>(state_);
  const Keys keys = keys_of(p_);
  if (round_is_last_)
    round_pick<<<grid_of("columns", p_.rows, 1), 256, 0, stream>>>(histogram_, searches);
  check_cuda(cudaMemsetAsync(p_.bits, 0, p_.rows * words_ * 4, stream),
             "choosing columns: resetting the bits");
  mark_chosen<<<grid_of("columns", p_.rows, keys.chunks), kThreads, 0, stream>>>(
      keys, searches, p_.bits, words_, p_.cut);
  check_cuda(cudaGetLastError(), "choosing columns: marking");
}

}  // namespace mtraining::kernels::pattern_cuda
