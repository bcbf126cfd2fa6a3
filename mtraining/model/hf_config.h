// HfConfig: what a Hugging Face config.json says about a decoder of the Qwen2, Qwen3 or Llama family, as plain data.
//
// In:   config.json as transformers 4 or 5 writes it. Out: sizes, biases, norms, rope; or the text of a config.json.
// Next: decoder.h builds the model of it, checkpoint/ writes it beside the weights.
//
// Both spellings are read (rope_theta + rope_scaling, rope_parameters; torch_dtype, dtype); where both stand they must agree.
// A feature that changes the model's output and is not built is refused by name; keys without a meaning here (token ids, names)
// are kept and written back. Torch-free.
// Source: the public config.json of the three families.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

#include "mtraining/model/rope_scaling.h"

namespace mtraining::model {

enum class Family { kQwen2, kQwen3, kLlama };
/// model_type: "qwen2", "qwen3", "llama".
std::string_view to_string(Family family);
/// Errors: Unsupported naming the model_type and those that are built.
Family parse_family(std::string_view model_type);

struct HfConfig {
  Family family = Family::kQwen2;
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int64_t num_hidden_layers = 0;
  int64_t num_attention_heads = 0;
  int64_t num_key_value_heads = 0;
  int64_t head_dim =
      0;  ///< always explicit here, also where the file leaves it to hidden_size / num_attention_heads
  int64_t max_position_embeddings = 0;
  double rms_norm_eps = 1e-6;
  double initializer_range = 0.02;
  bool tie_word_embeddings = false;
  bool qkv_bias = false;            ///< Qwen2: always; Qwen3, Llama: attention_bias
  bool attention_out_bias = false;  ///< Qwen3, Llama: attention_bias
  bool qk_norm = false;             ///< RMSNorm of each head of q and k before RoPE: Qwen3
  RopeParameters rope;
  std::string dtype;       ///< "float32", "bfloat16", "float16"; "" where the file does not say
  std::string other_keys;  ///< a JSON object of the keys that are not interpreted; "" for none
};

/// Errors: InvalidArgument naming the field: sizes below 1, heads that num_key_value_heads does not divide, an odd head_dim,
/// faults of rope; Llama with a hidden_size that its heads do not divide (transformers refuses it).
void check(const HfConfig& config);

/// `where` begins each message. Errors: InvalidArgument: no JSON, a key missing, of another type or twice, two spellings that
/// disagree, faults of check(); Unsupported, by name: another model_type, rope type, dtype or activation, sliding windows in
/// use, dropout, MLP biases, partial rotary, quantization, keys of rope that are unknown.
HfConfig parse_hf_config(std::string_view text, const std::string& where);
/// `path`: a config.json or the folder that holds it.
HfConfig read_hf_config(const std::filesystem::path& path);

/// The text of a config.json that transformers 4 and 5 read alike. max_position_embeddings becomes trained_length; the lengths
/// that rope needs are always explicit, so that they do not follow it.
std::string to_json(const HfConfig& config, int64_t trained_length);

}  // namespace mtraining::model
