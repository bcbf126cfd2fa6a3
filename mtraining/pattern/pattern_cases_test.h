// Whole sequences, cut into shards and given to the pattern over loopback ranks. Only for tests.
//
// In:   a Sequence and a layout. Out: what every rank returned, checked to be the same. Next: the tests of pattern/.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "mtraining/base/parallel.h"
#include "mtraining/comm/loopback.h"
#include "mtraining/pattern/pattern.h"
#include "mtraining/testing/documents.h"
#include "mtraining/testing/generator.h"
#include "mtraining/testing/rounding.h"
#include "mtraining/testing/shards.h"

namespace mtraining::pattern::cases {

struct Sequence {
  int64_t batch = 1, seq_len = 0, heads = 1, kv_heads = 1, dim = 16;
  testing::Precision precision = testing::Precision::kFloat32;
  std::vector<double> q, k;  ///< [B, N, H, D], [B, N, Hk, D], exact in `precision`
  std::vector<int32_t> document_starts;

  double scale() const { return 1 / std::sqrt(static_cast<double>(dim)); }
};

inline Sequence make_sequence(int64_t batch, int64_t seq_len, int64_t heads, int64_t kv_heads,
                              testing::Precision precision,
                              testing::Documents documents = testing::Documents::kOne,
                              uint64_t seed = 1) {
  Sequence s{.batch = batch,
             .seq_len = seq_len,
             .heads = heads,
             .kv_heads = kv_heads,
             .dim = 16,
             .precision = precision,
             .q = {},
             .k = {},
             .document_starts = testing::make_document_starts(documents, batch, seq_len)};
  const testing::Qkv made = testing::make_qkv({.batch = batch,
                                               .seq_len = seq_len,
                                               .num_q_heads = heads,
                                               .num_kv_heads = kv_heads,
                                               .head_dim = s.dim,
                                               .seed = seed});
  s.q = testing::round_to(precision, std::span<const float>(made.q));
  s.k = testing::round_to(precision, std::span<const float>(made.k));
  return s;
}

inline kernels::DType dtype_of(testing::Precision precision) {
  switch (precision) {
    case testing::Precision::kFloat64:
      return kernels::DType::kFloat64;
    case testing::Precision::kFloat32:
      return kernels::DType::kFloat32;
    case testing::Precision::kBFloat16:
      return kernels::DType::kBFloat16;
    case testing::Precision::kFloat16:
      return kernels::DType::kFloat16;
  }
  return {};
}

/// A rank's shard in memory. Padding rows hold NaN: whatever lies there must not matter.
struct Shard {
  Shard(const Sequence& s, const layout::Layout& layout, int rank) {
    const auto positions = layout.positions(rank);
    const int64_t n = layout.tokens_per_rank();
    const double nan = std::numeric_limits<double>::quiet_NaN();
    q = testing::pack(s.precision, testing::take_rows(s.q, s.batch, s.seq_len, positions, nan));
    k = testing::pack(s.precision, testing::take_rows(s.k, s.batch, s.seq_len, positions, nan));
    local.layout = &layout;
    local.cp_rank = rank;
    local.batch = s.batch;
    local.num_q_heads = s.heads;
    local.num_kv_heads = s.kv_heads;
    local.head_dim = s.dim;
    local.dtype = dtype_of(s.precision);
    local.softmax_scale = s.scale();
    local.q = {q.data(), n * s.heads * s.dim, s.heads * s.dim, s.dim};
    local.k = {k.data(), n * s.kv_heads * s.dim, s.kv_heads * s.dim, s.dim};
    local.document_starts = s.document_starts.empty() ? nullptr : s.document_starts.data();
  }
  std::vector<uint8_t> q, k;
  LocalAttention local;
};

/// Runs body(local, group) on every rank of the layout.
inline void on_ranks(const Sequence& s, const layout::Layout& layout,
                     const std::function<void(const LocalAttention&, comm::Communicator&)>& body) {
  comm::run_loopback(layout.cp_size(), [&](comm::Transport& transport) {
    const ThreadCountScope one_thread(1);
    std::vector<int> members(layout.cp_size());
    std::iota(members.begin(), members.end(), 0);
    const auto group = transport.open("index", members);
    const Shard shard(s, layout, transport.rank());
    body(shard.local, *group);
  });
}

inline ::testing::AssertionResult same(const index::Index& a, const index::Index& b) {
  if (a.diagonals.rows != b.diagonals.rows || a.columns.rows != b.columns.rows ||
      a.seq_len != b.seq_len || a.batch != b.batch)
    return ::testing::AssertionFailure() << "sizes differ";
  for (int64_t row = 0; row < a.diagonals.rows; ++row) {
    const auto ad = a.diagonals.row(row), bd = b.diagonals.row(row), ac = a.columns.row(row),
               bc = b.columns.row(row);
    if (!std::equal(ad.begin(), ad.end(), bd.begin(), bd.end()))
      return ::testing::AssertionFailure()
             << "diagonals of row " << row << ": " << ad.size() << " and " << bd.size();
    if (!std::equal(ac.begin(), ac.end(), bc.begin(), bc.end()))
      return ::testing::AssertionFailure()
             << "columns of row " << row << ": " << ac.size() << " and " << bc.size();
  }
  if (a.dense_heads != b.dense_heads) return ::testing::AssertionFailure() << "dense heads differ";
  if (a.caps_hit != b.caps_hit)
    return ::testing::AssertionFailure() << "caps_hit " << a.caps_hit << " and " << b.caps_hit;
  return ::testing::AssertionSuccess();
}

/// Rank 0's index; all ranks' must be the same.
inline index::Index build(const Sequence& s, const VerticalSlashOptions& options,
                          const layout::Layout& layout) {
  std::vector<index::Index> built(layout.cp_size());
  on_ranks(s, layout, [&](const LocalAttention& local, comm::Communicator& group) {
    built[local.cp_rank] = build_vertical_slash(local, options, group);
  });
  for (int rank = 1; rank < layout.cp_size(); ++rank)
    EXPECT_TRUE(same(built[0], built[rank])) << "rank " << rank;
  return built[0];
}

inline layout::Layout one_rank(int64_t seq_len) {
  return layout::Layout(
      {.kind = layout::LayoutKind::kContiguous, .seq_len = seq_len, .cp_size = 1});
}

inline index::Index build(const Sequence& s, const VerticalSlashOptions& options) {
  return build(s, options, one_rank(s.seq_len));
}

/// Every layout with blocks over 1, 2, 3, 4, 8 ranks, with hierarchical numbering where the ranks divide.
inline std::vector<layout::Layout> all_layouts(int64_t seq_len) {
  using layout::LayoutKind;
  std::vector<layout::Layout> layouts;
  for (int ranks : {1, 2, 3, 4, 8}) {
    layouts.emplace_back(layout::LayoutOptions{
        .kind = LayoutKind::kContiguous, .seq_len = seq_len, .cp_size = ranks});
    layouts.emplace_back(
        layout::LayoutOptions{.kind = LayoutKind::kZigzag, .seq_len = seq_len, .cp_size = ranks});
    for (int64_t stripe : {64, 128})
      for (int nodes : {1, 2})
        if (ranks % nodes == 0)
          layouts.emplace_back(layout::LayoutOptions{.kind = LayoutKind::kBlockStriped,
                                                     .seq_len = seq_len,
                                                     .cp_size = ranks,
                                                     .stripe = stripe,
                                                     .nodes = nodes});
  }
  return layouts;
}

inline std::string name(const layout::Layout& layout) {
  const auto& o = layout.options();
  return std::string(layout::to_string(o.kind)) + " ranks " + std::to_string(o.cp_size) +
         " stripe " + std::to_string(o.stripe) + " nodes " + std::to_string(o.nodes);
}

/// The spec's plain form: no forced entries but diagonal 0, no caps, nothing made dense.
inline VerticalSlashOptions bare(double p, SlashPooling pooling = SlashPooling::kBlock) {
  VerticalSlashOptions options;
  options.p_vertical = options.p_slash = p;
  options.slash_pooling = pooling;
  options.sink_tokens = 0;
  options.local_blocks = 1;
  options.dense_threshold = 1;
  return options;
}

}  // namespace mtraining::pattern::cases
