// PatientWorker: one thread that does what may never return, so that nobody else has to wait for it.
//
// In:   questions, each with how long its asker waits. Out: answers; nothing where none came in time.
// Next: c10d_group.h asks the job's store with it.
//
// Thread-safe. Questions are asked one after the other, and at most one thread is left behind, however many remain unanswered: once an
// asker has given up on the one being asked, nobody waits behind it. A question must own what it uses: its asker may be gone.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

namespace mtraining::comm {

class PatientWorker {
 public:
  PatientWorker() = default;
  PatientWorker(const PatientWorker&) = delete;
  PatientWorker& operator=(const PatientWorker&) = delete;
  /// Does not wait for a question that is being asked: the thread ends after it.
  ~PatientWorker() {
    bool idle = true;
    {
      const std::lock_guard lock(shared_->mutex);
      shared_->stopping = true;
      idle = shared_->asking == 0;
    }
    shared_->wake.notify_all();
    if (!thread_.joinable()) return;
    if (idle) {
      thread_.join();
    } else {
      thread_.detach();
    }
  }

  /// Of a question whose turn has not come when its asker gives up.
  enum class WhenLate { kForget, kAskStill };
  /// What `question()` returns, if it does within `patience`. Errors: what it throws; std::system_error where no thread is to be had.
  template <typename Question>
  auto ask(std::chrono::milliseconds patience, Question question,
           WhenLate when_late = WhenLate::kForget) -> std::optional<decltype(question())> {
    struct Asked {
      std::optional<decltype(question())> answer;
      std::exception_ptr error;
      bool over = false;
    };
    const auto deadline = std::chrono::steady_clock::now() + patience;
    const auto asked = std::make_shared<Asked>();
    std::unique_lock lock(shared_->mutex);
    if (!thread_.joinable()) thread_ = std::thread([shared = shared_] { work(*shared); });
    const int64_t number = ++asked_;
    shared_->questions.emplace_back(
        number, [shared = shared_.get(), asked, question = std::move(question)]() mutable {
          std::optional<decltype(question())> answer;
          std::exception_ptr error;
          try {
            answer = question();
          } catch (...) {
            error = std::current_exception();
          }
          const std::lock_guard done(shared->mutex);
          asked->answer = std::move(answer);
          asked->error = error;
          asked->over = true;
        });
    shared_->wake.notify_all();
    const auto in_vain = [&] { return shared_->given_up && shared_->asking != number; };
    shared_->answered.wait_until(lock, deadline, [&] { return asked->over || in_vain(); });
    if (asked->error) std::rethrow_exception(asked->error);
    if (!asked->over && shared_->asking == number) {
      shared_->given_up = true;
      shared_->answered.notify_all();
    } else if (!asked->over && when_late == WhenLate::kForget) {
      std::erase_if(shared_->questions, [&](const auto& each) { return each.first == number; });
    }
    return std::move(asked->answer);
  }

 private:
  /// The thread's own share of it: it may outlive the worker.
  struct Shared {
    std::mutex mutex;
    std::condition_variable wake, answered;
    std::deque<std::pair<int64_t, std::function<void()>>> questions;
    int64_t asking = 0;  // 0: none
    bool given_up = false, stopping = false;
  };
  static void work(Shared& shared) {
    std::unique_lock lock(shared.mutex);
    for (;;) {
      shared.wake.wait(lock, [&] { return shared.stopping || !shared.questions.empty(); });
      if (shared.stopping) return;
      {
        shared.asking = shared.questions.front().first;
        const std::function<void()> next = std::move(shared.questions.front().second);
        shared.questions.pop_front();
        lock.unlock();
        next();
      }  // what the question owned goes while nobody is kept
      lock.lock();
      shared.asking = 0;
      shared.given_up = false;
      shared.answered.notify_all();
    }
  }

  const std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
  std::thread thread_;  // from the first question on
  int64_t asked_ = 0;   // under the mutex
};

}  // namespace mtraining::comm
