// Oracle: float64 attention with a boolean mask built from positions. Shares no code with index/, layout/, ring/ or kernels/.
//
// In:   q, k, v, dout as doubles, mask as bytes. Out: out, lse, dq, dk, dv as doubles. Next: tests compare (comparator.h).
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace mtraining::testing {

struct Problem {
  int64_t batch = 1, num_queries = 0, num_keys = 0, num_q_heads = 1, num_kv_heads = 1,
          head_dim = 64;
  double softmax_scale = 0;      ///< 0: 1 / sqrt(head_dim)
  std::vector<double> q{};       ///< [B, Sq, H, D]
  std::vector<double> k{}, v{};  ///< [B, Sk, Hk, D]
  std::vector<double> dout{};    ///< [B, Sq, H, D]; may be empty: then no gradients
};
/// mask(b, h, i, j): row i may see key j.
using Mask = std::function<bool(int64_t b, int64_t h, int64_t i, int64_t j)>;

struct Solution {
  std::vector<double> out;  ///< [B, Sq, H, D]; exactly 0 on empty rows
  std::vector<double> lse;  ///< [B, H, Sq]; -inf on empty rows
  std::vector<double> dq, dk, dv;
};
/// Errors: InvalidArgument naming the array whose size does not fit.
void check(const Problem& problem);
/// Cost: 2 D flops a pair with both loops in float64; memory 17 bytes a pair of one head (tests only).
Solution solve(const Problem& problem, const Mask& mask);

/// The mask of docs/math/index.md in words: document_start[i] <= j <= i and (diagonal or column).
Mask vertical_slash_mask(const std::vector<std::vector<int32_t>>& diagonals,  // [B * H] rows
                         const std::vector<std::vector<int32_t>>& columns, int64_t num_q_heads,
                         const std::vector<int32_t>& document_starts /* [B, S] or empty */,
                         int64_t seq_len);

}  // namespace mtraining::testing
