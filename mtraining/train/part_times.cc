#include "mtraining/train/part_times.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "mtraining/attention/recorded_event.h"
#include "mtraining/base/check.h"

namespace mtraining::train {

using attention::recorded;

void PartTimes::record(bool on) {
  on_ = on;
  open_.clear();
  ended_.clear();
}

void PartTimes::begin(std::string_view name, const char* row, int64_t train_step, int64_t layer,
                      Clock clock) {
  if (!on_) return;
  Part part{{.name = std::string(name), .row = row, .train_step = train_step, .layer = layer},
            std::nullopt,
            std::nullopt};
  if (device_.is_cpu() || clock == Clock::kHost)
    part.span.begin_us = trace::now_us();
  else
    part.begin = recorded(device_);
  open_.push_back(std::move(part));
}

void PartTimes::end(std::string_view name) {
  if (!on_) return;
  const auto found = std::find_if(open_.rbegin(), open_.rend(),
                                  [&](const Part& part) { return part.span.name == name; });
  MT_ASSERT(found != open_.rend(), "part \"", name, "\" ends and was not begun");
  Part part = std::move(*found);
  open_.erase(std::prev(found.base()), open_.end());
  if (part.begin)
    part.end = recorded(device_);
  else
    part.span.end_us = trace::now_us();
  ended_.push_back(std::move(part));
}

void PartTimes::collect(trace::SpanRecorder& recorder) {
  std::optional<c10::Event> clock;
  double clock_us = 0;
  if (device_.is_cuda() && !ended_.empty()) {
    clock = recorded(device_);
    clock->synchronize();
    clock_us = static_cast<double>(trace::now_us());
  }
  for (Part& part : ended_) {
    if (part.begin) {
      const double end_us = clock_us - part.end->elapsedTime(*clock) * 1e3;
      part.span.end_us = static_cast<int64_t>(end_us);
      part.span.begin_us = static_cast<int64_t>(end_us - part.begin->elapsedTime(*part.end) * 1e3);
    }
    recorder.add(std::move(part.span));
  }
  ended_.clear();
}

}  // namespace mtraining::train
