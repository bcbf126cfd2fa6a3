#include "mtraining/eval/summary.h"

#include <gtest/gtest.h>

#include <string>

namespace mtraining::eval {
namespace {

Result result(const std::string& task, std::optional<int64_t> length, std::optional<double> depth,
              std::optional<double> score, int64_t truncated = 0) {
  Result made;
  made.facts.task = task;
  made.facts.length = length;
  made.facts.depth = depth;
  made.facts.prompt_tokens = length.value_or(10) - 1;
  made.facts.truncated_tokens = truncated;
  made.score = score;
  return made;
}
const SummaryRow& only(const std::vector<SummaryRow>& rows, const std::string& by,
                       std::optional<std::string> task = {}, std::optional<int64_t> length = {},
                       std::optional<double> depth = {}) {
  const SummaryRow* found = nullptr;
  for (const SummaryRow& row : rows) {
    if (row.by != by || row.task != task || row.length != length || row.depth != depth) continue;
    EXPECT_EQ(found, nullptr) << by << " twice";
    found = &row;
  }
  EXPECT_NE(found, nullptr) << by;
  static const SummaryRow kNone;
  return found == nullptr ? kNone : *found;
}

TEST(Summary, EveryLevelIsTheMeanOfItsSamplesAndOverTasksTheMeanOfTheirMeans) {
  Summary summary;
  summary.add(result("x", 64, 0.0, 1));
  summary.add(result("x", 64, 0.0, 0));
  summary.add(result("x", 64, 1.0, 1, 3));
  summary.add(result("x", 128, 0.0, 0));
  summary.add(result("y", 64, {}, 0.25));
  const auto rows = summary.rows();
  EXPECT_EQ(only(rows, "task,length,depth", "x", 64, 0.0).score, 0.5);
  EXPECT_EQ(only(rows, "task,length,depth", "x", 64, 1.0).score, 1);
  EXPECT_EQ(only(rows, "task,length,depth", "y", 64).score, 0.25);
  EXPECT_DOUBLE_EQ(*only(rows, "task,length", "x", 64).score, 2. / 3);
  EXPECT_EQ(only(rows, "task", "x").score, 0.5);
  EXPECT_DOUBLE_EQ(*only(rows, "length", {}, 64).score, (2. / 3 + 0.25) / 2);
  EXPECT_EQ(only(rows, "length", {}, 128).score, 0);
  const SummaryRow& all = only(rows, "all");
  EXPECT_EQ(all.score, 0.375);  // of tasks: (.5 + .25) / 2; of samples it would be .45
  EXPECT_EQ(all.samples, 5);
  EXPECT_EQ(all.truncated, 1);
  EXPECT_DOUBLE_EQ(all.mean_prompt_tokens, (4 * 63 + 127) / 5.);
}

TEST(Summary, WhatHasNoScoreCountsAsASampleOnly) {
  Summary summary;
  summary.add(result("x", {}, {}, {}));
  summary.add(result("x", {}, {}, 1));
  summary.add(result("z", {}, {}, {}));
  const auto rows = summary.rows();
  EXPECT_EQ(rows.size(), 3u);  // two tasks, all: no lengths, no depths
  EXPECT_EQ(only(rows, "task", "x").score, 1);
  EXPECT_EQ(only(rows, "task", "x").scored, 1);
  EXPECT_EQ(only(rows, "task", "x").samples, 2);
  EXPECT_FALSE(only(rows, "task", "z").score);
  EXPECT_EQ(only(rows, "all").score, 1);
  EXPECT_TRUE(Summary().rows().empty());
}

}  // namespace
}  // namespace mtraining::eval
