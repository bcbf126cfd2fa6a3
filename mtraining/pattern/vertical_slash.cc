#include <algorithm>
#include <numeric>
#include <set>

#include "mtraining/base/check.h"
#include "mtraining/pattern/observation.h"
#include "mtraining/pattern/pattern.h"
#include "mtraining/pattern/top_p.h"

namespace mtraining::pattern {
namespace {

constexpr int64_t kBlock = layout::kBlock;

// The seed of the rows that recall_floor judges by: any constant, the same on every rank and in every run.
constexpr uint64_t kFloorSeed = 0x6d7472;

void check_call(const LocalAttention& local, const VerticalSlashOptions& options,
                comm::Communicator& group) {
  check(options);
  MT_CHECK_ARG(local.layout != nullptr, "layout: expected one, got null");
  const layout::Layout& layout = *local.layout;
  MT_CHECK_SUPPORTED(
      layout.has_blocks(),
      "attention.pattern: vertical_slash needs 64 consecutive positions on a rank, which layout ",
      layout::to_string(layout.kind()), " has not; use block_striped, zigzag or contiguous");
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
  const int64_t widest =
      options.selection == Selection::kKvGroup ? local.num_q_heads / local.num_kv_heads : 1;
  MT_CHECK_SUPPORTED(widest * options.last_q < (1 << 17), "selection: kv_group over ", widest,
                     " heads with last_q ", options.last_q, ": their product must stay below ",
                     1 << 17, " for the masses to fit 64 bits");
  for (int64_t b = 0; b < local.batch && local.document_starts != nullptr; ++b) {
    for (int64_t i = 0; i < layout.seq_len(); ++i) {
      const int32_t start = local.document_starts[b * layout.seq_len() + i];
      MT_CHECK_ARG(start >= 0 && start <= i, "document_starts: expected a position in [0, ", i,
                   "] at sample ", b, ", position ", i, ", got ", start);
    }
  }
}

// Sums every `group` consecutive rows of [rows, width] into one.
std::vector<int64_t> sum_groups(const std::vector<int64_t>& masses, int64_t width, int64_t group) {
  const int64_t rows = width == 0 ? 0 : static_cast<int64_t>(masses.size()) / width;
  std::vector<int64_t> sums(rows / group * width, 0);
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t i = 0; i < width; ++i) sums[row / group * width + i] += masses[row * width + i];
  return sums;
}

std::vector<int32_t> highest(std::span<const int64_t> masses, int64_t count) {
  return top_p(masses, 1, count);
}

// An offset on the block grid lies on one block diagonal, any other crosses two; those past the last one do not exist.
std::set<int32_t> crossed(const std::vector<int32_t>& offsets, int64_t num_blocks) {
  std::set<int32_t> diagonals;
  for (int32_t offset : offsets) {
    const int32_t c = static_cast<int32_t>(offset / kBlock);
    diagonals.insert(c);
    if (offset % kBlock != 0 && c + 1 < num_blocks) diagonals.insert(c + 1);
  }
  return diagonals;
}

struct Choice {
  std::vector<int32_t> diagonals;
  bool cut = false;
};

// pooled: [NB] masses of the block diagonals; offsets: [N], or empty for block pooling.
Choice choose_diagonals(const VerticalSlashOptions& options, std::span<const int64_t> pooled,
                        std::span<const int64_t> offsets) {
  Choice choice;
  switch (options.slash_pooling) {
    case SlashPooling::kBlock:
      choice.diagonals = top_p(pooled, options.p_slash);
      break;
    case SlashPooling::kPaper: {
      const int64_t budget = static_cast<int64_t>(top_p(pooled, options.p_slash).size());
      const auto found = crossed(highest(offsets, budget), static_cast<int64_t>(pooled.size()));
      choice.diagonals.assign(found.begin(), found.end());
      break;
    }
    case SlashPooling::kToken: {
      const auto found =
          crossed(top_p(offsets, options.p_slash), static_cast<int64_t>(pooled.size()));
      choice.diagonals.assign(found.begin(), found.end());
      break;
    }
  }
  const int64_t cap = options.max_diagonals.value_or(-1);
  if (cap >= 0 && static_cast<int64_t>(choice.diagonals.size()) > cap) {
    choice.cut = true;
    std::vector<int64_t> masses;
    for (int32_t c : choice.diagonals) masses.push_back(pooled[c]);
    std::vector<int32_t> kept;
    for (int32_t place : highest(masses, cap)) kept.push_back(choice.diagonals[place]);
    choice.diagonals = kept;
  }
  return choice;
}

// The first sink_tokens positions of each document of a sample, ascending.
std::vector<int32_t> sink_columns(const VerticalSlashOptions& options, int64_t seq_len,
                                  const int32_t* document_starts) {
  std::vector<int32_t> columns;
  for (int64_t j = 0; j < seq_len; ++j) {
    if (document_starts == nullptr && j >= options.sink_tokens) break;
    if (j - (document_starts == nullptr ? 0 : document_starts[j]) < options.sink_tokens)
      columns.push_back(static_cast<int32_t>(j));
  }
  return columns;
}

std::vector<int32_t> united(const std::vector<int32_t>& a, const std::vector<int32_t>& b) {
  std::vector<int32_t> all;
  std::set_union(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(all));
  return all;
}

// Rows (sample, head) of `heads` take all diagonals and no columns.
void make_dense(index::Index& index, const std::vector<uint8_t>& heads) {
  if (std::find(heads.begin(), heads.end(), 1) == heads.end()) return;
  std::vector<int32_t> all(index.num_blocks());
  std::iota(all.begin(), all.end(), 0);
  std::vector<std::vector<int32_t>> diagonals, columns;
  for (int64_t row = 0; row < index.diagonals.rows; ++row) {
    const auto d = index.diagonals.row(row), c = index.columns.row(row);
    diagonals.push_back(heads[row] != 0 ? all : std::vector<int32_t>(d.begin(), d.end()));
    columns.push_back(heads[row] != 0 ? std::vector<int32_t>()
                                      : std::vector<int32_t>(c.begin(), c.end()));
    if (heads[row] != 0) index.dense_heads[row] = 1;
  }
  index.diagonals = index::make_lists(diagonals);
  index.columns = index::make_lists(columns);
}

}  // namespace

