#include "mtraining/model/decoder.h"

#include <ATen/ATen.h>

#include <cmath>

#include "mtraining/base/check.h"
#include "mtraining/base/rng.h"
#include "mtraining/model/rope.h"

namespace mtraining::model {
namespace {

uint64_t hash_name(std::string_view name) {
  uint64_t hash = 0xcbf29ce484222325ULL;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ULL;
  return hash;
}

at::Tensor leaf(at::Tensor value, at::ScalarType dtype) {
  return value.to(dtype).set_requires_grad(true);
}

class Initializer {
 public:
  Initializer(const DecoderConfig& config, uint64_t seed) : dtype_(config.dtype), seed_(seed) {}

  at::Tensor normal(const std::string& name, at::IntArrayRef shape, double deviation) const {
    at::Tensor value = at::empty(shape, at::kFloat);
    const Rng rng(seed_, hash_name(name));
    float* data = value.data_ptr<float>();
    for (int64_t i = 0; i < value.numel(); ++i) {
      data[i] = static_cast<float>(deviation * rng.normal(static_cast<uint64_t>(i)));
    }
    return leaf(value, dtype_);
  }
  at::Tensor zeros(int64_t size) const { return leaf(at::zeros({size}, at::kFloat), dtype_); }
  at::Tensor ones(int64_t size) const { return leaf(at::ones({size}, at::kFloat), dtype_); }

 private:
  at::ScalarType dtype_;
  uint64_t seed_;
};

std::string layer_prefix(int64_t layer) { return concat("model.layers.", layer, "."); }

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  return at::rms_norm(x, {x.size(-1)}, weight, eps);
}

}  // namespace

void check(const DecoderConfig& config) {
  MT_CHECK_SUPPORTED(config.architecture == "qwen2",
                     "model.architecture: expected \"qwen2\", got \"", config.architecture, "\"");
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
  MT_CHECK_ARG(config.rope_theta > 1, "model.rope_theta: expected more than 1, got ",
               config.rope_theta);
  MT_CHECK_ARG(config.rms_norm_eps > 0, "model.rms_norm_eps: expected more than 0, got ",
               config.rms_norm_eps);
  MT_CHECK_ARG(config.initializer_range > 0, "model.initializer_range: expected more than 0, got ",
               config.initializer_range);
  MT_CHECK_ARG(config.embedding_initializer_range > 0,
               "model.embedding_initializer_range: expected more than 0, got ",
               config.embedding_initializer_range);
}

std::vector<Parameter> DecoderParameters::list() const {
  std::vector<Parameter> all{{"model.embed_tokens.weight", embed_tokens}};
  for (size_t i = 0; i < layers.size(); ++i) {
    const LayerParameters& l = layers[i];
    const std::string prefix = layer_prefix(static_cast<int64_t>(i));
    all.push_back({prefix + "input_layernorm.weight", l.input_norm});
    all.push_back({prefix + "self_attn.q_proj.weight", l.q_weight});
    all.push_back({prefix + "self_attn.q_proj.bias", l.q_bias});
    all.push_back({prefix + "self_attn.k_proj.weight", l.k_weight});
    all.push_back({prefix + "self_attn.k_proj.bias", l.k_bias});
    all.push_back({prefix + "self_attn.v_proj.weight", l.v_weight});
    all.push_back({prefix + "self_attn.v_proj.bias", l.v_bias});
    all.push_back({prefix + "self_attn.o_proj.weight", l.o_weight});
    all.push_back({prefix + "post_attention_layernorm.weight", l.post_attention_norm});
    all.push_back({prefix + "mlp.gate_proj.weight", l.gate_weight});
    all.push_back({prefix + "mlp.up_proj.weight", l.up_weight});
    all.push_back({prefix + "mlp.down_proj.weight", l.down_weight});
  }
  all.push_back({"model.norm.weight", norm});
  if (!lm_head.is_same(embed_tokens)) all.push_back({"lm_head.weight", lm_head});
  return all;
}

DecoderParameters init_parameters(const DecoderConfig& config, uint64_t seed) {
  check(config);
  const Initializer init(config, seed);
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
    l.q_bias = init.zeros(q);
    l.k_bias = init.zeros(kv);
    l.v_bias = init.zeros(kv);
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

Decoder::Decoder(const DecoderConfig& config, DecoderParameters parameters)
    : config_(config), parameters_(std::move(parameters)) {
  check(config_);
  MT_CHECK_ARG(static_cast<int64_t>(parameters_.layers.size()) == config_.num_hidden_layers,
               "parameters: expected ", config_.num_hidden_layers, " layers, got ",
               parameters_.layers.size());
}

at::Tensor Decoder::forward(const at::Tensor& ids, const at::Tensor& positions,
                            const Attend& attend, const PartObserver& observe) const {
  MT_CHECK_ARG(ids.dim() == 2 && ids.scalar_type() == at::kLong && positions.dim() == 1 &&
                   positions.size(0) == ids.size(1),
               "ids: expected [B, n] int64 and positions [n], got ", ids.sizes(), " and ",
               positions.sizes());
  const int64_t batch = ids.size(0), n = ids.size(1), dim = config_.head_dim;
  const auto part = [&](std::string_view name, int64_t layer, bool begins) {
    if (observe) observe(name, layer, begins);
  };
  part("embed", -1, true);
  at::Tensor h = at::embedding(parameters_.embed_tokens, ids);
  const RopeTable rope = rope_table(positions, dim, config_.rope_theta);
  part("embed", -1, false);
  for (size_t i = 0; i < parameters_.layers.size(); ++i) {
    const LayerParameters& l = parameters_.layers[i];
    const auto layer = static_cast<int64_t>(i);
    part("attention_input", layer, true);
    const at::Tensor x = rms_norm(h, l.input_norm, config_.rms_norm_eps);
    const at::Tensor q =
        apply_rope(at::linear(x, l.q_weight, l.q_bias).view({batch, n, -1, dim}), rope);
    const at::Tensor k =
        apply_rope(at::linear(x, l.k_weight, l.k_bias).view({batch, n, -1, dim}), rope);
    const at::Tensor v = at::linear(x, l.v_weight, l.v_bias).view({batch, n, -1, dim});
    part("attention_input", layer, false);
    part("attention", layer, true);
    const at::Tensor attended = attend(layer, q, k, v).reshape({batch, n, -1});
    part("attention", layer, false);
    part("mlp", layer, true);
    h = h + at::linear(attended, l.o_weight);
    const at::Tensor y = rms_norm(h, l.post_attention_norm, config_.rms_norm_eps);
    h = h + at::linear(at::silu(at::linear(y, l.gate_weight)) * at::linear(y, l.up_weight),
                       l.down_weight);
    part("mlp", layer, false);
  }
  return rms_norm(h, parameters_.norm, config_.rms_norm_eps);
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
