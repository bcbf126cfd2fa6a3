// The radix search over keys that many thread blocks share: the first histogram, the keys of its last bin, the marks.
//
// In:   masses of keys. Out: histograms, searches, bits. Next: select.cu (a launch a step, several ranks), choose.cu (one launch).
#pragma once

#include "mtraining/kernels/params.h"
#include "mtraining/kernels/pattern_cuda/radix.cuh"

namespace mtraining::kernels::pattern_cuda {

inline constexpr int kFirstBins = 4096;
inline constexpr int kInverseBits = 31;  // positions are int32

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

struct FirstBins {
  uint32_t low[kFirstBins], high[kFirstBins];  // of the mass
  uint32_t count[kFirstBins];
};

/// Calls use(key, mass, exists) for keys [begin, end) of a row, thread by thread, with several loads in flight; `exists` is false for
/// padding.
template <int kThreads, typename Use>
__device__ __forceinline__ void for_keys(const Keys& keys, int64_t row, int begin, int end,
                                         const Use& use) {
  constexpr int kAtATime = 8;
  const int64_t* const masses = keys.masses + row * keys.num_keys;
  for (int first = begin + static_cast<int>(threadIdx.x); first < end;
       first += kAtATime * kThreads) {
    int64_t mass[kAtATime];
    int position[kAtATime];
#pragma unroll
    for (int i = 0; i < kAtATime; ++i) {
      const int key = min(first + i * kThreads, end - 1);
      mass[i] = masses[key];
      position[i] = position_of(keys, key);
    }
#pragma unroll
    for (int i = 0; i < kAtATime; ++i) {
      const int key = first + i * kThreads;
      if (key < end) use(key, mass[i], position[i] < keys.seq_len);
    }
  }
}

/// Keys [begin, end) of a row into bins; those below `least`, which cannot be chosen, into the lowest without looking at each. Calls
/// passed(key, mass) for the others that are not 0.
template <int kThreads, typename Passed>
__device__ void fill_first_bins(const Keys& keys, int64_t row, int begin, int end, int64_t least,
                                FirstBins& bins, const Passed& passed) {
  for (int b = threadIdx.x; b < kFirstBins; b += kThreads) {
    bins.low[b] = 0;
    bins.high[b] = 0;
    bins.count[b] = 0;
  }
  __syncthreads();
  int64_t small = 0;
  unsigned num_small = 0;
  for_keys<kThreads>(keys, row, begin, end, [&](int key, int64_t mass, bool exists) {
    if (!exists) return;
    if (mass < least || mass == 0) {
      small += mass;
      ++num_small;
      return;
    }
    const int bin = first_bin(mass);
    add_in_halves(&bins.low[bin], &bins.high[bin], static_cast<uint64_t>(mass));
    atomicAdd(&bins.count[bin], 1u);
    passed(key, mass);
  });
  for (int distance = 16; distance > 0; distance /= 2)
    small += __shfl_xor_sync(~0u, small, distance);
  num_small = __reduce_add_sync(~0u, num_small);
  if (threadIdx.x % 32 == 0 && num_small != 0) {
    add_in_halves(&bins.low[0], &bins.high[0], static_cast<uint64_t>(small));
    atomicAdd(&bins.count[0], num_small);
  }
  __syncthreads();
}

/// Adds the bins to a row's histogram, [4096, 2] mass and count.
template <int kThreads>
__device__ void add_first_bins(const FirstBins& bins, int64_t* histogram) {
  for (int b = threadIdx.x; b < kFirstBins; b += kThreads) {
    if (bins.count[b] == 0) continue;
    const uint64_t mass = static_cast<uint64_t>(bins.high[b]) << 32 | bins.low[b];
    if (mass != 0) atomic_add(histogram + 2 * b, static_cast<int64_t>(mass));
    atomic_add(histogram + 2 * b + 1, bins.count[b]);
  }
}

/// From a row's first histogram to the bin in which the budget ends. s and warp_sums [2][kThreads / 32] in shared memory.
template <int kThreads>
__device__ void pick_first_bin(const int64_t* histogram, Search& s, int64_t* warp_sums, double p,
                               int64_t cap) {
  constexpr int kOwn = kFirstBins / kThreads, kWarps = kThreads / 32;
  const int t = threadIdx.x, lane = t % 32, warp = t / 32;
  int64_t mass[kOwn], count[kOwn], mass_sum = 0, count_sum = 0;
  const int top = kFirstBins - 1 - kOwn * t;  // this thread's bins are top, top - 1, ..
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const longlong2 bin = __ldcg(reinterpret_cast<const longlong2*>(histogram) + (top - i));
    mass_sum += mass[i] = bin.x;
    count_sum += count[i] = bin.y;
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
    warp_sums[warp] = mass_sum;
    warp_sums[kWarps + warp] = count_sum;
  }
  __syncthreads();
  int64_t total = 0, total_count = 0;
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) {
      mass_sum += warp_sums[w];
      count_sum += warp_sums[kWarps + w];
    }
    total += warp_sums[w];
    total_count += warp_sums[kWarps + w];
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
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
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
}

/// Keys [begin, end) of a row that lie in the bin, in any order.
template <int kThreads>
__device__ void collect_keys(const Keys& keys, int64_t row, int begin, int end, int bin,
                             int32_t* candidates, int32_t* num_matches) {
  for_keys<kThreads>(keys, row, begin, end, [&](int key, int64_t mass, bool exists) {
    if (exists && first_bin(mass) == bin)
      candidates[row * keys.num_keys + atomicAdd(num_matches, 1)] = key;
  });
}

/// Items of a row's search: the keys that were collected.
struct Matches {
  Keys keys;
  const int32_t* candidates;
  int64_t row;
  __device__ bool operator()(int i, int64_t* mass, uint32_t* inverse) const {
    const int key = __ldcg(candidates + row * keys.num_keys + i);
    *mass = keys.masses[row * keys.num_keys + key];
    *inverse = inverse_of(keys, position_of(keys, key));
    return true;
  }
};

/// Bits of keys [begin, end), whole blocks of 64 but at the end. A warp writes a word: 32 keys of a block are 32 positions.
template <int kThreads>
__device__ void mark_keys(const Keys& keys, int64_t row, int begin, int end, const Search& s,
                          uint32_t* bits, int64_t words) {
  constexpr int kAtATime = 8;
  const int64_t* const masses = keys.masses + row * keys.num_keys;
  const int lane = threadIdx.x % 32;
  for (int warp_first = begin + static_cast<int>(threadIdx.x) / 32 * 32; warp_first < end;
       warp_first += kAtATime * kThreads) {
    int64_t mass[kAtATime];
    int start[kAtATime];
#pragma unroll
    for (int i = 0; i < kAtATime; ++i) {
      const int first = warp_first + i * kThreads;
      mass[i] = masses[min(first + lane, end - 1)];
      start[i] = keys.block_starts[min(first, end - 1) / 64] + first % 64;
    }
#pragma unroll
    for (int i = 0; i < kAtATime; ++i) {
      const int first = warp_first + i * kThreads;
      if (first >= end) break;
      const int position = start[i] + lane;
      const bool is_chosen = first + lane < end && position < keys.seq_len &&
                             chosen(s, mass[i], inverse_of(keys, position));
      const uint32_t word = __ballot_sync(~0u, is_chosen);
      if (lane == 0 && start[i] / 32 < words) bits[row * words + start[i] / 32] = word;
    }
  }
}

}  // namespace mtraining::kernels::pattern_cuda
