#include "mtraining/model/decoder.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "mtraining/base/check.h"
#include "mtraining/base/rng.h"
#include "mtraining/model/layer_gradient.h"
#include "mtraining/model/mlp.h"
#include "mtraining/model/random_tensor.h"
#include "mtraining/model/rope.h"
#ifdef MT_WITH_CUDA
#include "mtraining/model/device_layer.h"
#endif

namespace mtraining::model {
namespace {

uint64_t hash_name(std::string_view name) {
  uint64_t hash = 0xcbf29ce484222325ULL;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ULL;
  return hash;
}

/// Makes leaves; without a seed their values are whatever memory holds.
class Initializer {
 public:
  Initializer(const DecoderConfig& config, at::Device device, std::optional<uint64_t> seed)
      : options_(at::TensorOptions(device).dtype(config.dtype)), seed_(seed) {}

  at::Tensor normal(const std::string& name, at::IntArrayRef shape, double deviation) const {
    if (!seed_) return empty(shape);
    return random_normal(Rng(*seed_, hash_name(name)), shape, deviation, options_.device(),
                         at::typeMetaToScalarType(options_.dtype()))
        .set_requires_grad(true);
  }
  at::Tensor zeros(int64_t size) const { return filled(size, 0); }
  at::Tensor ones(int64_t size) const { return filled(size, 1); }

 private:
  at::Tensor empty(at::IntArrayRef shape) const {
    return at::empty(shape, options_).set_requires_grad(true);
  }
  at::Tensor filled(int64_t size, double value) const {
    return seed_ ? at::full({size}, value, options_).set_requires_grad(true) : empty({size});
  }

