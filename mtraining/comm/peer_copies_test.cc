// Copies between processes that share a GPU, or have one each: no transport of torch's is over device memory here, so that one GPU is
// enough for any number of ranks.
#include "mtraining/comm/peer_copies.h"

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <csignal>
#include <thread>

#include "mtraining/comm/c10d.h"
#include "mtraining/comm/mirrored_transport.h"
#include "mtraining/comm/transport_laws.h"
#include "mtraining/testing/process_ranks.h"

namespace mtraining::comm {
namespace {

using laws::all_ranks;
using laws::error_of;
using mirrored::MirroredTransport;
using mirrored::OnDevice;
using mirrored::run;
using mirrored::stream_of_thread;
using mirrored::ThreadStream;
using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::ProcessRun;
using testing::RankProcess;
using testing::run_processes;

/// Gloo, whose copies are those of peers.
class Copies : public Transport {
 public:
  Copies(const RankProcess& process, milliseconds timeout)
      : inner_(make_c10d({.backend = "gloo",
                          .master_port = process.port,
                          .rank = process.rank,
                          .size = process.size,
                          .timeout = timeout})) {
    int devices = 0;
    run(cudaGetDeviceCount(&devices), "counting devices");
    run(cudaSetDevice(process.rank % devices), "choosing a device");
  }
  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  milliseconds timeout() const override { return inner_->timeout(); }
  CommunicatorPtr open(const std::string& name, const std::vector<int>& members) override {
    return inner_->open(name, members);
  }
  CommunicatorPtr open_copies(const std::string& name, const std::vector<int>& members) override {
    CommunicatorPtr host = inner_->open(name, members);
    if (!host) return nullptr;
    return make_peer_copies(name,
                            {.host = host,
                             .current_stream = [] { return static_cast<void*>(stream_of_thread); },
                             .failure = {},
                             .report = {},
                             .timeout = timeout()});
  }
  void abort(const std::string& cause) noexcept override { inner_->abort(cause); }

 private:
  std::unique_ptr<Transport> inner_;
};

void on_ranks(int size, const std::function<void(Copies&)>& body,
              milliseconds timeout = seconds(40)) {
  const ProcessRun result = run_processes(size, free_port, [&](const RankProcess& process) {
    Copies transport(process, timeout);
    const ThreadStream stream;
    body(transport);
  });
  if (!result.in_child) testing::expect_all_passed(result);
}

void laws_hold(int size) {
  on_ranks(size, [](Copies& copies) {
    MirroredTransport transport(copies, /*copies=*/true);
    laws::all_laws(transport);
  });
}
TEST(PeerCopies, EveryCallDoesWhatItSaysOnOneRank) { laws_hold(1); }
TEST(PeerCopies, EveryCallDoesWhatItSaysOnTwoRanks) { laws_hold(2); }
TEST(PeerCopies, EveryCallDoesWhatItSaysOnFourRanks) { laws_hold(4); }

TEST(PeerCopies, ManyCallsOfChangingSizesAndLateRanksKeepTheirBytesApart) {
  // Slots are filled again while peers are slow, and grow; what is sent changes as soon as the call has returned its wait.
  on_ranks(3, [](Copies& copies) {
    const CommunicatorPtr group = copies.open_copies("ring", all_ranks(copies));
    EXPECT_FALSE(group->needs_multiprocessors());
    const int rank = group->rank(), next = (rank + 1) % 3, previous = (rank + 2) % 3;
    const auto value_of = [](int from, int call) { return from * 100 + call; };
    for (int call = 0; call < 60; ++call) {
      const int64_t bytes = 4 * (1 + (call * 7919) % 700000);
      const OnDevice mine(bytes), got(bytes), all(3 * bytes);
      std::vector<int32_t> values(static_cast<size_t>(bytes / 4), value_of(rank, call));
      mine.put(values.data());
      if (call % 5 == rank) std::this_thread::sleep_for(milliseconds(10));
      const WorkPtr hop =
          group->exchange(next, {{mine.data(), bytes}}, previous, {{got.data(), bytes}});
      std::vector<Buffer> parts;
      for (int r = 0; r < 3; ++r)
        parts.push_back({static_cast<char*>(all.data()) + r * bytes, bytes});
      const WorkPtr gather = group->all_gather({mine.data(), bytes}, parts);
      hop->wait();
      gather->wait();
      run(cudaMemsetAsync(mine.data(), 0xff, static_cast<size_t>(bytes), stream_of_thread),
          "memset");
      got.get(values.data());
      for (const int32_t value : values) ASSERT_EQ(value, value_of(previous, call));
      values.resize(static_cast<size_t>(3 * bytes / 4));
      all.get(values.data());
      for (int64_t i = 0; i < 3 * bytes / 4; ++i)
        ASSERT_EQ(values[i], value_of(static_cast<int>(i / (bytes / 4)), call));
    }
  });
}

TEST(PeerCopies, ACallThatAPeerDoesNotMakeEndsInTheTimeoutThatNamesIt) {
  on_ranks(
      2,
      [](Copies& copies) {
        const CommunicatorPtr group = copies.open_copies("late", all_ranks(copies));
        const OnDevice memory(64);
        if (group->rank() == 0) {
          const std::string text = error_of([&] {
            group->exchange(1, {{memory.data(), 32}}, 1, {{memory.data(), 32}})->wait();
          });
          EXPECT_NE(text.find("communicator 'late' rank 0, exchange 0"), std::string::npos) << text;
          EXPECT_NE(text.find("rank 1 has not come to it: timeout after 500 ms"), std::string::npos)
              << text;
        } else {
          std::this_thread::sleep_for(milliseconds(1500));
        }
      },
      milliseconds(500));
}

TEST(PeerCopies, OtherSizesAndOtherCallsAreNamed) {
  on_ranks(2, [](Copies& copies) {
    const OnDevice memory(256);
    const auto error = [&](const char* name, const auto& call) {
      const CommunicatorPtr group = copies.open_copies(name, all_ranks(copies));
      return error_of([&] { call(*group); });
    };
    const int64_t mine = copies.rank() == 0 ? 64 : 128;
    std::string text = error("sizes", [&](Communicator& group) {
      const int peer = 1 - group.rank();
      group.exchange(peer, {{memory.data(), mine}}, peer, {{memory.data(), mine}})->wait();
    });
    EXPECT_NE(text.find(concat("sends ", 192 - mine, " bytes, this rank receives ", mine)),
              std::string::npos)
        << text;
    text = error("calls", [&](Communicator& group) {
      if (group.rank() == 0) {
        group.all_reduce({memory.data(), 64}, ElementType::kFloat32, ReduceOp::kSum)->wait();
      } else {
        group.all_reduce({memory.data(), 64}, ElementType::kFloat32, ReduceOp::kMax)->wait();
      }
    });
    EXPECT_NE(text.find("called something else"), std::string::npos) << text;
  });
}

}  // namespace
}  // namespace mtraining::comm
