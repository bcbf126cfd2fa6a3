#include "cli/config_file.h"

#include <toml++/toml.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <optional>
#include <sstream>

#include "cli/model_keys.h"
#include "cli/nearest.h"
#include "mtraining/base/check.h"
#include "mtraining/base/words.h"

namespace mtraining::cli {
namespace {

constexpr Word<train::Recompute> kRecomputes[] = {
    {"none", train::Recompute::kNone},
    {"layer", train::Recompute::kLayer},
    {"except_attention", train::Recompute::kExceptAttention}};
constexpr Word<train::DeviceKind> kDevices[] = {{"cpu", train::DeviceKind::kCpu},
                                                {"cuda", train::DeviceKind::kCuda}};
constexpr Word<at::ScalarType> kDtypes[] = {{"float32", at::kFloat}, {"bf16", at::kBFloat16}};

/// Keys of interfaces that belong to parts which this version does not have.
const std::vector<std::string> kNotBuilt = {};

/// Keys without a default. Those of the model come from config.json where model.init_from is given.
const std::vector<std::string> kRequired = {
    "model.vocab_size",
    "model.hidden_size",
    "model.intermediate_size",
    "model.num_hidden_layers",
    "model.num_attention_heads",
    "model.num_key_value_heads",
    "model.head_dim",
    "train.seq_len",
};

/// The keys that a range of layers may have for itself, with `prefix`.
template <typename Visitor>
void visit_pattern_keys(const std::string& prefix, train::PatternSection& p, Visitor&& v) {
  const auto name = [&](const char* key) { return prefix + key; };
  v.choice(name("pattern"), p.pattern, pattern::kPatternWords);
  v.key(name("p_vertical"), p.options.p_vertical);
  v.key(name("p_slash"), p.options.p_slash);
  v.key(name("last_q"), p.options.last_q);
  v.choice(name("window"), p.options.window, pattern::kWindowWords);
  v.choice(name("slash_pooling"), p.options.slash_pooling, pattern::kPoolingWords);
  v.choice(name("selection"), p.options.selection, pattern::kSelectionWords);
  v.key(name("sink_tokens"), p.options.sink_tokens);
  v.key(name("local_blocks"), p.options.local_blocks);
  v.key(name("max_columns"), p.options.max_columns);
  v.key(name("max_diagonals"), p.options.max_diagonals);
  v.key(name("dense_threshold"), p.options.dense_threshold);
  v.key(name("recall_floor"), p.options.recall_floor);
  v.key(name("recall_rows"), p.options.recall_rows);
  v.key(name("pattern_file"), p.pattern_file);
  v.key(name("fixed_columns"), p.fixed_columns);
  v.key(name("fixed_diagonals"), p.fixed_diagonals);
  v.key(name("estimate"), p.estimate);
  v.key(name("xattention_block"), p.xattention.block);
  v.key(name("xattention_stride"), p.xattention.stride);
  v.key(name("xattention_threshold"), p.xattention.threshold);
  v.key(name("moba_chunk"), p.moba.chunk);
  v.key(name("moba_top_k"), p.moba.top_k);
}

/// The one list of keys. A visitor has key(name, field), choice(name, field, words) and pair(name, first, second).
template <typename Visitor>
void visit_keys(train::RunConfig& c, Visitor&& v) {
  v.key("model.init_from", c.init_from);
  v.key("model.architecture", c.model.architecture);
  v.key("model.vocab_size", c.model.vocab_size);
  v.key("model.hidden_size", c.model.hidden_size);
  v.key("model.intermediate_size", c.model.intermediate_size);
  v.key("model.num_hidden_layers", c.model.num_hidden_layers);
  v.key("model.num_attention_heads", c.model.num_attention_heads);
  v.key("model.num_key_value_heads", c.model.num_key_value_heads);
  v.key("model.head_dim", c.model.head_dim);
  v.key("model.attention_bias", c.model.attention_bias);
  v.key("model.rope_theta", c.model.rope.rope_theta);
  v.key("model.rope_scaling.rope_type", c.rope_scaling.rope_type);
  v.key("model.rope_scaling.factor", c.rope_scaling.factor);
  v.key("model.rope_scaling.original_max_position_embeddings",
        c.rope_scaling.original_max_position_embeddings);
  v.key("model.rope_scaling.beta_fast", c.rope_scaling.beta_fast);
  v.key("model.rope_scaling.beta_slow", c.rope_scaling.beta_slow);
  v.key("model.rope_scaling.attention_factor", c.rope_scaling.attention_factor);
  v.key("model.rope_scaling.mscale", c.rope_scaling.mscale);
  v.key("model.rope_scaling.mscale_all_dim", c.rope_scaling.mscale_all_dim);
  v.key("model.rope_scaling.truncate", c.rope_scaling.truncate);
  v.key("model.rope_scaling.low_freq_factor", c.rope_scaling.low_freq_factor);
  v.key("model.rope_scaling.high_freq_factor", c.rope_scaling.high_freq_factor);
  v.key("model.rms_norm_eps", c.model.rms_norm_eps);
  v.key("model.tie_word_embeddings", c.model.tie_word_embeddings);
  v.key("model.initializer_range", c.model.initializer_range);
  v.key("model.embedding_initializer_range", c.model.embedding_initializer_range);
  v.choice("model.dtype", c.model.dtype, kDtypes);
  v.key("data.train", c.data.train);
  v.key("data.valid", c.data.valid);
  v.key("data.shuffle_seed", c.data.shuffle_seed);
  v.key("data.document_mask", c.data.document_mask);
  v.key("parallel.cp_size", c.parallel.cp_size);
  v.key("parallel.cp_inner_size", c.parallel.cp_inner_size);
  v.key("parallel.dp_size", c.parallel.dp_size);
  v.key("parallel.zero", c.parallel.zero);
  v.key("parallel.offload_optimizer", c.parallel.offload_optimizer);
  v.key("parallel.optimizer_threads", c.parallel.optimizer_threads);
  v.key("parallel.timeout_s", c.parallel.timeout_s);
  visit_pattern_keys("attention.", c.attention, v);
  v.layers("attention.layers", c.attention);
  v.key("attention.dense_steps", c.attention.dense_steps);
  v.choice("attention.layout", c.attention.layout, layout::kLayoutWords);
  v.key("attention.stripe", c.attention.stripe);
  v.choice("attention.ring", c.attention.ring, ring::kRingWords);
  v.choice("attention.inner", c.attention.inner, ring::kInnerWords);
  v.key("attention.ring_stride", c.attention.ring_stride);
  v.key("attention.prefetch_steps", c.attention.prefetch_steps);
  v.key("attention.launch_shards", c.attention.launch_shards);
  v.choice("attention.columns", c.attention.columns, attention::kColumnWords);
  v.choice("attention.gradient_transport", c.attention.gradient_transport,
           attention::kGradientTransportWords);
  v.choice("attention.transfers", c.attention.transfers, attention::kTransferWords);
  v.key("attention.deterministic", c.attention.deterministic);
  v.key("attention.sm_margin", c.attention.sm_margin);
  v.choice("train.device", c.train.device, kDevices);
  v.key("train.seq_len", c.train.seq_len);
  v.key("train.steps", c.train.steps);
  v.key("train.tokens", c.train.tokens);
  v.key("train.global_batch_size", c.train.global_batch_size);
  v.key("train.micro_batch_size", c.train.micro_batch_size);
  v.key("train.seed", c.train.seed);
  v.key("train.stop_grace_s", c.train.stop_grace_s);
  v.key("train.preflight", c.train.preflight);
  v.key("train.loss_chunk", c.train.loss_chunk);
  v.key("train.recall_every", c.train.recall_every);
  v.key("train.peak_flops_per_s", c.train.peak_flops_per_s);
  v.choice("train.recompute", c.train.recompute, kRecomputes);
  v.key("train.recompute_span", c.train.recompute_span);
  v.key("train.mlp_tile", c.train.mlp_tile);
  v.key("train.offload_layers", c.train.offload_layers);
  v.key("optim.lr", c.optim.schedule.lr);
  v.pair("optim.betas", c.optim.adamw.beta1, c.optim.adamw.beta2);
  v.key("optim.eps", c.optim.adamw.eps);
  v.key("optim.weight_decay", c.optim.adamw.weight_decay);
  v.key("optim.clip_norm", c.optim.clip_norm);
  v.choice("optim.schedule", c.optim.schedule.kind, optim::kScheduleWords);
  v.key("optim.warmup_steps", c.optim.schedule.warmup_steps);
  v.key("optim.min_lr_ratio", c.optim.schedule.min_lr_ratio);
  v.choice("optim.grad_dtype", c.optim.grad_dtype, kDtypes);
  v.key("eval.every", c.eval.every);
  v.key("eval.batches", c.eval.batches);
  v.key("eval.also_p", c.eval.also_p);
  v.key("checkpoint.every", c.checkpoint.every);
  v.key("checkpoint.save_every_minutes", c.checkpoint.save_every_minutes);
  v.key("checkpoint.keep", c.checkpoint.keep);
  v.key("checkpoint.save_accumulation", c.checkpoint.save_accumulation);
  v.key("trace.chrome", c.trace.chrome);
  v.key("trace.first_step", c.trace.first_step);
  v.key("trace.steps", c.trace.steps);
  v.key("trace.example_layer", c.trace.example_layer);
  v.key("trace.example_head", c.trace.example_head);
}

struct Entry {
  std::unique_ptr<toml::table> holder;  ///< keeps an override's node alive
  const toml::node* node = nullptr;
  std::string where;
};
using Entries = std::map<std::string, Entry>;

constexpr size_t kMostShown = 80;
constexpr uintmax_t kMostBytes = 1 << 20;
constexpr int kMostLevels = 32;  ///< the deepest known key has two, its value two more

std::string shorten(const std::string& text) {
  return text.size() <= kMostShown ? text : concat(text.substr(0, kMostShown), "...");
}

/// The parser and the tables it makes recurse once a level, and a dotted key has as many levels as dots. Counts brackets and
/// the dots between them outside of strings and comments, before anything is parsed.
void check_depth(const std::string& text, const std::string& where) {
  int brackets = 0, dots = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '#') {
      i = std::min(text.find('\n', i), text.size()) - 1;
    } else if (c == '"' || c == '\'') {
      const std::string triple(3, c);
      const std::string quote = text.compare(i, 3, triple) == 0 ? triple : std::string(1, c);
      for (i += quote.size(); i < text.size() && text.compare(i, quote.size(), quote) != 0; ++i) {
        if (quote.size() == 1 && text[i] == '\n') break;
        if (c == '"' && text[i] == '\\') ++i;
      }
      i += quote.size() - 1;
    } else if (c == '.') {
      ++dots;
    } else if (c == '\n' || c == '=' || c == ',') {
      dots = 0;
    } else if (c == '[' || c == '{') {
      ++brackets;
    } else if (c == ']' || c == '}') {
      --brackets;
    }
    MT_CHECK_ARG(brackets <= kMostLevels && dots <= kMostLevels, where, ": nested deeper than ",
                 kMostLevels, " levels");
  }
}

