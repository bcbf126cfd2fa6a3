// ProgressLine: the text of a progress bar that fits a terminal.
//
// In:   where a run stands, the columns of the terminal. Out: one line, ASCII, shorter than the terminal is wide.
// Next: progress.h writes it over the last one.
#pragma once

#include <cstdint>
#include <string>

namespace mtraining::cli {

struct ProgressFacts {
  std::string label;
  int64_t train_step = 0, total_steps = 1;
  double loss = 0, density = 1, tokens_per_s = 0;
  double seconds_left = 0;
};

/// At most columns - 1 long, so that no terminal wraps it. In a narrow one density goes first, then speed, the bar's length, the bar,
/// loss and the label; step and time left stay the longest.
std::string progress_line(const ProgressFacts& facts, int columns);

/// "42 s", "3:07 min", "2:05 h", "3 d 04 h".
std::string duration_text(double seconds);

}  // namespace mtraining::cli
