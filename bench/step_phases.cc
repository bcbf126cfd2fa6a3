#include "bench/step_phases.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "mtraining/base/check.h"

namespace mtraining::bench {
namespace {

double ms_of(const trace::Span& span) {
  return static_cast<double>(span.end_us - span.begin_us) * 1e-3;
}
bool within(const trace::Span& inner, const trace::Span& outer) {
  return inner.begin_us >= outer.begin_us && inner.begin_us < outer.end_us;
}

}  // namespace

StepPhases step_phases(const std::vector<trace::Span>& spans, int64_t steps) {
  MT_CHECK_ARG(steps >= 1, "phases: expected at least one train step, got ", steps);
  std::map<std::string, double> sums;  // of rows "step" and "model"
  // mlp backward by (step, layer), in the order of micro-steps; likewise the other end of attention's backward.
  std::map<std::pair<int64_t, int64_t>, std::vector<const trace::Span*>> mlp, input;
  std::vector<const trace::Span*> attentions, recomputes;
  for (const trace::Span& span : spans) {
    if (span.row != "step" && span.row != "model") continue;
    sums[span.name] += ms_of(span);
    if (span.name == "mlp backward") mlp[{span.train_step, span.layer}].push_back(&span);
    if (span.name == "attention_input backward")
      input[{span.train_step, span.layer}].push_back(&span);
    if (span.name == "attention") attentions.push_back(&span);
    if (span.name == "recompute") recomputes.push_back(&span);
  }
  double attention_backward = 0;
  for (const auto& [place, ends] : input) {
    const auto& begins = mlp[place];
    for (size_t i = 0; i < std::min(begins.size(), ends.size()); ++i)
      attention_backward += static_cast<double>(ends[i]->begin_us - begins[i]->end_us) * 1e-3;
  }
  double index = 0, index_in_attention = 0, again = 0;
  const auto inside = [](const trace::Span& span, const std::vector<const trace::Span*>& outer) {
    return std::any_of(outer.begin(), outer.end(), [&](auto* each) { return within(span, *each); });
  };
  for (const trace::Span& span : spans) {
    if (span.row != "ring") continue;
    if (span.name == "index") {
      index += ms_of(span);
      if (inside(span, attentions)) index_in_attention += ms_of(span);
    } else if (span.name != "backward" && inside(span, recomputes)) {
      again += ms_of(span);
    }
  }
  const auto per_step = [&](double ms) { return ms / static_cast<double>(steps); };
  StepPhases result;
  result.step_ms = per_step(sums["train_step"]);
  result.optimizer_ms = per_step(sums["optimizer"]);
  result.norm_ms = per_step(sums["norm"]);
  double known = 0;
  const auto add = [&](const char* name, double ms, bool of_layers, bool of_attention) {
    if (ms == 0) return;
    result.ms.emplace_back(name, per_step(ms));
    known += per_step(ms);
    if (of_layers) result.layers_ms += per_step(ms);
    if (of_attention) result.attention_ms += per_step(ms);
  };
  const bool by_layer = !input.empty();
  add("batch", sums["batch"], false, false);
  add("embed", sums["embed"], false, false);
  add("index", index, true, true);
  add("attention_forward", sums["attention"] - index_in_attention + again, true, true);
  add("attention_input", sums["attention_input"], true, false);
  add("mlp", sums["mlp"], true, false);
  add("head_and_loss", sums["head_and_loss"], false, false);
  if (by_layer) {
    add("recompute", sums["recompute"] - again, true, false);
    add("mlp_backward", sums["mlp backward"], true, false);
    add("attention_backward", attention_backward, true, true);
    add("attention_input_backward", sums["attention_input backward"], true, false);
  } else {
    add("backward", sums["backward"], true, false);
  }
  add("reduce", sums["reduce"], false, false);
  add("optimizer", sums["optimizer"], false, false);
  result.ms.emplace_back("other", result.step_ms - known);
  return result;
}

}  // namespace mtraining::bench
