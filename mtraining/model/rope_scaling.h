// RopeScaling: inverse frequencies of rotary positions, stretched to longer contexts, and the factor on cos and sin.
//
// In:   the type and fields of a config.json (default, linear, YaRN, llama3), head_dim. Out: float32 [head_dim / 2], a factor.
// Next: rope.h turns positions by them; hf_config.h reads and writes the fields.
//
// Let d run over 0 .. head_dim/2 - 1 and f[d] = theta^(-2d / head_dim).
//   linear: f[d] / factor.
//   YaRN:   f[d] where a dimension turns more than beta_fast times over the original length, f[d] / factor where fewer than
//           beta_slow times, a ramp between; cos and sin grow by 0.1 ln(factor) + 1.
//   llama3: f[d] for wavelengths below original / high_freq_factor, f[d] / factor above original / low_freq_factor, between
//           them a blend linear in original / wavelength.
// Each step is rounded to float32 where models are trained and served with float32: at position 524287 one unit in the last
// place is .03 of a radian, so that "more exact" frequencies would be other ones than the weights know. Powers are taken in
// float64. Torch-free and thread-safe.
// Source: RoFormer (arXiv 2104.09864); position interpolation (2306.15595); YaRN (2309.00071), eq. 17, 19, 22 and appendix;
// llama3: the public Llama 3.1 definition.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

namespace mtraining::model {

enum class RopeType { kDefault, kLinear, kYarn, kLlama3 };
std::string_view to_string(RopeType type);

/// Fields as config.json names them. A type reads the fields that it lists and no others.
struct RopeParameters {
  RopeType type = RopeType::kDefault;
  double rope_theta = 10000.0;
  double factor = 1.0;                           ///< linear, YaRN, llama3; >= 1
  int64_t original_max_position_embeddings = 0;  ///< YaRN, llama3
  double beta_fast = 32.0;                       ///< YaRN: turns over the original length
  double beta_slow = 1.0;
  std::optional<double>
      attention_factor;  ///< YaRN: on cos and sin; absent: from factor and the two mscales
  std::optional<double> mscale, mscale_all_dim;  ///< YaRN: used where both are given and not 0
  bool truncate = true;          ///< YaRN: ramp bounds rounded outwards to whole dimensions
  double low_freq_factor = 1.0;  ///< llama3
  double high_freq_factor = 4.0;
  bool operator==(const RopeParameters&) const = default;
};
/// Errors: InvalidArgument naming the field: theta <= 1, factor < 1, original length < 1, beta_fast < beta_slow,
/// high_freq_factor <= low_freq_factor, anything not finite or not positive.
void check(const RopeParameters& rope);

struct RopeFrequencies {
  std::vector<float> inverse;     ///< [head_dim / 2] radians a position
  double attention_factor = 1.0;  ///< multiplies cos and sin
};
/// Errors: those of check(); InvalidArgument where head_dim is odd or below 2.
RopeFrequencies rope_frequencies(const RopeParameters& rope, int64_t head_dim);
/// The same from powers[d] = theta^(2d / head_dim) as another library rounds them. Errors: also another number of powers.
RopeFrequencies rope_frequencies(const RopeParameters& rope, int64_t head_dim,
                                 std::span<const float> powers);

/// The dimensions between which YaRN's ramp runs: f[d] up to low, f[d] / factor from high.
struct YarnRamp {
  double low = 0, high = 0;
};
YarnRamp yarn_ramp(const RopeParameters& rope, int64_t head_dim);

}  // namespace mtraining::model