  at::TensorOptions options_;
  std::optional<uint64_t> seed_;
};

std::string layer_prefix(int64_t layer) { return concat("model.layers.", layer, "."); }

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  return at::rms_norm(x, {x.size(-1)}, weight, eps);
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  return at::linear(x, weight, bias.defined() ? std::optional(bias) : std::nullopt);
}

at::Tensor embed(const at::Tensor& table, const at::Tensor& ids) {
  // torch on the CPU adds the gradient of a token that comes often up in the table's precision: in bf16 it stops growing.
  if (table.is_cpu() && at::isReducedFloatingType(table.scalar_type()))
    return at::embedding(table.to(at::kFloat), ids).to(table.scalar_type());
  return at::embedding(table, ids);
}

Family family_of(const DecoderConfig& config) {
  try {
    return parse_family(config.architecture);
  } catch (const Unsupported&) {
    throw Unsupported(
        concat("model.architecture: expected \"qwen2\", \"qwen3\" or \"llama\", got \"",
               config.architecture, '"'));
  }
}

struct NamedShape {
  std::string name;
  std::vector<int64_t> shape;
  bool operator==(const NamedShape&) const = default;
};

/// In the order of DecoderParameters::list().
std::vector<NamedShape> parameter_shapes(const DecoderConfig& c) {
  const OptionalTensors has = optional_tensors(c);
  const int64_t q = c.num_attention_heads * c.head_dim, kv = c.num_key_value_heads * c.head_dim;
  std::vector<NamedShape> all{{"model.embed_tokens.weight", {c.vocab_size, c.hidden_size}}};
  for (int64_t i = 0; i < c.num_hidden_layers; ++i) {
    const auto add = [&, prefix = layer_prefix(i)](const char* name, std::vector<int64_t> shape,
                                                   bool present = true) {
      if (present) all.push_back({prefix + name, std::move(shape)});
    };
    add("input_layernorm.weight", {c.hidden_size});
    add("self_attn.q_proj.weight", {q, c.hidden_size});
    add("self_attn.k_proj.weight", {kv, c.hidden_size});
    add("self_attn.v_proj.weight", {kv, c.hidden_size});
    add("self_attn.q_proj.bias", {q}, has.qkv_bias);
    add("self_attn.k_proj.bias", {kv}, has.qkv_bias);
    add("self_attn.v_proj.bias", {kv}, has.qkv_bias);
    add("self_attn.o_proj.weight", {c.hidden_size, q});
    add("self_attn.o_proj.bias", {c.hidden_size}, has.out_bias);
    add("self_attn.q_norm.weight", {c.head_dim}, has.qk_norm);
    add("self_attn.k_norm.weight", {c.head_dim}, has.qk_norm);
    add("post_attention_layernorm.weight", {c.hidden_size});
    add("mlp.gate_proj.weight", {c.intermediate_size, c.hidden_size});
    add("mlp.up_proj.weight", {c.intermediate_size, c.hidden_size});
    add("mlp.down_proj.weight", {c.hidden_size, c.intermediate_size});
  }
  all.push_back({"model.norm.weight", {c.hidden_size}});
  if (!c.tie_word_embeddings) all.push_back({"lm_head.weight", {c.vocab_size, c.hidden_size}});
  return all;
}

void check_parameters(const DecoderConfig& config, const DecoderParameters& parameters) {
  const auto text = [](const std::vector<NamedShape>& shapes, size_t i) {
    return i < shapes.size() ? concat(shapes[i].name, ' ', at::IntArrayRef(shapes[i].shape))
                             : std::string("none");
  };
  std::vector<NamedShape> got;
  for (const Parameter& each : parameters.list())
    got.push_back(
        {each.name, each.value.defined() ? each.value.sizes().vec() : std::vector<int64_t>{}});
  const std::vector<NamedShape> want = parameter_shapes(config);
  for (size_t i = 0; i < std::max(want.size(), got.size()); ++i)
    MT_CHECK_ARG(i < want.size() && i < got.size() && want[i] == got[i], "parameters: expected ",
                 text(want, i), ", got ", text(got, i));
}

DecoderParameters make_parameters(const DecoderConfig& config, const Initializer& init) {
  check(config);
  const OptionalTensors has = optional_tensors(config);
  const int64_t hidden = config.hidden_size, ffn = config.intermediate_size;
  const int64_t q = config.num_attention_heads * config.head_dim;
  const int64_t kv = config.num_key_value_heads * config.head_dim;
  const double deviation = config.initializer_range;
  const double residual =
      deviation / std::sqrt(2.0 * static_cast<double>(config.num_hidden_layers));
  DecoderParameters p;
  p.embed_tokens = init.normal("model.embed_tokens.weight", {config.vocab_size, hidden},
                               config.embedding_initializer_range);
  for (int64_t i = 0; i < config.num_hidden_layers; ++i) {
    const std::string name = layer_prefix(i);
    LayerParameters l;
    l.input_norm = init.ones(hidden);
    l.q_weight = init.normal(name + "self_attn.q_proj.weight", {q, hidden}, deviation);
    l.k_weight = init.normal(name + "self_attn.k_proj.weight", {kv, hidden}, deviation);
    l.v_weight = init.normal(name + "self_attn.v_proj.weight", {kv, hidden}, deviation);
    l.o_weight = init.normal(name + "self_attn.o_proj.weight", {hidden, q}, residual);
    if (has.qkv_bias) {
      l.q_bias = init.zeros(q);
      l.k_bias = init.zeros(kv);
      l.v_bias = init.zeros(kv);
    }
    if (has.out_bias) l.o_bias = init.zeros(hidden);
    if (has.qk_norm) {
      l.q_norm = init.ones(config.head_dim);
      l.k_norm = init.ones(config.head_dim);
    }
    l.post_attention_norm = init.ones(hidden);
    l.gate_weight = init.normal(name + "mlp.gate_proj.weight", {ffn, hidden}, deviation);
    l.up_weight = init.normal(name + "mlp.up_proj.weight", {ffn, hidden}, deviation);
    l.down_weight = init.normal(name + "mlp.down_proj.weight", {hidden, ffn}, residual);
    p.layers.push_back(std::move(l));
  }
  p.norm = init.ones(hidden);
  p.lm_head = config.tie_word_embeddings
                  ? p.embed_tokens
                  : init.normal("lm_head.weight", {config.vocab_size, hidden}, deviation);
  return p;
}

}  // namespace

