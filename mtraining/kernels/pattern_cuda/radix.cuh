// The radix search by one thread block: 256 bins a round, from the largest keys down.
//
// In:   items (mass, inverse position), how much mass or how many items are wanted. Out: the smallest key that is chosen.
// Next: select.cu (columns), lists.cu (diagonals).
//
// An item is chosen iff its key (mass, inverse) is at or above the end of the search. Source: docs/math/pattern.md.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "mtraining/kernels/pattern_cuda/instructions.cuh"

namespace mtraining::kernels::pattern_cuda {

inline constexpr int64_t kUnbounded = 0x7fffffffffffffff;

/// threshold = ceil(p * total), in double as on the host.
__device__ __forceinline__ int64_t budget(int64_t total, double p) {
  if (p <= 0) return 0;
  const double product = ceil(p * static_cast<double>(total));
  return product >= static_cast<double>(total) ? total : static_cast<int64_t>(product);
}

/// Where the search of one row stands.
struct Search {
  int64_t need_mass, need_count;  // still, of the items that match
  uint64_t prefix;  // items match whose key >> shift equals it, in the part under search
  uint64_t mass;    // once the position is under search: the mass of all that match
  int32_t shift;
  int32_t by_position;  // which part is under search
  int32_t open;
  int32_t bounded;  // p < 1: mass ends the search, and a cap before it is a cut
  int32_t cut;
  int32_t bin;          // of the first histogram, where items were collected
  int32_t num_matches;  // collected
  // the end, once closed
  int64_t mass_end;      // chosen iff mass > mass_end, or equal and
  uint32_t inverse_end;  // inverse >= inverse_end
};

__device__ __forceinline__ bool chosen(const Search& s, int64_t mass, uint32_t inverse) {
  return mass > s.mass_end || (mass == s.mass_end && inverse >= s.inverse_end);
}
__device__ __forceinline__ void close_with_all(Search& s) {
  s.open = 0;
  s.mass_end = 0;
  s.inverse_end = 0;
}
__device__ __forceinline__ void close_with_none(Search& s) {
  s.open = 0;
  s.mass_end = kUnbounded;
  s.inverse_end = ~0u;
}

/// Begins: what is wanted of `total` mass in `count` items.
__device__ __forceinline__ void begin_search(Search& s, int64_t total, int64_t count, double p,
                                             int64_t cap) {
  s.bounded = p < 1;
  s.need_mass = p < 1 ? budget(total, p) : kUnbounded;
  s.need_count = cap < 0 ? kUnbounded : cap;
  s.cut = cap >= 0 && (p < 1 ? s.need_mass > 0 && cap == 0 : count > cap);
  s.open = 1;
  s.by_position = 0;
  s.mass = 0;
  s.prefix = 0;
  if (p <= 0) s.cut = 0;
  if (p <= 0 || s.need_mass <= 0 || s.need_count <= 0) close_with_none(s);
}

/// The budget ends in `bin` of the last digit: `above` lies in higher bins. shift is already that of the digit.
__device__ __forceinline__ void descend(Search& s, int64_t mass_above, int64_t count_above,
                                        int64_t bin_mass, int64_t bin_count, int inverse_bits) {
  s.need_mass -= mass_above;
  s.need_count -= count_above;
  // Nothing is left to search where the whole bin is taken: one item, or as many as the cap admits whose mass does not suffice.
  if (bin_count == 1 || (bin_count == s.need_count && bin_mass < s.need_mass)) {
    if (s.bounded) s.cut = bin_mass < s.need_mass;
    s.open = 0;
    if (s.by_position) {
      s.mass_end = static_cast<int64_t>(s.mass);
      s.inverse_end = static_cast<uint32_t>(s.prefix << s.shift);
    } else {
      s.mass_end = static_cast<int64_t>(s.prefix << s.shift);
      s.inverse_end = 0;
    }
  } else if (s.shift == 0) {  // equal masses
    s.mass = s.prefix;
    s.by_position = 1;
    s.prefix = 0;
    s.shift = inverse_bits;
  }
}

struct RadixBins {
  uint32_t low[256], high[256];  // of the mass
  uint32_t count[256];
  long long warp_mass[8];
  int warp_count[8];
  __device__ long long mass(int bin) const {
    return static_cast<long long>(static_cast<uint64_t>(high[bin]) << 32 | low[bin]);
  }
};

/// Digit of an item that matches, or -1.
__device__ __forceinline__ int digit_of(const Search& s, int64_t mass, uint32_t inverse) {
  const int bits = min(8, s.shift);
  uint64_t part = static_cast<uint64_t>(mass);
  if (s.by_position) {
    if (part != s.mass) return -1;
    part = inverse;
  }
  if ((s.shift < 64 ? part >> s.shift : 0) != s.prefix) return -1;
  return static_cast<int>(part >> (s.shift - bits)) & ((1 << bits) - 1);
}

/// Picks the bin of a round from 256 (mass, count), called by threads 0 .. 255 of a block (all threads must call).
template <typename Get>
__device__ void pick_round(Search& s, RadixBins& bins, const Get& get, int inverse_bits) {
  const int t = threadIdx.x, lane = t % 32, warp = t / 32;
  long long mass = 0, mass_sum = 0;
  int count = 0, count_sum = 0;
  if (t < 256) {
    get(255 - t, &mass, &count);
    mass_sum = mass;
    count_sum = count;
    for (int distance = 1; distance < 32; distance *= 2) {
      const long long m = __shfl_up_sync(~0u, mass_sum, distance);
      const int c = __shfl_up_sync(~0u, count_sum, distance);
      if (lane >= distance) {
        mass_sum += m;
        count_sum += c;
      }
    }
    if (lane == 31) {
      bins.warp_mass[warp] = mass_sum;
      bins.warp_count[warp] = count_sum;
    }
  }
  __syncthreads();
  const int64_t need_mass = s.need_mass, need_count = s.need_count;
  const int bits = min(8, s.shift);
  __syncthreads();
  if (t < 256) {
    for (int w = 0; w < warp; ++w) {
      mass_sum += bins.warp_mass[w];
      count_sum += bins.warp_count[w];
    }
    const long long mass_above = mass_sum - mass;
    const int count_above = count_sum - count;
    if ((mass_sum >= need_mass || count_sum >= need_count) && mass_above < need_mass &&
        count_above < need_count) {
      s.shift -= bits;
      s.prefix = s.prefix << bits | static_cast<uint64_t>(255 - t);
      descend(s, mass_above, count_above, mass, count, inverse_bits);
    }
  }
  __syncthreads();
}

/// Fills the bins with the items that match; item(i, &mass, &inverse) is false for what is none. All threads.
template <typename Item>
__device__ void fill_bins(const Search& s, RadixBins& bins, int num_items, const Item& item) {
  for (int b = threadIdx.x; b < 256; b += blockDim.x) {
    bins.low[b] = 0;
    bins.high[b] = 0;
    bins.count[b] = 0;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < num_items; i += blockDim.x) {
    int64_t mass;
    uint32_t inverse;
    if (!item(i, &mass, &inverse)) continue;
    const int digit = digit_of(s, mass, inverse);
    if (digit < 0) continue;
    add_in_halves(&bins.low[digit], &bins.high[digit], static_cast<uint64_t>(mass));
    atomicAdd(&bins.count[digit], 1u);
  }
  __syncthreads();
}

/// Closes the search. All threads of a block of at least 256; s in shared memory.
template <typename Item>
__device__ void search_items(Search& s, RadixBins& bins, int num_items, const Item& item,
                             int inverse_bits) {
  __syncthreads();
  // 8 rounds of mass and 4 of position end every search of non-negative masses; others must not hang.
  for (int round = 0; s.open && round < 13; ++round) {
    fill_bins(s, bins, num_items, item);
    pick_round(
        s, bins,
        [&](int b, long long* mass, int* count) {
          *mass = bins.mass(b);
          *count = static_cast<int>(bins.count[b]);
        },
        inverse_bits);
  }
  if (threadIdx.x == 0 && s.open) close_with_none(s);
  __syncthreads();
}

}  // namespace mtraining::kernels::pattern_cuda
