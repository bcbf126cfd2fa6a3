// Parts of a step: by the host's clock here; on a GPU their order and their sum. And how often a step on a GPU makes the host wait.
#include "mtraining/train/part_times.h"

#include <ATen/ATen.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "mtraining/testing/gpu.h"
#include "mtraining/train/tiny_run_case.h"

namespace mtraining::train {
namespace {

const trace::Span& named(const std::vector<trace::Span>& spans, const std::string& name) {
  for (const trace::Span& span : spans)
    if (span.name == name) return span;
  throw InvalidArgument(name + ": no such span");
}

TEST(PartTimes, PartsLieWithinOneAnotherOnTheDeviceAsTheyWereBegun) {
  MT_NEEDS_GPU();
  const at::Device gpu(at::kCUDA, 0);
  const at::Tensor a = at::ones({2048, 2048}, at::TensorOptions(gpu).dtype(at::kFloat));
  at::mm(a, a);
  PartTimes times(gpu);
  trace::SpanRecorder recorder;
  times.begin("not recorded", "step", 1);
  times.end("not recorded");
  times.record(true);
  const int64_t before = trace::now_us();
  times.begin("outer", "step", 1);
  times.begin("left open", "model", 1);
  times.begin("first", "model", 1, 0);
  for (int i = 0; i < 20; ++i) at::mm(a, a);
  times.end("first");
  times.begin("second", "model", 1, 0);
  for (int i = 0; i < 40; ++i) at::mm(a, a);
  times.end("second");
  times.end("outer");
  times.collect(recorder);
  const int64_t after = trace::now_us();
  const auto& spans = recorder.spans();
  ASSERT_EQ(spans.size(), 3u);
  const trace::Span &outer = named(spans, "outer"), &first = named(spans, "first"),
                    &second = named(spans, "second");
  EXPECT_LE(outer.begin_us, first.begin_us + 1);
  EXPECT_LT(first.begin_us, first.end_us);
  EXPECT_LE(first.end_us, second.begin_us + 1);
  EXPECT_LE(second.end_us, outer.end_us + 1);
  // Others may use the device too: how long a product takes is nobody's promise, but most of the host's wait lies in these parts.
  const auto length = [](const trace::Span& s) { return double(s.end_us - s.begin_us); };
  EXPECT_LE(length(first) + length(second), length(outer) + 2);
  EXPECT_GT(length(outer), 0.2 * double(after - before));
  EXPECT_GE(outer.begin_us, before - 1000);
  EXPECT_LE(outer.end_us, after + 1000);
}

/// Hears what torch says where the host waits for the device.
class Waits : public c10::WarningHandler {
 public:
  Waits() : guard_(this) {
    c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_WARN);
  }
  ~Waits() override {
    c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_DISABLED);
  }
  void process(const c10::Warning& warning) override {
    if (warning.msg().find("synchroniz") != std::string::npos) ++count;
  }
  int count = 0;

 private:
  c10::WarningUtils::WarningHandlerGuard guard_;
};

int waits_of_a_step(int64_t layers, int64_t accumulation, pattern::PatternKind pattern) {
  const TinyData data;
  RunConfig config = tiny_config(data);
  config.train.device = DeviceKind::kCuda;
  config.model.dtype = at::kBFloat16;
  config.model.head_dim = 64;
  config.model.hidden_size = 64;
  config.model.num_hidden_layers = layers;
  config.attention.pattern = pattern;
  config.train.recompute = Recompute::kLayer;
  config.train.mlp_tile = 128;
  config.train.global_batch_size = accumulation;
  config.train.steps = 3;
  topology::LaunchEnvironment launch;
  const ResolvedRun resolved = resolve(config, launch);
  const auto transport = comm::make_single();
  Trainer trainer(config, resolved, *transport);
  trainer.step(0);
  Waits waits;
  trainer.step(1);
  EXPECT_GT(waits.count, 0) << "loss and norm are read at the end, and nobody saw it";
  return waits.count;
}

TEST(TrainerOnAGpu, WaitsForItAtTheEndOfAStepAlone) {
  MT_NEEDS_GPU();
  for (const auto pattern : {pattern::PatternKind::kDense, pattern::PatternKind::kVerticalSlash}) {
    const int once = waits_of_a_step(1, 1, pattern);
    EXPECT_EQ(waits_of_a_step(3, 1, pattern), once) << static_cast<int>(pattern);
    // Each micro-step's loss is one number to read, after the last one.
    EXPECT_LE(waits_of_a_step(2, 4, pattern), once + 3) << static_cast<int>(pattern);
  }
}

}  // namespace
}  // namespace mtraining::train