void check(const DecoderConfig& config) {
  const Family family = family_of(config);
  const auto positive = [](const char* key, int64_t value) {
    MT_CHECK_ARG(value >= 1, "model.", key, ": expected at least 1, got ", value);
  };
  positive("vocab_size", config.vocab_size);
  positive("hidden_size", config.hidden_size);
  positive("intermediate_size", config.intermediate_size);
  positive("num_hidden_layers", config.num_hidden_layers);
  positive("num_attention_heads", config.num_attention_heads);
  positive("num_key_value_heads", config.num_key_value_heads);
  positive("head_dim", config.head_dim);
  MT_CHECK_ARG(config.num_attention_heads % config.num_key_value_heads == 0,
               "model.num_attention_heads: expected a multiple of num_key_value_heads = ",
               config.num_key_value_heads, ", got ", config.num_attention_heads);
  MT_CHECK_ARG(config.head_dim % 8 == 0, "model.head_dim: expected a multiple of 8, got ",
               config.head_dim);
  MT_CHECK_ARG(config.rope.rope_theta > 1, "model.rope_theta: expected more than 1, got ",
               config.rope.rope_theta);
  check(config.rope);
  MT_CHECK_ARG(family != Family::kQwen2 || !config.attention_bias,
               "model.attention_bias: expected false with architecture \"qwen2\", whose q, k and v "
               "always have biases and whose o has none, got true");
  MT_CHECK_ARG(config.rms_norm_eps > 0, "model.rms_norm_eps: expected more than 0, got ",
               config.rms_norm_eps);
  MT_CHECK_ARG(config.initializer_range > 0, "model.initializer_range: expected more than 0, got ",
               config.initializer_range);
  MT_CHECK_ARG(config.embedding_initializer_range > 0,
               "model.embedding_initializer_range: expected more than 0, got ",
               config.embedding_initializer_range);
}

DecoderConfig decoder_config(const HfConfig& config, at::ScalarType dtype) {
  check(config);
  DecoderConfig result;
  result.architecture = to_string(config.family);
  result.vocab_size = config.vocab_size;
  result.hidden_size = config.hidden_size;
  result.intermediate_size = config.intermediate_size;
  result.num_hidden_layers = config.num_hidden_layers;
  result.num_attention_heads = config.num_attention_heads;
  result.num_key_value_heads = config.num_key_value_heads;
  result.head_dim = config.head_dim;
  result.rope = config.rope;
  result.rms_norm_eps = config.rms_norm_eps;
  result.tie_word_embeddings = config.tie_word_embeddings;
  result.attention_bias = config.attention_out_bias;
  result.initializer_range = config.initializer_range;
  result.embedding_initializer_range = config.initializer_range;
  result.dtype = dtype;
  check(result);
  const OptionalTensors asked{config.qkv_bias, config.attention_out_bias, config.qk_norm};
  const OptionalTensors got = optional_tensors(result);
  MT_CHECK_SUPPORTED(asked == got, "model of the ", result.architecture,
                     " family: expected qkv_bias ", got.qkv_bias, ", attention_out_bias ",
                     got.out_bias, ", qk_norm ", got.qk_norm, ", got ", asked.qkv_bias, ", ",
                     asked.out_bias, ", ", asked.qk_norm);
  return result;
}

