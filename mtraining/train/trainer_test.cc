#include "mtraining/train/trainer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "mtraining/train/part_times.h"
#include "mtraining/train/tiny_run_case.h"

namespace mtraining::train {
namespace {

/// Largest relative difference of loss and gradient norm over all steps.
double worst_difference(const TinyResult& a, const TinyResult& b) {
  EXPECT_EQ(a.steps.size(), b.steps.size());
  double worst = 0;
  for (size_t i = 0; i < a.steps.size(); ++i) {
    worst = std::max(worst, std::abs(a.steps[i].loss - b.steps[i].loss) / a.steps[i].loss);
    worst = std::max(worst,
                     std::abs(a.steps[i].grad_norm - b.steps[i].grad_norm) / a.steps[i].grad_norm);
  }
  return worst;
}
double worst_loss_difference(const TinyResult& a, const TinyResult& b) {
  double worst = 0;
  for (size_t i = 0; i < a.steps.size(); ++i) {
    worst = std::max(worst, std::abs(a.steps[i].loss - b.steps[i].loss) / a.steps[i].loss);
  }
  return worst;
}

/// torch's own attention and loss on one rank: shares nothing with the trainer but the decoder and the batch.
TEST(Trainer, FirstStepEqualsAPlainComputation) {
  const TinyData data;
  RunConfig config = tiny_config(data);
  config.attention.pattern = pattern::PatternKind::kDense;
  config.train.seq_len = 192;
  config.train.global_batch_size = 3;
  config.train.steps = 1;
  const TinyResult result = run_tiny(config, 1, 1);

  data::BatchOptions options = tiny_batches(config);
  options.micro_batch = 3;
  const data::Batch batch = data::Batches(options).batch(
      0, 0, layout::Layout({layout::LayoutKind::kContiguous, config.train.seq_len, 1, 64, 1}), 0);
  const model::DecoderParameters parameters =
      model::init_parameters(config.model, config.train.seed);
  const model::Decoder decoder(config.model, parameters);
  const at::Tensor hidden =
      decoder.forward(batch.ids, batch.positions,
                      [](int64_t, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
                        return at::scaled_dot_product_attention(
                                   q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), {}, 0.0,
                                   true, std::nullopt, true)
                            .transpose(1, 2);
                      });
  const at::Tensor loss = at::cross_entropy_loss(
      at::linear(hidden, decoder.head_weight()).flatten(0, 1), batch.labels.flatten());
  loss.backward();
  double square = 0;
  for (const auto& p : parameters.list())
    square += p.value.grad().to(at::kDouble).square().sum().item<double>();
  EXPECT_NEAR(result.steps[0].loss / loss.item<double>(), 1, 1e-5);
  EXPECT_NEAR(result.steps[0].grad_norm / std::sqrt(square), 1, 1e-4);
}

struct Split {
  const char* name;
  int ranks, ranks_per_node, dp_size;
  ring::RingKind ring;
  ring::InnerKind inner;
};
const std::vector<Split> kSplits = {
    {"cp 4 flat", 4, 4, 1, ring::RingKind::kFlat, ring::InnerKind::kGather},
    {"cp 4 hierarchical 2x2 gather", 4, 2, 1, ring::RingKind::kHierarchical,
     ring::InnerKind::kGather},
    {"cp 4 hierarchical 2x2 ring", 4, 2, 1, ring::RingKind::kHierarchical, ring::InnerKind::kRing},
};

RunConfig with_split(RunConfig config, const Split& split) {
  config.attention.ring = split.ring;
  config.attention.inner = split.inner;
  config.parallel.dp_size = split.dp_size;
  config.parallel.cp_inner_size = split.ranks_per_node;
  return config;
}

TEST(Trainer, DenseRunIsTheSameForEveryRing) {
  const TinyData data;
  RunConfig config = tiny_config(data);
  config.attention.pattern = pattern::PatternKind::kDense;
  const TinyResult one = run_tiny(config, 1, 1);
  EXPECT_LT(one.steps.back().loss, one.steps.front().loss - 0.3);  // it learns
  for (const Split& split : kSplits) {
    const TinyResult many = run_tiny(with_split(config, split), split.ranks, split.ranks_per_node);
    EXPECT_LT(worst_difference(one, many), 1e-5) << split.name;
    EXPECT_TRUE(many.ranks_agree) << split.name;
    EXPECT_NEAR(many.valid_loss / one.valid_loss, 1, 1e-5) << split.name;
  }
}

TEST(Trainer, SparseRunWithAReplayedIndexIsTheSameForEveryRing) {
  const TinyData data;
  const RunConfig config = tiny_config(data);
  const TinyResult one = run_tiny(config, 1, 1);
  EXPECT_LT(one.steps.back().attention_density, 0.95);  // sparse indeed
  for (const Split& split : kSplits) {
    const RunConfig split_config = with_split(config, split);
    const TinyResult replayed =
        run_tiny(split_config, split.ranks, split.ranks_per_node, &one.indices);
    EXPECT_LT(worst_difference(one, replayed), 1e-5) << split.name;
    EXPECT_TRUE(replayed.ranks_agree) << split.name;
    const TinyResult online = run_tiny(split_config, split.ranks, split.ranks_per_node);
    EXPECT_LT(worst_loss_difference(one, online), 1e-3) << split.name;
    EXPECT_TRUE(online.ranks_agree) << split.name;
  }
}

TEST(Trainer, ContextAndDataParallelSplitsGiveOneLossAndOneGradient) {
  const TinyData data;
  RunConfig config = tiny_config(data);
  config.attention.pattern = pattern::PatternKind::kDense;
  config.train.seq_len = 200;  // divides nothing: padding on some ranks
  config.train.global_batch_size = 4;
  config.train.steps = 3;
  const TinyResult one = run_tiny(config, 1, 1);  // accumulates 4 times
  RunConfig whole = config;
  whole.train.micro_batch_size = 4;
  EXPECT_LT(worst_difference(one, run_tiny(whole, 1, 1)), 1e-5);
  for (const auto& [ranks, dp_size] :
       std::vector<std::pair<int, int>>{{4, 1}, {4, 2}, {4, 4}, {2, 2}, {2, 1}}) {
    RunConfig split = config;
    split.parallel.dp_size = dp_size;
    split.attention.ring = ring::RingKind::kFlat;
    const TinyResult many = run_tiny(split, ranks, ranks);
    EXPECT_LT(worst_difference(one, many), 1e-5) << ranks << " ranks, dp " << dp_size;
    EXPECT_LT((one.weights - many.weights).abs().max().item<double>(), 2e-5)
        << ranks << " ranks, dp " << dp_size;
    EXPECT_TRUE(many.ranks_agree);
    EXPECT_NEAR(many.valid_loss / one.valid_loss, 1, dp_size == 1 ? 1e-5 : 0.2);
  }
}

TEST(Trainer, DataParallelGroupsMayChooseIndicesOfDifferentKinds) {
  const TinyData data;
  RunConfig config = tiny_config(data);
  config.attention.columns = attention::ColumnMode::kOnce;
  config.train.global_batch_size = 2;
  config.train.steps = 4;
  // Around these shares the union of a group's columns passes half of the keys with one sample and not with the next: then one
  // group exchanges columns and the other takes them step by step.
  for (const double p : {0.30, 0.32, 0.34, 0.36}) {
    config.attention.options.p_vertical = p;
    const TinyResult accumulated = run_tiny(config, 2, 2);
    RunConfig split = config;
    split.parallel.dp_size = 2;
    const TinyResult parallel = run_tiny(split, 4, 2);
    EXPECT_LT(worst_difference(accumulated, parallel), 1e-3) << p;
    EXPECT_TRUE(parallel.ranks_agree) << p;
    for (const auto& m : parallel.steps) {
      EXPECT_GE(m.worker_imbalance, 1 - 1e-9) << p;
      EXPECT_GE(m.step_imbalance, m.worker_imbalance - 1e-9) << p;
    }
  }
}

TEST(Trainer, UnevenLabelsWeighByTokenNotByRankOrMicroStep) {
  const TinyData data;
  // Labels only in a few places: most micro-steps and ranks have none or few.
  data::TokenFileWriter mask(data.prefix() + "_loss_mask", data::TokenType::kUInt8);
  std::vector<int64_t> flags(20000);
  for (size_t i = 0; i < flags.size(); ++i) flags[i] = i % 400 > 370;
  mask.add_sequence(flags);
  mask.finish();
  RunConfig config = tiny_config(data);
  config.attention.pattern = pattern::PatternKind::kDense;
  config.train.seq_len = 128;
  config.train.global_batch_size = 4;
  config.train.steps = 3;
  RunConfig whole = config;
  whole.train.micro_batch_size = 4;
  const TinyResult one = run_tiny(whole, 1, 1);
  EXPECT_LT(worst_difference(one, run_tiny(config, 1, 1)), 1e-5);
  for (const auto layout : {layout::LayoutKind::kContiguous, layout::LayoutKind::kZigzag}) {
    RunConfig split = config;
    split.attention.layout = layout;
    split.attention.ring = ring::RingKind::kFlat;
    EXPECT_LT(worst_difference(one, run_tiny(split, 4, 4)), 1e-5);
    split.parallel.dp_size = 2;
    EXPECT_LT(worst_difference(one, run_tiny(split, 4, 4)), 1e-5);
  }
}

TEST(Trainer, AStepWithoutLabelsHasLossZeroAndChangesNothing) {
  const TinyData data;
  data::TokenFileWriter mask(data.prefix() + "_loss_mask", data::TokenType::kUInt8);
  mask.add_sequence(std::vector<int64_t>(20000, 0));
  mask.finish();
  RunConfig config = tiny_config(data);
  config.train.seq_len = 32;
  config.train.steps = 2;
  config.optim.adamw.weight_decay = 0;
  for (const auto layout : {layout::LayoutKind::kContiguous, layout::LayoutKind::kZigzag}) {
    for (const int zero : {0, 2}) {
      SCOPED_TRACE(zero);
      RunConfig split = config;
      split.attention.layout = layout;
      split.parallel.zero = zero;
      const TinyResult result = run_tiny(split, 4, 2);
      for (const auto& m : result.steps) {
        EXPECT_EQ(m.loss, 0);
        EXPECT_EQ(m.grad_norm, 0);
        EXPECT_EQ(m.skipped, 0);
      }
      EXPECT_TRUE(result.ranks_agree);
      std::vector<at::Tensor> start;
      for (const auto& p : model::init_parameters(config.model, config.train.seed).list())
        start.push_back(p.value.detach().reshape({-1}));
      EXPECT_TRUE(at::equal(result.weights, at::cat(start)));
    }
  }
}

TEST(Trainer, LabelsOnTheLastRankAloneAreTheMeanOfThoseLabels) {
  const TinyData data;
  data::TokenFileWriter mask(data.prefix() + "_loss_mask", data::TokenType::kUInt8);
  std::vector<int64_t> flags(20000);
  for (size_t i = 0; i < flags.size(); ++i) flags[i] = i % 32 >= 24;
  mask.add_sequence(flags);
  mask.finish();
  RunConfig config = tiny_config(data);
  config.attention.pattern = pattern::PatternKind::kDense;
  config.train.seq_len = 32;
  config.train.steps = 3;
  const TinyResult one = run_tiny(config, 1, 1);
  EXPECT_GT(one.steps[0].loss, 1);
  for (const auto layout : {layout::LayoutKind::kContiguous, layout::LayoutKind::kZigzag}) {
    for (const int zero : {0, 2}) {
      SCOPED_TRACE(zero);
      RunConfig split = config;
      split.attention.layout = layout;
      split.attention.ring = ring::RingKind::kFlat;
      split.parallel.zero = zero;
      const TinyResult many = run_tiny(split, 4, 4);
      EXPECT_LT(worst_difference(one, many), 1e-5);
      EXPECT_TRUE(many.ranks_agree);
    }
  }
}

TEST(Trainer, ANaNOnOneRankSkipsTheStepOnAll) {
  const TinyData data;
  RunConfig config = tiny_config(data);
  config.train.steps = 1;
  const at::Tensor after_one = run_tiny(config, 4, 2).weights;
  config.train.steps = 3;
  const TinyResult healthy = run_tiny(config, 4, 2);
  // In a gradient it reaches every rank with the sum; in what follows from the sum only the ranks' agreement tells the others.
  for (const char* place : {"gradient", "norm"}) {
    for (const int zero : {0, 2}) {
      SCOPED_TRACE(concat(place, ", zero ", zero));
      config.parallel.zero = zero;
      ::setenv("MTRAINING_FAULT", concat("rank=3,step=2,at=", place, ",kind=nan").c_str(), 1);
      config.train.steps = 3;
      const TinyResult faulty = run_tiny(config, 4, 2);
      config.train.steps = 2;
      const TinyResult ends_with_the_fault = run_tiny(config, 4, 2);
      ::unsetenv("MTRAINING_FAULT");
      EXPECT_EQ(faulty.optimizer_steps, 2);
      // The skipped step leaves the weights of the one before, bit for bit.
      EXPECT_EQ(ends_with_the_fault.optimizer_steps, 1);
      if (zero == 0) {
        EXPECT_TRUE(at::equal(ends_with_the_fault.weights, after_one));
      }
      EXPECT_LT((ends_with_the_fault.weights - after_one).abs().max().item<double>(), 1e-6);
      EXPECT_EQ(faulty.steps[0].skipped, 0);
      EXPECT_EQ(faulty.steps[1].skipped, 1);
      EXPECT_EQ(faulty.steps[2].skipped, 1);
      EXPECT_TRUE(std::isfinite(faulty.steps[2].loss));
      EXPECT_TRUE(faulty.ranks_agree);
      EXPECT_TRUE(faulty.weights.isfinite().all().item<bool>());
      EXPECT_FALSE(at::equal(healthy.weights, faulty.weights));
    }
  }
}

TEST(Trainer, HeldOutLossIsTheSameForEveryContextParallelSize) {
  const TinyData data;
  RunConfig config = tiny_config(data);
  config.train.steps = 1;
  config.optim.schedule.lr = 0;
  config.train.seq_len = 300;
  const double one = run_tiny(config, 1, 1).valid_loss;
  for (const int ranks : {2, 4}) {
    EXPECT_NEAR(run_tiny(config, ranks, ranks).valid_loss / one, 1, 1e-5) << ranks;
  }
}

TEST(Trainer, BFloat16ModelLearnsWithFloat32Master) {
  const TinyData data;
  RunConfig config = tiny_config(data);
  config.model.dtype = at::kBFloat16;
  const TinyResult result = run_tiny(config, 2, 2);
  EXPECT_LT(result.steps.back().loss, result.steps.front().loss - 0.3);
  EXPECT_TRUE(result.ranks_agree);
}

TEST(Trainer, ARunLeavesMetricsTraceSummaryAndExample) {
  const TinyData data;
  RunConfig config = tiny_config(data);
  config.train.steps = 5;
  config.train.recall_every = 2;
  config.attention.dense_steps = 1;
  config.eval.every = 2;
  config.eval.also_p = {0.1};
  config.trace.chrome = true;
  config.trace.example_layer = 1;
  topology::LaunchEnvironment launch;
  launch.world_size = 4;
  launch.local_world_size = 2;
  const ResolvedRun resolved = resolve(config, launch);
  int preflights = 0;
  comm::run_loopback(4, [&](comm::Transport& transport) {
    at::set_num_threads(1);
    set_num_threads(1);
    Trainer trainer(config, resolved, transport);
    TrainObserver observer;
    observer.preflight = [&](const Preflight& p) {
      if (transport.rank() != 0) return;
      ++preflights;
      EXPECT_LT(p.density, 1);
      EXPECT_NEAR(p.loss_dense, p.loss_pattern, 0.5);
      EXPECT_TRUE(p.recall_worst.has_value());
    };
    const TrainResult result = trainer.run(observer);
    EXPECT_EQ(result.steps_done, 5);
    EXPECT_EQ(result.evaluations.size(), 3u);
    EXPECT_LT(result.evaluations[2].density_by_layer[0],
              result.evaluations[1].density_by_layer[0] + 1e-9);
  });
  EXPECT_EQ(preflights, 1);
  std::ifstream metrics(data.folder() / "metrics.jsonl");
  std::vector<nlohmann::json> rows;
  for (std::string line; std::getline(metrics, line);) rows.push_back(nlohmann::json::parse(line));
  ASSERT_EQ(rows.size(), 5u);
  EXPECT_GE(rows[0]["attention_density"].get<double>(), 1.0);  // dense_steps
  EXPECT_LT(rows[1]["attention_density"].get<double>(), 1.0);
  EXPECT_TRUE(rows[1]["attention_recall"].is_null());
  EXPECT_GT(rows[2]["attention_recall"].get<double>(), 0.3);
  EXPECT_LE(rows[2]["attention_recall"].get<double>(), 1.0 + 1e-6);
  EXPECT_TRUE(rows[0]["valid_loss"].is_null());
  for (const int step : {1, 3, 4}) EXPECT_FALSE(rows[step]["valid_loss"].is_null()) << step;
  for (const auto& row : rows) {
    EXPECT_GE(row["worker_imbalance"].get<double>(), 1.0 - 1e-9);
    EXPECT_GE(row["step_imbalance"].get<double>(), row["worker_imbalance"].get<double>() - 1e-9);
    EXPECT_GT(row["comm_bytes"].get<int64_t>(), 0);
    EXPECT_GT(row["tokens_per_s"].get<double>(), 0);
  }
  std::ifstream trace_file(data.folder() / "trace.json");
  const auto trace = nlohmann::json::parse(trace_file);
  std::vector<int> ring_spans(4, 0);
  int optimizer_spans = 0;
  for (const auto& event : trace["traceEvents"]) {
    if (event["ph"] != "X") continue;
    if (event["args"].contains("ring_step") && event["name"] == "forward")
      ++ring_spans[event["pid"].get<int>()];
    optimizer_spans += event["name"] == "optimizer";
  }
  for (const int count : ring_spans) EXPECT_GE(count, 3 * 2 * 2);  // steps x layers x outer steps
  EXPECT_EQ(optimizer_spans, 3 * 4);
  for (const char* name :
       {"summary.json", "example/q.npy", "example/k.npy", "example/index.json"}) {
    EXPECT_TRUE(std::filesystem::exists(data.folder() / name)) << name;
  }
}

TEST(Trainer, WhatIsNoTrainStepLeavesNoSpans) {
  const TinyData data;
  RunConfig config = tiny_config(data);
  config.train.seq_len = 192;
  config.train.steps = 3;
  config.train.preflight = true;
  config.eval.every = 1;
  config.checkpoint.every = 1;
  config.trace.chrome = true;
  config.trace.first_step = 1;
  config.trace.steps = 3;
  config.trace.example_layer = 0;
  const ResolvedRun resolved = resolve(config, topology::LaunchEnvironment());
  comm::run_loopback(1, [&](comm::Transport& transport) {
    Trainer trainer(config, resolved, transport);
    trainer.run(TrainObserver());
    std::map<std::string, int> count;
    for (const trace::Span& span : trainer.spans()) {
      ++count[span.name];
      EXPECT_GE(span.train_step, 1) << span.name;
    }
    for (const char* once_a_step : {"train_step", "embed", "head_and_loss", "optimizer"})
      EXPECT_EQ(count[once_a_step], 3) << once_a_step;
    EXPECT_EQ(count["mlp"], 3 * 2);  // layers
    EXPECT_GE(count["checkpoint"], 3);
  });
}

TEST(Trainer, WeightsOfOneProductLieBehindOneAnotherHoweverParametersAreKept) {
  const TinyData data;
  RunConfig config = tiny_config(data);  // with biases of q, k and v
  for (const int zero : {0, 2}) {
    config.parallel.zero = zero;
    topology::LaunchEnvironment launch;
    launch.world_size = 2;
    launch.local_world_size = 2;
    const ResolvedRun resolved = resolve(config, launch);
    comm::run_loopback(2, [&](comm::Transport& transport) {
      at::set_num_threads(1);
      Trainer trainer(config, resolved, transport);
      std::map<std::string, at::Tensor> values;
      for (const model::Parameter& p : trainer.parameters()) values[p.name] = p.value;
      const auto follows = [&](const std::string& layer, const char* first, const char* second) {
        const at::Tensor &a = values.at(layer + first), &b = values.at(layer + second);
        return static_cast<const char*>(a.const_data_ptr()) + a.nbytes() == b.const_data_ptr();
      };
      for (const std::string layer : {"model.layers.0.", "model.layers.1."}) {
        for (const char* kind : {"weight", "bias"}) {
          const auto name = [&](const char* of) {
            return concat("self_attn.", of, "_proj.", kind);
          };
          EXPECT_TRUE(follows(layer, name("q").c_str(), name("k").c_str())) << zero << kind;
          EXPECT_TRUE(follows(layer, name("k").c_str(), name("v").c_str())) << zero << kind;
        }
        EXPECT_TRUE(follows(layer, "mlp.gate_proj.weight", "mlp.up_proj.weight")) << zero;
      }
    });
  }
}

TEST(PartTimes, AnEndOfNothingIsRefusedAndTakesNothingAlong) {
  PartTimes times(at::kCPU);
  trace::SpanRecorder recorder;
  times.end("nothing is recorded");
  times.record(true);
  times.begin("outer", "step", 1);
  times.begin("inner", "model", 1);
  EXPECT_THROW(times.end("other"), InternalError);
  times.end("inner");
  times.end("outer");
  EXPECT_THROW(times.end("outer"), InternalError);
  times.collect(recorder);
  ASSERT_EQ(recorder.spans().size(), 2u);
  EXPECT_EQ(recorder.spans()[0].name, "inner");
  EXPECT_EQ(recorder.spans()[1].name, "outer");
}

TEST(Trainer, IndicesAreKeptOnlyWhereTheyAreAskedFor) {
  const TinyData data;
  RunConfig config = tiny_config(data);
  config.train.seq_len = 192;
  config.train.global_batch_size = 3;
  const ResolvedRun resolved = resolve(config, topology::LaunchEnvironment());
  comm::run_loopback(1, [&](comm::Transport& transport) {
    Trainer trainer(config, resolved, transport);
    trainer.step(0);
    EXPECT_TRUE(trainer.last_indices().empty());
    trainer.keep_indices();
    trainer.step(1);
    ASSERT_EQ(trainer.last_indices().size(), 3u);  // micro-steps
    for (const auto& layers : trainer.last_indices()) {
      ASSERT_EQ(layers.size(), 2u);
      for (const auto& index : layers) EXPECT_NE(index, nullptr);
    }
  });
}

TEST(Trainer, SingleBlocksHaveNoPictureWhichIsSaidAndNoOtherP) {
  const TinyData data;
  RunConfig config = tiny_config(data);
  config.train.seq_len = 256;
  config.train.steps = 1;
  config.train.preflight = false;
  config.attention.moba = {.chunk = 64, .top_k = 2};
  config.trace.example_layer = 0;
  config.eval.also_p = {0.3, 0.6};
  for (const bool blocks : {true, false}) {
    config.attention.pattern =
        blocks ? pattern::PatternKind::kMoba : pattern::PatternKind::kVerticalSlash;
    config.out = (data.folder() / concat("blocks", blocks)).string();
    std::filesystem::create_directories(config.out);
    const ResolvedRun resolved = resolve(config, topology::LaunchEnvironment());
    comm::run_loopback(1, [&](comm::Transport& transport) {
      std::string warnings;
      TrainObserver observer;
      observer.warning = [&](const std::string& text) { warnings += text; };
      Trainer trainer(config, resolved, transport);
      const TrainResult result = trainer.run(observer);
      EXPECT_EQ(result.evaluations.size(), blocks ? 2u : 4u);
      EXPECT_EQ(warnings.find("no picture") != std::string::npos, blocks) << warnings;
    });
    EXPECT_EQ(std::filesystem::exists(config.out + "/example/index.json"), !blocks);
  }
}

}  // namespace
}  // namespace mtraining::train
