#include "mtraining/train/stop_poll.h"

#include <algorithm>
#include <numeric>
#include <vector>

namespace mtraining::train {

StopPoll::StopPoll(comm::Transport& transport) : value_(std::make_unique<int64_t>(0)) {
  std::vector<int> ranks(transport.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  group_ = transport.open_host("stop", ranks);
}

StopPoll::~StopPoll() {
  if (std::uncaught_exceptions() > 0) {
    // The others may be waiting for this rank elsewhere: nobody waits for them here. What the reduction under way uses is left
    // to the end of the process, which is near.
    if (!pending_) return;
    static_cast<void>(value_.release());
    static_cast<void>(pending_.release());
    static_cast<void>(new comm::CommunicatorPtr(std::move(group_)));
    return;
  }
  try {
    finish();
  } catch (const std::exception&) {  // the others are gone: nobody will stop together any more
  }
}

void StopPoll::watch(const std::atomic<bool>* stop, double grace_s) {
  stop_ = stop;
  grace_s_ = grace_s;
}

StopLevel StopPoll::here() {
  if (stop_ == nullptr || !stop_->load()) return StopLevel::kNone;
  const auto now = std::chrono::steady_clock::now();
  if (!was_seen_) seen_ = now;
  was_seen_ = true;
  return std::chrono::duration<double>(now - seen_).count() > grace_s_ / 2 ? StopLevel::kUrgent
                                                                           : StopLevel::kWanted;
}

StopLevel StopPoll::boundary() {
  if (stop_ == nullptr) return StopLevel::kNone;
  ++in_step_;
  if (++boundaries_ >= interval_) {
    boundaries_ = 0;
    finish();
    *value_ = static_cast<int64_t>(here());
    pending_ = group_->all_reduce({value_.get(), sizeof(int64_t)}, comm::ElementType::kInt64,
                                  comm::ReduceOp::kMax);
  }
  return static_cast<StopLevel>(agreed_);
}

void StopPoll::step_took(double step_s) {
  if (in_step_ > 0 && step_s > 0) {
    const double boundary_s = step_s / static_cast<double>(in_step_);
    interval_ = std::max<int64_t>(1, static_cast<int64_t>(kPollSeconds / boundary_s));
  }
}

void StopPoll::finish() {
  if (!pending_) return;
  pending_->wait();
  pending_ = nullptr;
  agreed_ = std::max(agreed_, *value_);
}

}  // namespace mtraining::train
