// Fault: makes one rank fail on purpose, so that tests can see how a job ends. Silent unless MTRAINING_FAULT is set.
//
// In:   MTRAINING_FAULT="rank=2,step=3,at=forward,kind=throw". Out: that rank throws, dies or poisons a gradient there.
// Next: trainer.h calls it at "start" (step 0: ranks have met, nothing is built), "loader", "forward", "backward",
//       "accumulation" (between micro-steps), "gradient" (before it is summed over ranks), "norm" (after), "checkpoint" (between a rank's files; the step is the finished one).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace mtraining::train {

class Fault {
 public:
  /// Errors: InvalidArgument on text that is not understood.
  static Fault from_environment(int rank);
  /// Errors: ExternalError where kind is "throw". kind "kill": SIGKILL to itself; "exit": leaves at once with status 3;
  /// "stop": SIGTERM to itself; "hang": never returns. step=0 means every step; skip=2 lets the first two times pass.
  void strike(std::string_view place, int64_t train_step) const;
  /// kind "nan" at "gradient" or "norm": whether to poison.
  bool poisons(std::string_view place, int64_t train_step) const;
  bool is_at(std::string_view place, int64_t train_step) const;

 private:
  bool armed_ = false;
  int64_t step_ = 1;
  mutable int64_t skip_ = 0;
  int rank_ = 0;
  std::string place_, kind_ = "throw";
};

}  // namespace mtraining::train
