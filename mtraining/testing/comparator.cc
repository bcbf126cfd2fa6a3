#include "mtraining/testing/comparator.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "mtraining/base/check.h"

namespace mtraining::testing {
namespace {

struct Limits {
  double
      floor;  // what one rounding of the result and a different order of summation cost, relative to the row
  double
      cancelled;  // rows smaller than this share of the typical row are measured as if they were that large
  double cap;        // a plain computation worse than this says nothing about what is right
  double lse_floor;  // relative to max(1, |lse|); lse is float32 for every low precision
};

// The floor counts against the row and, by this share, against the typical row.
constexpr double kTypicalShare = 0.3;

Limits limits_of(Precision precision) {
  switch (precision) {
    case Precision::kFloat64:
      return {1e-12, 1e-6, 1e-5, 1e-12};
    case Precision::kFloat32:
      return {1e-5, 1e-3, 5e-3, 4e-6};
    case Precision::kFloat16:
      return {0x1p-10, 1e-2, 0.12, 2e-5};
    case Precision::kBFloat16:
      return {0x1p-7, 3e-2, 0.25, 2e-5};
  }
  MT_ASSERT(false, "precision ", static_cast<int>(precision));
}

bool same_special(double got, double truth) {
  if (std::isnan(truth)) return std::isnan(got);
  return got == truth;
}

double row_norm(std::span<const double> row) {
  double sum = 0;
  for (double value : row)
    if (std::isfinite(value)) sum += value * value;
  return std::sqrt(sum);
}

// Distance over the places where the truth is finite; NaN where `got` is not finite there.
double row_distance(std::span<const double> got, std::span<const double> truth) {
  double sum = 0;
  for (size_t d = 0; d < truth.size(); ++d) {
    if (!std::isfinite(truth[d])) continue;
    sum += (got[d] - truth[d]) * (got[d] - truth[d]);
  }
  return std::sqrt(sum);
}

}  // namespace

Verdict compare(const std::string& name, std::span<const double> got, std::span<const double> truth,
                std::span<const double> plain, int64_t row_size, Precision precision) {
  MT_CHECK_ARG(row_size >= 1 && truth.size() % static_cast<size_t>(row_size) == 0, name,
               ": expected rows of ", row_size, " values, got ", truth.size(), " values in all");
  MT_CHECK_ARG(got.size() == truth.size(), name, ": expected ", truth.size(), " values, got ",
               got.size());
  MT_CHECK_ARG(plain.empty() || plain.size() == truth.size(), name, ": plain: expected ",
               truth.size(), " values or none, got ", plain.size());
  const Limits limits = limits_of(precision);
  const size_t width = static_cast<size_t>(row_size), rows = truth.size() / width;
  Verdict verdict;

  for (size_t i = 0; i < truth.size(); ++i) {
    const bool special = !std::isfinite(truth[i]) || !std::isfinite(got[i]);
    if (special && !same_special(got[i], truth[i])) {
      verdict.worst_row = static_cast<int64_t>(i / width);
      verdict.worst = INFINITY;
      verdict.text = concat(name, ": row ", verdict.worst_row, " element ", i % width,
                            ": expected ", truth[i], ", got ", got[i]);
      return verdict;
    }
  }

  // A row is judged relative to its own norm. Rows that are small beside the others (the gradient of a query that sees one key)
  // carry the rounding of terms as large as the others', so plain's relative error grows as rows get smaller: a row is allowed
  // what plain needed on rows at least half as large, and small rows do not loosen the large ones.
  std::vector<double> scale(rows);
  double squares = 0;
  for (size_t r = 0; r < rows; ++r) {
    scale[r] = row_norm(truth.subspan(r * width, width));
    squares += scale[r] * scale[r];
  }
  const double typical =
      rows == 0 || squares == 0 ? 1.0 : std::sqrt(squares / static_cast<double>(rows));
  for (double& norm : scale) norm = std::max(norm, limits.cancelled * typical);
  const auto error = [&](std::span<const double> values, size_t r) {
    return row_distance(values.subspan(r * width, width), truth.subspan(r * width, width)) /
           scale[r];
  };
  std::vector<size_t> descending(rows);
  std::iota(descending.begin(), descending.end(), size_t{0});
  std::sort(descending.begin(), descending.end(),
            [&](size_t a, size_t b) { return scale[a] > scale[b]; });
  double worst_ratio = -1, plain_worst = 0;
  size_t seen = 0;
  for (size_t r : descending) {
    for (; !plain.empty() && seen < rows && scale[descending[seen]] >= scale[r] / 2; ++seen) {
      const double e = error(plain, descending[seen]);
      if (std::isfinite(e)) plain_worst = std::max(plain_worst, e);
    }
    const double allowed = std::min(
        limits.cap, limits.floor * (1 + kTypicalShare * typical / scale[r]) + 2 * plain_worst);
    const double e = error(got, r);
    if (e / allowed > worst_ratio) {
      worst_ratio = e / allowed;
      verdict.worst = e;
      verdict.allowed = allowed;
      verdict.worst_row = static_cast<int64_t>(r);
    }
  }
  verdict.ok = worst_ratio <= 1;
  if (rows == 0) return verdict.ok = true, verdict;

  size_t at = static_cast<size_t>(verdict.worst_row) * width;
  for (size_t i = at; i < static_cast<size_t>(verdict.worst_row + 1) * width; ++i)
    if (std::isfinite(truth[i]) && std::fabs(got[i] - truth[i]) > std::fabs(got[at] - truth[at]))
      at = i;
  verdict.text = concat(name, ": row ", verdict.worst_row, " of ", rows, " element ", at % width,
                        ": expected ", truth[at], ", got ", got[at], "; row error ", verdict.worst,
                        " of allowed ", verdict.allowed);
  return verdict;
}

Verdict compare_lse(const std::string& name, std::span<const double> got,
                    std::span<const double> truth, std::span<const double> plain,
                    Precision precision) {
  MT_CHECK_ARG(got.size() == truth.size(), name, ": expected ", truth.size(), " values, got ",
               got.size());
  MT_CHECK_ARG(plain.empty() || plain.size() == truth.size(), name, ": plain: expected ",
               truth.size(), " values or none, got ", plain.size());
  const Limits limits = limits_of(precision);
  Verdict verdict;
  double plain_worst = 0;
  for (size_t i = 0; i < plain.size(); ++i)
    if (std::isfinite(truth[i]) && std::isfinite(plain[i]))
      plain_worst = std::max(plain_worst, std::fabs(plain[i] - truth[i]));
  plain_worst = std::min(plain_worst, limits.cap);
  double worst_ratio = -1;
  for (size_t i = 0; i < truth.size(); ++i) {
    const bool special = !std::isfinite(truth[i]) || !std::isfinite(got[i]);
    if (special && same_special(got[i], truth[i])) continue;
    const double allowed =
        special ? 0 : limits.lse_floor * std::max(1.0, std::fabs(truth[i])) + 2 * plain_worst;
    const double e = special ? INFINITY : std::fabs(got[i] - truth[i]);
    const double ratio = special ? INFINITY : e / allowed;
    if (ratio > worst_ratio) {
      worst_ratio = ratio;
      verdict.worst = e;
      verdict.allowed = allowed;
      verdict.worst_row = static_cast<int64_t>(i);
    }
  }
  verdict.ok = worst_ratio <= 1;
  if (verdict.worst_row >= 0)
    verdict.text = concat(name, ": row ", verdict.worst_row, " of ", truth.size(), ": expected ",
                          truth[verdict.worst_row], ", got ", got[verdict.worst_row], "; error ",
                          verdict.worst, " of allowed ", verdict.allowed);
  return verdict;
}

}  // namespace mtraining::testing
