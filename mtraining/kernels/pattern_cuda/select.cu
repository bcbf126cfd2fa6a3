#include <algorithm>

#include "mtraining/base/check.h"
#include "mtraining/kernels/dispatch.h"
#include "mtraining/kernels/params.h"
#include "mtraining/kernels/pattern_cuda/device.h"
#include "mtraining/kernels/pattern_cuda/instructions.cuh"
#include "mtraining/kernels/pattern_cuda/radix.cuh"
#include "mtraining/kernels/pattern_cuda/select.h"

namespace mtraining::kernels::pattern_cuda {
namespace {

constexpr int kFirstBins = 4096;
constexpr int kThreads = 256;
constexpr int kInverseBits = 31;  // positions are int32

/// Exact below 128, then 64 bins an octave.
__device__ __forceinline__ int first_bin(int64_t mass) {
  if (mass < 128) return static_cast<int>(mass < 0 ? 0 : mass);
  const int octave = 63 - __clzll(mass);
  return 128 + (octave - 7) * 64 + static_cast<int>((mass >> (octave - 6)) & 63);
}
/// All masses of a bin are (prefix << shift) and what shift bits add.
__device__ __forceinline__ void prefix_of_bin(int bin, uint64_t* prefix, int32_t* shift) {
  *prefix = bin < 128 ? bin : 64 + (bin - 128) % 64;
  *shift = bin < 128 ? 0 : (bin - 128) / 64 + 1;
}

struct Keys {
  const int64_t* masses;
  const int32_t* block_starts;
  int32_t num_keys, seq_len;
  int32_t chunks, chunk_keys;
};
__device__ __forceinline__ int position_of(const Keys& keys, int key) {
  return keys.block_starts[key / 64] + key % 64;
}
__device__ __forceinline__ uint32_t inverse_of(const Keys& keys, int position) {
  return static_cast<uint32_t>(keys.seq_len - 1 - position);
}

__global__ void __launch_bounds__(kThreads) first_histogram(Keys keys, int64_t* histogram) {
  __shared__ uint32_t low_of[kFirstBins], high_of[kFirstBins];  // of the mass
  __shared__ uint32_t count_of[kFirstBins];
  const int64_t row = blockIdx.x / keys.chunks;
  const int begin = static_cast<int>(blockIdx.x % keys.chunks) * keys.chunk_keys;
  const int end = min(keys.num_keys, begin + keys.chunk_keys);
  for (int b = threadIdx.x; b < kFirstBins; b += kThreads) {
    low_of[b] = 0;
    high_of[b] = 0;
    count_of[b] = 0;
  }
  __syncthreads();
  for (int key = begin + threadIdx.x; key < end; key += kThreads) {
    if (position_of(keys, key) >= keys.seq_len) continue;
    const int64_t mass = keys.masses[row * keys.num_keys + key];
    const int bin = first_bin(mass);
    add_in_halves(&low_of[bin], &high_of[bin], static_cast<uint64_t>(mass));
    atomicAdd(&count_of[bin], 1u);
  }
  __syncthreads();
  int64_t* to = histogram + row * kFirstBins * 2;
  for (int b = threadIdx.x; b < kFirstBins; b += kThreads) {
    if (count_of[b] == 0) continue;
    const uint64_t mass = static_cast<uint64_t>(high_of[b]) << 32 | low_of[b];
    if (mass != 0) atomic_add(to + 2 * b, static_cast<int64_t>(mass));
    atomic_add(to + 2 * b + 1, count_of[b]);
  }
}

/// A thread block a row: from the first histogram to the bin in which the budget ends.
__global__ void __launch_bounds__(1024)
    pick_first_bin(const int64_t* histogram, Search* searches, double p, int64_t cap) {
  __shared__ int64_t warp_mass[32], warp_count[32];
  __shared__ Search s;
  const int64_t row = blockIdx.x;
  const int t = threadIdx.x, lane = t % 32, warp = t / 32;
  const int64_t* bins = histogram + row * kFirstBins * 2;
  int64_t mass[4], count[4], mass_sum = 0, count_sum = 0;
  const int top = kFirstBins - 1 - 4 * t;  // this thread's bins are top, top - 1, ..
  for (int i = 0; i < 4; ++i) {
    mass_sum += mass[i] = bins[2 * (top - i)];
    count_sum += count[i] = bins[2 * (top - i) + 1];
  }
  const int64_t own_mass = mass_sum, own_count = count_sum;
  for (int distance = 1; distance < 32; distance *= 2) {
    const int64_t m = __shfl_up_sync(~0u, mass_sum, distance);
    const int64_t c = __shfl_up_sync(~0u, count_sum, distance);
    if (lane >= distance) {
      mass_sum += m;
      count_sum += c;
    }
  }
  if (lane == 31) {
    warp_mass[warp] = mass_sum;
    warp_count[warp] = count_sum;
  }
  __syncthreads();
  int64_t total = 0, total_count = 0;
  for (int w = 0; w < 32; ++w) {
    if (w < warp) {
      mass_sum += warp_mass[w];
      count_sum += warp_count[w];
    }
    total += warp_mass[w];
    total_count += warp_count[w];
  }
  if (t == 0) {
    begin_search(s, total, total_count, p, cap);
    s.bin = -1;
    s.num_matches = 0;
  }
  __syncthreads();
  if (s.open) {
    const int64_t need_mass = s.need_mass, need_count = s.need_count;
    __syncthreads();
    int64_t mass_above = mass_sum - own_mass, count_above = count_sum - own_count;
    for (int i = 0; i < 4; ++i) {
      if ((mass_above + mass[i] >= need_mass || count_above + count[i] >= need_count) &&
          mass_above < need_mass && count_above < need_count) {
        s.bin = top - i;
        prefix_of_bin(s.bin, &s.prefix, &s.shift);
        descend(s, mass_above, count_above, mass[i], count[i], kInverseBits);
      }
      mass_above += mass[i];
      count_above += count[i];
    }
    __syncthreads();
    if (t == 0 && s.bin < 0) close_with_all(s);  // p >= 1, and fewer keys than the cap
  }
  __syncthreads();
  if (t == 0) searches[row] = s;
}

__global__ void __launch_bounds__(kThreads)
    collect_matches(Keys keys, Search* searches, int32_t* candidates) {
  const int64_t row = blockIdx.x / keys.chunks;
  if (!searches[row].open) return;
  const int bin = searches[row].bin;
  const int begin = static_cast<int>(blockIdx.x % keys.chunks) * keys.chunk_keys;
  const int end = min(keys.num_keys, begin + keys.chunk_keys);
  for (int key = begin + threadIdx.x; key < end; key += kThreads) {
    if (first_bin(keys.masses[row * keys.num_keys + key]) != bin ||
        position_of(keys, key) >= keys.seq_len)
      continue;
    candidates[row * keys.num_keys + atomicAdd(&searches[row].num_matches, 1)] = key;
  }
}

/// Items of a row's search: the keys that were collected.
struct Matches {
  Keys keys;
  const int32_t* candidates;
  int64_t row;
  __device__ void operator()(int i, int64_t* mass, uint32_t* inverse) const {
    const int key = candidates[row * keys.num_keys + i];
    *mass = keys.masses[row * keys.num_keys + key];
    *inverse = inverse_of(keys, position_of(keys, key));
  }
};

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

/// A warp writes a word: 32 keys of a block are 32 consecutive positions.
__global__ void __launch_bounds__(kThreads)
    mark_chosen(Keys keys, const Search* searches, uint32_t* bits, int64_t words, int32_t* cut) {
  const int64_t row = blockIdx.x / keys.chunks;
  const Search s = searches[row];
  const int begin = static_cast<int>(blockIdx.x % keys.chunks) * keys.chunk_keys;
  const int end = min(keys.num_keys, begin + keys.chunk_keys);
  for (int first = begin + threadIdx.x / 32 * 32; first < end; first += kThreads) {
    const int key = first + threadIdx.x % 32;
    const int start = keys.block_starts[first / 64] + first % 64;
    const int position = start + threadIdx.x % 32;
    const bool is_chosen =
        key < end && position < keys.seq_len &&
        chosen(s, keys.masses[row * keys.num_keys + key], inverse_of(keys, position));
    const uint32_t word = __ballot_sync(~0u, is_chosen);
    if (threadIdx.x % 32 == 0 && start / 32 < words) bits[row * words + start / 32] = word;
  }
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
    pick_first_bin<<<rows, 1024, 0, stream>>>(histogram_, searches, p_.p, p_.cap);
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
  pick_first_bin<<<rows, 1024, 0, stream>>>(histogram_, searches, p_.p, p_.cap);
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
