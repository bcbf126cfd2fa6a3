#include <algorithm>
#include <cmath>
#include <numeric>

#include "mtraining/base/check.h"
#include "mtraining/base/error_kinds.h"
#include "mtraining/pattern/block_choice.h"
#include "mtraining/pattern/observation.h"
#include "mtraining/pattern/rows.h"

namespace mtraining::pattern {
namespace {

constexpr int64_t kBlock = layout::kBlock;

/// [B, Hk, chunks, D] means of the keys of whole chunks. The last chunk is nobody's but its own queries', so its length does not matter.
std::vector<double> chunk_means(const LocalAttention& local, const MobaOptions& options,
                                comm::Communicator& group) {
  const layout::Layout& layout = *local.layout;
  const int64_t n = layout.seq_len(), blocks = (n + kBlock - 1) / kBlock, dim = local.head_dim;
  const int64_t per_chunk = options.chunk / kBlock, chunks = (blocks + per_chunk - 1) / per_chunk;
  const int64_t rows = local.batch * local.num_kv_heads;
  // One rank holds a block and adds up its keys; blocks are added up in one order by all.
  std::vector<double> sums(rows * blocks * dim, 0), row(dim);
  const std::vector<int32_t> starts = layout.block_starts(local.cp_rank);
  for (int64_t b = 0; b < local.batch; ++b) {
    for (int64_t g = 0; g < local.num_kv_heads; ++g) {
      for (size_t i = 0; i < starts.size(); ++i) {
        double* sum = &sums[((b * local.num_kv_heads + g) * blocks + starts[i] / kBlock) * dim];
        for (int64_t t = 0; t < kBlock && starts[i] + t < n; ++t) {
          read_row(local.dtype,
                   row_of(local.k, local.dtype, b, static_cast<int64_t>(i) * kBlock + t, g), dim,
                   row.data());
          for (int64_t d = 0; d < dim; ++d) sum[d] += row[d];
        }
      }
    }
  }
  group
      .all_reduce({sums.data(), static_cast<int64_t>(sums.size() * sizeof(double))},
                  comm::ElementType::kFloat64, comm::ReduceOp::kSum)
      ->wait();
  std::vector<double> means(rows * chunks * dim, 0);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t block = 0; block < blocks; ++block) {
      for (int64_t d = 0; d < dim; ++d) {
        const double value = sums[(r * blocks + block) * dim + d];
        // The sums are the same everywhere: all ranks throw or none.
        MT_CHECK_ARG(std::isfinite(value), "k: expected finite values, got NaN or inf at sample ",
                     r / local.num_kv_heads, ", head ", r % local.num_kv_heads, ", block ", block);
        means[(r * chunks + block / per_chunk) * dim + d] +=
            value / static_cast<double>(options.chunk);
      }
    }
  }
  return means;
}

}  // namespace

index::Index build_moba(const LocalAttention& local, const MobaOptions& options,
                        comm::Communicator& group) {
  check(options);
  check_local("moba", local, group);
  const layout::Layout& layout = *local.layout;
  const int64_t n = layout.seq_len(), blocks = (n + kBlock - 1) / kBlock, dim = local.head_dim;
  const int64_t per_chunk = options.chunk / kBlock, chunks = (blocks + per_chunk - 1) / per_chunk;
  const int64_t heads = local.num_q_heads, shared = heads / local.num_kv_heads;
  const std::vector<double> means = chunk_means(local, options, group);

  std::vector<std::vector<int32_t>> lists(local.batch * heads * blocks);
  const std::vector<int32_t> starts = layout.block_starts(local.cp_rank);
  std::vector<double> row(dim), mean(dim), gate(chunks);
  int64_t fault = 0;
  for (int64_t r = 0; r < local.batch * heads; ++r) {
    const int64_t b = r / heads, h = r % heads;
    for (size_t i = 0; i < starts.size(); ++i) {
      if (starts[i] >= n) continue;
      const int64_t block = starts[i] / kBlock, own = block / per_chunk;
      const int64_t real = std::min<int64_t>(kBlock, n - starts[i]);
      std::fill(mean.begin(), mean.end(), 0.0);
      for (int64_t t = 0; t < real; ++t) {
        read_row(local.dtype,
                 row_of(local.q, local.dtype, b, static_cast<int64_t>(i) * kBlock + t, h), dim,
                 row.data());
        for (int64_t d = 0; d < dim; ++d) mean[d] += row[d] / static_cast<double>(real);
      }
      // No row of the block sees a key before its first row's document.
      const int64_t first = local.document_starts == nullptr
                                ? 0
                                : local.document_starts[b * n + starts[i]] / options.chunk;
      std::vector<int64_t> before(own - first);
      std::iota(before.begin(), before.end(), first);
      for (const int64_t chunk : before) {
        const double* key = &means[((b * local.num_kv_heads + h / shared) * chunks + chunk) * dim];
        gate[chunk] = std::inner_product(mean.begin(), mean.end(), key, 0.0);
        if (!std::isfinite(gate[chunk])) fault = 1;
      }
      if (fault != 0) continue;
      std::stable_sort(before.begin(), before.end(),
                       [&](int64_t a, int64_t c) { return gate[a] > gate[c]; });
      before.resize(std::min<int64_t>(static_cast<int64_t>(before.size()), options.top_k - 1));
      std::sort(before.begin(), before.end());
      before.push_back(own);
      std::vector<int32_t>& list = lists[r * blocks + block];
      for (const int64_t chunk : before)
        for (int64_t k = chunk * per_chunk; k <= std::min(block, (chunk + 1) * per_chunk - 1); ++k)
          list.push_back(static_cast<int32_t>(k));
    }
  }
  group.all_reduce({&fault, sizeof fault}, comm::ElementType::kInt64, comm::ReduceOp::kMax)->wait();
  MT_CHECK_FINITE(fault == 0, "q: expected finite values, got NaN or inf");
  return index::make_block_index(static_cast<int>(local.batch), static_cast<int>(heads), n,
                                 gather_lists(lists, group));
}

}  // namespace mtraining::pattern
