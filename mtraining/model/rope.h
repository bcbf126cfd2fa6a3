// RoPE: rotates q and k by their position.
//
// In:   positions [n] int64, x [B, n, H, D]. Out: x rotated, x's dtype. Next: attention.
//
// Phases are float32 whatever the model's dtype: position x inverse frequency, never bfloat16, in which 256 and 257 are one.
// Element i turns with element i + D/2. Source: rotary position embedding in its half-split form.
#pragma once

#include <ATen/core/Tensor.h>

namespace mtraining::model {

struct RopeTable {
  at::Tensor cos, sin;  ///< [n, 1, D/2] float32
};

/// Errors: InvalidArgument where head_dim is odd or positions are no int64 vector.
RopeTable rope_table(const at::Tensor& positions, int64_t head_dim, double theta);
/// Differentiable in x.
at::Tensor apply_rope(const at::Tensor& x, const RopeTable& table);

}  // namespace mtraining::model
