#include "cli/simulate.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "mtraining/base/check.h"
#include "mtraining/sim/pattern_shapes.h"
#include "mtraining/sim/traffic_bytes.h"
#include "mtraining/testing/error_of.h"
#include "mtraining/testing/scratch_folder.h"

namespace mtraining::cli {
namespace {

using Json = nlohmann::json;

std::string run(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "simulate");
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  ::testing::internal::CaptureStdout();
  int code = -1;
  try {
    code = run_simulate(static_cast<int>(argv.size()), argv.data());
  } catch (...) {
    const std::string printed = ::testing::internal::GetCapturedStdout();
    EXPECT_EQ(printed, "") << "nothing is printed before a mistake of the user is found";
    throw;
  }
  EXPECT_EQ(code, 0);
  return ::testing::internal::GetCapturedStdout();
}

std::string error_of(const std::vector<std::string>& arguments) {
  return testing::error_of([&] { run(arguments); });
}

/// A folder that goes with the test.
class Simulate : public ::testing::Test {
 protected:
  std::string pattern_file(std::string_view shape, int64_t seq_len) {
    const sim::OffsetPattern pattern = sim::make_pattern(shape, seq_len, 16);
    Json heads = Json::array();
    for (const sim::OffsetHead& head : pattern.heads) {
      Json ranges = Json::array();
      for (const sim::OffsetRange& range : head.offset_ranges) {
        ranges.push_back({range.begin, range.end});
      }
      heads.push_back({{"offset_ranges", ranges}, {"columns", head.columns}});
    }
    const auto path = folder_ / concat(shape, "_", seq_len, ".json");
    std::ofstream(path) << Json{{"name", shape}, {"seq_len", seq_len}, {"heads", heads}};
    return path.string();
  }

