// Runs that are interrupted, saved and resumed, beside the same runs uninterrupted.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <fstream>
#include <mutex>
#include <nlohmann/json.hpp>

#include "mtraining/checkpoint/publication.h"
#include "mtraining/checkpoint/training_state.h"
#include "mtraining/checkpoint/weights.h"
#include "mtraining/testing/error_of.h"
#include "mtraining/testing/scratch_folder.h"
#include "mtraining/train/run_state.h"
#include "mtraining/train/stop_poll.h"
#include "mtraining/train/tiny_run_case.h"

namespace mtraining::train {
namespace {

namespace fs = std::filesystem;

struct SavedRun {
  std::vector<trace::StepMetrics> steps;  ///< that this process did
  at::Tensor weights;
  TrainResult result;
  bool ranks_agree = true;
};

/// run() in a folder. stop_after: the flag is set when this step is finished; 0: never.
SavedRun run_in(RunConfig config, const fs::path& out, int ranks, int ranks_per_node,
                const fs::path& resume = {}, int64_t stop_after = 0) {
  topology::LaunchEnvironment launch;
  launch.world_size = ranks;
  launch.local_world_size = ranks_per_node;
  config.out = out.string();
  fs::create_directories(out);
  const ResolvedRun resolved = resolve(config, launch);
  std::mutex mutex;
  std::vector<at::Tensor> weights(ranks);
  std::atomic<bool> stop{false};
  SavedRun run;
  comm::run_loopback(ranks, [&](comm::Transport& transport) {
    at::set_num_threads(1);
    set_num_threads(1);
    Trainer trainer(config, resolved, transport, resume);
    TrainObserver observer;
    observer.step = [&](const trace::StepMetrics& m, int64_t) {
      if (transport.rank() != 0) return;
      run.steps.push_back(m);
      if (m.train_step == stop_after) stop = true;
    };
    const TrainResult result = trainer.run(observer, &stop);
    std::vector<at::Tensor> parts;
    for (const auto& p : trainer.parameters())
      parts.push_back(p.value.detach().reshape({-1}).to(at::kFloat));
    const std::lock_guard lock(mutex);
    weights[transport.rank()] = at::cat(parts);
    if (transport.rank() == 0) run.result = result;
  });
  run.weights = weights[0];
  for (const auto& w : weights) run.ranks_agree = run.ranks_agree && at::equal(w, weights[0]);
  return run;
}

RunConfig short_config(const TinyData& data) {
  RunConfig config = tiny_config(data);
  config.train.seq_len = 256;
  config.train.steps = 6;
  config.train.preflight = false;
  config.optim.schedule.kind = optim::ScheduleKind::kCosine;
  config.optim.adamw.weight_decay = 0.1;
  config.eval.batches = 1;
  config.checkpoint.every = 3;
  config.checkpoint.keep = 0;
  return config;
}

fs::path step_folder(const fs::path& out, int64_t step) {
  char name[40];
  std::snprintf(name, sizeof(name), "step-%08lld", static_cast<long long>(step));
  return out / "checkpoints" / name;
}

std::vector<nlohmann::json> rows_of(const fs::path& out) {
  std::ifstream file(out / "metrics.jsonl");
  std::vector<nlohmann::json> rows;
  for (std::string line; std::getline(file, line);) rows.push_back(nlohmann::json::parse(line));
  return rows;
}

void expect_same_steps(const SavedRun& whole, const SavedRun& resumed, size_t first) {
  ASSERT_EQ(resumed.steps.size() + first, whole.steps.size());
  for (size_t i = 0; i < resumed.steps.size(); ++i) {
    const trace::StepMetrics &a = whole.steps[first + i], &b = resumed.steps[i];
    EXPECT_EQ(a.train_step, b.train_step);
    EXPECT_EQ(a.loss, b.loss) << a.train_step;
    EXPECT_EQ(a.grad_norm, b.grad_norm) << a.train_step;
    EXPECT_EQ(a.lr, b.lr) << a.train_step;
    EXPECT_EQ(a.tokens_total, b.tokens_total) << a.train_step;
    EXPECT_EQ(a.skipped, b.skipped) << a.train_step;
    EXPECT_EQ(a.attention_density, b.attention_density) << a.train_step;
  }
}

TEST(Resume, OnTheSameRanksIsBitwiseTheUninterruptedRun) {
  const TinyData data;
  const testing::ScratchFolder files(testing::memory_folder());
  for (const auto& [ranks, per_node, zero, dtype] :
       std::vector<std::tuple<int, int, int, at::ScalarType>>{{1, 1, 0, at::kFloat},
                                                              {1, 1, 0, at::kBFloat16},
                                                              {4, 2, 0, at::kFloat},
                                                              {4, 2, 2, at::kFloat},
                                                              {4, 2, 2, at::kBFloat16}}) {
    SCOPED_TRACE(concat(ranks, " ranks, zero ", zero, ", ", at::toString(dtype)));
    RunConfig config = short_config(data);
    config.parallel.zero = zero;
    config.model.dtype = dtype;
    config.train.global_batch_size = 2;
    const fs::path out = files.path() / concat("run", ranks, zero, at::toString(dtype));
    // A skipped step before the checkpoint: counters go on too.
    ::setenv("MTRAINING_FAULT", "rank=0,step=2,at=gradient,kind=nan", 1);
    const SavedRun whole = run_in(config, out / "whole", ranks, per_node);
    ::unsetenv("MTRAINING_FAULT");
    EXPECT_EQ(whole.steps.back().skipped, 1);
    const SavedRun resumed =
        run_in(config, out / "resumed", ranks, per_node, step_folder(out / "whole", 3));
    expect_same_steps(whole, resumed, 3);
    EXPECT_TRUE(at::equal(whole.weights, resumed.weights));
    EXPECT_TRUE(resumed.ranks_agree);
    EXPECT_EQ(whole.result.evaluations[0].loss, resumed.result.evaluations[0].loss);
  }
}

TEST(Resume, OnAnotherSplitContinuesTheCurve) {
  const TinyData data;
  const testing::ScratchFolder files(testing::memory_folder());
  RunConfig config = short_config(data);
  config.attention.pattern = pattern::PatternKind::kDense;
  config.attention.ring = ring::RingKind::kFlat;
  config.train.global_batch_size = 4;
  struct Split {
    int ranks, dp_size, zero;
  };
  const std::vector<Split> splits = {{1, 1, 0}, {4, 4, 0}, {4, 2, 2}, {3, 1, 2}, {2, 2, 0}};
  const SavedRun whole = run_in(config, files.path() / "whole", 1, 1);
  for (const Split& writer : splits) {
    RunConfig writing = config;
    writing.parallel.dp_size = writer.dp_size;
    writing.parallel.zero = writer.zero;
    writing.train.steps = 3;
    writing.eval.also_p.clear();
    writing.optim.schedule.kind = optim::ScheduleKind::kConstant;
    const fs::path out = files.path() / concat("w", writer.ranks, writer.dp_size, writer.zero);
    run_in(writing, out, writer.ranks, writer.ranks);
  }
  // Which ranks wrote it and which read it makes no difference but rounding: each remaining sample is taken once.
  RunConfig constant = config;
  constant.optim.schedule.kind = optim::ScheduleKind::kConstant;
  const SavedRun reference = run_in(constant, files.path() / "constant", 1, 1);
  for (size_t i = 0; i < splits.size(); ++i) {
    const Split& writer = splits[i];
    const Split& reader = splits[(i + 1) % splits.size()];
    RunConfig reading = constant;
    reading.parallel.dp_size = reader.dp_size;
    reading.parallel.zero = reader.zero;
    const fs::path from = files.path() / concat("w", writer.ranks, writer.dp_size, writer.zero);
    const SavedRun resumed = run_in(reading, files.path() / concat("r", i), reader.ranks,
                                    reader.ranks, step_folder(from, 3));
    ASSERT_EQ(resumed.steps.size(), 3u);
    for (size_t s = 0; s < 3; ++s) {
      EXPECT_NEAR(resumed.steps[s].loss / reference.steps[s + 3].loss, 1, 1e-5) << i << ' ' << s;
      EXPECT_EQ(resumed.steps[s].tokens_total, reference.steps[s + 3].tokens_total);
    }
    EXPECT_LT((resumed.weights - reference.weights).abs().max().item<double>(), 2e-5) << i;
    EXPECT_TRUE(resumed.ranks_agree);
  }
}

TEST(Resume, AStoppedAccumulationKeepsItsFinishedMicroSteps) {
  const TinyData data;
  const testing::ScratchFolder files(testing::memory_folder());
  RunConfig config = short_config(data);
  config.attention.pattern = pattern::PatternKind::kDense;
  config.attention.ring = ring::RingKind::kFlat;
  config.train.global_batch_size = 8;
  config.train.steps = 4;
  config.checkpoint.every = 0;
  config.checkpoint.save_accumulation = true;
  for (const auto& [ranks, dp, zero] :
       std::vector<std::tuple<int, int, int>>{{1, 1, 0}, {4, 2, 0}, {4, 2, 2}}) {
    SCOPED_TRACE(concat(ranks, " ranks, zero ", zero));
    config.parallel.dp_size = dp;
    config.parallel.zero = zero;
    const fs::path out = files.path() / concat(ranks, zero);
    const SavedRun whole = run_in(config, out / "whole", ranks, ranks);
    const SavedRun stopped = run_in(config, out / "stopped", ranks, ranks, {}, 2);
    EXPECT_TRUE(stopped.result.stopped);
    EXPECT_EQ(stopped.result.steps_done, 2);
    const fs::path checkpoint = step_folder(out / "stopped", 2);
    const RunPosition position = read_checkpoint_info(checkpoint).position;
    EXPECT_EQ(position.kept_samples, dp);  // one micro-step: the flag was there before the second
    const SavedRun resumed = run_in(config, out / "stopped", ranks, ranks, checkpoint);
    ASSERT_EQ(resumed.steps.size(), 2u);
    for (size_t s = 0; s < 2; ++s) {
      if (ranks == 1) {
        EXPECT_EQ(resumed.steps[s].loss, whole.steps[s + 2].loss);
        EXPECT_EQ(resumed.steps[s].grad_norm, whole.steps[s + 2].grad_norm);
      }
      EXPECT_NEAR(resumed.steps[s].loss / whole.steps[s + 2].loss, 1, 1e-6);
    }
    // Speed is that of the micro-steps made since the stop.
    const trace::StepMetrics& continued = resumed.steps[0];
    EXPECT_EQ(continued.tokens, 8 * 256);
    EXPECT_NEAR(continued.tokens_per_s * continued.step_s / (256 * (8 - dp)), 1, 1e-9);
    EXPECT_LT((resumed.weights - whole.weights).abs().max().item<double>(),
              ranks == 1 ? 1e-30 : 1e-5);
    EXPECT_EQ(rows_of(out / "stopped").size(), 4u);
    // Eight samples, of which `dp` are in: another split goes on where it can, and begins the step anew where it cannot.
    RunConfig other = config;
    other.parallel.dp_size = 4;
    other.parallel.zero = 0;
    const SavedRun elsewhere = run_in(other, out / "elsewhere", 4, 4, checkpoint);
    EXPECT_NEAR(elsewhere.steps[0].loss / whole.steps[2].loss, 1, 1e-6);
    EXPECT_LT((elsewhere.weights - whole.weights).abs().max().item<double>(), 2e-5);
  }
}

TEST(Resume, WithoutSaveAccumulationAStoppedStepIsDropped) {
  const TinyData data;
  const testing::ScratchFolder files(testing::memory_folder());
  RunConfig config = short_config(data);
  config.train.global_batch_size = 4;
  config.checkpoint.every = 0;
  const SavedRun whole = run_in(config, files.path() / "whole", 2, 2);
  const SavedRun stopped = run_in(config, files.path() / "run", 2, 2, {}, 4);
  EXPECT_TRUE(stopped.result.stopped);
  const fs::path checkpoint = step_folder(files.path() / "run", 4);
  EXPECT_EQ(read_checkpoint_info(checkpoint).position.kept_samples, 0);
  const SavedRun resumed = run_in(config, files.path() / "run", 2, 2, checkpoint);
  expect_same_steps(whole, resumed, 4);
  EXPECT_TRUE(at::equal(whole.weights, resumed.weights));
  const auto rows = rows_of(files.path() / "run");
  ASSERT_EQ(rows.size(), 6u);
  for (size_t i = 0; i < rows.size(); ++i) EXPECT_EQ(rows[i]["train_step"], i + 1);
}

TEST(Resume, RowsBeyondTheCheckpointAndATornLineGo) {
  const TinyData data;
  const testing::ScratchFolder files(testing::memory_folder());
  RunConfig config = short_config(data);
  config.trace = {.chrome = true, .first_step = 2, .steps = 1};
  const fs::path out = files.path() / "run";
  run_in(config, out, 1, 1);
  const auto before = rows_of(out);
  const auto bytes = fs::file_size(out / "trace.json");
  std::ofstream(out / "metrics.jsonl", std::ios::app) << "{\"train_step\": 7, \"lo";
  run_in(config, out, 1, 1, step_folder(out, 3));
  const auto after = rows_of(out);
  ASSERT_EQ(after.size(), 6u);
  for (size_t i = 0; i < 6; ++i) EXPECT_EQ(before[i]["loss"], after[i]["loss"]);
  EXPECT_EQ(fs::file_size(out / "trace.json"), bytes);  // step 2 is not made again
}

TEST(Resume, OnlyTheLastCheckpointsStay) {
  const TinyData data;
  const testing::ScratchFolder files(testing::memory_folder());
  RunConfig config = short_config(data);
  config.checkpoint.every = 1;
  for (const int64_t keep : {1, 2, 4, 0}) {
    config.checkpoint.keep = keep;
    const fs::path out = files.path() / concat("keep", keep);
    run_in(config, out, 2, 2);
    const auto list = checkpoint::list_checkpoints(out / "checkpoints");
    ASSERT_EQ(list.complete.size(), keep == 0 ? 6u : static_cast<size_t>(keep));
    EXPECT_EQ(list.complete.back().train_step, 6);
    EXPECT_EQ(list.complete.front().train_step, keep == 0 ? 1 : 7 - keep);
  }
}

at::Tensor stored_master(const fs::path& checkpoint, const std::string& parameter) {
  checkpoint::TrainingState state(checkpoint / "training_state");
  const checkpoint::TensorSpec* spec = state.find(parameter + "/master");
  EXPECT_NE(spec, nullptr) << parameter;
  EXPECT_EQ(spec->type, checkpoint::StoredType::kF32) << parameter;
  const int64_t count = checkpoint::num_elements(*spec);
  at::Tensor master = at::empty({count});
  state.read(parameter + "/master", 0, count,
             {static_cast<std::byte*>(master.data_ptr()), static_cast<size_t>(count) * 4});
  return master;
}

/// A Hugging Face folder of random float32 weights, which are returned.
std::vector<model::Parameter> write_weights(const fs::path& folder, const RunConfig& config) {
  fs::create_directories(folder);
  const auto parameters = model::init_parameters(config.model, 99).list();
  checkpoint::save_model_folder(folder, model::hf_config(config.model, 256), 256, parameters,
                                at::kFloat, {});
  return parameters;
}

TEST(InitFrom, MastersAreTheFilesFloat32WeightsToTheLastBit) {
  const TinyData data;
  const testing::ScratchFolder files(testing::memory_folder());
  RunConfig config = short_config(data);
  config.train.steps = 1;
  config.optim.schedule = {.lr = 0};
  config.init_from = (files.path() / "weights").string();
  const auto parameters = write_weights(*config.init_from, config);
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    for (const auto& [ranks, zero] :
         std::vector<std::pair<int, int>>{{1, 0}, {2, 0}, {3, 2}, {4, 2}}) {
      SCOPED_TRACE(concat(dtype, ", ", ranks, " ranks, zero ", zero));
      config.model.dtype = dtype;
      config.parallel.zero = zero;
      const fs::path out = files.path() / concat(dtype, ranks, zero);
      const SavedRun run = run_in(config, out, ranks, ranks);
      EXPECT_TRUE(run.ranks_agree);
      std::vector<at::Tensor> rounded;
      for (const auto& p : parameters) {
        const at::Tensor flat = p.value.detach().reshape({-1});
        EXPECT_TRUE(at::equal(stored_master(step_folder(out, 1), p.name), flat)) << p.name;
        rounded.push_back(flat.to(dtype).to(at::kFloat));
      }
      EXPECT_TRUE(at::equal(run.weights, at::cat(rounded)));
    }
  }
}

TEST(InitFrom, TheFolderMayGoAwayOnceTheRunHasBegun) {
  const TinyData data;
  const testing::ScratchFolder files(testing::memory_folder());
  RunConfig config = short_config(data);
  config.train.steps = 1;
  config.init_from = (files.path() / "weights").string();
  config.out = (files.path() / "run").string();
  fs::create_directories(config.out);
  write_weights(*config.init_from, config);
  testing::put_text(fs::path(*config.init_from) / "tokenizer.json", "{\"of\": \"the start\"}");
  const ResolvedRun resolved = resolve(config, topology::LaunchEnvironment());
  comm::run_loopback(1, [&](comm::Transport& transport) {
    Trainer trainer(config, resolved, transport);
    fs::remove_all(*config.init_from);
    trainer.run({});
  });
  EXPECT_EQ(checkpoint::incomplete_reason(step_folder(config.out, 1)), "");
  EXPECT_EQ(model::read_hf_config(step_folder(config.out, 1)).hidden_size,
            config.model.hidden_size);
  EXPECT_EQ(testing::get_text(step_folder(config.out, 1) / "tokenizer.json"),
            "{\"of\": \"the start\"}");
}

TEST(Resume, TheCheckpointHoldsFloat32MastersOfABFloat16Model) {
  const TinyData data;
  const testing::ScratchFolder files(testing::memory_folder());
  RunConfig config = short_config(data);
  config.model.dtype = at::kBFloat16;
  config.optim.schedule = {.lr = 1e-5};  // lost in bf16, kept in the master
  const fs::path out = files.path() / "run";
  run_in(config, out, 2, 2);
  const at::Tensor master = stored_master(step_folder(out, 6), "model.layers.0.mlp.up_proj.weight");
  const at::Tensor rounded = master.to(at::kBFloat16).to(at::kFloat);
  EXPECT_GT(at::ne(master, rounded).to(at::kFloat).mean().item<double>(), 0.9);
}

TEST(Resume, EvaluationsThatAStopCutShortAreMadeLater) {
  const TinyData data;
  const testing::ScratchFolder files(testing::memory_folder());
  RunConfig config = short_config(data);
  const SavedRun whole = run_in(config, files.path() / "whole", 2, 2);
  // Seen at the end of step 6, before the evaluations: its row is written without a held-out loss.
  const fs::path out = files.path() / "run";
  const SavedRun stopped = run_in(config, out, 2, 2, {}, 5);
  EXPECT_TRUE(stopped.result.stopped);
  EXPECT_TRUE(stopped.result.evaluations.empty());
  const SavedRun rest = run_in(config, out, 2, 2, step_folder(out, stopped.result.steps_done));
  EXPECT_EQ(rest.steps.size() + stopped.steps.size(), 6u);
  EXPECT_EQ(rest.result.evaluations[0].loss, whole.result.evaluations[0].loss);
  EXPECT_FALSE(rest.result.stopped);
  EXPECT_EQ(rest.result.evaluations.size(), whole.result.evaluations.size());
  EXPECT_TRUE(read_checkpoint_info(step_folder(out, 6)).position.evaluated);
  // A finished one that is opened again has nothing to do, and says the same.
  const SavedRun again = run_in(config, files.path() / "again", 2, 2, step_folder(out, 6));
  EXPECT_TRUE(again.steps.empty());
  EXPECT_FALSE(again.result.stopped);
}

TEST(Resume, AnEvaluationOfTheEndThatFailsLeavesTheTraining) {
  const TinyData data;
  const testing::ScratchFolder files(testing::memory_folder());
  RunConfig config = short_config(data);
  config.checkpoint.every = 0;
  config.eval.batches = 2;
  config.data.valid = {{(data.folder() / "valid").string(), 1.0}};
  data::TokenFileWriter writer(config.data.valid[0].path, data::TokenType::kUInt8);
  std::vector<int64_t> ids(600);
  ids[400] = 200;  // beyond the vocabulary, in the second sample
  writer.add_sequence(ids);
  writer.finish();
  const fs::path out = files.path() / "run";
  EXPECT_THROW(run_in(config, out, 2, 2), InvalidArgument);
  const RunPosition position = read_checkpoint_info(step_folder(out, 6)).position;
  EXPECT_EQ(position.steps_done, 6);
  EXPECT_FALSE(position.evaluated);
  config.eval.batches = 1;
  const SavedRun rest = run_in(config, out, 2, 2, step_folder(out, 6));
  EXPECT_TRUE(rest.steps.empty());
  EXPECT_EQ(rest.result.evaluations.size(), 2u);
}

TEST(Resume, ADamagedOrForeignStateIsNamed) {
  const TinyData data;
  const testing::ScratchFolder files(testing::memory_folder());
  RunConfig config = short_config(data);
  const fs::path out = files.path() / "run";
  run_in(config, out, 1, 1);
  const fs::path folder = step_folder(out, 3);
  RunConfig wider = config;
  wider.model.intermediate_size = 64;
  const auto error_of = [&](const RunConfig& c) {
    return testing::error_of<InvalidArgument>([&] { run_in(c, files.path() / "x", 1, 1, folder); });
  };
  EXPECT_NE(error_of(wider).find("gate_proj.weight/master\" F32 [64, 32], got F32 [48, 32]"),
            std::string::npos)
      << error_of(wider);
  const fs::path state = folder / "training_state" / "rank-00000-of-00001.safetensors";
  {
    std::fstream file(state, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(-5, std::ios::end);
    file.put('\x55');
  }
  EXPECT_NE(error_of(config).find("is damaged"), std::string::npos) << error_of(config);
  fs::resize_file(state, fs::file_size(state) - 1);
  EXPECT_NE(error_of(config).find("is not complete"), std::string::npos) << error_of(config);
  fs::remove(state);
  EXPECT_NE(error_of(config).find("is missing"), std::string::npos) << error_of(config);
}

TEST(StopPoll, AllRanksLearnOfAStopAtTheSameBoundary) {
  for (const int ranks : {1, 2, 3, 5}) {
    for (const int64_t asked_at : {0, 1, 7}) {
      std::vector<int64_t> seen(ranks, -1);
      comm::run_loopback(ranks, [&](comm::Transport& transport) {
        StopPoll poll(transport);
        std::atomic<bool> stop{false};
        poll.watch(&stop, 100);
        for (int64_t i = 0; i < 20; ++i) {
          if (transport.rank() == ranks - 1 && i == asked_at) stop = true;
          if (poll.boundary() == StopLevel::kNone) continue;
          seen[transport.rank()] = i;
          break;
        }
      });
      for (const int64_t at : seen) EXPECT_EQ(at, asked_at + 1) << ranks;
    }
  }
}

TEST(StopPoll, ARankThatFailsWithAPollUnderWayIsTheCause) {
  try {
    comm::run_loopback(3, [](comm::Transport& transport) {
      StopPoll poll(transport);
      const auto group = transport.open_host("elsewhere", {0, 1, 2});
      const std::atomic<bool> stop{false};
      poll.watch(&stop, 100);
      if (transport.rank() == 1) {
        poll.boundary();
        throw ExternalError("the cause");
      }
      group->barrier();
    });
    FAIL() << "nothing was thrown";
  } catch (const ExternalError& error) {
    EXPECT_STREQ(error.what(), "the cause");
  }
}

TEST(StopPoll, ShortStepsAreNotPolledAndLongOnesAtEveryLayer) {
  comm::run_loopback(1, [](comm::Transport& transport) {
    StopPoll poll(transport);
    std::atomic<bool> stop{false};
    poll.watch(&stop, 100);
    const auto boundaries_until_seen = [&](double step_s) {
      poll.step_begins();
      for (int i = 0; i < 10; ++i) poll.boundary();
      poll.step_took(step_s);
      poll.step_begins();
    };
    boundaries_until_seen(0.01);  // 1 ms a boundary
    stop = true;
    for (int i = 0; i < 200; ++i) ASSERT_EQ(poll.boundary(), StopLevel::kNone) << i;
    stop = false;
    boundaries_until_seen(1000);
    stop = true;
    poll.boundary();
    EXPECT_NE(poll.boundary(), StopLevel::kNone);
  });
}

}  // namespace
}  // namespace mtraining::train
