#include <algorithm>
#include <cmath>

#include "mtraining/base/check.h"
#include "mtraining/kernels/window.h"
#include "mtraining/pattern/block_choice.h"
#include "mtraining/pattern/observation.h"

namespace mtraining::pattern {
namespace {

constexpr int64_t kBlock = layout::kBlock;

/// Rows [N, D] of one head as groups [ceil(N / stride), stride * D], float64, zeros after the end. Queries are put in reverse
/// order, so that a score is one dot product of groups.
std::vector<double> groups_of(const uint8_t* rows, kernels::DType dtype, int64_t n, int64_t dim,
                              int64_t stride, bool reverse) {
  const int64_t groups = (n + stride - 1) / stride;
  std::vector<double> out(groups * stride * dim, 0);
  for (int64_t i = 0; i < n; ++i) {
    const int64_t s = reverse ? stride - 1 - i % stride : i % stride;
    read_row(dtype, rows + i * dim * kernels::size_of(dtype), dim,
             &out[(i / stride * stride + s) * dim]);
  }
  return out;
}

double dot(const double* a, const double* b, int64_t count) {
  double lanes[8] = {};
  int64_t d = 0;
  for (; d + 8 <= count; d += 8)
    for (int l = 0; l < 8; ++l) lanes[l] += a[d + l] * b[d + l];
  double sum = 0;
  for (; d < count; ++d) sum += a[d] * b[d];
  for (const double lane : lanes) sum += lane;
  return sum;
}

struct Head {
  const std::vector<double>& q_groups;
  const std::vector<double>& k_groups;
  const int32_t* document_starts;  ///< [N] or null
  int64_t n, group_width;          ///< group_width = stride * D
  double scale;
  XAttentionOptions options;
};

/// Mass by key block [query block + 1]: attention, summed over the query block's groups.
std::vector<int64_t> block_masses(const Head& head, int64_t query_block) {
  const int64_t stride = head.options.stride, per_block = head.options.block / stride;
  const int64_t num_groups = (head.n + stride - 1) / stride;
  std::vector<double> scores(query_block + 1, 0), row;
  for (int64_t i = query_block * per_block; i < std::min((query_block + 1) * per_block, num_groups);
       ++i) {
    // Groups that end before the first row's document are seen by no row of the group.
    const int64_t first =
        head.document_starts == nullptr ? 0 : head.document_starts[i * stride] / stride;
    row.assign(i - first + 1, 0);
    double top = -INFINITY, sum = 0;
    for (int64_t j = first; j <= i; ++j) {
      row[j - first] = dot(&head.q_groups[i * head.group_width],
                           &head.k_groups[j * head.group_width], head.group_width) *
                       head.scale;
      top = std::max(top, row[j - first]);
    }
    for (double& value : row) sum += value = std::exp(value - top);
    for (int64_t j = first; j <= i; ++j) scores[j / per_block] += row[j - first] / sum;
  }
  std::vector<int64_t> masses;
  for (const double score : scores)
    masses.push_back(std::llround(score * static_cast<double>(kernels::kMassOne)));
  return masses;
}

/// Ascending key blocks.
std::vector<int64_t> choose(const Head& head, int64_t query_block) {
  return best_blocks(
      block_masses(head, query_block),
      head.document_starts == nullptr
          ? 0
          : head.document_starts[query_block * head.options.block] / head.options.block,
      head.options.threshold);
}

}  // namespace

index::Index build_xattention(const LocalAttention& local, const XAttentionOptions& options,
                              comm::Communicator& group) {
  check(options);
  check_local("xattention", local, group);
  const int64_t n = local.layout->seq_len(), blocks = (n + kBlock - 1) / kBlock;
  const int64_t dim = local.head_dim, heads = local.num_q_heads,
                shared = heads / local.num_kv_heads;
  const int64_t row_bytes = dim * kernels::size_of(local.dtype);
  const int64_t wide = options.block / kBlock,
                query_blocks = (n + options.block - 1) / options.block;
  const std::vector<uint8_t> q = gather_whole("q", local, local.q, heads, group);
  const std::vector<uint8_t> k = gather_whole("k", local, local.k, local.num_kv_heads, group);

  std::vector<std::vector<int32_t>> lists(local.batch * heads * blocks);
  std::vector<double> k_groups;
  for (int64_t r = 0; r < local.batch * heads; ++r) {
    const int64_t b = r / heads;
    if (r % shared == 0) {
      k_groups =
          groups_of(&k[r / shared * n * row_bytes], local.dtype, n, dim, options.stride, false);
    }
    const std::vector<double> q_groups =
        groups_of(&q[r * n * row_bytes], local.dtype, n, dim, options.stride, true);
    const Head head{q_groups,
                    k_groups,
                    local.document_starts == nullptr ? nullptr : local.document_starts + b * n,
                    n,
                    options.stride * dim,
                    local.softmax_scale / options.stride,
                    options};
    // Later query blocks cost more: dealt out in turn.
    for (int64_t query_block = local.cp_rank; query_block < query_blocks;
         query_block += group.size()) {
      const std::vector<int64_t> chosen = choose(head, query_block);
      for (int64_t row = query_block * wide; row < std::min((query_block + 1) * wide, blocks);
           ++row)
        for (const int64_t key_block : chosen)
          for (int64_t key = key_block * wide; key <= std::min(row, (key_block + 1) * wide - 1);
               ++key)
            lists[r * blocks + row].push_back(static_cast<int32_t>(key));
    }
  }
  return index::make_block_index(static_cast<int>(local.batch), static_cast<int>(heads), n,
                                 gather_lists(lists, group));
}

}  // namespace mtraining::pattern
