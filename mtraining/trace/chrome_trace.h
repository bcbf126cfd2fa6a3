// ChromeTrace: spans of one rank, and the merged file that Perfetto and chrome://tracing open.
//
// In:   spans (name, row, begin, end) on each rank. Out: one JSON file with a process row a rank.
// Next: ui.perfetto.dev.
//
// Each rank records; its spans travel as text to rank 0 (the trainer moves them), which writes the merged file. Times are
// microseconds of the steady clock, which ranks of one host share; the earliest span becomes 0.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace mtraining::trace {

struct Span {
  std::string name;
  std::string row;  ///< thread row inside the rank: "step", "model", "ring", ..
  int64_t begin_us = 0, end_us = 0;
  int64_t train_step = 0;
  int64_t layer = -1;      ///< -1: none
  int64_t ring_step = -1;  ///< -1: none
  int64_t pairs = -1;      ///< -1: none
};

/// Microseconds of the steady clock.
int64_t now_us();

class SpanRecorder {
 public:
  void add(Span span) { spans_.push_back(std::move(span)); }
  const std::vector<Span>& spans() const { return spans_; }
  void clear() { spans_.clear(); }
  /// JSON array, for the journey to rank 0.
  std::string serialize() const;

 private:
  std::vector<Span> spans_;
};

/// `per_rank[r]` is rank r's serialize(). Errors: ExternalError where the file cannot be written; InvalidArgument on text that
/// serialize() did not make.
void write_chrome_trace(const std::filesystem::path& path,
                        const std::vector<std::string>& per_rank);

}  // namespace mtraining::trace
