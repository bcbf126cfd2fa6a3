// Peer copies over a runtime of the host: what no device does when asked to. Ranks are threads that take themselves for processes.
#include <gtest/gtest.h>

#include <thread>

#include "mtraining/base/check.h"
#include "mtraining/comm/fake_cuda.h"
#include "mtraining/comm/loopback.h"
#include "mtraining/comm/peer_copies.h"
#include "mtraining/comm/transport_laws.h"

namespace mtraining::comm {
namespace {

using fake_cuda::device;
using laws::all_ranks;
using std::chrono::milliseconds;
using std::chrono::steady_clock;
using Bytes = std::vector<unsigned char>;

double seconds_since(steady_clock::time_point start) {
  return std::chrono::duration<double>(steady_clock::now() - start).count();
}

struct Rank {
  Transport& transport;
  fake_cuda::Stream& stream;
  int rank() const { return transport.rank(); }
  PeerCopiesOptions options(const CommunicatorPtr& host) const {
    return {.host = host,
            .current_stream = [s = &stream] { return static_cast<void*>(s->get()); },
            .failure = {},
            .report = {},
            .timeout = milliseconds(20000)};
  }
  std::shared_ptr<PeerCopiesCommunicator> open() const {
    return make_peer_copies("copies", options(transport.open("host", all_ranks(transport))));
  }
  void meet() const { transport.open("meet", all_ranks(transport))->barrier(); }
};

/// `body` on each rank; afterwards nothing that CUDA gave is left.
void on_ranks(int size, const std::function<void(const Rank&)>& body) {
  run_loopback(
      size,
      [&](Transport& transport) {
        fake_cuda::process_of_thread = 1000 + transport.rank();
        fake_cuda::Stream stream;
        body({transport, stream});
        transport.open("the end", all_ranks(transport))->barrier();
      },
      std::chrono::seconds(30));
}
void expect_nothing_left() {
  EXPECT_EQ(device().memory.size(), 0);
  EXPECT_EQ(device().mappings, 0);
  EXPECT_EQ(device().events, 0);
  EXPECT_EQ(device().streams.size(), 0);
  EXPECT_EQ(std::exchange(device().waits_while_busy, 0), 0);
}

WorkPtr hop(Communicator& group, const Bytes& mine, Bytes& got) {
  const int size = group.size(), next = (group.rank() + 1) % size,
            previous = (group.rank() + size - 1) % size;
  return group.exchange(next, {{mine.data(), std::ssize(mine)}}, previous,
                        {{got.data(), std::ssize(got)}});
}

TEST(PeerCopiesOnHost, BytesOfEverySizeArriveAndNothingIsLeft) {
  on_ranks(3, [](const Rank& rank) {
    auto group = rank.open();
    for (int call = 0; call < 30; ++call) {
      const size_t bytes = 1 + static_cast<size_t>(call * 7919) % 3000 * (call < 15 ? 1 : 1000);
      Bytes mine(bytes, static_cast<unsigned char>(10 * rank.rank() + call)), got(bytes),
          all(3 * bytes);
      const WorkPtr moved = hop(*group, mine, got);
      std::vector<Buffer> parts;
      for (int r = 0; r < 3; ++r) parts.push_back({&all[r * bytes], std::ssize(mine)});
      group->all_gather({mine.data(), std::ssize(mine)}, parts)->wait();
      moved->wait();
      EXPECT_EQ(got, Bytes(bytes, static_cast<unsigned char>(10 * ((rank.rank() + 2) % 3) + call)));
      for (int r = 0; r < 3; ++r)
        EXPECT_EQ(all[(r + 1) * bytes - 1], static_cast<unsigned char>(10 * r + call));
    }
    rank.meet();
    group.reset();
    rank.meet();
  });
  expect_nothing_left();
}

TEST(PeerCopiesOnHost, ADroppedTransferWritesNowhereAndTheNextOneIsRight) {
  on_ranks(2, [](const Rank& rank) {
    auto group = rank.open();
    const Bytes mine(100, static_cast<unsigned char>(1 + rank.rank()));
    Bytes dropped(100, 7), all(200, 7), late(100, 7), got(100);
    if (rank.rank() == 0) {  // before the peer has come to it
      hop(*group, mine, dropped).reset();
      group->all_gather({mine.data(), 100}, {{&all[0], 100}, {&all[100], 100}}).reset();
      rank.meet();
    } else {
      rank.meet();
      hop(*group, mine, got)->wait();
      group->all_gather({mine.data(), 100}, {{&all[0], 100}, {&all[100], 100}})->wait();
      EXPECT_EQ(all[0], 1);
    }
    // While the device has it, and is held up: what uses the memory next on this stream comes after it.
    if (rank.rank() == 1) rank.stream.hold();
    WorkPtr held = hop(*group, mine, late);
    bool enqueued = false;
    held->when_enqueued([&](const auto&) { enqueued = true; });
    rank.meet();
    for (int i = 0; i < 2000 && !enqueued; ++i) std::this_thread::sleep_for(milliseconds(1));
    EXPECT_TRUE(enqueued);
    if (rank.rank() == 0) {
      held.reset();
      device().add(fake_cuda::state_of(rank.stream.get()),
                   [&] { return std::fill(late.begin(), late.end(), 9), true; });
      EXPECT_EQ(late[0], 7);
    }
    rank.meet();
    if (rank.rank() == 1) {
      rank.stream.release();
      held->wait();
      EXPECT_EQ(late[99], 1);
    }
    rank.meet();
    hop(*group, mine, got)->wait();
    EXPECT_EQ(got[99], static_cast<unsigned char>(2 - rank.rank()));
    if (rank.rank() == 0) {
      EXPECT_EQ(dropped, Bytes(100, 7));
      EXPECT_EQ(Bytes(all.begin() + 100, all.end()), Bytes(100, 7));
      EXPECT_EQ(late, Bytes(100, 9));
    }
    rank.meet();
    group.reset();
    rank.meet();
  });
  expect_nothing_left();
}

TEST(PeerCopiesOnHost, WhoAsksToBeToldDoesNotWaitForAPeer) {
  on_ranks(2, [](const Rank& rank) {
    auto group = rank.open();
    const Bytes mine(10, 1);
    Bytes got(10);
    std::atomic<int> told = 0;
    const auto count = [&](const std::function<void()>& wait) {
      wait();
      ++told;
    };
    if (rank.rank() == 1) rank.meet();
    const WorkPtr work = hop(*group, mine, got);
    work->when_enqueued(count);
    work->when_enqueued(count);
    if (rank.rank() == 0) {
      EXPECT_EQ(told, 0);
      rank.meet();
    }
    work->wait();
    EXPECT_EQ(told, 2);
    work->when_enqueued(count);
    EXPECT_EQ(told, 3);
    rank.meet();
    group.reset();
    rank.meet();
  });
  expect_nothing_left();
}

/// A group over host memory in whose `faulty`-th gather rank 1 says that something is wrong.
class Complaining : public Communicator {
 public:
  Complaining(CommunicatorPtr inner, int faulty) : inner_(std::move(inner)), faulty_(faulty) {}
  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  const std::string& name() const override { return inner_->name(); }
  WorkPtr exchange(int to, std::vector<ConstBuffer> send, int from,
                   std::vector<Buffer> recv) override {
    return inner_->exchange(to, std::move(send), from, std::move(recv));
  }
  WorkPtr all_gather(ConstBuffer send, std::vector<Buffer> recv) override {
    if (++gathers_ == faulty_ && rank() == 1) {
      text_.assign(static_cast<size_t>(send.bytes), '\0');
      std::strcpy(text_.data(), "no way");
      send.data = text_.data();
    }
    return inner_->all_gather(send, std::move(recv));
  }
  WorkPtr reduce_scatter(std::vector<ConstBuffer> send, Buffer recv, ElementType type) override {
    return inner_->reduce_scatter(std::move(send), recv, type);
  }
  WorkPtr all_reduce(Buffer data, ElementType type, ReduceOp op) override {
    return inner_->all_reduce(data, type, op);
  }
  WorkPtr broadcast(Buffer data, int root) override { return inner_->broadcast(data, root); }
  void barrier() override { inner_->barrier(); }