index::Index build_vertical_slash(const LocalAttention& local, const VerticalSlashOptions& options,
                                  comm::Communicator& group) {
  check_call(local, options, group);
  const layout::Layout& layout = *local.layout;
  const int64_t seq_len = layout.seq_len(), num_blocks = (seq_len + kBlock - 1) / kBlock;
  const int64_t heads = local.num_q_heads;
  const int64_t shared = options.selection == Selection::kKvGroup ? heads / local.num_kv_heads
                                                                  : 1;  // heads that share a choice
  const int64_t rows = local.batch * heads / shared;

  std::vector<int32_t>
      local_positions;  // of real tokens: a prefix of the shard, since padding comes last
  for (int64_t position : layout.positions(local.cp_rank))
    if (position < seq_len) local_positions.push_back(static_cast<int32_t>(position));
  const int64_t num_local = static_cast<int64_t>(local_positions.size());

  Observation::Masses masses = Observation(local, window_positions(options, seq_len), group)
                                   .masses(options.slash_pooling != SlashPooling::kBlock);
  std::vector<int64_t> by_column(rows * num_local, 0);
  for (int64_t row = 0; row < local.batch * heads; ++row)
    for (int64_t t = 0; t < num_local; ++t)
      by_column[row / shared * num_local + t] += masses.columns[row * layout.tokens_per_rank() + t];
  if (shared > 1) {
    masses.diagonals = sum_groups(masses.diagonals, num_blocks + 1, shared);
    masses.offsets = sum_groups(masses.offsets, masses.offsets.empty() ? 0 : seq_len, shared);
  }

  const std::vector<SelectedKeys> keys =
      distributed_top_p(by_column, local_positions, rows, seq_len, options.p_vertical,
                        options.max_columns.value_or(-1), group);

  std::vector<int32_t> local_diagonals(std::min<int64_t>(options.local_blocks, num_blocks));
  std::iota(local_diagonals.begin(), local_diagonals.end(), 0);
  std::vector<std::vector<int32_t>> diagonals, columns;
  int64_t caps_hit = 0;
  std::vector<int32_t> sinks;
  for (int64_t row = 0; row < local.batch * heads; ++row) {
    const int64_t choice_row = row / shared, sample = row / heads;
    if (row % heads == 0)
      sinks = sink_columns(
          options, seq_len,
          local.document_starts == nullptr ? nullptr : local.document_starts + sample * seq_len);
    const std::span<const int64_t> pooled(&masses.diagonals[choice_row * (num_blocks + 1)],
                                          num_blocks);  // without c = NB
    const std::span<const int64_t> offsets =
        masses.offsets.empty()
            ? std::span<const int64_t>()
            : std::span<const int64_t>(&masses.offsets[choice_row * seq_len], seq_len);
    const Choice choice = choose_diagonals(options, pooled, offsets);
    diagonals.push_back(united(choice.diagonals, local_diagonals));
    columns.push_back(united(keys[choice_row].positions, sinks));
    if (choice.cut || keys[choice_row].cut) ++caps_hit;
  }
  index::Index index = index::make_index(static_cast<int>(local.batch), static_cast<int>(heads),
                                         seq_len, std::move(diagonals), std::move(columns));
  index.dense_heads.assign(local.batch * heads, 0);
  index.caps_hit = caps_hit;

  // Both sides counted alike (whole blocks), so that a short sequence is no different from a long one.
  if (options.dense_threshold < 1) {
    const double causal_pairs =
        static_cast<double>(num_blocks * (num_blocks + 1) / 2 * kBlock * kBlock);
    std::vector<uint8_t> dense(local.batch * heads, 0);
    for (int64_t row = 0; row < local.batch * heads; ++row) {
      const double pairs = static_cast<double>(index::computed_pairs(
          index, static_cast<int>(row / heads), static_cast<int>(row % heads)));
      dense[row] = pairs >= options.dense_threshold * causal_pairs;
    }
    make_dense(index, dense);
  }
  if (options.recall_floor > 0) {
    const Recall recall = measure_recall(local, options, index, group, kFloorSeed);
    std::vector<uint8_t> dense(local.batch * heads, 0);
    for (int64_t row = 0; row < local.batch * heads;
         ++row)  // heads that share a choice go dense together
      if (recall.by_head[row] < options.recall_floor)
        for (int64_t other = row / shared * shared; other < row / shared * shared + shared; ++other)
          dense[other] = 1;
    make_dense(index, dense);
  }
  return index;
}

