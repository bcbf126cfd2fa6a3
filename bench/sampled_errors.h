// SampledErrors: how far a few rows of an attention's results are from float64.
//
// In:   what was asked (q, k, v, dout, an index) and what was computed. Out: keys of a row. Next: device_launch.h.
//
// Rows are worked out one by one from the index's definition and share no code with kernels or lists. Those of dk and dv need every
// query's lse and out: they take the computed ones, of which the other keys say how good they are.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "bench/rows.h"
#include "mtraining/index/index.h"

namespace mtraining::bench {

/// On one device.
struct AskedAttention {
  at::Tensor q, dout;              ///< [n, H, D] of the queries
  at::Tensor k, v;                 ///< [S, Hk, D] of the whole sequence
  std::vector<int64_t> positions;  ///< [n]; at or above S: padding
  const index::Index* index = nullptr;
  double softmax_scale = 0;
};
struct ComputedAttention {
  at::Tensor out, dq;  ///< [n, H, D]; dq may be undefined
  at::Tensor lse;      ///< [H, n]
  at::Tensor dk, dv;   ///< [S, Hk, D] over all queries of the sequence, or undefined
};

/// "out_error": largest |got - expected| / |expected| of a row; "dq_error", "dk_error", "dv_error": the same norms over all sampled rows
/// together (a row's own dq may be nearly nothing); "lse_error": absolute. NaN, null in JSON, where a result is. `rows` queries of random heads, a quarter as many keys.
Json sampled_errors(const AskedAttention& asked, const ComputedAttention& computed, int rows,
                    uint64_t seed);

}  // namespace mtraining::bench
