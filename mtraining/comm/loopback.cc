#include "mtraining/comm/loopback.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <initializer_list>
#include <map>
#include <mutex>
#include <sstream>
#include <thread>

#include "mtraining/base/check.h"
#include "mtraining/comm/call.h"
#include "mtraining/comm/loopback_memory.h"
#include "mtraining/comm/reduce.h"

namespace mtraining::comm {
namespace {

using Mark = LoopbackMemory::Mark;

/// kDone: moved, or on a GPU enqueued, to be over with the mark `moved`.
enum class Progress { kPosted, kMoving, kDone, kCancelled };
/// Whom to tell before it is kDone.
using Thens = std::vector<std::function<void()>>;

/// One direction of an exchange as one rank called it. Guarded by World::mutex but for the bytes while kMoving.
struct Half {
  int job_rank = 0;
  std::string text;  // the whole call
  int64_t collectives =
      0;  // that this rank called before: exchanges and collectives must interleave alike on both sides
  std::vector<ConstBuffer> send;
  std::vector<Buffer> recv;
  Mark ready = {};  // of the rank's thread when it called
  Mark moved = {};
  Progress progress = Progress::kPosted;
  Thens then = {};
};
using HalfPtr = std::shared_ptr<Half>;

/// One collective of a group, waiting for its members. Guarded like Half.
struct Collective {
  Call call;
  int first_rank = 0;  // job rank that called first
  int arrived = 0;
  std::vector<std::vector<ConstBuffer>> send;  // by group rank
  std::vector<std::vector<Buffer>> recv;
  std::vector<Mark> ready;  // by group rank
  std::vector<Mark> moved;
  Progress progress = Progress::kPosted;
  Thens then;
};
using CollectivePtr = std::shared_ptr<Collective>;

struct Group {
  int64_t number = 0;
  std::string name;
  std::vector<int> members;
  LoopbackMemory* memory = nullptr;
  struct Mailbox {
    std::deque<HalfPtr> sends, recvs;
  };
  std::map<std::pair<int, int>, Mailbox> mailboxes;  // (from, to)
  std::map<int64_t, CollectivePtr> collectives;      // by sequence
};

class HostMemory : public LoopbackMemory {
 public:
  bool on_device() const override { return false; }
  Mark mark() override { return {}; }
  void await(const Mark& /*mark*/) override {}
  Mark copy(const Line& /*line*/, std::span<const Mark> /*after*/, int /*from*/,
            std::span<const Copy> copies) override {
    for (const Copy& part : copies) {
      if (part.bytes > 0 && part.to != part.from)
        std::memmove(part.to, part.from, static_cast<size_t>(part.bytes));
    }
    return {};
  }
  Mark reduce(const Line& /*line*/, std::span<const Mark> /*after*/,
              std::span<const int> /*senders*/, ElementType type, ReduceOp op, int64_t count,
              std::span<const void* const> sources, std::span<void* const> destinations) override {
    comm::reduce(type, op, count, sources, destinations);
    return {};
  }
};

void run_collective(const Group& group, Collective& collective) {
  const int size = static_cast<int>(collective.recv.size());
  const Call& call = collective.call;
  const int64_t count = call.bytes / size_of(call.type);
  std::vector<const void*> sources(static_cast<size_t>(size));
  LoopbackMemory& memory = *group.memory;
  const auto line = [&](int to) { return LoopbackMemory::Line{group.number, group.members[to]}; };
  const auto copy = [&](int to, int from, const void* data, void* destination) {
    const LoopbackMemory::Copy part = {data, destination, call.bytes};
    const Mark after[] = {collective.ready[from], collective.ready[to]};
    return memory.copy(line(to), after, group.members[from], {&part, 1});
  };
  switch (call.kind) {
    case CallKind::kAllGather:
      for (int to = 0; to < size; ++to) {
        Mark last;  // a line keeps its order
        // The next one first, so that not all ranks ask the same one.
        for (int step = 0; step < size; ++step) {
          const int from = (to + step) % size;
          last = copy(to, from, collective.send[from][0].data, collective.recv[to][from].data);
        }
        collective.moved.push_back(last);
      }
      return;
    case CallKind::kReduceScatter:
      for (int to = 0; to < size; ++to) {
        for (int from = 0; from < size; ++from) sources[from] = collective.send[from][to].data;
        void* const destination = collective.recv[to][0].data;
        collective.moved.push_back(memory.reduce(line(to), collective.ready, group.members,
                                                 call.type, ReduceOp::kSum, count, sources,
                                                 {&destination, 1}));
      }
      return;
    case CallKind::kAllReduce: {
      std::vector<void*> destinations;
      for (int r = 0; r < size; ++r) {
        sources[r] = collective.send[r][0].data;
        destinations.push_back(collective.recv[r][0].data);
      }
      collective.moved.push_back(memory.reduce(line(0), collective.ready, {}, call.type, call.op,
                                               count, sources, destinations));
      return;
    }
    case CallKind::kBroadcast:
      for (int to = 0; to < size; ++to) {
        collective.moved.push_back(
            copy(to, call.root, collective.recv[call.root][0].data, collective.recv[to][0].data));
      }
      return;
    case CallKind::kBarrier:
      return;
  }
}

/// What the ranks of one run share.
class World {
 public:
  World(int size, std::chrono::milliseconds timeout, LoopbackMemory* device)
      : size_(size),
        timeout_(timeout),
        device_(device),
        wake_(static_cast<size_t>(size)),
        waits_(static_cast<size_t>(size)),
        finished_(static_cast<size_t>(size), false),
        opened_(static_cast<size_t>(size), 0) {}

