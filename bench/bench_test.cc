// What the benches say of themselves: rows, cases, the CPU launches, what a pattern chooses.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>

#include "bench/attention_bench.h"
#include "bench/qk_report.h"
#include "bench/ring_bench.h"
#include "bench/rows.h"
#include "bench/sampled_errors.h"
#include "bench/sdpa_peer.h"
#include "bench/torch_device.h"
#include "mtraining/base/check.h"
#include "mtraining/checkpoint/safetensors.h"
#include "mtraining/index/step_pairs.h"
#include "mtraining/testing/error_of.h"

namespace mtraining::bench {
namespace {

AttentionRow some_row() {
  AttentionRow row;
  row.case_name = "attention";
  row.pattern = "dense";
  row.workload = {.mask = "causal",
                  .dtype = "float32",
                  .seq_len = 256,
                  .num_queries = 256,
                  .num_q_heads = 4,
                  .num_kv_heads = 2,
                  .head_dim = 64,
                  .inputs = "a",
                  .device = "cpu",
                  .harness = "h"};
  row.pairs = 1e6;
  row.forward = {.wall_ms = {3, 1, 2}, .processor_ms = {6, 2, 4}};
  row.backward = {.wall_ms = {10, 30, 20}, .processor_ms = {20, 60, 40}};
  return row;
}

TEST(Rows, SayMedianRatesAndWhatWasNotMeasured) {
  const Json line = Json::parse(to_line(some_row(), {.commit = "abc", .harness = "h"}));
  const std::vector<std::string> first = {"case",       "pattern", "seq_len",  "pairs",
                                          "fwd_ms",     "bwd_ms",  "index_ms", "fwd_tflops",
                                          "bwd_tflops", "device",  "commit"};
  std::vector<std::string> keys;
  for (const auto& [key, value] : line.items()) keys.push_back(key);
  keys.resize(first.size());
  EXPECT_EQ(keys, first);
  EXPECT_EQ(line["fwd_ms"], 2);
  EXPECT_EQ(line["fwd_ms_max"], 3);
  EXPECT_TRUE(line["index_ms"].is_null());
  EXPECT_NEAR(line["fwd_tflops"].get<double>(), 4 * 64 * 1e6 / 2e-3 * 1e-12, 1e-3);
  EXPECT_NEAR(line["bwd_tflops"].get<double>(), 10 * 64 * 1e6 / 20e-3 * 1e-12, 1e-3);
  EXPECT_FALSE(line.contains("peer"));
  AttentionRow peer = some_row();
  peer.peer = "torch sdpa";
  EXPECT_EQ(Json::parse(to_line(peer, {}))["peer"], "torch sdpa");
  EXPECT_TRUE(Json::parse(to_line(peer, {}))["commit"].is_null());
}

TEST(Rows, RatioIsTakenRepeatByRepeat) {
  AttentionRow slow = some_row(), fast = some_row();
  // Both three times as slow in the second repeat: the ratio does not notice.
  slow.forward.wall_ms = {80, 240, 80};
  slow.backward.wall_ms = {20, 60, 20};
  fast.forward.wall_ms = {8, 24, 8};
  fast.backward.wall_ms = {1, 3, 1};
  fast.index.wall_ms = {1, 3, 1};
  fast.index.processor_ms = {1, 3, 1};
  const Ratio r = ratio(slow, fast);
  EXPECT_DOUBLE_EQ(r.wall.min, 10);
  EXPECT_DOUBLE_EQ(r.wall.max, 10);
  ASSERT_TRUE(r.processor.has_value());
  EXPECT_DOUBLE_EQ(r.processor->median, 26.0 / 27);
}

TEST(Rows, RatioIsRefusedWhereTheWorkDiffers) {
  const AttentionRow row = some_row();
  EXPECT_EQ(testing::error_of([&] { ratio(row, row); }), "");
  const auto refused = [&](const char* what, auto change) {
    AttentionRow other = row;
    change(other.workload);
    const std::string error = testing::error_of([&] { ratio(row, other); });
    EXPECT_NE(error.find(what), std::string::npos) << error;
  };
  refused("mask", [](Workload& w) { w.mask = "full"; });
  refused("dtype", [](Workload& w) { w.dtype = "bf16"; });
  refused("seq_len", [](Workload& w) { w.seq_len = 512; });
  refused("query rows", [](Workload& w) { w.num_queries = 64; });
  refused("heads", [](Workload& w) { w.num_q_heads = 8; });
  refused("kv heads", [](Workload& w) { w.num_kv_heads = 4; });
  refused("head_dim", [](Workload& w) { w.head_dim = 128; });
  refused("inputs", [](Workload& w) { w.inputs = "b"; });
  refused("device", [](Workload& w) { w.device = "cpu, 4 threads"; });
  refused("program", [](Workload& w) { w.harness = "other"; });
  AttentionRow fewer = row;
  fewer.forward.wall_ms.pop_back();
  fewer.backward.wall_ms.pop_back();
  EXPECT_NE(testing::error_of([&] { ratio(row, fewer); }).find("repeats"), std::string::npos);
}

TEST(AttentionCase, DensityIsWhatWasAskedFor) {
  for (const int64_t seq_len : {4096, 16384}) {
    for (const double density : {.02, .05, .1, .2, .5}) {
      const AttentionCase c = density_case({.seq_len = seq_len}, density);
      EXPECT_NEAR(index::density(c.index), density,
                  .02 * density + 64.0 / static_cast<double>(seq_len))
          << seq_len;
    }
    EXPECT_GE(index::density(density_case({.seq_len = seq_len}, 1).index), 1);
  }
}

TEST(AttentionLaunch, DenseOutIsThePeers) {
  const AttentionSizes sizes{.seq_len = 320, .num_q_heads = 4, .num_kv_heads = 2, .head_dim = 32};
  const AttentionInputs inputs = make_inputs(sizes, 3);
  SdpaPeer peer(sizes, inputs, 1);
  Times times;
  peer.forward(times);
  const auto ours = make_launch({.threads = 1}, sizes, inputs, density_case(sizes, 1).index);
  ours->forward(times);
  ASSERT_EQ(times.wall_ms.size(), 2u);
  const std::vector<double> expected = peer.out(), got = ours->out();
  ASSERT_EQ(got.size(), expected.size());
  double largest = 0;
  for (size_t i = 0; i < got.size(); ++i)
    largest = std::max(largest, std::abs(got[i] - expected[i]));
  EXPECT_LT(largest, 2e-5);
}

TEST(AttentionLaunch, ARanksRowsAreThoseOfOneRank) {
  const AttentionSizes sizes{.seq_len = 1000, .num_q_heads = 2, .num_kv_heads = 1, .head_dim = 32};
  const AttentionInputs inputs = make_inputs(sizes, 3);
  const AttentionCase c = density_case(sizes, .3);
  Times times;
  const auto whole = make_launch({.threads = 1}, sizes, inputs, c.index);
  whole->forward(times);
  const std::vector<double> expected = whole->out();
  const int64_t row = sizes.num_q_heads * sizes.head_dim;
  for (const layout::LayoutKind kind :
       {layout::LayoutKind::kBlockStriped, layout::LayoutKind::kZigzag}) {
    double pairs = 0, largest = 0;
    for (int rank = 0; rank < 3; ++rank) {
      const auto part = make_launch({.threads = 1, .layout = kind, .cp_size = 3, .cp_rank = rank},
                                    sizes, inputs, c.index);
      part->forward(times);
      part->backward(times);
      pairs += part->pairs();
      const layout::Layout layout({.kind = kind, .seq_len = sizes.seq_len, .cp_size = 3});
      const std::vector<int64_t> positions = layout.positions(rank);
      const std::vector<double> got = part->out();
      for (size_t i = 0; i < positions.size(); ++i) {
        for (int64_t d = 0; d < row && positions[i] < sizes.seq_len; ++d)
          largest =
              std::max(largest, std::abs(got[i * row + d] - expected[positions[i] * row + d]));
      }
    }
    EXPECT_DOUBLE_EQ(pairs, whole->pairs());
    EXPECT_LT(largest, 2e-5);
  }
}

TEST(AttentionBench, PeerAndCasesTakeTurnsAndARanksShareHasNoRatio) {
  AttentionBenchOptions options;
  options.sizes = {.seq_len = 256, .num_q_heads = 2, .num_kv_heads = 1, .head_dim = 32};
  options.place.threads = 1;
  options.repeats = 3;
  const AttentionInputs inputs = make_inputs(options.sizes, 1);
  const std::vector<AttentionCase> cases = {density_case(options.sizes, .5),
                                            density_case(options.sizes, 1)};
  const auto rows = bench_attention(options, inputs, cases, {.harness = "h"});
  ASSERT_EQ(rows.size(), 3u);
  EXPECT_TRUE(rows[0].peer.has_value());
  for (size_t i = 1; i < rows.size(); ++i) {
    EXPECT_FALSE(rows[i].peer.has_value());
    EXPECT_EQ(rows[i].index.wall_ms.size(), 3u);
    EXPECT_EQ(rows[i].backward.wall_ms.size(), 3u);
    EXPECT_TRUE(rows[i].more.contains("ratio_to_dense_sdpa"));
  }
  EXPECT_EQ(rows[2].pairs, total_pairs(cases[1].index));
  options.place.cp_size = 2;
  EXPECT_NE(testing::error_of([&] {
              bench_attention(options, inputs, cases, {});
            }).find("not the same work"),
            std::string::npos);
  options.peer = false;
  const auto share = bench_attention(options, inputs, cases, {});
  EXPECT_FALSE(share[0].more.contains("ratio_to_dense_sdpa"));
  EXPECT_TRUE(share[0].index.wall_ms.empty());
  options.place.device = "cuda";
  EXPECT_THROW(bench_attention(options, inputs, cases, {}), InvalidArgument);
}

TEST(SampledErrors, SayHowFarEachResultIsOff) {
  const int64_t seq_len = 200, dim = 16;
  const index::Index index =
      index::make_index(1, 4, seq_len, {{0, 1}, {0}, {0, 2}, {0, 3}}, {{3}, {70, 5}, {}, {1, 2}});
  const at::TensorOptions doubles = at::TensorOptions().dtype(at::kDouble);
  at::Tensor q = at::randn({seq_len, 4, dim}, doubles).requires_grad_(true);
  at::Tensor k = at::randn({seq_len, 2, dim}, doubles).requires_grad_(true);
  at::Tensor v = at::randn({seq_len, 2, dim}, doubles).requires_grad_(true);
  const at::Tensor dout = at::randn({seq_len, 4, dim}, doubles);
  const at::Tensor at_row = at::arange(seq_len).unsqueeze(1), at_key = at::arange(seq_len);
  const at::Tensor distance = at_row.div(64, "floor") - at_key.div(64, "floor");
  std::vector<at::Tensor> outs, lses;
  for (int h = 0; h < 4; ++h) {
    at::Tensor mask = at::zeros({seq_len, seq_len}, at::kBool);
    for (const int32_t d : index.diagonals.row(h)) mask |= distance == d;
    for (const int32_t c : index.columns.row(h)) mask |= at_key == c;
    mask &= at_key <= at_row;
    const at::Tensor scores =
        (q.select(1, h).mm(k.select(1, h / 2).t()) / 4.0).masked_fill(~mask, -INFINITY);
    outs.push_back(scores.softmax(1).mm(v.select(1, h / 2)));
    lses.push_back(scores.logsumexp(1));
  }
  const at::Tensor out = at::stack(outs, 1);
  const auto gradients = torch::autograd::grad({out}, {q, k, v}, {dout});
  AskedAttention asked{.q = q.detach(),
                       .dout = dout,
                       .k = k.detach(),
                       .v = v.detach(),
                       .positions = {},
                       .index = &index,
                       .softmax_scale = .25};
  for (int64_t i = 0; i < seq_len; ++i) asked.positions.push_back(i);
  const ComputedAttention exact{.out = out.detach(),
                                .dq = gradients[0],
                                .lse = at::stack(lses).detach(),
                                .dk = gradients[1],
                                .dv = gradients[2]};
  const auto errors = [&](const ComputedAttention& computed) {
    return sampled_errors(asked, computed, 200, 7);
  };
  const Json right = errors(exact);
  ASSERT_EQ(right.size(), 5u);
  for (const auto& [key, value] : right.items()) EXPECT_LT(value.get<double>(), 1e-12) << key;
  const auto off = [&](const char* key, at::Tensor ComputedAttention::*member) {
    ComputedAttention wrong = exact;
    wrong.*member = exact.*member * 1.01;
    EXPECT_NEAR(errors(wrong)[key].get<double>(), .01, 1e-3) << key;
  };
  off("out_error", &ComputedAttention::out);
  off("dq_error", &ComputedAttention::dq);
  off("dk_error", &ComputedAttention::dk);
  off("dv_error", &ComputedAttention::dv);
  const auto shows_nan = [&](const char* key, at::Tensor ComputedAttention::*member) {
    ComputedAttention wrong = exact;
    wrong.*member = (exact.*member).clone();
    (wrong.*member).view({-1}).slice(0, 0, std::nullopt, 40).fill_(NAN);
    EXPECT_TRUE(std::isnan(errors(wrong)[key].get<double>())) << key;
  };
  shows_nan("out_error", &ComputedAttention::out);
  shows_nan("lse_error", &ComputedAttention::lse);
  shows_nan("dq_error", &ComputedAttention::dq);
  shows_nan("dk_error", &ComputedAttention::dk);
  shows_nan("dv_error", &ComputedAttention::dv);
  const index::Index other =  // a column and a diagonal less
      index::make_index(1, 4, seq_len, {{0, 1}, {0}, {0, 2}, {0}}, {{3}, {5}, {}, {1, 2}});
  asked.index = &other;
  const Json wrong = errors(exact);
  for (const auto& [key, value] : wrong.items()) EXPECT_GT(value.get<double>(), 1e-3) << key;
}

TEST(TorchDevice, NamesOfKernelsAreShort) {
  EXPECT_EQ(short_kernel_name("void mtraining::kernels::sm90::forward_kernel<cutlass::bfloat16_t, "
                              "128>(mtraining::kernels::sm90::Args)"),
            "sm90::forward_kernel");
  EXPECT_EQ(short_kernel_name("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_knob_7"),
            "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_knob_7");
  EXPECT_EQ(short_kernel_name("Memset (Device)"), "Memset");
  EXPECT_EQ(short_kernel_name("mtraining::kernels::sm90::(anonymous namespace)::gather(Args)"),
            "sm90::gather");
}

TEST(QkReport, IsTheSameOnAnyNumberOfRanks) {
  QueryKeys given;
  given.sizes = {.seq_len = 1500, .num_q_heads = 4, .num_kv_heads = 2, .head_dim = 32};
  AttentionInputs inputs = make_inputs(given.sizes, 5);  // read as [H, S, D]: any numbers do
  given.q = std::move(inputs.q);
  given.k = std::move(inputs.k);
  QkReportOptions options;
  options.balance = {2, 2};
  options.pattern.recall_rows = 64;
  const auto rows_of = [&](int ranks, layout::LayoutKind kind) {
    options.ranks = ranks;
    options.layout = kind;
    std::vector<Json> rows = qk_report(given, options);
    for (Json& row : rows) row.erase("ranks");
    return rows;
  };
  const std::vector<Json> one = rows_of(1, layout::LayoutKind::kContiguous);
  ASSERT_EQ(one.size(), 16u);
  EXPECT_EQ(rows_of(2, layout::LayoutKind::kBlockStriped), one);
  EXPECT_EQ(rows_of(4, layout::LayoutKind::kZigzag), one);
  for (const Json& row : one) {
    EXPECT_GE(row["window_recall"].get<double>(), row["p"].get<double>() - .2);
    EXPECT_EQ(row["imbalance"].size(), 4u);
  }
  options.layout = layout::LayoutKind::kStriped;
  EXPECT_THROW(qk_report(given, options), Unsupported);
}

TEST(RingBench, BytesOnTheRingsChannelsAreThePredictedOnes) {
  RingBenchOptions options;
  options.sizes = {.seq_len = 512, .num_q_heads = 2, .num_kv_heads = 1, .head_dim = 32};
  options.ring.topology = {2, 2};
  options.repeats = 2;
  options.breakdown = true;
  for (const ring::RingKind kind : {ring::RingKind::kFlat, ring::RingKind::kHierarchical}) {
    options.ring.ring = kind;
    const std::vector<std::string> lines = bench_ring(options, {});
    ASSERT_GT(lines.size(), 3u);
    const Json row = Json::parse(lines[0]);
    int64_t on_channels = 0;
    for (const auto& [channel, bytes] : row["bytes_by_channel"].items())
      if (channel != "other") on_channels += bytes.get<int64_t>();
    EXPECT_EQ(on_channels, row["predicted_ring_bytes"].get<int64_t>());
    EXPECT_GT(on_channels, 0);
    EXPECT_EQ(row["index_ms"].is_null(), false);
    std::vector<std::string> phases;
    for (size_t i = 1; i < lines.size(); ++i) phases.push_back(Json::parse(lines[i])["phase"]);
    for (const char* phase : {"forward", "backward"})
      EXPECT_NE(std::find(phases.begin(), phases.end(), phase), phases.end()) << phase;
  }
}

}  // namespace
}  // namespace mtraining::bench
