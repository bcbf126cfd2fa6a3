// PartTimes: when the parts of a step ran, by the host's clock or, on a GPU, by the device's.
//
// In:   begin and end of each part, in program order, one inside another. Out: spans for a trace::SpanRecorder.
// Next: trainer_state.cc; bench/train_bench.cc adds them up.
//
// On a GPU a part is two events on the current stream: what lies between them is the time that the device spent from the end of
// all work enqueued before the part to the end of its own. Nothing waits before collect(). Used by one thread at a time.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "mtraining/trace/chrome_trace.h"

namespace mtraining::train {

class PartTimes {
 public:
  /// kHost: what the device has no part in, such as reading data.
  enum class Clock { kDevice, kHost };

  explicit PartTimes(at::Device device) : device_(device) {}

  /// Until the next call: are parts recorded? Forgets what was not collected.
  void record(bool on);
  void begin(std::string_view name, const char* row, int64_t train_step, int64_t layer = -1,
             Clock clock = Clock::kDevice);
  /// Of the innermost open part of that name; what was begun inside it and not ended (an error came between) is forgotten.
  /// Errors: InternalError where no part of that name is open.
  void end(std::string_view name);
  /// Adds the ended parts, in the order of their ends. Waits for the device.
  void collect(trace::SpanRecorder& recorder);

 private:
  struct Part {
    trace::Span span;
    std::optional<c10::Event> begin, end;  ///< none: the span has its times
  };

  at::Device device_;
  bool on_ = false;
  std::vector<Part> open_, ended_;
};

}  // namespace mtraining::train
