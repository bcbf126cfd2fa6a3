#include "mtraining/model/hf_config.h"

#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>

#include "mtraining/base/check.h"
#include "mtraining/base/json.h"

namespace mtraining::model {
namespace {

using nlohmann::json;

struct FamilyName {
  Family family;
  std::string_view model_type, architecture;
};
constexpr FamilyName kFamilies[] = {{Family::kQwen2, "qwen2", "Qwen2ForCausalLM"},
                                    {Family::kQwen3, "qwen3", "Qwen3ForCausalLM"},
                                    {Family::kLlama, "llama", "LlamaForCausalLM"}};

const FamilyName& entry_of(Family family) {
  for (const FamilyName& entry : kFamilies)
    if (entry.family == family) return entry;
  throw InternalError("no such Family");
}

/// One JSON object; remembers which keys were asked for, so that the others can be kept or refused.
class Fields {
 public:
  Fields(const json& object, std::string where) : object_(object), where_(std::move(where)) {}

  /// Null where the key is absent or null: transformers writes null for "not set".
  const json* find(const std::string& key) {
    known_.insert(key);
    const auto found = object_.find(key);
    return found == object_.end() || found->is_null() ? nullptr : &*found;
  }
  std::optional<int64_t> integer(const std::string& key) {
    const json* value = find(key);
    if (!value) return std::nullopt;
    MT_CHECK_ARG(value->is_number_integer() &&
                     (!value->is_number_unsigned() || value->get<uint64_t>() < uint64_t{1} << 62),
                 where_, ": ", key, ": expected an integer, got ", value->dump());
    return value->get<int64_t>();
  }
  std::optional<double> number(const std::string& key) {
    const json* value = find(key);
    if (!value) return std::nullopt;
    MT_CHECK_ARG(value->is_number(), where_, ": ", key, ": expected a number, got ", value->dump());
    return value->get<double>();
  }
  std::optional<bool> boolean(const std::string& key) {
    const json* value = find(key);
    if (!value) return std::nullopt;
    MT_CHECK_ARG(value->is_boolean(), where_, ": ", key, ": expected true or false, got ",
                 value->dump());
    return value->get<bool>();
  }
  std::optional<std::string> string(const std::string& key) {
    const json* value = find(key);
    if (!value) return std::nullopt;
    MT_CHECK_ARG(value->is_string(), where_, ": ", key, ": expected a string, got ", value->dump());
    return value->get<std::string>();
  }
  int64_t required_integer(const std::string& key) {
    const auto value = integer(key);
    MT_CHECK_ARG(value.has_value(), where_, ": expected a key ", key, ", got none");
    return *value;
  }
  bool has(const std::string& key) const { return object_.contains(key); }
  /// Keys that were not asked for.
  json others() const {
    json result = json::object();
    for (const auto& [key, value] : object_.items())
      if (!known_.contains(key)) result[key] = value;
    return result;
  }
  const std::string& where() const { return where_; }

