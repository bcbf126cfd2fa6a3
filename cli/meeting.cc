#include "cli/meeting.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "cli/socket.h"
#include "cli/stop.h"
#include "mtraining/base/check.h"

namespace mtraining::cli {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
/// How long a connection without a word is listened to, for greetings and hellos.
constexpr milliseconds kGreeting{1000};
/// How long ranks that have not come yet are awaited, to be told of a stop.
constexpr milliseconds kLinger{3000};
/// A rank that is gone: its launcher's or its own words may be on their way.
constexpr milliseconds kLastWords{500};

std::string greeting_of(const std::string& job) {
  uint64_t hash = 1469598103934665603u;
  for (const char c : job) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211u;
  char text[64];
  std::snprintf(text, sizeof(text), "mtraining-meeting 1 %016llx",
                static_cast<unsigned long long>(hash));
  return text;
}

/// Lines as one word: a newline becomes a unit separator.
std::string packed(std::string text) {
  std::replace(text.begin(), text.end(), '\n', '\x1f');
  return text;
}

/// The first entry in which two packed TOML texts differ, with its section.
std::string first_difference(const std::string& ours, const std::string& theirs) {
  const auto split = [](const std::string& text) {
    std::vector<std::string> lines{""};
    for (const char c : text) {
      if (c == '\x1f') {
        lines.emplace_back();
      } else {
        lines.back() += c;
      }
    }
    return lines;
  };
  const auto a = split(ours), b = split(theirs);
  std::string section;
  for (size_t i = 0; i < std::max(a.size(), b.size()); ++i) {
    const std::string left = i < a.size() ? a[i] : "", right = i < b.size() ? b[i] : "";
    if (left != right)
      return concat(section, " \"", right.substr(0, 200), "\", rank 0 has \"", left.substr(0, 200),
                    "\"");
    if (!left.empty() && left.front() == '[') section = left;
  }
  return "";
}

std::string list_missing(const std::vector<bool>& came) {
  std::string text;
  int listed = 0, missing = 0;
  for (size_t rank = 0; rank < came.size(); ++rank) {
    if (came[rank]) continue;
    ++missing;
    if (++listed <= 8) text += concat(listed > 1 ? ", " : "", rank);
  }
  return concat(text, missing > 8 ? ", .." : "");
}

struct Peer {
  Socket socket;
  int rank = -1;  ///< before its hello
  bool ended = false;
  Clock::time_point since = Clock::now();
};

}  // namespace

struct Meeting::State {
  explicit State(MeetingOptions given) : options(std::move(given)) {
    options.identity = packed(options.identity);
    greeting = greeting_of(options.rendezvous.job);
    came.assign(static_cast<size_t>(options.size), false);
    came[static_cast<size_t>(options.rank)] = true;
    wake = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    MT_CHECK_EXTERNAL(wake >= 0, "meeting: no eventfd: ", std::strerror(errno));
  }
  ~State() { ::close(wake); }

  bool serves() const { return options.rank == 0; }

  // ---- of the calling thread
  void listen();
  void find_rank_0();
  void wake_thread() const {
    const uint64_t one = 1;
    const ssize_t written = ::write(wake, &one, sizeof(one));
    static_cast<void>(written);
  }

  // ---- of the meeting's thread; the mutex is held but while polling and in the callbacks
  void serve();
  void poll_once();
  void take_line(Peer& peer, const std::string& line);
  void hello(Peer& peer, const std::string& line);
  void send_all(const std::string& line);
  void check_ends();
  void fail_all(const std::string& cause, bool mistake);

  MeetingOptions options;
  std::string greeting;
  Socket listener;
  int wake = -1;
  std::vector<Peer> peers;  ///< rank 0: all others; elsewhere: rank 0 alone
  Clock::time_point start = Clock::now();

  std::mutex mutex;
  std::condition_variable changed;
  std::vector<bool> came;
  bool ready = false;     ///< all have come
  bool returned = false;  ///< the constructor has: from now on the thread ends the process
  bool ending = false;    ///< end() was called here
  bool said_ending = false;
  bool over = false;  ///< all have called end()
  bool quit = false;  ///< the thread may return
  std::optional<int> port;
  bool port_sent = false;
  std::optional<std::string> own_cause;  ///< fail()
  bool own_cause_sent = false;
  std::optional<std::string> failure;
  bool failure_is_mistake = false;
  std::optional<Clock::time_point> stopped, lost_at, stop_said;
  int lost = -1;
  std::thread thread;
};

void Meeting::State::listen() {
  const topology::Rendezvous& r = options.rendezvous;
  int error = 0;
  for (const int candidate : r.ports) {
    listener = listen_on(candidate, r.one_host, error);
    if (listener.open()) return;
    if (error != EADDRINUSE && error != EACCES) break;
  }
  MT_CHECK_ARG(!r.port_is_given, "MASTER_PORT: ", r.ports.front(),
               " of this host cannot be listened on: ", std::strerror(error),
               "; expected a port that no other job uses");
  throw ExternalError(concat("none of the ports that follow from the launcher's job id (",
                             r.ports.front(), " ..) can be listened on: ", std::strerror(error),
                             "; set MASTER_PORT to a free one"));
}

