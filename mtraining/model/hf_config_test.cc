#include "mtraining/model/hf_config.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <tuple>
#include <utility>

#include "mtraining/base/check.h"
#include "mtraining/base/rng.h"

namespace mtraining::model {
namespace {

using nlohmann::json;

/// Qwen2.5-3B's config.json, as published.
json qwen25() {
  return json::parse(R"({
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
    "intermediate_size": 11008, "max_position_embeddings": 32768, "max_window_layers": 36,
    "model_type": "qwen2", "num_attention_heads": 16, "num_hidden_layers": 36,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 32768, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1", "use_cache": true, "use_mrope": false,
    "use_sliding_window": false, "vocab_size": 151936})");
}
json qwen3() {
  return json::parse(R"({
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
    "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072,
    "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
    "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000, "sliding_window": null,
    "tie_word_embeddings": true, "torch_dtype": "bfloat16", "use_sliding_window": false,
    "vocab_size": 151936})");
}
json llama31() {
  return json::parse(R"({
    "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
    "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu",
    "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 131072,
    "mlp_bias": false, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "rope_theta": 500000.0, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
    "vocab_size": 128256})");
}

HfConfig parse(const json& root) { return parse_hf_config(root.dump(), "config.json"); }

enum class Kind { kNone, kInvalid, kUnsupported };

/// The kind of error and its text.
std::pair<Kind, std::string> error_of(const std::string& text) {
  try {
    parse_hf_config(text, "config.json");
  } catch (const InvalidArgument& error) {
    return {Kind::kInvalid, error.what()};
  } catch (const Unsupported& error) {
    return {Kind::kUnsupported, error.what()};
  }
  return {Kind::kNone, ""};
}

void expect_refused(json root, const json& changes, Kind kind, const std::string& says) {
  root.merge_patch(changes);
  for (const auto& [key, value] : changes.items())  // a patch of null would remove the key
    if (value.is_null()) root[key] = nullptr;
  const auto [got, text] = error_of(root.dump());
  EXPECT_EQ(got, kind) << changes << "\n  got: " << text;
  EXPECT_NE(text.find(says), std::string::npos) << changes << "\n  got: " << text;
  EXPECT_EQ(text.find("config.json: "), 0u) << text;
}

TEST(HfConfig, ReadsTheThreeFamilies) {
  const HfConfig a = parse(qwen25());
  EXPECT_EQ(a.family, Family::kQwen2);
  EXPECT_EQ(a.head_dim, 128);
  EXPECT_EQ(a.num_key_value_heads, 2);
  EXPECT_TRUE(a.qkv_bias && !a.attention_out_bias && !a.qk_norm && a.tie_word_embeddings);
  EXPECT_EQ(a.rope.type, RopeType::kDefault);
  EXPECT_EQ(a.rope.rope_theta, 1e6);
  EXPECT_EQ(a.dtype, "bfloat16");

  const HfConfig b = parse(qwen3());
  EXPECT_EQ(b.family, Family::kQwen3);
  EXPECT_EQ(b.head_dim, 128) << "explicit: 1024 / 16 would be 64";
  EXPECT_TRUE(!b.qkv_bias && !b.attention_out_bias && b.qk_norm);

  const HfConfig c = parse(llama31());
  EXPECT_EQ(c.family, Family::kLlama);
  EXPECT_EQ(c.head_dim, 128);
  EXPECT_TRUE(!c.qkv_bias && !c.qk_norm && !c.tie_word_embeddings);
  EXPECT_EQ(c.rope.type, RopeType::kLlama3);
  EXPECT_EQ(c.rope.factor, 8);
  EXPECT_EQ(c.rope.original_max_position_embeddings, 8192);
  EXPECT_EQ(c.rms_norm_eps, 1e-5);

  json biased = llama31();
  biased["attention_bias"] = true;
  EXPECT_TRUE(parse(biased).qkv_bias && parse(biased).attention_out_bias);
  json implicit = qwen3();
  implicit.erase("head_dim");
  EXPECT_EQ(parse(implicit).head_dim, 128) << "Qwen3's default is a number, not a quotient";
  json many_heads = llama31();
  many_heads["num_key_value_heads"] = nullptr;
  EXPECT_EQ(parse(many_heads).num_key_value_heads, 32);
}

