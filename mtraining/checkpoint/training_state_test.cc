#include "mtraining/checkpoint/training_state.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>

#include "mtraining/base/rng.h"
#include "mtraining/testing/error_of.h"
#include "mtraining/testing/scratch_folder.h"

namespace mtraining::checkpoint {
namespace {

using testing::error_of;
using testing::expect_says;
using testing::get_text;
using testing::memory_folder;
using testing::put_text;
using testing::ScratchFolder;

namespace fs = std::filesystem;
using nlohmann::json;

const std::vector<TensorSpec>& tensors() {
  static const std::vector<TensorSpec> specs = {{"master/embed", StoredType::kF32, {5, 7}},
                                                {"master/norm", StoredType::kF32, {3}},
                                                {"moment/embed", StoredType::kF32, {5, 7}},
                                                {"count", StoredType::kI64, {}},
                                                {"empty", StoredType::kBF16, {0, 4}}};
  return specs;
}

std::vector<std::byte> content(const TensorSpec& spec) {
  std::vector<std::byte> bytes(static_cast<size_t>(num_bytes(spec)));
  for (size_t i = 0; i < bytes.size(); ++i)
    bytes[i] = static_cast<std::byte>(Rng(spec.name.size(), spec.name[0]).bits(i));
  return bytes;
}

Progress some_progress() {
  return {.train_step = 10,
          .micro_step = 3,
          .sample_position = std::numeric_limits<int64_t>::max(),
          .tokens_total = 1 << 20,
          .skipped_steps = 1,
          .seed = std::numeric_limits<uint64_t>::max(),
          .notes = R"({"lr": 0.5})"};
}

/// Rank r of W holds the elements [n r / W, n (r + 1) / W) of each tensor of n elements.
std::vector<StatePiece> pieces_of(int rank, int world_size) {
  std::vector<StatePiece> pieces;
  for (const TensorSpec& spec : tensors()) {
    const int64_t n = num_elements(spec);
    pieces.push_back({spec, n * rank / world_size, n * (rank + 1) / world_size});
  }
  return pieces;
}

void write_rank(const fs::path& folder, int rank, int world_size, std::vector<StatePiece> pieces,
                const Progress& progress = some_progress()) {
  TrainingStateWriter writer(folder, rank, world_size, pieces, progress);
  for (size_t i = 0; i < pieces.size(); ++i) {
    const auto whole = content(pieces[i].tensor);
    const int64_t width = bytes_of(pieces[i].tensor.type);
    const auto bytes = std::span(whole).subspan(pieces[i].begin * width,
                                                (pieces[i].end - pieces[i].begin) * width);
    const size_t half = bytes.size() / 2;
    writer.write(i, bytes.first(half));
    writer.write(i, bytes.subspan(half));
  }
  writer.finish();
}

void write_all(const fs::path& folder, int world_size) {
  for (int rank = 0; rank < world_size; ++rank)
    write_rank(folder, rank, world_size, pieces_of(rank, world_size));
}

std::string open_error(const fs::path& folder) {
  return error_of([&] { TrainingState state(folder); });
}

TEST(TrainingState, AnyNumberOfRanksReadsWhatAnyOtherNumberWrote) {
  for (const int writers : {1, 2, 3, 4, 8, 40}) {
    const ScratchFolder folder(memory_folder());
    write_all(folder.path(), writers);
    for (const int readers : {1, 2, 3, 5, 8}) {
      TrainingState state(folder.path());
      EXPECT_EQ(state.world_size(), writers);
      EXPECT_EQ(state.progress(), some_progress());
      EXPECT_EQ(state.tensors().size(), tensors().size());
      for (const TensorSpec& spec : tensors()) {
        ASSERT_NE(state.find(spec.name), nullptr);
        EXPECT_EQ(to_string(*state.find(spec.name)), to_string(spec));
        std::vector<std::byte> got(static_cast<size_t>(num_bytes(spec)));
        const int64_t n = num_elements(spec), width = bytes_of(spec.type);
        for (int rank = 0; rank < readers; ++rank) {
          const int64_t begin = n * rank / readers, end = n * (rank + 1) / readers;
          state.read(spec.name, begin, end,
                     std::span(got).subspan(begin * width, (end - begin) * width));
        }
        EXPECT_EQ(got, content(spec)) << spec.name << ", " << writers << " -> " << readers;
      }
    }
  }
}

TEST(TrainingState, ReadingBeyondATensorIsRefused) {
  const ScratchFolder folder(memory_folder());
  write_all(folder.path(), 2);
  TrainingState state(folder.path());
  std::vector<std::byte> room(12);
  const auto read = [&](const char* name, int64_t begin, int64_t end) {
    return error_of([&] { state.read(name, begin, end, room); });
  };
  EXPECT_EQ(read("master/norm", 0, 3), "");
  expect_says(read("master/none", 0, 3), {"\"master/none\"", "got none"});
  expect_says(read("master/norm", 1, 4), {"inside its 3 elements", "[1, 4)"});
  expect_says(read("master/norm", -1, 2), {"[-1, 2)"});
  expect_says(read("master/norm", 0, 2), {"room for 8 bytes, got 12"});
}

TEST(TrainingState, PiecesMustCoverEachTensorOnce) {
  const auto with = [](auto change) {
    const ScratchFolder folder(memory_folder());
    std::vector<std::vector<StatePiece>> ranks = {pieces_of(0, 2), pieces_of(1, 2)};
    change(ranks);
    return error_of([&] {
      for (int rank = 0; rank < 2; ++rank) write_rank(folder.path(), rank, 2, ranks[rank]);
      TrainingState state(folder.path());
    });
  };
  EXPECT_EQ(with([](auto&) {}), "");
  expect_says(with([](auto& r) { --r[0][0].end; }),
              {"\"master/embed\": elements [16, 17) are in no rank's file"});
  expect_says(with([](auto& r) { ++r[1][0].begin; }), {"[17, 18) are in no rank's file"});
  expect_says(with([](auto& r) { ++r[0][0].begin; }), {"[0, 1) are in no rank's file"});
  expect_says(with([](auto& r) { --r[1][0].end; }), {"[34, 35) are in no rank's file"});
  expect_says(with([](auto& r) { r[1].erase(r[1].begin()); }), {"[17, 35) are in no rank's file"});
  expect_says(with([](auto& r) { --r[1][0].begin; }), {"[16, 17) are in two files"});
  expect_says(with([](auto& r) { r[1][0].begin = 0; }), {"\"master/embed\"", "are in two files"});
  expect_says(with([](auto& r) { r[1][0].tensor.shape = {35}; }),
              {"expected F32 [5, 7] as on another rank, got F32 [35]"});
  expect_says(with([](auto& r) { r[1][0].tensor.type = StoredType::kI32; }), {"got I32 [5, 7]"});
  expect_says(with([](auto& r) { r[1][0].end = 36; }), {"inside its 35 elements"});
  expect_says(with([](auto& r) { r[1].push_back(r[1][0]); }), {"is given twice"});
}

TEST(TrainingState, RanksThatDoNotBelongTogetherAreRefused) {
  {
    const ScratchFolder folder(memory_folder());
    write_all(folder.path(), 4);
    fs::remove(folder / "rank-00002-of-00004.json");
    expect_says(open_error(folder.path()), {"rank-00002-of-00004.json", "No such file"});
    fs::remove(folder / "rank-00001-of-00004.safetensors");
    expect_says(open_error(folder.path()), {"rank-00001-of-00004.safetensors", "No such file"});
  }
  {
    const ScratchFolder folder(memory_folder());
    write_all(folder.path(), 2);
    write_rank(folder.path(), 0, 3, pieces_of(0, 3));
    expect_says(open_error(folder.path()), {"one number of ranks", "-of-00002", "-of-00003"});
  }
  {
    const ScratchFolder folder(memory_folder());
    write_all(folder.path(), 2);
    Progress other = some_progress();
    other.train_step = 11;
    write_rank(folder.path(), 1, 2, pieces_of(1, 2), other);
    expect_says(open_error(folder.path()), {"rank-00001", "train_step 11", "train_step 10"});
  }
  const ScratchFolder folder(memory_folder());
  expect_says(open_error(folder.path()), {"expected files rank-"});
  expect_says(open_error(folder / "none"), {"expected a folder"});
}

TEST(TrainingState, AnyDamagedByteOfATensorIsFoundWhenItIsRead) {
  const ScratchFolder folder(memory_folder());
  write_all(folder.path(), 2);
  const fs::path path = folder / "rank-00001-of-00002.safetensors";
  const std::string whole = get_text(path);
  const int64_t data_begin = SafetensorsFile(path).tensors()[0].begin;
  for (size_t place = static_cast<size_t>(data_begin); place < whole.size(); ++place) {
    std::string text = whole;
    text[place] = static_cast<char>(text[place] ^ 1);
    put_text(path, text);
    TrainingState state(folder.path());
    std::string error;
    for (const TensorSpec& spec : tensors()) {
      std::vector<std::byte> room(static_cast<size_t>(num_bytes(spec)));
      error += error_of([&] { state.read(spec.name, 0, num_elements(spec), room); });
    }
    ASSERT_NE(error.find("is damaged"), std::string::npos) << "byte " << place;
    ASSERT_NE(error.find(path.string()), std::string::npos);
  }
}

TEST(TrainingState, ADamagedListIsOneError) {
  const ScratchFolder folder(memory_folder());
  write_all(folder.path(), 2);
  const fs::path path = folder / "rank-00001-of-00002.json";
  const std::string whole = get_text(path);
  const auto content_end = whole.find_last_not_of('\n');
  for (size_t length = 0; length <= content_end; length += 5) {
    put_text(path, whole.substr(0, length));
    ASSERT_NE(open_error(folder.path()), "") << length;
  }
  const Rng rng(3);
  for (uint64_t i = 0; i < 400; ++i) {  // anything but an Error ends the test
    std::string text = whole;
    text[rng.below(2 * i, text.size())] = static_cast<char>(rng.bits(2 * i + 1));
    put_text(path, text);
    ASSERT_EQ(open_error(folder.path()).find('\n'), std::string::npos);
  }
  const auto with = [&](auto change) {
    json root = json::parse(whole);
    change(root);
    put_text(path, root.dump());
    return open_error(folder.path());
  };
  EXPECT_EQ(with([](json&) {}), "");
  expect_says(with([](json& r) { r["version"] = 2; }), {"expected version 1, got 2"});
  expect_says(with([](json& r) { r.erase("progress"); }), {"a key is missing"});
  expect_says(with([](json& r) { r["pieces"].erase(0); }), {"expected 4 tensors", "got 5"});
  expect_says(with([](json& r) { r["pieces"][0]["end"] = 34; }), {"expected a tensor", "got none"});
  expect_says(with([](json& r) { r["pieces"][0]["dtype"] = "F31"; }), {"unknown dtype \"F31\""});
}

TEST(TrainingState, WriterRefusesNotesThatAreNoJsonAndPiecesLeftShort) {
  const ScratchFolder folder(memory_folder());
  Progress progress = some_progress();
  progress.notes = "{";
  expect_says(error_of([&] { TrainingStateWriter(folder.path(), 0, 1, {}, progress); }),
              {"Progress::notes"});
  expect_says(error_of([&] { TrainingStateWriter(folder.path(), 2, 2, {}, some_progress()); }),
              {"rank: expected 0 to 1, got 2"});
  expect_says(error_of([&] {
                TrainingStateWriter(folder.path(), 0, 1, pieces_of(0, 1), some_progress()).finish();
              }),
              {"rank-00000-of-00001.safetensors: tensor \"count[0:1]\": expected 8 bytes, got 0"});
}

}  // namespace
}  // namespace mtraining::checkpoint