 private:
  const json& object_;
  std::string where_;
  std::set<std::string> known_;
};

// ---------------------------------------------------------------- rope
RopeType parse_rope_type(Fields& fields) {
  const auto type = fields.string("rope_type");
  const auto old_type = fields.string("type");
  MT_CHECK_ARG(!type || !old_type || *type == *old_type, fields.where(), ": rope_type ",
               in_quotes(type.value_or("")), " and type ", in_quotes(old_type.value_or("")),
               " disagree");
  const std::string name = type ? *type : old_type.value_or("default");
  for (const RopeType known :
       {RopeType::kDefault, RopeType::kLinear, RopeType::kYarn, RopeType::kLlama3})
    if (to_string(known) == name) return known;
  throw Unsupported(concat(fields.where(), ": rope type ", in_quotes(name),
                           " is not supported: expected default, linear, yarn or llama3"));
}

/// One object of rope fields, in either spelling. `rope_theta` and `longest` stand for what the object leaves out.
RopeParameters parse_rope(const json& object, const std::string& where, double rope_theta,
                          int64_t longest) {
  MT_CHECK_ARG(object.is_object(), where, ": expected an object, got ", object.dump());
  Fields fields(object, where);
  RopeParameters rope;
  rope.type = parse_rope_type(fields);
  rope.rope_theta = fields.number("rope_theta").value_or(rope_theta);
  const double share = fields.number("partial_rotary_factor").value_or(1.0);
  MT_CHECK_SUPPORTED(share == 1.0, where, ": partial_rotary_factor ", share,
                     " is not supported: expected 1");
  const auto original = fields.integer("original_max_position_embeddings");
  if (rope.type != RopeType::kDefault) {
    const auto factor = fields.number("factor");
    MT_CHECK_ARG(factor.has_value(), where, ": expected a key factor for rope type ",
                 to_string(rope.type), ", got none");
    rope.factor = *factor;
  }
  if (rope.type == RopeType::kYarn || rope.type == RopeType::kLlama3)
    rope.original_max_position_embeddings = original.value_or(longest);
  if (rope.type == RopeType::kYarn) {
    // 0 stands for "not given" in transformers.
    const auto given = [&](const std::string& key) {
      const auto value = fields.number(key);
      return value == 0.0 ? std::nullopt : value;
    };
    rope.beta_fast = given("beta_fast").value_or(rope.beta_fast);
    rope.beta_slow = given("beta_slow").value_or(rope.beta_slow);
    rope.attention_factor = fields.number("attention_factor");
    rope.mscale = given("mscale");
    rope.mscale_all_dim = given("mscale_all_dim");
    rope.truncate = fields.boolean("truncate").value_or(true);
    fields.find("finetuned");  // a note of older files that changes nothing
  }
  if (rope.type == RopeType::kLlama3) {
    for (const auto& [key, value] : {std::pair{"low_freq_factor", &rope.low_freq_factor},
                                     {"high_freq_factor", &rope.high_freq_factor}}) {
      const auto given = fields.number(key);
      MT_CHECK_ARG(given.has_value(), where, ": expected a key ", key,
                   " for rope type llama3, got none");
      *value = *given;
    }
  }
  const json others = fields.others();
  for (const auto& [key, value] : others.items())
    MT_CHECK_SUPPORTED(value.is_null(), where, ": key ", in_quotes(key),
                       " is not supported for rope type ", to_string(rope.type));
  return rope;
}

std::string to_text(const RopeParameters& rope);

RopeParameters parse_both_ropes(Fields& fields, int64_t longest) {
  constexpr double kTheta =
      10000.0;  // what transformers takes for all three families where none is given
  const std::string& where = fields.where();
  const auto top_theta = fields.number("rope_theta");
  const json* scaling = fields.find("rope_scaling");
  const json* parameters = fields.find("rope_parameters");
  if (scaling && scaling->is_object() && scaling->empty()) scaling = nullptr;
  if (parameters && parameters->is_object() && parameters->empty()) parameters = nullptr;
  const double theta = top_theta.value_or(kTheta);

  RopeParameters older;  // the spelling of transformers 4
  older.rope_theta = theta;
  if (scaling) older = parse_rope(*scaling, where + ": rope_scaling", theta, longest);
  MT_CHECK_ARG(!top_theta || older.rope_theta == theta, where, ": rope_theta ", theta,
               " and rope_scaling.rope_theta ", older.rope_theta, " disagree");
  if (!parameters) return older;
  MT_CHECK_SUPPORTED(!parameters->is_object() || !parameters->contains("full_attention"), where,
                     ": rope_parameters by layer type is not supported");
  const RopeParameters newer = parse_rope(*parameters, where + ": rope_parameters", theta, longest);
  MT_CHECK_ARG(!top_theta || newer.rope_theta == theta, where, ": rope_theta ", theta,
               " and rope_parameters.rope_theta ", newer.rope_theta, " disagree");
  // A rope_scaling of null beside rope_parameters says "none" to transformers 4.
  MT_CHECK_ARG(
      !fields.has("rope_scaling") || (scaling ? older == newer : newer.type == RopeType::kDefault),
      where, ": rope_scaling ", to_text(older), " and rope_parameters ", to_text(newer),
      " disagree");
  return newer;
}

json to_scaling(const RopeParameters& rope) {
  if (rope.type == RopeType::kDefault) return nullptr;
  json result = {{"rope_type", to_string(rope.type)}, {"factor", rope.factor}};
  if (rope.type == RopeType::kLinear) return result;
  result["original_max_position_embeddings"] = rope.original_max_position_embeddings;
  if (rope.type == RopeType::kLlama3) {
    result["low_freq_factor"] = rope.low_freq_factor;
    result["high_freq_factor"] = rope.high_freq_factor;
    return result;
  }
  result["beta_fast"] = rope.beta_fast;
  result["beta_slow"] = rope.beta_slow;
  if (rope.attention_factor) result["attention_factor"] = *rope.attention_factor;
  if (rope.mscale) result["mscale"] = *rope.mscale;
  if (rope.mscale_all_dim) result["mscale_all_dim"] = *rope.mscale_all_dim;
  if (!rope.truncate) result["truncate"] = false;
  return result;
}

std::string to_text(const RopeParameters& rope) {
  json fields = to_scaling(rope);
  if (fields.is_null()) fields = {{"rope_type", "default"}};
  fields["rope_theta"] = rope.rope_theta;
  return fields.dump();
}

// ---------------------------------------------------------------- dtype
std::string parse_dtype(Fields& fields) {
  const auto older = fields.string("torch_dtype"), newer = fields.string("dtype");
  const auto plain = [](const std::string& name) {
    constexpr std::string_view kPrefix = "torch.";
    return name.starts_with(kPrefix) ? name.substr(kPrefix.size()) : name;
  };
  MT_CHECK_ARG(!older || !newer || plain(*older) == plain(*newer), fields.where(), ": torch_dtype ",
               in_quotes(older.value_or("")), " and dtype ", in_quotes(newer.value_or("")),
               " disagree");
  if (!older && !newer) return "";
  const std::string name = plain(newer ? *newer : *older);
  MT_CHECK_SUPPORTED(name == "float32" || name == "bfloat16" || name == "float16", fields.where(),
                     ": dtype ", in_quotes(name),
                     " is not supported: expected float32, bfloat16 or float16");
  return name;
}

// ---------------------------------------------------------------- what is not built
void refuse_sliding_window(Fields& fields, Family family, int64_t num_hidden_layers) {
  const std::string& where = fields.where();
  json keys = fields.others();  // not find(): these keys are kept and written back
  const auto in_use = [&] {
    if (!keys.contains("sliding_window") || keys["sliding_window"].is_null()) return false;
    if (family == Family::kLlama) return true;
    if (!keys.value("use_sliding_window", json(false)).is_boolean()) return true;
    const json from = keys.value("max_window_layers", json(28));
    return keys.value("use_sliding_window", false) &&
           !(from.is_number_integer() && from.get<int64_t>() >= num_hidden_layers);
  };
  MT_CHECK_SUPPORTED(!in_use(), where, ": a sliding window (use_sliding_window, sliding_window ",
                     keys["sliding_window"].dump(), ") is not supported");
  if (!keys.contains("layer_types") || keys["layer_types"].is_null()) return;
  const json& types = keys["layer_types"];
  MT_CHECK_ARG(types.is_array() && static_cast<int64_t>(types.size()) == num_hidden_layers, where,
               ": layer_types: expected a list of ", num_hidden_layers, " types, one a layer");
  for (const json& type : types)
    MT_CHECK_SUPPORTED(type == "full_attention", where, ": layer_types: ", type.dump(),
                       " is not supported: expected \"full_attention\"");
}

void refuse_other_features(Fields& fields) {
  const std::string& where = fields.where();
  const std::string activation = fields.string("hidden_act").value_or("silu");
  MT_CHECK_SUPPORTED(activation == "silu" || activation == "swish", where, ": hidden_act ",
                     in_quotes(activation), " is not supported: expected \"silu\"");
  const double dropout = fields.number("attention_dropout").value_or(0.0);
  MT_CHECK_SUPPORTED(dropout == 0.0, where, ": attention_dropout ", dropout,
                     " is not supported: expected 0");
  MT_CHECK_SUPPORTED(!fields.boolean("mlp_bias").value_or(false), where,
                     ": mlp_bias true is not supported");
  const double share = fields.number("partial_rotary_factor").value_or(1.0);
  MT_CHECK_SUPPORTED(share == 1.0, where, ": partial_rotary_factor ", share,
                     " is not supported: expected 1");
  MT_CHECK_SUPPORTED(!fields.boolean("use_mrope").value_or(false), where,
                     ": use_mrope true is not supported");
  const int64_t slices = fields.integer("pretraining_tp").value_or(1);
  MT_CHECK_SUPPORTED(slices == 1, where, ": pretraining_tp ", slices,
                     " is not supported: expected 1");
  for (const char* key : {"quantization_config", "dual_chunk_attention_config"})
    MT_CHECK_SUPPORTED(fields.find(key) == nullptr, where, ": ", key, " is not supported");
}

}  // namespace

std::string_view to_string(Family family) { return entry_of(family).model_type; }

Family parse_family(std::string_view model_type) {
  for (const FamilyName& entry : kFamilies)
    if (entry.model_type == model_type) return entry.family;
  throw Unsupported(concat("model_type ", in_quotes(model_type),
                           " is not supported: expected qwen2, qwen3 or llama"));
}

void check(const HfConfig& config) {
  for (const auto& [key, value] : {std::pair{"vocab_size", config.vocab_size},
                                   {"hidden_size", config.hidden_size},
                                   {"intermediate_size", config.intermediate_size},
                                   {"num_hidden_layers", config.num_hidden_layers},
                                   {"num_attention_heads", config.num_attention_heads},
                                   {"num_key_value_heads", config.num_key_value_heads},
                                   {"head_dim", config.head_dim},
                                   {"max_position_embeddings", config.max_position_embeddings}})
    MT_CHECK_ARG(value >= 1 && value < int64_t{1} << 31, key, ": expected 1 to 2^31 - 1, got ",
                 value);
  MT_CHECK_ARG(config.num_attention_heads % config.num_key_value_heads == 0,
               "num_key_value_heads: expected a divisor of num_attention_heads ",
               config.num_attention_heads, ", got ", config.num_key_value_heads);
  MT_CHECK_ARG(config.head_dim % 2 == 0, "head_dim: expected an even number, got ",
               config.head_dim);
  MT_CHECK_ARG(config.rms_norm_eps > 0 && config.rms_norm_eps < 1,
               "rms_norm_eps: expected a number between 0 and 1, got ", config.rms_norm_eps);
  MT_CHECK_ARG(
      config.family != Family::kLlama || config.hidden_size % config.num_attention_heads == 0,
      "hidden_size: expected a multiple of num_attention_heads ", config.num_attention_heads,
      " for llama, got ", config.hidden_size);
  check(config.rope);
}

HfConfig parse_hf_config(std::string_view text, const std::string& where) {
  const json root = parse_json(text, where);
  MT_CHECK_ARG(root.is_object(), where, ": expected a JSON object");
  Fields fields(root, where);
  HfConfig config;
  const auto model_type = fields.string("model_type");
  MT_CHECK_ARG(model_type.has_value(), where, ": expected a key model_type, got none");
  try {
    config.family = parse_family(*model_type);
  } catch (const Unsupported& error) {
    throw Unsupported(concat(where, ": ", error.what()));
  }
  if (const json* architectures = fields.find("architectures")) {
    const std::string want(entry_of(config.family).architecture);
    MT_CHECK_SUPPORTED(*architectures == json::array({want}), where, ": architectures ",
                       architectures->dump(), " is not supported with model_type ", *model_type,
                       ": expected [\"", want, "\"]");
  }
  config.vocab_size = fields.required_integer("vocab_size");
  config.hidden_size = fields.required_integer("hidden_size");
  config.intermediate_size = fields.required_integer("intermediate_size");
  config.num_hidden_layers = fields.required_integer("num_hidden_layers");
  config.num_attention_heads = fields.required_integer("num_attention_heads");
  MT_CHECK_ARG(config.num_attention_heads >= 1, where,
               ": num_attention_heads: expected at least 1, got ", config.num_attention_heads);
  config.num_key_value_heads =
      fields.integer("num_key_value_heads").value_or(config.num_attention_heads);
  config.max_position_embeddings = fields.required_integer("max_position_embeddings");
  constexpr int64_t kQwen3HeadDim = 128;  // the class's own default: Qwen3 never derives it
  config.head_dim = fields.integer("head_dim")
                        .value_or(config.family == Family::kQwen3
                                      ? kQwen3HeadDim
                                      : config.hidden_size / config.num_attention_heads);
  config.rms_norm_eps = fields.number("rms_norm_eps").value_or(config.rms_norm_eps);
  config.initializer_range = fields.number("initializer_range").value_or(config.initializer_range);
  config.tie_word_embeddings = fields.boolean("tie_word_embeddings").value_or(false);
  const auto bias = fields.boolean("attention_bias");
  const bool always_bias = config.family == Family::kQwen2;
  MT_CHECK_SUPPORTED(!always_bias || bias.value_or(true), where,
                     ": attention_bias false is not supported with qwen2, whose q, k and v always "
                     "have biases");
  config.qkv_bias = always_bias || bias.value_or(false);
  config.attention_out_bias = !always_bias && bias.value_or(false);
  config.qk_norm = config.family == Family::kQwen3;
  config.dtype = parse_dtype(fields);
  config.rope = parse_both_ropes(fields, config.max_position_embeddings);
  const auto original = fields.integer("original_max_position_embeddings");
  MT_CHECK_SUPPORTED(!original || *original == config.rope.original_max_position_embeddings, where,
                     ": original_max_position_embeddings outside of rope_scaling is not supported");
  refuse_other_features(fields);
  fields.find("transformers_version");  // ours is written by no version of it
  refuse_sliding_window(fields, config.family, config.num_hidden_layers);
  const json others = fields.others();
  if (!others.empty()) config.other_keys = others.dump();
  try {
    check(config);
  } catch (const InvalidArgument& error) {
    throw InvalidArgument(concat(where, ": ", error.what()));
  }
  return config;
}

HfConfig read_hf_config(const std::filesystem::path& path) {
  const bool folder = std::filesystem::is_directory(path);
  const std::filesystem::path file = folder ? path / "config.json" : path;
  return parse_hf_config(read_text_file(file), file.string());
}

std::string to_json(const HfConfig& config, int64_t trained_length) {
  HfConfig checked = config;
  checked.max_position_embeddings = trained_length;
  check(checked);
  json root = config.other_keys.empty() ? json::object()
                                        : parse_json(config.other_keys, "HfConfig::other_keys");
  const FamilyName& family = entry_of(config.family);
  root["architectures"] = json::array({family.architecture});
  root["model_type"] = family.model_type;
  root["vocab_size"] = config.vocab_size;
  root["hidden_size"] = config.hidden_size;
  root["intermediate_size"] = config.intermediate_size;
  root["num_hidden_layers"] = config.num_hidden_layers;
  root["num_attention_heads"] = config.num_attention_heads;
  root["num_key_value_heads"] = config.num_key_value_heads;
  root["head_dim"] = config.head_dim;
  root["max_position_embeddings"] = trained_length;
  root["rms_norm_eps"] = config.rms_norm_eps;
  root["initializer_range"] = config.initializer_range;
  root["tie_word_embeddings"] = config.tie_word_embeddings;
  root["hidden_act"] = "silu";
  root["attention_dropout"] = 0.0;
  if (config.family == Family::kLlama) root["mlp_bias"] = false;
  if (config.family != Family::kQwen2) root["attention_bias"] = config.qkv_bias;
  if (!config.dtype.empty()) root["torch_dtype"] = config.dtype;
  root["rope_theta"] = config.rope.rope_theta;
  root["rope_scaling"] = to_scaling(config.rope);
  return root.dump(2) + "\n";
}

}  // namespace mtraining::model
