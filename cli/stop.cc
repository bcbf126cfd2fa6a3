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

constinit std::atomic<bool> wanted{false}, running{false}, printing{true};
constinit std::atomic<int64_t> first_ms{0}, steps_done{0}, grace_ms{20000};
static_assert(std::atomic<int64_t>::is_always_lock_free);
char tail[1024] = "the same command begins anew\n";  // written before `running`

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
  const int64_t step = steps_done.load();
  if (step == 0) {
    add("stopped before the first step");
  } else {
    char digits[24];
    size_t i = sizeof(digits);
    digits[--i] = '\0';
    for (int64_t rest = step; rest > 0; rest /= 10)
      digits[--i] = static_cast<char>('0' + rest % 10);
    add("stopped at train_step ");
    add(digits + i);
  }
  add("; ");
  add(step == 0 ? "the same command begins anew\n" : tail);
  return n;
}

[[noreturn]] void leave() {
  if (printing) {
    char text[1200];
    const ssize_t written = ::write(STDOUT_FILENO, text, format(text, sizeof(text)));
    static_cast<void>(written);  // nobody reads: nothing to do about it
  }
  ::_exit(0);
}

void on_alarm(int) { leave(); }

void on_stop(int) {
  const int64_t now = now_ms();
  if (wanted.exchange(true)) {
    if (now - first_ms.load() >= kInsists) leave();
    return;
  }
  first_ms = now;
  if (!running) leave();
  const int64_t grace = std::max<int64_t>(grace_ms.load(), 1);
  itimerval timer{};
  timer.it_value.tv_sec = grace / 1000;
  timer.it_value.tv_usec = grace % 1000 * 1000;
  ::setitimer(ITIMER_REAL, &timer, nullptr);
}

}  // namespace

void install_stop_handlers() {
  for (const char* name : {"RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"}) {
    const char* rank = ::getenv(name);
    if (rank != nullptr && std::strcmp(rank, "0") != 0) printing = false;
  }
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

void begin_steps(double grace_s, const std::string& folder, bool prints) {
  printing = prints;
  grace_ms = static_cast<int64_t>(std::min(grace_s, 1e6) * 1000);
  std::snprintf(tail, sizeof(tail),
                "no checkpoint was kept: the same command begins anew once %.800s is removed\n",
                folder.c_str());
  running = true;
}

void step_finished(int64_t train_step) { steps_done = train_step; }

void end_steps() {
  const itimerval none{};
  ::setitimer(ITIMER_REAL, &none, nullptr);
}

bool error_is_due_to_stop() {
  if (!wanted) return false;
  return steps_done == 0 || now_ms() - first_ms.load() >= grace_ms.load() - 1000;
}

std::string stopped_line() {
  char text[1200];
  return {text, format(text, sizeof(text))};
}

}  // namespace mtraining::cli
