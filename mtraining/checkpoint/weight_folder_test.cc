#include "mtraining/checkpoint/weight_folder.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "mtraining/testing/error_of.h"
#include "mtraining/testing/scratch_folder.h"

namespace mtraining::checkpoint {
namespace {

using testing::error_of;
using testing::expect_says;
using testing::get_text;
using testing::put_text;
using testing::ScratchFolder;

namespace fs = std::filesystem;
using nlohmann::json;

std::vector<std::byte> bytes_like(const TensorSpec& spec, int seed) {
  std::vector<std::byte> bytes(static_cast<size_t>(num_bytes(spec)));
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(seed * 31 + i);
  return bytes;
}

std::vector<TensorSpec> specs() {
  return {{"embed", StoredType::kF32, {4, 3}},  // 48 bytes each
          {"layers.0", StoredType::kF32, {12}},
          {"layers.1", StoredType::kF32, {2, 6}},
          {"layers.2", StoredType::kF32, {3, 4}},
          {"norm", StoredType::kBF16, {24}}};
}

void write_folder(const fs::path& folder, int64_t max_shard_bytes) {
  WeightFolderWriter writer(folder, specs(), max_shard_bytes);
  int seed = 0;
  for (const TensorSpec& spec : specs()) writer.write(spec.name, bytes_like(spec, ++seed));
  writer.finish();
}

void write_file(const fs::path& path, const std::vector<TensorSpec>& tensors, int seed) {
  SafetensorsWriter writer(path, tensors);
  for (const TensorSpec& spec : tensors) writer.write(spec.name, bytes_like(spec, seed));
  writer.finish();
}

std::string open_error(const fs::path& folder) {
  return error_of([&] { WeightFolder weights(folder); });
}

constexpr int64_t kShardSizes[] = {1, 48, 49, 96, 100, 144, 1000};

TEST(WeightFolder, AnyShardSizeGivesTheSameTensors) {
  for (const int64_t size : kShardSizes) {
    const ScratchFolder folder;
    write_folder(folder.path(), size);
    const WeightFolder weights(folder.path());
    const auto per_shard = std::max<int64_t>(size / 48, 1);
    EXPECT_EQ(static_cast<int64_t>(weights.files().size()), (5 + per_shard - 1) / per_shard);
    EXPECT_EQ(fs::exists(folder / "model.safetensors"), size == 1000);
    EXPECT_EQ(weights.names().size(), 5u);
    EXPECT_TRUE(weights.unused_files().empty());
    int seed = 0;
    for (const TensorSpec& spec : specs()) {
      ASSERT_NE(weights.find(spec.name), nullptr);
      EXPECT_EQ(weights.find(spec.name)->shape, spec.shape);
      const auto want = bytes_like(spec, ++seed);
      const auto got = weights.data(spec.name);
      EXPECT_TRUE(std::equal(got.begin(), got.end(), want.begin(), want.end())) << spec.name;
    }
    expect_says(error_of([&] { weights.data("head"); }), {folder.path().string(), "\"head\""});
  }
}

TEST(WeightFolder, MissingShardsAreAllNamedBeforeAnythingIsRead) {
  const ScratchFolder folder;
  write_folder(folder.path(), 48);
  fs::remove(folder / "model-00002-of-00005.safetensors");
  fs::remove(folder / "model-00004-of-00005.safetensors");
  put_text(folder / "model-00001-of-00005.safetensors", "broken");  // found later than the missing
  expect_says(open_error(folder.path()),
              {"names 5 files, of which 2 are missing", "\"model-00002-of-00005.safetensors\"",
               "\"model-00004-of-00005.safetensors\""});
}

TEST(WeightFolder, OnlyIndexedFilesCountAndOthersAreReported) {
  const ScratchFolder folder;
  write_folder(folder.path(), 96);
  write_file(folder / "old.safetensors", specs(), 99);
  write_file(folder / "model-00001-of-00002.safetensors", specs(), 98);
  const WeightFolder weights(folder.path());
  EXPECT_EQ(weights.unused_files(),
            (std::vector<std::string>{"model-00001-of-00002.safetensors", "old.safetensors"}));
  const auto want = bytes_like(specs()[0], 1);
  const auto got = weights.data("embed");
  EXPECT_TRUE(std::equal(got.begin(), got.end(), want.begin(), want.end()));

  const ScratchFolder single;
  write_folder(single.path(), 1000);
  write_file(single / "old.safetensors", specs(), 99);
  EXPECT_EQ(WeightFolder(single.path()).unused_files(),
            std::vector<std::string>{"old.safetensors"});
  EXPECT_EQ(WeightFolder(single.path()).data("embed")[0], bytes_like(specs()[0], 1)[0]);
}

TEST(WeightFolder, AFolderThatLoadersWouldReadDifferentlyIsRefused) {
  const ScratchFolder folder;
  write_folder(folder.path(), 96);
  write_file(folder / "model.safetensors", specs(), 99);
  expect_says(open_error(folder.path()), {"holds both model.safetensors and"});
}

TEST(WeightFolder, AnIndexThatDisagreesWithItsShardsIsRefused) {
  const auto with = [](auto change) {
    const ScratchFolder folder;
    write_folder(folder.path(), 96);
    json index = json::parse(get_text(folder / "model.safetensors.index.json"));
    change(folder, index);
    put_text(folder / "model.safetensors.index.json", index.dump());
    return open_error(folder.path());
  };
  using Folder = const ScratchFolder&;
  const std::string last = "model-00003-of-00003.safetensors";
  EXPECT_EQ(with([](Folder, json&) {}), "");
  expect_says(with([&](Folder, json& i) { i["weight_map"]["ghost"] = last; }),
              {"expected tensor \"ghost\" in " + last, "does not hold it"});
  expect_says(with([&](Folder, json& i) { i["weight_map"]["embed"] = last; }),
              {"expected tensor \"embed\" in " + last, "but it is in model-00001"});
  expect_says(with([](Folder, json& i) { i["weight_map"].erase("embed"); }),
              {"model-00001-of-00003.safetensors", "does not name", "\"embed\""});
  expect_says(with([&](Folder f, json&) {
                write_file(f / last, {specs()[4], specs()[0]}, 7);
              }),
              {"\"embed\" is in two files", "model-00001", last});
  expect_says(with([](Folder, json& i) { i["weight_map"]["embed"] = "../x.safetensors"; }),
              {"same folder", "../x.safetensors"});
  expect_says(with([](Folder, json& i) { i["weight_map"]["embed"] = 3; }), {"name of a file"});
  expect_says(with([](Folder, json& i) { i["weight_map"] = json::object(); }), {"got none"});
  expect_says(with([](Folder, json& i) { i.erase("weight_map"); }), {"object weight_map"});
  expect_says(with([&](Folder f, json&) {
                const std::string whole = get_text(f / last);
                put_text(f / last, whole.substr(0, whole.size() - 1));
              }),
              {last, "truncated"});

  const ScratchFolder folder;
  write_folder(folder.path(), 96);
  put_text(folder / "model.safetensors.index.json",
           R"({"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}})");
  expect_says(open_error(folder.path()), {"duplicate name \"a\""});
}

