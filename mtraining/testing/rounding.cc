#include "mtraining/testing/rounding.h"

#include <bit>
#include <cmath>
#include <cstring>

#include "mtraining/base/check.h"

namespace mtraining::testing {

uint16_t to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if (std::isnan(value)) return static_cast<uint16_t>((bits >> 16) | 0x40);  // stays a NaN, quiet
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

float from_bf16(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

uint16_t to_fp16(float value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isnan(value)) return sign | 0x7e00;
  const double magnitude = std::fabs(static_cast<double>(value));
  if (magnitude >= 65520.0)
    return sign | 0x7c00;  // halfway to the first value beyond the largest rounds to infinity
  if (magnitude == 0) return sign;
  int exponent = 0;
  std::frexp(magnitude, &exponent);               // magnitude in [2^(exponent-1), 2^exponent)
  const int unit = std::max(exponent - 11, -24);  // exponent of the last bit; subnormals share -24
  const double scaled =
      std::nearbyint(std::ldexp(magnitude, -unit));  // ties to even, exact otherwise
  const int64_t mantissa =
      static_cast<int64_t>(scaled);  // 2048 carries into the exponent by itself
  const int64_t biased = unit + 24;  // 0 for subnormals and for the first normal binade
  return static_cast<uint16_t>(sign + biased * 1024 + mantissa);
}

float from_fp16(uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const int mantissa = bits & 1023;
  double value = 0;
  if (exponent == 31) {
    value = mantissa != 0 ? std::nan("") : INFINITY;
  } else if (exponent == 0) {
    value = std::ldexp(mantissa, -24);
  } else {
    value = std::ldexp(mantissa + 1024, exponent - 25);
  }
  return static_cast<float>((bits & 0x8000) != 0 ? -value : value);
}

double round_to(Precision precision, double value) {
  switch (precision) {
    case Precision::kFloat64:
      return value;
    case Precision::kFloat32:
      return static_cast<float>(value);
    case Precision::kBFloat16:
      return from_bf16(to_bf16(static_cast<float>(value)));
    case Precision::kFloat16:
      return from_fp16(to_fp16(static_cast<float>(value)));
  }
  MT_ASSERT(false, "precision ", static_cast<int>(precision));
}

std::vector<double> round_to(Precision precision, std::span<const double> values) {
  std::vector<double> out(values.size());
  for (size_t i = 0; i < values.size(); ++i) out[i] = round_to(precision, values[i]);
  return out;
}

std::vector<double> round_to(Precision precision, std::span<const float> values) {
  std::vector<double> out(values.size());
  for (size_t i = 0; i < values.size(); ++i)
    out[i] = round_to(precision, static_cast<double>(values[i]));
  return out;
}

int64_t bytes_of(Precision precision) {
  return precision == Precision::kFloat64 ? 8 : precision == Precision::kFloat32 ? 4 : 2;
}

std::vector<uint8_t> pack(Precision precision, std::span<const double> values) {
  const size_t width = static_cast<size_t>(bytes_of(precision));
  std::vector<uint8_t> bytes(values.size() * width);
  for (size_t i = 0; i < values.size(); ++i) {
    uint8_t* to = bytes.data() + i * width;
    const float single = static_cast<float>(values[i]);
    if (precision == Precision::kFloat64) {
      std::memcpy(to, &values[i], 8);
    } else if (precision == Precision::kFloat32) {
      std::memcpy(to, &single, 4);
    } else {
      const uint16_t half = precision == Precision::kBFloat16 ? to_bf16(single) : to_fp16(single);
      std::memcpy(to, &half, 2);
    }
  }
  return bytes;
}

std::vector<double> unpack(Precision precision, std::span<const uint8_t> bytes) {
  const size_t width = static_cast<size_t>(bytes_of(precision));
  MT_CHECK_ARG(bytes.size() % width == 0, "unpack: expected a multiple of ", width, " bytes, got ",
               bytes.size());
  std::vector<double> values(bytes.size() / width);
  for (size_t i = 0; i < values.size(); ++i) {
    const uint8_t* from = bytes.data() + i * width;
    if (precision == Precision::kFloat64) {
      std::memcpy(&values[i], from, 8);
    } else if (precision == Precision::kFloat32) {
      float single = 0;
      std::memcpy(&single, from, 4);
      values[i] = single;
    } else {
      uint16_t half = 0;
      std::memcpy(&half, from, 2);
      values[i] = precision == Precision::kBFloat16 ? from_bf16(half) : from_fp16(half);
    }
  }
  return values;
}

}  // namespace mtraining::testing
