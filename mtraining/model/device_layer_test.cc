// A decoder on a GPU beside the same decoder on the CPU: logits and every gradient, all families, in float32 and bf16; and that
// nothing in a forward and backward makes the host wait.
#include "mtraining/model/device_layer.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/cuda/CUDAFunctions.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "mtraining/base/check.h"
#include "mtraining/testing/gpu.h"

namespace mtraining::model {
namespace {

DecoderConfig config_of(const std::string& family, at::ScalarType dtype) {
  DecoderConfig c;
  c.architecture = family;
  c.vocab_size = 96;
  c.hidden_size = 64;
  c.intermediate_size = 168;
  c.num_hidden_layers = 2;
  c.num_attention_heads = 4;
  c.num_key_value_heads = 2;
  c.head_dim = 24;
  c.rope.rope_theta = 1e4;
  c.initializer_range = 0.15;
  c.embedding_initializer_range = 1;
  c.attention_bias = family == "qwen3";
  c.dtype = dtype;
  return c;
}

/// Causal attention in torch's own operations, on any device.
at::Tensor attend(int64_t, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  const int64_t group = q.size(2) / k.size(2);
  const auto heads = [&](const at::Tensor& x) {
    return x.repeat_interleave(group, 2).transpose(1, 2).to(at::kFloat);
  };
  const at::Tensor scores = at::matmul(q.transpose(1, 2).to(at::kFloat), heads(k).transpose(2, 3)) /
                            std::sqrt(static_cast<double>(q.size(3)));
  const at::Tensor masked = scores.masked_fill(
      at::ones({q.size(1), q.size(1)}, q.options().dtype(at::kBool)).triu(1), -INFINITY);
  return at::matmul(at::softmax(masked, -1), heads(v)).transpose(1, 2).to(q.scalar_type());
}

/// Random biases and norms too, so that each has a part.
DecoderParameters parameters_of(const DecoderConfig& config, at::Device device,
                                at::ScalarType dtype) {
  DecoderConfig as = config;
  as.dtype = dtype;
  DecoderParameters made = init_parameters(config, 3);
  at::manual_seed(5);
  DecoderParameters result = empty_parameters(as, device);
  const std::vector<Parameter> from = made.list(), to = result.list();
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < from.size(); ++i) {
    at::Tensor value = from[i].value.detach().to(at::kFloat);
    if (value.dim() == 1) value = value + 0.3 * at::randn(value.sizes());
    to[i].value.detach().copy_(value.to(config.dtype));
  }
  return result;
}

struct ModelRun {
  std::vector<std::string> names;
  std::vector<at::Tensor> values;  // hidden states, then gradients, float64 on the CPU
};
enum class How { kPlain, kTiled, kTokenByToken };

ModelRun run(const DecoderConfig& config, at::Device device, at::ScalarType dtype,
             bool own_positions, How how = How::kPlain) {
  DecoderConfig as = config;
  as.dtype = dtype;
  const Decoder decoder(as, parameters_of(config, device, dtype),
                        how == How::kPlain   ? 0
                        : how == How::kTiled ? 16
                                             : 1);
  at::manual_seed(7);
  const int64_t n = 37;
  const at::Tensor ids = at::randint(0, config.vocab_size, {2, n}, at::kLong).to(device);
  at::Tensor positions = at::arange(n, at::kLong);
  if (own_positions) positions = at::stack({positions, at::remainder(positions, 11)});
  positions = positions.to(device);
  const at::Tensor hidden = decoder.forward(ids, positions, attend);
  const at::Tensor up = at::randn(hidden.sizes()).to(at::kDouble);
  ModelRun result;
  std::vector<at::Tensor> inputs;
  result.names.push_back("hidden");
  for (const Parameter& p : decoder.parameters().list()) {
    if (p.name == "lm_head.weight") continue;
    inputs.push_back(p.value);
    result.names.push_back(p.name);
  }
  const auto gradients =
      torch::autograd::grad({hidden}, inputs, {up.to(device, hidden.scalar_type())});
  result.values.push_back(hidden.detach().to(at::kCPU, at::kDouble));
  for (size_t i = 0; i < gradients.size(); ++i) {
    EXPECT_EQ(gradients[i].scalar_type(), dtype) << result.names[i + 1];
    result.values.push_back(gradients[i].to(at::kCPU, at::kDouble));
  }
  return result;
}

double error(const at::Tensor& a, const at::Tensor& b) {
  return ((a - b).norm() / b.norm()).item<double>();
}

TEST(DeviceLayer, EqualsTheDecoderInFloat64AsWellAsTheCpuDoes) {
  MT_NEEDS_GPU();
  const at::Device gpu(at::kCUDA, 0);
  for (const char* family : {"qwen2", "qwen3", "llama"}) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      for (const bool own_positions : {false, true}) {
        const DecoderConfig config = config_of(family, dtype);
        const ModelRun exact = run(config, at::kCPU, at::kDouble, own_positions);
        const ModelRun cpu = run(config, at::kCPU, dtype, own_positions);
        for (const How how : {How::kPlain, How::kTiled}) {
          const ModelRun device = run(config, gpu, dtype, own_positions, how);
          for (size_t i = 0; i < exact.values.size(); ++i) {
            EXPECT_LT(error(device.values[i], exact.values[i]),
                      2 * error(cpu.values[i], exact.values[i]) + 1e-6)
                << family << " " << dtype << " " << exact.names[i] << " how "
                << static_cast<int>(how);
          }
        }
      }
    }
  }
}