TEST(WeightFolder, AFolderWithoutWeightsSaysWhatItHolds) {
  const ScratchFolder folder;
  expect_says(open_error(folder / "none"), {"expected a folder"});
  expect_says(open_error(folder.path()), {"expected model.safetensors", "no safetensors file"});
  write_file(folder / "weights.safetensors", specs(), 1);
  expect_says(open_error(folder.path()), {"got \"weights.safetensors\""});
}

TEST(WeightFolder, WriterRefusesANameTwice) {
  const ScratchFolder folder;
  const TensorSpec spec{"w", StoredType::kU8, {4}};
  expect_says(error_of([&] {
                WeightFolderWriter(folder.path(), {spec, spec}, 4);
              }),
              {"\"w\" is given twice"});
}

std::string read_error(const fs::path& folder) {
  return error_of([&] {
    const WeightFolder weights(folder);
    for (const std::string& name : weights.names()) weights.data(name);
  });
}

TEST(WeightFolder, EveryFlippedBitOfTheDataIsSeenWhenItsTensorIsRead) {
  for (const int64_t size : {int64_t{48}, int64_t{1000}}) {
    const ScratchFolder folder;
    write_folder(folder.path(), size);
    ASSERT_EQ(read_error(folder.path()), "");
    const std::vector<std::string> files = WeightFolder(folder.path()).files();
    for (const std::string& name : files) {
      const fs::path path = folder / name;
      const auto bytes = static_cast<int64_t>(fs::file_size(path));
      const int64_t data_begin = SafetensorsFile(path).tensors()[0].begin;
      ASSERT_GT(bytes, data_begin);
      for (int64_t at = data_begin; at < bytes; ++at) {
        std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
        file.seekg(at);
        const char before = static_cast<char>(file.get());
        file.seekp(at);
        file.put(static_cast<char>(before ^ (1 << (at % 8))));
        file.flush();
        EXPECT_EQ(open_error(folder.path()), "") << "opening reads headers alone";
        expect_says(read_error(folder.path()), {path.string(), "tensor \"", "is damaged"});
        file.seekp(at);
        file.put(before);
      }
    }
    ASSERT_EQ(read_error(folder.path()), "");
  }
}

TEST(WeightFolder, ChecksumsAreOfTheTensorsThatAreThereAndMustBeChecksums) {
  const ScratchFolder folder;
  const fs::path path = folder.path() / kWeightFile;
  const std::vector<TensorSpec> one = {{"embed", StoredType::kU8, {3}}};
  const auto write = [&](const std::string& checksums) {
    SafetensorsWriter writer(path, one, {{std::string(kChecksumKey), checksums}});
    writer.write("embed", std::vector<std::byte>(3));
    writer.finish();
    return read_error(folder.path());
  };
  EXPECT_EQ(write("{}"), "");
  EXPECT_EQ(write(R"({"taken out": "0123456789abcdef"})"), "");
  expect_says(write(R"({"embed": "0123456789abcdef"})"), {"\"embed\"", "is damaged"});
  for (const char* wrong :
       {"", "[]", R"({"embed": 1})", R"({"embed": "12"})", R"({"embed": "0123456789abcdeF"})",
        R"({"embed": "0123456789abcdef0"})"})
    expect_says(write(wrong), {path.string(), std::string(kChecksumKey)});
}

TEST(WeightFolder, FilesOfOtherProgramsHaveNoChecksumsAndAreRead) {
  const ScratchFolder folder;
  write_file(folder.path() / kWeightFile, specs(), 1);
  EXPECT_EQ(read_error(folder.path()), "");
}

}  // namespace
}  // namespace mtraining::checkpoint
