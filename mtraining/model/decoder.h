// Decoder: a language model of the Qwen2, Qwen3 or Llama family as plain tensors and one function.
//
// In:   token ids [B, n] of this rank's shard, their positions [n] or [B, n], an attention function (train/ gives the ring).
// Out:  hidden states [B, n, hidden] after the last norm; train/ turns them into a loss in chunks, never into whole logits.
// Next: train/loss.h.
//
// h = h + o(attend(rope(q(norm(h))), rope(k(..)), v(..))); h = h + down(silu(gate(norm(h))) * up(norm(h))). The families differ in
// which tensors a layer has: biases of q, k, v (Qwen2), RMSNorm of every head of q and k before RoPE (Qwen3), none of them (Llama)
// unless attention_bias is set. Nothing here knows ranks: all but attention works token by token. Parameters carry Hugging
// Face's names.
// Source: the public Qwen2, Qwen3 and Llama architectures (RMSNorm, rotary positions, grouped queries, SwiGLU, tied or own head).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "mtraining/model/hf_config.h"
#include "mtraining/model/rope.h"
#include "mtraining/model/rope_scaling.h"

namespace mtraining::model {

/// Keys of [model] (named as in Hugging Face's config.json).
struct DecoderConfig {
  std::string architecture = "qwen2";  ///< "qwen2", "qwen3", "llama"
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int64_t num_hidden_layers = 0;
  int64_t num_attention_heads = 0;
  int64_t num_key_value_heads = 0;
  int64_t head_dim = 0;  ///< explicit, never derived
  RopeParameters rope;
  double rms_norm_eps = 1e-6;
  bool tie_word_embeddings = true;
  bool attention_bias =
      false;  ///< Qwen3, Llama: biases of q, k, v and o; Qwen2's q, k, v always have theirs
  double initializer_range =
      0.02;  ///< standard deviation of matrices; those that write to the residual / sqrt(2 layers)
  double embedding_initializer_range = 0.02;
  at::ScalarType dtype = at::kFloat;  ///< of parameters and activations
};
/// Errors: InvalidArgument naming the key, what was expected and got. Unsupported: another architecture.
void check(const DecoderConfig& config);

/// What config.json says, initializer_range for the embedding too. Errors: those of check(); Unsupported: flags that are not the
/// family's.
DecoderConfig decoder_config(const HfConfig& config, at::ScalarType dtype = at::kFloat);
/// What a config.json says of this model. Errors: those of check(const HfConfig&).
HfConfig hf_config(const DecoderConfig& config, int64_t max_position_embeddings);

/// The tensors that not every family has.
struct OptionalTensors {
  bool qkv_bias = false, out_bias = false, qk_norm = false;
  bool operator==(const OptionalTensors&) const = default;
};
OptionalTensors optional_tensors(const DecoderConfig& config);

struct Parameter {
  std::string name;  ///< Hugging Face's
  at::Tensor value;  ///< leaf with requires_grad
};

/// The decoder's tensors. Cheap to copy: copies share storage. What the family lacks is undefined.
struct LayerParameters {
  at::Tensor input_norm;  // [hidden]
  at::Tensor q_weight, k_weight, v_weight,
      o_weight;                       // [H*D, hidden], [Hk*D, hidden] x 2, [hidden, H*D]
  at::Tensor q_bias, k_bias, v_bias;  // [H*D], [Hk*D] x 2, or undefined
  at::Tensor o_bias;                  // [hidden], or undefined
  at::Tensor q_norm, k_norm;          // [D] x 2, or undefined
  at::Tensor post_attention_norm;     // [hidden]
  at::Tensor gate_weight, up_weight, down_weight;  // [ffn, hidden] x 2, [hidden, ffn]

  /// The defined ones, in the order of DecoderParameters::list().
  std::vector<at::Tensor> tensors() const;
  /// The same layer with other tensors in their places, as many as tensors() gives.
  LayerParameters with(std::span<const at::Tensor> tensors) const;
};
struct DecoderParameters {
  at::Tensor embed_tokens;  // [vocab, hidden]
  std::vector<LayerParameters> layers;
  at::Tensor norm;     // [hidden]
  at::Tensor lm_head;  // [vocab, hidden]; the same tensor as embed_tokens where tied