// In bf16 a sum over 74 runs would be several times as wrong as its last rounding.
TEST(DeviceLayer, SumsOverManyRunsAreFloat32) {
  MT_NEEDS_GPU();
  const at::Device gpu(at::kCUDA, 0);
  const DecoderConfig config = config_of("llama", at::kBFloat16);
  const ModelRun exact = run(config, at::kCPU, at::kDouble, false);
  const ModelRun whole = run(config, gpu, at::kBFloat16, false);
  const ModelRun runs = run(config, gpu, at::kBFloat16, false, How::kTokenByToken);
  for (size_t i = 0; i < exact.values.size(); ++i)
    EXPECT_LT(error(runs.values[i], exact.values[i]),
              1.5 * error(whole.values[i], exact.values[i]) + 1e-6)
        << exact.names[i];
}

TEST(DeviceLayer, TwoRunsHaveTheSameBits) {
  MT_NEEDS_GPU();
  const DecoderConfig config = config_of("qwen2", at::kBFloat16);
  const ModelRun one = run(config, {at::kCUDA, 0}, at::kBFloat16, false);
  const ModelRun other = run(config, {at::kCUDA, 0}, at::kBFloat16, false);
  for (size_t i = 0; i < one.values.size(); ++i)
    EXPECT_TRUE(at::equal(one.values[i], other.values[i])) << one.names[i];
}

struct OneLayer {
  at::Tensor h, up;
  RopeTable rope;
};
OneLayer one_layer(const DecoderConfig& c) {
  at::manual_seed(9);
  const at::Device gpu(at::kCUDA, 0);
  const auto random = [&] { return at::randn({2, 50, c.hidden_size}).to(gpu, c.dtype); };
  const at::Tensor h = random(), up = random();
  return {h, up,
          rope_table(at::arange(50, at::kLong).to(gpu), decoder_frequencies(c.rope, c.head_dim))};
}

/// Of h and of every tensor of the first layer, by autograd.
std::vector<at::Tensor> layer_gradients(const Decoder& decoder, OneLayer one) {
  one.h.set_requires_grad(true);
  const LayerParameters& l = decoder.parameters().layers[0];
  const at::Tensor out = decoder.layer(0, l, one.h, one.rope, attend);
  EXPECT_EQ(out.sizes(), one.h.sizes());
  std::vector<at::Tensor> inputs = l.tensors();
  inputs.insert(inputs.begin(), one.h);
  return torch::autograd::grad({out}, inputs, {one.up});
}
std::vector<at::Tensor> layer_gradients(const Decoder& decoder) {
  return layer_gradients(decoder, one_layer(decoder.config()));
}

// Two samples that are the same and have opposite gradients, each in runs of its own: what one adds to a weight's gradient the other takes
// away, and nothing is left but the rounding of float32. A product that was rounded to bf16 on its way, be it one, leaves its rounding.
TEST(DeviceLayer, RunsThatCancelLeaveNothing) {
  MT_NEEDS_GPU();
  DecoderConfig config = config_of("qwen2", at::kBFloat16);
  for (const int64_t tile : {50, 25, 10}) {
    const Decoder decoder(config, parameters_of(config, {at::kCUDA, 0}, config.dtype), tile);
    const auto gradients = [&](double second) {
      OneLayer one = one_layer(config);
      one.h[1].copy_(one.h[0]);
      one.up[1].copy_(one.up[0] * second);
      return layer_gradients(decoder, one);
    };
    const std::vector<at::Tensor> of_one = gradients(0), of_both = gradients(-1);
    for (size_t i = 1; i < of_both.size(); ++i) {
      const double left = of_both[i].to(at::kDouble).norm().item<double>(),
                   one = of_one[i].to(at::kDouble).norm().item<double>();
      EXPECT_GT(one, 0) << "tile " << tile << ", parameter " << i;
      EXPECT_LE(left, 1e-4 * one) << "tile " << tile << ", parameter " << i;
    }
  }
}