std::string show(const toml::node& node) {
  std::ostringstream text;
  node.visit([&](const auto& value) { text << value; });
  std::string shown = text.str();
  std::replace(shown.begin(), shown.end(), '\n', ' ');
  return shorten(shown);
}

bool finite_number(const toml::node& node, double& value) {
  if (!node.is_number()) return false;
  value = *node.value<double>();
  return std::isfinite(value);
}

/// The fewest digits that read back as the same number, always with a point or an exponent.
std::string number_text(double value) {
  char digits[64];
  const auto end = std::to_chars(digits, digits + sizeof(digits), value).ptr;
  std::string text(digits, end);
  return text.find_first_of(".en") == std::string::npos ? concat(text, ".0") : text;
}

class KeyNames {
 public:
  template <typename T>
  void key(const std::string& name, T&) {
    names.emplace_back(name);
  }
  template <typename T, size_t kCount>
  void choice(const std::string& name, T&, const Word<T> (&)[kCount]) {
    names.emplace_back(name);
  }
  void pair(const std::string& name, double&, double&) { names.emplace_back(name); }
  void layers(const std::string& name, train::AttentionSection&) { names.emplace_back(name); }
  std::vector<std::string> names;
};

class Reader {
 public:
  explicit Reader(const Entries& entries) : entries_(entries) {}

