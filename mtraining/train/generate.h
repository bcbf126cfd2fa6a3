// Generator: continues token ids greedily: the prompt in one pass with the run's pattern, then token by token over a cache; or says
// how likely given continuations are.
//
// In:   RunConfig (model, init_from, attention), token ids. Out: the most likely next ids, one after another; log-likelihoods.
// Next: cli/generate.cc, cli/eval_tasks.cc.
//
// The prompt's keys and values of every layer are kept; a new token attends to all of them, densely: one row costs as much as its keys.
// On one rank.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "mtraining/train/config.h"

namespace mtraining::train {

class Generator {
 public:
  /// `config` has been through resolve() for one rank; its weights are those of init_from. Errors: those of checkpoint::load_weights.
  Generator(const RunConfig& config, const ResolvedRun& resolved);
  ~Generator();
  Generator(const Generator&) = delete;
  Generator& operator=(const Generator&) = delete;

  /// At most max_new_tokens ids, up to and with the first of `stops`; of equal logits the lower id. Errors: InvalidArgument where the
  /// prompt is empty, holds ids outside the vocabulary, or where pattern and length do not fit (layer_patterns); NotFinite.
  std::vector<int64_t> continue_greedily(const std::vector<int64_t>& prompt, int64_t max_new_tokens,
                                         std::span<const int64_t> stops = {});

  /// The natural logarithm of each option's probability after the prompt: the sum over its tokens, each given those before it. The
  /// prompt is read once. Errors: those of continue_greedily; InvalidArgument where there is no option, or an empty one.
  std::vector<double> option_log_likelihoods(const std::vector<int64_t>& prompt,
                                             const std::vector<std::vector<int64_t>>& options);

  /// Prompts that follow are read with these patterns.
  void attend_with(const AttentionSection& attention);
  /// Of the last prompt: index::density, mean over layers; 0 before the first.
  double prompt_density() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace mtraining::train