Recall measure_recall(const LocalAttention& local, const VerticalSlashOptions& options,
                      const index::Index& index, comm::Communicator& group, uint64_t seed) {
  check_call(local, options, group);
  const int64_t seq_len = local.layout->seq_len(), rows = local.batch * local.num_q_heads;
  MT_CHECK_ARG(index.batch == local.batch && index.num_q_heads == local.num_q_heads &&
                   index.seq_len == seq_len,
               "index: expected batch ", local.batch, ", ", local.num_q_heads, " heads, seq_len ",
               seq_len, ", got ", index.batch, ", ", index.num_q_heads, ", ", index.seq_len);
  const std::vector<int32_t> window = window_positions(options, seq_len);
  const std::vector<int32_t> sampled =
      sampled_positions(window, seq_len, options.recall_rows, seed);
  const auto recall_by_head = [&](std::vector<int32_t> positions) {
    const Observation observation(local, std::move(positions), group);
    const std::vector<int64_t> covered = observation.covered(index);
    std::vector<double> recall(rows);
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t* first = &covered[row * observation.num_rows()];
      const int64_t sum = std::accumulate(first, first + observation.num_rows(), int64_t{0});
      // Each mass is rounded, so that a row's masses add up to 1 within some 2^-40 a key only.
      recall[row] =
          std::min(1.0, static_cast<double>(sum) /
                            static_cast<double>(kernels::kMassOne * observation.num_rows()));
    }
    return recall;
  };
  Recall recall;
  const std::vector<double> on_window = recall_by_head(window);
  recall.by_head = sampled.empty() ? on_window : recall_by_head(sampled);
  recall.window =
      std::accumulate(on_window.begin(), on_window.end(), 0.0) / static_cast<double>(rows);
  recall.sampled = std::accumulate(recall.by_head.begin(), recall.by_head.end(), 0.0) /
                   static_cast<double>(rows);
  recall.sampled_worst = *std::min_element(recall.by_head.begin(), recall.by_head.end());
  return recall;
}

}  // namespace mtraining::pattern
