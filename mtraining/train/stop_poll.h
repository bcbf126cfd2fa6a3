// StopPoll: all ranks learn at layer boundaries, at one and the same boundary, that one of them was asked to stop.
//
// In:   a flag that a signal sets on any rank; calls at each layer boundary of forward and backward. Out: an agreed level.
// Next: trainer.cc drops the step under way; cli/stop.h ends what does not come to a boundary within the grace.
//
// A boundary starts a reduction of 8 bytes and looks at the one that was started before, so that nobody waits for it. Between
// reductions lie so many boundaries as take about kPollSeconds, by the step's time that all ranks agree on: a step of milliseconds
// is not polled, one of minutes is polled at every layer.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>

#include "mtraining/comm/transport.h"

namespace mtraining::train {

enum class StopLevel : int64_t {
  kNone = 0,
  kWanted = 1,
  kUrgent = 2  ///< half of the grace is over on some rank
};

/// Thrown on every rank at the same boundary; caught where the step began.
class StepAbandoned : public std::exception {
 public:
  const char* what() const noexcept override { return "stopped within a step"; }
};

class StopPoll {
 public:
  static constexpr double kPollSeconds = 0.25;

  /// Collective: opens a communicator of its own, since polls run beside everything else.
  explicit StopPoll(comm::Transport& transport);
  ~StopPoll();
  StopPoll(const StopPoll&) = delete;
  StopPoll& operator=(const StopPoll&) = delete;

  /// From here on boundaries are polled. All ranks give a flag, or none does (null: boundary() does nothing).
  void watch(const std::atomic<bool>* stop, double grace_s);
  /// This rank's own flag, not agreed.
  StopLevel here();
  /// Collective in count: all ranks pass the same boundaries. Returns the agreed level of an earlier poll.
  StopLevel boundary();
  void step_begins() { in_step_ = 0; }
  /// Since step_begins(). `step_s` must be the same number on every rank.
  void step_took(double step_s);

 private:
  void finish();

  comm::CommunicatorPtr group_;
  const std::atomic<bool>* stop_ = nullptr;
  double grace_s_ = 0;
  std::chrono::steady_clock::time_point seen_{};
  bool was_seen_ = false;
  int64_t interval_ = 1, boundaries_ = 0, in_step_ = 0;
  int64_t agreed_ = 0;
  std::unique_ptr<int64_t> value_;  ///< what the reduction under way reads and writes
  comm::WorkPtr pending_;
};

}  // namespace mtraining::train