 private:
  CommunicatorPtr inner_;
  int faulty_, gathers_ = 0;
  std::vector<char> text_;
};

TEST(PeerCopiesOnHost, AGroupThatCannotBeMadeLeavesNothing) {
  for (int faulty = 1; faulty <= 3; ++faulty) {
    on_ranks(3, [&](const Rank& rank) {
      const auto host = std::make_shared<Complaining>(
          rank.transport.open("host", all_ranks(rank.transport)), faulty);
      EXPECT_THROW(make_peer_copies("copies", rank.options(host)), Unsupported);
      auto group = make_peer_copies("again", rank.options(host));
      rank.meet();
      group.reset();
      rank.meet();
    });
    SCOPED_TRACE(faulty);
    expect_nothing_left();
  }
}

TEST(PeerCopiesOnHost, TheEndAfterAFailureWaitsForNoDeviceThatStandsStill) {
  enum class Knows { kBrokenOff, kCause, kNothing };
  for (const Knows knows : {Knows::kBrokenOff, Knows::kCause, Knows::kNothing}) {
    SCOPED_TRACE(static_cast<int>(knows));
    on_ranks(2, [&](const Rank& rank) {
      PeerCopiesOptions options =
          rank.options(rank.transport.open("host", all_ranks(rank.transport)));
      std::atomic<bool> failed = false;
      options.failure = [&] { return std::string(failed ? "rank 7: gone" : ""); };
      if (knows == Knows::kNothing) options.timeout = milliseconds(300);
      auto group = make_peer_copies("copies", options);
      const Bytes mine(10, 1), large(3 << 20, 2);
      Bytes got(10), got_large(3 << 20);
      hop(*group, mine, got)->wait();
      rank.meet();
      // Rank 1's device stands still from here on: what it has sent does not come, and a slot grows meanwhile.
      if (rank.rank() == 1) rank.stream.hold();
      rank.meet();
      for (int call = 0; call < 2; ++call) {
        const WorkPtr work = hop(*group, large, got_large);
        std::atomic<bool> enqueued = false;
        work->when_enqueued([&](const auto&) { enqueued = true; });
        for (int i = 0; i < 3000 && !enqueued; ++i) std::this_thread::sleep_for(milliseconds(1));
        EXPECT_TRUE(enqueued);
      }
      rank.meet();
      failed = knows == Knows::kCause;
      if (knows == Knows::kBrokenOff) group->break_off("enough");
      const auto start = steady_clock::now();
      group.reset();
      EXPECT_LT(seconds_since(start), knows == Knows::kNothing ? 2.7 : 0.2);
      rank.meet();
      if (rank.rank() == 1) rank.stream.release();
    });
    EXPECT_EQ(std::exchange(device().waits_while_busy, 0), 0);
    // What a device may still have been using is left to the process's end; here it is taken away for the next one.
    EXPECT_GT(device().memory.size(), 0);
    const std::lock_guard lock(device().mutex);
    for (void* memory : device().memory) std::free(memory);
    for (auto* stream : device().streams) delete stream;
    device().memory.clear();
    device().streams.clear();
    device().mappings = 0;
  }
}

}  // namespace
}  // namespace mtraining::comm
