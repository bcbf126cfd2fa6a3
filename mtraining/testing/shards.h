// Shards: cuts a whole sequence into a rank's rows and puts rows back, by a list of positions. Knows no layout.
//
// In:   values [B, S, row] and the positions a rank holds (positions >= S are padding). Out: [B, positions, row] or back.
// Next: tests that compare ranks with one process.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "mtraining/base/check.h"

namespace mtraining::testing {

/// Rows at `positions`; padding rows hold `padding`.
template <typename T>
std::vector<T> take_rows(const std::vector<T>& values, int64_t batch, int64_t seq_len,
                         std::span<const int64_t> positions, T padding = T{}) {
  MT_CHECK_ARG(
      batch >= 1 && seq_len >= 1 && static_cast<int64_t>(values.size()) % (batch * seq_len) == 0,
      "take_rows: ", values.size(), " values are no multiple of batch ", batch, " x seq_len ",
      seq_len);
  const int64_t width = static_cast<int64_t>(values.size()) / (batch * seq_len);
  const int64_t count = static_cast<int64_t>(positions.size());
  std::vector<T> rows(batch * count * width, padding);
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t t = 0; t < count; ++t)
      for (int64_t d = 0; d < width && positions[t] < seq_len; ++d)
        rows[(b * count + t) * width + d] = values[(b * seq_len + positions[t]) * width + d];
  return rows;
}

/// The inverse: writes rows to their positions of `values`; padding rows are dropped. Ranks write disjoint rows.
template <typename T>
void put_rows(const std::vector<T>& rows, int64_t batch, int64_t seq_len,
              std::span<const int64_t> positions, std::vector<T>& values) {
  const int64_t width = static_cast<int64_t>(values.size()) / (batch * seq_len);
  const int64_t count = static_cast<int64_t>(positions.size());
  MT_CHECK_ARG(static_cast<int64_t>(rows.size()) == batch * count * width, "put_rows: expected ",
               batch * count * width, " values, got ", rows.size());
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t t = 0; t < count; ++t)
      for (int64_t d = 0; d < width && positions[t] < seq_len; ++d)
        values[(b * seq_len + positions[t]) * width + d] = rows[(b * count + t) * width + d];
}

}  // namespace mtraining::testing