HfConfig hf_config(const DecoderConfig& config, int64_t max_position_embeddings) {
  check(config);
  const OptionalTensors has = optional_tensors(config);
  HfConfig result;
  result.family = family_of(config);
  result.vocab_size = config.vocab_size;
  result.hidden_size = config.hidden_size;
  result.intermediate_size = config.intermediate_size;
  result.num_hidden_layers = config.num_hidden_layers;
  result.num_attention_heads = config.num_attention_heads;
  result.num_key_value_heads = config.num_key_value_heads;
  result.head_dim = config.head_dim;
  result.max_position_embeddings = max_position_embeddings;
  result.rms_norm_eps = config.rms_norm_eps;
  result.initializer_range = config.initializer_range;
  result.tie_word_embeddings = config.tie_word_embeddings;
  result.qkv_bias = has.qkv_bias;
  result.attention_out_bias = has.out_bias;
  result.qk_norm = has.qk_norm;
  result.rope = config.rope;
  check(result);
  return result;
}

OptionalTensors optional_tensors(const DecoderConfig& config) {
  const Family family = family_of(config);
  return {.qkv_bias = family == Family::kQwen2 || config.attention_bias,
          .out_bias = family != Family::kQwen2 && config.attention_bias,
          .qk_norm = family == Family::kQwen3};
}

namespace {

struct LayerTensor {
  const char* name;
  at::Tensor LayerParameters::*tensor;
};
// What one product takes (device_layer.h) stands together: optim/ lays parameters out in this order.
constexpr LayerTensor kLayerTensors[] = {
    {"input_layernorm.weight", &LayerParameters::input_norm},
    {"self_attn.q_proj.weight", &LayerParameters::q_weight},
    {"self_attn.k_proj.weight", &LayerParameters::k_weight},
    {"self_attn.v_proj.weight", &LayerParameters::v_weight},
    {"self_attn.q_proj.bias", &LayerParameters::q_bias},
    {"self_attn.k_proj.bias", &LayerParameters::k_bias},
    {"self_attn.v_proj.bias", &LayerParameters::v_bias},
    {"self_attn.o_proj.weight", &LayerParameters::o_weight},
    {"self_attn.o_proj.bias", &LayerParameters::o_bias},
    {"self_attn.q_norm.weight", &LayerParameters::q_norm},
    {"self_attn.k_norm.weight", &LayerParameters::k_norm},
    {"post_attention_layernorm.weight", &LayerParameters::post_attention_norm},
    {"mlp.gate_proj.weight", &LayerParameters::gate_weight},
    {"mlp.up_proj.weight", &LayerParameters::up_weight},
    {"mlp.down_proj.weight", &LayerParameters::down_weight},
};

}  // namespace

std::vector<at::Tensor> LayerParameters::tensors() const {
  std::vector<at::Tensor> all;
  for (const LayerTensor& each : kLayerTensors) {
    if ((this->*each.tensor).defined()) all.push_back(this->*each.tensor);
  }
  return all;
}

LayerParameters LayerParameters::with(std::span<const at::Tensor> tensors) const {
  LayerParameters result;
  size_t next = 0;
  for (const LayerTensor& each : kLayerTensors) {
    if (!(this->*each.tensor).defined()) continue;
    MT_ASSERT(next < tensors.size(), "a layer needs more than ", tensors.size(), " tensors");
    result.*each.tensor = tensors[next++];
  }
  MT_ASSERT(next == tensors.size(), "a layer has ", next, " tensors, got ", tensors.size());
  return result;
}

std::vector<Parameter> DecoderParameters::list() const {
  std::vector<Parameter> all{{"model.embed_tokens.weight", embed_tokens}};
  for (size_t i = 0; i < layers.size(); ++i) {
    for (const LayerTensor& each : kLayerTensors) {
      const at::Tensor& value = layers[i].*each.tensor;
      if (value.defined())
        all.push_back({layer_prefix(static_cast<int64_t>(i)) + each.name, value});
    }
  }
  all.push_back({"model.norm.weight", norm});
  if (!lm_head.is_same(embed_tokens)) all.push_back({"lm_head.weight", lm_head});
  return all;
}

DecoderParameters init_parameters(const DecoderConfig& config, uint64_t seed, at::Device device) {
  return make_parameters(config, Initializer(config, device, seed));
}