void Meeting::State::find_rank_0() {
  const topology::Rendezvous& r = options.rendezvous;
  const std::string address = r.one_host ? "127.0.0.1" : r.address;
  milliseconds pause(20);
  while (true) {
    for (const int candidate : r.ports) {
      Socket socket = connect_to(address, candidate, kGreeting);
      if (!socket.open() || socket.wait_line(kGreeting) != greeting) continue;
      socket.send_line(concat("hello ", options.rank, " ", options.size, " ", options.identity));
      peers.push_back({std::move(socket), 0, false, Clock::now()});
      return;
    }
    MT_CHECK_EXTERNAL(Clock::now() - start < options.timeout, "rank ", options.rank,
                      ": rank 0 was not found at ", r.address, ", port ", r.ports.front(),
                      r.port_is_given ? "" : " and those after it", ", within ",
                      options.timeout.count() / 1000, " s");
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, milliseconds(500));
  }
}

void Meeting::State::send_all(const std::string& line) {
  for (Peer& peer : peers)
    if (peer.rank >= 0) peer.socket.send_line(line);
}

void Meeting::State::fail_all(const std::string& cause, bool mistake) {
  if (failure || stopped) return;
  failure = cause;
  failure_is_mistake = mistake;
  send_all(concat(mistake ? "mistake " : "fail ", cause));
  changed.notify_all();
}

void Meeting::State::hello(Peer& peer, const std::string& line) {
  int rank = -1, size = 0, consumed = 0;
  const int read = std::sscanf(line.c_str(), "hello %d %d %n", &rank, &size, &consumed);
  const auto refuse = [&](const std::string& why) {
    peer.socket.send_line("mistake " + why);
    peer.socket.close();
  };
  if (read != 2 || consumed == 0) return refuse("rank 0 does not understand this version");
  if (size != options.size || rank <= 0 || rank >= options.size) {
    const std::string why = concat("the launcher's ranks disagree: rank ", rank, " expects ", size,
                                   " ranks, rank 0 expects ", options.size);
    refuse(why);
    return fail_all(why, true);
  }
  if (came[static_cast<size_t>(rank)]) {
    return refuse(concat("rank ", rank, " has come already: another job uses port ",
                         options.rendezvous.ports.front(),
                         " of this host; set another MASTER_PORT"));
  }
  if (const std::string identity = line.substr(static_cast<size_t>(consumed));
      identity != options.identity) {
    const std::string why = concat("ranks were started with different configurations: rank ", rank,
                                   " has ", first_difference(options.identity, identity));
    refuse(why);
    return fail_all(why, true);
  }
  peer.rank = rank;
  came[static_cast<size_t>(rank)] = true;
  if (stopped) peer.socket.send_line("stop");
  if (failure) peer.socket.send_line("fail " + *failure);
  if (!ready && std::find(came.begin(), came.end(), false) == came.end()) {
    ready = true;
    send_all("all");
    changed.notify_all();
  }
}

void Meeting::State::take_line(Peer& peer, const std::string& line) {
  const auto rest = [&] { return line.substr(std::min(line.size(), line.find(' ') + 1)); };
  if (peer.rank < 0) return hello(peer, line);
  if (line == "stop") {
    stop_said.reset();  // rank 0 has passed it on
    if (!stopped && !failure) {
      stopped = Clock::now();
      if (serves()) send_all("stop");
    }
  } else if (line.rfind("fail ", 0) == 0 || line.rfind("mistake ", 0) == 0) {
    if (serves()) {
      fail_all(rest(), line[0] == 'm');
    } else if (!failure) {
      failure = rest();
      failure_is_mistake = line[0] == 'm';
      changed.notify_all();
    }
  } else if (line == "end") {
    peer.ended = true;
  } else if (line == "all") {
    ready = true;
  } else if (line.rfind("port ", 0) == 0) {
    port = std::atoi(rest().c_str());
  } else if (line == "go") {
    over = true;
  }
  changed.notify_all();
}

