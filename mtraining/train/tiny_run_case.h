// TinyRun: a whole small training run over loopback ranks, for tests.
//
// In:   a RunConfig for `ranks` ranks, how the ranks sit. Out: losses, gradient norms and weights of every rank.
// Next: trainer_test.cc compares runs.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "mtraining/base/check.h"
#include "mtraining/base/parallel.h"
#include "mtraining/base/rng.h"
#include "mtraining/comm/loopback.h"
#include "mtraining/data/token_file.h"
#include "mtraining/testing/scratch_folder.h"
#include "mtraining/train/trainer.h"

namespace mtraining::train {

/// A folder that goes away, with token files of a language that a small model can learn in a few steps.
class TinyData {
 public:
  explicit TinyData(int64_t tokens = 20000) {
    const Rng rng(7);
    std::vector<int64_t> ids(tokens);
    // Each token follows from the one before, but for noise.
    for (int64_t i = 1; i < tokens; ++i) {
      ids[i] = rng.uniform(2 * i) < 0.7 ? (ids[i - 1] * 5 + 3) % 64
                                        : static_cast<int64_t>(rng.below(2 * i + 1, 64));
    }
    data::TokenFileWriter writer(prefix(), data::TokenType::kUInt8);
    writer.add_sequence(ids);
    writer.finish();
  }
  std::string prefix() const { return (folder_ / "tokens").string(); }
  const std::filesystem::path& folder() const { return folder_.path(); }

 private:
  testing::ScratchFolder folder_;
};

inline RunConfig tiny_config(const TinyData& data) {
  RunConfig c;
  c.model.vocab_size = 64;
  c.model.hidden_size = 32;
  c.model.intermediate_size = 48;
  c.model.num_hidden_layers = 2;
  c.model.num_attention_heads = 4;
  c.model.num_key_value_heads = 2;
  c.model.head_dim = 16;
  c.model.initializer_range = 0.1;
  c.model.embedding_initializer_range = 0.3;
  c.data.train = {{data.prefix(), 1.0}};
  c.data.valid = {{data.prefix(), 1.0}};
  c.data.shuffle_seed = 3;
  c.attention.options.last_q = 32;
  c.attention.options.sink_tokens = 8;
  c.attention.options.local_blocks = 1;
  c.attention.options.p_vertical = 0.2;
  c.attention.options.p_slash = 0.4;
  c.attention.options.dense_threshold = 1;
  c.attention.options.recall_rows = 32;
  c.train.seq_len = 512;
  c.train.steps = 20;
  c.train.seed = 1;
  c.optim.schedule.lr = 2e-3;
  c.optim.schedule.warmup_steps = 4;
  c.eval.batches = 2;
  c.train.recall_every = 0;
  c.trace.chrome = false;
  c.out = data.folder().string();
  return c;
}

/// What a reader of `config`'s training data needs at least.
inline data::BatchOptions tiny_batches(const RunConfig& config) {
  data::BatchOptions options;
  options.sources = config.data.train;
  options.seq_len = config.train.seq_len;
  options.vocab_size = config.model.vocab_size;
  options.shuffle_seed = config.data.shuffle_seed;
  return options;
}

using Indices =
    std::vector<std::vector<std::shared_ptr<const index::Index>>>;  // [micro_step][layer]

struct TinyResult {
  std::vector<trace::StepMetrics> steps;
  std::vector<Indices> indices;  ///< [step]
  at::Tensor weights;            ///< all parameters, flat
  bool ranks_agree = true;       ///< every rank ended with the same bits
  double valid_loss = 0;
  int64_t optimizer_steps = 0;
};

/// Runs `config.train.steps` steps; `replay`: indices of each step.
inline TinyResult run_tiny(RunConfig config, int ranks, int ranks_per_node,
                           const std::vector<Indices>* replay = nullptr) {
  topology::LaunchEnvironment launch;
  launch.world_size = ranks;
  launch.local_world_size = ranks_per_node;
  const ResolvedRun resolved = resolve(config, launch);
  std::mutex mutex;
  std::vector<at::Tensor> weights(ranks);
  TinyResult result;
  comm::run_loopback(ranks, [&](comm::Transport& transport) {
    at::set_num_threads(1);
    set_num_threads(1);
    Trainer trainer(config, resolved, transport);
    trainer.keep_indices();
    for (int64_t step = 0; step < resolved.steps; ++step) {
      const trace::StepMetrics m =
          trainer.step(step, replay != nullptr ? &replay->at(step) : nullptr);
      if (transport.rank() == 0) {
        result.steps.push_back(m);
        result.indices.push_back(trainer.last_indices());
      }
    }
    const double valid_loss = trainer.evaluate(trainer.patterns(), false).loss;
    std::vector<at::Tensor> parts;
    for (const auto& p : trainer.parameters())
      parts.push_back(p.value.detach().reshape({-1}).to(at::kFloat));
    const std::lock_guard lock(mutex);
    weights[transport.rank()] = at::cat(parts);
    if (transport.rank() == 0) {
      result.valid_loss = valid_loss;
      result.optimizer_steps = trainer.optimizer_steps();
    }
  });
  result.weights = weights[0];
  for (const auto& w : weights) result.ranks_agree = result.ranks_agree && at::equal(w, weights[0]);
  return result;
}

}  // namespace mtraining::train
