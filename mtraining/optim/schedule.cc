#include "mtraining/optim/schedule.h"

#include <cmath>
#include <numbers>

#include "mtraining/base/check.h"

namespace mtraining::optim {

ScheduleKind parse_schedule_kind(std::string_view name) {
  const auto kind = value_of(kScheduleWords, name);
  MT_CHECK_ARG(kind, "optim.schedule: expected ", listed(kScheduleWords, ", ", " or ", "\""),
               ", got \"", name, "\"");
  return *kind;
}

std::string_view to_string(ScheduleKind kind) { return word_of(kScheduleWords, kind); }

void check(const ScheduleOptions& options) {
  MT_CHECK_ARG(options.lr >= 0 && std::isfinite(options.lr),
               "optim.lr: expected a finite number of at least 0, got ", options.lr);
  MT_CHECK_ARG(options.warmup_steps >= 0, "optim.warmup_steps: expected at least 0, got ",
               options.warmup_steps);
  MT_CHECK_ARG(options.min_lr_ratio >= 0 && options.min_lr_ratio <= 1,
               "optim.min_lr_ratio: expected 0 to 1, got ", options.min_lr_ratio);
}

double learning_rate(const ScheduleOptions& options, int64_t step) {
  if (step < options.warmup_steps) {
    return options.lr * static_cast<double>(step + 1) / static_cast<double>(options.warmup_steps);
  }
  if (options.kind == ScheduleKind::kConstant) return options.lr;
  const double span = static_cast<double>(options.total_steps - 1 - options.warmup_steps);
  double share = span > 0 ? static_cast<double>(step - options.warmup_steps) / span : 1;
  if (share > 1) share = 1;
  const double left = options.kind == ScheduleKind::kLinear
                          ? 1 - share
                          : 0.5 * (1 + std::cos(std::numbers::pi * share));
  return options.lr * (options.min_lr_ratio + (1 - options.min_lr_ratio) * left);
}

}  // namespace mtraining::optim
