// Attention problems for the tests of the Hopper kernels: sizes, a layout, lists per head, and their copies on the device.
//
// In:   a Case. Out: the problem as doubles, diagonals and columns; what each rank's launch reads, on the device.
// Next: forward_test.cc, backward_test.cc.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "mtraining/index/columns.h"
#include "mtraining/index/index.h"
#include "mtraining/index/step_index.h"
#include "mtraining/kernels/sm90/device_memory.h"
#include "mtraining/layout/layout.h"
#include "mtraining/testing/comparator.h"
#include "mtraining/testing/documents.h"
#include "mtraining/testing/generator.h"
#include "mtraining/testing/gpu.h"
#include "mtraining/testing/oracle.h"
#include "mtraining/testing/random.h"
#include "mtraining/testing/rounding.h"
#include "mtraining/testing/shards.h"

namespace mtraining::kernels::sm90 {

using layout::LayoutKind;
using testing::Documents;
using testing::Precision;

inline bool has_hopper() { return testing::gpu_major_capability() == 9; }

#define MT_NEEDS_HOPPER() \
  if (!has_hopper()) GTEST_SKIP() << "needs a device of compute capability 9.x"

inline Precision precision_of(DType dtype) {
  return dtype == DType::kBFloat16 ? Precision::kBFloat16 : Precision::kFloat16;
}

enum class Columns { kNone, kOnce, kPerStep };
enum class Launches { kOne, kOnePerSource };

struct Case {
  std::string name;
  LayoutKind layout = LayoutKind::kContiguous;
  int64_t seq_len = 300;
  int64_t stripe = 64;
  int cp_size = 1;
  int nodes = 1;
  int64_t batch = 1, num_q_heads = 4, num_kv_heads = 2, head_dim = 128;
  DType dtype = DType::kBFloat16;
  Columns columns = Columns::kNone;
  bool csr = false;
  Launches launches = Launches::kOne;
  Documents documents = Documents::kOne;
  bool dense = false;
  bool without_diagonal =
      false;  // diagonal 0 is not chosen in odd heads: empty rows, columns cut pair by pair
  bool ragged_memory = false;  // contiguous, one rank: memory ends with the sequence
  int64_t num_columns = 40;
  double outlier_channel = 0;  // > 0: a few channels of q and k multiplied by it
  int repeats = 0;  // of the backward, one rank: the same with any number of SMs beside other work
  bool huge_scores = false;  // +500 and -500 between documents, which do not see each other
  // One key of each block has nearly all the weight of what a row sees up to there, walking back: e^4 times the block's after it.
  bool rising_peaks = false;
};

inline testing::Problem make_problem(const Case& c) {
  testing::Qkv values = testing::make_qkv({.batch = c.batch,
                                           .seq_len = c.seq_len,
                                           .num_q_heads = c.num_q_heads,
                                           .num_kv_heads = c.num_kv_heads,
                                           .head_dim = c.head_dim,
                                           .seed = 3,
                                           .outlier_channel = c.outlier_channel});
  testing::Problem problem{.batch = c.batch,
                           .num_queries = c.seq_len,
                           .num_keys = c.seq_len,
                           .num_q_heads = c.num_q_heads,
                           .num_kv_heads = c.num_kv_heads,
                           .head_dim = c.head_dim};
  if (c.huge_scores) {
    const std::vector<int32_t> starts =
        testing::make_document_starts(c.documents, c.batch, c.seq_len);
    const float size = std::round(std::sqrt(500 * std::sqrt(static_cast<float>(c.head_dim))));
    for (int64_t b = 0; b < c.batch; ++b) {
      int parity = 0;
      for (int64_t t = 0; t < c.seq_len; ++t) {
        const int64_t at = b * c.seq_len + t;
        if (t > 0 && starts[at] != starts[at - 1]) parity = 1 - parity;
        for (int64_t h = 0; h < c.num_q_heads; ++h) {
          float* q = values.q.data() + (at * c.num_q_heads + h) * c.head_dim;
          q[parity] = size;
          q[1 - parity] = 0;
        }
        for (int64_t h = 0; h < c.num_kv_heads; ++h) {
          float* k = values.k.data() + (at * c.num_kv_heads + h) * c.head_dim;
          k[parity] = 0;
          k[1 - parity] = t % 3 == 0 ? -size : size;
        }
      }
    }
  }
  if (c.rising_peaks) {
    const int64_t blocks = (c.seq_len + 63) / 64;
    for (size_t at = 0; at < values.q.size(); at += c.head_dim) {
      // Unequal rows: their probabilities round in different ways.
      const float unequal = 1 + 0.1f * std::tanh(values.q[at]);
      std::fill_n(values.q.begin() + static_cast<int64_t>(at), c.head_dim, 0.0f);
      values.q[at] = unequal * std::sqrt(static_cast<float>(c.head_dim));
    }
    for (int64_t t = 0; t < c.batch * c.seq_len; ++t) {
      const int64_t block = t % c.seq_len / 64;
      for (int64_t h = 0; h < c.num_kv_heads; ++h) {
        const bool peak = t % c.seq_len % 64 == (7 * block + 3 * h) % 64;
        values.k[(t * c.num_kv_heads + h) * c.head_dim] =
            peak ? 4.0f * static_cast<float>(blocks - block) : -20.0f;
      }
    }
  }
  const Precision precision = precision_of(c.dtype);
  problem.q = testing::round_to(precision, std::span<const float>(values.q));
  problem.k = testing::round_to(precision, std::span<const float>(values.k));
  problem.v = testing::round_to(precision, std::span<const float>(values.v));
  problem.dout = testing::round_to(precision, std::span<const float>(values.dout));
  return problem;
}

struct Choice {
  std::vector<std::vector<int32_t>> diagonals, columns;
};

/// Heads of unequal density.
inline Choice choose(const Case& c) {
  testing::Random random(17);
  const int64_t blocks = (c.seq_len + 63) / 64;
  Choice choice;
  for (int64_t r = 0; r < c.batch * c.num_q_heads; ++r) {
    std::vector<int32_t> diagonals, columns;
    const double density = c.dense ? 2 : 0.1 + 0.25 * static_cast<double>(r % 4);
    for (int64_t d = 0; d < blocks; ++d) {
      const bool forced = d == 0 && !(c.without_diagonal && r % 2 == 1);
      const bool barred = d == 0 && c.without_diagonal && r % 2 == 1;
      if (!barred && (forced || random.uniform() < density))
        diagonals.push_back(static_cast<int32_t>(d));
    }
    if (c.columns != Columns::kNone && r % 5 != 4) {
      const int64_t wanted = std::min<int64_t>(c.seq_len, c.num_columns * (1 + r % 3));
      std::vector<uint8_t> chosen(c.seq_len, 0);
      for (int64_t n = 0; n < wanted; ++n)
        chosen[std::min<int64_t>(
            c.seq_len - 1, static_cast<int64_t>(random.uniform() * random.uniform() * c.seq_len))] =
            1;
      for (int64_t j = 0; j < c.seq_len; ++j)
        if (chosen[j]) columns.push_back(static_cast<int32_t>(j));
    }
    choice.diagonals.push_back(diagonals);
    choice.columns.push_back(columns);
  }
  return choice;
}

/// Positions of a rank's rows; with ragged_memory only those that exist.
inline std::vector<int64_t> rows_of(const Case& c, const layout::Layout& layout, int rank) {
  std::vector<int64_t> positions = layout.positions(rank);
  if (c.ragged_memory) positions.resize(c.seq_len);
  return positions;
}

/// Device copies of lists; the views point to them.
struct DeviceBlocks {
  DeviceMemory entries, num_entries, row_begin, key_blocks, key_row_begin, query_blocks;
  BlockLists view;
  /// num_k_blocks: of the source, for the lists by key block.
  DeviceBlocks(const index::StepBlocks& blocks, int64_t num_k_blocks)
      : entries(blocks.entries),
        num_entries(blocks.num_entries),
        row_begin(blocks.row_begin),
        key_blocks(blocks.key_blocks) {
    view = blocks.view();
    if (blocks.kind == BlockListKind::kCsr) {
      const index::StepBlocks by_key = index::transpose(blocks, num_k_blocks);
      key_row_begin = DeviceMemory(by_key.row_begin);
      query_blocks = DeviceMemory(by_key.key_blocks);
      view.key_row_begin = key_row_begin.get<int64_t>();
      view.query_blocks = query_blocks.get<int32_t>();
    }
    view.entries = entries.get<Entry>();
    view.num_entries = num_entries.get<int32_t>();
    view.row_begin = row_begin.get<int64_t>();
    view.key_blocks = key_blocks.get<int32_t>();
  }
};
struct DeviceColumns {
  DeviceMemory rows, positions, counts;
  ColumnLists view;
  DeviceColumns(const std::vector<int32_t>& r, const std::vector<int32_t>& p,
                const std::vector<int32_t>& n, int64_t capacity)
      : rows(r), positions(p), counts(n) {
    view = {rows.get<int32_t>(), positions.get<int32_t>(), counts.get<int32_t>(), capacity};
  }
};

inline std::vector<double> widened(const std::vector<float>& values) {
  return {values.begin(), values.end()};
}

/// One rank's launch: its queries, every source that reaches it, empty out and lse with guard rows beyond their ends.
struct RankCase {
  std::vector<int64_t> positions;
  DeviceMemory q, document, out, lse;
  std::vector<DeviceBlocks> blocks;
  std::vector<DeviceColumns> columns;
  std::vector<KeySource> sources;  // one a rank, then the gathered columns
  ForwardParams params;            // all sources, no workspace
};
inline constexpr int64_t kGuardRows = 64;  // beyond the end, must stay as they are

/// The columns of a slice of heads, gathered from all ranks.
struct GatheredColumns {
  DeviceMemory k, v;
  DeviceColumns lists;
  std::vector<index::PackedRow> owner;  // of each buffer row; batch -1: none
  std::vector<int64_t> position;
};

/// A case as a whole. Padding rows hold NaN, but for values: 0 * NaN is NaN there as in dense attention.
struct WholeCase {
  const Case& c;
  Precision precision;
  testing::Problem problem;
  Choice choice;
  std::vector<int32_t> documents;
  testing::Mask mask;
  index::Index index;
  layout::Layout layout;
  index::DiagonalBitmap bitmap;
  DeviceMemory bits;
  std::vector<DeviceMemory> k, v, starts;  // of each rank
  std::vector<GatheredColumns> gathered;   // where columns come once

