// Answer: what a model says to a sample, and what that is worth.
//
// In:   a Sample, a model as two functions of tokens. Out: new tokens or log-likelihoods of options, and a score from 0 to 1.
// Next: results.h keeps it, summary.h adds it up.
//
// Tokens are compared, not text: an answer is found where one of its spellings stands among the new tokens, whole and in order.
// `python -m mtraining.tasks score` scores the text instead, after each test's own rules.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "mtraining/eval/samples.h"

namespace mtraining::eval {

struct Model {
  /// At most sample.max_new_tokens ids after sample.ids, up to and with the first of sample.stops.
  std::function<std::vector<int64_t>(const Sample& sample)> generate;
  /// The log-likelihood of each of sample.options after sample.ids.
  std::function<std::vector<double>(const Sample& sample)> option_log_likelihoods;
};

struct Answer {
  std::vector<int64_t> output;          ///< generation
  std::vector<double> log_likelihoods;  ///< choice
  std::optional<int64_t> choice;        ///< the first of the most likely options
  std::optional<double> score;          ///< none where the sample has no answers
};

Answer answer(const Sample& sample, const Model& model);

}  // namespace mtraining::eval
