// One run for every split, sharding and order of micro-steps, and its parameters against a loop written without the trainer.

#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <map>

#include "mtraining/comm/c10d.h"
#include "mtraining/model/mlp.h"
#include "mtraining/testing/process_ranks.h"
#include "mtraining/train/tiny_run_case.h"

namespace mtraining::train {
namespace {

/// Largest relative difference of loss and gradient norm, and largest absolute one of a weight.
struct Difference {
  double metrics = 0, weights = 0;
};
Difference difference(const TinyResult& a, const TinyResult& b) {
  Difference worst;
  EXPECT_EQ(a.steps.size(), b.steps.size());
  for (size_t i = 0; i < a.steps.size(); ++i) {
    worst.metrics = std::max({worst.metrics, std::abs(a.steps[i].loss / b.steps[i].loss - 1),
                              std::abs(a.steps[i].grad_norm / b.steps[i].grad_norm - 1)});
  }
  worst.weights = (a.weights - b.weights).abs().max().item<double>();
  return worst;
}
void expect_same_bits(const TinyResult& a, const TinyResult& b) {
  ASSERT_EQ(a.steps.size(), b.steps.size());
  for (size_t i = 0; i < a.steps.size(); ++i) {
    EXPECT_EQ(a.steps[i].loss, b.steps[i].loss) << i;
    EXPECT_EQ(a.steps[i].grad_norm, b.steps[i].grad_norm) << i;
  }
  EXPECT_TRUE(at::equal(a.weights, b.weights));
}

RunConfig dense_config(const TinyData& data) {
  RunConfig config = tiny_config(data);
  config.attention.pattern = pattern::PatternKind::kDense;
  config.train.seq_len = 200;  // divides nothing: padding on some ranks
  config.train.global_batch_size = 4;
  config.train.steps = 20;
  config.optim.adamw.weight_decay = 0.1;
  config.optim.clip_norm = 1.0;
  return config;
}

TEST(Splits, TwentyStepsAreOneRunForEverySplitWithAndWithoutZero2) {
  const TinyData data;
  const RunConfig config = dense_config(data);
  const TinyResult one = run_tiny(config, 1, 1);
  EXPECT_GT(one.steps[0].grad_norm, config.optim.clip_norm);  // clipped
  EXPECT_LT(one.steps.back().loss, one.steps.front().loss - 0.3);
  struct Split {
    int ranks, ranks_per_node, dp_size, zero;
  };
  for (const Split& s : std::vector<Split>{
           {4, 2, 2, 0}, {4, 2, 1, 0}, {4, 4, 4, 0}, {4, 2, 2, 2}, {4, 2, 1, 2}, {3, 3, 1, 2}}) {
    RunConfig split = config;
    split.parallel.dp_size = s.dp_size;
    split.parallel.zero = s.zero;
    const TinyResult many = run_tiny(split, s.ranks, s.ranks_per_node);
    SCOPED_TRACE(concat(s.ranks, " ranks, dp ", s.dp_size, ", zero ", s.zero));
    EXPECT_LT(difference(many, one).metrics, 1e-5);
    EXPECT_LT(difference(many, one).weights, 2e-5);
    EXPECT_TRUE(many.ranks_agree);
  }
}

TEST(Splits, Zero2EqualsTheUnshardedRunWithAStepSkippedOnAllRanksBecauseOfOne) {
  const TinyData data;
  RunConfig config = dense_config(data);
  config.parallel.dp_size = 2;
  ::setenv("MTRAINING_FAULT", "rank=3,step=5,at=gradient,kind=nan", 1);
  const TinyResult whole = run_tiny(config, 4, 2);
  config.parallel.zero = 2;
  const TinyResult sharded = run_tiny(config, 4, 2);
  config.parallel.offload_optimizer = true;
  const TinyResult offloaded = run_tiny(config, 4, 2);
  ::unsetenv("MTRAINING_FAULT");
  EXPECT_EQ(whole.optimizer_steps, 19);
  EXPECT_EQ(sharded.optimizer_steps, 19);
  EXPECT_EQ(sharded.steps[3].skipped, 0);
  EXPECT_EQ(sharded.steps[4].skipped, 1);
  for (size_t i = 0; i < whole.steps.size(); ++i) {
    if (i == 4) continue;  // its norm is not a number
    EXPECT_NEAR(sharded.steps[i].loss / whole.steps[i].loss, 1, 1e-6) << i;
    EXPECT_NEAR(sharded.steps[i].grad_norm / whole.steps[i].grad_norm, 1, 1e-6) << i;
  }
  EXPECT_LT((sharded.weights - whole.weights).abs().max().item<double>(), 1e-6);
  EXPECT_TRUE(sharded.ranks_agree);
  EXPECT_TRUE(at::equal(offloaded.weights, sharded.weights));  // on the CPU the same memory
}

TEST(Splits, Zero2OverGlooGivesTheBitsOfLoopback) {
  const auto run =
      testing::run_processes(4, comm::free_port, [](const testing::RankProcess& process) {
        const TinyData data;  // a folder of each process, with the same tokens
        RunConfig config = dense_config(data);
        config.parallel.dp_size = 2;
        config.parallel.zero = 2;
        config.train.recompute = Recompute::kExceptAttention;
        config.train.steps = 3;
        const TinyResult loopback = run_tiny(config, 4, 2);
        const auto transport = comm::make_c10d({.master_port = process.port,
                                                .rank = process.rank,
                                                .size = process.size,
                                                .timeout = std::chrono::minutes(2)});
        topology::LaunchEnvironment launch;
        launch.world_size = 4;
        launch.local_world_size = 2;
        const ResolvedRun resolved = resolve(config, launch);
        Trainer trainer(config, resolved, *transport);
        for (int64_t step = 0; step < 3; ++step) {
          const trace::StepMetrics m = trainer.step(step);
          EXPECT_EQ(m.loss, loopback.steps[step].loss);
          EXPECT_EQ(m.grad_norm, loopback.steps[step].grad_norm);
        }
        std::vector<at::Tensor> parts;
        for (const auto& p : trainer.parameters()) parts.push_back(p.value.detach().reshape({-1}));
        EXPECT_TRUE(at::equal(at::cat(parts), loopback.weights));
      });
  for (const auto& rank : run.ranks) EXPECT_EQ(rank.exit_code, 0) << rank.output;
}

TEST(Splits, RecomputeAndZero2TogetherAreBitwiseWhatTheyAreApart) {
  const TinyData data;
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    for (const int zero : {0, 2}) {
      SCOPED_TRACE(concat(dtype, ", zero ", zero));
      RunConfig config = tiny_config(data);
      config.model.dtype = dtype;
      config.parallel.zero = zero;
      config.train.global_batch_size = 2;
      config.train.steps = 3;
      const TinyResult none = run_tiny(config, 4, 2);
      EXPECT_LT(none.steps[2].attention_density, 0.95);
      int64_t before = none.steps[2].peak_tensor_bytes;
      for (const Recompute mode : {Recompute::kExceptAttention, Recompute::kLayer}) {
        config.train.recompute = mode;
        const TinyResult again = run_tiny(config, 4, 2);
        expect_same_bits(again, none);
        EXPECT_EQ(again.steps[2].attention_density, none.steps[2].attention_density);
        EXPECT_LT(again.steps[2].peak_tensor_bytes, before);
        before = again.steps[2].peak_tensor_bytes;
      }
      config.train.mlp_tile = model::kMlpRun;
      expect_same_bits(run_tiny(config, 4, 2), none);
    }
  }
}

TEST(Splits, LowPrecisionGradientsTrainTheSameModelLessExactly) {
  const TinyData data;
  RunConfig config = tiny_config(data);
  config.model.dtype = at::kBFloat16;
  config.train.global_batch_size = 2;
  config.train.steps = 8;
  const TinyResult wide = run_tiny(config, 2, 2);
  config.optim.grad_dtype = at::kBFloat16;
  for (const int zero : {0, 2}) {
    config.parallel.zero = zero;
    const TinyResult low = run_tiny(config, 2, 2);
    EXPECT_NEAR(low.steps.back().loss / wide.steps.back().loss, 1, 0.02) << zero;
    EXPECT_FALSE(at::equal(low.weights, wide.weights)) << zero;
    EXPECT_TRUE(low.ranks_agree) << zero;
  }
}

/// Parameters after three steps, by torch's own attention and loss over whole logits, AdamW written out here; one process, no
/// layout, no chunks, no flat vectors.
TEST(Splits, ParametersAfterThreeStepsEqualAPlainLoop) {
  at::set_num_threads(1);  // several threads for products this small cost more than they do
  const TinyData data;
  RunConfig config = dense_config(data);
  config.train.steps = 3;
  config.train.loss_chunk = 16;
  config.train.mlp_tile = 16;

  data::BatchOptions options = tiny_batches(config);
  options.micro_batch = 4;
  const data::Batches batches(options);
  const model::DecoderConfig& c = config.model;
  std::vector<model::Parameter> parameters = model::init_parameters(c, config.train.seed).list();
  std::map<std::string, at::Tensor> w;
  std::vector<at::Tensor> leaves, first, second;
  for (const auto& p : parameters) {
    w[p.name] = p.value;
    leaves.push_back(p.value);
    first.push_back(at::zeros_like(p.value));
    second.push_back(at::zeros_like(p.value));
  }
  const int64_t n = config.train.seq_len, half = c.head_dim / 2;
  const at::Tensor inverse =
      at::pow(c.rope.rope_theta, at::arange(half, at::kDouble) / -static_cast<double>(half));
  const at::Tensor phases = at::outer(at::arange(n, at::kDouble), inverse);
  const at::Tensor cos = at::cos(phases).to(at::kFloat), sin = at::sin(phases).to(at::kFloat);
  const auto norm = [&](const at::Tensor& x, const at::Tensor& weight) {
    return x * at::rsqrt(x.square().mean({-1}, true) + c.rms_norm_eps) * weight;
  };
  const auto turn = [&](const at::Tensor& x) {  // [B, H, n, D]
    const at::Tensor a = x.narrow(-1, 0, half), b = x.narrow(-1, half, half);
    return at::cat({a * cos - b * sin, b * cos + a * sin}, -1);
  };
  const at::Tensor future = at::ones({n, n}, at::kBool).triu(1);
  std::vector<double> losses, norms;
  for (int64_t step = 0; step < 3; ++step) {
    const data::Batch batch =
        batches.batch(step, 0, layout::Layout({layout::LayoutKind::kContiguous, n, 1, 64, 1}), 0);
    at::Tensor h = at::embedding(w["model.embed_tokens.weight"], batch.ids.narrow(1, 0, n));
    for (int64_t i = 0; i < c.num_hidden_layers; ++i) {
      const std::string p = concat("model.layers.", i, ".");
      const auto heads = [&](const at::Tensor& x, const char* name) {
        return at::linear(x, w[concat(p, "self_attn.", name, "_proj.weight")],
                          w[concat(p, "self_attn.", name, "_proj.bias")])
            .view({4, n, -1, c.head_dim})
            .transpose(1, 2);
      };
      const at::Tensor x = norm(h, w[p + "input_layernorm.weight"]);
      const int64_t group = c.num_attention_heads / c.num_key_value_heads;
      const at::Tensor q = turn(heads(x, "q")), k = turn(heads(x, "k")).repeat_interleave(group, 1),
                       v = heads(x, "v").repeat_interleave(group, 1);
      const at::Tensor scores = (at::matmul(q, k.transpose(2, 3)) / std::sqrt(double(c.head_dim)))
                                    .masked_fill(future, -INFINITY);
      const at::Tensor attended = at::matmul(at::softmax(scores, -1), v);
      h = h + at::linear(attended.transpose(1, 2).reshape({4, n, -1}),
                         w[p + "self_attn.o_proj.weight"]);
      const at::Tensor y = norm(h, w[p + "post_attention_layernorm.weight"]);
      h = h + at::linear(at::silu(at::linear(y, w[p + "mlp.gate_proj.weight"])) *
                             at::linear(y, w[p + "mlp.up_proj.weight"]),
                         w[p + "mlp.down_proj.weight"]);
    }
    const at::Tensor logits =
        at::linear(norm(h, w["model.norm.weight"]), w["model.embed_tokens.weight"]);
    const at::Tensor loss =
        at::cross_entropy_loss(logits.flatten(0, 1), batch.labels.narrow(1, 0, n).flatten(), {},
                               at::Reduction::Mean, data::kIgnored);
    const auto gradients = torch::autograd::grad({loss}, leaves);
    double square = 0;
    for (const auto& g : gradients) square += g.to(at::kDouble).square().sum().item<double>();
    const double length = std::sqrt(square);
    losses.push_back(loss.item<double>());
    norms.push_back(length);
    const double lr = config.optim.schedule.lr * static_cast<double>(step + 1) /
                      static_cast<double>(config.optim.schedule.warmup_steps);
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < leaves.size(); ++i) {
      const at::Tensor g = gradients[i] / std::max(1.0, length / config.optim.clip_norm);
      first[i] = 0.9 * first[i] + 0.1 * g;
      second[i] = 0.95 * second[i] + 0.05 * g * g;
      const double c1 = 1 - std::pow(0.9, step + 1), c2 = 1 - std::pow(0.95, step + 1);
      const double decay = leaves[i].dim() >= 2 ? config.optim.adamw.weight_decay : 0;
      leaves[i].copy_(leaves[i] * (1 - lr * decay) -
                      lr * (first[i] / c1) / (at::sqrt(second[i] / c2) + 1e-8));
    }
  }
  std::vector<at::Tensor> flat;
  for (const auto& leaf : leaves) flat.push_back(leaf.detach().reshape({-1}));
  const at::Tensor oracle = at::cat(flat);
  for (const auto& [ranks, zero, mode] :
       std::vector<std::tuple<int, int, Recompute>>{{1, 0, Recompute::kNone},
                                                    {4, 0, Recompute::kLayer},
                                                    {4, 2, Recompute::kExceptAttention}}) {
    SCOPED_TRACE(concat(ranks, " ranks, zero ", zero));
    RunConfig run = config;
    run.parallel.zero = zero;
    run.train.recompute = mode;
    const TinyResult result = run_tiny(run, ranks, std::min(ranks, 2));
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_NEAR(result.steps[i].loss / losses[i], 1, 1e-5) << i;
      EXPECT_NEAR(result.steps[i].grad_norm / norms[i], 1, 1e-4) << i;
    }
    // An update is at most about lr; three of them against float32 sums in another order.
    EXPECT_LT((result.weights - oracle).abs().max().item<double>(), 2e-5);
    EXPECT_LT(((result.weights - oracle).norm() / oracle.norm()).item<double>(), 1e-6);
  }
}

