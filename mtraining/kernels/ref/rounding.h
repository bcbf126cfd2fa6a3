// Rounding on the host: a float as a 16-bit number and back.
//
// In:   rows of the state. Out: rows of dtype, and what rounding lost. Next: forward.cc, backward.cc.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "mtraining/kernels/params.h"

namespace mtraining::kernels::ref {

/// To nearest, ties to even. NaN stays NaN.
inline uint16_t bfloat16_bits(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  if (std::isnan(x)) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
inline float from_bfloat16(uint16_t x) { return std::bit_cast<float>(uint32_t{x} << 16); }

inline uint16_t float16_bits(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  const auto sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  const float size = std::fabs(x);
  if (std::isnan(x)) return sign | 0x7E00;
  if (size >= 65520) return sign | 0x7C00;  // from there on infinity is nearer than the largest
  // Added to 2^(10 + exponent) times a half, a number keeps the bits of its exponent that fp16 has; below 2^-14 those of 2^-14.
  const int exponent = size < 0x1p-14f ? -14 : std::ilogb(size);
  const float rounder = std::ldexp(1.5f, exponent + 13);
  const float rounded = (size + rounder) - rounder;
  if (rounded < 0x1p-14f) return sign | static_cast<uint16_t>(rounded * 0x1p24f);
  const auto result = std::bit_cast<uint32_t>(rounded);
  return sign | static_cast<uint16_t>((result - (112u << 23)) >> 13);
}
inline float from_float16(uint16_t x) {
  const float sign = (x & 0x8000) != 0 ? -1.0f : 1.0f;
  const int exponent = x >> 10 & 31;
  const auto fraction = static_cast<float>(x & 1023);
  if (exponent == 31) return fraction == 0 ? sign * INFINITY : NAN;
  return exponent == 0 ? sign * fraction * 0x1p-24f
                       : sign * std::ldexp(1 + fraction * 0x1p-10f, exponent - 15);
}

/// values[0, count) of the state rounded to dtype, and what that loses rounded too (null: not wanted). T: of the state.
template <typename T>
void round_row(const T* values, int64_t count, DType dtype, void* rounded, void* residual) {
  for (int64_t i = 0; i < count; ++i) {
    if (dtype == DType::kBFloat16 || dtype == DType::kFloat16) {
      const auto x = static_cast<float>(values[i]);
      const bool brain = dtype == DType::kBFloat16;
      const auto bits = [&](float y) { return brain ? bfloat16_bits(y) : float16_bits(y); };
      const uint16_t near = bits(x);
      static_cast<uint16_t*>(rounded)[i] = near;
      if (residual != nullptr)
        static_cast<uint16_t*>(residual)[i] =
            bits(x - (brain ? from_bfloat16(near) : from_float16(near)));
    } else {  // the state's own type
      static_cast<T*>(rounded)[i] = values[i];
      if (residual != nullptr) static_cast<T*>(residual)[i] = 0;
    }
  }
}

}  // namespace mtraining::kernels::ref
