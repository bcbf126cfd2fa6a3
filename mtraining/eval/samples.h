// SampleFile: the samples of a long-context test: JSON lines of token ids, with what is expected after them.
//
// In:   a file of `python -m mtraining.tasks`, the kind of test, what the model can take. Out: samples, one at a time.
// Next: answer.h scores what a model says to them.
//
// The whole file is checked when it is opened, so that a wrong line is found before weights are read; only offsets are kept,
// a line is read again when it is asked for. docs/evaluation.md has the keys.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace mtraining::eval {

enum class Kind { kNeedle, kRuler, kInfiniteBench };
std::string_view to_string(Kind kind);
/// "needle", "ruler", "infinitebench"; none for another name.
std::optional<Kind> kind_of(std::string_view name);
/// A task of the kind, or one with a suffix after it: "niah_multikey", "niah_multikey_8".
bool is_task_of(Kind kind, std::string_view task);
/// "niah_single, niah_multikey, ..", for messages.
std::string tasks_of(Kind kind);

struct SampleFacts {
  std::string id;  ///< unique in its file
  std::string task;
  std::optional<int64_t> length;  ///< that the sample was made for
  std::optional<double> depth;    ///< 0: what is asked for stands first, 1: last
  int64_t prompt_tokens = 0;
  int64_t truncated_tokens = 0;  ///< that its maker cut out of the context
  std::string digest;            ///< of the line
};

struct Sample {
  SampleFacts facts;
  std::vector<int64_t> ids;

  /// Generation: the score is the share of answers found among the new tokens (all), or 1 where one is (any). An answer has one
  /// spelling or several. No answers: not scored here.
  std::vector<std::vector<std::vector<int64_t>>> answers;
  bool any = false;
  int64_t max_new_tokens = 0;
  std::vector<int64_t> stops;

  /// Choice: the most likely option is taken; indices of those that are right.
  std::vector<std::vector<int64_t>> options;
  std::vector<int64_t> correct;
  bool is_choice() const { return !options.empty(); }
};

struct SampleLimits {
  int64_t vocab_size = 0;
  int64_t max_tokens = 0;  ///< of prompt and continuation
};

class SampleFile {
 public:
  /// Errors: InvalidArgument: a file that cannot be read or has no sample; naming file and line: JSON of another form, a key that is
  /// unknown, missing or out of range, a task of another kind, an id outside the vocabulary, more tokens than max_tokens, an id
  /// that was there before.
  SampleFile(const std::string& path, Kind kind, const SampleLimits& limits);

  const std::string& path() const { return path_; }
  Kind kind() const { return kind_; }
  const std::vector<SampleFacts>& facts() const { return facts_; }
  /// Errors: ExternalError where the file is not what it was.
  Sample read(size_t index) const;

 private:
  struct Place {
    int64_t offset = 0, bytes = 0, line = 0;
  };
  std::string path_;
  Kind kind_;
  SampleLimits limits_;
  std::vector<SampleFacts> facts_;
  std::vector<Place> places_;
};

}  // namespace mtraining::eval
