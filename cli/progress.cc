#include "cli/progress.h"

#include <cstdio>
#include <iostream>

#include "mtraining/base/check.h"

namespace mtraining::cli {
namespace {

constexpr int kBarWidth = 24;
constexpr double kSecondsBetweenLines = 5;

std::string number(const char* format, double value) {
  char text[64];
  std::snprintf(text, sizeof(text), format, value);
  return text;
}

}  // namespace

Progress::Progress(std::string label, bool terminal)
    : label_(std::move(label)),
      terminal_(terminal),
      start_(std::chrono::steady_clock::now()),
      last_line_(start_) {}

Progress::~Progress() { finish(); }

void Progress::finish() {
  if (bar_open_) std::cout << std::endl;
  bar_open_ = false;
}

void Progress::preflight(const train::Preflight& p) {
  std::cout << label_ << ": first batch: loss dense " << number("%.4f", p.loss_dense)
            << ", with the pattern " << number("%.4f", p.loss_pattern) << ", density "
            << number("%.3f", p.density) << ", worst head's recall "
            << (p.recall_worst ? number("%.3f", *p.recall_worst) : "not measured") << std::endl;
}

void Progress::step(const trace::StepMetrics& m, int64_t total_steps) {
  const auto now = std::chrono::steady_clock::now();
  mean_loss_ = m.train_step == 1 ? m.loss : 0.7 * mean_loss_ + 0.3 * m.loss;
  const double elapsed = std::chrono::duration<double>(now - start_).count();
  const double left =
      elapsed / static_cast<double>(m.train_step) * static_cast<double>(total_steps - m.train_step);
  const std::string facts = concat("train_step ", m.train_step, "/", total_steps, "  loss ",
                                   number("%.4f", terminal_ ? mean_loss_ : m.loss), "  density ",
                                   number("%.3f", m.attention_density), "  ",
                                   number("%.0f", m.tokens_per_s), " tokens/s");
  if (terminal_) {
    const auto filled = static_cast<int>(kBarWidth * m.train_step / total_steps);
    std::cout << '\r' << label_ << " [" << std::string(filled, '#')
              << std::string(kBarWidth - filled, '.') << "] " << facts << "  "
              << number("%.0f", left) << " s left \x1b[K" << std::flush;
    bar_open_ = true;
    if (m.train_step == total_steps) finish();
    return;
  }
  const bool due = std::chrono::duration<double>(now - last_line_).count() >= kSecondsBetweenLines;
  if (!due && m.train_step != 1 && m.train_step != total_steps && !m.valid_loss && total_steps > 20)
    return;
  last_line_ = now;
  std::cout << label_ << ": " << facts << "  lr " << number("%.2e", m.lr) << "  grad_norm "
            << number("%.3f", m.grad_norm);
  if (m.valid_loss) std::cout << "  valid_loss " << number("%.4f", *m.valid_loss);
  if (m.attention_recall) std::cout << "  recall " << number("%.3f", *m.attention_recall);
  std::cout << "  " << number("%.0f", left) << " s left" << std::endl;
}

void Progress::warning(const std::string& text) {
  finish();
  std::cout << label_ << ": warning: " << text << std::endl;
}

}  // namespace mtraining::cli