DecoderParameters empty_parameters(const DecoderConfig& config, at::Device device) {
  return make_parameters(config, Initializer(config, device, std::nullopt));
}

Decoder::Decoder(const DecoderConfig& config, DecoderParameters parameters, int64_t mlp_tile)
    : config_(config), parameters_(std::move(parameters)), mlp_tile_(mlp_tile) {
  check(config_);
  check_parameters(config_, parameters_);
  MT_CHECK_ARG(mlp_tile_ >= 0, "train.mlp_tile: expected at least 0, got ", mlp_tile_);
  frequencies_ = decoder_frequencies(config_.rope, config_.head_dim);
  const at::Device device = parameters_.norm.device();
  inverse_frequencies_ = at::tensor(frequencies_.inverse, at::kFloat).to(device);
  MT_CHECK_SUPPORTED(device.is_cpu() || device.is_cuda() || device.is_meta(),
                     "model: expected parameters on a CPU or a CUDA device, got ", device);
#ifdef MT_WITH_CUDA
  if (device.is_cuda()) join_projections(parameters_);
#else
  MT_CHECK_SUPPORTED(!device.is_cuda(), "model: this program was built without CUDA");
#endif
}

at::Tensor Decoder::norm(const at::Tensor& x, const at::Tensor& weight) const {
#ifdef MT_WITH_CUDA
  if (x.is_cuda()) return device_rms_norm(x, weight, config_.rms_norm_eps);
#endif
  return rms_norm(x, weight, config_.rms_norm_eps);
}

at::Tensor Decoder::forward(const at::Tensor& ids, const at::Tensor& positions,
                            const Attend& attend, const PartObserver& observe) const {
  return forward(ids, positions, layers_with(attend, observe), observe);
}

RunLayer Decoder::layers_with(Attend attend, PartObserver observe) const {
  return [this, attend = std::move(attend), observe = std::move(observe)](
             int64_t index, const at::Tensor& h, const RopeTable& rope) {
    return layer(index, parameters_.layers[index], h, rope, attend, observe);
  };
}

at::Tensor Decoder::forward(const at::Tensor& ids, const at::Tensor& positions,
                            const RunLayer& run_layer, const PartObserver& observe) const {
  MT_CHECK_ARG(ids.dim() == 2 && ids.scalar_type() == at::kLong &&
                   ((positions.dim() == 1 && positions.size(0) == ids.size(1)) ||
                    positions.sizes() == ids.sizes()),
               "ids: expected [B, n] int64 and positions [n] or [B, n], got ", ids.sizes(), " and ",
               positions.sizes());
  if (observe) observe("embed", -1, true);
  at::Tensor h = embed(parameters_.embed_tokens, ids);
  const RopeTable rope = rope_table(positions, inverse_frequencies_, frequencies_.attention_factor);
  if (observe) observe("embed", -1, false);
  for (int64_t i = 0; i < config_.num_hidden_layers; ++i) h = run_layer(i, h, rope);
  return norm(h, parameters_.norm);
}

at::Tensor Decoder::layer(int64_t index, const LayerParameters& l, const at::Tensor& h,
                          const RopeTable& rope, const Attend& attend,
                          const PartObserver& observe) const {
  if (h.is_cuda()) return layer_on_device(index, l, h, rope, attend, observe);
  const int64_t batch = h.size(0), n = h.size(1);
  const auto part = [&](std::string_view name, bool begins) {
    if (observe) observe(name, index, begins);
  };
  const auto heads = [&](const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
    return linear(x, weight, bias).view({batch, n, -1, config_.head_dim});
  };
  const auto turned = [&](const at::Tensor& x, const at::Tensor& norm) {
    return apply_rope(norm.defined() ? rms_norm(x, norm, config_.rms_norm_eps) : x, rope);
  };
  part("attention_input", true);
  const at::Tensor x = rms_norm(h, l.input_norm, config_.rms_norm_eps);
  const at::Tensor q = turned(heads(x, l.q_weight, l.q_bias), l.q_norm);
  const at::Tensor k = turned(heads(x, l.k_weight, l.k_bias), l.k_norm);
  const at::Tensor v = heads(x, l.v_weight, l.v_bias);
  part("attention_input", false);
  part("attention", true);
  const at::Tensor attended = attend(index, q, k, v).reshape({batch, n, -1});
  part("attention", false);
  part("mlp", true);
  const at::Tensor middle = h + linear(attended, l.o_weight, l.o_bias);
  const at::Tensor y = rms_norm(middle, l.post_attention_norm, config_.rms_norm_eps);
  const at::Tensor out = middle + mlp(y, l.gate_weight, l.up_weight, l.down_weight, mlp_tile_);
  part("mlp", false);
  return out;
}

