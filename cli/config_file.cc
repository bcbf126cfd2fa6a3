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

#include "cli/nearest.h"
#include "mtraining/base/check.h"

namespace mtraining::cli {
namespace {

template <typename T>
using Names = std::vector<std::pair<const char*, T>>;

const Names<pattern::PatternKind> kPatterns = {
    {"dense", pattern::PatternKind::kDense},
    {"vertical_slash", pattern::PatternKind::kVerticalSlash}};
const Names<pattern::Window> kWindows = {{"last", pattern::Window::kLast},
                                         {"strided", pattern::Window::kStrided}};
const Names<pattern::SlashPooling> kPoolings = {{"block", pattern::SlashPooling::kBlock},
                                                {"paper", pattern::SlashPooling::kPaper},
                                                {"token", pattern::SlashPooling::kToken}};
const Names<pattern::Selection> kSelections = {{"head", pattern::Selection::kHead},
                                               {"kv_group", pattern::Selection::kKvGroup}};
const Names<layout::LayoutKind> kLayouts = {{"contiguous", layout::LayoutKind::kContiguous},
                                            {"zigzag", layout::LayoutKind::kZigzag},
                                            {"striped", layout::LayoutKind::kStriped},
                                            {"block_striped", layout::LayoutKind::kBlockStriped}};
const Names<ring::RingKind> kRings = {{"flat", ring::RingKind::kFlat},
                                      {"hierarchical", ring::RingKind::kHierarchical}};
const Names<ring::InnerKind> kInners = {{"gather", ring::InnerKind::kGather},
                                        {"ring", ring::InnerKind::kRing}};
const Names<attention::ColumnMode> kColumns = {{"once", attention::ColumnMode::kOnce},
                                               {"per_step", attention::ColumnMode::kPerStep}};
const Names<attention::GradientTransport> kTransports = {
    {"fp32", attention::GradientTransport::kFloat32},
    {"bf16", attention::GradientTransport::kBFloat16}};
const Names<optim::ScheduleKind> kSchedules = {{"constant", optim::ScheduleKind::kConstant},
                                               {"cosine", optim::ScheduleKind::kCosine}};
const Names<at::ScalarType> kDtypes = {{"float32", at::kFloat}, {"bf16", at::kBFloat16}};

/// Keys of interfaces that belong to parts which this version does not have.
const std::vector<std::string> kNotBuilt = {
    "model.init_from",
    "data.document_mask",
    "parallel.zero",
    "parallel.offload_optimizer",
    "attention.layers",
    "checkpoint.every",
    "checkpoint.keep",
    "checkpoint.save_every_minutes",
    "checkpoint.save_accumulation",
};

/// Keys without a default.
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

/// The one list of keys. A visitor has key(name, field), choice(name, field, names) and only(name, value).
template <typename Visitor>
void visit_keys(train::RunConfig& c, Visitor&& v) {
  v.key("model.architecture", c.model.architecture);
  v.key("model.vocab_size", c.model.vocab_size);
  v.key("model.hidden_size", c.model.hidden_size);
  v.key("model.intermediate_size", c.model.intermediate_size);
  v.key("model.num_hidden_layers", c.model.num_hidden_layers);
  v.key("model.num_attention_heads", c.model.num_attention_heads);
  v.key("model.num_key_value_heads", c.model.num_key_value_heads);
  v.key("model.head_dim", c.model.head_dim);
  v.key("model.rope_theta", c.model.rope.rope_theta);
  v.key("model.rms_norm_eps", c.model.rms_norm_eps);
  v.key("model.tie_word_embeddings", c.model.tie_word_embeddings);
  v.key("model.initializer_range", c.model.initializer_range);
  v.key("model.embedding_initializer_range", c.model.embedding_initializer_range);
  v.choice("model.dtype", c.model.dtype, kDtypes);
  v.key("data.train", c.data.train);
  v.key("data.valid", c.data.valid);
  v.key("data.shuffle_seed", c.data.shuffle_seed);
  v.key("parallel.cp_size", c.parallel.cp_size);
  v.key("parallel.cp_inner_size", c.parallel.cp_inner_size);
  v.key("parallel.dp_size", c.parallel.dp_size);
  v.choice("attention.pattern", c.attention.pattern, kPatterns);
  v.key("attention.p_vertical", c.attention.options.p_vertical);
  v.key("attention.p_slash", c.attention.options.p_slash);
  v.key("attention.last_q", c.attention.options.last_q);
  v.choice("attention.window", c.attention.options.window, kWindows);
  v.choice("attention.slash_pooling", c.attention.options.slash_pooling, kPoolings);
  v.choice("attention.selection", c.attention.options.selection, kSelections);
  v.key("attention.sink_tokens", c.attention.options.sink_tokens);
  v.key("attention.local_blocks", c.attention.options.local_blocks);
  v.key("attention.max_columns", c.attention.options.max_columns);
  v.key("attention.max_diagonals", c.attention.options.max_diagonals);
  v.key("attention.dense_threshold", c.attention.options.dense_threshold);
  v.key("attention.recall_floor", c.attention.options.recall_floor);
  v.key("attention.recall_rows", c.attention.options.recall_rows);
  v.key("attention.dense_steps", c.attention.dense_steps);
  v.choice("attention.layout", c.attention.layout, kLayouts);
  v.key("attention.stripe", c.attention.stripe);
  v.choice("attention.ring", c.attention.ring, kRings);
  v.choice("attention.inner", c.attention.inner, kInners);
  v.key("attention.ring_stride", c.attention.ring_stride);
  v.key("attention.prefetch_steps", c.attention.prefetch_steps);
  v.choice("attention.columns", c.attention.columns, kColumns);
  v.choice("attention.gradient_transport", c.attention.gradient_transport, kTransports);
  v.key("attention.deterministic", c.attention.deterministic);
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
  v.only("train.recompute", "none");
  v.key("optim.lr", c.optim.schedule.lr);
  v.pair("optim.betas", c.optim.adamw.beta1, c.optim.adamw.beta2);
  v.key("optim.eps", c.optim.adamw.eps);
  v.key("optim.weight_decay", c.optim.adamw.weight_decay);
  v.key("optim.clip_norm", c.optim.clip_norm);
  v.choice("optim.schedule", c.optim.schedule.kind, kSchedules);
  v.key("optim.warmup_steps", c.optim.schedule.warmup_steps);
  v.key("optim.min_lr_ratio", c.optim.schedule.min_lr_ratio);
  v.only("optim.grad_dtype", "float32");
  v.key("eval.every", c.eval.every);
  v.key("eval.batches", c.eval.batches);
  v.key("eval.also_p", c.eval.also_p);
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
  void key(const char* name, T&) {
    names.emplace_back(name);
  }
  template <typename T>
  void choice(const char* name, T&, const Names<T>&) {
    names.emplace_back(name);
  }
  void pair(const char* name, double&, double&) { names.emplace_back(name); }
  void only(const char* name, const char*) { names.emplace_back(name); }
  std::vector<std::string> names;
};

class Reader {
 public:
  explicit Reader(const Entries& entries) : entries_(entries) {}

