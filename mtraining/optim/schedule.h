// LearningRate: warm-up, then constant, cosine or linear.
//
// In:   [optim] keys and the number of train steps. Out: the rate of a step. Next: adamw.h.
#pragma once

#include <cstdint>
#include <string_view>

#include "mtraining/base/words.h"

namespace mtraining::optim {

enum class ScheduleKind { kConstant, kCosine, kLinear };
inline constexpr Word<ScheduleKind> kScheduleWords[] = {{"constant", ScheduleKind::kConstant},
                                                        {"cosine", ScheduleKind::kCosine},
                                                        {"linear", ScheduleKind::kLinear}};
/// Errors: InvalidArgument names the known kinds.
ScheduleKind parse_schedule_kind(std::string_view name);
std::string_view to_string(ScheduleKind kind);

struct ScheduleOptions {
  ScheduleKind kind = ScheduleKind::kConstant;
  double lr = 2e-5;
  int64_t warmup_steps = 0;
  int64_t total_steps = 1;
  double min_lr_ratio = 0;  ///< cosine and linear end at lr * min_lr_ratio
};
/// Errors: InvalidArgument naming the key.
void check(const ScheduleOptions& options);
/// step is 0-based. Warm-up rises from lr / warmup_steps to lr; the last step has exactly the end's rate.
double learning_rate(const ScheduleOptions& options, int64_t step);

}  // namespace mtraining::optim
