#include "mtraining/data/token_file.h"

#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>

#include "mtraining/base/check.h"
#include "mtraining/base/rng.h"
#include "mtraining/testing/error_of.h"
#include "mtraining/testing/scratch_folder.h"

namespace mtraining::data {
namespace {

class TokenFiles : public ::testing::Test {
 protected:
  std::string prefix(const std::string& name = "t") const { return (folder_ / name).string(); }

  /// Three sequences in two documents: {0..9}, {10..14}, {} and {15, 16, 17}.
  void write_small(TokenType type = TokenType::kUInt8) const {
    TokenFileWriter writer(prefix(), type);
    std::vector<int64_t> ids(10);
    for (int64_t i = 0; i < 10; ++i) ids[i] = i;
    writer.add_sequence(ids);
    writer.add_sequence(std::vector<int64_t>{10, 11, 12, 13, 14});
    writer.end_document();
    writer.add_sequence({});
    writer.add_sequence(std::vector<int64_t>{15, 16, 17});
    writer.finish();
  }
  std::vector<char> bytes(const std::string& extension) const {
    std::ifstream in(prefix() + extension, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  void put(const std::string& extension, const std::vector<char>& content) const {
    std::ofstream(prefix() + extension, std::ios::binary | std::ios::trunc)
        .write(content.data(), static_cast<std::streamsize>(content.size()));
  }

  testing::ScratchFolder folder_;
};

template <typename T>
void poke(std::vector<char>& bytes, size_t offset, T value) {
  std::memcpy(bytes.data() + offset, &value, sizeof(T));
}

TEST_F(TokenFiles, RoundTripOfEveryTypeKeepsEveryId) {
  for (const auto type : {TokenType::kUInt8, TokenType::kInt8, TokenType::kInt16,
                          TokenType::kUInt16, TokenType::kInt32, TokenType::kInt64}) {
    const Rng rng(3, static_cast<uint64_t>(type));
    const int64_t limit = type == TokenType::kUInt8    ? 256
                          : type == TokenType::kInt8   ? 128
                          : type == TokenType::kInt16  ? 32768
                          : type == TokenType::kUInt16 ? 65499
                                                       : 151936;
    std::vector<int64_t> all;
    TokenFileWriter writer(prefix(), type);
    uint64_t counter = 0;
    for (int s = 0; s < 20; ++s) {
      std::vector<int64_t> ids(rng.below(counter++, 40));
      for (auto& id : ids) id = static_cast<int64_t>(rng.below(counter++, limit));
      all.insert(all.end(), ids.begin(), ids.end());
      writer.add_sequence(ids);
      if (s % 3 == 2) writer.end_document();
    }
    writer.finish();
    const TokenFile file(prefix(), limit);
    EXPECT_EQ(file.type(), type);
    EXPECT_EQ(file.num_sequences(), 20);
    EXPECT_EQ(file.num_documents(), 7);
    ASSERT_EQ(file.num_tokens(), static_cast<int64_t>(all.size()));
    for (int64_t begin = 0; begin < file.num_tokens(); begin += 7) {
      std::vector<int64_t> got(std::min<int64_t>(31, file.num_tokens() - begin));
      file.read(begin, got);
      for (size_t i = 0; i < got.size(); ++i) ASSERT_EQ(got[i], all[begin + i]) << to_string(type);
    }
  }
}

TEST_F(TokenFiles, BytesOnDiskAreTheFormat) {
  write_small(TokenType::kUInt16);
  const std::vector<char> idx = bytes(".idx");
  ASSERT_EQ(idx.size(), 34u + 4 * 12 + 3 * 8);
  EXPECT_EQ(std::memcmp(idx.data(), "MMIDIDX\0\0", 9), 0);
  EXPECT_EQ(idx[9], 1);
  EXPECT_EQ(idx[17], 8);
  EXPECT_EQ(idx[18], 4);
  EXPECT_EQ(idx[26], 3);
  EXPECT_EQ(idx[34], 10);              // length of sequence 0
  EXPECT_EQ(idx[34 + 4 * 4 + 8], 20);  // byte pointer of sequence 1
  EXPECT_EQ(idx[34 + 4 * 12 + 8], 2);  // document 1 begins at sequence 2
  EXPECT_EQ(bytes(".bin").size(), 36u);
}

TEST_F(TokenFiles, DocumentsBeginWhereTheyWereEnded) {
  write_small();
  const TokenFile file(prefix(), 256);
  EXPECT_EQ(file.document_starts(), (std::vector<int64_t>{0, 15, 18}));
}

TEST_F(TokenFiles, GapsBetweenSequencesAreSkipped) {
  write_small();
  std::vector<char> bin = bytes(".bin");
  bin.insert(bin.begin() + 10, {99, 99});
  put(".bin", bin);
  std::vector<char> idx = bytes(".idx");
  for (int s = 1; s < 4; ++s) {
    const size_t at = 34 + 4 * 4 + s * 8;
    int64_t pointer;
    std::memcpy(&pointer, idx.data() + at, 8);
    poke<int64_t>(idx, at, pointer + 2);
  }
  put(".idx", idx);
  const TokenFile file(prefix(), 50);
  std::vector<int64_t> got(18);
  file.read(0, got);
  for (int64_t i = 0; i < 18; ++i) EXPECT_EQ(got[i], i);
}

TEST_F(TokenFiles, IdsThatDoNotFitAreRefusedNotWrapped) {
  TokenFileWriter writer(prefix(), TokenType::kUInt16);
  for (const int64_t id : {151643, 128000, -1}) {
    EXPECT_NE(testing::error_of([&] {
                writer.add_sequence(std::vector<int64_t>{id});
              }).find(std::to_string(id)),
              std::string::npos);
  }
  TokenFileWriter wide(prefix("wide"), token_type_for(151936));
  wide.add_sequence(std::vector<int64_t>{151643, 128000});
  wide.finish();
  const TokenFile file(prefix("wide"), 151936);
  std::vector<int64_t> got(2);
  file.read(0, got);
  EXPECT_EQ(got, (std::vector<int64_t>{151643, 128000}));
}

TEST_F(TokenFiles, UInt16WithALargeVocabularyIsRefused) {
  write_small(TokenType::kUInt16);
  EXPECT_NO_THROW(TokenFile(prefix(), 65499));
  const std::string text = testing::error_of([&] { TokenFile(prefix(), 65500); });
  EXPECT_NE(text.find("u16"), std::string::npos) << text;
  EXPECT_NE(text.find("t.idx: offset 17"), std::string::npos) << text;
}

TEST_F(TokenFiles, AnIdOutsideTheVocabularyNamesItsOffset) {
  write_small();
  const TokenFile file(prefix(), 17);
  std::vector<int64_t> got(18);
  const std::string text = testing::error_of([&] { file.read(0, got); });
  EXPECT_NE(text.find("t.bin: offset 17"), std::string::npos) << text;
}

TEST_F(TokenFiles, EveryCorruptionIsFoundWhenTheFileIsOpened) {
  write_small();
  const std::vector<char> idx = bytes(".idx"), bin = bytes(".bin");
  const size_t lengths = 34, pointers = 34 + 4 * 4, documents = 34 + 4 * 12;
  struct Case {
    std::string what, expected;
    std::function<void(std::vector<char>&, std::vector<char>&)> damage;
  };
  const std::vector<Case> cases = {
      {"magic", "t.idx: offset 0", [](auto& i, auto&) { i[3] = 'x'; }},
      {"version", "t.idx: offset 9", [](auto& i, auto&) { i[9] = 2; }},
      {"dtype 0", "t.idx: offset 17", [](auto& i, auto&) { i[17] = 0; }},
      {"dtype 9", "t.idx: offset 17", [](auto& i, auto&) { i[17] = 9; }},
      {"dtype float", "t.idx: offset 17", [](auto& i, auto&) { i[17] = 7; }},
      {"dtype wider than the data", "t.bin", [](auto& i, auto&) { i[17] = 4; }},
      {"dtype narrower than the data", "t.bin", [](auto&, auto& b) { b.resize(36); }},
      {"more sequences than written", "t.idx", [](auto& i, auto&) { i[18] = 100; }},
      {"fewer sequences", "t.idx", [](auto& i, auto&) { i[18] = 3; }},
      {"huge sequence count", "t.idx: offset 18",
       [](auto& i, auto&) { poke<uint64_t>(i, 18, ~0ULL / 4); }},
      {"huge document count", "t.idx: offset 26",
       [](auto& i, auto&) { poke<uint64_t>(i, 26, ~0ULL); }},
      {"no documents", "t.idx: offset 26", [](auto& i, auto&) { poke<uint64_t>(i, 26, 0); }},
      {"header cut", "t.idx: offset 0", [](auto& i, auto&) { i.resize(20); }},
      {"empty index", "t.idx: offset 0", [](auto& i, auto&) { i.clear(); }},
      {"index cut", "t.idx", [](auto& i, auto&) { i.resize(i.size() - 1); }},
      {"index longer", "t.idx", [](auto& i, auto&) { i.push_back(0); }},
      {"negative length", "t.idx: offset 38",
       [=](auto& i, auto&) { poke<int32_t>(i, lengths + 4, -5); }},
      {"length beyond the file", "t.idx: offset 74",
       [=](auto& i, auto&) { poke<int32_t>(i, lengths + 12, 4); }},
      {"shorter length leaves tokens over", "t.bin",
       [=](auto& i, auto&) { poke<int32_t>(i, lengths + 12, 2); }},
      {"pointer beyond the file", "t.idx: offset 58",
       [=](auto& i, auto&) { poke<int64_t>(i, pointers + 8, int64_t{1} << 40); }},
      {"pointer at the end of the range", "t.idx: offset 58",
       [=](auto& i, auto&) {
         poke<int64_t>(i, pointers + 8, std::numeric_limits<int64_t>::max());
       }},
      {"negative pointer", "t.idx: offset 50",
       [=](auto& i, auto&) { poke<int64_t>(i, pointers, -1); }},
      {"pointers not ascending", "t.idx: offset 58",
       [=](auto& i, auto&) { poke<int64_t>(i, pointers + 8, 3); }},
      {"document beyond the sequences", "t.idx: offset 90",
       [=](auto& i, auto&) { poke<int64_t>(i, documents + 8, 77); }},
      {"documents not ascending", "t.idx: offset 98",
       [=](auto& i, auto&) { poke<int64_t>(i, documents + 16, 1); }},
      {"first document not 0", "t.idx: offset 82",
       [=](auto& i, auto&) { poke<int64_t>(i, documents, 1); }},
      {"last document not the count", "t.idx: offset 98",
       [=](auto& i, auto&) { poke<int64_t>(i, documents + 16, 3); }},
      {"tokens cut", "t.bin", [](auto&, auto& b) { b.resize(b.size() - 1); }},
      {"tokens longer", "t.bin", [](auto&, auto& b) { b.push_back(0); }},
      {"no tokens", "t.bin", [](auto&, auto& b) { b.clear(); }},
  };
  for (const Case& c : cases) {
    std::vector<char> i = idx, b = bin;
    c.damage(i, b);
    put(".idx", i);
    put(".bin", b);
    const std::string text = testing::error_of([&] { TokenFile(prefix(), 256); });
    EXPECT_NE(text.find(c.expected), std::string::npos) << c.what << ": \"" << text << "\"";
  }
  put(".idx", idx);
  put(".bin", bin);
  EXPECT_NO_THROW(TokenFile(prefix(), 256));
}

TEST_F(TokenFiles, MissingFilesAreNamed) {
  const std::string text = testing::error_of([&] { TokenFile(prefix("absent"), 256); });
  EXPECT_NE(text.find("absent.idx"), std::string::npos) << text;
  std::filesystem::create_directories(prefix("folder.idx"));
  EXPECT_NE(testing::error_of([&] { TokenFile(prefix("folder"), 256); }).find("regular file"),
            std::string::npos);
}

TEST_F(TokenFiles, AnUnfinishedFileHasNoIndex) {
  write_small();
  TokenFileWriter writer(prefix(), TokenType::kUInt8);
  writer.add_sequence(std::vector<int64_t>{1, 2});
  EXPECT_FALSE(std::filesystem::exists(prefix() + ".idx"));
}

}  // namespace
}  // namespace mtraining::data
