#include "mtraining/pattern/observation.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "mtraining/base/check.h"
#include "mtraining/base/rng.h"

namespace mtraining::pattern {
namespace {

// Products of values below this, and sums of them over head_dim, stay finite in float32.
constexpr double kLargest = 0x1p50;

template <typename Word>
bool any_beyond(const void* row, int64_t count, Word sign_free, Word limit) {
  const Word* words = static_cast<const Word*>(row);
  bool beyond = false;  // no early exit: the loop is a plain reduction
  for (int64_t d = 0; d < count; ++d) beyond |= (words[d] & sign_free) >= limit;
  return beyond;
}

// True where the row holds NaN, inf or a magnitude of 2^50 or more: one comparison of bits, since exponents order magnitudes.
bool beyond_limit(kernels::DType dtype, const void* row, int64_t count) {
  switch (dtype) {
    case kernels::DType::kFloat64:
      return any_beyond<uint64_t>(row, count, ~(uint64_t{1} << 63), uint64_t{1023 + 50} << 52);
    case kernels::DType::kFloat32:
      return any_beyond<uint32_t>(row, count, 0x7fffffffu, uint32_t{127 + 50} << 23);
    case kernels::DType::kBFloat16:
      return any_beyond<uint16_t>(row, count, 0x7fff, (127 + 50) << 7);
    case kernels::DType::kFloat16:
      return any_beyond<uint16_t>(row, count, 0x7fff, 0x7c00);  // its largest is 65504
  }
  MT_ASSERT(false, "dtype ", static_cast<int>(dtype));
}

const uint8_t* at(const kernels::ConstView& view, kernels::DType dtype, int64_t batch,
                  int64_t token, int64_t head) {
  return static_cast<const uint8_t*>(view.data) +
         (batch * view.stride_batch + token * view.stride_token + head * view.stride_head) *
             kernels::size_of(dtype);
}

comm::Buffer buffer_of(auto& values) {
  return {values.data(), static_cast<int64_t>(values.size() * sizeof(values[0]))};
}

}  // namespace

std::vector<int32_t> window_positions(const VerticalSlashOptions& options, int64_t seq_len) {
  const int64_t rows = std::min<int64_t>(options.last_q, seq_len);
  std::vector<int32_t> positions(rows);
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t last = seq_len - rows + r;
    const int64_t strided = (r + 1) * seq_len / rows - 1;
    positions[r] = static_cast<int32_t>(options.window == Window::kLast ? last : strided);
  }
  return positions;
}

std::vector<int32_t> sampled_positions(const std::vector<int32_t>& window, int64_t seq_len,
                                       int64_t count, uint64_t seed) {
  const Rng rng(seed);
  const int64_t rest = seq_len - static_cast<int64_t>(window.size());
  count = std::min(count, rest);
  std::vector<int32_t> positions;
  size_t skipped = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t begin = i * rest / count, end = (i + 1) * rest / count;
    const int64_t place =
        begin + static_cast<int64_t>(
                    rng.below(static_cast<uint64_t>(i), static_cast<uint64_t>(end - begin)));
    // The place-th position that is not in the window.
    while (skipped < window.size() && window[skipped] <= place + static_cast<int64_t>(skipped))
      ++skipped;
    positions.push_back(static_cast<int32_t>(place + static_cast<int64_t>(skipped)));
  }
  return positions;
}

Observation::Observation(const LocalAttention& local, std::vector<int32_t> row_positions,
                         comm::Communicator& group)
    : local_(local), group_(group), positions_(std::move(row_positions)) {
  const layout::Layout& layout = *local.layout;
  const int64_t rows = num_rows();
  if (local.document_starts != nullptr) {
    for (int64_t b = 0; b < local.batch; ++b)
      for (int32_t position : positions_)
        document_start_.push_back(local.document_starts[b * layout.seq_len() + position]);
  }
  key_block_starts_ = layout.block_starts(local.cp_rank);
  gather_rows();

  params_.batch = local.batch;
  params_.num_q_heads = local.num_q_heads;
  params_.num_kv_heads = local.num_kv_heads;
  params_.head_dim = local.head_dim;
  params_.dtype = local.dtype;
  params_.softmax_scale = local.softmax_scale;
  params_.num_rows = rows;
  params_.q = {rows_.data(), local.num_q_heads * rows * local.head_dim, local.head_dim,
               rows * local.head_dim};
  params_.row_positions = positions_.data();
  params_.row_document_start = document_start_.empty() ? nullptr : document_start_.data();
  params_.k = local.k;
  params_.num_keys = layout.tokens_per_rank();
  params_.k_block_starts = key_block_starts_.data();
  params_.position_stride = layout.position_stride();
  params_.seq_len = layout.seq_len();

  check_values();
  row_max_.resize(local.batch * local.num_q_heads * rows);
  kernels::ref::window_row_max(params_, row_max_.data());
  group_.all_reduce(buffer_of(row_max_), comm::ElementType::kFloat32, comm::ReduceOp::kMax)->wait();
  // Every row sees at least its own key, and all factors are bounded.
  for (float top : row_max_)
    MT_CHECK_ARG(std::isfinite(top), "attention scores: expected finite values, got ", top);
  row_sum_ = zeros(rows);
  kernels::ref::window_row_sum(params_, row_max_.data(), row_sum_.data());
  sum_over_ranks(row_sum_);
}