  testing::ScratchFolder folder_;
};

const std::vector<std::string> kPaper = {"--topology",   "4x8",  "--t-comp-ms",  ".51",
                                         "--t-intra-ms", ".13",  "--t-inter-ms", ".98",
                                         "--t-index-ms", "1.13", "--t-cpu-ms",   "2.08"};

/// The row of a table, by layout, stripe (0: none) and ring.
Json row_of(const Json& table, const std::string& layout, int64_t stripe, const std::string& ring) {
  for (const Json& row : table) {
    if (row["layout"] == layout && row["ring"] == ring && row.value("stripe", 0) == stripe)
      return row;
  }
  ADD_FAILURE() << "no row " << layout << " " << stripe << " " << ring;
  return {};
}

TEST_F(Simulate, PrintsThePapersTotalsWithTwoDecimals) {
  const std::string text = run(kPaper);
  EXPECT_NE(text.find("34.10"), std::string::npos) << text;
  EXPECT_NE(text.find("19.53"), std::string::npos) << text;
  EXPECT_NE(text.find("-42.7 %"), std::string::npos) << text;
  auto arguments = kPaper;
  arguments.push_back("--json");
  const Json json = Json::parse(run(arguments));
  EXPECT_NEAR(json["closed_form"]["flat_ms"].get<double>(), 34.10, 1e-9);
  EXPECT_NEAR(json["closed_form"]["hierarchical_ms"].get<double>(), 19.53, 1e-9);
}

TEST_F(Simulate, TableShowsBlockStripedBalancedAndZigzagBesideIt) {
  for (std::string_view shape : sim::pattern_shapes()) {
    const Json json =
        Json::parse(run({"--topology", "4x8", "--pattern", pattern_file(shape, 32768), "--json"}));
    const Json ours = row_of(json["table"], "block_striped", 64, "flat");
    const Json zigzag = row_of(json["table"], "zigzag", 0, "flat");
    EXPECT_LE(ours["lockstep_imbalance"], 1.07) << shape;
    EXPECT_LE(ours["worker_imbalance"], 1.1) << shape;
    EXPECT_GT(zigzag["lockstep_imbalance"], ours["lockstep_imbalance"]) << shape;
    EXPECT_EQ(ours["pairs"], zigzag["pairs"]);
    EXPECT_EQ(ours["pairs"], json["pattern"]["pairs"]);
    EXPECT_EQ(json["unsupported_layouts"], Json::array({"striped"}));
  }
}

TEST_F(Simulate, BytesAreThoseOfTheSchedules) {
  const Json json = Json::parse(run({"--topology", "2x4", "--pattern", pattern_file("local", 32768),
                                     "--kv-heads", "4", "--head-dim", "64", "--json"}));
  const sim::ShardSizes sizes{.tokens = 32768 / 8, .num_kv_heads = 4, .head_dim = 64};
  const Json row = row_of(json["table"], "block_striped", 128, "hierarchical");
  // 1 of 2 nodes is one outer hop away; (dk, dv) make 2.
  EXPECT_EQ(row["forward"]["inter_bytes_largest_rank"], sizes.kv_bytes());
  EXPECT_EQ(row["backward"]["inter_bytes_largest_rank"], sizes.kv_bytes() + 2 * sizes.grad_bytes());
  EXPECT_EQ(row["forward"]["inter_bytes"], 8 * sizes.kv_bytes());
  EXPECT_EQ(row["forward"]["intra_bytes"], 8 * 2 * 3 * sizes.kv_bytes());
  const Json flat = row_of(json["table"], "zigzag", 0, "flat");
  EXPECT_EQ(flat["forward"]["inter_bytes"], 2 * 7 * sizes.kv_bytes()) << "two ranks send to a node";
}

TEST_F(Simulate, GivenTimesRuleTheTimeline) {
  auto arguments = kPaper;
  for (const char* more : {"--inner", "ring", "--layout", "block_striped", "--stripe", "64",
                           "--columns", "per_step", "--json"}) {
    arguments.emplace_back(more);
  }
  arguments.emplace_back("--pattern");
  arguments.push_back(pattern_file("wide", 131072));
  const Json json = Json::parse(run(arguments));
  const double flat = row_of(json["table"], "block_striped", 64, "flat")["forward"]["ms"];
  const double hierarchical =
      row_of(json["table"], "block_striped", 64, "hierarchical")["forward"]["ms"];
  // Near the closed form; what is above it is the unevenness of the steps.
  EXPECT_GE(flat, 33.5);
  EXPECT_LE(flat, 34.10 * 1.1);
  EXPECT_GE(hierarchical, 19.53 * 0.999);
  EXPECT_LE(hierarchical, 19.53 * 1.2);
}

TEST_F(Simulate, TimelineCoversEveryLaunchOfEveryRank) {
  const std::string pattern = pattern_file("typical", 32768);
  const std::string text = run({"--topology", "2x2", "--pattern", pattern});
  for (const char* rank : {"rank   0 |", "rank   3 |"})
    EXPECT_NE(text.find(rank), std::string::npos) << text;
  const Json json = Json::parse(
      run({"--topology", "2x2", "--pattern", pattern, "--ring", "flat", "--backward", "--json"}));
  ASSERT_EQ(json["timeline"]["ranks"].size(), 4u);
  EXPECT_EQ(json["timeline"]["direction"], "backward");
  int64_t pairs = 0;
  for (const Json& rank : json["timeline"]["ranks"]) {
    int launches = 0;
    for (const Json& span : rank) {
      launches += span["what"] == "launch";
      pairs += span.value("pairs", int64_t{0});
      EXPECT_LE(span["begin_us"], span["end_us"]);
    }
    EXPECT_EQ(launches, 4);
  }
  EXPECT_EQ(pairs, json["pattern"]["pairs"].get<int64_t>());
}

TEST_F(Simulate, TraceFileIsJson) {
  const auto path = folder_ / "trace.json";
  run({"--topology", "2x2", "--pattern", pattern_file("local", 4096), "--trace", path.string()});
  std::ifstream in(path);
  const Json json = Json::parse(in);
  EXPECT_FALSE(json.empty());
}

TEST_F(Simulate, StripedIsShownForADensePatternOnly) {
  const auto path = folder_ / "dense.json";
  std::ofstream(path)
      << R"({"name": "dense", "seq_len": 4096, "heads": [{"offset_ranges": [[0, 4096]], "columns": []}]})";
  const Json json = Json::parse(run({"--topology", "1x4", "--pattern", path.string(), "--json"}));
  row_of(json["table"], "striped", 0, "flat");
  EXPECT_TRUE(json["unsupported_layouts"].empty());
  EXPECT_THROW(
      run({"--topology", "1x4", "--pattern", pattern_file("local", 4096), "--layout", "striped"}),
      Unsupported);
}

TEST_F(Simulate, ListsOfBlocksAreCountedByRank) {
  // Each query block attends to itself and the first one, the last one to all.
  Json head = {{"key_blocks", Json::array()}};
  for (int q = 0; q < 32; ++q) {
    Json list = Json::array();
    for (int k = 0; k <= q; ++k)
      if (k == 0 || k == q || q == 31) list.push_back(k);
    head["key_blocks"].push_back(list);
  }
  const auto path = folder_ / "blocks.json";
  std::ofstream(path) << Json{{"name", "b"}, {"seq_len", 2048}, {"heads", {head, head}}};
  const Json json = Json::parse(run({"--topology", "1x4", "--pattern", path.string(), "--json"}));
  constexpr int64_t kBlocks = 1 + 2 * 30 + 32;
  EXPECT_EQ(json["pattern"]["pairs"], 2 * kBlocks * 4096);
  const Json zigzag = row_of(json["table"], "zigzag", 0, "flat"),
             contiguous = row_of(json["table"], "contiguous", 0, "flat");
  EXPECT_EQ(zigzag["pairs"], 2 * kBlocks * 4096);
  // The last of four ranks has 7 blocks of two and one of 32.
  EXPECT_DOUBLE_EQ(contiguous["worker_imbalance"], (7.0 * 2 + 32) * 4 / kBlocks);
  EXPECT_EQ(json["unsupported_layouts"], Json::array({"striped"}));
}

TEST_F(Simulate, MistakesAreOneSentenceThatNamesThem) {
  const std::string pattern = pattern_file("local", 4096);
  const auto names = [&](std::vector<std::string> arguments, const char* what) {
    const std::string message = error_of(arguments);
    EXPECT_NE(message.find(what), std::string::npos) << message;
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
  };
  names({}, "--topology");
  names({"--topology", "4by8", "--t-comp-ms", "1"}, "4x8");
  names({"--topology", "4x8"}, "--t-comp-ms");
  names({"--topology", "4x8", "--patern", "x"}, "--pattern");
  names({"--topolgy", "4x8"}, "--topology");
  names({"--topology", "4x8", "--t-comp-ms", "x"}, "--t-comp-ms");
  names({"--topology", "4x8", "--t-comp-ms", "-1"}, "compute");
  names({"--topology", "4x8", "--t-comp-ms", "nan"}, "compute");
  names({"--topology", "4x8", "--t-comp-ms", "1", "--trace", "x.json"}, "--trace");
  names({"--topology", "4x8", "--pattern", "none.json"}, "none.json");
  names({"--topology", "4x8", "--pattern", pattern, "--layout", "zig"}, "block_striped");
  names({"--topology", "4x8", "--pattern", pattern, "--stripe", "96"}, "stripe");
  names({"--topology", "4x8", "--pattern", pattern, "--ring", "round"}, "flat");
  names({"--topology", "4x8", "--pattern", pattern, "--ring-stride", "2"}, "ring_stride");
  names({"--topology", "4x8", "--pattern", pattern, "--prefetch-steps", "0"}, "prefetch_steps");
  names({"--topology", "4x8", "--pattern", pattern, "--kv-heads", "5"}, "--kv-heads");
  names({"--topology", "4x8", "--pattern", pattern, "--columns", "twice"}, "--columns");
  names({"--topology", "4x8", "--pattern", pattern, "--tflops", "0"}, "--tflops");
  names({"--topology", "4x8", "--pattern", "none.json", "--ring-stride", "2"}, "ring_stride");
  names({"--topology", "4x8", "--pattern", pattern, "--kv-heads", "0"},
        "--kv-heads: expected >= 1");
  names({"--topology", "4x8", "--pattern", pattern, "--trace", ""}, "--trace: expected a file");
  for (const char* stripe : {"0", "-64", "96"}) {
    const std::string message =
        error_of({"--topology", "4x8", "--pattern", pattern, "--stripe", stripe});
    EXPECT_NE(message.find("--stripe: expected a positive multiple of 64"), std::string::npos);
    EXPECT_EQ(message.find("seq_len"), std::string::npos) << message;
  }
  for (const char* flag : {"--layout", "--ring", "--columns", "--inner"}) {
    names({"--topology", "4x8", "--t-comp-ms", "1", flag, "once"}, "beside --pattern FILE");
  }
  names({"--topology", "4x8", "--t-comp-ms", "1", "--kv-heads", "0"}, "--kv-heads");
}

TEST_F(Simulate, ParsersMistakesAreInTheProjectsWords) {
  EXPECT_EQ(error_of({"--topology", "4x8", "--t-comp-ms", "x"}),
            "--t-comp-ms: expected one number, got 'x'");
  EXPECT_EQ(error_of({"--topology", "4x8", "--ring-stride", "1.5"}),
            "--ring-stride: expected one whole number, got '1.5'");
  EXPECT_EQ(error_of({"--topology"}), "--topology: expected one text, got none");
  EXPECT_EQ(error_of({"--topology", "4x8", "--pattern", "p.json", "--columns", "twice"}),
            "--columns: expected once or per_step, got 'twice'");
  const auto path = folder_ / "text.json";
  std::ofstream(path) << R"({"name": "x", "seq_len": "12", "heads": []})";
  const std::string message = error_of({"--topology", "4x8", "--pattern", path.string()});
  EXPECT_NE(message.find(R"(expected a whole number, got "12")"), std::string::npos) << message;
}

TEST_F(Simulate, TopologiesThatCannotBeSimulatedAreRefused) {
  const std::string pattern = pattern_file("local", 4096);
  for (const char* topology : {"1x257", "32x32", "64x64", "1000x1000", "46340x46340", "1x100000"}) {
    EXPECT_THROW(run({"--topology", topology, "--pattern", pattern}), Unsupported) << topology;
  }
  EXPECT_NE(run({"--topology", "64x64", "--t-comp-ms", "1"}).find("hierarchical"),
            std::string::npos);
}

TEST_F(Simulate, HelpHasExamples) {
  const std::string text = run({"--help"});
  EXPECT_NE(text.find("Examples:"), std::string::npos);
  EXPECT_NE(text.find("--topology"), std::string::npos);
}

}  // namespace
}  // namespace mtraining::cli
