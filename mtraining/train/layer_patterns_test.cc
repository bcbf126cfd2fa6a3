#include "mtraining/train/layer_patterns.h"

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>

#include "mtraining/testing/error_of.h"
#include "mtraining/train/tiny_run_case.h"

namespace mtraining::train {
namespace {

using pattern::PatternKind;

LayerRange range_of(const RunConfig& config, int64_t first, int64_t last) {
  LayerRange range;
  static_cast<PatternSection&>(range) = config.attention;
  range.first = first;
  range.last = last;
  return range;
}

std::string said(const RunConfig& config) {
  return testing::error_of([&] { check_patterns(config); });
}

TEST(LayerPatterns, RangesReplaceTheSectionWhereTheyAre) {
  const TinyData data(100);
  RunConfig config = tiny_config(data);
  config.model.num_hidden_layers = 6;
  config.attention.layers = {range_of(config, 0, 1), range_of(config, 4, 4)};
  config.attention.layers[0].pattern = PatternKind::kDense;
  config.attention.layers[1].options.p_slash = 0.7;
  ASSERT_EQ(said(config), "");
  const LayerPatterns patterns = layer_patterns(config);
  ASSERT_EQ(patterns.size(), 6u);
  for (size_t l = 0; l < 6; ++l) {
    EXPECT_EQ(patterns[l].kind, l < 2 ? PatternKind::kDense : PatternKind::kVerticalSlash) << l;
    EXPECT_EQ(patterns[l].vertical_slash.p_slash, l == 4 ? 0.7 : 0.4) << l;
  }
  EXPECT_FALSE(all_dense(patterns));
  EXPECT_TRUE(all_dense(dense_layers(config)));

  RunConfig bad = config;
  bad.attention.layers[1].first = 1;
  EXPECT_EQ(said(bad), "attention.layers[1].range: layer 1 is in attention.layers[0] too");
  bad = config;
  bad.attention.layers[1].last = 6;
  EXPECT_EQ(said(bad), "attention.layers[1].range: expected layers of 0 to 5, got 4-6");
  bad.attention.layers[1].last = 3;
  EXPECT_EQ(said(bad), "attention.layers[1].range: expected layers of 0 to 5, got 4-3");
  bad = config;
  bad.attention.layers[0].options.p_slash = 2;
  EXPECT_EQ(said(bad), "attention.layers[0].p_slash: expected a number in [0, 1], got 2");
  bad = config;
  bad.attention.pattern = PatternKind::kFixed;
  EXPECT_EQ(
      said(bad),
      "attention.pattern: \"fixed\" needs pattern_file, or fixed_columns and fixed_diagonals, "
      "got neither");
  bad.attention.fixed_columns = 3;
  EXPECT_NE(said(bad).find("got one of the two counts"), std::string::npos);
  bad.attention.pattern_file = "p.json";
  EXPECT_NE(said(bad).find("got both"), std::string::npos);
  bad.attention.fixed_columns.reset();
  EXPECT_EQ(said(bad), "");
  bad.attention.estimate = true;
  EXPECT_EQ(said(bad), "");
  bad = config;
  bad.attention.layers[0].estimate = true;
  EXPECT_EQ(said(bad),
            "attention.layers[0].estimate: expected false without pattern_file, got true");
  bad = config;
  bad.attention.pattern = PatternKind::kMoba;
  bad.attention.options.recall_floor = 0.5;
  EXPECT_NE(said(bad).find("attention.recall_floor: expected 0 for pattern = \"moba\""),
            std::string::npos);
}

TEST(LayerPatterns, ADenseLayerAmongSparseOnesIsCountedAndTrainsTheSameOverRanks) {
  const TinyData data;
  RunConfig config = tiny_config(data);
  config.train.steps = 3;
  config.train.recall_every = 1;
  const TinyResult sparse = run_tiny(config, 1, 1);
  config.attention.layers = {range_of(config, 1, 1)};
  config.attention.layers[0].pattern = PatternKind::kDense;
  const TinyResult one = run_tiny(config, 1, 1);
  const double dense = index::density(index::dense_index(1, 4, 512));
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(one.steps[i].heads_dense, 4) << sparse.steps[i].heads_dense;
    EXPECT_NEAR(one.steps[i].attention_density, (index::density(*one.indices[i][0][0]) + dense) / 2,
                1e-9);
    EXPECT_GT(*one.steps[i].attention_recall, *sparse.steps[i].attention_recall);
  }
  EXPECT_EQ(index::density(*one.indices[0][0][1]), dense);
  const TinyResult many = run_tiny(config, 4, 2, &one.indices);
  for (size_t i = 0; i < 3; ++i) EXPECT_NEAR(many.steps[i].loss / one.steps[i].loss, 1, 1e-5);
}

TEST(LayerPatterns, HeadsBelowTheRecallFloorGoDenseAndAreCounted) {
  const TinyData data;
  RunConfig config = tiny_config(data);
  config.train.steps = 1;
  config.attention.options.recall_floor = 0;
  EXPECT_EQ(run_tiny(config, 1, 1).steps[0].heads_dense, 0);
  config.attention.options.recall_floor = 1;  // no sparse head covers everything
  config.train.global_batch_size = 2;
  const trace::StepMetrics all = run_tiny(config, 2, 2).steps[0];
  EXPECT_EQ(all.heads_dense, 2 * 4 * 2);  // layers, heads, samples
  EXPECT_GT(all.attention_density, 1);
  config.parallel.dp_size = 2;
  EXPECT_EQ(run_tiny(config, 4, 2).steps[0].heads_dense, 2 * 4 * 2);
}

TEST(LayerPatterns, EveryPatternTrainsTheSameOverRanks) {
  const TinyData data;
  const std::string file = (data.folder() / "lists.json").string();
  std::ofstream(file) << R"({"name": "lists", "seq_len": 512, "heads": [
    {"offset_ranges": [[0, 64], [200, 210]], "columns": [0, 1, 300]},
    {"offset_ranges": [[0, 1]], "columns": []}, {"offset_ranges": [[0, 65]], "columns": [5]},
    {"offset_ranges": [[0, 512]], "columns": []}]})";
  for (const int kind : {0, 1, 2, 3}) {
    RunConfig config = tiny_config(data);
    config.train.steps = 3;
    config.train.recall_every = 2;
    config.attention.pattern = kind < 2    ? PatternKind::kFixed
                               : kind == 2 ? PatternKind::kXAttention
                                           : PatternKind::kMoba;
    if (kind == 0) config.attention.pattern_file = file;
    if (kind == 1) config.attention.fixed_columns = 40, config.attention.fixed_diagonals = 2;
    config.attention.xattention.threshold = 0.5;
    config.attention.moba = {128, 2};
    const TinyResult one = run_tiny(config, 1, 1);
    EXPECT_LT(one.steps[0].attention_density, 0.9) << kind;
    EXPECT_GT(*one.steps[0].attention_recall, 0.1) << kind;
    EXPECT_LT(*one.steps[0].attention_recall, 1) << kind;
    EXPECT_EQ(one.steps[0].caps_hit, 0) << kind;
    for (const auto layout : {layout::LayoutKind::kBlockStriped, layout::LayoutKind::kZigzag}) {
      config.attention.layout = layout;
      const TinyResult replayed = run_tiny(config, 4, 2, &one.indices);
      const TinyResult online = run_tiny(config, 4, 2);
      EXPECT_TRUE(online.ranks_agree);
      for (size_t i = 0; i < 3; ++i) {
        EXPECT_NEAR(replayed.steps[i].loss / one.steps[i].loss, 1, 1e-5) << kind;
        EXPECT_NEAR(replayed.steps[i].grad_norm / one.steps[i].grad_norm, 1, 1e-5) << kind;
        EXPECT_NEAR(online.steps[i].loss / one.steps[i].loss, 1, 1e-3) << kind;
        EXPECT_GE(online.steps[i].step_imbalance, online.steps[i].worker_imbalance - 1e-9);
      }
    }
  }
  RunConfig config = tiny_config(data);
  config.attention.pattern = PatternKind::kFixed;
  config.attention.pattern_file = file;
  config.train.seq_len = 500;
  EXPECT_THROW(layer_patterns(config), InvalidArgument);
  config.train.seq_len = 512;
  config.model.num_attention_heads = 2;
  EXPECT_THROW(layer_patterns(config), InvalidArgument);
}

