#include "mtraining/comm/c10d.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "mtraining/base/check.h"
#include "mtraining/comm/c10d_group.h"
#include "mtraining/comm/call.h"
#include "mtraining/comm/loopback.h"
#ifdef USE_C10D_NCCL
#include "mtraining/comm/peer_copies.h"
#endif

namespace mtraining::comm {
namespace {

using namespace c10d_detail;  // NOLINT: this file's other half

class C10dTransport : public Transport {
 public:
  C10dTransport(const C10dOptions& options, c10::intrusive_ptr<c10d::Store> store)
      : options_(options),
        store_(std::move(store)),
        board_(std::make_shared<FailureBoard>(store_, options.rank)) {
    device_ = make_device();
  }

  int rank() const override { return options_.rank; }
  int size() const override { return options_.size; }
  milliseconds timeout() const override { return options_.timeout; }
  bool on_device() const override { return options_.backend == "nccl"; }

  CommunicatorPtr open(const std::string& name, const std::vector<int>& members) override {
    return open(name, members, options_.backend == "nccl");
  }
  CommunicatorPtr open_host(const std::string& name, const std::vector<int>& members) override {
    return open(name, members, false);
  }

  CommunicatorPtr open_copies(const std::string& name, const std::vector<int>& members) override {
#ifdef USE_C10D_NCCL
    if (options_.backend == "nccl") {
      const CommunicatorPtr host = open_host(concat(name, ", where copies meet"), members);
      if (!host) return nullptr;
      auto made = make_peer_copies(
          name, {.host = host,
                 .current_stream = current_cuda_stream,
                 .failure = [board = board_] { return board->find(milliseconds(0)); },
                 .report = [board = board_](const std::string& cause) { board->report(cause); },
                 .timeout = options_.timeout});
      std::erase_if(copies_, [](const auto& weak) { return weak.expired(); });
      copies_.push_back(made);
      return made;
    }
#endif
    return Transport::open_copies(name, members);
  }

  void abort(const std::string& cause) noexcept override {
    board_->report(cause);
#ifdef USE_C10D_NCCL
    for (const auto& weak : copies_) {
      if (auto group = weak.lock()) group->break_off(cause);
    }
#endif
    break_all_connections();
  }

 private:
  /// All at once: one on a GPU may end only when others do that hold up its stream. Not waited for longer than a moment: whoever gives up
  /// ends, whatever the device does.
  void break_all_connections() noexcept {
    struct Left {
      std::mutex mutex;
      std::condition_variable changed;
      size_t groups = 0;
    };
    try {
      const auto left = std::make_shared<Left>();
      for (const std::weak_ptr<Communicator>& weak : groups_) {
        CommunicatorPtr group = weak.lock();
        if (!group) continue;
        {
          const std::lock_guard lock(left->mutex);
          ++left->groups;
        }
        std::thread([left, group = std::move(group)]() mutable {
          dynamic_cast<Breakable&>(*group).break_connections();
          group.reset();
          const std::lock_guard lock(left->mutex);
          --left->groups;
          left->changed.notify_all();
        }).detach();
      }
      std::unique_lock lock(left->mutex);
      left->changed.wait_for(lock, milliseconds(3000), [&] { return left->groups == 0; });
    } catch (...) {  // no thread to be had: the peers run into their timeout
    }
  }

  CommunicatorPtr open(const std::string& name, const std::vector<int>& members, bool nccl) {
    check_members(name, members, options_.size);
    const std::string prefix = concat("mtraining/group", opened_++);
    gather_all(prefix, name, members);
    const auto me = std::find(members.begin(), members.end(), options_.rank);
    if (me == members.end()) return nullptr;
    const int rank = static_cast<int>(me - members.begin());
    const int size = static_cast<int>(members.size());
    if (size == 1 && !nccl) {
      if (!single_) single_ = make_single();
      return single_->open(name, {0});
    }
    try {
      return connect(name, prefix, rank, size, nccl);
    } catch (const std::exception& e) {
      board_->raise(concat("rank ", options_.rank, ": opening ", describe_members(name, members)),
                    first_line(e));
    }
  }

