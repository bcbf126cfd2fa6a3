#include "mtraining/pattern/observation.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "mtraining/base/check.h"
#include "mtraining/base/error_kinds.h"
#include "mtraining/base/rng.h"
#include "mtraining/pattern/rows.h"

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

}  // namespace

namespace {

struct Document {
  int64_t first = 0, length = 0, rows = 0;
};

std::vector<Document> documents_of(const int32_t* document_starts, int64_t seq_len) {
  std::vector<Document> documents;
  for (int64_t i = 0; i < seq_len; ++i) {
    if (i == 0 || document_starts[i] != document_starts[i - 1]) documents.push_back({.first = i});
    ++documents.back().length;
  }
  return documents;
}

/// Sets how many of its last rows each document gives. False where the local diagonals cover all of them.
bool share_rows(const VerticalSlashOptions& options, std::vector<Document>& documents) {
  // Keys at most `covered` tokens back lie on the local diagonals, which every row has anyway.
  const int64_t covered = int64_t{layout::kBlock} * (options.local_blocks - 1);
  int64_t longest = 0, total = 0, observed_tokens = 0;
  for (const Document& d : documents) longest = std::max(longest, d.length);
  if (longest - 1 <= covered) return false;
  std::vector<Document*> observed;
  for (Document& d : documents) {
    if (d.length - 1 <= covered) continue;
    d.rows = std::min(d.length, (options.last_q * d.length + longest - 1) / longest);
    total += d.rows;
    observed_tokens += d.length;
    observed.push_back(&d);
  }
  int64_t left = max_window_rows(options);
  if (total <= left) return true;
  // Too many: shares of what there is, the longest first.
  std::stable_sort(observed.begin(), observed.end(),
                   [](const Document* a, const Document* b) { return a->length > b->length; });
  const int64_t all = left;
  for (Document* d : observed) {
    d->rows = std::min({left, d->rows, std::max<int64_t>(1, all * d->length / observed_tokens)});
    left -= d->rows;
  }
  return true;
}

}  // namespace

int64_t max_window_rows(const VerticalSlashOptions& options) {
  return std::min<int64_t>(kMaxObservationRows, int64_t{16} * options.last_q);
}

std::vector<int32_t> window_positions(const VerticalSlashOptions& options, int64_t seq_len,
                                      const int32_t* document_starts) {
  if (document_starts != nullptr && options.window == Window::kLast) {
    std::vector<Document> documents = documents_of(document_starts, seq_len);
    if (documents.size() > 1 && share_rows(options, documents)) {
      std::vector<int32_t> positions;
      for (const Document& d : documents)
        for (int64_t i = d.first + d.length - d.rows; i < d.first + d.length; ++i)
          positions.push_back(static_cast<int32_t>(i));
      return positions;
    }
  }
  const int64_t rows = std::min<int64_t>(options.last_q, seq_len);
  std::vector<int32_t> positions(rows);
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t last = seq_len - rows + r;
    const int64_t strided = (r + 1) * seq_len / rows - 1;
    positions[r] = static_cast<int32_t>(options.window == Window::kLast ? last : strided);
  }
  return positions;
}

void check_local(const char* pattern, const LocalAttention& local, comm::Communicator& group) {
  MT_CHECK_ARG(local.layout != nullptr, "layout: expected one, got null");
  const layout::Layout& layout = *local.layout;
  MT_CHECK_SUPPORTED(layout.has_blocks(), "attention.pattern: ", pattern,
                     " needs 64 consecutive positions on a rank, which layout ",
                     layout::to_string(layout.kind()),
                     " has not; use block_striped, zigzag or contiguous");
  MT_CHECK_ARG(group.size() == layout.cp_size() && group.rank() == local.cp_rank,
               "group: expected rank ", local.cp_rank, " of ", layout.cp_size(), ", got rank ",
               group.rank(), " of ", group.size());
  MT_CHECK_ARG(local.batch >= 1 && local.head_dim >= 1 && local.num_kv_heads >= 1 &&
                   local.num_q_heads >= local.num_kv_heads &&
                   local.num_q_heads % local.num_kv_heads == 0,
               "q, k: expected batch, head_dim, heads of at least 1 and query heads a multiple of "
               "kv heads, got batch ",
               local.batch, ", head_dim ", local.head_dim, ", ", local.num_q_heads,
               " query heads, ", local.num_kv_heads, " kv heads");
  for (int64_t b = 0; b < local.batch && local.document_starts != nullptr; ++b) {
    for (int64_t i = 0; i < layout.seq_len(); ++i) {
      const int32_t start = local.document_starts[b * layout.seq_len() + i];
      MT_CHECK_ARG(start >= 0 && start <= i, "document_starts: expected a position in [0, ", i,
                   "] at sample ", b, ", position ", i, ", got ", start);
    }
  }
}

