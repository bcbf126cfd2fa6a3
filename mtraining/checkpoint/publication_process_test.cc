// Real processes over Gloo, one of which is killed while it writes.
#include <gtest/gtest.h>

#include <csignal>
#include <numeric>

#include "mtraining/checkpoint/disk.h"
#include "mtraining/checkpoint/publication.h"
#include "mtraining/checkpoint/training_state.h"
#include "mtraining/comm/c10d.h"
#include "mtraining/testing/error_of.h"
#include "mtraining/testing/process_ranks.h"
#include "mtraining/testing/scratch_folder.h"

namespace mtraining::checkpoint {
namespace {

using testing::error_of;
using testing::memory_folder;
using testing::ScratchFolder;

namespace fs = std::filesystem;

constexpr int kRanks = 4, kKilled = 2;
constexpr int64_t kElements = 100'000;

std::vector<std::byte> content(int64_t step) {
  return std::vector<std::byte>(4 * kElements, static_cast<std::byte>(step));
}

void publish_step(const fs::path& root, int64_t step, int rank, const Agreement& agree) {
  publish(
      {root, step, rank, 1},
      [&](const fs::path& folder) {
        make_folder(folder / "training_state", true);
        const StatePiece piece{{"master", StoredType::kF32, {kElements}},
                               kElements * rank / kRanks,
                               kElements * (rank + 1) / kRanks};
        Progress progress;
        progress.train_step = step;
        TrainingStateWriter writer(folder / "training_state", rank, kRanks, {piece}, progress);
        const auto bytes = content(step);
        const int64_t half = 2 * (piece.end - piece.begin);
        writer.write(0, std::span(bytes).first(half));
        if (step == 20 && rank == kKilled) ::kill(::getpid(), SIGKILL);
        writer.write(0, std::span(bytes).first(half));
        writer.finish();
      },
      [](const fs::path& folder) { TrainingState check(folder / "training_state"); }, agree);
}

TEST(PublicationProcess, ARankKilledWhileItWritesEndsTheOthersAndLeavesTheLastCheckpoint) {
  const char* inherited = std::getenv("MTRAINING_TEST_FOLDER");
  std::optional<ScratchFolder> scratch;
  if (!inherited) {
    scratch.emplace(memory_folder());
    ::setenv("MTRAINING_TEST_FOLDER", scratch->path().c_str(), 1);
  }
  const fs::path root = inherited ? fs::path(inherited) : scratch->path();
  const auto run =
      testing::run_processes(kRanks, comm::free_port, [&](const testing::RankProcess& process) {
        const auto transport = comm::make_c10d({.master_port = process.port,
                                                .rank = process.rank,
                                                .size = process.size,
                                                .timeout = std::chrono::seconds(20)});
        std::vector<int> members(kRanks);
        std::iota(members.begin(), members.end(), 0);
        const auto communicator = transport->open("checkpoint", members);
        const Agreement agree = agree_over(*communicator);
        publish_step(root, 10, process.rank, agree);
        EXPECT_NE(error_of([&] { publish_step(root, 20, process.rank, agree); }), "");
      });
  if (run.in_child) return;
  ::unsetenv("MTRAINING_TEST_FOLDER");
  for (int rank = 0; rank < kRanks; ++rank) {
    EXPECT_FALSE(run.ranks[rank].timed_out) << rank;
    EXPECT_EQ(run.ranks[rank].exit_code, rank == kKilled ? 128 + SIGKILL : 0)
        << rank << ": " << run.ranks[rank].output;
  }
  EXPECT_LT(run.seconds, 30);
  const std::optional<PublishedCheckpoint> newest = find_newest(root);
  ASSERT_TRUE(newest.has_value());
  EXPECT_EQ(newest->train_step, 10);
  TrainingState state(newest->folder / "training_state");
  std::vector<std::byte> got(4 * kElements);
  state.read("master", 0, kElements, got);
  EXPECT_EQ(got, content(10));
}

}  // namespace
}  // namespace mtraining::checkpoint
