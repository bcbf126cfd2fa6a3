// Process ranks: runs the current test's body in N processes of this very test binary.
//
// In:   a number of ranks and a body. Out: how each process ended and what it printed. Next: tests over Gloo.
//
// The parent starts N copies of its own executable with a filter for the running test and MTRAINING_TEST_RANK in the environment; in a
// copy run_processes calls the body and reports "child" so that the test returns. Any failed expectation makes the copy exit non-zero.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

extern "C" char** environ;

namespace mtraining::testing {

struct RankProcess {
  int rank = 0, size = 1, port = 0;
};

struct ProcessResult {
  int exit_code = -1;  ///< 0: all expectations held; 128 + signal where a signal ended it
  bool timed_out = false;
  std::string output;  ///< stdout and stderr
};

struct ProcessRun {
  bool in_child = false;             ///< the body has run in this process; the test should return
  std::vector<ProcessResult> ranks;  ///< in the parent
  double seconds = 0;
};

inline ProcessRun run_processes(int size, const std::function<int()>& choose_port,
                                const std::function<void(const RankProcess&)>& body,
                                std::chrono::seconds limit = std::chrono::seconds(60)) {
  if (const char* rank = std::getenv("MTRAINING_TEST_RANK")) {
    const int wanted = std::atoi(std::getenv("MTRAINING_TEST_SIZE"));
    ProcessRun run{.in_child = true, .ranks = {}};
    // A test may run several sizes in turn; a copy belongs to one of them.
    if (wanted == size)
      body({std::atoi(rank), size, std::atoi(std::getenv("MTRAINING_TEST_PORT"))});
    run.in_child = wanted == size;
    return run;
  }
  const ::testing::TestInfo* test = ::testing::UnitTest::GetInstance()->current_test_info();
  const std::string filter =
      std::string("--gtest_filter=") + test->test_suite_name() + "." + test->name();
  const int port = choose_port();
  const auto start = std::chrono::steady_clock::now();
  std::vector<pid_t> pids;
  std::vector<std::string> logs;
  for (int rank = 0; rank < size; ++rank) {
    char path[] = "/tmp/mtraining_rank_XXXXXX";
    const int log = mkstemp(path);
    logs.emplace_back(path);
    std::vector<std::string> variables;
    for (char** v = environ; *v != nullptr; ++v) variables.emplace_back(*v);
    variables.push_back("MTRAINING_TEST_RANK=" + std::to_string(rank));
    variables.push_back("MTRAINING_TEST_SIZE=" + std::to_string(size));
    variables.push_back("MTRAINING_TEST_PORT=" + std::to_string(port));
    std::vector<char*> envp;
    for (std::string& v : variables) envp.push_back(v.data());
    envp.push_back(nullptr);
    std::string program = "/proc/self/exe", argument = filter;
    char* argv[] = {program.data(), argument.data(), nullptr};
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, log, 1);
    posix_spawn_file_actions_adddup2(&actions, log, 2);
    pid_t pid = -1;
    const int error = posix_spawn(&pid, program.c_str(), &actions, nullptr, argv, envp.data());
    posix_spawn_file_actions_destroy(&actions);
    ::close(log);
    EXPECT_EQ(error, 0) << std::strerror(error);
    pids.push_back(pid);
  }
  ProcessRun run;
  run.ranks.resize(static_cast<size_t>(size));
  std::vector<bool> ended(static_cast<size_t>(size), false);
  int left = size;
  bool stopped = false;
  while (left > 0) {
    for (int rank = 0; rank < size; ++rank) {
      int status = 0;
      if (ended[rank] || waitpid(pids[rank], &status, WNOHANG) != pids[rank]) continue;
      ended[rank] = true;
      --left;
      run.ranks[rank].exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    }
    if (!stopped && std::chrono::steady_clock::now() - start > limit) {
      stopped = true;
      for (int rank = 0; rank < size; ++rank) {
        if (ended[rank]) continue;
        run.ranks[rank].timed_out = true;
        kill(pids[rank], SIGKILL);
      }
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  run.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  for (int rank = 0; rank < size; ++rank) {
    std::ifstream file(logs[rank]);
    std::ostringstream text;
    text << file.rdbuf();
    run.ranks[rank].output = text.str();
    ::unlink(logs[rank].c_str());
  }
  return run;
}

/// Every rank ended well; else shows what the ranks printed.
inline void expect_all_passed(const ProcessRun& run) {
  for (size_t rank = 0; rank < run.ranks.size(); ++rank) {
    EXPECT_EQ(run.ranks[rank].exit_code, 0)
        << "rank " << rank << (run.ranks[rank].timed_out ? " timed out" : "") << ":\n"
        << run.ranks[rank].output;
  }
}

}  // namespace mtraining::testing
