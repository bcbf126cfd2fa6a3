#include "cli/stop.h"

#include <signal.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace mtraining::cli {
namespace {

constexpr int kSignals[] = {SIGTERM, SIGINT, SIGUSR1};
constexpr int64_t kInsists = 1000;  ///< ms after the first signal from which a second one means now
constexpr int kPeersWait = 4;  ///< s for the other ranks to be told of a stop before the first step

constinit std::atomic<bool> wanted{false}, running{false}, printing{true}, peers{false};
constinit std::atomic<int> launcher_pipe{-1};  ///< of --nproc
constinit std::atomic<int64_t> first_ms{0}, steps_done{0}, grace_ms{20000};
/// -1: none. One of step 0 holds micro-steps of the first.
constinit std::atomic<int64_t> steps_saved{-1};
constinit std::atomic<bool> goes_on_by_itself{true};
static_assert(std::atomic<int64_t>::is_always_lock_free);
/// Read by handlers: what it points to never changes and is never freed.
constinit std::atomic<const std::vector<std::string>*> leavings{nullptr};

int64_t now_ms() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{1000} * now.tv_sec + now.tv_nsec / 1000000;
}

/// Async-signal-safe. Returns the length.
size_t format(char* out, size_t room) {
  size_t n = 0;
  const auto add = [&](const char* text) {
    for (; *text != '\0' && n < room; ++text) out[n++] = *text;
  };
  const auto add_number = [&](int64_t number) {
    char digits[24];
    size_t i = sizeof(digits);
    digits[--i] = '\0';
    int64_t rest = number;
    do digits[--i] = static_cast<char>('0' + rest % 10);
    while ((rest /= 10) > 0);
    add(digits + i);
  };
  const int64_t done = steps_done.load(), saved = steps_saved.load();
  if (done == 0) {
    add(saved < 0 ? "stopped before the first step" : "stopped before the end of the first step");
  } else {
    add("stopped at train_step ");
    add_number(done);
  }
  add(done > 0 && saved < 0 ? "; no checkpoint was kept: the same command" : "; the same command");
  if (!goes_on_by_itself) add(", with --resume auto,");
  // Before the first step the folder may not have been looked at: what it holds may go on.
  add(saved >= 0 ? " continues" : done > 0 ? " begins anew" : " starts again");
  if (saved >= 0 && saved < done) {
    add(" after train_step ");
    add_number(saved);
  }
  add("\n");
  return n;
}

[[noreturn]] void leave() {
  if (printing) {
    char text[1200];
    const ssize_t written = ::write(STDOUT_FILENO, text, format(text, sizeof(text)));
    static_cast<void>(written);  // nobody reads: nothing to do about it
  }
  if (const std::vector<std::string>* paths = leavings) {
    for (const std::string& path : *paths)
      if (::unlink(path.c_str()) != 0) ::rmdir(path.c_str());
  }
  if (launcher_pipe >= 0 && !running) {
    const ssize_t written = ::write(launcher_pipe, kLeftLine, sizeof(kLeftLine) - 1);
    static_cast<void>(written);
  }
  ::_exit(0);
}

void on_alarm(int) { leave(); }

void set_alarm(int64_t ms) {
  itimerval timer{};
  timer.it_value.tv_sec = ms / 1000;
  timer.it_value.tv_usec = ms % 1000 * 1000;
  ::setitimer(ITIMER_REAL, &timer, nullptr);
}

void on_stop(int) {
  const int64_t now = now_ms();
  if (wanted.exchange(true)) {
    if (now - first_ms.load() >= kInsists) leave();
    return;
  }
  first_ms = now;
  if (running) {
    set_alarm(std::max<int64_t>(grace_ms.load(), 1));
  } else if (peers) {
    set_alarm(int64_t{1000} * kPeersWait);
  } else {
    leave();
  }
}

/// getenv() finds nothing yet where libc itself is not initialised.
const char* find_variable(char** environment, const char* name) {
  const size_t length = std::strlen(name);
  for (; *environment != nullptr; ++environment)
    if (std::strncmp(*environment, name, length) == 0 && (*environment)[length] == '=')
      return *environment + length + 1;
  return nullptr;
}

/// Whether another launcher than --nproc has started several ranks.
bool has_peers(char** environment) {
  if (find_variable(environment, "MTRAINING_ERROR_FD") != nullptr) return false;
  for (const char* name :
       {"WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"}) {
    const char* size = find_variable(environment, name);
    if (size != nullptr) return std::atoi(size) > 1;
  }
  return false;
}

}  // namespace

void install_stop_handlers(char** environment) {
  for (const char* name : {"RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"}) {
    const char* rank = find_variable(environment, name);
    if (rank != nullptr && std::strcmp(rank, "0") != 0) printing = false;
  }
  peers = has_peers(environment);
  if (const char* fd = find_variable(environment, "MTRAINING_ERROR_FD"))
    launcher_pipe = std::atoi(fd);
  ::signal(SIGPIPE, SIG_IGN);  // who reads the progress may leave
  struct sigaction action {};
  action.sa_flags = SA_RESTART;
  sigset_t set;
  ::sigemptyset(&set);
  action.sa_handler = on_alarm;
  ::sigaction(SIGALRM, &action, nullptr);
  action.sa_handler = on_stop;
  for (const int number : kSignals) {
    ::sigaction(number, &action, nullptr);
    ::sigaddset(&set, number);
  }
  ::sigprocmask(SIG_UNBLOCK, &set, nullptr);
}

const std::atomic<bool>& stop_wanted() { return wanted; }

void begins_after(int64_t train_step, bool has_checkpoint, bool by_itself) {
  steps_done = train_step;
  steps_saved = has_checkpoint ? train_step : -1;
  goes_on_by_itself = by_itself;
}

void begin_steps(double grace_s, bool prints) {
  printing = prints;
  grace_ms = static_cast<int64_t>(std::min(grace_s, 1e6) * 1000);
  running = true;
  if (wanted)
    set_alarm(std::max<int64_t>(grace_ms.load(), 1));  // not the shorter one that was set before
}

void leave_stopped() { leave(); }

void step_finished(int64_t train_step) { steps_done = train_step; }

void checkpoint_saved(int64_t train_step) { steps_saved = train_step; }

void end_steps() {
  const itimerval none{};
  ::setitimer(ITIMER_REAL, &none, nullptr);
}

bool error_is_due_to_stop() {
  if (!wanted) return false;
  return steps_done == 0 || now_ms() - first_ms.load() >= grace_ms.load() - 1000;
}

void remove_on_stop(const std::vector<std::string>& paths) {
  leavings = paths.empty() ? nullptr : new std::vector<std::string>(paths);
}

std::string stopped_line() {
  char text[1200];
  return {text, format(text, sizeof(text))};
}

}  // namespace mtraining::cli
