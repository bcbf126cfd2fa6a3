#include "mtraining/base/check.h"
#include "mtraining/pattern/pattern.h"

namespace mtraining::pattern {
namespace {

void check_share(const char* key, double value) {
  MT_CHECK_ARG(value >= 0 && value <= 1, key, ": expected a number in [0, 1], got ", value);
}

void check_at_least(const char* key, int64_t value, int64_t least) {
  MT_CHECK_ARG(value >= least, key, ": expected at least ", least, ", got ", value);
}

/// A sequence has fewer positions than that; sums with forced ones stay far from 2^63.
void check_cap(const char* key, int64_t value) {
  check_at_least(key, value, 0);
  MT_CHECK_ARG(value < int64_t{1} << 31, key, ": expected a number below 2^31, got ", value);
}

}  // namespace

std::string_view to_string(PatternKind kind) { return word_of(kPatternWords, kind); }

SlashPooling parse_slash_pooling(std::string_view name) {
  return parse_word("slash_pooling", name, kPoolingWords);
}

Selection parse_selection(std::string_view name) {
  return parse_word("selection", name, kSelectionWords);
}

Window parse_window(std::string_view name) { return parse_word("window", name, kWindowWords); }

void check(const VerticalSlashOptions& options) {
  check_share("p_vertical", options.p_vertical);
  check_share("p_slash", options.p_slash);
  check_at_least("last_q", options.last_q, 1);
  MT_CHECK_ARG(options.last_q <= kMaxObservationRows, "last_q: expected at most ",
               kMaxObservationRows, ", got ", options.last_q);
  check_at_least("sink_tokens", options.sink_tokens, 0);
  check_at_least("local_blocks", options.local_blocks, 1);
  if (options.max_columns) check_cap("max_columns", *options.max_columns);
  if (options.max_diagonals) check_cap("max_diagonals", *options.max_diagonals);
  MT_CHECK_ARG(options.dense_threshold > 0,
               "dense_threshold: expected a number above 0 (1: off), got ",
               options.dense_threshold);
  check_share("recall_floor", options.recall_floor);
  check_at_least("recall_rows", options.recall_rows, 1);
  MT_CHECK_ARG(options.recall_rows <= kMaxObservationRows, "recall_rows: expected at most ",
               kMaxObservationRows, ", got ", options.recall_rows);
}

void check(const FixedBudgets& budgets) {
  check_cap("fixed_columns", budgets.columns);
  check_cap("fixed_diagonals", budgets.diagonals);
}

void check(const XAttentionOptions& options) {
  check_at_least("xattention_stride", options.stride, 1);
  MT_CHECK_ARG(options.block > 0 && options.block % layout::kBlock == 0,
               "xattention_block: expected a multiple of ", layout::kBlock, ", got ",
               options.block);
  MT_CHECK_ARG(options.block % options.stride == 0, "xattention_stride: expected a divisor of ",
               "xattention_block = ", options.block, ", got ", options.stride);
  check_share("xattention_threshold", options.threshold);
}

void check(const MobaOptions& options) {
  MT_CHECK_ARG(options.chunk > 0 && options.chunk % layout::kBlock == 0,
               "moba_chunk: expected a multiple of ", layout::kBlock, ", got ", options.chunk);
  check_at_least("moba_top_k", options.top_k, 1);
}

}  // namespace mtraining::pattern
