#include "cli/launcher.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <new>
#include <optional>
#include <thread>

#include "mtraining/base/check.h"
#include "mtraining/comm/c10d.h"

namespace mtraining::cli {
namespace {

using Clock = std::chrono::steady_clock;
constexpr const char* kErrorFd = "MTRAINING_ERROR_FD";
/// How long other ranks' causes are awaited after the first failure, so that the earliest is known.
constexpr auto kGather = std::chrono::milliseconds(500);
/// Beyond train.stop_grace_s, for the step under way to be dropped and files to be closed.
constexpr double kStopSlack = 10;

volatile sig_atomic_t pending_signal = 0;
volatile sig_atomic_t signal_count = 0;
void on_signal(int number) {
  pending_signal = number;
  signal_count = signal_count + 1;
}

struct Child {
  pid_t pid = -1;
  bool running = true;
};

struct Cause {
  int rank = 0, exit_code = 1;
  std::string message;
};

/// Lines "rank exit_code message", in the order in which they were written.
class CausePipe {
 public:
  CausePipe() {
    MT_CHECK_EXTERNAL(::pipe(ends_) == 0, "launcher: no pipe: ", std::strerror(errno));
    ::fcntl(ends_[0], F_SETFD, FD_CLOEXEC);
    ::fcntl(ends_[0], F_SETFL, O_NONBLOCK);
  }
  int write_end() const { return ends_[1]; }
  void wait(int milliseconds) const {
    pollfd poll_in{ends_[0], POLLIN, 0};
    ::poll(&poll_in, 1, milliseconds);
  }
  /// Whether a signal to one rank alone has ended it before the first step. What others say later is that they lost it.
  bool left() const { return left_; }
  void read_into(std::vector<Cause>& causes) {
    char buffer[4096];
    for (ssize_t got; (got = ::read(ends_[0], buffer, sizeof(buffer))) > 0;)
      text_.append(buffer, got);
    for (size_t end; (end = text_.find('\n')) != std::string::npos; text_.erase(0, end + 1)) {
      Cause cause;
      int consumed = 0;
      const std::string line = text_.substr(0, end);
      if (std::sscanf(line.c_str(), "%d %d %n", &cause.rank, &cause.exit_code, &consumed) == 2) {
        cause.message = line.substr(consumed);
        left_ = left_ || (cause.exit_code == 0 && causes.empty());
        if (cause.exit_code != 0 && !left_) causes.push_back(cause);
      }
    }
  }

 private:
  int ends_[2] = {-1, -1};
  std::string text_;
  bool left_ = false;
};

[[noreturn]] void become_rank(const LaunchOptions& options, int rank, int port, int error_fd,
                              pid_t parent) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(1);  // it died before prctl
  const auto set = [](const char* name, const std::string& value) {
    ::setenv(name, value.c_str(), 1);
  };
  set("RANK", std::to_string(rank));
  set("WORLD_SIZE", std::to_string(options.ranks));
  set("LOCAL_RANK", std::to_string(rank));
  set("LOCAL_WORLD_SIZE", std::to_string(options.ranks));
  set("MASTER_ADDR", "127.0.0.1");
  set("MASTER_PORT", std::to_string(port));
  set(kErrorFd, std::to_string(error_fd));
  std::vector<char*> argv{const_cast<char*>("mtraining")};
  for (const std::string& argument : options.arguments)
    argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  ::execv("/proc/self/exe", argv.data());
  ::_exit(127);
}

std::string signal_text(int rank, int number) {
  return concat("rank ", rank, ": killed by signal ", number, " (", ::strsignal(number), ")");
}

/// What the user can act on where memory is short; torch's words are of its own source. Empty: it is another failure.
std::string out_of_memory(const std::exception& error) {
  if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr)
    return "out of memory: this process could not be given more";
  const std::string said = error.what();
  const size_t at = said.find("you tried to allocate ");
  if (said.find("DefaultCPUAllocator") == std::string::npos || at == std::string::npos) return "";
  return concat(
      "out of memory: a tensor of ",
      std::strtoull(said.c_str() + at + std::strlen("you tried to allocate "), nullptr, 10),
      " bytes could not be had");
}

}  // namespace