void Meeting::State::poll_once() {
  std::vector<pollfd> items{{wake, POLLIN, 0}};
  for (const Peer& peer : peers) items.push_back({peer.socket.fd(), POLLIN, 0});
  if (listener.open()) items.push_back({listener.fd(), POLLIN, 0});
  mutex.unlock();
  ::poll(items.data(), items.size(), 50);
  mutex.lock();
  uint64_t count = 0;
  const ssize_t woken = ::read(wake, &count, sizeof(count));
  static_cast<void>(woken);
  for (Peer& peer : peers) {
    if (!peer.socket.open()) continue;
    const bool alive = peer.socket.receive();
    while (auto line = peer.socket.line()) take_line(peer, *line);
    if (alive) continue;
    peer.socket.close();
    if (peer.rank >= 0 && !over && !lost_at) {
      lost = peer.rank;
      lost_at = Clock::now();
    }
  }
  std::erase_if(peers, [](const Peer& peer) {
    return peer.rank < 0 && (!peer.socket.open() || Clock::now() - peer.since > kGreeting);
  });
  if (!listener.open()) return;
  for (Socket socket = accept_from(listener); socket.open(); socket = accept_from(listener)) {
    socket.send_line(greeting);
    peers.push_back({std::move(socket), -1, false, Clock::now()});
  }
}

/// Whether all have come to the end, and whether somebody has ended the job.
void Meeting::State::check_ends() {
  const auto now = Clock::now();
  if (serves() && ready && ending && !over && !stopped && !failure &&
      std::all_of(peers.begin(), peers.end(),
                  [](const Peer& peer) { return peer.rank < 0 || peer.ended; })) {
    over = true;
    send_all("go");
    changed.notify_all();
  }
  if (over || own_cause) return;
  if (stop_wanted() && !stopped && !failure) {
    stopped = now;
    stop_said = now;
    send_all("stop");
  }
  if (lost_at && !stopped && now - *lost_at > kLastWords)
    fail_all(concat("rank ", lost, ": ended before the first step, without a word"), false);
  if (serves() && !ready && !stopped && now - start > options.timeout) {
    const auto arrived = std::count(came.begin(), came.end(), true);
    fail_all(concat(arrived, " of ", options.size, " ranks came within ",
                    options.timeout.count() / 1000, " s; missing: ", list_missing(came)),
             false);
  }
}

void Meeting::State::serve() {
  std::unique_lock lock(mutex);
  while (!quit) {
    poll_once();
    if (port && serves() && !port_sent) {
      send_all(concat("port ", *port));
      port_sent = true;
    }
    if (ending && !said_ending) {
      if (!serves()) send_all("end");
      said_ending = true;
    }
    if (own_cause && !own_cause_sent) {
      send_all("fail " + *own_cause);
      own_cause_sent = true;
      changed.notify_all();
    }
    check_ends();
    if (over || own_cause || quit) continue;
    if (failure && returned) {
      lock.unlock();
      options.on_failure(*failure);
      return;
    }
    if (!stopped) continue;
    // Rank 0 stays for those who have not come yet; the others until rank 0 has passed their word on.
    const bool all_told = std::find(came.begin(), came.end(), false) == came.end();
    const bool done = serves() ? all_told || Clock::now() - *stopped > kLinger
                               : !stop_said || lost_at || Clock::now() - *stop_said > kGreeting;
    if (done) {
      lock.unlock();
      options.on_stop();
      return;
    }
  }
}

Meeting::Meeting(MeetingOptions options) : state_(std::make_unique<State>(std::move(options))) {
  State& state = *state_;
  if (state.serves()) {
    state.listen();
  } else {
    state.find_rank_0();
  }
  state.thread = std::thread([&state] { state.serve(); });
  std::unique_lock lock(state.mutex);
  state.changed.wait(lock, [&] { return state.ready || state.failure; });
  state.returned = true;
  if (!state.failure) return;
  const std::string cause = *state.failure;
  const bool mistake = state.failure_is_mistake;
  state.quit = true;
  lock.unlock();
  state.wake_thread();
  state.thread.join();
  if (mistake) throw InvalidArgument(cause);
  throw ExternalError(cause);
}

Meeting::~Meeting() {
  if (!state_ || !state_->thread.joinable()) return;
  {
    const std::scoped_lock lock(state_->mutex);
    state_->quit = true;
  }
  state_->wake_thread();
  state_->thread.join();
}

int Meeting::share_port(int port) {
  State& state = *state_;
  std::unique_lock lock(state.mutex);
  if (state.serves()) state.port = port;
  state.wake_thread();
  state.changed.wait(lock, [&] { return state.port.has_value(); });
  return *state.port;
}

void Meeting::end() {
  State& state = *state_;
  {
    std::unique_lock lock(state.mutex);
    state.ending = true;
    state.wake_thread();
    state.changed.wait(lock, [&] { return state.over; });
    state.quit = true;
  }
  state.wake_thread();
  state.thread.join();
  state.peers.clear();
  state.listener.close();
}

void Meeting::fail(const std::string& cause) noexcept {
  State& state = *state_;
  if (!state.thread.joinable()) return;
  std::unique_lock lock(state.mutex);
  if (state.over || state.own_cause) return;
  state.own_cause = cause;
  state.wake_thread();
  state.changed.wait_for(lock, std::chrono::seconds(2), [&] { return state.own_cause_sent; });
}

}  // namespace mtraining::cli
