// StepPhases: where the time of a train step went, from the spans of its trace.
//
// In:   spans of one rank (trace/), a number of train steps. Out: milliseconds a step by phase; what the layers take of it.
// Next: train_bench.h prints them.
//
// A layer's backward is three stretches one behind another: "mlp backward", attention's, "attention_input backward"; attention's is what
// lies between the other two. A second run of a layer ("recompute") may hold attention's kernels once more (ring spans): they
// count as attention. On the CPU a layer's backward has no spans, and what is known is "forward" and "backward". Torch-free.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "mtraining/trace/chrome_trace.h"

namespace mtraining::bench {

struct StepPhases {
  double step_ms = 0;
  /// In the order of a step. The phases of layers, "embed", "head_and_loss", "optimizer", .. and "other" add up to step_ms.
  std::vector<std::pair<std::string, double>> ms;
  double norm_ms =
      0;  ///< of the phases: within attention_input and mlp, forward (once) and backward
  double layers_ms = 0;     ///< what grows with the number of layers, but for the optimizer
  double attention_ms = 0;  ///< attention's forward (every run), backward and index
  double optimizer_ms = 0;
};

StepPhases step_phases(const std::vector<trace::Span>& spans, int64_t steps);

}  // namespace mtraining::bench
