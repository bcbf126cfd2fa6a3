#include "mtraining/comm/c10d.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <memory>
#include <set>
#include <thread>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <vector>

#include "mtraining/comm/transport_laws.h"
#include "mtraining/testing/process_ranks.h"

namespace mtraining::comm {
namespace {

using laws::all_ranks;
using laws::bytes_of;
using laws::error_of;
using testing::ProcessRun;
using testing::RankProcess;
using testing::run_processes;

std::unique_ptr<Transport> connect(const RankProcess& process,
                                   std::chrono::milliseconds timeout = std::chrono::seconds(40)) {
  return make_c10d({.backend = "gloo",
                    .master_port = process.port,
                    .rank = process.rank,
                    .size = process.size,
                    .timeout = timeout});
}

void laws_hold(int size) {
  const ProcessRun run = run_processes(size, free_port, [](const RankProcess& process) {
    auto transport = connect(process);
    EXPECT_EQ(transport->rank(), process.rank);
    EXPECT_EQ(transport->size(), process.size);
    laws::all_laws(*transport);
  });
  if (!run.in_child) testing::expect_all_passed(run);
}

TEST(Gloo, EveryCallDoesWhatItSaysOnOneRank) { laws_hold(1); }
TEST(Gloo, EveryCallDoesWhatItSaysOnTwoRanks) { laws_hold(2); }
TEST(Gloo, EveryCallDoesWhatItSaysOnThreeRanks) { laws_hold(3); }
TEST(Gloo, EveryCallDoesWhatItSaysOnFourRanks) { laws_hold(4); }

/// Rank 0 holds the store in which the others look for the first cause: it stays until they have, on a busy machine too.
void keep_store_for_others(const RankProcess& process) {
  if (process.rank == 0) std::this_thread::sleep_for(std::chrono::seconds(3));
}

TEST(Gloo, ExchangeOfOtherSizesNamesBothSides) {
  const ProcessRun run = run_processes(2, free_port, [](const RankProcess& process) {
    auto transport = connect(process);
    const int peer = 1 - process.rank;
    {
      CommunicatorPtr group = transport->open("sizes", all_ranks(*transport));
      std::vector<float> mine(process.rank == 1 ? 65 : 64), got(64);
      const auto hop = [&] {
        group->exchange(peer, {bytes_of(std::as_const(mine))}, peer, {bytes_of(got)})->wait();
      };
      const std::string text = error_of(hop);
      EXPECT_NE(text.find("receives [256] bytes from 1"), std::string::npos) << text;
      EXPECT_NE(text.find("rank 1 sends [260] bytes"), std::string::npos) << text;
      keep_store_for_others(process);
    }
  });
  if (!run.in_child) testing::expect_all_passed(run);
}

TEST(Gloo, DifferentCollectivesNameBothSides) {
  const ProcessRun run = run_processes(2, free_port, [](const RankProcess& process) {
    auto transport = connect(process);
    {
      CommunicatorPtr group = transport->open("kinds", all_ranks(*transport));
      std::vector<float> data(4);
      const std::string text = error_of([&] {
        if (process.rank == 0) group->broadcast(bytes_of(data), 0)->wait();
        if (process.rank == 1)
          group->all_reduce(bytes_of(data), ElementType::kFloat32, ReduceOp::kSum)->wait();
      });
      EXPECT_NE(text.find("broadcast(16 bytes from 0) as collective 0"), std::string::npos) << text;
      EXPECT_NE(text.find("all_reduce(16 bytes of float32, sum) as collective 0"),
                std::string::npos)
          << text;
    }
  });
  if (!run.in_child) testing::expect_all_passed(run);
}

TEST(Gloo, OpeningDifferentCommunicatorsNamesBothSides) {
  const ProcessRun run = run_processes(2, free_port, [](const RankProcess& process) {
    auto transport = connect(process);
    const std::string text = error_of(
        [&] { transport->open(process.rank == 0 ? "kv" : "grad", all_ranks(*transport)); });
    EXPECT_NE(text.find("'kv' of ranks [0,1]"), std::string::npos) << text;
    EXPECT_NE(text.find("'grad' of ranks [0,1]"), std::string::npos) << text;
    keep_store_for_others(process);
  });
  if (!run.in_child) testing::expect_all_passed(run);
}

/// Rank 1 stops in `how`; the others wait for it in exchanges and collectives and must fail with a text that holds `cause`.
void peers_fail_fast(const std::string& cause, const std::function<void(Transport&)>& how) {
  const ProcessRun run = run_processes(4, free_port, [&](const RankProcess& process) {
    auto transport = connect(process, std::chrono::minutes(5));
    {
      CommunicatorPtr kv = transport->open("kv", all_ranks(*transport)),
                      sums = transport->open("sums", all_ranks(*transport));
      kv->barrier();
      if (process.rank == 1) {
        std::this_thread::sleep_for(
            std::chrono::milliseconds(200));  // the others are waiting by now
        how(*transport);
        return;
      }
      std::vector<float> data(100), got(100);
      const std::string text = error_of([&] {
        if (process.rank == 3) {
          sums->all_reduce(bytes_of(data), ElementType::kFloat32, ReduceOp::kSum)->wait();
        } else {
          kv->exchange((process.rank + 1) % 4, {bytes_of(std::as_const(data))},
                       (process.rank + 3) % 4, {bytes_of(got)})
              ->wait();
        }
      });
      std::cerr << "rank " << process.rank << " says: " << text << std::endl;
      EXPECT_NE(text.find(cause), std::string::npos) << text;
      keep_store_for_others(process);
    }
  });
  if (run.in_child) return;
  EXPECT_LT(run.seconds, 25);
  for (int rank : {0, 2, 3})
    EXPECT_EQ(run.ranks[rank].exit_code, 0) << "rank " << rank << ":\n" << run.ranks[rank].output;
}

TEST(Gloo, ARankThatThrowsEndsTheOthersWithItsCause) {
  peers_fail_fast("rank 1: the loader broke",
                  [](Transport& transport) { transport.abort("the loader broke"); });
}

TEST(Gloo, ARankThatDiesEndsTheOthersWithinSeconds) {
  // Each rank sees a closed connection, be it on kv or on sums, or the cause of the one that saw it first.
  peers_fail_fast("by peer", [](Transport&) { kill(getpid(), SIGKILL); });
}

TEST(Gloo, ARankThatFailsBeforeOpeningEndsTheOthers) {
  const ProcessRun run = run_processes(3, free_port, [](const RankProcess& process) {
    auto transport = connect(process, std::chrono::minutes(5));
    if (process.rank == 2) return transport->abort("no such file: tokens.bin");
    const std::string text = error_of([&] { transport->open("kv", all_ranks(*transport)); });
    EXPECT_NE(text.find("rank 2: no such file: tokens.bin"), std::string::npos) << text;
    keep_store_for_others(process);
  });
  if (run.in_child) return;
  testing::expect_all_passed(run);
  EXPECT_LT(run.seconds, 25);
}

TEST(Gloo, UnfinishedCallsDoNotKeepAProcessAlive) {
  // Rank 0 leaves with a collective and an exchange under way that rank 1 never joins.
  const ProcessRun run = run_processes(2, free_port, [](const RankProcess& process) {
    auto transport = connect(process, std::chrono::minutes(5));
    CommunicatorPtr group = transport->open("kv", all_ranks(*transport));
    group->barrier();  // who leaves while the other still opens ends that one's opening
    std::vector<float> data(100), got(100);
    if (process.rank == 0) {
      WorkPtr hop = group->exchange(1, {bytes_of(std::as_const(data))}, 1, {bytes_of(got)});
      WorkPtr sum = group->all_reduce(bytes_of(data), ElementType::kFloat32, ReduceOp::kSum);
    }
  });
  if (run.in_child) return;
  testing::expect_all_passed(run);
  EXPECT_LT(run.seconds, 20);
}

TEST(HeldPort, IsGivenToNobodyElseAndAStoreListensOnIt) {
  std::set<int> ports;
  std::vector<std::unique_ptr<HeldPort>> held;
  for (int i = 0; i < 200; ++i) {
    held.push_back(std::make_unique<HeldPort>());
    EXPECT_GT(held.back()->port(), 0);
    EXPECT_TRUE(ports.insert(held.back()->port()).second);
    EXPECT_EQ(ports.count(free_port()), 0);
  }
  for (const auto& port : {held.front()->port(), held.back()->port()}) {
    c10d::TCPStoreOptions options;
    options.port = static_cast<uint16_t>(port);
    options.isServer = true;
    c10d::TCPStore store("127.0.0.1", options);
    store.set("a", std::vector<uint8_t>{1});
    EXPECT_EQ(store.get("a"), std::vector<uint8_t>{1});
  }
}

TEST(MakeC10d, RefusesWhatItCannotDo) {
  EXPECT_THROW(make_c10d({.master_port = 0}), InvalidArgument);
  EXPECT_THROW(make_c10d({.master_port = 1234, .rank = 2, .size = 2}), InvalidArgument);
  EXPECT_THROW(make_c10d({.backend = "mpi", .master_port = 1234}), InvalidArgument);
  const std::string text = error_of([] {
    make_c10d({.master_port = free_port(),
               .rank = 1,
               .size = 2,
               .timeout = std::chrono::milliseconds(300)});  // nobody listens
  });
  EXPECT_NE(text.find("127.0.0.1:"), std::string::npos) << text;
  EXPECT_NE(text.find("rank 1 of 2"), std::string::npos) << text;
}

}  // namespace
}  // namespace mtraining::comm