int launch(const LaunchOptions& options) {
  CausePipe pipe;
  const comm::HeldPort port;  // until the job ends
  struct sigaction action {};
  action.sa_handler = on_signal;
  sigset_t signals;
  ::sigemptyset(&signals);
  for (const int number : {SIGTERM, SIGINT, SIGUSR1}) {
    ::sigaction(number, &action, nullptr);
    ::sigaddset(&signals, number);
  }
  // A signal between fork and exec stays pending until the rank has handlers of its own.
  ::sigprocmask(SIG_BLOCK, &signals, nullptr);
  const pid_t self = ::getpid();
  std::vector<Child> children(options.ranks);
  const auto signal_all = [&](int number) {
    for (const Child& child : children) {
      if (child.running && child.pid > 0) ::kill(child.pid, number);
    }
  };
  for (int rank = 0; rank < options.ranks; ++rank) {
    children[rank].pid = ::fork();
    if (children[rank].pid == 0) become_rank(options, rank, port.port(), pipe.write_end(), self);
    if (children[rank].pid < 0) {
      const std::string why = std::strerror(errno);
      signal_all(SIGKILL);
      throw ExternalError(concat("launcher: rank ", rank, " cannot be started: ", why));
    }
  }

  ::sigprocmask(SIG_UNBLOCK, &signals, nullptr);

  std::vector<Cause> causes;            // from the pipe
  std::optional<Cause> killed, exited;  // a rank that died without words
  std::optional<Clock::time_point> failed_at, stop_at;
  bool ended_by_us = false;
  const auto any_running = [&] {
    return std::any_of(children.begin(), children.end(), [](const Child& c) { return c.running; });
  };
  while (any_running()) {
    pipe.wait(100);
    pipe.read_into(causes);
    for (int rank = 0; rank < options.ranks; ++rank) {
      int status = 0;
      Child& child = children[rank];
      if (!child.running || ::waitpid(child.pid, &status, WNOHANG) != child.pid) continue;
      child.running = false;
      if (ended_by_us || pipe.left()) continue;
      if (WIFSIGNALED(status)) {
        if (!killed) killed = Cause{rank, 1, signal_text(rank, WTERMSIG(status))};
      } else if (WEXITSTATUS(status) != 0 && !exited) {
        exited =
            Cause{rank, 1, concat("rank ", rank, ": exited with status ", WEXITSTATUS(status))};
      }
    }
    const auto now = Clock::now();
    if ((killed || exited || !causes.empty()) && !failed_at) failed_at = now;
    if (failed_at && !ended_by_us && now - *failed_at > kGather) {
      ended_by_us = true;
      signal_all(SIGKILL);
    }
    if (pipe.left() && !stop_at) pending_signal = SIGTERM;
    if (const int number = pending_signal; number != 0) {
      pending_signal = 0;
      // A terminal's second Ctrl-C means now.
      const bool insisted = stop_at && now - *stop_at > std::chrono::seconds(1);
      if (!stop_at) stop_at = now;
      signal_all(insisted ? SIGKILL : number);
      ended_by_us = ended_by_us || insisted;
    }
    if (stop_at && !ended_by_us &&
        now - *stop_at > std::chrono::duration<double>(options.stop_grace_s + kStopSlack)) {
      causes.push_back({-1, 1,
                        concat("stopped by force: ranks did not reach a step boundary within ",
                               options.stop_grace_s + kStopSlack, " s")});
      ended_by_us = true;
      signal_all(SIGKILL);
    }
  }
  pipe.read_into(causes);
  // A killed rank comes first: what the others say then is that they lost it. A rank that left without words comes last.
  const std::optional<Cause> first = killed            ? killed
                                     : !causes.empty() ? std::optional<Cause>(causes.front())
                                                       : exited;
  if (!first) return ended_by_us ? 1 : 0;
  std::cout << std::flush;
  std::cerr << "mtraining: error: " << first->message << std::endl;
  return first->exit_code;
}

bool started_by_launch() { return std::getenv(kErrorFd) != nullptr; }

Failure failure_of(const std::exception& error) {
  const bool is_mistake = dynamic_cast<const InvalidArgument*>(&error) != nullptr ||
                          dynamic_cast<const Unsupported*>(&error) != nullptr;
  const auto* of_torch = dynamic_cast<const c10::Error*>(&error);
  Failure failure{is_mistake ? 2 : 1,
                  of_torch != nullptr ? of_torch->what_without_backtrace() : error.what()};
  if (const std::string shortage = out_of_memory(error); !shortage.empty())
    failure.message = shortage;
  std::replace(failure.message.begin(), failure.message.end(), '\n', ' ');
  return failure;
}

void report_error(int rank, int exit_code, const std::string& message) {
  const char* fd = std::getenv(kErrorFd);
  if (fd == nullptr) {
    std::cout << std::flush;
    std::cerr << "mtraining: error: " << message << std::endl;
    return;
  }
  // One write below PIPE_BUF is atomic, so that lines of several ranks never mix and their order is that of the failures.
  const std::string line = concat(rank, " ", exit_code, " ", message.substr(0, 3500), "\n");
  const ssize_t written = ::write(std::atoi(fd), line.data(), line.size());
  static_cast<void>(written);  // the launcher may be gone; then nobody reads
}

}  // namespace mtraining::cli
