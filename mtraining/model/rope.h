// RoPE: rotates q and k by their position.
//
// In:   positions [n] or [B, n] int64, frequencies, x [B, n, H, D]. Out: x rotated, x's dtype. Next: attention.
//
// Phases are float32 whatever the model's dtype: position x inverse frequency, never bfloat16, in which 256 and 257 are one.
// Element i turns with element i + D/2. Source: rotary position embedding in its half-split form.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "mtraining/model/rope_scaling.h"

namespace mtraining::model {

/// rope_frequencies() of theta's powers as torch takes them in float32 on the CPU, for every device: the bits that models are
/// trained and served with. Where the head is wide, some lie one unit in the last place beside powers taken in float64, which
/// position 524287 makes .03 of a radian. Errors: those of rope_frequencies().
RopeFrequencies decoder_frequencies(const RopeParameters& rope, int64_t head_dim);

struct RopeTable {
  at::Tensor cos, sin;  ///< [n, 1, D/2] or [B, n, 1, D/2] float32, times the attention factor
};

/// On the positions' device. Errors: InvalidArgument where positions are neither an int64 vector nor a matrix.
RopeTable rope_table(const at::Tensor& positions, const RopeFrequencies& frequencies);
/// The same from inverse frequencies [D/2] float32 on the positions' device, without a copy from the host.
RopeTable rope_table(const at::Tensor& positions, const at::Tensor& inverse_frequencies,
                     double attention_factor);
/// Differentiable in x.
at::Tensor apply_rope(const at::Tensor& x, const RopeTable& table);

}  // namespace mtraining::model
