#include "mtraining/checkpoint/publication.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <map>
#include <numeric>
#include <set>

#include "mtraining/checkpoint/disk.h"
#include "mtraining/checkpoint/training_state.h"
#include "mtraining/checkpoint/weight_folder.h"
#include "mtraining/comm/loopback.h"
#include "mtraining/testing/error_of.h"
#include "mtraining/testing/scratch_folder.h"

namespace mtraining::checkpoint {
namespace {

using testing::error_of;
using testing::get_text;
using testing::memory_folder;
using testing::put_text;
using testing::ScratchFolder;

namespace fs = std::filesystem;

constexpr int64_t kElements = 600;

std::vector<std::byte> content(int64_t step, int64_t bytes) {
  std::vector<std::byte> result(static_cast<size_t>(bytes));
  for (size_t i = 0; i < result.size(); ++i) result[i] = static_cast<std::byte>(i * 7 + step);
  return result;
}

/// What a trainer writes: weights in shards, companion files, one rank's state. The bytes follow from the step.
void write_rank(const fs::path& folder, int64_t step, int rank, int world_size,
                int64_t elements = kElements) {
  const fs::path state = folder / "training_state";
  make_folder(state, true);
  if (rank == 0) {
    std::vector<TensorSpec> specs;
    for (const char* name : {"a", "b", "c", "d"})
      specs.push_back({name, StoredType::kF32, {elements}});
    WeightFolderWriter weights(folder, specs, 4 * elements);
    for (const TensorSpec& spec : specs) weights.write(spec.name, content(step, 4 * elements));
    weights.finish();
    write_text_file(folder / "config.json", "{}\n");
  }
  const StatePiece piece{{"master", StoredType::kF32, {elements}},
                         elements * rank / world_size,
                         elements * (rank + 1) / world_size};
  Progress progress;
  progress.train_step = step;
  TrainingStateWriter writer(state, rank, world_size, {piece}, progress);
  const auto bytes = content(step, 4 * elements);
  writer.write(0, std::span(bytes).subspan(4 * piece.begin, 4 * (piece.end - piece.begin)));
  writer.finish();
}

fs::path publish_alone(const fs::path& root, int64_t step, int keep = 0,
                       int64_t elements = kElements) {
  return publish(
      {root, step, 0, keep},
      [&](const fs::path& folder) { write_rank(folder, step, 0, 1, elements); },
      [](const fs::path& folder) { TrainingState check(folder / "training_state"); }, agree_alone);
}

/// Reads every byte of a checkpoint; false where one is not what its step implies.
bool is_whole(const PublishedCheckpoint& checkpoint) {
  const int64_t bytes = 4 * kElements;
  const auto want = content(checkpoint.train_step, bytes);
  TrainingState state(checkpoint.folder / "training_state");
  std::vector<std::byte> got(static_cast<size_t>(bytes));
  state.read("master", 0, kElements, got);
  const WeightFolder weights(checkpoint.folder);
  bool same = got == want && state.progress().train_step == checkpoint.train_step;
  for (const std::string& name : weights.names())
    same = same && std::equal(want.begin(), want.end(), weights.data(name).begin());
  return same && weights.names().size() == 4;
}

struct Observed {
  explicit Observed(DiskObserver observer) { observe_disk(std::move(observer)); }
  ~Observed() { observe_disk({}); }
};

std::vector<std::string> hidden_in(const fs::path& root) {
  std::vector<std::string> names;
  for (const fs::directory_entry& entry : fs::directory_iterator(root))
    if (entry.path().filename().string()[0] == '.') names.push_back(entry.path().filename());
  return names;
}

struct Scenario {
  const char* name;
  std::vector<int64_t> before;  ///< steps published beforehand
  int64_t step;                 ///< published under fire
  int keep;
};
const Scenario kScenarios[] = {{"the first of all", {}, 10, 0},
                               {"the next", {10}, 20, 0},
                               {"the same step again", {10}, 10, 0},
                               {"the next, older ones go", {10, 20, 30}, 40, 1}};

void prepare(const fs::path& root, const Scenario& scenario) {
  for (const int64_t step : scenario.before) publish_alone(root, step);
}

/// After an interruption: the newest is whole, and it is the one before or the one that was being published.
void expect_survived(const fs::path& root, const Scenario& scenario, const std::string& when) {
  const std::optional<PublishedCheckpoint> newest = find_newest(root);
  if (scenario.before.empty() && !newest) return;
  ASSERT_TRUE(newest.has_value()) << when << ": no checkpoint is left";
  EXPECT_TRUE(newest->train_step == scenario.step || newest->train_step == scenario.before.back())
      << when << ": step " << newest->train_step;
  EXPECT_TRUE(is_whole(*newest)) << when;
}

void expect_next_publication_works(const fs::path& root, const std::string& when) {
  publish_alone(root, 90, 2);
  const CheckpointList list = list_checkpoints(root);
  EXPECT_TRUE(list.ignored.empty()) << when << ": " << list.ignored[0].reason;
  EXPECT_EQ(list.complete.back().train_step, 90) << when;
  EXPECT_LE(list.complete.size(), 2u) << when;
  for (const PublishedCheckpoint& each : list.complete) EXPECT_TRUE(is_whole(each)) << when;
  EXPECT_TRUE(hidden_in(root).empty()) << when << ": " << hidden_in(root)[0];
  EXPECT_EQ(get_text(root / "latest"), "step-00000090\n");
}

TEST(Publication, KillAtEveryOperationLeavesTheNewestWhole) {
  for (const Scenario& scenario : kScenarios) {
    int interruptions = 0;
    for (int at = 0;; ++at) {
      const ScratchFolder scratch(memory_folder());
      const fs::path root = scratch / "checkpoints";
      prepare(root, scenario);
      const pid_t child = ::fork();
      ASSERT_GE(child, 0);
      if (child == 0) {
        int count = 0;
        observe_disk([&](std::string_view, const fs::path&) {
          if (count++ == at) ::kill(::getpid(), SIGKILL);
        });
        publish_alone(root, scenario.step, scenario.keep);
        ::_exit(0);
      }
      int status = 0;
      ASSERT_EQ(::waitpid(child, &status, 0), child);
      if (WIFEXITED(status)) {
        ASSERT_EQ(WEXITSTATUS(status), 0);
        break;
      }
      ++interruptions;
      const std::string when = concat(scenario.name, ", killed at operation ", at);
      expect_survived(root, scenario, when);
      expect_next_publication_works(root, when);
    }
    EXPECT_GT(interruptions, 40) << scenario.name;
  }
}

TEST(Publication, AFailureAtEveryOperationIsAnErrorAndLeavesTheNewestWhole) {
  for (const Scenario& scenario : kScenarios)
    for (int at = 0;; ++at) {
      const ScratchFolder scratch(memory_folder());
      const fs::path root = scratch / "checkpoints";
      prepare(root, scenario);
      std::string error, failed;
      {
        int count = 0;
        const Observed observed([&](std::string_view operation, const fs::path& path) {
          if (count++ != at) return;
          failed = concat(operation, ' ', path.string());
          throw ExternalError(
              concat(path.string(), ": cannot ", operation, ": No space left on device"));
        });
        error = error_of([&] { publish_alone(root, scenario.step, scenario.keep); });
      }
      if (failed.empty()) {
        EXPECT_EQ(error, "");
        break;
      }
      const std::string when = concat(scenario.name, ", failed at ", failed);
      EXPECT_NE(error.find("No space left on device"), std::string::npos) << when << ": " << error;
      EXPECT_EQ(error.find(concat("checkpoint of train_step ", scenario.step)), 0u) << error;
      expect_survived(root, scenario, when);
      expect_next_publication_works(root, when);
    }
}

TEST(Publication, EverythingIsFlushedBeforeItIsPublished) {
  const ScratchFolder scratch;
  const fs::path root = scratch / "checkpoints";
  std::vector<std::pair<std::string, fs::path>> log;
  {
    const Observed observed([&](std::string_view operation, const fs::path& path) {
      log.emplace_back(operation, path);
    });
    publish_alone(root, 10);
  }
  std::map<fs::path, int> changed, flushed;
  int published = -1, pointed = -1, record = -1;
  for (int i = 0; i < static_cast<int>(log.size()); ++i) {
    const auto& [operation, path] = log[i];
    if (operation == "create" || operation == "write") {
      changed[path] = i;
      changed.try_emplace(path.parent_path());
      if (operation == "create") changed[path.parent_path()] = i;
      if (path.filename() == "complete.json") record = std::max(record, i);
    }
    if (operation == "make_folder") changed[path.parent_path()] = i;
    if (operation == "sync" || operation == "sync_folder") flushed[path] = i;
    if (operation == "rename" && path == root / "step-00000010") published = i;
    if (operation == "rename" && path == root / "latest") pointed = i;
    if (published != i) continue;
    for (const auto& [file, when] : changed)
      if (file != root) {
        EXPECT_GT(flushed[file], when) << file << " was not flushed before it was published";
        if (file.filename() != "complete.json" && file != root / ".incomplete-step-00000010") {
          EXPECT_LT(flushed[file], record) << file << " was flushed after it was called complete";
        }
      }
  }
  ASSERT_GT(published, 0);
  ASSERT_GT(pointed, published);
  EXPECT_GT(changed.size(), 8u);
  EXPECT_GT(flushed[root], pointed);
  const bool between = std::any_of(
      log.begin() + published, log.begin() + pointed,
      [&](const auto& each) { return each.first == "sync_folder" && each.second == root; });
  EXPECT_TRUE(between) << "the root was not flushed before the pointer was moved";
}

TEST(Publication, KeepsTheLastPublishedOnes) {
  for (const int keep : {0, 1, 2, 3}) {
    const ScratchFolder scratch;
    std::vector<int64_t> steps;
    for (int64_t step = 10; step <= 60; step += 10) {
      EXPECT_EQ(publish_alone(scratch.path(), step, keep).filename(), concat("step-000000", step));
      steps.push_back(step);
      if (keep > 0 && static_cast<int>(steps.size()) > keep) steps.erase(steps.begin());
      std::vector<int64_t> got;
      for (const PublishedCheckpoint& each : list_checkpoints(scratch.path()).complete)
        got.push_back(each.train_step);
      EXPECT_EQ(got, steps) << "keep " << keep;
      EXPECT_TRUE(hidden_in(scratch.path()).empty());
    }
  }
}

TEST(Publication, ARunThatWentBackGoesOnFromItsOwnCheckpoint) {
  const ScratchFolder scratch;
  for (const int64_t step : {10, 20, 30}) publish_alone(scratch.path(), step);
  publish_alone(scratch.path(), 12, 2);  // after --resume=.../step-00000010
  EXPECT_EQ(find_newest(scratch.path())->train_step, 12);
  std::set<int64_t> steps;
  for (const PublishedCheckpoint& each : list_checkpoints(scratch.path()).complete)
    steps.insert(each.train_step);
  EXPECT_EQ(steps, (std::set<int64_t>{12, 30}));
}

TEST(Publication, IncompleteFoldersAreIgnoredAndSaid) {
  const ScratchFolder scratch;
  EXPECT_FALSE(find_newest(scratch / "none").has_value());
  const auto damaged_in = [&](int64_t step, auto damage, const std::string& says) {
    const ScratchFolder root;
    publish_alone(root.path(), 10);
    damage(publish_alone(root.path(), step));
    EXPECT_EQ(find_newest(root.path())->train_step, 10) << says;
    const CheckpointList list = list_checkpoints(root.path());
    ASSERT_EQ(list.ignored.size(), 1u) << says;
    const IgnoredFolder& ignored = list.ignored[0];
    EXPECT_NE(ignored.reason.find(says), std::string::npos) << ignored.reason;
    EXPECT_NE(ignored.reason.find("step-00000020"), std::string::npos) << ignored.reason;
    EXPECT_FALSE(ignored.never_published);
    // It is not counted among those to keep and does not stand in the way of the next of its step.
    publish_alone(root.path(), step, 2);
    EXPECT_EQ(find_newest(root.path())->train_step, step);
    EXPECT_EQ(list_checkpoints(root.path()).complete.size(), 2u);
    EXPECT_TRUE(hidden_in(root.path()).empty());
  };
  damaged_in(
      20, [](const fs::path& f) { fs::remove(f / "complete.json"); }, "no complete.json");
  damaged_in(
      20, [](const fs::path& f) { put_text(f / "complete.json", "{"); }, "not valid JSON");
  damaged_in(
      20, [](const fs::path& f) { put_text(f / "complete.json", "{}"); }, "an object of");
  damaged_in(
      20, [](const fs::path& f) { fs::remove(f / "model-00002-of-00004.safetensors"); },
      "\"model-00002-of-00004.safetensors\" is missing");
  damaged_in(
      20,
      [](const fs::path& f) {
        const fs::path file = f / "training_state/rank-00000-of-00001.safetensors";
        fs::resize_file(file, fs::file_size(file) - 1);
      },
      "rank-00000-of-00001.safetensors\": expected");

  publish_alone(scratch.path(), 10);
  fs::create_directory(scratch / "step-notes");  // not ours
  fs::create_directory(scratch / ".incomplete-step-00000099");
  EXPECT_EQ(find_newest(scratch.path())->train_step, 10);
  EXPECT_EQ(list_checkpoints(scratch.path()).ignored.size(), 1u);
  publish_alone(scratch.path(), 20);
  EXPECT_TRUE(list_checkpoints(scratch.path()).ignored.empty()) << "left-overs are removed";
  EXPECT_TRUE(fs::exists(scratch / "step-notes"));
}

TEST(Publication, AllRanksWriteOneCheckpointOrAllReportTheSameError) {
  for (const int world_size : {1, 2, 3, 4}) {
    const ScratchFolder scratch;
    // The error of each rank; threads stand for ranks.
    const auto publish_step = [&](int64_t step, int failing_rank) {
      std::vector<std::string> errors(world_size);
      comm::run_loopback(world_size, [&](comm::Transport& transport) {
        std::vector<int> members(world_size);
        std::iota(members.begin(), members.end(), 0);
        const int rank = transport.rank();
        const comm::CommunicatorPtr communicator = transport.open("checkpoint", members);
        errors[rank] = error_of([&] {
          publish(
              {scratch.path(), step, rank, 1},
              [&](const fs::path& folder) {
                write_rank(folder, step, rank, world_size);
                MT_CHECK_EXTERNAL(rank != failing_rank, "rank ", rank, ": No space left on device");
              },
              [](const fs::path& folder) { TrainingState check(folder / "training_state"); },
              agree_over(*communicator));
        });
      });
      return errors;
    };
    for (const std::string& error : publish_step(10, -1)) EXPECT_EQ(error, "");
    EXPECT_EQ(TrainingState(scratch / "step-00000010/training_state").world_size(), world_size);
    for (int failing = 0; failing < world_size; ++failing) {
      for (const std::string& error : publish_step(20, failing))
        EXPECT_EQ(error, concat("checkpoint of train_step 20: rank ", failing,
                                ": No space left on device"));
      EXPECT_TRUE(hidden_in(scratch.path()).empty()) << "the disk is given back";
      EXPECT_EQ(find_newest(scratch.path())->train_step, 10);
    }
    for (const std::string& error : publish_step(30, -1)) EXPECT_EQ(error, "");
    EXPECT_TRUE(is_whole(*find_newest(scratch.path())));
    EXPECT_FALSE(fs::exists(scratch / "step-00000010"));
  }
}

TEST(Publication, AgreementGivesTheLowestRanksErrorToAll) {
  for (const int ranks : {1, 2, 5}) {
    std::vector<std::string> got(ranks);
    comm::run_loopback(ranks, [&](comm::Transport& transport) {
      std::vector<int> members(ranks);
      std::iota(members.begin(), members.end(), 0);
      const comm::CommunicatorPtr communicator = transport.open("agreement", members);
      const Agreement agree = agree_over(*communicator);
      const int rank = transport.rank();
      const std::string mine = rank == 0 ? "" : concat("rank ", rank, std::string(3000, '!'));
      got[rank] = agree("") + agree(mine);
    });
    for (const std::string& each : got)
      EXPECT_EQ(each, ranks == 1 ? "" : "rank 1" + std::string(1000 - 6, '!'));
  }
}

TEST(Publication, WhatDoesNotVerifyIsNotPublished) {
  const ScratchFolder scratch;
  publish_alone(scratch.path(), 10);
  const std::string error = error_of([&] {
    publish(
        {scratch.path(), 20, 0, 1},
        [](const fs::path& folder) { write_rank(folder, 20, 0, 2); },  // rank 1 is missing
        [](const fs::path& folder) { TrainingState check(folder / "training_state"); },
        agree_alone);
  });
  EXPECT_NE(error.find("rank-00001-of-00002.json"), std::string::npos) << error;
  EXPECT_EQ(list_checkpoints(scratch.path()).complete.size(), 1u);
  EXPECT_TRUE(hidden_in(scratch.path()).empty());
}

TEST(Publication, AnAgreementThatBreaksDownLeavesTheLastOne) {
  const ScratchFolder scratch;
  publish_alone(scratch.path(), 10);
  int calls = 0;
  const std::string error = error_of([&] {
    publish(
        {scratch.path(), 20, 0, 1}, [](const fs::path& folder) { write_rank(folder, 20, 0, 1); },
        {},
        [&](const std::string& mine) {
          if (++calls == 2) throw ExternalError("rank 2 did not answer");
          return mine;
        });
  });
  EXPECT_EQ(error, "rank 2 did not answer");
  EXPECT_EQ(find_newest(scratch.path())->train_step, 10);
  publish_alone(scratch.path(), 20, 1);
  EXPECT_TRUE(hidden_in(scratch.path()).empty());
}

/// In a child: a real disk that is full, where this process may mount one, else a limit on the size of files.
TEST(Publication, AFullDiskKeepsTheLastCheckpoint) {
  const ScratchFolder scratch;
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    ::signal(SIGXFSZ, SIG_IGN);
    const bool mounted = ::unshare(CLONE_NEWNS) == 0 &&
                         ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
                         ::mount("tmpfs", scratch.path().c_str(), "tmpfs", 0, "size=256k") == 0;
    const fs::path root = scratch / "checkpoints";
    publish_alone(root, 10, 1);
    if (!mounted) {
      const struct rlimit limit { 64 << 10, 64 << 10 };
      ::setrlimit(RLIMIT_FSIZE, &limit);
    }
    int result = 0;
    const std::string error = error_of([&] { publish_alone(root, 20, 1, 20'000); });
    if (error.find("checkpoint of train_step 20: ") != 0) result |= 1;
    if (error.find(mounted ? "No space left on device" : "File too large") == std::string::npos)
      result |= 2;
    const std::optional<PublishedCheckpoint> newest = find_newest(root);
    if (!newest || newest->train_step != 10 || !is_whole(*newest)) result |= 4;
    if (!hidden_in(root).empty()) result |= 8;
    if (error_of([&] { publish_alone(root, 30, 1); }) != "") result |= 16;
    if (find_newest(root)->train_step != 30) result |= 32;
    ::_exit(result);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0)
      << "1 no error, 2 another error, 4 lost the last, 8 left-overs, "
         "16 the next fails, 32 the next is not found";
}

TEST(Publication, CompanionFilesAreCopied) {
  const ScratchFolder from, to;
  for (const char* name : {"tokenizer.json", "merges.txt", "chat_template.jinja",
                           "generation_config.json", "model.safetensors", "README.md"})
    put_text(from / name, name);
  fs::create_directory(from / "additional_chat_templates");
  put_text(from / "additional_chat_templates/tools.jinja", "tools");
  const CompanionFiles files = read_companion_files(from.path());
  EXPECT_EQ(files, (CompanionFiles{{"additional_chat_templates/tools.jinja", "tools"},
                                   {"chat_template.jinja", "chat_template.jinja"},
                                   {"generation_config.json", "generation_config.json"},
                                   {"merges.txt", "merges.txt"},
                                   {"tokenizer.json", "tokenizer.json"}}));
  fs::remove_all(from.path());  // what was read stays
  write_companion_files(files, to.path());
  EXPECT_EQ(read_companion_files(to.path()), files);
  EXPECT_NE(error_of([&] { read_companion_files(from.path()); }).find(from.path().string()),
            std::string::npos)
      << "a folder that is gone has no files to copy, and says so";
  EXPECT_EQ(get_text(to / "merges.txt"), "merges.txt");
  EXPECT_EQ(get_text(to / "additional_chat_templates/tools.jinja"), "tools");
  EXPECT_FALSE(fs::exists(to / "model.safetensors") || fs::exists(to / "README.md"));
}

}  // namespace
}  // namespace mtraining::checkpoint