  std::chrono::milliseconds timeout() const { return timeout_; }
  int size() const { return size_; }
  bool on_device() const { return device_ != nullptr; }

  std::shared_ptr<Group> open(int rank, const std::string& name, const std::vector<int>& members,
                              bool in_host_memory) {
    check_members(name, members, size_);
    std::unique_lock lock(mutex_);
    throw_if_failed(concat("open ", describe_members(name, members)));
    const size_t number = opened_[rank]++;
    LoopbackMemory* const memory = in_host_memory || device_ == nullptr ? &host_ : device_;
    if (number == groups_.size()) {
      groups_.push_back(std::make_shared<Group>(
          Group{static_cast<int64_t>(number), name, members, memory, {}, {}}));
      openers_.push_back(rank);
    }
    const Group& group = *groups_[number];
    MT_CHECK_ARG(group.name == name && group.members == members && group.memory == memory,
                 "ranks open different communicators as number ", number, ": rank ",
                 openers_[number], " opens ", describe_members(group.name, group.members),
                 ", rank ", rank, " opens ", describe_members(name, members));
    return groups_[number];
  }

  void post(Group& group, std::pair<int, int> way, const HalfPtr& half, bool is_send) {
    std::unique_lock lock(mutex_);
    throw_if_failed(concat("communicator '", group.name, "', ", half->text));
    Group::Mailbox& box = group.mailboxes[way];
    std::deque<HalfPtr>& own = is_send ? box.sends : box.recvs;
    std::deque<HalfPtr>& other = is_send ? box.recvs : box.sends;
    if (other.empty()) {
      own.push_back(half);
      return;
    }
    const HalfPtr peer = other.front();
    other.pop_front();
    const Half& sender = is_send ? *half : *peer;
    const Half& receiver = is_send ? *peer : *half;
    check_match(group, sender, receiver);
    half->progress = peer->progress = Progress::kMoving;
    lock.unlock();
    std::vector<LoopbackMemory::Copy> copies;
    for (size_t p = 0; p < sender.send.size(); ++p)
      copies.push_back({sender.send[p].data, receiver.recv[p].data, sender.send[p].bytes});
    const Mark after[] = {sender.ready, receiver.ready};
    const auto end_with = [&](Progress progress) {
      half->progress = peer->progress = progress;
      wake_[peer->job_rank].notify_all();
    };
    try {
      half->moved = peer->moved =
          group.memory->copy({group.number, receiver.job_rank}, after, sender.job_rank, copies);
      tell(lock, {&half->then, &peer->then});
    } catch (...) {
      if (!lock.owns_lock()) lock.lock();
      end_with(Progress::kCancelled);
      throw;
    }
    end_with(Progress::kDone);
  }

