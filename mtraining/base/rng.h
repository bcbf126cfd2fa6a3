// Counter-based random numbers: value i of stream s under a seed is a pure function of (seed, s,
// i).
//
// In:   seed, stream, counter. Out: 64 bits, a uniform in [0, 1), a normal. Next: weights, tests,
//       sampling of rows.
//
// Integer arithmetic and exact sums alone, so that every machine, thread count and order of calls
// gives the same bits.
#pragma once

#include <cstdint>

namespace mtraining {

/// Mixes all bits of x into all bits of the result (a bijection).
constexpr uint64_t mix_bits(uint64_t x) {
  x ^= x >> 32;
  x *= 0xd6e8feb86659fd93ULL;
  x ^= x >> 32;
  x *= 0xd6e8feb86659fd93ULL;
  x ^= x >> 32;
  return x;
}

class Rng {
 public:
  constexpr explicit Rng(uint64_t seed, uint64_t stream = 0)
      : key_(mix_bits(mix_bits(seed + 0x9e3779b97f4a7c15ULL) ^
                      (stream * 0xbf58476d1ce4e5b9ULL + 0x94d049bb133111ebULL))) {}

  /// What bits() mixes a counter with.
  constexpr uint64_t key() const { return key_; }
  constexpr uint64_t bits(uint64_t counter) const {
    return mix_bits(mix_bits(counter + 0x9e3779b97f4a7c15ULL) ^ key_);
  }
  /// [0, 1), a multiple of 2^-53.
  constexpr double uniform(uint64_t counter) const {
    return static_cast<double>(bits(counter) >> 11) * 0x1p-53;
  }
  /// [0, bound). The bias is below bound / 2^64.
  constexpr uint64_t below(uint64_t counter, uint64_t bound) const {
    return static_cast<uint64_t>((static_cast<unsigned __int128>(bits(counter)) * bound) >> 64);
  }
  /// Mean 0, variance 1: the exact sum of twelve 32-bit uniforms (so |value| < 6).
  constexpr double normal(uint64_t counter) const {
    int64_t sum = 0;
    for (uint64_t i = 0; i < 6; ++i) {
      const uint64_t word = bits(counter * 6 + i);
      sum += static_cast<int64_t>(word >> 32) + static_cast<int64_t>(word & 0xffffffffULL);
    }
    return static_cast<double>(sum + 6) * 0x1p-32 -
           6.0;  // + 6: each uniform stands for its middle, x + 1/2
  }

 private:
  uint64_t key_;
};

}  // namespace mtraining