  void key(const std::string& name, std::string& field) {
    with(name, "a string",
         [&](const toml::node& node) { return assign(field, node.value_exact<std::string>()); });
  }
  void key(const std::string& name, bool& field) {
    with(name, "true or false",
         [&](const toml::node& node) { return assign(field, node.value_exact<bool>()); });
  }
  void key(const std::string& name, double& field) {
    with(name, "a finite number",
         [&](const toml::node& node) { return finite_number(node, field); });
  }
  void key(const std::string& name, int64_t& field) { whole(name, field); }
  void key(const std::string& name, uint64_t& field) {
    int64_t value = 0;
    if (whole(name, value)) {
      MT_CHECK_ARG(value >= 0, entries_.at(name).where, ": ", name, ": expected at least 0, got ",
                   value);
      field = static_cast<uint64_t>(value);
    }
  }
  void key(const std::string& name, int& field) {
    int64_t value = 0;
    if (whole(name, value)) {
      MT_CHECK_ARG(
          value >= std::numeric_limits<int>::min() && value <= std::numeric_limits<int>::max(),
          entries_.at(name).where, ": ", name, ": ", value, " does not fit 32 bits");
      field = static_cast<int>(value);
    }
  }
  template <typename T>
  void key(const std::string& name, std::optional<T>& field) {
    if (!entries_.contains(name)) return;
    T value{};
    key(name, value);
    field = value;
  }
  void key(const std::string& name, std::vector<double>& field) {
    with(name, "an array of finite numbers", [&](const toml::node& node) {
      const toml::array* array = node.as_array();
      if (array == nullptr) return false;
      field.clear();
      for (const toml::node& item : *array) {
        field.push_back(0);
        if (!finite_number(item, field.back())) return false;
      }
      return true;
    });
  }
  void key(const std::string& name, std::vector<data::Source>& field) {
    with(name, "a path, or an array of {path = \"..\", weight = 1.0}", [&](const toml::node& node) {
      field.clear();
      if (const auto path = node.value_exact<std::string>()) {
        field.push_back({*path, 1.0});
        return true;
      }
      const toml::array* array = node.as_array();
      if (array == nullptr) return false;
      for (const toml::node& item : *array) {
        if (const auto path = item.value_exact<std::string>()) {
          field.push_back({*path, 1.0});
          continue;
        }
        const toml::table* table = item.as_table();
        if (table == nullptr || !(*table)["path"].is_string()) return false;
        for (const auto& [k, v] : *table) {
          if (k.str() != "path" && k.str() != "weight") return false;
        }
        data::Source source{*(*table)["path"].value<std::string>(), 1.0};
        if (table->contains("weight")) {
          if (!finite_number(*table->get("weight"), source.weight)) return false;
        }
        field.push_back(source);
      }
      return true;
    });
  }
  template <typename T, size_t kCount>
  void choice(const std::string& name, T& field, const Word<T> (&words)[kCount]) {
    with(name, listed(words, ", ", " or ", "\""), [&](const toml::node& node) {
      const auto text = node.value_exact<std::string>();
      const auto value = text ? value_of(words, *text) : std::nullopt;
      if (value) field = *value;
      return value.has_value();
    });
  }
  void pair(const std::string& name, double& first, double& second) {
    with(name, "an array of two finite numbers", [&](const toml::node& node) {
      const toml::array* array = node.as_array();
      if (array == nullptr || array->size() != 2) return false;
      return finite_number(*array->get(0), first) && finite_number(*array->get(1), second);
    });
  }
  /// After the section's own keys: a range begins as a copy of them.
  void layers(const std::string& name, train::AttentionSection& attention) {
    const auto found = entries_.find(name);
    if (found == entries_.end()) return;
    const toml::array* array = found->second.node->as_array();
    const auto is_table = [](const toml::node& item) { return item.is_table(); };
    MT_CHECK_ARG(array != nullptr && std::all_of(array->begin(), array->end(), is_table),
                 found->second.where, ": ", name,
                 ": expected tables [[attention.layers]] with a range, got ",
                 show(*found->second.node));
    KeyNames known;
    train::PatternSection section;
    visit_pattern_keys("", section, known);
    known.names.emplace_back("range");
    attention.layers.clear();
    for (size_t i = 0; i < array->size(); ++i) {
      const std::string prefix = concat(name, "[", i, "].");
      Entries entries;
      for (const auto& [key, node] : *(*array)[i].as_table()) {
        // A command line's value has no line of its own.
        const std::string& all = found->second.where;
        const std::string where = all.starts_with("--") ? all
                                                        : concat(all.substr(0, all.rfind(':')), ":",
                                                                 key.source().begin.line);
        const std::string text(key.str());
        MT_CHECK_ARG(std::find(known.names.begin(), known.names.end(), text) != known.names.end(),
                     where, ": unknown key ", prefix, shorten(text),
                     "; nearest known key: ", prefix, nearest(text, known.names));
        Entry& entry = entries[prefix + text];
        entry.node = &node;
        entry.where = where;
      }
      train::LayerRange range;
      static_cast<train::PatternSection&>(range) = attention;
      Reader reader(entries);
      MT_CHECK_ARG(entries.contains(prefix + "range"), found->second.where, ": ", prefix,
                   "range: not given");
      reader.with(prefix + "range", "layers as \"0-3\" or 5",
                  [&](const toml::node& node) { return layer_range(node, range); });
      visit_pattern_keys(prefix, range, reader);
      attention.layers.push_back(std::move(range));
    }
  }

