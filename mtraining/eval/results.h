// ResultFile: rows of answered samples as JSON lines, to which a later run of the same command adds what is missing.
//
// In:   results. Out: a file that grows by a whole line a sample; what it held already. Next: summary.h, `python -m mtraining.tasks score`.
//
// A run (weights, pattern, device and type) writes a row of its facts before its samples; rows carry its digest and that of their
// sample, so that nothing of other weights or another sample is ever taken for done. A last line that a killed process did not
// finish is cut off and said.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "mtraining/eval/answer.h"
#include "mtraining/eval/samples.h"

namespace mtraining::eval {

/// What a summary needs of a row.
struct Result {
  SampleFacts facts;
  std::string attention;
  std::string run;  ///< digest
  std::optional<double> score;
};

struct Row {
  Result result;
  Answer answer;
  double density = 0, seconds = 0;
};
/// One object; keys in docs/evaluation.md.
nlohmann::ordered_json to_json(const Row& row);

class ResultFile {
 public:
  /// Opens or makes the file, for this process alone. Errors: InvalidArgument: a line that is no row (file and line), a file that
  /// another process writes, a folder that is not there.
  explicit ResultFile(const std::string& path);
  ~ResultFile();
  ResultFile(const ResultFile&) = delete;
  ResultFile& operator=(const ResultFile&) = delete;

  /// Bytes of an unfinished last line that were cut off.
  int64_t cut_bytes() const { return cut_bytes_; }
  /// The row of this sample and pattern, if there is one. Errors: InvalidArgument where it is of another run or another sample.
  const Result* find(const SampleFacts& sample, const std::string& attention,
                     const std::string& run) const;
  /// The facts of a run; a run that is in the file already is not written again. `facts` has the key "run".
  void begin_run(const nlohmann::ordered_json& facts);
  /// Errors: ExternalError where the disk is full.
  void add(const Row& row);

 private:
  struct Found {
    Result result;
    int64_t line = 0;
  };
  void read();
  void write_line(const std::string& text);

  std::string path_;
  int file_ = -1;
  int64_t cut_bytes_ = 0;
  std::map<std::pair<std::string, std::string>, Found> rows_;  // (attention, id)
  std::set<std::string> runs_;
};

}  // namespace mtraining::eval