  std::shared_ptr<gloo::transport::Device> make_device() const {
    if (const char* interface = std::getenv("GLOO_SOCKET_IFNAME"))
      return c10d::ProcessGroupGloo::createDeviceForInterface(interface);
    const bool one_host =
        options_.master_addr == "127.0.0.1" || options_.master_addr == "localhost";
    return one_host ? c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1")
                    : c10d::ProcessGroupGloo::createDefaultDevice();
  }

  CommunicatorPtr connect(const std::string& name, const std::string& prefix, int rank, int size,
                          [[maybe_unused]] bool nccl) {
    const GroupOptions group{name,   rank,
                             size,   c10::make_intrusive<c10d::PrefixStore>(prefix, store_),
                             board_, options_.timeout};
    CommunicatorPtr made;
#ifdef USE_C10D_NCCL
    if (nccl) made = make_nccl_group(group);
#endif
    if (!made) made = make_gloo_group(group, device_);
    std::erase_if(groups_, [](const auto& weak) { return weak.expired(); });
    groups_.push_back(made);
    return made;
  }

  /// Waits until all ranks of the job have come to this open with the same name and members, or one has failed.
  void gather_all(const std::string& prefix, const std::string& name,
                  const std::vector<int>& members) {
    const std::string mine = describe_members(name, members);
    const std::string what = concat("rank ", options_.rank, ": opening ", mine);
    const std::string where =
        concat("the store at ", options_.master_addr, ":", options_.master_port);
    const auto deadline = steady_clock::now() + options_.timeout;
    const auto timeout = concat("timeout after ", options_.timeout.count(), " ms");
    const auto ask = [&](auto question) {
      const auto left = std::chrono::duration_cast<milliseconds>(deadline - steady_clock::now()) +
                        FailureBoard::kAnswer;
      const auto answer = board_->ask(left, std::move(question));
      MT_CHECK_EXTERNAL(answer.has_value(), what, ": ", where, " does not answer: ", timeout);
      return *answer;
    };
    const auto arrive = [&](int64_t ranks) {
      return ask(
          [store = store_, key = prefix + "/arrived", ranks] { return store->add(key, ranks); });
    };
    try {
      const std::string other = ask([store = store_, key = prefix + "/members", mine] {
        const std::vector<uint8_t> kept =
            store->compareSet(key, {}, std::vector<uint8_t>(mine.begin(), mine.end()));
        return std::string(kept.begin(), kept.end());
      });
      if (other != mine) {
        const std::string cause = concat("ranks open different communicators: rank ", options_.rank,
                                         " opens ", mine, ", another rank ", other);
        board_->report(cause);  // the others wait for this rank's arrival
        throw InvalidArgument(cause);
      }
      int64_t arrived = arrive(1);
      for (milliseconds pause(1); arrived < options_.size;
           pause = std::min(2 * pause, milliseconds(50))) {
        const std::string cause = board_->find(milliseconds(0));
        MT_CHECK_EXTERNAL(cause.empty(), what, ": first cause: ", cause);
        MT_CHECK_EXTERNAL(steady_clock::now() < deadline, what, ": ", timeout, ": ", arrived,
                          " of ", options_.size, " ranks came");
        std::this_thread::sleep_for(pause);
        arrived = arrive(0);
      }
    } catch (const Error&) {
      throw;
    } catch (const std::exception& e) {
      throw ExternalError(concat(what, ": ", where, ": ", first_line(e)));
    }
  }

