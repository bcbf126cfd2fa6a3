#include "mtraining/model/rope_scaling.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "mtraining/base/check.h"

namespace mtraining::model {
namespace {

void check_positive(std::string_view field, double value, double at_least = 0) {
  const bool ok = std::isfinite(value) && value > 0 && value >= at_least;
  if (at_least > 0) {
    MT_CHECK_ARG(ok, "rope ", field, ": expected a number >= ", at_least, ", got ", value);
  } else {
    MT_CHECK_ARG(ok, "rope ", field, ": expected a number > 0, got ", value);
  }
}

double yarn_mscale(double factor, double mscale) {
  return factor <= 1 ? 1.0 : 0.1 * mscale * std::log(factor) + 1.0;
}

double yarn_attention_factor(const RopeParameters& rope) {
  if (rope.attention_factor) return *rope.attention_factor;
  if (rope.mscale.value_or(0) != 0 && rope.mscale_all_dim.value_or(0) != 0)
    return yarn_mscale(rope.factor, *rope.mscale) / yarn_mscale(rope.factor, *rope.mscale_all_dim);
  return yarn_mscale(rope.factor, 1);
}

void stretch_yarn(const RopeParameters& rope, int64_t head_dim, std::span<const float> powers,
                  std::vector<float>& inverse) {
  YarnRamp ramp = yarn_ramp(rope, head_dim);
  if (ramp.low == ramp.high) ramp.high += 0.001;  // a step, not a division by 0
  const auto low = static_cast<float>(ramp.low);
  const auto width = static_cast<float>(ramp.high - ramp.low);
  const auto factor = static_cast<float>(rope.factor);
  for (size_t d = 0; d < inverse.size(); ++d) {
    const float keep = 1 - std::clamp((static_cast<float>(d) - low) / width, 0.0f, 1.0f);
    const float stretched = 1 / (factor * powers[d]);
    inverse[d] = stretched * (1 - keep) + inverse[d] * keep;
  }
}

void stretch_llama3(const RopeParameters& rope, std::vector<float>& inverse) {
  const auto original = static_cast<double>(rope.original_max_position_embeddings);
  const auto longest_kept = static_cast<float>(original / rope.high_freq_factor);
  const auto shortest_stretched = static_cast<float>(original / rope.low_freq_factor);
  const auto factor = static_cast<float>(rope.factor);
  const auto low = static_cast<float>(rope.low_freq_factor);
  const auto width = static_cast<float>(rope.high_freq_factor - rope.low_freq_factor);
  for (float& value : inverse) {
    // Reciprocals that are multiplied, as torch divides a number by a tensor: the same roundings.
    const float wavelength = 1 / value * static_cast<float>(2 * std::numbers::pi);
    if (wavelength < longest_kept) continue;
    if (wavelength > shortest_stretched) {
      value /= factor;
    } else {
      const float smooth = (1 / wavelength * static_cast<float>(original) - low) / width;
      value = (1 - smooth) * value / factor + smooth * value;
    }
  }
}

}  // namespace

std::string_view to_string(RopeType type) {
  switch (type) {
    case RopeType::kDefault:
      return "default";
    case RopeType::kLinear:
      return "linear";
    case RopeType::kYarn:
      return "yarn";
    case RopeType::kLlama3:
      return "llama3";
  }
  return "?";
}

void check(const RopeParameters& rope) {
  check_positive("rope_theta", rope.rope_theta);
  MT_CHECK_ARG(rope.rope_theta > 1, "rope rope_theta: expected a number > 1, got ",
               rope.rope_theta);
  if (rope.type == RopeType::kDefault) return;
  check_positive("factor", rope.factor, 1);
  if (rope.type == RopeType::kLinear) return;
  MT_CHECK_ARG(rope.original_max_position_embeddings >= 1,
               "rope original_max_position_embeddings: expected a length >= 1, got ",
               rope.original_max_position_embeddings);
  if (rope.type == RopeType::kYarn) {
    check_positive("beta_slow", rope.beta_slow);
    check_positive("beta_fast", rope.beta_fast, rope.beta_slow);
    if (rope.attention_factor) check_positive("attention_factor", *rope.attention_factor);
    for (const auto& [field, value] :
         {std::pair{"mscale", rope.mscale}, {"mscale_all_dim", rope.mscale_all_dim}})
      MT_CHECK_ARG(!value || (std::isfinite(*value) && *value >= 0), "rope ", field,
                   ": expected a number >= 0, got ", value.value_or(0));
  } else {
    check_positive("low_freq_factor", rope.low_freq_factor);
    check_positive("high_freq_factor", rope.high_freq_factor);
    MT_CHECK_ARG(rope.high_freq_factor > rope.low_freq_factor,
                 "rope high_freq_factor: expected more than low_freq_factor ", rope.low_freq_factor,
                 ", got ", rope.high_freq_factor);
  }
}

YarnRamp yarn_ramp(const RopeParameters& rope, int64_t head_dim) {
  // The dimension that turns `turns` times over the original length.
  const auto dimension = [&](double turns) {
    return static_cast<double>(head_dim) *
           std::log(static_cast<double>(rope.original_max_position_embeddings) /
                    (turns * 2 * std::numbers::pi)) /
           (2 * std::log(rope.rope_theta));
  };
  YarnRamp ramp{dimension(rope.beta_fast), dimension(rope.beta_slow)};
  if (rope.truncate) ramp = {std::floor(ramp.low), std::ceil(ramp.high)};
  return {std::max(ramp.low, 0.0), std::min(ramp.high, static_cast<double>(head_dim - 1))};
}

RopeFrequencies rope_frequencies(const RopeParameters& rope, int64_t head_dim) {
  MT_CHECK_ARG(head_dim >= 2 && head_dim % 2 == 0, "head_dim: expected an even number, got ",
               head_dim);
  check(rope);
  std::vector<float> powers(static_cast<size_t>(head_dim / 2));
  for (size_t d = 0; d < powers.size(); ++d) {
    const float exponent = static_cast<float>(2 * d) / static_cast<float>(head_dim);
    powers[d] = static_cast<float>(std::pow(rope.rope_theta, static_cast<double>(exponent)));
  }
  return rope_frequencies(rope, head_dim, powers);
}

RopeFrequencies rope_frequencies(const RopeParameters& rope, int64_t head_dim,
                                 std::span<const float> powers) {
  check(rope);
  MT_CHECK_ARG(head_dim % 2 == 0 && static_cast<int64_t>(powers.size()) == head_dim / 2,
               "powers: expected head_dim / 2 of head_dim ", head_dim, ", got ", powers.size());
  RopeFrequencies result;
  for (const float power : powers) result.inverse.push_back(1 / power);
  switch (rope.type) {
    case RopeType::kDefault:
      break;
    case RopeType::kLinear:
      for (float& value : result.inverse) value /= static_cast<float>(rope.factor);
      break;
    case RopeType::kYarn:
      stretch_yarn(rope, head_dim, powers, result.inverse);
      result.attention_factor = yarn_attention_factor(rope);
      break;
    case RopeType::kLlama3:
      stretch_llama3(rope, result.inverse);
      break;
  }
  return result;
}

}  // namespace mtraining::model
