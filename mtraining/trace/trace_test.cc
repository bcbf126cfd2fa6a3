#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cmath>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>

#include "mtraining/base/check.h"
#include "mtraining/testing/scratch_folder.h"
#include "mtraining/trace/chrome_trace.h"
#include "mtraining/trace/metrics.h"

namespace mtraining::trace {
namespace {

TEST(MetricsFile, EveryLineHasEveryKeyAndUnmeasuredValuesAreNull) {
  const testing::ScratchFolder folder;
  const auto path = folder / "metrics.jsonl";
  {
    MetricsFile file(path);
    StepMetrics m;
    m.train_step = 1;
    m.loss = std::numeric_limits<double>::quiet_NaN();
    file.write(m);
    m.train_step = 2;
    m.loss = 2.5;
    m.valid_loss = 3.5;
    file.write(m);
  }
  std::ifstream in(path);
  std::vector<nlohmann::json> rows;
  for (std::string line; std::getline(in, line);) rows.push_back(nlohmann::json::parse(line));
  ASSERT_EQ(rows.size(), 2u);
  for (const auto& row : rows) {
    for (const char* key : {"train_step",
                            "loss",
                            "valid_loss",
                            "grad_norm",
                            "lr",
                            "tokens",
                            "tokens_total",
                            "tokens_per_s",
                            "tokens_per_s_per_gpu",
                            "mfu",
                            "step_s",
                            "data_wait_s",
                            "attention_density",
                            "attention_recall",
                            "worker_imbalance",
                            "step_imbalance",
                            "comm_bytes",
                            "peak_memory_bytes",
                            "peak_tensor_bytes",
                            "skipped",
                            "heads_dense",
                            "caps_hit"}) {
      EXPECT_TRUE(row.contains(key)) << key;
    }
  }
  EXPECT_TRUE(rows[0]["loss"].is_null());
  EXPECT_TRUE(rows[0]["valid_loss"].is_null());
  EXPECT_EQ(rows[1]["loss"], 2.5);
  EXPECT_EQ(rows[1]["valid_loss"], 3.5);
  EXPECT_THROW(MetricsFile("/nonexistent_folder/metrics.jsonl"), ExternalError);
}

TEST(MetricsFile, WhatIsNoFileOrAnotherFileIsRefused) {
  const testing::ScratchFolder folder;
  const auto path = folder / "metrics.jsonl";
  const auto refused = [&] {
    for (const int64_t keep_to : {0, 3}) EXPECT_THROW(MetricsFile(path, keep_to), ExternalError);
    std::filesystem::remove(path);
  };
  std::filesystem::create_directory(path);
  refused();
  std::filesystem::create_symlink(path, path);
  refused();
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  refused();
  MetricsFile file(path);
  file.write({});
  std::filesystem::remove(path);
  EXPECT_THROW(file.write({}), ExternalError);
  MetricsFile of_another_run(path);
  EXPECT_THROW(file.write({}), ExternalError);
  of_another_run.write({});
}

TEST(ChromeTrace, MergedFileHasAProcessARankAndEverySpan) {
  std::vector<std::string> ranks;
  for (int r = 0; r < 3; ++r) {
    SpanRecorder recorder;
    for (int s = 0; s < 4; ++s) {
      recorder.add(
          {"forward", "ring", 1000 + r * 10 + s * 100, 1050 + r * 10 + s * 100, 7, 2, s, 640});
    }
    recorder.add({"optimizer", "step", 1500, 1600, 7});
    ranks.push_back(recorder.serialize());
  }
  const testing::ScratchFolder folder;
  const auto path = folder / "trace.json";
  write_chrome_trace(path, ranks);
  std::ifstream in(path);
  const auto trace = nlohmann::json::parse(in);
  std::set<int> processes;
  std::set<std::string> names;
  int spans = 0;
  for (const auto& event : trace["traceEvents"]) {
    if (event["ph"] == "M" && event["name"] == "process_name") names.insert(event["args"]["name"]);
    if (event["ph"] != "X") continue;
    ++spans;
    processes.insert(event["pid"].get<int>());
    EXPECT_GE(event["ts"].get<int64_t>(), 0);
    if (event["name"] == "forward") {
      EXPECT_EQ(event["dur"], 50);
      EXPECT_EQ(event["args"]["layer"], 2);
      EXPECT_EQ(event["ts"].get<int64_t>(),
                event["pid"].get<int64_t>() * 10 + event["args"]["ring_step"].get<int64_t>() * 100);
    } else {
      EXPECT_FALSE(event["args"].contains("layer"));
    }
  }
  EXPECT_EQ(spans, 15);
  EXPECT_EQ(processes.size(), 3u);
  EXPECT_EQ(names, (std::set<std::string>{"rank 0", "rank 1", "rank 2"}));
  EXPECT_THROW(write_chrome_trace(path, {"not json"}), InvalidArgument);
}

}  // namespace
}  // namespace mtraining::trace
