#include "cli/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdlib>
#include <iostream>
#include <string_view>

#include "cli/printed.h"
#include "cli/progress_line.h"

namespace mtraining::cli {
namespace {

constexpr double kSecondsBetweenLines = 5;
constexpr double kSecondsBetweenBars = .1;  ///< a terminal that is written to faster flickers

/// Columns of the terminal now: windows change.
int columns() {
  winsize size{};
  return ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

}  // namespace

bool stdout_is_terminal() {
  winsize size{};
  const char* kind = std::getenv("TERM");
  return ::isatty(STDOUT_FILENO) != 0 && ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 &&
         size.ws_col > 0 && (kind == nullptr || std::string_view(kind) != "dumb");
}

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
  if (first_step_ == 0) first_step_ = m.train_step;
  mean_loss_ = m.train_step == first_step_ ? m.loss : 0.7 * mean_loss_ + 0.3 * m.loss;
  const double elapsed = std::chrono::duration<double>(now - start_).count();
  const double left = elapsed / static_cast<double>(m.train_step - first_step_ + 1) *
                      static_cast<double>(total_steps - m.train_step);
  if (terminal_) {
    const bool last = m.train_step == total_steps;
    if (bar_open_ && !last &&
        std::chrono::duration<double>(now - last_line_).count() < kSecondsBetweenBars)
      return;
    last_line_ = now;
    // In one write, over the line before, whose rest goes: nothing is ever empty on the way.
    std::cout << '\r' +
                     progress_line({label_, m.train_step, total_steps, mean_loss_,
                                    m.attention_density, m.tokens_per_s, left},
                                   columns()) +
                     "\x1b[K"
              << std::flush;
    bar_open_ = true;
    if (last) finish();
    return;
  }
  const bool due = std::chrono::duration<double>(now - last_line_).count() >= kSecondsBetweenLines;
  if (!due && m.train_step != first_step_ && m.train_step != total_steps && !m.valid_loss &&
      total_steps > 20)
    return;
  last_line_ = now;
  std::cout << label_ << ": train_step " << m.train_step << "/" << total_steps << "  loss "
            << number("%.4f", m.loss) << "  density " << number("%.3f", m.attention_density) << "  "
            << number("%.0f", m.tokens_per_s) << " tokens/s  lr " << number("%.2e", m.lr)
            << "  grad_norm " << number("%.3f", m.grad_norm);
  if (m.valid_loss) std::cout << "  valid_loss " << number("%.4f", *m.valid_loss);
  if (m.attention_recall) std::cout << "  recall " << number("%.3f", *m.attention_recall);
  std::cout << "  " << duration_text(left) << " left" << std::endl;
}

void Progress::notice(const std::string& text) {
  finish();
  std::cout << label_ << ": " << text << std::endl;
}

void Progress::warning(const std::string& text) {
  finish();
  std::cout << label_ << ": warning: " << text << std::endl;
}

}  // namespace mtraining::cli
