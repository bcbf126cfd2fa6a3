#include "mtraining/eval/results.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <vector>

#include "mtraining/base/check.h"
#include "mtraining/base/json.h"

namespace mtraining::eval {
namespace {

using Json = nlohmann::ordered_json;

std::string line_of(const Json& row) {
  return row.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
}

Result parse_result(const nlohmann::json& row, const std::string& where) {
  try {
    Result result;
    result.attention = row.at("attention").get<std::string>();
    result.run = row.at("run").get<std::string>();
    SampleFacts& facts = result.facts;
    facts.id = row.at("id").get<std::string>();
    facts.task = row.at("task").get<std::string>();
    facts.digest = row.at("sample").get<std::string>();
    facts.prompt_tokens = row.at("prompt_tokens").get<int64_t>();
    facts.truncated_tokens = row.at("truncated_tokens").get<int64_t>();
    if (!row.at("length").is_null()) facts.length = row["length"].get<int64_t>();
    if (!row.at("depth").is_null()) facts.depth = row["depth"].get<double>();
    if (!row.at("score").is_null()) result.score = row["score"].get<double>();
    return result;
  } catch (const nlohmann::json::exception&) {
    throw InvalidArgument(concat(where, ": expected a row of results of this verb, got another"));
  }
}

}  // namespace

Json to_json(const Row& row) {
  const SampleFacts& facts = row.result.facts;
  const auto or_null = [](const auto& value) { return value ? Json(*value) : Json(nullptr); };
  Json made = {{"id", facts.id},
               {"task", facts.task},
               {"attention", row.result.attention},
               {"length", or_null(facts.length)},
               {"depth", or_null(facts.depth)},
               {"prompt_tokens", facts.prompt_tokens},
               {"truncated_tokens", facts.truncated_tokens}};
  if (row.answer.choice) {
    made["choice"] = *row.answer.choice;
    made["log_likelihoods"] = row.answer.log_likelihoods;
  } else {
    made["output"] = row.answer.output;
  }
  made["score"] = or_null(row.result.score);
  made["density"] = row.density;
  made["seconds"] = row.seconds;
  made["sample"] = facts.digest;
  made["run"] = row.result.run;
  return made;
}

ResultFile::ResultFile(const std::string& path) : path_(path) {
  file_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  MT_CHECK_ARG(file_ >= 0, path, ": cannot be written: ", std::strerror(errno));
  try {
    MT_CHECK_ARG(::flock(file_, LOCK_EX | LOCK_NB) == 0, path,
                 ": another process writes it: name a file of its own for each");
    read();
  } catch (...) {
    ::close(file_);
    throw;
  }
}

ResultFile::~ResultFile() { ::close(file_); }

void ResultFile::read() {
  std::string text;
  std::vector<char> part(1 << 20);
  for (;;) {
    const ssize_t got = ::read(file_, part.data(), part.size());
    MT_CHECK_EXTERNAL(got >= 0, path_, ": cannot be read: ", std::strerror(errno));
    if (got == 0) break;
    text.append(part.data(), got);
  }
  int64_t number = 1;
  size_t begin = 0;
  for (size_t end; (end = text.find('\n', begin)) != std::string::npos; begin = end + 1) {
    const std::string where = concat(path_, ":", number);
    const nlohmann::json row = parse_json(std::string_view(text).substr(begin, end - begin), where,
                                          static_cast<int64_t>(begin));
    if (row.is_object() && row.contains("run") && row["run"].is_string() && !row.contains("id")) {
      runs_.insert(row["run"].get<std::string>());
    } else {
      Result result = parse_result(row, where);
      const std::pair key(result.attention, result.facts.id);
      const auto [at, is_new] = rows_.emplace(key, Found{std::move(result), number});
      MT_CHECK_ARG(is_new, where, ": has the sample and pattern of line ", at->second.line,
                   ": expected each once");
    }
    ++number;
  }
  cut_bytes_ = static_cast<int64_t>(text.size() - begin);
  if (cut_bytes_ == 0) return;
  // Only what can be the beginning of one of our lines is cut off: any other file is not ours.
  const std::string_view rest = std::string_view(text).substr(begin);
  const auto begins = [&](std::string_view ours) {
    const size_t common = std::min(rest.size(), ours.size());
    return rest.substr(0, common) == ours.substr(0, common);
  };
  MT_CHECK_ARG(begins("{\"run\":\"") || (!runs_.empty() && begins("{\"id\":\"")), path_, ":",
               number, ": expected a row of results of this verb, got another");
  MT_CHECK_EXTERNAL(::ftruncate(file_, static_cast<off_t>(begin)) == 0, path_,
                    ": cannot be shortened: ", std::strerror(errno));
}

const Result* ResultFile::find(const SampleFacts& sample, const std::string& attention,
                               const std::string& run) const {
  const auto at = rows_.find({attention, sample.id});
  if (at == rows_.end()) return nullptr;
  const Result& row = at->second.result;
  MT_CHECK_ARG(row.facts.digest == sample.digest, path_, ":", at->second.line, ": ",
               in_quotes(sample.id), " was another sample then (", row.facts.digest, ", expected ",
               sample.digest, "): name another --out");
  MT_CHECK_ARG(row.run == run, path_, ":", at->second.line, ": ", in_quotes(sample.id), " with ",
               attention, " is of a run with other weights or settings (", row.run, ", expected ",
               run, "): name another --out");
  return &row;
}

void ResultFile::begin_run(const Json& facts) {
  if (runs_.insert(facts.at("run").get<std::string>()).second) write_line(line_of(facts));
}

void ResultFile::add(const Row& row) {
  write_line(line_of(to_json(row)));
  rows_[{row.result.attention, row.result.facts.id}] = {row.result, 0};
}

void ResultFile::write_line(const std::string& text) {
  for (size_t done = 0; done < text.size();) {
    const ssize_t wrote = ::write(file_, text.data() + done, text.size() - done);
    if (wrote < 0 && errno == EINTR) continue;
    MT_CHECK_EXTERNAL(wrote >= 0, path_, ": cannot be written: ", std::strerror(errno));
    done += wrote;
  }
}

}  // namespace mtraining::eval