  explicit WholeCase(const Case& the_case)
      : c(the_case),
        precision(precision_of(c.dtype)),
        problem(make_problem(c)),
        choice(choose(c)),
        documents(testing::make_document_starts(c.documents, c.batch, c.seq_len)),
        mask(testing::vertical_slash_mask(choice.diagonals, choice.columns, c.num_q_heads,
                                          documents, c.seq_len)),
        index(index::make_index(static_cast<int>(c.batch), static_cast<int>(c.num_q_heads),
                                c.seq_len, choice.diagonals, choice.columns)),
        layout({.kind = c.layout,
                .seq_len = c.seq_len,
                .cp_size = c.cp_size,
                .stripe = c.stripe,
                .nodes = c.nodes}),
        bitmap(index::diagonal_bitmap(index)),
        bits(bitmap.bits) {
    for (int rank = 0; rank < c.cp_size; ++rank) {
      k.push_back(shard(problem.k, rank, NAN));
      v.push_back(shard(problem.v, rank, 0));
      starts.emplace_back(layout.block_starts(rank));
    }
    if (c.columns == Columns::kOnce) gather();
  }

  DeviceMemory shard(const std::vector<double>& values, int rank, double padding) const {
    return DeviceMemory(testing::pack(
        precision,
        testing::take_rows<double>(values, c.batch, c.seq_len, rows_of(c, layout, rank), padding)));
  }