 private:
  static bool layer_range(const toml::node& node, train::LayerRange& range) {
    if (const auto layer = node.value_exact<int64_t>()) {
      range.first = range.last = *layer;
      return true;
    }
    const std::string text = node.value_exact<std::string>().value_or("");
    const char* const end = text.data() + text.size();
    const auto first = std::from_chars(text.data(), end, range.first);
    range.last = range.first;
    if (first.ec != std::errc() || text[0] == '-') return false;
    if (first.ptr == end) return true;
    const auto last = std::from_chars(first.ptr + 1, end, range.last);
    return *first.ptr == '-' && last.ec == std::errc() && last.ptr == end;
  }
  template <typename T>
  static bool assign(T& field, const std::optional<T>& value) {
    if (value) field = *value;
    return value.has_value();
  }
  bool whole(const std::string& name, int64_t& field) {
    return with(name, "a whole number",
                [&](const toml::node& node) { return assign(field, node.value_exact<int64_t>()); });
  }
  template <typename Read>
  bool with(const std::string& name, const std::string& expected, Read&& read) {
    const auto found = entries_.find(name);
    if (found == entries_.end()) return false;
    MT_CHECK_ARG(read(*found->second.node), found->second.where, ": ", name, ": expected ",
                 expected, ", got ", show(*found->second.node));
    return true;
  }

