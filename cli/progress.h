// Progress: what a run prints. A bar on a terminal, plain lines elsewhere.
//
// In:   what the trainer saw. Out: text on standard output. Next: the reader.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "mtraining/train/trainer.h"

namespace mtraining::cli {

/// Whether standard output is a terminal on which a line can be written over. The one that mpirun puts before a pipe is not: it has
/// no columns.
bool stdout_is_terminal();

class Progress {
 public:
  /// `label` stands before each line (the pattern of the run).
  Progress(std::string label, bool terminal);
  ~Progress();
  void preflight(const train::Preflight& preflight);
  void step(const trace::StepMetrics& metrics, int64_t total_steps);
  void warning(const std::string& text);
  void notice(const std::string& text);
  /// Ends the bar's line.
  void finish();

 private:
  std::string label_;
  bool terminal_;
  bool bar_open_ = false;
  std::chrono::steady_clock::time_point start_, last_line_;
  double mean_loss_ = 0;
  int64_t first_step_ = 0;  ///< that this process did
};

}  // namespace mtraining::cli