  /// Tells `then` at once where it is done; else whoever moves its bytes does.
  void when_done(const Progress& progress, Thens& then, const std::function<void()>& told) {
    {
      const std::lock_guard lock(mutex_);
      if (progress != Progress::kDone) then.push_back(told);
      if (progress != Progress::kDone) return;
    }
    told();
  }

  CollectivePtr join(Group& group, int group_rank, const Call& call, std::vector<ConstBuffer> send,
                     std::vector<Buffer> recv) {
    const int rank = group.members[group_rank];
    const Mark ready = group.memory->mark();
    std::unique_lock lock(mutex_);
    throw_if_failed(concat("communicator '", group.name, "', ", describe(call)));
    CollectivePtr& place = group.collectives[call.sequence];
    if (!place) {
      place = std::make_shared<Collective>();
      place->call = call;
      place->first_rank = rank;
      place->send.resize(group.members.size());
      place->recv.resize(group.members.size());
      place->ready.resize(group.members.size());
    }
    const CollectivePtr collective = place;
    MT_CHECK_ARG(collective->call == call, "communicator '", group.name,
                 "': ranks call different collectives: rank ", collective->first_rank, " calls ",
                 describe(collective->call), ", rank ", rank, " calls ", describe(call));
    collective->send[group_rank] = std::move(send);
    collective->recv[group_rank] = std::move(recv);
    collective->ready[group_rank] = ready;
    if (++collective->arrived < static_cast<int>(group.members.size()) ||
        collective->progress == Progress::kCancelled) {
      return collective;
    }
    group.collectives.erase(call.sequence);
    collective->progress = Progress::kMoving;
    lock.unlock();
    const auto end_with = [&](Progress progress) {
      collective->progress = progress;
      for (int member : group.members) wake_[member].notify_all();
    };
    try {
      run_collective(group, *collective);
      tell(lock, {&collective->then});
    } catch (...) {
      if (!lock.owns_lock()) lock.lock();
      end_with(Progress::kCancelled);
      throw;
    }
    end_with(Progress::kDone);
    return collective;
  }

  /// Blocks until every one of `parts` is done.
  void await(int rank, std::vector<const Progress*> parts, const std::string& text) {
    std::unique_lock lock(mutex_);
    const auto deadline = std::chrono::steady_clock::now() + timeout_;
    waits_[rank] = {std::move(parts), &text};
    while (!failed_ && blocked(rank)) {
      if (all_blocked()) {
        fail_locked(rank, std::make_exception_ptr(ExternalError(deadlock_text())), true);
        break;
      }
      if (wake_[rank].wait_until(lock, deadline) == std::cv_status::timeout && blocked(rank) &&
          !failed_) {
        fail_locked(rank,
                    std::make_exception_ptr(ExternalError(concat(
                        "rank ", rank, ": ", text, ": timeout after ", timeout_.count(), " ms"))),
                    true);
      }
    }
    const bool done = !blocked(rank);
    waits_[rank] = {};
    if (!done) throw_if_failed(text);
  }

  /// Before the buffers of an unfinished call may go away: nobody reads or writes them afterwards.
  void cancel(int rank, Progress& progress, Thens& then) {
    std::unique_lock lock(mutex_);
    wake_[rank].wait(lock, [&] { return progress != Progress::kMoving; });
    if (progress != Progress::kPosted) return;
    progress = Progress::kCancelled;
    then.clear();
  }

  void remove(Group& group, std::pair<int, int> way, const HalfPtr& half) {
    std::unique_lock lock(mutex_);
    Group::Mailbox& box = group.mailboxes[way];
    std::erase(box.sends, half);
    std::erase(box.recvs, half);
  }

  void fail(int rank, std::exception_ptr error) {
    std::unique_lock lock(mutex_);
    fail_locked(rank, std::move(error), false);
  }

  void finish(int rank) {
    std::unique_lock lock(mutex_);
    finished_[rank] = true;
    if (!failed_ && all_blocked() &&
        std::find(finished_.begin(), finished_.end(), false) != finished_.end()) {
      fail_locked(rank, std::make_exception_ptr(ExternalError(deadlock_text())), true);
    }
  }

  std::exception_ptr first_error() {
    std::unique_lock lock(mutex_);
    return first_error_;
  }