  const Entries& entries_;
};

class Writer {
 public:
  void key(const std::string& name, const std::string& field) {
    line(name, toml::value<std::string>(field));
  }
  void key(const std::string& name, bool field) { line(name, toml::value<bool>(field)); }
  void key(const std::string& name, double field) { line(name, number_text(field)); }
  void key(const std::string& name, int64_t field) { line(name, toml::value<int64_t>(field)); }
  void key(const std::string& name, uint64_t field) { key(name, static_cast<int64_t>(field)); }
  void key(const std::string& name, int field) { key(name, static_cast<int64_t>(field)); }
  template <typename T>
  void key(const std::string& name, const std::optional<T>& field) {
    if (field) key(name, *field);
  }
  void key(const std::string& name, const std::vector<double>& field) {
    std::string text;
    for (const double value : field) text += concat(text.empty() ? " " : ", ", number_text(value));
    line(name, text.empty() ? "[]" : concat('[', text, " ]"));
  }
  void key(const std::string& name, const std::vector<data::Source>& field) {
    std::string text;
    for (const auto& source : field) {
      text += concat(text.empty() ? " " : ", ", "{ path = ", toml::value<std::string>(source.path),
                     ", weight = ", number_text(source.weight), " }");
    }
    line(name, text.empty() ? "[]" : concat('[', text, " ]"));
  }
  template <typename T, size_t kCount>
  void choice(const std::string& name, const T& field, const Word<T> (&words)[kCount]) {
    key(name, std::string(word_of(words, field)));
  }
  void pair(const std::string& name, double first, double second) {
    line(name, concat("[ ", number_text(first), ", ", number_text(second), " ]"));
  }