  /// Every distinct tensor once, in a fixed order; the place in the list is the parameter's id.
  std::vector<Parameter> list() const;
};

/// Every value is a function of (seed, parameter name, element) alone: the same for every number of ranks and threads, on a GPU too.
DecoderParameters init_parameters(const DecoderConfig& config, uint64_t seed,
                                  at::Device device = at::kCPU);
/// The same tensors without values, for weights that are read from files. On the meta device: names and shapes alone.
DecoderParameters empty_parameters(const DecoderConfig& config, at::Device device = at::kCPU);

/// q [B, n, H, D], k, v [B, n, Hk, D] after RoPE -> [B, n, H, D]; differentiable. Softmax scale is 1 / sqrt(D).
using Attend = std::function<at::Tensor(int64_t layer, const at::Tensor& q, const at::Tensor& k,
                                        const at::Tensor& v)>;
/// Called around each part of the model: "embed", "attention_input", "attention", "mlp"; on a GPU also, within them or in backward,
/// "norm", "mlp backward", "attention_input backward", "recompute". For traces.
using PartObserver = std::function<void(std::string_view part, int64_t layer, bool begins)>;

/// One layer: h [B, n, hidden] -> [B, n, hidden]; differentiable.
using RunLayer =
    std::function<at::Tensor(int64_t layer, const at::Tensor& h, const RopeTable& rope)>;

struct AttentionRuns;   // layer_gradient.h
struct LayerGradients;  // likewise

class Decoder {
 public:
  /// mlp_tile: tokens of a tile of the MLP (mlp.h); 0: off. On a GPU the values of a layer's projections that are multiplied
  /// together move behind one another (device_layer.h).
  /// Errors: InvalidArgument, those of check(); parameters whose names or shapes are not those of the configuration.
  Decoder(const DecoderConfig& config, DecoderParameters parameters, int64_t mlp_tile = 0);

  const DecoderConfig& config() const { return config_; }
  const DecoderParameters& parameters() const { return parameters_; }
  /// ids [B, n] int64, positions [n] or (packed documents) [B, n] int64 -> [B, n, hidden]. Errors: InvalidArgument on shapes.
  at::Tensor forward(const at::Tensor& ids, const at::Tensor& positions, const Attend& attend,
                     const PartObserver& observe = {}) const;
  /// The same with layers run by `run_layer`, which may run layer() more than once (train/recompute.h).
  at::Tensor forward(const at::Tensor& ids, const at::Tensor& positions, const RunLayer& run_layer,
                     const PartObserver& observe = {}) const;
  /// Each layer once.
  RunLayer layers_with(Attend attend, PartObserver observe = {}) const;
  /// Layer `index` alone, with `l` for its parameters.
  at::Tensor layer(int64_t index, const LayerParameters& l, const at::Tensor& h,
                   const RopeTable& rope, const Attend& attend,
                   const PartObserver& observe = {}) const;
  /// On a GPU: the gradients of a layer that runs a second time (layer_gradient.h). `upstream`, of its output, is written over where
  /// nobody else holds it. Errors: Unsupported elsewhere.
  LayerGradients layer_gradients(int64_t index, const LayerParameters& l, const at::Tensor& h,
                                 at::Tensor upstream, const RopeTable& rope,
                                 const AttentionRuns& attention,
                                 const PartObserver& observe = {}) const;
  /// [vocab, hidden]
  const at::Tensor& head_weight() const { return parameters_.lm_head; }
  /// FLOPs of forward and backward a token without attention's pairs: 6 x matrix parameters (the head counted).
  double dense_flops_per_token() const;

 private:
  at::Tensor layer_on_device(int64_t index, const LayerParameters& l, const at::Tensor& h,
                             const RopeTable& rope, const Attend& attend,
                             const PartObserver& observe) const;
  at::Tensor norm(const at::Tensor& x, const at::Tensor& weight) const;

  DecoderConfig config_;
  DecoderParameters parameters_;
  RopeFrequencies frequencies_;
  at::Tensor inverse_frequencies_;  // on the parameters' device
  int64_t mlp_tile_;
};

}  // namespace mtraining::model