TEST(Splits, TokensWithUnequalMicroStepsWeighAlikeForEverySplit) {
  // One sequence has 1 label and the next 3: the mean is over 4 tokens, whatever the order.
  const TinyData data;
  data::TokenFileWriter mask(data.prefix() + "_loss_mask", data::TokenType::kUInt8);
  std::vector<int64_t> flags(20000);
  for (size_t i = 0; i < flags.size(); ++i)
    flags[i] = (i / 64) % 2 == 0 ? i % 64 == 50 : (i % 64 == 3 || i % 64 == 20 || i % 64 == 63);
  mask.add_sequence(flags);
  mask.finish();
  RunConfig config = dense_config(data);
  config.train.seq_len = 64;
  config.train.global_batch_size = 4;
  config.train.steps = 5;
  RunConfig whole = config;
  whole.train.micro_batch_size = 4;
  const TinyResult one = run_tiny(whole, 1, 1);
  EXPECT_LT(difference(run_tiny(config, 1, 1), one).metrics, 1e-5);  // four micro-steps
  for (const auto& [dp_size, zero] :
       std::vector<std::pair<int, int>>{{1, 0}, {2, 0}, {4, 2}, {2, 2}}) {
    RunConfig split = config;
    split.parallel.dp_size = dp_size;
    split.parallel.zero = zero;
    SCOPED_TRACE(concat("dp ", dp_size, ", zero ", zero));
    EXPECT_LT(difference(run_tiny(split, 4, 2), one).metrics, 1e-5);
    EXPECT_LT(difference(run_tiny(split, 4, 2), one).weights, 2e-5);
  }
}

}  // namespace
}  // namespace mtraining::train
