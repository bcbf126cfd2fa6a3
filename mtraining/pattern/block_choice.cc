#include "mtraining/pattern/block_choice.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>

#include "mtraining/base/check.h"
#include "mtraining/base/error_kinds.h"
#include "mtraining/pattern/rows.h"
#include "mtraining/pattern/top_p.h"

namespace mtraining::pattern {
namespace {

double from_half(uint16_t bits) {
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  const double sign = bits >> 15 != 0 ? -1 : 1;
  if (exponent == 31) return mantissa != 0 ? std::nan("") : sign * INFINITY;
  return sign *
         (exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25));
}

}  // namespace

void read_row(kernels::DType dtype, const void* row, int64_t count, double* out) {
  switch (dtype) {
    case kernels::DType::kFloat64:
      std::memcpy(out, row, count * sizeof(double));
      return;
    case kernels::DType::kFloat32:
      for (int64_t d = 0; d < count; ++d) out[d] = static_cast<const float*>(row)[d];
      return;
    case kernels::DType::kBFloat16:
      for (int64_t d = 0; d < count; ++d)
        out[d] = std::bit_cast<float>(uint32_t{static_cast<const uint16_t*>(row)[d]} << 16);
      return;
    case kernels::DType::kFloat16:
      for (int64_t d = 0; d < count; ++d) out[d] = from_half(static_cast<const uint16_t*>(row)[d]);
      return;
  }
  MT_ASSERT(false, "dtype ", static_cast<int>(dtype));
}

std::vector<uint8_t> gather_whole(const char* name, const LocalAttention& local,
                                  const kernels::ConstView& view, int64_t heads,
                                  comm::Communicator& group) {
  const layout::Layout& layout = *local.layout;
  const int64_t n = layout.seq_len(), row_bytes = local.head_dim * kernels::size_of(local.dtype);
  // Bits are summed as integers: zeros of all ranks but the owner leave every bit as it is.
  std::vector<uint8_t> whole((local.batch * heads * n * row_bytes + 3) / 4 * 4, 0);
  const std::vector<int64_t> positions = layout.positions(local.cp_rank);
  for (int64_t b = 0; b < local.batch; ++b)
    for (int64_t h = 0; h < heads; ++h)
      for (size_t t = 0; t < positions.size(); ++t)
        if (positions[t] < n)
          std::memcpy(&whole[((b * heads + h) * n + positions[t]) * row_bytes],
                      row_of(view, local.dtype, b, static_cast<int64_t>(t), h), row_bytes);
  group.all_reduce(buffer_of(whole), comm::ElementType::kInt32, comm::ReduceOp::kSum)->wait();
  std::vector<double> row(local.head_dim);
  for (int64_t r = 0; r < local.batch * heads * n; ++r) {
    read_row(local.dtype, &whole[r * row_bytes], local.head_dim, row.data());
    for (const double value : row)
      MT_CHECK_FINITE(std::isfinite(value), name,
                      ": expected finite values, got NaN or inf at sample ", r / n / heads,
                      ", head ", r / n % heads, ", position ", r % n);
  }
  return whole;
}

std::vector<int64_t> best_blocks(const std::vector<int64_t>& masses, int64_t sink,
                                 double threshold) {
  const int64_t own = std::ssize(masses) - 1;
  const int64_t wanted =
      top_p_threshold(std::accumulate(masses.begin(), masses.end(), int64_t{0}), threshold);
  std::vector<int64_t> chosen = {sink}, rest;
  if (own != sink) chosen.push_back(own);
  int64_t held = 0;
  for (const int64_t block : chosen) held += masses[block];
  for (int64_t block = sink + 1; block < own; ++block) rest.push_back(block);
  std::stable_sort(rest.begin(), rest.end(),
                   [&](int64_t a, int64_t b) { return masses[a] > masses[b]; });
  for (size_t i = 0; i < rest.size() && held < wanted; ++i) {
    chosen.push_back(rest[i]);
    held += masses[rest[i]];
  }
  std::sort(chosen.begin(), chosen.end());
  return chosen;
}

index::BlockRows gather_lists(const std::vector<std::vector<int32_t>>& lists,
                              comm::Communicator& group) {
  index::BlockRows rows;
  rows.row_begin.assign(lists.size() + 1, 0);
  for (size_t i = 0; i < lists.size(); ++i)
    rows.row_begin[i + 1] = static_cast<int64_t>(lists[i].size());
  group.all_reduce(buffer_of(rows.row_begin), comm::ElementType::kInt64, comm::ReduceOp::kSum)
      ->wait();
  for (size_t i = 0; i < lists.size(); ++i) rows.row_begin[i + 1] += rows.row_begin[i];
  rows.key_blocks.assign(rows.row_begin.back(), 0);
  for (size_t i = 0; i < lists.size(); ++i)
    std::copy(lists[i].begin(), lists[i].end(), rows.key_blocks.begin() + rows.row_begin[i]);
  group.all_reduce(buffer_of(rows.key_blocks), comm::ElementType::kInt32, comm::ReduceOp::kSum)
      ->wait();
  return rows;
}

}  // namespace mtraining::pattern
