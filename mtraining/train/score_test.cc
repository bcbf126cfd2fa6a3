#include "mtraining/train/score.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>

#include "mtraining/base/check.h"
#include "mtraining/base/parallel.h"
#include "mtraining/checkpoint/weights.h"
#include "mtraining/comm/loopback.h"
#include "mtraining/testing/scratch_folder.h"
#include "mtraining/train/tiny_run_case.h"

namespace mtraining::train {
namespace {

TEST(TokenWindows, EveryTokenButTheFirstIsScoredOnceForAnyWindowAndStride) {
  for (const int64_t tokens : {2, 3, 11, 20, 21, 64}) {
    for (int64_t window = 1; window < tokens; ++window) {
      for (int64_t stride = 1; stride <= window; ++stride) {
        std::vector<int> scored(tokens, 0);
        int64_t before = -1;
        for (const TokenWindow& w : token_windows(tokens, window, stride)) {
          ASSERT_GT(w.begin, before);
          before = w.begin;
          ASSERT_GE(w.first_label, w.begin + 1);
          ASSERT_LE(w.begin + window, tokens - 1);
          for (int64_t t = w.first_label; t <= w.begin + window; ++t) {
            ++scored[t];
            EXPECT_GE(t - w.begin, std::min(t, window - stride + 1));
          }
        }
        EXPECT_EQ(scored[0], 0);
        EXPECT_TRUE(std::all_of(scored.begin() + 1, scored.end(), [](int n) { return n == 1; }))
            << tokens << " " << window << " " << stride;
      }
    }
  }
}

TEST(TokenWindows, WhatWouldLeaveTokensOutIsRefused) {
  for (const auto& [tokens, window, stride] : std::vector<std::array<int64_t, 3>>{
           {20, 20, 1}, {20, 0, 1}, {20, 10, 11}, {20, 10, 0}, {1, 1, 1}})
    EXPECT_THROW(token_windows(tokens, window, stride), InvalidArgument);
}

/// The tiny model with random weights in a folder, and a file of `tokens` tokens.
struct Case {
  explicit Case(int64_t tokens) : data(tokens), config(tiny_config(data)) {
    config.init_from = (files.path() / "weights").string();
    std::filesystem::create_directories(*config.init_from);
    const auto parameters = model::init_parameters(config.model, 5).list();
    checkpoint::save_model_folder(*config.init_from, model::hf_config(config.model, 256), 256,
                                  parameters, at::kFloat, {});
  }
  Score score(int64_t window, int64_t stride, int ranks, bool dense,
              int64_t max_windows = 0) const {
    RunConfig c = config;
    c.train.seq_len = window;
    topology::LaunchEnvironment launch;
    launch.world_size = ranks;
    launch.local_world_size = ranks;
    const ResolvedRun resolved = resolve(c, launch);
    Score result;
    comm::run_loopback(ranks, [&](comm::Transport& transport) {
      at::set_num_threads(1);
      set_num_threads(1);
      Scorer scorer(c, resolved, transport, data.prefix());
      const Score score =
          scorer.run(dense ? dense_layers(c) : layer_patterns(c), stride, max_windows);
      if (transport.rank() == 0) result = score;
    });
    return result;
  }
  testing::ScratchFolder files{testing::memory_folder()};
  TinyData data;
  RunConfig config;
};

TEST(Scorer, OneWindowIsTheTrainersHeldOutLoss) {
  Case c(513);
  c.config.eval.batches = 1;
  c.config.train.steps = 1;
  const ResolvedRun resolved = resolve(c.config, topology::LaunchEnvironment());
  comm::run_loopback(1, [&](comm::Transport& transport) {
    Trainer trainer(c.config, resolved, transport);
    for (const bool dense : {true, false}) {
      const Evaluation want =
          trainer.evaluate(dense ? dense_layers(c.config) : layer_patterns(c.config), true);
      const Score got = c.score(512, 512, 1, dense);
      EXPECT_EQ(got.loss, want.loss);
      EXPECT_EQ(got.tokens, 512);
      EXPECT_EQ(got.density_by_layer, want.density_by_layer);
      if (dense) continue;
      EXPECT_LT(got.density, 0.95);
      EXPECT_GT(got.recall, 0.1);
      EXPECT_LE(got.recall_worst, got.recall);
    }
  });
}

TEST(Scorer, EveryRankCountGivesOneLoss) {
  const Case c(700);
  for (const bool dense : {true, false}) {
    const Score one = c.score(200, 130, 1, dense);
    EXPECT_EQ(one.tokens, 699);
    EXPECT_EQ(one.windows, 5);
    for (const int ranks : {2, 4}) {
      const Score many = c.score(200, 130, ranks, dense);
      EXPECT_NEAR(many.loss / one.loss, 1, 1e-5) << ranks;
      EXPECT_EQ(many.tokens, one.tokens);
      EXPECT_NEAR(many.density, one.density, 1e-9);
    }
  }
}

TEST(Scorer, WindowsAddUpToTheSumsOfTheirTokens) {
  const Case c(161);
  // Of dense attention a prefix is the same whatever follows: the first window's loss is part of the longer one's.
  const Score whole = c.score(160, 160, 1, true), half = c.score(80, 80, 1, true, 1);
  EXPECT_EQ(half.tokens, 80);
  EXPECT_EQ(whole.tokens, 160);
  const Score overlapping = c.score(159, 1, 1, true);  // two windows, the second for one token
  EXPECT_EQ(overlapping.windows, 2);
  EXPECT_EQ(overlapping.tokens, 160);
  EXPECT_NEAR(overlapping.loss, whole.loss, 1e-2);
  EXPECT_NE(half.loss, whole.loss);
}

TEST(Scorer, MaskedTokensAreNotScored) {
  const Case c(257);
  const Score all = c.score(64, 64, 1, true);
  data::TokenFileWriter mask(c.data.prefix() + "_loss_mask", data::TokenType::kUInt8);
  std::vector<int64_t> flags(257, 1);
  for (size_t i = 0; i < flags.size(); i += 2) flags[i] = 0;
  mask.add_sequence(flags);
  mask.finish();
  const Score odd = c.score(64, 64, 1, true);
  EXPECT_EQ(all.tokens, 256);
  EXPECT_EQ(odd.tokens, 128);
  EXPECT_NE(odd.loss, all.loss);
}

}  // namespace
}  // namespace mtraining::train