 private:
  struct Wait {
    std::vector<const Progress*> parts;  // empty: the rank is running
    const std::string* text = nullptr;
  };

  /// Until nobody is left to be told. Returns with the lock, which nobody who is told needs.
  static void tell(std::unique_lock<std::mutex>& lock, std::initializer_list<Thens*> lists) {
    if (!lock.owns_lock()) lock.lock();
    for (bool told = true; told;) {
      told = false;
      for (Thens* list : lists) {
        Thens now;
        now.swap(*list);
        if (now.empty()) continue;
        told = true;
        lock.unlock();
        for (const auto& then : now) then();
        lock.lock();
      }
    }
  }

  bool blocked(int rank) const {
    return std::any_of(waits_[rank].parts.begin(), waits_[rank].parts.end(),
                       [](const Progress* p) { return *p != Progress::kDone; });
  }

  bool all_blocked() const {
    for (int r = 0; r < size_; ++r) {
      if (finished_[r]) continue;
      if (!blocked(r)) return false;
      for (const Progress* part : waits_[r].parts) {
        if (*part == Progress::kMoving) return false;
      }
    }
    return true;
  }

  std::string deadlock_text() const {
    std::ostringstream out;
    out << "all ranks wait for one another: ";
    for (int r = 0; r < size_; ++r) {
      out << (r ? "; " : "") << "rank " << r << " ";
      if (finished_[r]) {
        out << "has returned";
      } else {
        out << "is in " << *waits_[r].text;
      }
    }
    return out.str();
  }

  void check_match(const Group& group, const Half& sender, const Half& receiver) const {
    MT_CHECK_ARG(part_bytes(sender.send) == part_bytes(receiver.recv), "communicator '", group.name,
                 "': an exchange does not match: rank ", sender.job_rank, " in ", sender.text,
                 "; rank ", receiver.job_rank, " in ", receiver.text);
    MT_CHECK_ARG(sender.collectives == receiver.collectives, "communicator '", group.name,
                 "': ranks order exchanges and collectives differently: rank ", sender.job_rank,
                 " in ", sender.text, " after ", sender.collectives, " collectives; rank ",
                 receiver.job_rank, " in ", receiver.text, " after ", receiver.collectives,
                 " collectives");
  }

  void throw_if_failed(const std::string& text) const {
    if (failed_) {
      throw ExternalError(failed_alone_
                              ? cause_
                              : concat(text, ": rank ", failed_rank_, " failed first: ", cause_));
    }
  }

  void fail_locked(int rank, std::exception_ptr error, bool alone) {
    if (failed_) return;
    failed_ = true;
    failed_alone_ = alone;
    failed_rank_ = rank;
    first_error_ = error;
    try {
      std::rethrow_exception(error);
    } catch (const std::exception& e) {
      cause_ = e.what();
    } catch (...) {
      cause_ = "unknown exception";
    }
    for (auto& wake : wake_) wake.notify_all();
  }

  const int size_;
  const std::chrono::milliseconds timeout_;
  HostMemory host_;
  LoopbackMemory* const device_;  // null: none
  std::mutex mutex_;
  std::vector<std::condition_variable> wake_;  // by rank
  std::vector<Wait> waits_;                    // by rank
  std::vector<bool> finished_;
  std::vector<size_t> opened_;  // by rank: how many communicators it opened
  std::vector<std::shared_ptr<Group>> groups_;
  std::vector<int> openers_;  // who opened each group first
  bool failed_ = false;
  bool failed_alone_ = false;  // the cause says by itself which ranks it concerns
  int failed_rank_ = -1;
  std::string cause_;
  std::exception_ptr first_error_;
};

/// For a call that nobody waited for: its buffers may be used again by what the thread enqueues next.
void await_moved_unless_failing(const std::vector<Mark>& moved, LoopbackMemory& memory) noexcept {
  try {
    for (const Mark& mark : moved) memory.await(mark);
  } catch (...) {  // a device that fails says so to whoever uses it next
  }
}

class ExchangeWork : public Work {
 public:
  ExchangeWork(std::shared_ptr<World> world, std::shared_ptr<Group> group, int rank, int to,
               int from, HalfPtr send, HalfPtr recv)
      : world_(std::move(world)),
        group_(std::move(group)),
        rank_(rank),
        to_(to),
        from_(from),
        send_(std::move(send)),
        recv_(std::move(recv)) {}

