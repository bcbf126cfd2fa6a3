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

void check_call(const LocalAttention& local, const VerticalSlashOptions& options,
                comm::Communicator& group) {
  check(options);
  check_local("vertical_slash", local, group);
  const int64_t widest =
      options.selection == Selection::kKvGroup ? local.num_q_heads / local.num_kv_heads : 1;
  const int64_t window_rows =
      local.document_starts == nullptr ? options.last_q : max_window_rows(options);
  MT_CHECK_SUPPORTED(widest * window_rows < (1 << 17), "selection: kv_group over ", widest,
                     " heads with last_q ", options.last_q, " (", window_rows,
                     " observation rows): their product must stay below ", 1 << 17,
                     " for the masses to fit 64 bits");
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

/// The masses of every sample's window.
Observation::Masses observe(const LocalAttention& local, const VerticalSlashOptions& options,
                            comm::Communicator& group) {
  const int64_t seq_len = local.layout->seq_len();
  const bool with_offsets = options.slash_pooling != SlashPooling::kBlock;
  if (!has_windows_by_sample(local, options)) {
    return Observation(local, window_positions(options, seq_len, local.document_starts), group)
        .masses(with_offsets);
  }
  Observation::Masses all;
  for (int64_t b = 0; b < local.batch; ++b) {
    const LocalAttention sample = sample_of(local, b);
    const Observation::Masses one = observe(sample, options, group);
    all.columns.insert(all.columns.end(), one.columns.begin(), one.columns.end());
    all.diagonals.insert(all.diagonals.end(), one.diagonals.begin(), one.diagonals.end());
    all.offsets.insert(all.offsets.end(), one.offsets.begin(), one.offsets.end());
  }
  return all;
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

  Observation::Masses masses = observe(local, options, group);
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
    std::vector<uint8_t> dense(local.batch * heads, 0);
    for (int64_t row = 0; row < local.batch * heads; ++row) {
      std::span<const int32_t> documents;
      if (local.document_starts != nullptr)
        documents = {local.document_starts + row / heads * seq_len, static_cast<size_t>(seq_len)};
      const auto pairs = static_cast<double>(index::computed_pairs(
          index, static_cast<int>(row / heads), static_cast<int>(row % heads), documents));
      dense[row] = pairs >= options.dense_threshold *
                                static_cast<double>(index::dense_pairs(seq_len, documents));
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

VerticalSlashOptions options_of(const FixedBudgets& budgets, const VerticalSlashOptions& options) {
  check(budgets);
  VerticalSlashOptions capped = options;
  capped.p_vertical = capped.p_slash = 1;
  capped.max_columns = budgets.columns;
  capped.max_diagonals = budgets.diagonals;
  capped.dense_threshold = 1;
  capped.recall_floor = 0;
  return capped;
}

index::Index build_fixed(const LocalAttention& local, const VerticalSlashOptions& options,
                         const FixedBudgets& budgets, comm::Communicator& group) {
  index::Index index = build_vertical_slash(local, options_of(budgets, options), group);
  index.caps_hit = 0;  // the budget is the choice, it cuts none
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
  // Recall by (sample, head) on the window, or on rows elsewhere; empty where there are none.
  const auto recall_of = [&](const LocalAttention& part, const index::Index& chosen,
                             bool elsewhere) {
    std::vector<int32_t> positions = window_positions(options, seq_len, part.document_starts);
    if (elsewhere) positions = sampled_positions(positions, seq_len, options.recall_rows, seed);
    std::vector<double> recall;
    if (positions.empty()) return recall;
    const Observation observation(part, std::move(positions), group);
    const std::vector<int64_t> covered = observation.covered(chosen);
    for (int64_t row = 0; row < part.batch * part.num_q_heads; ++row) {
      const int64_t* first = &covered[row * observation.num_rows()];
      const int64_t sum = std::accumulate(first, first + observation.num_rows(), int64_t{0});
      // Each mass is rounded, so that a row's masses add up to 1 within some 2^-40 a key only.
      recall.push_back(
          std::min(1.0, static_cast<double>(sum) /
                            static_cast<double>(kernels::kMassOne * observation.num_rows())));
    }
    return recall;
  };
  std::vector<double> on_window;
  Recall recall;
  const int64_t parts = has_windows_by_sample(local, options) ? local.batch : 1;
  for (int64_t b = 0; b < parts; ++b) {
    const LocalAttention part = parts == 1 ? local : sample_of(local, b);
    const index::Index chosen = parts == 1 ? index : index::sample_of(index, static_cast<int>(b));
    const std::vector<double> here = recall_of(part, chosen, false);
    std::vector<double> there = recall_of(part, chosen, true);
    if (there.empty()) there = here;
    on_window.insert(on_window.end(), here.begin(), here.end());
    recall.by_head.insert(recall.by_head.end(), there.begin(), there.end());
  }
  recall.window =
      std::accumulate(on_window.begin(), on_window.end(), 0.0) / static_cast<double>(rows);
  recall.sampled = std::accumulate(recall.by_head.begin(), recall.by_head.end(), 0.0) /
                   static_cast<double>(rows);
  recall.sampled_worst = *std::min_element(recall.by_head.begin(), recall.by_head.end());
  return recall;
}

}  // namespace mtraining::pattern
