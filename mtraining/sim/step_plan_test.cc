#include "mtraining/sim/step_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "mtraining/base/check.h"

namespace mtraining::sim {
namespace {

/// Qwen2.5-3B's shape.
DecoderSizes qwen_3b() {
  return {.vocab_size = 151936,
          .hidden_size = 2048,
          .intermediate_size = 11008,
          .num_layers = 36,
          .num_q_heads = 16,
          .num_kv_heads = 2,
          .head_dim = 128,
          .tied = true,
          .qkv_bias = true};
}
/// Llama-3.1-8B's.
DecoderSizes llama_8b() {
  return {.vocab_size = 128256,
          .hidden_size = 4096,
          .intermediate_size = 14336,
          .num_layers = 32,
          .num_q_heads = 32,
          .num_kv_heads = 8,
          .head_dim = 128,
          .tied = false};
}
RunShape run_of_3b() {
  return {.seq_len = 524288,
          .accumulation = 64,
          .topology = {4, 8},
          .zero = 2,
          .offload_optimizer = true,
          .recompute = RecomputeMode::kLayer};
}

std::map<std::string, MemoryItem> by_name(const std::vector<MemoryItem>& items) {
  std::map<std::string, MemoryItem> result;
  for (const MemoryItem& item : items) result[item.name] = item;
  return result;
}

TEST(StepPlan, ParametersAreThoseOfThePublishedModels) {
  EXPECT_EQ(total_parameters(qwen_3b()), 3085938688);
  EXPECT_EQ(total_parameters(llama_8b()), 8030261248);
}

TEST(StepPlan, ShardsOfGradientsAndMomentsAddUpToAll) {
  for (const int nodes : {1, 2, 4}) {
    RunShape run = run_of_3b();
    run.topology.nodes = nodes;
    const int64_t parameters = total_parameters(qwen_3b());
    const auto sharded = by_name(memory_plan(qwen_3b(), run));
    run.zero = 0;
    const auto whole = by_name(memory_plan(qwen_3b(), run));
    EXPECT_EQ(whole.at("gradients").bytes, 4 * parameters);
    EXPECT_EQ(whole.at("optimizer moments").bytes, 8 * parameters);
    EXPECT_NEAR(static_cast<double>(sharded.at("optimizer moments").bytes * run.ranks()),
                static_cast<double>(whole.at("optimizer moments").bytes), 8.0 * run.ranks());
    EXPECT_EQ(sharded.at("weights").bytes, 2 * parameters);
    EXPECT_TRUE(sharded.at("optimizer moments").on_host);
  }
}

TEST(StepPlan, OffloadingMovesBytesFromTheDeviceToTheHost) {
  RunShape run = run_of_3b();
  const auto offloaded = memory_plan(qwen_3b(), run);
  run.offload_optimizer = false;
  const auto kept = memory_plan(qwen_3b(), run);
  int64_t all_offloaded = 0, all_kept = 0;
  for (const MemoryItem& item : offloaded) all_offloaded += item.bytes;
  for (const MemoryItem& item : kept) all_kept += item.bytes;
  EXPECT_EQ(all_offloaded, all_kept);
  EXPECT_EQ(device_bytes(kept) - device_bytes(offloaded),
            3 * 4 * ((total_parameters(qwen_3b()) + 31) / 32));
}

TEST(StepPlan, RecomputationKeepsLessAndActivationsFollowTokens) {
  RunShape run = run_of_3b();
  int64_t before = 0;
  for (const RecomputeMode mode :
       {RecomputeMode::kLayer, RecomputeMode::kExceptAttention, RecomputeMode::kNone}) {
    run.recompute = mode;
    const int64_t kept = kept_layer_bytes(qwen_3b(), run);
    EXPECT_GT(kept, before);
    before = kept;
    RunShape longer = run;
    longer.seq_len *= 2;
    EXPECT_EQ(kept_layer_bytes(qwen_3b(), longer), 2 * kept);
  }
  // A layer's input alone: 16384 tokens of 2048 bf16 values.
  run.recompute = RecomputeMode::kLayer;
  EXPECT_EQ(kept_layer_bytes(qwen_3b(), run), 16384 * 2048 * 2);
}

// docs/math/plan.md counts them: in units of a layer's input q, k, v are 1.25, attention's result and its gradient 3, the gradient of
// the output 1; dq in float32 is 2 where the result was.
TEST(StepPlan, TheLayerAtWorkOnAGpuIsCountedInUnitsOfItsInput) {
  RunShape run;
  run.topology = {1, 1};
  run.recompute = RecomputeMode::kLayer;
  run.mlp_tile = 64;
  run.loss_chunk = 64;
  const DecoderSizes m = qwen_3b();
  for (const int64_t seq_len : {1 << 19, 1 << 21}) {
    run.seq_len = seq_len;
    const double input = static_cast<double>(seq_len * m.hidden_size * 2);
    const auto units = [&] {
      return static_cast<double>(
                 by_name(memory_plan(m, run)).at("activations of the layer at work").bytes) /
             input;
    };
    run.deterministic = true;
    run.recompute_span = 1;
    const double one = units();
    EXPECT_NEAR(one, 1 + 1.25 + 3 + 4. * 16 / 4096, .3 * (1 << 19) / static_cast<double>(seq_len));
    run.recompute_span = 6;
    EXPECT_NEAR(units(), one + 5, 1e-9);
    run.deterministic = false;  // in attention q, k, v, k and v again, two gradients
    EXPECT_GE(units(), 5 + 1 + 1.25 + .25 + 1 + 2);
  }
}

TEST(StepPlan, AFlatRingsHopsAreCountedOneByOne) {
  RunShape run = run_of_3b();
  run.ring = ring::RingKind::kFlat;
  run.recompute = RecomputeMode::kNone;
  run.accumulation = 1;
  run.columns_once = false;
  const index::Index index = planned_index(run.seq_len, 16, .05);
  const BytesPlan bytes = bytes_plan(qwen_3b(), run, index);
  const int64_t shard = 2 * 16384 * 2 * 128 * 2;
  // K and V make 31 hops forward and 31 backward, float32 gradients 32. A rank sends to one other: inside its node or out of it.
  EXPECT_EQ(bytes.ring_intra, 36 * (62 * shard + 32 * 2 * shard));
  EXPECT_EQ(bytes.ring_inter, bytes.ring_intra);
  EXPECT_EQ(bytes.columns, 0);
  run.recompute = RecomputeMode::kLayer;
  EXPECT_EQ(bytes_plan(qwen_3b(), run, index).ring_intra, 36 * (93 * shard + 32 * 2 * shard));
}

TEST(StepPlan, PlannedIndexHasItsDensity) {
  for (const double density : {.02, .05, .1, .3, .6}) {
    EXPECT_NEAR(index::density(planned_index(131072, 4, density)), density, .02 * density + 1e-3)
        << density;
  }
  EXPECT_GE(index::density(planned_index(4096, 2, 1)), 1);
  EXPECT_THROW(planned_index(4096, 2, 0), InvalidArgument);
}

TEST(StepPlan, TimeFollowsRatesAndWork) {
  const MachineRates rates;
  RunShape run = run_of_3b();
  const index::Index sparse = planned_index(run.seq_len, 16, .05);
  const index::Index dense = planned_index(run.seq_len, 16, 1);
  const TimePlan of_sparse = time_plan(qwen_3b(), run, sparse, rates);
  const TimePlan of_dense = time_plan(qwen_3b(), run, dense, rates);
  // The dense step is attention: pairs / rate, evenly spread, links hidden.
  const double pairs = 16.0 * 524288 / 2 * 524288;
  const double forward = 64 * 36 * pairs * 4 * 128 / 32 / (rates.attention_forward_tflops * 1e12);
  EXPECT_NEAR(of_dense.attention_forward_s, forward, .1 * forward);
  EXPECT_NEAR(of_dense.attention_again_s, of_dense.attention_forward_s, 1e-9);
  EXPECT_EQ(of_dense.index_s, 0);
  EXPECT_GT(of_sparse.index_s, 0);
  EXPECT_LT(of_sparse.attention_forward_s, .2 * of_dense.attention_forward_s);
  EXPECT_EQ(of_sparse.matmul_s, of_dense.matmul_s);
  MachineRates twice = rates;
  twice.matmul_tflops *= 2;
  EXPECT_NEAR(time_plan(qwen_3b(), run, sparse, twice).matmul_s, of_sparse.matmul_s / 2, 1e-9);
  MachineRates slow = rates;
  slow.inter_gb_per_s = 1;
  const TimePlan slowed = time_plan(qwen_3b(), run, sparse, slow);
  EXPECT_FALSE(slowed.compute_bound);
  EXPECT_GT(slowed.attention_forward_s, 2 * of_sparse.attention_forward_s);
  slow.inter_gb_per_s = 0;
  EXPECT_THROW(time_plan(qwen_3b(), run, sparse, slow), InvalidArgument);
}

}  // namespace
}  // namespace mtraining::sim
