#include "mtraining/comm/c10d.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <future>
#include <memory>
#include <set>
#include <thread>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <vector>

#include "mtraining/comm/c10d_group.h"
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

TEST(Gloo, OpeningOverAStoreThatHangsEndsInItsTimeout) {
  // Rank 0, which has the store, is stopped as a rank is that a debugger or a dying machine holds.
  const ProcessRun run = run_processes(2, free_port, [](const RankProcess& process) {
    auto transport = connect(process, std::chrono::seconds(4));
    CommunicatorPtr group = transport->open("meet", all_ranks(*transport));
    int64_t pid = getpid();
    std::vector<int64_t> pids(2);
    group->all_gather({&pid, 8}, {{&pids[0], 8}, {&pids[1], 8}})->wait();
    if (process.rank == 0) {
      group->barrier();
      return;
    }
    kill(static_cast<pid_t>(pids[0]), SIGSTOP);
    const auto start = std::chrono::steady_clock::now();
    const std::string text = error_of([&] { transport->open("kv", all_ranks(*transport)); });
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
    EXPECT_NE(text.find("rank 1: opening communicator 'kv'"), std::string::npos) << text;
    EXPECT_NE(text.find("does not answer: timeout after 4000 ms"), std::string::npos) << text;
    const auto late = std::chrono::steady_clock::now();
    transport->abort("enough");  // a store that is known to hang keeps nobody
    EXPECT_LT(std::chrono::steady_clock::now() - late, std::chrono::seconds(1));
    kill(static_cast<pid_t>(pids[0]), SIGKILL);
  });
  if (run.in_child) return;
  EXPECT_EQ(run.ranks[1].exit_code, 0) << run.ranks[1].output;
  EXPECT_LT(run.seconds, 25);
}

TEST(FailureBoard, QuestionsToAStoreThatHangsLeaveOneThread) {
  /// Never answers until it is let go.
  class HangingStore : public c10d::TCPStore {
   public:
    explicit HangingStore(std::shared_future<void> open)
        : TCPStore("127.0.0.1",
                   [] {
                     c10d::TCPStoreOptions options;
                     options.port = 0;
                     options.isServer = true;
                     return options;
                   }()),
          open_(std::move(open)) {}
    bool check(const std::vector<std::string>& keys) override {
      open_.wait();
      return TCPStore::check(keys);
    }

   private:
    std::shared_future<void> open_;
  };
  const auto threads = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/task"), {});
  };
  std::promise<void> gate;
  const auto store = c10::make_intrusive<HangingStore>(gate.get_future().share());
  c10d_detail::FailureBoard board(store, 3);
  const auto before = threads();
  for (int i = 0; i < 8; ++i) EXPECT_EQ(board.find(std::chrono::milliseconds(0)), "");
  board.report("the loader broke");  // is told when the store answers again
  EXPECT_EQ(threads(), before + 1);
  gate.set_value();
  std::string cause;
  for (int i = 0; i < 300 && cause.empty(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    cause = board.find(std::chrono::milliseconds(0));
  }
  EXPECT_EQ(cause, "rank 3: the loader broke");
  EXPECT_EQ(threads(), before + 1);
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