/// The attention above in two parts.
AttentionRuns attention_runs() {
  const auto backward = [](attention::BackwardInputs in) {
    const at::AutoGradMode grad(true);
    std::vector<at::Tensor> leaves;
    for (const at::Tensor& each : {in.q, in.k, in.v})
      leaves.push_back(each.detach().set_requires_grad(true));
    const at::Tensor out = attend(0, leaves[0], leaves[1], leaves[2]);
    EXPECT_TRUE(at::equal(out, in.saved.out));
    const auto d = torch::autograd::grad({out}, leaves, {in.dout});
    return attention::BackwardResult{d[0], d[1], d[2]};
  };
  const auto forward = [](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
    return attention::ForwardResult{attend(0, q, k, v), {}, {}};
  };
  return {forward, backward};
}

// A layer that runs a second time for its gradients: the bits of one that ran once, whatever the tile is, and h as it was. The
// gradient of its output is written over where nobody else has it, and only there.
TEST(DeviceLayer, AsOneFunctionHasTheSameGradients) {
  MT_NEEDS_GPU();
  for (const char* family : {"qwen2", "qwen3", "llama"}) {
    for (const int64_t tile : {0, 16, 33, 1000}) {
      DecoderConfig config = config_of(family, at::kBFloat16);
      config.attention_bias = std::string(family) == "llama";
      const Decoder decoder(config, parameters_of(config, {at::kCUDA, 0}, config.dtype), tile);
      const auto want = layer_gradients(decoder);
      for (const bool is_ours : {true, false}) {
        OneLayer one = one_layer(config);
        const at::Tensor before = one.h.clone(), up_before = one.up.clone(),
                         other_holder = is_ours ? at::Tensor() : one.up;
        const void* memory = one.up.data_ptr();
        const LayerGradients got =
            decoder.layer_gradients(0, decoder.parameters().layers[0], one.h, std::move(one.up),
                                    one.rope, attention_runs());
        EXPECT_TRUE(at::equal(one.h, before));
        EXPECT_EQ(got.h.data_ptr() == memory, is_ours);
        if (!is_ours) {
          EXPECT_TRUE(at::equal(other_holder, up_before));
        }
        ASSERT_EQ(got.parameters.size() + 1, want.size());
        EXPECT_TRUE(at::equal(got.h, want[0])) << family << tile;
        for (size_t i = 1; i < want.size(); ++i)
          EXPECT_TRUE(at::equal(got.parameters[i - 1], want[i])) << family << tile << " " << i;
      }
    }
  }
}

// Where values do not lie behind one another (another owner moved them) there are more products, and the same result.
TEST(DeviceLayer, ProjectionsNeedNotLieTogether) {
  MT_NEEDS_GPU();
  const DecoderConfig config = config_of("qwen2", at::kFloat);
  const Decoder decoder(config, parameters_of(config, {at::kCUDA, 0}, config.dtype), 0);
  const LayerParameters& l = decoder.parameters().layers[0];
  EXPECT_EQ(static_cast<char*>(l.q_weight.data_ptr()) + l.q_weight.nbytes(),
            static_cast<char*>(l.k_weight.data_ptr()));
  EXPECT_EQ(static_cast<char*>(l.gate_weight.data_ptr()) + l.gate_weight.nbytes(),
            static_cast<char*>(l.up_weight.data_ptr()));
  const auto together = layer_gradients(decoder);
  for (at::Tensor each : l.tensors()) each.set_data(each.detach().clone());
  const auto apart = layer_gradients(decoder);
  for (size_t i = 0; i < apart.size(); ++i)
    EXPECT_LT(error(apart[i].to(at::kDouble), together[i].to(at::kDouble)), 1e-6) << i;
}

TEST(DeviceLayer, NothingWaitsForTheDevice) {
  MT_NEEDS_GPU();
  const at::Device gpu(at::kCUDA, 0);
  const DecoderConfig config = config_of("qwen2", at::kBFloat16);
  const Decoder decoder(config, parameters_of(config, gpu, config.dtype), 16);
  const at::Tensor ids = at::randint(0, config.vocab_size, {1, 64}, at::kLong).to(gpu);
  const at::Tensor positions = at::arange(64, at::kLong).to(gpu);
  const auto pass = [&] {
    const at::Tensor hidden = decoder.forward(ids, positions, attend);
    torch::autograd::backward({hidden}, {at::ones_like(hidden)});
  };
  pass();
  struct Guard {
    Guard() { c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_ERROR); }
    ~Guard() {
      c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_DISABLED);
    }
  };
  {
    const Guard guard;
    EXPECT_NO_THROW(pass());
    EXPECT_THROW(ids.sum().item(), std::exception) << "the guard does not look";
  }
}

}  // namespace
}  // namespace mtraining::model