  ~ExchangeWork() override {
    if (finished_) return;
    const int job_rank = group_->members[rank_];
    world_->remove(*group_, {rank_, to_}, send_);
    world_->remove(*group_, {from_, rank_}, recv_);
    world_->cancel(job_rank, send_->progress, send_->then);
    world_->cancel(job_rank, recv_->progress, recv_->then);
    await_moved_unless_failing({send_->moved, recv_->moved}, *group_->memory);
  }

  void wait() override {
    if (!finished_) {
      world_->await(group_->members[rank_], {&send_->progress, &recv_->progress},
                    concat("communicator '", group_->name, "', ", send_->text));
    }
    finished_ = true;
    group_->memory->await(send_->moved);
    group_->memory->await(recv_->moved);
  }
  void when_enqueued(const Then& then) override {
    const auto half_done = [then, left = std::make_shared<std::atomic<int>>(2), group = group_,
                            send = std::weak_ptr(send_), recv = std::weak_ptr(recv_)] {
      if (--*left > 0) return;
      const HalfPtr sent = send.lock(), received = recv.lock();
      if (!sent || !received) return;
      then([&] {
        group->memory->await(sent->moved);
        group->memory->await(received->moved);
      });
    };
    world_->when_done(send_->progress, send_->then, half_done);
    world_->when_done(recv_->progress, recv_->then, half_done);
  }

 private:
  std::shared_ptr<World> world_;
  std::shared_ptr<Group> group_;
  int rank_, to_, from_;
  HalfPtr send_, recv_;
  bool finished_ = false;
};

class CollectiveWork : public Work {
 public:
  CollectiveWork(std::shared_ptr<World> world, std::shared_ptr<Group> group, int rank,
                 CollectivePtr collective)
      : world_(std::move(world)),
        group_(std::move(group)),
        rank_(rank),
        collective_(std::move(collective)) {}

  ~CollectiveWork() override {
    if (finished_) return;
    world_->cancel(group_->members[rank_], collective_->progress, collective_->then);
    await_moved_unless_failing(collective_->moved, *group_->memory);
  }

  void wait() override {
    if (!finished_) {
      world_->await(group_->members[rank_], {&collective_->progress},
                    concat("communicator '", group_->name, "', ", describe(collective_->call)));
    }
    finished_ = true;
    for (const Mark& mark : collective_->moved) group_->memory->await(mark);
  }
  void when_enqueued(const Then& then) override {
    const auto done = [then, group = group_, collective = std::weak_ptr(collective_)] {
      const CollectivePtr moved = collective.lock();
      if (!moved) return;
      then([&] {
        for (const Mark& mark : moved->moved) group->memory->await(mark);
      });
    };
    world_->when_done(collective_->progress, collective_->then, done);
  }

 private:
  std::shared_ptr<World> world_;
  std::shared_ptr<Group> group_;
  int rank_;
  CollectivePtr collective_;
  bool finished_ = false;
};

class LoopbackCommunicator : public Communicator {
 public:
  LoopbackCommunicator(std::shared_ptr<World> world, std::shared_ptr<Group> group, int rank)
      : world_(std::move(world)), group_(std::move(group)), rank_(rank) {}
  bool needs_multiprocessors() const override { return group_->memory->on_device(); }

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(group_->members.size()); }
  const std::string& name() const override { return group_->name; }

  WorkPtr exchange(int to, std::vector<ConstBuffer> send, int from,
                   std::vector<Buffer> recv) override {
    check_exchange(*this, to, send, from, recv);
    ++counters_.calls;
    if (to != rank_) {
      for (const ConstBuffer& part : send) counters_.bytes_sent += part.bytes;
    }
    const int job_rank = group_->members[rank_];
    const std::string text =
        describe_exchange(exchanges_++, to, part_bytes(send), from, part_bytes(recv));
    const Mark ready = group_->memory->mark();
    auto send_half =
        std::make_shared<Half>(Half{job_rank, text, collectives_, std::move(send), {}, ready});
    auto recv_half =
        std::make_shared<Half>(Half{job_rank, text, collectives_, {}, std::move(recv), ready});
    // Made before posting: if posting the second half throws, it takes the first one back.
    auto work =
        std::make_unique<ExchangeWork>(world_, group_, rank_, to, from, send_half, recv_half);
    world_->post(*group_, {rank_, to}, send_half, true);
    world_->post(*group_, {from, rank_}, recv_half, false);
    return work;
  }