  C10dOptions options_;
  c10::intrusive_ptr<c10d::Store> store_;
  FailureBoardPtr board_;
  std::shared_ptr<gloo::transport::Device> device_;
  std::unique_ptr<Transport> single_;
  std::vector<std::weak_ptr<Communicator>> groups_;
#ifdef USE_C10D_NCCL
  std::vector<std::weak_ptr<PeerCopiesCommunicator>> copies_;
#endif
  int64_t opened_ = 0;
};

}  // namespace

std::unique_ptr<Transport> make_c10d(const C10dOptions& given) {
  C10dOptions options = given;
  MT_CHECK_ARG(options.size >= 1 && options.rank >= 0 && options.rank < options.size,
               "c10d: expected 0 <= rank < size, got rank ", options.rank, " of ", options.size);
  MT_CHECK_ARG(options.backend == "gloo" || options.backend == "nccl",
               "c10d: expected backend gloo or nccl, got '", options.backend, "'");
#ifndef USE_C10D_NCCL
  MT_CHECK_SUPPORTED(
      options.backend == "gloo",
      "c10d: backend nccl: this build has no CUDA; use gloo or build with MTRAINING_CUDA=ON");
#endif
  const bool serves = options.rank == 0;
  if (options.share_port && !serves) options.master_port = options.share_port(0);
  const bool any_port = options.share_port && serves;
  MT_CHECK_ARG(any_port || (options.master_port > 0 && options.master_port < 65536),
               "c10d: expected a master_port in [1, 65535], got ", options.master_port);
  c10d::TCPStoreOptions store_options;
  store_options.port = any_port ? 0 : static_cast<uint16_t>(options.master_port);
  store_options.isServer = serves;
  // With a port to share the store would wait for ranks that do not know it yet; opening a communicator waits for all of them.
  if (!options.share_port) store_options.numWorkers = static_cast<size_t>(options.size);
  store_options.timeout = options.timeout;
  try {
    auto store = c10::make_intrusive<c10d::TCPStore>(options.master_addr, store_options);
    if (any_port) options.master_port = options.share_port(store->getPort());
    return std::make_unique<C10dTransport>(options, std::move(store));
  } catch (const Error&) {
    throw;
  } catch (const std::exception& e) {
    throw ExternalError(concat("c10d: rank ", options.rank, " of ", options.size,
                               " cannot meet the others at ", options.master_addr, ":",
                               options.master_port, ": ", first_line(e)));
  }
}

std::unique_ptr<Transport> make_c10d_over(const c10::IValue& group,
                                          const GroupTransportOptions& options) {
  const auto process_group = group.toCustomClass<c10d::ProcessGroup>();
  const std::vector<int64_t>& members = options.members;
  for (int64_t rank : members) {
    MT_CHECK_ARG(rank >= 0 && rank < process_group->getSize(),
                 "members: expected ranks of the group, 0 .. ", process_group->getSize() - 1,
                 ", got ", rank);
    MT_CHECK_ARG(std::count(members.begin(), members.end(), rank) == 1, "members: rank ", rank,
                 " is named twice");
  }
  const auto me = std::find(members.begin(), members.end(), process_group->getRank());
  MT_CHECK_ARG(me != members.end(), "members: rank ", process_group->getRank(),
               " of the group is not among them");
  C10dOptions c10d_options;
  c10d_options.master_addr = options.master_addr;
  c10d_options.rank = static_cast<int>(me - members.begin());
  c10d_options.size = static_cast<int>(members.size());
  c10d_options.timeout = options.timeout;
#ifndef USE_C10D_NCCL
  MT_CHECK_SUPPORTED(!options.on_device,
                     "c10d: tensors on GPUs: this build has no CUDA; build with MTRAINING_CUDA=ON");
#endif
  if (options.on_device) c10d_options.backend = "nccl";
  return std::make_unique<C10dTransport>(
      c10d_options, c10::make_intrusive<c10d::PrefixStore>(concat("mtraining/", options.scope),
                                                           process_group->getStore()));
}

HeldPort::HeldPort() : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
  MT_CHECK_EXTERNAL(fd_ >= 0, "a free port: socket: ", std::strerror(errno));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  // Reuse is allowed after the port is chosen: before, one that somebody else holds could be chosen too.
  const int yes = 1;
  const bool bound = ::bind(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0 &&
                     ::getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &length) == 0 &&
                     ::setsockopt(fd_, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes)) == 0;
  const std::string cause = bound ? "" : std::strerror(errno);
  if (!bound) ::close(fd_);
  MT_CHECK_EXTERNAL(bound, "a free port: ", cause);
  port_ = ntohs(address.sin_port);
}

HeldPort::~HeldPort() { ::close(fd_); }

int free_port() { return HeldPort().port(); }

}  // namespace mtraining::comm