  void layers(const std::string& name, train::AttentionSection& attention) {
    std::string text;
    for (train::LayerRange& range : attention.layers) {
      Writer inner;
      inner.key("x.range", concat(range.first, "-", range.last));
      visit_pattern_keys("x.", range, inner);
      std::string keys = inner.text().substr(std::string_view("[x]\n").size());
      keys.pop_back();
      for (size_t at = 0; (at = keys.find('\n', at)) != std::string::npos; at += 2)
        keys.replace(at, 1, ", ");
      text += concat(text.empty() ? " { " : ", { ", keys, " }");
    }
    if (!text.empty()) line(name, concat('[', text, " ]"));
  }

  std::string text() const { return out_.str(); }

 private:
  template <typename Value>
  void line(const std::string& name, const Value& value) {
    const size_t dot = name.find('.');
    if (name.substr(0, dot) != section_) {
      section_ = name.substr(0, dot);
      out_ << (out_.tellp() > 0 ? "\n" : "") << '[' << section_ << "]\n";
    }
    out_ << name.substr(dot + 1) << " = " << value << '\n';
  }
  std::ostringstream out_;
  std::string section_;
};

void flatten(const toml::table& table, const std::string& prefix, const std::string& path,
             Entries& entries) {
  for (const auto& [key, node] : table) {
    const std::string name =
        prefix.empty() ? std::string(key.str()) : concat(prefix, ".", key.str());
    // A section may be written as an inline table; config.json's spelling of a rope is an object, here one too.
    const toml::table* inner = node.as_table();
    if (inner != nullptr &&
        (!inner->is_inline() || prefix.empty() || name == "model.rope_scaling")) {
      flatten(*inner, name, path, entries);
      continue;
    }
    Entry entry;
    entry.node = &node;
    entry.where = concat(path, ":", key.source().begin.line);
    // "a.b" in quotes is another key than a.b for TOML, and the same one here.
    const bool again = !path.empty() && entries.contains(name);
    MT_CHECK_ARG(!again, entry.where, ": ", shorten(name), ": given twice, also at ",
                 entries[name].where);
    entries[name] = std::move(entry);
  }
}

toml::table parse_file(const std::string& path) {
  std::error_code error;
  MT_CHECK_ARG(std::filesystem::is_regular_file(path, error), path,
               ": the configuration cannot be opened: ",
               error ? error.message() : std::string("not a regular file"));
  const uintmax_t bytes = std::filesystem::file_size(path, error);
  MT_CHECK_ARG(error || bytes <= kMostBytes, path, ": expected a configuration of at most ",
               kMostBytes, " bytes, got ", bytes);
  std::ifstream in(path);
  MT_CHECK_ARG(in.good(), path, ": the configuration cannot be opened");
  std::ostringstream text;
  text << in.rdbuf();
  check_depth(text.str(), path);
  try {
    return toml::parse(text.str(), path);
  } catch (const toml::parse_error& error) {
    throw InvalidArgument(concat(path, ":", error.source().begin.line, ": ",
                                 std::string(error.description()).substr(0, 4 * kMostShown)));
  }
}