#ifdef MT_WITH_CUDA
namespace {

DeviceLayerOptions device_options(const DecoderConfig& config, int64_t mlp_tile, int64_t index,
                                  const PartObserver& observe) {
  DeviceLayerOptions options{.num_q_heads = config.num_attention_heads,
                             .num_kv_heads = config.num_key_value_heads,
                             .head_dim = config.head_dim,
                             .rms_norm_eps = config.rms_norm_eps,
                             .mlp_tile = mlp_tile,
                             .observe = {}};
  if (observe) {
    options.observe = [observe, index](std::string_view name, bool begins) {
      observe(name, index, begins);
    };
  }
  return options;
}

}  // namespace
#endif

at::Tensor Decoder::layer_on_device([[maybe_unused]] int64_t index,
                                    [[maybe_unused]] const LayerParameters& l,
                                    [[maybe_unused]] const at::Tensor& h,
                                    [[maybe_unused]] const RopeTable& rope,
                                    [[maybe_unused]] const Attend& attend,
                                    [[maybe_unused]] const PartObserver& observe) const {
#ifdef MT_WITH_CUDA
  const DeviceLayerOptions options = device_options(config_, mlp_tile_, index, observe);
  const auto part = [&](std::string_view name, bool begins) {
    if (observe) observe(name, index, begins);
  };
  part("attention_input", true);
  AttentionInput input = attention_input(h, l, rope, options);
  part("attention_input", false);
  part("attention", true);
  const at::Tensor attended =
      attend(index, input.q, input.k, input.v).reshape({h.size(0), h.size(1), -1});
  input.q = input.k = input.v = at::Tensor();
  part("attention", false);
  part("mlp", true);
  const at::Tensor out = attention_output(input.h, attended, l, options);
  part("mlp", false);
  return out;
#else
  throw Unsupported("model: this program was built without CUDA");
#endif
}

LayerGradients Decoder::layer_gradients([[maybe_unused]] int64_t index,
                                        [[maybe_unused]] const LayerParameters& l,
                                        [[maybe_unused]] const at::Tensor& h,
                                        [[maybe_unused]] at::Tensor upstream,
                                        [[maybe_unused]] const RopeTable& rope,
                                        [[maybe_unused]] const AttentionRuns& attention,
                                        [[maybe_unused]] const PartObserver& observe) const {
  MT_CHECK_SUPPORTED(h.is_cuda(), "a layer's gradients as one function: expected h on a GPU, got ",
                     h.device());
#ifdef MT_WITH_CUDA
  return model::layer_gradients(h, std::move(upstream), l, rope, attention,
                                device_options(config_, mlp_tile_, index, observe));
#else
  throw Unsupported("model: this program was built without CUDA");
#endif
}

double Decoder::dense_flops_per_token() const {
  double matrices = static_cast<double>(parameters_.lm_head.numel());
  for (const LayerParameters& l : parameters_.layers) {
    for (const at::Tensor& w : {l.q_weight, l.k_weight, l.v_weight, l.o_weight, l.gate_weight,
                                l.up_weight, l.down_weight}) {
      matrices += static_cast<double>(w.numel());
    }
  }
  return 6 * matrices;
}

}  // namespace mtraining::model
