#include "bench/step_phases.h"

#include <gtest/gtest.h>

#include <map>

#include "mtraining/base/check.h"

namespace mtraining::bench {
namespace {

using trace::Span;

Span span(const char* name, const char* row, int64_t begin_us, int64_t end_us, int64_t layer = -1,
          int64_t step = 1) {
  return {.name = name,
          .row = row,
          .begin_us = begin_us,
          .end_us = end_us,
          .train_step = step,
          .layer = layer};
}

/// One layer, recomputed, on a GPU: 1000 us a step.
std::vector<Span> one_step(int64_t step) {
  const int64_t t = step * 5000;
  return {span("train_step", "step", t, t + 1000, -1, step),
          span("forward", "step", t + 10, t + 300, -1, step),
          span("embed", "model", t + 10, t + 20, -1, step),
          span("attention_input", "model", t + 20, t + 60, 0, step),
          span("norm", "model", t + 20, t + 25, 0, step),
          span("attention", "model", t + 60, t + 160, 0, step),
          span("index", "ring", t + 61, t + 71, 0, step),
          span("forward", "ring", t + 75, t + 150, 0, step),
          span("mlp", "model", t + 160, t + 200, 0, step),
          span("head_and_loss", "model", t + 200, t + 300, -1, step),
          span("backward", "step", t + 300, t + 900, -1, step),
          span("recompute", "model", t + 300, t + 420, 0, step),
          span("forward", "ring", t + 330, t + 400, 0, step),
          span("mlp backward", "model", t + 420, t + 520, 0, step),
          span("backward", "ring", t + 530, t + 700, 0, step),
          span("attention_input backward", "model", t + 720, t + 800, 0, step),
          span("optimizer", "step", t + 900, t + 980, -1, step)};
}

std::map<std::string, double> by_name(const StepPhases& phases) {
  return {phases.ms.begin(), phases.ms.end()};
}

TEST(StepPhases, OfAGpusStepAddUpToIt) {
  std::vector<Span> spans = one_step(1), second = one_step(2);
  spans.insert(spans.end(), second.begin(), second.end());
  const StepPhases phases = step_phases(spans, 2);
  const auto ms = by_name(phases);
  EXPECT_DOUBLE_EQ(phases.step_ms, 1);
  EXPECT_NEAR(ms.at("index"), .010, 1e-12);
  EXPECT_NEAR(ms.at("attention_forward"), .090 + .070, 1e-12) << "the second run's too";
  EXPECT_NEAR(ms.at("recompute"), .050, 1e-12) << "without attention's kernels";
  EXPECT_NEAR(ms.at("attention_backward"), .200, 1e-12) << "all between its two neighbours";
  EXPECT_NEAR(ms.at("mlp_backward"), .100, 1e-12);
  EXPECT_NEAR(ms.at("attention_input_backward"), .080, 1e-12);
  EXPECT_NEAR(phases.norm_ms, .005, 1e-12);
  EXPECT_NEAR(phases.attention_ms, .370, 1e-12);
  EXPECT_NEAR(phases.optimizer_ms, .080, 1e-12);
  EXPECT_NEAR(phases.layers_ms, .040 + .100 + .040 + .120 + .380, 1e-12);
  double sum = 0;
  for (const auto& [name, each] : phases.ms) sum += each;
  EXPECT_NEAR(sum, phases.step_ms, 1e-12);
}

TEST(StepPhases, OfACpusStepHaveOneBackward) {
  const std::vector<Span> spans = {span("train_step", "step", 0, 100),
                                   span("attention", "model", 10, 20, 0),
                                   span("backward", "step", 40, 90)};
  const StepPhases phases = step_phases(spans, 1);
  EXPECT_NEAR(by_name(phases).at("backward"), .05, 1e-12);
  EXPECT_NEAR(by_name(phases).at("other"), .04, 1e-12);
  EXPECT_THROW(step_phases(spans, 0), InvalidArgument);
}

}  // namespace
}  // namespace mtraining::bench
