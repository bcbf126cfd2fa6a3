// Summary: mean scores by task, length and depth.
//
// In:   results of one pattern. Out: rows: (task, length, depth), (task, length), task, length, all.
// Next: cli/eval_tasks.cc prints them.
//
// A score of several tasks is the mean over tasks of each one's mean, whatever their numbers of samples. Levels that nothing
// distinguishes are left out: depth where no sample has one, length where none has one.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "mtraining/eval/results.h"

namespace mtraining::eval {

struct SummaryRow {
  std::string by;  ///< "task,length,depth", "task,length", "task", "length", "all"
  std::optional<std::string> task;
  std::optional<int64_t> length;
  std::optional<double> depth;
  int64_t samples = 0;
  int64_t scored = 0;     ///< of them, those with a score
  int64_t truncated = 0;  ///< of them, those whose context was cut
  double mean_prompt_tokens = 0;
  std::optional<double> score;  ///< none where no sample has one
};

class Summary {
 public:
  void add(const Result& result) { results_.push_back(result); }
  /// Ascending by task, length, depth within each `by`. None for no results.
  std::vector<SummaryRow> rows() const;

 private:
  std::vector<Result> results_;
};

}  // namespace mtraining::eval
