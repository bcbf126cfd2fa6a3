#include "mtraining/model/rope.h"

#include <ATen/ATen.h>

#include "mtraining/base/check.h"

namespace mtraining::model {

RopeFrequencies decoder_frequencies(const RopeParameters& rope, int64_t head_dim) {
  MT_CHECK_ARG(head_dim >= 2 && head_dim % 2 == 0, "head_dim: expected an even number, got ",
               head_dim);
  check(rope);
  const at::Tensor exponents =
      at::arange(0, head_dim, 2, at::kFloat) / static_cast<double>(head_dim);
  const at::Tensor powers = at::pow(rope.rope_theta, exponents).contiguous();
  return rope_frequencies(rope, head_dim,
                          {powers.const_data_ptr<float>(), static_cast<size_t>(powers.numel())});
}

RopeTable rope_table(const at::Tensor& positions, const RopeFrequencies& frequencies) {
  return rope_table(positions, at::tensor(frequencies.inverse, at::kFloat).to(positions.device()),
                    frequencies.attention_factor);
}

RopeTable rope_table(const at::Tensor& positions, const at::Tensor& inverse_frequencies,
                     double attention_factor) {
  MT_CHECK_ARG(
      (positions.dim() == 1 || positions.dim() == 2) && positions.scalar_type() == at::kLong,
      "positions: expected [n] or [B, n] int64, got ", positions.sizes(), " ",
      positions.scalar_type());
  const at::Tensor phases =
      (positions.to(at::kFloat).unsqueeze(-1) * inverse_frequencies).unsqueeze(-2);
  return {at::cos(phases).mul_(attention_factor), at::sin(phases).mul_(attention_factor)};
}

at::Tensor apply_rope(const at::Tensor& x, const RopeTable& table) {
  const int64_t half = x.size(-1) / 2;
  const at::Tensor wide = x.scalar_type() == at::kDouble ? x : x.to(at::kFloat);
  const at::Tensor first = wide.narrow(-1, 0, half), second = wide.narrow(-1, half, half);
  return at::cat({first * table.cos - second * table.sin, second * table.cos + first * table.sin},
                 -1)
      .to(x.scalar_type());
}

}  // namespace mtraining::model
