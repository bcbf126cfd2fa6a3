// Comparator: is a low-precision result as good as a plain computation in that precision?
//
// In:   got, the float64 truth, and a plain computation in the same low precision. Out: a verdict with the worst place.
// Next: every numeric test.
//
// Rule: per row of `row_size` (head_dim) values, |got - truth| relative to that row's norm <= 2 x the plain computation's
// (its worst row among those at least half as large) + a floor for the precision, and never more than a cap; rows far below
// the typical row are measured against a small share of it; inf and nan places must match; no share of values may differ.
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace mtraining::testing {

enum class Precision { kFloat64, kFloat32, kBFloat16, kFloat16 };

struct Verdict {
  bool ok = false;
  double worst = 0;  ///< worst row error of `got`, relative to the row's norm
  double allowed = 0;
  int64_t worst_row = -1;
  std::string text;  ///< name, worst row and element, got, truth, allowed
  explicit operator bool() const { return ok; }
};

/// `plain` may be empty: then the floor alone is allowed.
Verdict compare(const std::string& name, std::span<const double> got, std::span<const double> truth,
                std::span<const double> plain, int64_t row_size, Precision precision);
/// lse: absolute error <= floor + 2 x plain's; -inf places must match exactly.
Verdict compare_lse(const std::string& name, std::span<const double> got,
                    std::span<const double> truth, std::span<const double> plain,
                    Precision precision);

}  // namespace mtraining::testing
