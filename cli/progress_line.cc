#include "cli/progress_line.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "cli/printed.h"
#include "mtraining/base/check.h"

namespace mtraining::cli {
namespace {

constexpr int kLongestBar = 24, kShortestBar = 8;

std::string speed(double tokens_per_s) {
  if (tokens_per_s >= 1e6) return number("%.2fM tokens/s", tokens_per_s * 1e-6);
  if (tokens_per_s >= 1e5) return number("%.0fK tokens/s", tokens_per_s * 1e-3);
  return number("%.0f tokens/s", tokens_per_s);
}

std::string bar(const ProgressFacts& facts, int width) {
  const int64_t total = std::max<int64_t>(facts.total_steps, 1);
  const auto filled =
      static_cast<int>(std::clamp<int64_t>(width * facts.train_step / total, 0, width));
  return "[" + std::string(static_cast<size_t>(filled), '#') +
         std::string(static_cast<size_t>(width - filled), '.') + "]";
}

}  // namespace

std::string duration_text(double seconds) {
  if (!(seconds >= 0)) return "?";
  if (seconds > 1e9) return "> 30 years";
  const auto whole = static_cast<long long>(std::llround(seconds));
  char text[64];
  if (whole < 60) {
    std::snprintf(text, sizeof(text), "%lld s", whole);
  } else if (whole < 3600) {
    std::snprintf(text, sizeof(text), "%lld:%02lld min", whole / 60, whole % 60);
  } else if (whole < 86400) {
    std::snprintf(text, sizeof(text), "%lld:%02lld h", whole / 3600, whole % 3600 / 60);
  } else {
    std::snprintf(text, sizeof(text), "%lld d %02lld h", whole / 86400, whole % 86400 / 3600);
  }
  return text;
}

std::string progress_line(const ProgressFacts& facts, int columns) {
  const int room = std::max(columns - 1, 1);
  const std::string step = concat(facts.train_step, "/", facts.total_steps);
  const std::string left = concat(duration_text(facts.seconds_left), " left");
  struct Form {
    bool label, loss, density, speed;
    int bar;
  };
  for (const Form& form :
       {Form{true, true, true, true, kLongestBar}, Form{true, true, true, true, kShortestBar},
        Form{true, true, false, true, kLongestBar}, Form{true, true, false, true, kShortestBar},
        Form{true, true, false, false, kShortestBar}, Form{true, true, false, false, 0},
        Form{false, true, false, false, 0}, Form{false, false, false, false, 0}}) {
    std::string line = form.label ? facts.label + " " : "";
    if (form.bar > 0) line += bar(facts, form.bar) + " ";
    line += step;
    if (form.loss) line += number("  loss %.4f", facts.loss);
    if (form.density) line += number("  density %.3f", facts.density);
    if (form.speed) line += "  " + speed(facts.tokens_per_s);
    line += "  " + left;
    if (line.size() <= static_cast<size_t>(room)) return line;
  }
  return step.substr(0, static_cast<size_t>(room));
}

}  // namespace mtraining::cli