LocalAttention sample_of(const LocalAttention& local, int64_t b) {
  LocalAttention sample = local;
  sample.batch = 1;
  sample.q.data = row_of(local.q, local.dtype, b, 0, 0);
  sample.k.data = row_of(local.k, local.dtype, b, 0, 0);
  if (local.document_starts != nullptr)
    sample.document_starts = local.document_starts + b * local.layout->seq_len();
  return sample;
}

bool has_windows_by_sample(const LocalAttention& local, const VerticalSlashOptions& options) {
  return local.batch > 1 && local.document_starts != nullptr && options.window == Window::kLast;
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

std::vector<int32_t> floor_positions(const VerticalSlashOptions& options,
                                     const std::vector<int32_t>& window, int64_t seq_len) {
  std::vector<int32_t> rows = sampled_positions(window, seq_len, options.recall_rows, kFloorSeed);
  return rows.empty() ? window : rows;
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
                    row_of(local_.q, local_.dtype, b, owner.offset, h), row_bytes);
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
        MT_CHECK_FINITE(
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
        if (beyond_limit(local_.dtype, row_of(local_.k, local_.dtype, b, t, g), local_.head_dim))
          fault = std::numeric_limits<int64_t>::max() - (b * layout.seq_len() + position);
    }
  }
  group_.all_reduce({&fault, sizeof fault}, comm::ElementType::kInt64, comm::ReduceOp::kMax)
      ->wait();
  const int64_t place = std::numeric_limits<int64_t>::max() - fault;
  MT_CHECK_FINITE(fault == 0,
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
  if (index.has_blocks()) return covered_by_blocks(index);
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

/// A row's key blocks are the diagonals of its own query block, and so rows are looked at one by one.
std::vector<int64_t> Observation::covered_by_blocks(const index::Index& index) const {
  const int64_t rows = num_rows(), heads = local_.batch * local_.num_q_heads;
  const int64_t num_blocks = index.num_blocks(), words = (num_blocks + 63) / 64;
  const kernels::ColumnLists none;
  std::vector<int64_t> masses = zeros(rows);
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t query_block = positions_[r] / layout::kBlock;
    std::vector<uint64_t> bits(heads * words, 0);
    std::vector<float> top;
    std::vector<int64_t> sum, mass(heads, 0);
    for (int64_t h = 0; h < heads; ++h) {
      for (const int64_t block : index.blocks.row(h, query_block, num_blocks)) {
        const int64_t c = query_block - block;
        bits[h * words + c / 64] |= uint64_t{1} << (c % 64);
      }
      top.push_back(row_max_[h * rows + r]);
      sum.push_back(row_sum_[h * rows + r]);
    }
    std::vector<int32_t> starts;
    for (int64_t b = 0; b < local_.batch && !document_start_.empty(); ++b)
      starts.push_back(document_start_[b * rows + r]);
    kernels::WindowParams one = params_;
    one.num_rows = 1;
    one.q.data = rows_.data() + r * local_.head_dim * kernels::size_of(local_.dtype);
    one.row_positions = positions_.data() + r;
    one.row_document_start = starts.empty() ? nullptr : starts.data();
    kernels::ref::window_covered(one, top.data(), sum.data(), bits.data(), words, none,
                                 mass.data());
    for (int64_t h = 0; h < heads; ++h) masses[h * rows + r] = mass[h];
  }
  sum_over_ranks(masses);
  return masses;
}

}  // namespace mtraining::pattern
