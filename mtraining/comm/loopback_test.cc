#include "mtraining/comm/loopback.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>

#include "mtraining/base/check.h"
#include "mtraining/comm/loopback_memory.h"
#include "mtraining/comm/reduce.h"
#include "mtraining/comm/transport_laws.h"

namespace mtraining::comm {
namespace {

using laws::all_ranks;
using laws::bytes_of;
using laws::error_of;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

double seconds_since(steady_clock::time_point start) {
  return std::chrono::duration<double>(steady_clock::now() - start).count();
}

TEST(Loopback, EveryCallDoesWhatItSaysForEverySize) {
  for (int size : {1, 2, 3, 4, 7}) {
    SCOPED_TRACE(size);
    run_loopback(size, laws::all_laws);
  }
}

TEST(Loopback, WhoAsksToBeToldDoesNotWaitForAPeerAndIsToldBeforeTheWaitEnds) {
  run_loopback(2, [](Transport& transport) {
    CommunicatorPtr group = transport.open("late", all_ranks(transport));
    const int rank = group->rank(), peer = 1 - rank;
    for (int round = 0; round < 3; ++round) {
      std::vector<float> mine(8, static_cast<float>(rank)), got(8), all(16);
      if (rank == 1) std::this_thread::sleep_for(milliseconds(150));
      const WorkPtr hop =
          group->exchange(peer, {bytes_of(std::as_const(mine))}, peer, {bytes_of(got)});
      const WorkPtr gather =
          group->all_gather(bytes_of(std::as_const(mine)), {{&all[0], 32}, {&all[8], 32}});
      std::atomic<int> told[2] = {0, 0};
      const auto start = steady_clock::now();
      hop->when_enqueued([&](const std::function<void()>& wait) {
        wait();
        ++told[0];
      });
      gather->when_enqueued([&](const std::function<void()>& wait) {
        wait();
        ++told[1];
      });
      EXPECT_LT(seconds_since(start), 0.1);
      if (rank == 0) {
        EXPECT_EQ(told[0] + told[1], 0);  // the peer has not called yet
      }
      gather->wait();
      hop->wait();
      EXPECT_EQ(told[0], 1);
      EXPECT_EQ(told[1], 1);
      EXPECT_EQ(got[7], static_cast<float>(peer));
      EXPECT_EQ(all[15], 1.f);
      gather->when_enqueued([&](const std::function<void()>&) { ++told[1]; });  // is over
      EXPECT_EQ(told[1], 2);
    }
    // Dropped: nobody is told.
    std::vector<float> mine(8), got(8);
    bool told = false;
    if (rank == 0) {
      group->exchange(1, {bytes_of(std::as_const(mine))}, 1, {bytes_of(got)})
          ->when_enqueued([&](const std::function<void()>&) { told = true; });
    }
    EXPECT_FALSE(told);
  });
}

TEST(Single, IsATransportOfOneRank) {
  auto transport = make_single();
  EXPECT_EQ(transport->size(), 1);
  laws::all_laws(*transport);
}

TEST(Loopback, FirstFailureWakesAllAndIsRethrown) {
  for (int bad = 0; bad < 4; ++bad) {
    std::mutex mutex;
    std::vector<std::string> others;
    const auto start = steady_clock::now();
    const auto body = [&](Transport& transport) {
      CommunicatorPtr group = transport.open("kv", all_ranks(transport));
      group->barrier();
      if (transport.rank() == bad) {
        std::this_thread::sleep_for(milliseconds(20));  // the others wait by now
        throw std::logic_error("the loader broke");
      }
      std::vector<float> data(8);
      const std::string text = error_of([&] {
        group->all_reduce(bytes_of(data), ElementType::kFloat32, ReduceOp::kSum)->wait();
      });
      std::unique_lock lock(mutex);
      others.push_back(text);
    };
    EXPECT_THROW(run_loopback(4, body), std::logic_error);
    EXPECT_LT(seconds_since(start), 5);
    ASSERT_EQ(others.size(), 3u);
    const std::string cause = "rank " + std::to_string(bad) + " failed first: the loader broke";
    for (const std::string& text : others) {
      EXPECT_NE(text.find(cause), std::string::npos) << text;
      EXPECT_NE(text.find("'kv'"), std::string::npos) << text;
    }
  }
}

TEST(Loopback, AbortWakesTheOthersWithItsCause) {
  EXPECT_THROW(run_loopback(2,
                            [&](Transport& transport) {
                              CommunicatorPtr group = transport.open("kv", all_ranks(transport));
                              if (transport.rank() == 1) return transport.abort("out of patience");
                              EXPECT_NE(error_of([&] { group->barrier(); }).find("out of patience"),
                                        std::string::npos);
                            }),
               ExternalError);
}

TEST(Loopback, ExchangeOfOtherSizesNamesBothSides) {
  std::string text = error_of([] {
    run_loopback(2, [](Transport& transport) {
      CommunicatorPtr group = transport.open("kv", all_ranks(transport));
      // One rank's shard is a token longer.
      std::vector<float> mine(transport.rank() == 1 ? 65 : 64), got(64);
      group
          ->exchange(1 - transport.rank(), {bytes_of(std::as_const(mine))}, 1 - transport.rank(),
                     {bytes_of(got)})
          ->wait();
    });
  });
  EXPECT_NE(text.find("rank 0"), std::string::npos) << text;
  EXPECT_NE(text.find("rank 1"), std::string::npos) << text;
  EXPECT_NE(text.find("[260]"), std::string::npos) << text;
  EXPECT_NE(text.find("[256]"), std::string::npos) << text;
}

TEST(Loopback, DifferentCollectivesNameBothSides) {
  std::string text = error_of([] {
    run_loopback(3, [](Transport& transport) {
      CommunicatorPtr group = transport.open("gradients", all_ranks(transport));
      std::vector<float> data(transport.rank() == 2 ? 5 : 4);
      group->all_reduce(bytes_of(data), ElementType::kFloat32, ReduceOp::kSum)->wait();
    });
  });
  EXPECT_NE(text.find("rank 2 calls all_reduce(20 bytes of float32, sum)"), std::string::npos)
      << text;
  EXPECT_NE(text.find("all_reduce(16 bytes of float32, sum)"), std::string::npos) << text;
  text = error_of([] {
    run_loopback(2, [](Transport& transport) {
      CommunicatorPtr group = transport.open("gradients", all_ranks(transport));
      std::vector<float> data(4);
      if (transport.rank() == 0) group->broadcast(bytes_of(data), 0)->wait();
      if (transport.rank() == 1) group->barrier();
    });
  });
  EXPECT_NE(text.find("broadcast(16 bytes from 0)"), std::string::npos) << text;
  EXPECT_NE(text.find("barrier()"), std::string::npos) << text;
}

TEST(Loopback, DifferentOrderOfExchangesAndCollectivesIsFoundAtOnce) {
  const auto start = steady_clock::now();
  const std::string text = error_of([] {
    run_loopback(2, [](Transport& transport) {
      CommunicatorPtr group = transport.open("kv", all_ranks(transport));
      std::vector<float> data(4), got(4);
      const auto hop = [&] {
        return group->exchange(1 - transport.rank(), {bytes_of(std::as_const(data))},
                               1 - transport.rank(), {bytes_of(got)});
      };
      const auto sum = [&] {
        return group->all_reduce(bytes_of(data), ElementType::kFloat32, ReduceOp::kSum);
      };
      WorkPtr first = transport.rank() == 0 ? hop() : sum();
      WorkPtr second = transport.rank() == 0 ? sum() : hop();
      first->wait();
      second->wait();
    });
  });
  EXPECT_NE(text.find("order exchanges and collectives differently"), std::string::npos) << text;
  EXPECT_LT(seconds_since(start), 5);
}

TEST(Loopback, RanksThatWaitForOneAnotherFailAtOnceAndSayForWhat) {
  const auto start = steady_clock::now();
  // Rank 2 skips a hop that its neighbours make.
  const std::string text = error_of([] {
    run_loopback(3, [](Transport& transport) {
      CommunicatorPtr group = transport.open("kv", all_ranks(transport));
      if (transport.rank() == 2) return;
      std::vector<float> mine(2), got(2);
      group
          ->exchange((transport.rank() + 1) % 3, {bytes_of(std::as_const(mine))},
                     (transport.rank() + 2) % 3, {bytes_of(got)})
          ->wait();
    });
  });
  EXPECT_NE(text.find("rank 0 is in communicator 'kv', exchange 0"), std::string::npos) << text;
  EXPECT_NE(text.find("rank 2 has returned"), std::string::npos) << text;
  EXPECT_LT(seconds_since(start), 5);
}

TEST(Loopback, RanksThatWaitInDifferentCommunicatorsFailAtOnce) {
  const auto start = steady_clock::now();
  const std::string text = error_of([] {
    run_loopback(2, [](Transport& transport) {
      CommunicatorPtr kv = transport.open("kv", all_ranks(transport));
      CommunicatorPtr grad = transport.open("grad", all_ranks(transport));
      (transport.rank() == 0 ? kv : grad)->barrier();
    });
  });
  EXPECT_NE(text.find("rank 0 is in communicator 'kv', barrier()"), std::string::npos) << text;
  EXPECT_NE(text.find("rank 1 is in communicator 'grad', barrier()"), std::string::npos) << text;
  EXPECT_LT(seconds_since(start), 5);
}

TEST(Loopback, TimesOutWhereAPeerIsBusyElsewhere) {
  const auto start = steady_clock::now();
  const std::string text = error_of([] {
    run_loopback(
        2,
        [](Transport& transport) {
          CommunicatorPtr group = transport.open("kv", all_ranks(transport));
          if (transport.rank() == 1) std::this_thread::sleep_for(milliseconds(600));
          group->barrier();
        },
        milliseconds(100));
  });
  EXPECT_NE(text.find("timeout after 100 ms"), std::string::npos) << text;
  EXPECT_NE(text.find("rank 0"), std::string::npos) << text;
  EXPECT_LT(seconds_since(start), 5);
}

TEST(Loopback, OpeningDifferentCommunicatorsNamesBothSides) {
  const std::string text = error_of([] {
    run_loopback(2, [](Transport& transport) {
      transport.open(transport.rank() == 0 ? "kv" : "grad", all_ranks(transport));
    });
  });
  EXPECT_NE(text.find("'kv' of ranks [0,1]"), std::string::npos) << text;
  EXPECT_NE(text.find("'grad' of ranks [0,1]"), std::string::npos) << text;
}

TEST(Loopback, CallsGivenUpOnTouchNoBufferAfterwards) {
  // Rank 0 posts and unwinds while its buffers die; under AddressSanitizer a late copy would be seen.
  for (int round = 0; round < 50; ++round) {
    EXPECT_THROW(run_loopback(3,
                              [&](Transport& transport) {
                                CommunicatorPtr group = transport.open("kv", all_ranks(transport));
                                const int to = (transport.rank() + 1) % 3,
                                          from = (transport.rank() + 2) % 3;
                                std::vector<float> mine(5000, 1.f), got(5000), sum(5000);
                                WorkPtr hop = group->exchange(to, {bytes_of(std::as_const(mine))},
                                                              from, {bytes_of(got)});
                                WorkPtr reduce = group->all_reduce(
                                    bytes_of(sum), ElementType::kFloat32, ReduceOp::kSum);
                                if (transport.rank() == round % 3) throw std::logic_error("stop");
                                hop->wait();
                                reduce->wait();
                                group->barrier();
                              }),
                 std::logic_error);
  }
}

TEST(Loopback, NothingIsBuffered) {
  // A receiver sees what the buffer holds when both have called, not when the sender called.
  run_loopback(2, [](Transport& transport) {
    CommunicatorPtr data = transport.open("kv", all_ranks(transport)),
                    order = transport.open("order", all_ranks(transport));
    std::vector<int> value = {1}, got = {0};
    if (transport.rank() == 0) {
      WorkPtr work = data->exchange(1, {bytes_of(std::as_const(value))}, 1, {});
      value[0] = 2;
      order->barrier();
      work->wait();
    } else {
      order->barrier();
      data->exchange(0, {}, 0, {bytes_of(got)})->wait();
      EXPECT_EQ(got[0], 2);
    }
  });
}

/// A device that refuses every transfer.
class BrokenMemory : public LoopbackMemory {
 public:
  Mark mark() override { return {}; }
  void await(const Mark& /*mark*/) override {}
  Mark copy(const Line& /*line*/, std::span<const Mark> /*after*/, int /*from*/,
            std::span<const Copy> /*copies*/) override {
    throw ExternalError("the device broke");
  }
  Mark reduce(const Line& /*line*/, std::span<const Mark> /*after*/,
              std::span<const int> /*senders*/, ElementType /*type*/, ReduceOp /*op*/,
              int64_t /*count*/, std::span<const void* const> /*sources*/,
              std::span<void* const> /*destinations*/) override {
    throw ExternalError("the device broke");
  }
};

TEST(Loopback, ADeviceThatRefusesATransferEndsAllRanks) {
  for (const bool collective : {false, true}) {
    SCOPED_TRACE(collective);
    BrokenMemory broken;
    const auto start = steady_clock::now();
    const std::string text = error_of([&] {
      run_loopback_over(
          &broken, 3,
          [&](Transport& transport) {
            CommunicatorPtr group = transport.open("kv", all_ranks(transport));
            std::vector<float> mine(8), got(8);
            const int next = (transport.rank() + 1) % 3, last = (transport.rank() + 2) % 3;
            WorkPtr work =
                collective
                    ? group->all_reduce(bytes_of(mine), ElementType::kFloat32, ReduceOp::kSum)
                    : group->exchange(next, {bytes_of(std::as_const(mine))}, last, {bytes_of(got)});
            work->wait();
          },
          std::chrono::seconds(30));
    });
    EXPECT_NE(text.find("the device broke"), std::string::npos) << text;
    EXPECT_LT(seconds_since(start), 5);
  }
}

TEST(Reduce, BFloat16IsRoundedOnceAtTheEnd) {
  // 256 + 1 is 256 in bf16: rounding after each addition would lose every 1.
  std::vector<uint16_t> big = {laws::to_bf16(256)}, one = {laws::to_bf16(1)}, out = {0};
  const void* sources[] = {big.data(), one.data(), one.data(), one.data(), one.data()};
  void* destination[] = {out.data()};
  reduce(ElementType::kBFloat16, ReduceOp::kSum, 1, sources, destination);
  EXPECT_EQ(laws::from_bf16(out[0]), 260);
}

}  // namespace
}  // namespace mtraining::comm