TEST(LayerPatterns, ColumnsTooManyToExchangeOnceAreCounted) {
  const TinyData data;
  RunConfig config = tiny_config(data);
  config.train.steps = 1;
  config.attention.options.p_slash = 0;
  config.attention.options.p_vertical = 1;                         // every key a column
  EXPECT_EQ(run_tiny(config, 2, 2).steps[0].columns_per_step, 2);  // layers
  EXPECT_EQ(run_tiny(config, 1, 1).steps[0].columns_per_step, 0);  // nothing travels
  config.attention.columns = attention::ColumnMode::kPerStep;
  EXPECT_EQ(run_tiny(config, 2, 2).steps[0].columns_per_step, 0);  // asked for
  config.attention.columns = attention::ColumnMode::kOnce;
  config.attention.options.p_vertical = 0.01;
  EXPECT_EQ(run_tiny(config, 2, 2).steps[0].columns_per_step, 0);
}

TEST(Mfu, IsTheModelsWorkOverTheDevicesPeak) {
  const TinyData data;
  RunConfig config = tiny_config(data);
  config.attention.pattern = PatternKind::kDense;
  config.train.steps = 1;
  config.train.global_batch_size = 2;
  EXPECT_FALSE(run_tiny(config, 1, 1).steps[0].mfu.has_value());
  config.train.peak_flops_per_s = 1e12;
  // Parameters of the matrices, the tied head counted once; a pair costs 2 D in q k^T and 2 D in p v.
  const double layer = 32 * 64 + 2 * 32 * 32 + 64 * 32 + 3 * 32 * 48;
  const double dense_flops = 6 * (2 * layer + 64 * 32) * 2 * 512;
  const double pairs = 2 * 2 * 4 * (8 * 9 / 2) * 64 * 64;  // samples, layers, heads, blocks
  for (const int dp_size : {1, 2}) {
    config.parallel.dp_size = dp_size;
    const trace::StepMetrics m = run_tiny(config, 2, 2).steps[0];
    EXPECT_NEAR(*m.mfu * m.step_s * 1e12 * 2 / (dense_flops + pairs * 4 * 16 * 3.5), 1, 1e-6);
  }
}

TEST(MixedPrecision, TwentyStepsStayCloseToFloat32) {
  const TinyData data;
  RunConfig config = tiny_config(data);
  const TinyResult wide = run_tiny(config, 1, 1);
  config.model.dtype = at::kBFloat16;
  const TinyResult narrow = run_tiny(config, 2, 2);
  double worst = 0;
  for (size_t i = 0; i < 20; ++i)
    worst = std::max(worst, std::abs(narrow.steps[i].loss / wide.steps[i].loss - 1));
  EXPECT_LT(worst, 0.01);
  EXPECT_GT(worst, 0);
  EXPECT_LT(narrow.steps.back().loss, narrow.steps.front().loss - 0.3);
}

}  // namespace
}  // namespace mtraining::train