  void gather() {
    const int64_t Hk = c.num_kv_heads, D = c.head_dim;
    const index::ColumnPlan plan = index::plan_columns(index, layout, static_cast<int>(Hk), 48);
    for (const index::ColumnSlice& slice : plan.slices) {
      const int64_t rows = c.cp_size * slice.rows_per_rank;
      std::vector<double> rows_k(rows * D, 1e30), rows_v(rows_k);
      std::vector<index::PackedRow> owner(rows, index::PackedRow{-1, 0, 0});
      std::vector<int64_t> positions(rows, 0);
      for (int rank = 0; rank < c.cp_size; ++rank) {
        for (size_t i = 0; i < slice.rows[rank].size(); ++i) {
          const index::PackedRow& row = slice.rows[rank][i];
          const int64_t position = layout.position(rank, row.offset);
          const int64_t from = ((row.batch * c.seq_len + position) * Hk + row.kv_head) * D;
          const int64_t to = rank * slice.rows_per_rank + static_cast<int64_t>(i);
          std::copy_n(problem.k.begin() + from, D, rows_k.begin() + to * D);
          std::copy_n(problem.v.begin() + from, D, rows_v.begin() + to * D);
          owner[to] = row;
          positions[to] = position;
        }
      }
      gathered.push_back(
          {DeviceMemory(testing::pack(precision, rows_k)),
           DeviceMemory(testing::pack(precision, rows_v)),
           DeviceColumns(slice.gathered_rows, slice.positions, slice.counts, slice.capacity), owner,
           positions});
    }
  }