  void key(const char* name, std::string& field) {
    with(name, "a string",
         [&](const toml::node& node) { return assign(field, node.value_exact<std::string>()); });
  }
  void key(const char* name, bool& field) {
    with(name, "true or false",
         [&](const toml::node& node) { return assign(field, node.value_exact<bool>()); });
  }
  void key(const char* name, double& field) {
    with(name, "a finite number",
         [&](const toml::node& node) { return finite_number(node, field); });
  }
  void key(const char* name, int64_t& field) { whole(name, field); }
  void key(const char* name, uint64_t& field) {
    int64_t value = 0;
    if (whole(name, value)) {
      MT_CHECK_ARG(value >= 0, entries_.at(name).where, ": ", name, ": expected at least 0, got ",
                   value);
      field = static_cast<uint64_t>(value);
    }
  }
  void key(const char* name, int& field) {
    int64_t value = 0;
    if (whole(name, value)) {
      MT_CHECK_ARG(
          value >= std::numeric_limits<int>::min() && value <= std::numeric_limits<int>::max(),
          entries_.at(name).where, ": ", name, ": ", value, " does not fit 32 bits");
      field = static_cast<int>(value);
    }
  }
  template <typename T>
  void key(const char* name, std::optional<T>& field) {
    if (!entries_.contains(name)) return;
    T value{};
    key(name, value);
    field = value;
  }
  void key(const char* name, std::vector<double>& field) {
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
  void key(const char* name, std::vector<data::Source>& field) {
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
  template <typename T>
  void choice(const char* name, T& field, const Names<T>& names) {
    std::string expected;
    for (size_t i = 0; i < names.size(); ++i) {
      expected += concat(i == 0                  ? ""
                         : i + 1 == names.size() ? " or "
                                                 : ", ",
                         '"', names[i].first, '"');
    }
    with(name, expected, [&](const toml::node& node) {
      const auto text = node.value_exact<std::string>();
      for (const auto& [known, value] : names) {
        if (text && *text == known) {
          field = value;
          return true;
        }
      }
      return false;
    });
  }
  void pair(const char* name, double& first, double& second) {
    with(name, "an array of two finite numbers", [&](const toml::node& node) {
      const toml::array* array = node.as_array();
      if (array == nullptr || array->size() != 2) return false;
      return finite_number(*array->get(0), first) && finite_number(*array->get(1), second);
    });
  }
  void only(const char* name, const char* value) {
    const auto found = entries_.find(name);
    if (found == entries_.end()) return;
    const auto text = found->second.node->value_exact<std::string>();
    MT_CHECK_SUPPORTED(text && *text == value, found->second.where, ": ", name, ": only \"", value,
                       "\" is built, got ", show(*found->second.node));
  }

 private:
  template <typename T>
  static bool assign(T& field, const std::optional<T>& value) {
    if (value) field = *value;
    return value.has_value();
  }
  bool whole(const char* name, int64_t& field) {
    return with(name, "a whole number",
                [&](const toml::node& node) { return assign(field, node.value_exact<int64_t>()); });
  }
  template <typename Read>
  bool with(const char* name, const std::string& expected, Read&& read) {
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
  void key(const char* name, const std::string& field) {
    line(name, toml::value<std::string>(field));
  }
  void key(const char* name, bool field) { line(name, toml::value<bool>(field)); }
  void key(const char* name, double field) { line(name, number_text(field)); }
  void key(const char* name, int64_t field) { line(name, toml::value<int64_t>(field)); }
  void key(const char* name, uint64_t field) { key(name, static_cast<int64_t>(field)); }
  void key(const char* name, int field) { key(name, static_cast<int64_t>(field)); }
  template <typename T>
  void key(const char* name, const std::optional<T>& field) {
    if (field) key(name, *field);
  }
  void key(const char* name, const std::vector<double>& field) {
    std::string text;
    for (const double value : field) text += concat(text.empty() ? " " : ", ", number_text(value));
    line(name, text.empty() ? "[]" : concat('[', text, " ]"));
  }
  void key(const char* name, const std::vector<data::Source>& field) {
    std::string text;
    for (const auto& source : field) {
      text += concat(text.empty() ? " " : ", ", "{ path = ", toml::value<std::string>(source.path),
                     ", weight = ", number_text(source.weight), " }");
    }
    line(name, text.empty() ? "[]" : concat('[', text, " ]"));
  }
  template <typename T>
  void choice(const char* name, const T& field, const Names<T>& names) {
    for (const auto& [known, value] : names) {
      if (value == field) key(name, std::string(known));
    }
  }
  void pair(const char* name, double first, double second) {
    line(name, concat("[ ", number_text(first), ", ", number_text(second), " ]"));
  }
  void only(const char* name, const char* value) { key(name, std::string(value)); }

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
    if (const toml::table* inner = node.as_table(); inner != nullptr && !inner->is_inline()) {
      flatten(*inner, name, path, entries);
      continue;
    }
    Entry entry;
    entry.node = &node;
    entry.where = concat(path, ":", key.source().begin.line);
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
    // A bare word is a string, so that no shell quoting is needed for --attention.pattern dense.
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

LoadedConfig load_config(const std::string& path, const std::vector<Override>& overrides) {
  const toml::table table = parse_file(path);
  Entries entries;
  flatten(table, "", path, entries);
  for (const Override& given : overrides) entries[given.key] = parse_override(given);
  refuse_unknown(entries);
  LoadedConfig loaded;
  for (const auto& [name, entry] : entries) loaded.where[name] = entry.where;
  visit_keys(loaded.config, Reader(entries));
  for (const std::string& name : kRequired) {
    MT_CHECK_ARG(entries.contains(name), path, ": ", name, ": not given");
  }
  return loaded;
}

std::string with_place(const LoadedConfig& loaded, const std::string& message) {
  const auto found = loaded.where.find(message.substr(0, message.find_first_of(": ")));
  return found == loaded.where.end() ? message : concat(found->second, ": ", message);
}

std::string to_toml(const train::RunConfig& config) {
  train::RunConfig copy = config;
  Writer writer;
  visit_keys(copy, writer);
  return writer.text();
}

}  // namespace mtraining::cli
