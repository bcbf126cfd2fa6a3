#include "mtraining/comm/patient_worker.h"

#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <future>
#include <stdexcept>
#include <string>
#include <vector>

namespace mtraining::comm {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

int64_t threads_of_process() {
  int64_t count = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    (void)task;
    ++count;
  }
  return count;
}

/// What holds a question back until it is let go.
struct Gate {
  std::promise<void> promise;
  std::shared_future<void> open = promise.get_future().share();
};

TEST(PatientWorker, AnswersInOrderAndPassesErrorsOn) {
  PatientWorker worker;
  std::vector<int> asked;
  for (int i = 0; i < 100; ++i) {
    const auto answer = worker.ask(milliseconds(5000), [&asked, i] {
      asked.push_back(i);
      return std::to_string(i);
    });
    ASSERT_TRUE(answer.has_value());
    EXPECT_EQ(*answer, std::to_string(i));
  }
  EXPECT_EQ(asked.size(), 100);
  EXPECT_THROW(worker.ask(milliseconds(5000), []() -> int { throw std::runtime_error("no"); }),
               std::runtime_error);
  EXPECT_EQ(worker.ask(milliseconds(5000), [] { return 1; }), 1);  // goes on after an error
}

TEST(PatientWorker, HoweverManyQuestionsHangOneThreadIsLeftBehind) {
  Gate gate;
  const int64_t before = threads_of_process();
  std::atomic<int> asked = 0;
  {
    PatientWorker worker;
    const auto hangs = [open = gate.open, &asked] {
      ++asked;
      open.wait();
      return 1;
    };
    EXPECT_FALSE(worker.ask(milliseconds(50), hangs));
    const auto start = steady_clock::now();
    for (int i = 0; i < 50; ++i) EXPECT_FALSE(worker.ask(milliseconds(2000), hangs));
    EXPECT_LT(steady_clock::now() - start, milliseconds(1000));  // nobody waits behind it
    EXPECT_EQ(threads_of_process(), before + 1);
  }
  EXPECT_EQ(threads_of_process(), before + 1);  // whoever goes does not wait either
  gate.promise.set_value();
  for (int i = 0; i < 500 && threads_of_process() > before; ++i)
    std::this_thread::sleep_for(milliseconds(10));
  EXPECT_EQ(threads_of_process(), before);
  EXPECT_EQ(asked, 1);
}

TEST(PatientWorker, WhoHasMorePatienceIsNotSentAwayByWhoHasLess) {
  PatientWorker worker;
  Gate gate, asking;
  std::thread patient([&] {
    EXPECT_EQ(worker.ask(milliseconds(20000),
                         [open = gate.open, &asking] {
                           asking.promise.set_value();
                           open.wait();
                           return 7;
                         }),
              7);
  });
  asking.open.wait();
  EXPECT_FALSE(worker.ask(milliseconds(30), [] { return 1; }));
  gate.promise.set_value();
  patient.join();
  EXPECT_EQ(worker.ask(milliseconds(20000), [] { return 2; }), 2);
}

TEST(PatientWorker, AQuestionThatIsForgottenIsNotAskedAndOneThatIsKeptIs) {
  PatientWorker worker;
  Gate gate;
  std::atomic<int> forgotten = 0, kept = 0;
  EXPECT_FALSE(worker.ask(milliseconds(20), [open = gate.open] {
    open.wait();
    return 0;
  }));
  EXPECT_FALSE(worker.ask(milliseconds(20), [&] { return ++forgotten; }));
  EXPECT_FALSE(worker.ask(
      milliseconds(20), [&] { return ++kept; }, PatientWorker::WhenLate::kAskStill));
  gate.promise.set_value();
  for (int i = 0; i < 500 && kept == 0; ++i) std::this_thread::sleep_for(milliseconds(10));
  EXPECT_EQ(kept, 1);
  EXPECT_EQ(forgotten, 0);
}

}  // namespace
}  // namespace mtraining::comm
