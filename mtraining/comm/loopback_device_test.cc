#include "mtraining/comm/loopback_device.h"

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <mutex>

#include "mtraining/comm/mirrored_transport.h"
#include "mtraining/comm/transport_laws.h"
#include "mtraining/kernels/exchange_cuda/exchange.h"

namespace mtraining::comm {
namespace {

namespace exchange = kernels::exchange_cuda;
using laws::all_ranks;
using namespace mirrored;  // NOLINT: what tests of device memory share
using std::chrono::milliseconds;
using std::chrono::steady_clock;

DeviceLoopbackOptions options_of(int ranks_per_node = 0, double inner = 0, double outer = 0) {
  return {.current_stream = [] { return static_cast<void*>(stream_of_thread); },
          .ranks_per_node = ranks_per_node,
          .inner_bytes_per_s = inner,
          .outer_bytes_per_s = outer};
}

/// As run_device_loopback, each rank with a stream of its own.
void run_ranks(int ranks, const std::function<void(Transport&)>& body,
               const DeviceLoopbackOptions& options = options_of()) {
  run_device_loopback(
      ranks,
      [&](Transport& transport) {
        const ThreadStream stream;
        body(transport);
      },
      options);
}

/// Keeps this thread's stream busy for so long.
void keep_busy(milliseconds time) {
  static const OnDevice clocks(2 * sizeof(uint64_t) * 64);
  static std::atomic<int> used = 0;
  uint64_t* clock = static_cast<uint64_t*>(clocks.data()) + 2 * (used++ % 64);
  run(cudaMemsetAsync(clock, 0, 2 * sizeof(uint64_t), stream_of_thread), "cudaMemset");
  exchange::take_link(clock, clock + 1, time.count() * 1000000, stream_of_thread);
  exchange::hold_until(clock + 1, stream_of_thread);
}

double seconds_since(steady_clock::time_point start) {
  return std::chrono::duration<double>(steady_clock::now() - start).count();
}

TEST(DeviceLoopback, EveryCallDoesWhatItSaysForEverySize) {
  for (int size : {1, 2, 3, 4, 7}) {
    SCOPED_TRACE(size);
    run_ranks(size, [](Transport& transport) {
      MirroredTransport mirrored(transport);
      laws::all_laws(mirrored);
    });
  }
}

TEST(DeviceLoopback, OverSlowLinksEveryCallDoesTheSame) {
  run_ranks(
      4,
      [](Transport& transport) {
        MirroredTransport mirrored(transport);
        laws::all_laws(mirrored);
      },
      options_of(2, 5e9, 1e9));
}

TEST(DeviceLoopback, HostMemoryHasItsOwnCommunicators) {
  run_ranks(3, [](Transport& transport) {
    EXPECT_TRUE(transport.on_device());
    const CommunicatorPtr host = transport.open_host("host", all_ranks(transport));
    int64_t sum = transport.rank();
    host->all_reduce({&sum, sizeof(sum)}, ElementType::kInt64, ReduceOp::kSum)->wait();
    EXPECT_EQ(sum, 3);
  });
}

TEST(DeviceLoopback, TheDeviceOrdersWhatTheHostDoesNotWaitFor) {
  // Data that does not exist yet when it is sent, a receive buffer still in use when it is posted, a sent one overwritten after the
  // wait: streams see to it, and no thread waits for its device.
  constexpr int kRanks = 4;
  static constexpr int64_t kBytes = 1 << 20;
  run_ranks(kRanks, [](Transport& transport) {
    const CommunicatorPtr group = transport.open("kv", all_ranks(transport));
    const int rank = transport.rank(), to = (rank + 1) % kRanks, from = (rank + 3) % kRanks;
    const OnDevice sent(kBytes), got(kBytes), seen(kBytes), gathered(kRanks * kBytes);
    run(cudaMemset(got.data(), 0xAA, kBytes), "cudaMemset");
    run(cudaDeviceSynchronize(), "waiting");
    group->barrier();
    const auto start = steady_clock::now();
    keep_busy(milliseconds(60 + 20 * rank));
    run(cudaMemcpyAsync(seen.data(), got.data(), kBytes, cudaMemcpyDeviceToDevice,
                        stream_of_thread),
        "copying");
    run(cudaMemsetAsync(sent.data(), 1 + rank, kBytes, stream_of_thread), "cudaMemset");
    WorkPtr hop = group->exchange(to, {{sent.data(), kBytes}}, from, {{got.data(), kBytes}});
    std::vector<Buffer> parts;
    for (int r = 0; r < kRanks; ++r)
      parts.push_back({static_cast<char*>(gathered.data()) + r * kBytes, kBytes});
    WorkPtr gather = group->all_gather({sent.data(), kBytes}, parts);
    hop->wait();
    gather->wait();
    run(cudaMemsetAsync(sent.data(), 0xFF, kBytes, stream_of_thread), "cudaMemset");
    EXPECT_LT(seconds_since(start), 0.05) << "the host waited for the device";
    std::vector<uint8_t> values(kBytes);
    got.get(values.data());
    EXPECT_GT(seconds_since(start), 0.055);
    EXPECT_EQ(values, std::vector<uint8_t>(kBytes, static_cast<uint8_t>(1 + from)));
    seen.get(values.data());
    EXPECT_EQ(values, std::vector<uint8_t>(kBytes, 0xAA)) << "received into a buffer in use";
    std::vector<uint8_t> all(kRanks * kBytes);
    gathered.get(all.data());
    for (int r = 0; r < kRanks; ++r) {
      EXPECT_EQ(std::count(all.begin() + r * kBytes, all.begin() + (r + 1) * kBytes, 1 + r), kBytes)
          << "rank " << rank << " from " << r;
    }
    group->barrier();
  });
}

/// Seconds from a common start until rank 0's stream has everything that `body` posts.
template <typename Body>
double seconds_of(int ranks, const DeviceLoopbackOptions& options, const Body& body) {
  double seconds = 0;
  run_ranks(
      ranks,
      [&](Transport& transport) {
        const CommunicatorPtr a = transport.open("a", all_ranks(transport)),
                              b = transport.open("b", all_ranks(transport));
        constexpr int64_t kBytes = 10'000'000;
        const OnDevice sent(kBytes), got(kBytes), got_too(kBytes);
        a->barrier();
        const auto start = steady_clock::now();
        const std::vector<WorkPtr> works =
            body(*a, *b, ConstBuffer{sent.data(), kBytes}, Buffer{got.data(), kBytes},
                 Buffer{got_too.data(), kBytes});
        for (const WorkPtr& work : works) work->wait();
        run(cudaStreamSynchronize(stream_of_thread), "waiting");
        if (transport.rank() == 0) seconds = seconds_since(start);
        a->barrier();
      },
      options);
  return seconds;
}

std::vector<WorkPtr> one_hop(Communicator& a, ConstBuffer sent, Buffer got, int distance) {
  const int size = a.size();
  std::vector<WorkPtr> works;
  works.push_back(
      a.exchange((a.rank() + distance) % size, {sent}, (a.rank() + size - distance) % size, {got}));
  return works;
}

TEST(DeviceLoopback, LinksAreAsSlowAsSaid) {
  // 10 MB: 20 ms inside a node, 50 ms between nodes.
  const DeviceLoopbackOptions slow = options_of(2, 0.5e9, 0.2e9);
  const auto hop = [](int distance) {
    return [distance](Communicator& a, Communicator& /*b*/, ConstBuffer sent, Buffer got,
                      Buffer /*too*/) { return one_hop(a, sent, got, distance); };
  };
  const double inside = seconds_of(2, slow, hop(1)), outside = seconds_of(4, slow, hop(2));
  EXPECT_GT(inside, 0.0199);
  EXPECT_LT(inside, 0.06);
  EXPECT_GT(outside, 0.0499);
  EXPECT_LT(outside, 0.15);
  EXPECT_LT(seconds_of(4, options_of(), hop(2)), 0.04);
  // Two transfers out of a rank over the same kind of link share it, whatever their communicators; over different kinds they do not.
  const auto both = [&](int second) {
    return seconds_of(
        4, slow,
        [second](Communicator& a, Communicator& b, ConstBuffer sent, Buffer got, Buffer too) {
          std::vector<WorkPtr> works = one_hop(a, sent, got, 2);
          works.push_back(std::move(one_hop(b, sent, too, second)[0]));
          return works;
        });
  };
  EXPECT_GT(both(2), 0.0999);
  // Around 4 ranks a hop of 1 stays in the node for half of them; for rank 0 it goes inside and comes from outside.
  const double apart = seconds_of(
      4, slow, [](Communicator& a, Communicator& b, ConstBuffer sent, Buffer got, Buffer too) {
        std::vector<WorkPtr> works = one_hop(a, sent, got, 2);
        const int peer = b.rank() ^ 1;
        works.push_back(b.exchange(peer, {sent}, peer, {too}));
        return works;
      });
  EXPECT_GT(apart, 0.0499);
  EXPECT_LT(apart, 0.09);
  // A node's gather: three parts come one after another.
  const double gather =
      seconds_of(4, options_of(4, 0.5e9, 0.2e9),
                 [](Communicator& a, Communicator& /*b*/, ConstBuffer sent, Buffer got, Buffer) {
                   std::vector<Buffer> parts;
                   for (int r = 0; r < 4; ++r)
                     parts.push_back({static_cast<char*>(got.data) + r * 2'500'000, 2'500'000});
                   std::vector<WorkPtr> works;
                   works.push_back(a.all_gather({sent.data, 2'500'000}, parts));
                   return works;
                 });
  EXPECT_GT(gather, 0.0149);  // 3 x 5 ms
  EXPECT_LT(gather, 0.06);
}

TEST(DeviceLoopback, AFailureWakesAllAndNamesTheRank) {
  std::mutex mutex;
  std::vector<std::string> others;
  const auto start = steady_clock::now();
  EXPECT_THROW(run_ranks(3,
                         [&](Transport& transport) {
                           const OnDevice memory(1024);
                           try {
                             // Rank 1 may fail while another still learns that all have opened.
                             const CommunicatorPtr group =
                                 transport.open("kv", all_ranks(transport));
                             if (transport.rank() == 1) throw std::logic_error("out of luck");
                             group
                                 ->exchange((transport.rank() + 1) % 3, {{memory.data(), 64}},
                                            (transport.rank() + 2) % 3, {{memory.data(), 64}})
                                 ->wait();
                           } catch (const Error& e) {
                             const std::lock_guard lock(mutex);
                             others.emplace_back(e.what());
                             throw;
                           }
                         }),
               std::logic_error);
  EXPECT_LT(seconds_since(start), 10);
  ASSERT_EQ(others.size(), 2u);
  for (const std::string& text : others)
    EXPECT_NE(text.find("rank 1 failed first: out of luck"), std::string::npos) << text;
}

}  // namespace
}  // namespace mtraining::comm
