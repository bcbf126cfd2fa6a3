#include "mtraining/eval/samples.h"

#include <algorithm>
#include <array>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "mtraining/base/check.h"
#include "mtraining/base/json.h"
#include "mtraining/eval/digest.h"

namespace mtraining::eval {
namespace {

using nlohmann::json;

constexpr std::array<std::string_view, 3> kKinds = {"needle", "ruler", "infinitebench"};

const std::vector<std::string_view>& task_names(Kind kind) {
  static const std::vector<std::string_view> kNames[] = {
      {"needle"},
      {"niah_single", "niah_multikey", "niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe",
       "qa"},
      {"passkey", "number_string", "kv_retrieval", "longbook_choice_eng", "longbook_qa_eng",
       "longbook_sum_eng", "longbook_qa_chn", "longdialogue_qa_eng", "code_debug", "code_run",
       "math_find", "math_calc"}};
  return kNames[static_cast<int>(kind)];
}

/// A line as an object whose keys are taken one by one.
class Reader {
 public:
  Reader(const json& object, std::string where, int64_t vocab_size)
      : object_(object), where_(std::move(where)), vocab_size_(vocab_size) {}

  const json* find(const char* key) {
    known_.insert(key);
    const auto at = object_.find(key);
    return at == object_.end() ? nullptr : &*at;
  }
  const json& need(const char* key) {
    const json* value = find(key);
    MT_CHECK_ARG(value != nullptr, where_, ": expected the key \"", key, "\", got none");
    return *value;
  }
  std::string text(const char* key) {
    const json& value = need(key);
    MT_CHECK_ARG(value.is_string() && !value.get_ref<const std::string&>().empty(), where_, ": \"",
                 key, "\": expected a text, got ", short_text(value));
    return value.get<std::string>();
  }
  int64_t whole(const char* key, const json& value, int64_t least, int64_t most) {
    const bool fits =
        value.is_number_integer() && value.get<int64_t>() >= least && value.get<int64_t>() <= most;
    MT_CHECK_ARG(fits, where_, ": \"", key, "\": expected a whole number from ", least, " to ",
                 most, ", got ", short_text(value));
    return value.get<int64_t>();
  }
  std::vector<int64_t> ids(const std::string& name, const json& value) {
    MT_CHECK_ARG(value.is_array() && !value.empty(), where_, ": \"", name,
                 "\": expected an array of token ids, got ", short_text(value));
    std::vector<int64_t> made;
    made.reserve(value.size());
    for (const json& id : value) {
      const bool fits =
          id.is_number_integer() && id.get<int64_t>() >= 0 && id.get<int64_t>() < vocab_size_;
      MT_CHECK_ARG(fits, where_, ": \"", name, "\"[", made.size(), "]: expected an id from 0 to ",
                   vocab_size_ - 1, ", got ", short_text(id));
      made.push_back(id.get<int64_t>());
    }
    return made;
  }
  const json& array(const char* key, const json& value) {
    MT_CHECK_ARG(value.is_array(), where_, ": \"", key, "\": expected an array, got ",
                 short_text(value));
    return value;
  }
  void refuse_beside_options(const char* key) {
    MT_CHECK_ARG(find(key) == nullptr, where_, ": \"", key,
                 "\": has no meaning beside \"options\"");
  }
  void refuse_the_rest() const {
    for (const auto& [key, value] : object_.items())
      MT_CHECK_ARG(known_.contains(key), where_, ": unknown key ", in_quotes(key));
  }
  const std::string& where() const { return where_; }
  static std::string short_text(const json& value) {
    return value.is_string() ? in_quotes(value.get_ref<const std::string&>())
           : value.is_structured() && value.size() > 8
               ? concat("one of ", value.size(), " elements")
               : value.dump(-1, ' ', true, json::error_handler_t::replace);
  }