TEST(HfConfig, BothSpellingsOfRopeAgreeOrAreRefused) {
  const json yarn = {{"rope_type", "yarn"},
                     {"factor", 16.0},
                     {"original_max_position_embeddings", 32768},
                     {"truncate", false}};
  json older = qwen25(), newer = qwen25(), both = qwen25();
  older["rope_scaling"] = yarn;
  newer.erase("rope_theta");
  newer["rope_parameters"] = yarn;
  newer["rope_parameters"]["rope_theta"] = 1000000;
  both["rope_scaling"] = yarn;
  both["rope_parameters"] = newer["rope_parameters"];
  EXPECT_EQ(parse(older).rope, parse(newer).rope);
  EXPECT_EQ(parse(older).rope, parse(both).rope);
  EXPECT_EQ(parse(older).rope.type, RopeType::kYarn);
  EXPECT_EQ(parse(older).rope.rope_theta, 1e6);
  EXPECT_FALSE(parse(older).rope.truncate);
  json legacy = older;
  legacy["rope_scaling"].erase("rope_type");
  legacy["rope_scaling"]["type"] = "yarn";
  EXPECT_EQ(parse(legacy).rope, parse(older).rope);
  json plain = qwen25();
  plain["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 1000000.0}};
  plain["rope_scaling"] = nullptr;
  EXPECT_EQ(parse(plain).rope, parse(qwen25()).rope);
  json bare = qwen25();
  bare.erase("rope_theta");
  EXPECT_EQ(parse(bare).rope.rope_theta, 10000.0);

  expect_refused(both, {{"rope_scaling", {{"factor", 8.0}}}}, Kind::kInvalid, "disagree");
  expect_refused(both, {{"rope_theta", 5e5}}, Kind::kInvalid, "rope_theta");
  expect_refused(both, {{"rope_scaling", nullptr}}, Kind::kInvalid, "disagree");
  expect_refused(older, {{"rope_scaling", {{"rope_theta", 5e5}}}}, Kind::kInvalid, "disagree");
  expect_refused(older, {{"rope_scaling", {{"type", "linear"}}}}, Kind::kInvalid, "disagree");
}

TEST(HfConfig, RopeTypesAndKeysThatAreNotBuiltAreNamed) {
  for (const char* type : {"dynamic", "longrope", "su", "mrope", "proportional", "axial"})
    for (const char* key : {"rope_scaling", "rope_parameters"}) {
      expect_refused(qwen25(), {{key, {{"rope_type", type}, {"factor", 2.0}}}}, Kind::kUnsupported,
                     concat('"', type, '"'));
      expect_refused(qwen25(), {{key, {{"type", type}, {"factor", 2.0}}}}, Kind::kUnsupported, key);
    }
  expect_refused(qwen25(), {{"rope_scaling", {{"rope_type", "linear"}}}}, Kind::kInvalid, "factor");
  expect_refused(qwen25(), {{"rope_scaling", {{"rope_type", "linear"}, {"factor", "2"}}}},
                 Kind::kInvalid, "expected a number");
  expect_refused(qwen25(), {{"rope_scaling", {{"rope_type", "linear"}, {"factor", 0.5}}}},
                 Kind::kInvalid, "factor");
  expect_refused(
      qwen25(), {{"rope_scaling", {{"rope_type", "linear"}, {"factor", 2}, {"short_factor", {1}}}}},
      Kind::kUnsupported, "short_factor");
  expect_refused(qwen25(), {{"rope_scaling", "yarn"}}, Kind::kInvalid, "expected an object");
  expect_refused(llama31(), {{"rope_scaling", {{"low_freq_factor", nullptr}}}}, Kind::kInvalid,
                 "low_freq_factor");
  expect_refused(qwen3(), {{"rope_parameters", {{"full_attention", {{"rope_type", "default"}}}}}},
                 Kind::kUnsupported, "by layer type");
  expect_refused(llama31(), {{"original_max_position_embeddings", 4096}}, Kind::kUnsupported,
                 "original_max_position_embeddings");
}

TEST(HfConfig, DtypeIsReadInBothSpellings) {
  const auto dtype_of = [](const json& changes) {
    json root = qwen25();
    root.erase("torch_dtype");
    root.update(changes);
    return parse(root).dtype;
  };
  EXPECT_EQ(dtype_of(json::object()), "");
  EXPECT_EQ(dtype_of({{"dtype", "float32"}}), "float32");
  EXPECT_EQ(dtype_of({{"torch_dtype", "torch.float16"}}), "float16");
  EXPECT_EQ(dtype_of({{"torch_dtype", "bfloat16"}, {"dtype", "torch.bfloat16"}}), "bfloat16");
  expect_refused(qwen25(), {{"dtype", "float32"}}, Kind::kInvalid, "disagree");
  expect_refused(qwen25(), {{"torch_dtype", "float8_e4m3fn"}}, Kind::kUnsupported, "float8_e4m3fn");
}

TEST(HfConfig, WhatIsNotBuiltIsRefusedByName) {
  const struct {
    json root, changes;
    std::string says;
  } cases[] = {
      {qwen25(), {{"model_type", "qwen2_moe"}}, "qwen2_moe"},
      {qwen25(), {{"model_type", "llama"}}, "architectures"},
      {qwen25(), {{"architectures", {"Qwen2ForSequenceClassification"}}}, "SequenceClassification"},
      {qwen25(), {{"use_sliding_window", true}, {"max_window_layers", 35}}, "sliding window"},
      {llama31(), {{"sliding_window", 4096}}, "sliding window"},
      {qwen25(), {{"attention_dropout", 0.1}}, "attention_dropout"},
      {qwen25(), {{"use_mrope", true}}, "use_mrope"},
      {qwen25(), {{"hidden_act", "gelu"}}, "gelu"},
      {qwen25(), {{"attention_bias", false}}, "attention_bias"},
      {llama31(), {{"mlp_bias", true}}, "mlp_bias"},
      {llama31(), {{"partial_rotary_factor", 0.5}}, "partial_rotary_factor"},
      {llama31(), {{"rope_scaling", {{"partial_rotary_factor", 0.5}}}}, "partial_rotary_factor"},
      {llama31(), {{"pretraining_tp", 2}}, "pretraining_tp"},
      {llama31(), {{"quantization_config", {{"bits", 4}}}}, "quantization_config"},
      {qwen25(), {{"dual_chunk_attention_config", {{"chunk_size", 1}}}}, "dual_chunk"},
  };
  for (const auto& each : cases)
    expect_refused(each.root, each.changes, Kind::kUnsupported, each.says);
  json types = qwen3();
  types["layer_types"] = std::vector<std::string>(28, "full_attention");
  EXPECT_EQ(parse(types).num_hidden_layers, 28);
  types["layer_types"][5] = "sliding_attention";
  expect_refused(types, json::object(), Kind::kUnsupported, "sliding_attention");
  json unused = qwen25();  // switched on, but from a layer on that does not exist
  unused["use_sliding_window"] = true;
  EXPECT_EQ(parse(unused).num_hidden_layers, 36);
}

TEST(HfConfig, FaultyValuesAreNamed) {
  for (const char* key : {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                          "num_attention_heads", "max_position_embeddings"}) {
    expect_refused(qwen25(), {{key, nullptr}}, Kind::kInvalid, key);
    for (const json& value :
         {json(0), json(-1), json(1.5), json("8"), json(true), json(1ull << 63)})
      expect_refused(qwen25(), {{key, value}}, Kind::kInvalid, key);
  }
  expect_refused(qwen25(), {{"num_key_value_heads", 3}}, Kind::kInvalid, "num_key_value_heads");
  expect_refused(qwen25(), {{"head_dim", 63}}, Kind::kInvalid, "head_dim");
  expect_refused(qwen25(), {{"rms_norm_eps", 0}}, Kind::kInvalid, "rms_norm_eps");
  expect_refused(qwen25(), {{"tie_word_embeddings", 1}}, Kind::kInvalid, "tie_word_embeddings");
  expect_refused(llama31(), {{"hidden_size", 4098}}, Kind::kInvalid, "hidden_size");
  expect_refused(qwen25(), {{"model_type", nullptr}}, Kind::kInvalid, "model_type");
  EXPECT_NE(error_of("[]").second.find("JSON object"), std::string::npos);
  EXPECT_NE(error_of(R"({"model_type": "qwen2", "model_type": "llama"})").second.find("duplicate"),
            std::string::npos);
  const std::string whole = qwen25().dump();
  for (size_t length = 0; length < whole.size(); ++length)
    ASSERT_EQ(error_of(whole.substr(0, length)).first, Kind::kInvalid) << length;
}

TEST(HfConfig, DamagedTextIsAnErrorOrAnotherConfig) {
  const Rng rng(5);
  for (const json& root : {qwen25(), qwen3(), llama31()}) {
    const std::string whole = root.dump();
    for (uint64_t i = 0; i < 3000; ++i) {  // anything but an Error ends the test
      std::string text = whole;
      for (uint64_t j = 0; j <= i % 3; ++j)
        text[rng.below(8 * i + 2 * j, text.size())] =
            static_cast<char>(rng.bits(8 * i + 2 * j + 1));
      ASSERT_EQ(error_of(text).second.find('\n'), std::string::npos);
    }
    for (const auto& [key, value] : root.items())  // each key with a value of each type
      for (const json& other : {json(nullptr), json(true), json(-3), json(1e300), json("x"),
                                json::array({1}), json::object({{"a", 1}})}) {
        json changed = root;
        changed[key] = other;
        error_of(changed.dump());
      }
  }
}

TEST(HfConfig, WhatIsWrittenReadsBackTheSameAtTheTrainedLength) {
  json yarn = qwen25();
  yarn["rope_scaling"] = {{"rope_type", "yarn"}, {"factor", 16.0},
                          {"beta_fast", 24.0},   {"beta_slow", 2.0},
                          {"mscale", 1.0},       {"mscale_all_dim", 0.707},
                          {"truncate", false},   {"attention_factor", 1.1}};
  json linear = qwen3();
  linear["rope_scaling"] = {{"rope_type", "linear"}, {"factor", 2.0}};
  for (const json& root : {qwen25(), qwen3(), llama31(), yarn, linear}) {
    const HfConfig before = parse(root);
    const HfConfig after = parse_hf_config(to_json(before, 524288), "config.json");
    EXPECT_EQ(after.max_position_embeddings, 524288);
    EXPECT_EQ(after.rope, before.rope) << "the rope must not follow the new length";
    EXPECT_EQ(std::tuple(after.family, after.vocab_size, after.hidden_size, after.intermediate_size,
                         after.num_hidden_layers, after.num_attention_heads,
                         after.num_key_value_heads, after.head_dim, after.rms_norm_eps,
                         after.initializer_range, after.tie_word_embeddings, after.qkv_bias,
                         after.attention_out_bias, after.qk_norm, after.dtype),
              std::tuple(before.family, before.vocab_size, before.hidden_size,
                         before.intermediate_size, before.num_hidden_layers,
                         before.num_attention_heads, before.num_key_value_heads, before.head_dim,
                         before.rms_norm_eps, before.initializer_range, before.tie_word_embeddings,
                         before.qkv_bias, before.attention_out_bias, before.qk_norm, before.dtype));
    const json written = json::parse(to_json(before, 524288));
    EXPECT_EQ(written.value("eos_token_id", json()), root.value("eos_token_id", json()));
    EXPECT_FALSE(written.contains("rope_parameters") || written.contains("dtype"))
        << "one spelling, the one that both versions read";
  }
  EXPECT_THROW(to_json(parse(qwen25()), 0), InvalidArgument);
}

}  // namespace
}  // namespace mtraining::model