  std::unique_ptr<RankCase> rank(int rank) const {
    const int64_t B = c.batch, H = c.num_q_heads, Hk = c.num_kv_heads, D = c.head_dim;
    auto made = std::make_unique<RankCase>();
    made->positions = rows_of(c, layout, rank);
    const int64_t n = static_cast<int64_t>(made->positions.size());
    made->q = shard(problem.q, rank, NAN);
    if (!documents.empty()) {
      made->document =
          DeviceMemory(testing::take_rows<int32_t>(documents, B, c.seq_len, made->positions, 0));
    }
    for (int source_rank = 0; source_rank < c.cp_size; ++source_rank) {
      const int64_t keys = static_cast<int64_t>(rows_of(c, layout, source_rank).size());
      made->blocks.emplace_back(c.csr ? index::step_blocks_csr(index, layout, rank, source_rank)
                                      : index::step_blocks(index, layout, rank, source_rank),
                                (keys + 63) / 64);
      KeySource source;
      source.k = {k[source_rank].get(), keys * Hk * D, Hk * D, D};
      source.v = {v[source_rank].get(), keys * Hk * D, Hk * D, D};
      source.num_keys = keys;
      source.block_starts = starts[source_rank].get<int32_t>();
      source.blocks = made->blocks.back().view;
      if (c.columns == Columns::kPerStep) {
        const index::StepColumns step = index::step_columns(index, layout, source_rank);
        made->columns.emplace_back(step.rows, step.positions, step.counts, step.capacity);
        source.columns = made->columns.back().view;
      }
      made->sources.push_back(source);
    }
    for (const GatheredColumns& slice : gathered) {
      KeySource source;
      source.k = {slice.k.get(), 0, D, 0};
      source.v = {slice.v.get(), 0, D, 0};
      source.num_keys = static_cast<int64_t>(slice.owner.size());
      source.columns = slice.lists.view;
      made->sources.push_back(source);
    }
    made->out = DeviceMemory((B * n + kGuardRows) * H * D * 4);
    made->lse = DeviceMemory((B * H * n + kGuardRows) * 4);
    ForwardParams& p = made->params;
    p.batch = B;
    p.num_q_heads = H;
    p.num_kv_heads = Hk;
    p.head_dim = D;
    p.num_queries = n;
    p.dtype = c.dtype;
    p.softmax_scale = 1 / std::sqrt(static_cast<double>(D));
    p.seq_len = c.seq_len;
    p.q = {made->q.get(), n * H * D, H * D, D};
    p.q_block_starts = starts[rank].get<int32_t>();
    p.position_stride = layout.position_stride();
    p.document_start = documents.empty() ? nullptr : made->document.get<int32_t>();
    p.document_stride_batch = n;
    p.diagonal_bits = bits.get<uint64_t>();
    p.diagonal_words = bitmap.words;
    p.sm_margin = rank;
    p.sources = made->sources.data();
    p.num_sources = static_cast<int>(made->sources.size());
    p.out = {made->out.get(), n * H * D, H * D, D};
    p.lse = made->lse.get();
    return made;
  }
};

}  // namespace mtraining::kernels::sm90
