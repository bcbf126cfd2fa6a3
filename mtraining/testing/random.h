// Random: a small counter-free generator whose numbers are the same on every machine (no libm, no std::distribution).
//
// In:   a seed. Out: uniform integers, uniform and nearly normal reals. Next: generator.h and tests.
#pragma once

#include <cstdint>

namespace mtraining::testing {

/// splitmix64. One instance per thread.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t next() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  /// In [0, 1).
  double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }
  /// In [0, bound); bound >= 1.
  int64_t below(int64_t bound) {
    return static_cast<int64_t>(next() % static_cast<uint64_t>(bound));
  }
  /// Mean 0, variance 1, within +-6: the sum of twelve uniforms needs no libm.
  double normal() {
    double sum = -6;
    for (int i = 0; i < 12; ++i) sum += uniform();
    return sum;
  }

 private:
  uint64_t state_;
};

}  // namespace mtraining::testing