Entry parse_override(const Override& given) {
  Entry entry;
  entry.where = shorten(concat("--set ", given.key, "=", given.value));
  check_depth(given.value, entry.where);
  try {
    entry.holder = std::make_unique<toml::table>(toml::parse(concat("value = ", given.value)));
  } catch (const toml::parse_error&) {
  }
  // A bare word is a string, so that no shell quoting is needed for --attention.pattern dense. So is what would be more keys.
  if (entry.holder == nullptr || entry.holder->size() != 1) {
    entry.holder = std::make_unique<toml::table>(toml::table{{"value", given.value}});
  }
  entry.node = entry.holder->get("value");
  return entry;
}

void refuse_unknown(const Entries& entries) {
  const std::vector<std::string> known = known_keys();
  for (const auto& [name, entry] : entries) {
    if (std::find(known.begin(), known.end(), name) != known.end()) continue;
    const bool later = std::find(kNotBuilt.begin(), kNotBuilt.end(), name) != kNotBuilt.end();
    const std::string near = nearest(name, known);
    MT_CHECK_SUPPORTED(!later, entry.where, ": ", shorten(name),
                       ": belongs to a part that is not built; nearest known key: ", near);
    throw InvalidArgument(
        concat(entry.where, ": unknown key ", shorten(name), "; nearest known key: ", near));
  }
}

}  // namespace

std::vector<std::string> known_keys() {
  train::RunConfig config;
  KeyNames names;
  visit_keys(config, names);
  return names.names;
}

namespace {

LoadedConfig load(const toml::table& table, const std::string& path,
                  const std::vector<Override>& overrides) {
  Entries entries;
  std::vector<std::unique_ptr<toml::table>> holders;
  flatten(table, "", path, entries);
  for (const Override& given : overrides) {
    Entry entry = parse_override(given);
    if (const toml::table* table = entry.node->as_table();
        given.key == "model.rope_scaling" && table) {
      flatten(*table, given.key, "", entries);
      for (const auto& [key, node] : *table)
        entries[concat(given.key, ".", key.str())].where = entry.where;
      holders.push_back(std::move(entry.holder));
      continue;
    }
    entries[given.key] = std::move(entry);
  }
  refuse_unknown(entries);
  LoadedConfig loaded;
  for (const auto& [name, entry] : entries) loaded.where[name] = entry.where;
  visit_keys(loaded.config, Reader(entries));
  const bool from_files = loaded.config.init_from.has_value();
  for (const std::string& name : kRequired) {
    const bool in_config_json = from_files && name.starts_with("model.");
    MT_CHECK_ARG(in_config_json || entries.contains(name), path, ": ", name, ": not given");
  }
  model::RopeParameters& rope = loaded.config.model.rope;
  const int64_t length = from_files ? take_model_from(loaded.config, loaded.where) : 0;
  try {
    rope = merged_rope(loaded.config.rope_scaling, rope, length);
  } catch (const InvalidArgument& error) {
    throw InvalidArgument(with_place(loaded, error.what()));
  }
  return loaded;
}

}  // namespace

LoadedConfig load_config(const std::string& path, const std::vector<Override>& overrides) {
  return load(parse_file(path), path, overrides);
}

LoadedConfig configure(const std::vector<Override>& overrides) {
  return load({}, "the command line", overrides);
}

std::string with_place(const LoadedConfig& loaded, const std::string& message) {
  // "attention.layers[1].range: .." stands where attention.layers does.
  const auto found = loaded.where.find(message.substr(0, message.find_first_of(": [")));
  return found == loaded.where.end() ? message : concat(found->second, ": ", message);
}

std::string to_toml(const train::RunConfig& config) {
  train::RunConfig copy = config;
  copy.rope_scaling = rope_keys(config.model.rope);
  Writer writer;
  visit_keys(copy, writer);
  return writer.text();
}

std::map<std::string, std::string> keys_of(const std::string& toml) {
  std::map<std::string, std::string> keys;
  std::istringstream lines(toml);
  std::string section;
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with('[')) section = line.substr(1, line.find(']') - 1);
    const size_t equals = line.find(" = ");
    if (line.starts_with('[') || equals == std::string::npos) continue;
    keys[concat(section, '.', line.substr(0, equals))] = line.substr(equals + 3);
  }
  return keys;
}

}  // namespace mtraining::cli