  WorkPtr all_gather(ConstBuffer send, std::vector<Buffer> recv) override {
    const Call call = check_all_gather(*this, send, recv);
    return collective(call, {send}, std::move(recv));
  }

  WorkPtr reduce_scatter(std::vector<ConstBuffer> send, Buffer recv, ElementType type) override {
    const Call call = check_reduce_scatter(*this, send, recv, type);
    return collective(call, std::move(send), {recv});
  }

  WorkPtr all_reduce(Buffer data, ElementType type, ReduceOp op) override {
    const Call call = check_all_reduce(*this, data, type, op);
    return collective(call, {{data.data, data.bytes}}, {data});
  }

  WorkPtr broadcast(Buffer data, int root) override {
    return collective(check_broadcast(*this, data, root), {}, {data});
  }

  void barrier() override { collective(Call{}, {}, {})->wait(); }

 private:
  WorkPtr collective(Call call, std::vector<ConstBuffer> send, std::vector<Buffer> recv) {
    call.sequence = collectives_++;
    ++counters_.calls;
    counters_.bytes_sent += payload_bytes(call, rank_, size());
    return std::make_unique<CollectiveWork>(
        world_, group_, rank_,
        world_->join(*group_, rank_, call, std::move(send), std::move(recv)));
  }

  std::shared_ptr<World> world_;
  std::shared_ptr<Group> group_;
  int rank_;
  int64_t exchanges_ = 0, collectives_ = 0;
};

class LoopbackTransport : public Transport {
 public:
  LoopbackTransport(std::shared_ptr<World> world, int rank)
      : world_(std::move(world)), rank_(rank) {}

  int rank() const override { return rank_; }
  int size() const override { return world_->size(); }
  std::chrono::milliseconds timeout() const override { return world_->timeout(); }

  bool on_device() const override { return world_->on_device(); }

  CommunicatorPtr open(const std::string& name, const std::vector<int>& members) override {
    return open(name, members, /*in_host_memory=*/false);
  }
  CommunicatorPtr open_host(const std::string& name, const std::vector<int>& members) override {
    return open(name, members, /*in_host_memory=*/true);
  }

  void abort(const std::string& cause) noexcept override {
    try {
      world_->fail(rank_, std::make_exception_ptr(ExternalError(cause)));
    } catch (...) {  // out of memory while saying so: the others run into their timeout
    }
  }

 private:
  CommunicatorPtr open(const std::string& name, const std::vector<int>& members,
                       bool in_host_memory) {
    std::shared_ptr<Group> group = world_->open(rank_, name, members, in_host_memory);
    const auto me = std::find(members.begin(), members.end(), rank_);
    if (me == members.end()) return nullptr;
    return std::make_shared<LoopbackCommunicator>(world_, std::move(group),
                                                  static_cast<int>(me - members.begin()));
  }

  std::shared_ptr<World> world_;
  int rank_;
};

}  // namespace

void run_loopback_over(LoopbackMemory* device, int ranks,
                       const std::function<void(Transport&)>& body,
                       std::chrono::milliseconds timeout) {
  MT_CHECK_ARG(ranks >= 1, "run_loopback: expected at least one rank, got ", ranks);
  auto world = std::make_shared<World>(ranks, timeout, device);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        LoopbackTransport transport(world, rank);
        body(transport);
      } catch (...) {
        world->fail(rank, std::current_exception());
      }
      world->finish(rank);
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (std::exception_ptr error = world->first_error()) std::rethrow_exception(error);
}

void run_loopback(int ranks, const std::function<void(Transport&)>& body,
                  std::chrono::milliseconds timeout) {
  run_loopback_over(nullptr, ranks, body, timeout);
}

std::unique_ptr<Transport> make_single() {
  return std::make_unique<LoopbackTransport>(
      std::make_shared<World>(1, std::chrono::seconds(60), nullptr), 0);
}

}  // namespace mtraining::comm
