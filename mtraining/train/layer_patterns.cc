#include "mtraining/train/layer_patterns.h"

#include <algorithm>

#include "mtraining/base/check.h"
#include "mtraining/sim/pattern_file.h"

namespace mtraining::train {
namespace {

using pattern::PatternKind;

void check_section(const std::string& where, const PatternSection& section,
                   layout::LayoutKind layout) {
  try {
    pattern::check(section.options);
    pattern::check(section.xattention);
    pattern::check(section.moba);
    pattern::check(pattern::FixedBudgets{section.fixed_columns.value_or(0),
                                         section.fixed_diagonals.value_or(0)});
  } catch (const InvalidArgument& error) {  // pattern/ knows its keys and not their section
    throw InvalidArgument(concat(where, ".", error.what()));
  }
  const bool budgets = section.fixed_columns && section.fixed_diagonals;
  const bool some = section.fixed_columns || section.fixed_diagonals;
  MT_CHECK_ARG(section.pattern != PatternKind::kFixed ||
                   (section.pattern_file.has_value() ? !some : budgets),
               where,
               ".pattern: \"fixed\" needs pattern_file, or fixed_columns and fixed_diagonals, got ",
               section.pattern_file && some ? "both"
               : some                       ? "one of the two counts"
                                            : "neither");
  MT_CHECK_ARG(!section.estimate.value_or(false) || section.pattern_file.has_value(), where,
               ".estimate: expected false without pattern_file, got true");
  MT_CHECK_ARG(section.options.recall_floor == 0 ||
                   section.pattern == PatternKind::kVerticalSlash ||
                   section.pattern == PatternKind::kDense,
               where, ".recall_floor: expected 0 for pattern = \"", to_string(section.pattern),
               "\", whose heads do not go dense, got ", section.options.recall_floor);
  MT_CHECK_SUPPORTED(
      layout != layout::LayoutKind::kStriped || section.pattern == PatternKind::kDense,
      "attention.layout: \"striped\" has no 64-token blocks, so that it is for "
      "pattern = \"dense\" alone");
}

std::shared_ptr<const index::Index> read_lists(const std::string& where, const std::string& path,
                                               const RunConfig& config) {
  const sim::OffsetPattern lists = sim::read_pattern_file(path);
  MT_CHECK_ARG(lists.seq_len == config.train.seq_len, where, ".pattern_file: ", path,
               ": expected seq_len = train.seq_len = ", config.train.seq_len, ", got ",
               lists.seq_len);
  const int64_t heads = config.model.num_attention_heads;
  MT_CHECK_ARG(static_cast<int64_t>(lists.heads.size()) == heads, where, ".pattern_file: ", path,
               ": expected model.num_attention_heads = ", heads, " heads, got ",
               lists.heads.size());
  std::vector<std::vector<int32_t>> diagonals, columns;
  for (int64_t b = 0; b < config.train.micro_batch_size; ++b) {
    for (const sim::OffsetHead& head : lists.heads) {
      diagonals.push_back(sim::block_diagonals(head, (lists.seq_len + 63) / 64));
      columns.push_back(head.columns);
    }
  }
  return std::make_shared<const index::Index>(
      index::make_index(static_cast<int>(config.train.micro_batch_size), static_cast<int>(heads),
                        lists.seq_len, std::move(diagonals), std::move(columns)));
}

attention::AttentionPattern pattern_of(const std::string& where, const PatternSection& section,
                                       const RunConfig& config) {
  attention::AttentionPattern pattern;
  pattern.kind = section.pattern;
  pattern.vertical_slash = section.options;
  pattern.xattention = section.xattention;
  pattern.moba = section.moba;
  if (section.pattern == PatternKind::kFixed && section.pattern_file) {
    pattern.given = read_lists(where, *section.pattern_file, config);
    pattern.estimate = section.estimate.value_or(false);
  } else if (section.pattern == PatternKind::kFixed) {
    pattern.budgets = {*section.fixed_columns, *section.fixed_diagonals};
  }
  return pattern;
}

std::string where_of(size_t range) { return concat("attention.layers[", range, "]"); }

}  // namespace

void check_patterns(const RunConfig& config) {
  const AttentionSection& a = config.attention;
  const int64_t layers = config.model.num_hidden_layers;
  check_section("attention", a, a.layout);
  std::vector<int64_t> owner(layers, -1);
  for (size_t i = 0; i < a.layers.size(); ++i) {
    const LayerRange& range = a.layers[i];
    MT_CHECK_ARG(range.first >= 0 && range.first <= range.last && range.last < layers, where_of(i),
                 ".range: expected layers of 0 to ", layers - 1, ", got ", range.first, "-",
                 range.last);
    for (int64_t l = range.first; l <= range.last; ++l) {
      MT_CHECK_ARG(owner[l] < 0, where_of(i), ".range: layer ", l, " is in ", where_of(owner[l]),
                   " too");
      owner[l] = static_cast<int64_t>(i);
    }
    check_section(where_of(i), range, a.layout);
  }
}

LayerPatterns layer_patterns(const RunConfig& config) {
  const AttentionSection& a = config.attention;
  LayerPatterns patterns(config.model.num_hidden_layers, pattern_of("attention", a, config));
  for (size_t i = 0; i < a.layers.size(); ++i) {
    std::fill(patterns.begin() + a.layers[i].first, patterns.begin() + a.layers[i].last + 1,
              pattern_of(where_of(i), a.layers[i], config));
  }
  return patterns;
}

LayerPatterns dense_layers(const RunConfig& config) {
  attention::AttentionPattern dense;
  dense.kind = PatternKind::kDense;
  return LayerPatterns(config.model.num_hidden_layers, dense);
}

bool all_dense(const LayerPatterns& patterns) {
  return std::all_of(patterns.begin(), patterns.end(),
                     [](const auto& pattern) { return pattern.kind == PatternKind::kDense; });
}

}  // namespace mtraining::train
