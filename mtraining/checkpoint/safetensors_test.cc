#include "mtraining/checkpoint/safetensors.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <numeric>

#include "mtraining/base/rng.h"
#include "mtraining/testing/error_of.h"
#include "mtraining/testing/scratch_folder.h"

namespace mtraining::checkpoint {
namespace {

using testing::error_of;
using testing::get_text;
using testing::memory_folder;
using testing::put_text;
using testing::ScratchFolder;

constexpr StoredType kAllTypes[] = {StoredType::kF64, StoredType::kF32, StoredType::kBF16,
                                    StoredType::kF16, StoredType::kI64, StoredType::kI32,
                                    StoredType::kU8,  StoredType::kBool};

std::vector<std::byte> random_bytes(int64_t count, uint64_t seed) {
  std::vector<std::byte> bytes(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i)
    bytes[static_cast<size_t>(i)] = static_cast<std::byte>(Rng(seed).bits(i));
  return bytes;
}

std::string file_of(const std::string& header, int64_t data_bytes) {
  const uint64_t length = header.size();
  std::string text(8, '\0');
  std::memcpy(text.data(), &length, 8);
  text += header;
  text.append(static_cast<size_t>(data_bytes), '\x5a');
  return text;
}

std::string open_error(const std::filesystem::path& path) {
  return error_of([&] {
    const SafetensorsFile file(path);
    // What opens must be readable to its end: no tensor may leave the mapping.
    unsigned sum = 0;
    for (const StoredTensor& tensor : file.tensors())
      for (const std::byte byte : file.data(tensor)) sum += static_cast<unsigned>(byte);
    volatile unsigned keep = sum;
    (void)keep;
  });
}

TEST(Safetensors, EveryTypeAndShapeComesBackByteForByte) {
  const ScratchFolder folder;
  std::vector<TensorSpec> specs;
  for (const StoredType type : kAllTypes)
    for (const std::vector<int64_t>& shape :
         std::vector<std::vector<int64_t>>{{}, {0}, {1}, {7}, {3, 5}, {2, 0, 4}, {2, 3, 1, 5}})
      specs.push_back({concat(to_string(type), ".", specs.size(), ".weiß"), type, shape});
  SafetensorsWriter writer(folder / "a.safetensors", specs, {{"format", "pt"}, {"k", "v \"q\""}});
  // In pieces of odd length, tensors taking turns, last tensor first.
  std::vector<int64_t> done(specs.size(), 0);
  for (bool more = true; more;) {
    more = false;
    for (size_t i = specs.size(); i-- > 0;) {
      const auto bytes = random_bytes(num_bytes(specs[i]), i);
      const int64_t piece = std::min<int64_t>(13, static_cast<int64_t>(bytes.size()) - done[i]);
      writer.write(specs[i].name, std::span(bytes).subspan(done[i], piece));
      done[i] += piece;
      more = more || done[i] < static_cast<int64_t>(bytes.size());
    }
  }
  writer.finish();

  const SafetensorsFile file(folder / "a.safetensors");
  EXPECT_EQ(static_cast<int64_t>(std::filesystem::file_size(folder / "a.safetensors")),
            writer.file_bytes());
  EXPECT_EQ(file.metadata(),
            (std::map<std::string, std::string>{{"format", "pt"}, {"k", "v \"q\""}}));
  ASSERT_EQ(file.tensors().size(), specs.size());
  EXPECT_EQ(file.tensors()[0].begin % 64, 0);
  for (size_t i = 0; i < specs.size(); ++i) {
    const StoredTensor* tensor = file.find(specs[i].name);
    ASSERT_NE(tensor, nullptr) << specs[i].name;
    EXPECT_EQ(tensor->spec.type, specs[i].type);
    EXPECT_EQ(tensor->spec.shape, specs[i].shape);
    EXPECT_EQ(tensor->begin % bytes_of(specs[i].type), 0) << "unaligned: " << specs[i].name;
    const auto want = random_bytes(num_bytes(specs[i]), i);
    const auto got = file.data(specs[i].name);
    EXPECT_TRUE(std::equal(got.begin(), got.end(), want.begin(), want.end())) << specs[i].name;
  }
  EXPECT_NE(error_of([&] { file.data("absent"); }).find("\"absent\""), std::string::npos);
}

TEST(Safetensors, NoTensorAtAllIsAFile) {
  const ScratchFolder folder;
  SafetensorsWriter writer(folder / "a.safetensors", {}, {});
  writer.finish();
  EXPECT_TRUE(SafetensorsFile(folder / "a.safetensors").tensors().empty());
}

TEST(Safetensors, WriterRefusesWhatWasNotAnnounced) {
  const ScratchFolder folder;
  const auto path = folder / "a.safetensors";
  const std::vector<std::byte> bytes(9);
  const auto writer = [&] { return SafetensorsWriter(path, {{"w", StoredType::kF32, {2}}}); };
  EXPECT_NE(error_of([&] { writer().write("v", bytes); }).find("no tensor \"v\" was announced"),
            std::string::npos);
  EXPECT_NE(error_of([&] { writer().write("w", bytes); }).find("expected 8 bytes, got 1 more"),
            std::string::npos);
  EXPECT_NE(error_of([&] {
              auto w = writer();
              w.write("w", std::span(bytes).first(5));
              w.finish();
            }).find("tensor \"w\": expected 8 bytes, got 5"),
            std::string::npos);
  EXPECT_NE(open_error(path).find("never finished"), std::string::npos) << open_error(path);
  EXPECT_NE(error_of([&] {
              SafetensorsWriter(path, {{"w", StoredType::kF32, {2}}, {"w", StoredType::kF32, {2}}});
            }).find("\"w\" is given twice"),
            std::string::npos);
  EXPECT_NE(error_of([&] {
              SafetensorsWriter(path, {{"__metadata__", StoredType::kU8, {}}});
            }).find("cannot be called"),
            std::string::npos);
  EXPECT_NE(
      error_of([&] {
        SafetensorsWriter(path, {{"w", StoredType::kF32, {int64_t{1} << 40, int64_t{1} << 40, 0}}});
      }).find("more elements"),
      std::string::npos);
  EXPECT_NE(error_of([&] { SafetensorsWriter(folder / "no/such/x", {}); }).find("No such file"),
            std::string::npos);
}

TEST(Safetensors, FaultyHeadersAreNamed) {
  const ScratchFolder folder;
  const auto path = folder / "bad.safetensors";
  const std::string good = R"("dtype":"F32","shape":[2],"data_offsets":)";
  const struct {
    std::string header;
    int64_t data_bytes;
    std::string says;
  } cases[] = {
      {R"({"w":{)" + good + "[0,8]}}", 8, ""},
      {R"({"w":{)" + good + "[0,8]}}      ", 8, ""},
      {R"({"w":{)" + good + R"([0,8]},"w":{)" + good + "[0,8]}}", 8, "duplicate name \"w\""},
      {R"({"w":{)" + good + R"([0,8],"dtype":"F64"}})", 8, "duplicate name \"dtype\""},
      {R"({"w":{)" + good + "[0,8]}}", 7, "truncated: tensor \"w\" ends at offset"},
      {R"({"w":{)" + good + "[0,8]}}", 9, "expected the file to end with its last tensor"},
      {R"({"w":{)" + good + R"([0,8]},"v":{)" + good + "[9,17]}}", 17, "a hole of 1 bytes"},
      {R"({"w":{)" + good + "[1,9]}}", 9, "a hole of 1 bytes"},
      {R"({"w":{)" + good + R"([0,8]},"v":{)" + good + "[7,15]}}", 15, "inside tensor \"w\""},
      {R"({"w":{)" + good + R"([0,8]},"v":{)" + good + "[0,8]}}", 8, "inside tensor"},
      {R"({"w":{)" + good + "[0,9]}}", 9, "F32 [2] takes 8 bytes, but data_offsets [0, 9] hold 9"},
      {R"({"w":{)" + good + "[8,0]}}", 8, "0 <= begin <= end"},
      {R"({"w":{)" + good + "[-8,0]}}", 8, "0 <= begin <= end"},
      {R"({"w":{)" + good + "[0,8,8]}}", 8, "0 <= begin <= end"},
      {R"({"w":{)" + good + "[0,8.0]}}", 8, "0 <= begin <= end"},
      {R"({"w":{)" + good + "[0,18446744073709551615]}}", 8, "0 <= begin <= end"},
      {R"({"w":{)" + good + "[0,99999999999999999999999]}}", 8, "0 <= begin <= end"},
      {R"({"w":{)" + good + "[0,1e999]}}", 8, "does not fit"},
      {R"({"w":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})", 8, "sizes >= 0"},
      {R"({"w":{"dtype":"F32","shape":2,"data_offsets":[0,8]}})", 8, "shape to be an array"},
      {R"({"w":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}})", 0,
       "more elements"},
      {R"({"w":{"dtype":"F32","shape":[4294967296,4294967296,0],"data_offsets":[0,0]}})", 0,
       "more elements"},
      {R"({"w":{"dtype":"F8_E4M3","shape":[8],"data_offsets":[0,8]}})", 8, "\"F8_E4M3\""},
      {R"({"w":{"dtype":"f32","shape":[2],"data_offsets":[0,8]}})", 8, "\"f32\""},
      {R"({"w":{"dtype":32,"shape":[2],"data_offsets":[0,8]}})", 8, "dtype to be a string"},
      {R"({"w":{"dtype":"F32","shape":[2]}})", 0, "dtype, shape and data_offsets"},
      {R"({"w":{)" + good + R"([0,8],"more":1}})", 8, "dtype, shape and data_offsets"},
      {R"({"w":[]})", 0, "dtype, shape and data_offsets"},
      {R"({"__metadata__":{"format":1}})", 0, "expected a string for \"format\""},
      {R"({"__metadata__":"pt"})", 0, "an object of strings"},
      {R"(["w"])", 0, "expected a JSON object at offset 8"},
      {R"( {})", 0, "expected a JSON object at offset 8"},
      {R"({"w":{)", 0, "not valid JSON at offset 1"},
      {"{\"\xff\xfe\":{}}", 0, "not valid JSON at offset 1"},
      {"{\"a\":" + std::string(60000, '[') + std::string(60000, ']') + "}", 0, "nested at most"},
  };
  for (const auto& bad : cases) {
    put_text(path, file_of(bad.header, bad.data_bytes));
    const std::string error = open_error(path);
    if (bad.says.empty()) {
      EXPECT_EQ(error, "") << bad.header;
    } else {
      EXPECT_NE(error.find(bad.says), std::string::npos)
          << bad.header.substr(0, 200) << "\n  got: " << error;
      EXPECT_EQ(error.find(path.string()), 0u) << error;
    }
  }
}

TEST(Safetensors, FilesThatAreNoSafetensorsAreNamed) {
  const ScratchFolder folder;
  EXPECT_NE(open_error(folder / "none").find("No such file"), std::string::npos);
  EXPECT_NE(open_error(folder.path()).find("expected a file"), std::string::npos);
  const auto path = folder / "x";
  for (const std::string& text :
       {std::string(), std::string("PK\x03\x04zip file of torch.save"), std::string(64, '\0'),
        std::string("{\"json\": 1, \"not\": \"safetensors\"}"), std::string(4096, '\xff')}) {
    put_text(path, text);
    EXPECT_NE(open_error(path).find("not a safetensors file"), std::string::npos)
        << open_error(path);
  }
  // A header of 99 MB in a file of 9 bytes is refused before a byte of it is looked at.
  std::string text = file_of("{", 0);
  const uint64_t length = 99'000'000;
  std::memcpy(text.data(), &length, 8);
  put_text(path, text);
  EXPECT_NE(open_error(path).find("its header ends at offset 99000008, but the file at 9"),
            std::string::npos);
}

TEST(Safetensors, EveryTruncationAndEveryFlippedBitGivesOneErrorOrAWholeFile) {
  const ScratchFolder folder(memory_folder());
  const auto path = folder / "a.safetensors";
  {
    SafetensorsWriter writer(path, {{"model.a", StoredType::kF32, {3, 2}},
                                    {"b", StoredType::kBF16, {5}},
                                    {"c", StoredType::kBool, {1}},
                                    {"d", StoredType::kI64, {0}}});
    for (const auto& [name, size] : {std::pair{"model.a", 24}, {"b", 10}, {"c", 1}})
      writer.write(name, random_bytes(size, 1));
    writer.finish();
  }
  const std::string whole = get_text(path);
  ASSERT_EQ(open_error(path), "");
  for (size_t length = 0; length < whole.size(); ++length) {
    put_text(path, whole.substr(0, length));
    const std::string error = open_error(path);
    ASSERT_NE(error, "") << "a file cut to " << length << " bytes opened";
    ASSERT_EQ(error.find(path.string()), 0u) << error;
    ASSERT_EQ(error.find('\n'), std::string::npos) << error;
  }
  const size_t data_begin =
      8 + static_cast<size_t>(*reinterpret_cast<const uint64_t*>(whole.data()));
  int refused = 0;
  for (size_t place = 0; place < data_begin; ++place)
    for (int bit = 0; bit < 8; ++bit) {
      std::string text = whole;
      text[place] = static_cast<char>(text[place] ^ (1 << bit));
      put_text(path, text);
      const std::string error = open_error(path);  // anything but an Error ends the test
      if (error.empty()) continue;  // another name, an equally long type, another metadata value
      ++refused;
      ASSERT_EQ(error.find(path.string()), 0u) << error;
      ASSERT_EQ(error.find('\n'), std::string::npos) << error;
    }
  EXPECT_GT(refused, static_cast<int>(data_begin) * 4);
  // Random damage of several bytes at once.
  const Rng rng(7);
  for (uint64_t round = 0; round < 3000; ++round) {
    std::string text = whole;
    for (uint64_t i = 0; i < 1 + round % 5; ++i)
      text[rng.below(round * 16 + i * 2, data_begin)] =
          static_cast<char>(rng.bits(round * 16 + i * 2 + 1));
    put_text(path, text);
    const std::string error = open_error(path);
    ASSERT_TRUE(error.empty() || error.find(path.string()) == 0u) << error;
  }
}

TEST(Safetensors, AFullDiskIsAnErrorBeforeTheDataIsWritten) {
  const ScratchFolder folder;
  // A limit on file size stands for a full disk: the same calls fail, with another reason.
  struct rlimit before {};
  getrlimit(RLIMIT_FSIZE, &before);
  signal(SIGXFSZ, SIG_IGN);
  const struct rlimit small { 1 << 16, before.rlim_max };
  setrlimit(RLIMIT_FSIZE, &small);
  const std::string error = error_of([&] {
    SafetensorsWriter(folder / "a.safetensors", {{"w", StoredType::kU8, {1 << 20}}});
  });
  setrlimit(RLIMIT_FSIZE, &before);
  EXPECT_NE(error.find("cannot reserve 1048"), std::string::npos) << error;
}

}  // namespace
}  // namespace mtraining::checkpoint
