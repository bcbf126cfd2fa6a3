// Rounding: doubles to bf16, fp16 and float32 and back, round to nearest even. For tests; the kernels have their own.
//
// In:   doubles or floats. Out: their nearest value in a low precision, as a number or as its 16 bits.
// Next: plain.h, tests that feed kernels with bf16 or fp16 memory.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "mtraining/testing/comparator.h"

namespace mtraining::testing {

uint16_t to_bf16(float value);
float from_bf16(uint16_t bits);
uint16_t to_fp16(float value);
float from_fp16(uint16_t bits);

/// The value of `precision` nearest to `value` (bf16 and fp16 by way of float32).
double round_to(Precision precision, double value);
std::vector<double> round_to(Precision precision, std::span<const double> values);
std::vector<double> round_to(Precision precision, std::span<const float> values);

/// Memory that kernels read: the elements of `precision` as raw bytes.
std::vector<uint8_t> pack(Precision precision, std::span<const double> values);
std::vector<double> unpack(Precision precision, std::span<const uint8_t> bytes);
int64_t bytes_of(Precision precision);

}  // namespace mtraining::testing
