// The merge of two partial attention results of one row.
//
// In:   (out, lse) twice. Out: the first becomes both. Next: merge(), ref's forward.
// Source: docs/math/kernels.md.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

namespace mtraining::kernels {

/// (0, -inf) is the neutral element, bit-exactly. The weights are normalised by their own sum, not
/// by e^-lse: an lse of a few hundred has lost the digits that would make e^(a-lse) + e^(b-lse)
/// one.
template <typename T>
void merge_row(int64_t head_dim, T* out_a, T* lse_a, const T* out_b, T lse_b) {
  constexpr T kEmpty = -std::numeric_limits<T>::infinity();
  if (lse_b == kEmpty) return;
  if (*lse_a == kEmpty) {
    for (int64_t d = 0; d < head_dim; ++d) out_a[d] = out_b[d];
    *lse_a = lse_b;
    return;
  }
  const T top = *lse_a > lse_b ? *lse_a : lse_b;
  const T a = std::exp(*lse_a - top), b = std::exp(lse_b - top);
  const T sum = a + b;
  const T weight_a = a / sum, weight_b = b / sum;
  for (int64_t d = 0; d < head_dim; ++d) out_a[d] = weight_a * out_a[d] + weight_b * out_b[d];
  *lse_a = top + std::log(sum);
}

}  // namespace mtraining::kernels