 private:
  const json& object_;
  std::string where_;
  int64_t vocab_size_;
  std::set<std::string, std::less<>> known_;
};

void read_choice(Reader& r, const json& options, Sample& sample) {
  for (const char* key : {"answers", "match", "max_new_tokens", "stops"})
    r.refuse_beside_options(key);
  for (const json& option : r.array("options", options))
    sample.options.push_back(r.ids(concat("options\"[", sample.options.size(), "]"), option));
  MT_CHECK_ARG(!sample.options.empty(), r.where(), ": \"options\": expected at least one");
  const auto last = static_cast<int64_t>(sample.options.size()) - 1;
  for (const json& index : r.array("correct", r.need("correct")))
    sample.correct.push_back(r.whole("correct", index, 0, last));
  MT_CHECK_ARG(!sample.correct.empty(), r.where(), ": \"correct\": expected at least one index");
}

void read_generation(Reader& r, const SampleLimits& limits, Sample& sample) {
  sample.max_new_tokens = r.whole("max_new_tokens", r.need("max_new_tokens"), 1, limits.max_tokens);
  for (const json& answer : r.array("answers", r.need("answers"))) {
    const std::string name = concat("answers\"[", sample.answers.size(), "]");
    auto& spellings = sample.answers.emplace_back();
    if (answer.is_array() && !answer.empty() && answer[0].is_array()) {
      for (const json& spelling : answer) spellings.push_back(r.ids(name, spelling));
    } else {
      spellings.push_back(r.ids(name, answer));
    }
  }
  if (const json* match = r.find("match")) {
    MT_CHECK_ARG(*match == "all" || *match == "any", r.where(),
                 ": \"match\": expected \"all\" or \"any\", got ", Reader::short_text(*match));
    sample.any = *match == "any";
  }
  if (const json* stops = r.find("stops"))
    if (!r.array("stops", *stops).empty()) sample.stops = r.ids("stops", *stops);
}

Sample parse_sample(const std::string& line, const std::string& where, int64_t offset, Kind kind,
                    const SampleLimits& limits) {
  const json root = parse_json(line, where, offset);
  MT_CHECK_ARG(root.is_object(), where, ": expected a JSON object, got ", Reader::short_text(root));
  Reader r(root, where, limits.vocab_size);
  Sample sample;
  SampleFacts& facts = sample.facts;
  facts.digest = digest_of(line);
  facts.id = r.text("id");
  facts.task = r.text("task");
  MT_CHECK_ARG(is_task_of(kind, facts.task), where, ": \"task\": expected ", tasks_of(kind),
               " for ", to_string(kind), ", got ", in_quotes(facts.task));
  sample.ids = r.ids("ids", r.need("ids"));
  facts.prompt_tokens = static_cast<int64_t>(sample.ids.size());
  constexpr int64_t kMost = int64_t{1} << 40;
  if (const json* length = r.find("length")) facts.length = r.whole("length", *length, 1, kMost);
  if (const json* cut = r.find("truncated_tokens"))
    facts.truncated_tokens = r.whole("truncated_tokens", *cut, 0, kMost);
  if (const json* depth = r.find("depth")) {
    MT_CHECK_ARG(depth->is_number() && depth->get<double>() >= 0 && depth->get<double>() <= 1,
                 where, ": \"depth\": expected a number from 0 to 1, got ",
                 Reader::short_text(*depth));
    facts.depth = depth->get<double>();
  }
  if (const json* text = r.find("text"))
    MT_CHECK_ARG(text->is_object(), where, ": \"text\": expected an object, got ",
                 Reader::short_text(*text));
  int64_t more = 0;
  if (const json* options = r.find("options")) {
    read_choice(r, *options, sample);
    for (const auto& option : sample.options) more = std::max<int64_t>(more, std::ssize(option));
  } else {
    read_generation(r, limits, sample);
    more = sample.max_new_tokens;
  }
  r.refuse_the_rest();
  MT_CHECK_ARG(facts.prompt_tokens + more <= limits.max_tokens, where, ": ", facts.prompt_tokens,
               " ids and ", more, sample.is_choice() ? " of an option" : " new ones",
               ": expected at most ", limits.max_tokens,
               " together, the model's max_position_embeddings unless --max-tokens says more");
  return sample;
}

}  // namespace

std::string_view to_string(Kind kind) { return kKinds[static_cast<int>(kind)]; }

std::optional<Kind> kind_of(std::string_view name) {
  for (size_t i = 0; i < kKinds.size(); ++i)
    if (kKinds[i] == name) return static_cast<Kind>(i);
  return std::nullopt;
}

bool is_task_of(Kind kind, std::string_view task) {
  for (const std::string_view name : task_names(kind))
    if (task == name ||
        (task.starts_with(name) && task.size() > name.size() + 1 && task[name.size()] == '_'))
      return true;
  return false;
}

std::string tasks_of(Kind kind) {
  std::string text;
  for (const std::string_view name : task_names(kind))
    text += concat(text.empty() ? "" : ", ", name);
  return text;
}

SampleFile::SampleFile(const std::string& path, Kind kind, const SampleLimits& limits)
    : path_(path), kind_(kind), limits_(limits) {
  std::ifstream in(path, std::ios::binary);
  MT_CHECK_ARG(in.is_open(), path, ": cannot be opened");
  std::map<std::string, int64_t> lines;  // of ids
  std::string line;
  Place place;
  for (place.line = 1; std::getline(in, line); ++place.line) {
    place.bytes = static_cast<int64_t>(line.size());
    if (line.find_first_not_of(" \t\r") != std::string::npos) {
      const std::string where = concat(path, ":", place.line);
      SampleFacts facts = parse_sample(line, where, place.offset, kind, limits).facts;
      const auto [at, is_new] = lines.emplace(facts.id, place.line);
      MT_CHECK_ARG(is_new, where, ": \"id\": ", in_quotes(facts.id), " is line ", at->second,
                   "'s already: expected each once");
      facts_.push_back(std::move(facts));
      places_.push_back(place);
    }
    place.offset += place.bytes + 1;
  }
  MT_CHECK_ARG(!in.bad() && in.eof(), path, ": cannot be read");
  MT_CHECK_ARG(!facts_.empty(), path, ": expected samples, got none");
}

Sample SampleFile::read(size_t index) const {
  const Place& place = places_.at(index);
  std::ifstream in(path_, std::ios::binary);
  std::string line(place.bytes, '\0');
  in.seekg(place.offset);
  in.read(line.data(), place.bytes);
  MT_CHECK_EXTERNAL(in.good() && digest_of(line) == facts_[index].digest, path_, ":", place.line,
                    ": is not what it was when the file was opened");
  return parse_sample(line, concat(path_, ":", place.line), place.offset, kind_, limits_);
}

}  // namespace mtraining::eval
