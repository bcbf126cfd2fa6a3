// Score: the mean loss of given weights over a whole token file, window by window, each token but the first exactly once.
//
// In:   RunConfig (model, init_from, attention), a token file. Out: loss, density, recall, for one pattern after another.
// Next: cli/eval.cc prints them.
//
// A window reads `window` tokens and predicts the one after each of them, so that window + 1 tokens of the file take part. Windows
// begin `stride` apart, the last one ends with the file; a token that two windows predict counts in the first. With a stride
// below the window every token but those of the first window has at least window - stride tokens before it in its window.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "mtraining/comm/transport.h"
#include "mtraining/train/config.h"
#include "mtraining/train/layer_patterns.h"

namespace mtraining::train {

/// Tokens [begin, begin + window) are read; tokens [first_label, begin + window] are scored.
struct TokenWindow {
  int64_t begin = 0, first_label = 0;
};
/// Ascending; tokens 1 .. num_tokens - 1 are scored once each. Errors: InvalidArgument unless 1 <= window < num_tokens and
/// 1 <= stride <= window.
std::vector<TokenWindow> token_windows(int64_t num_tokens, int64_t window, int64_t stride);

struct Score {
  double loss = 0;     ///< mean over scored tokens, natural logarithm; 0 where none has a label
  int64_t tokens = 0;  ///< scored: those that a loss mask does not take away
  int64_t windows = 0;
  double density = 1;
  std::vector<double> density_by_layer;
  std::vector<double> recall_by_layer;  ///< rows sampled elsewhere; 1 where a layer is dense
  double recall = 1, recall_worst = 1;  ///< mean, and the worst head's
};

class Scorer {
 public:
  /// Collective over the transport, whose ranks are one context-parallel group. `config` has been through resolve(); its weights are
  /// those of init_from, its window is train.seq_len. Errors: those of checkpoint::load_weights and data::TokenFile.
  Scorer(const RunConfig& config, const ResolvedRun& resolved, comm::Transport& transport,
         const std::string& tokens);
  ~Scorer();
  Scorer(const Scorer&) = delete;
  Scorer& operator=(const Scorer&) = delete;

  int64_t num_tokens() const;
  /// Collective. max_windows: the first so many; 0: all. Errors: those of token_windows; NotFinite where q or k are not.
  Score run(const LayerPatterns& patterns, int64_t stride, int64_t max_windows = 0);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace mtraining::train