void Observation::gather_rows() {
  const layout::Layout& layout = *local_.layout;
  const int64_t rows = num_rows(), row_bytes = local_.head_dim * kernels::size_of(local_.dtype);
  // Bits are summed as integers: zeros of all ranks but the owner leave every bit as it is, -0.0 and NaN included.
  rows_.assign((local_.batch * local_.num_q_heads * rows * row_bytes + 3) / 4 * 4, 0);
  for (int64_t r = 0; r < rows; ++r) {
    const layout::Owner owner = layout.owner(positions_[r]);
    if (owner.cp_rank != local_.cp_rank) continue;
    for (int64_t b = 0; b < local_.batch; ++b)
      for (int64_t h = 0; h < local_.num_q_heads; ++h)
        std::memcpy(&rows_[((b * local_.num_q_heads + h) * rows + r) * row_bytes],
                    at(local_.q, local_.dtype, b, owner.offset, h), row_bytes);
  }
  group_.all_reduce(buffer_of(rows_), comm::ElementType::kInt32, comm::ReduceOp::kSum)->wait();
}

void Observation::check_values() {
  const layout::Layout& layout = *local_.layout;
  const int64_t rows = num_rows(), row_bytes = local_.head_dim * kernels::size_of(local_.dtype);
  // The gathered rows are the same everywhere, so all ranks find the same fault and none waits for another.
  for (int64_t b = 0; b < local_.batch; ++b)
    for (int64_t h = 0; h < local_.num_q_heads; ++h)
      for (int64_t r = 0; r < rows; ++r)
        MT_CHECK_ARG(
            !beyond_limit(local_.dtype,
                          &rows_[((b * local_.num_q_heads + h) * rows + r) * row_bytes],
                          local_.head_dim),
            "q: expected finite values below 2^50, got NaN, inf or a larger one at sample ", b,
            ", head ", h, ", position ", positions_[r]);
  // Keys differ from rank to rank: the first fault of all ranks is agreed on before anyone throws.
  int64_t fault = 0;  // 2^63-1 - (N * sample + position): the maximum over ranks is the first one
  for (int64_t b = 0; b < local_.batch && fault == 0; ++b) {
    for (int64_t t = 0; t < layout.tokens_per_rank() && fault == 0; ++t) {
      const int64_t position =
          key_block_starts_[t / layout::kBlock] + t % layout::kBlock * layout.position_stride();
      if (position >= layout.seq_len()) break;  // padding may hold anything
      for (int64_t g = 0; g < local_.num_kv_heads; ++g)
        if (beyond_limit(local_.dtype, at(local_.k, local_.dtype, b, t, g), local_.head_dim))
          fault = std::numeric_limits<int64_t>::max() - (b * layout.seq_len() + position);
    }
  }
  group_.all_reduce({&fault, sizeof fault}, comm::ElementType::kInt64, comm::ReduceOp::kMax)
      ->wait();
  const int64_t place = std::numeric_limits<int64_t>::max() - fault;
  MT_CHECK_ARG(fault == 0,
               "k: expected finite values below 2^50, got NaN, inf or a larger one at sample ",
               place / layout.seq_len(), ", position ", place % layout.seq_len());
}

std::vector<int64_t> Observation::zeros(int64_t per_head) const {
  return std::vector<int64_t>(local_.batch * local_.num_q_heads * per_head, 0);
}

void Observation::sum_over_ranks(std::vector<int64_t>& values) const {
  group_.all_reduce(buffer_of(values), comm::ElementType::kInt64, comm::ReduceOp::kSum)->wait();
}

Observation::Masses Observation::masses(bool with_offsets) const {
  const int64_t num_blocks = (params_.seq_len + layout::kBlock - 1) / layout::kBlock;
  Masses made{zeros(params_.num_keys), zeros(num_blocks + 1),
              zeros(with_offsets ? params_.seq_len : 0)};
  kernels::ref::window_masses(
      params_, row_max_.data(), row_sum_.data(),
      {made.columns.data(), made.diagonals.data(), with_offsets ? made.offsets.data() : nullptr});
  sum_over_ranks(made.diagonals);
  if (with_offsets) sum_over_ranks(made.offsets);
  return made;
}

std::vector<int64_t> Observation::covered(const index::Index& index) const {
  const index::DiagonalBitmap bitmap = index::diagonal_bitmap(index);
  kernels::ColumnLists columns;
  columns.positions = index.columns.values.data();
  columns.counts = index.columns.counts.data();
  columns.capacity = index.columns.capacity;
  std::vector<int64_t> masses = zeros(num_rows());
  kernels::ref::window_covered(params_, row_max_.data(), row_sum_.data(), bitmap.bits.data(),
                               bitmap.words, columns, masses.data());
  sum_over_ranks(masses);
  return masses;
}

}  // namespace mtraining::pattern
