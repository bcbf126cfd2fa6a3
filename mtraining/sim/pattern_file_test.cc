#include "mtraining/sim/pattern_file.h"

#include <gtest/gtest.h>

#include <fstream>
#include <set>

#include "mtraining/base/check.h"
#include "mtraining/base/rng.h"
#include "mtraining/sim/pattern_shapes.h"
#include "mtraining/testing/error_of.h"

namespace mtraining::sim {
namespace {

std::string error_of(const std::string& text) {
  return testing::error_of<InvalidArgument>([&] { parse_pattern(text, "p.json"); });
}

std::string with_head(const std::string& head) {
  return R"({"name": "x", "seq_len": 1000, "heads": [)" + head + "]}";
}

/// By definition: the (query block, key block) distances that offset o joins, over all query
/// positions.
std::set<int32_t> touched(const OffsetHead& head, int64_t num_blocks) {
  std::set<int32_t> found;
  for (const OffsetRange& range : head.offset_ranges) {
    for (int64_t o = range.begin; o < range.end; ++o) {
      for (int64_t query = o; query < o + 64; ++query) {
        const int64_t c = query / 64 - (query - o) / 64;
        if (c < num_blocks) found.insert(static_cast<int32_t>(c));
      }
    }
  }
  return found;
}

TEST(BlockDiagonals, AreThoseThatSomeQueryReaches) {
  const Rng random(7);
  uint64_t draw = 0;
  for (int trial = 0; trial < 300; ++trial) {
    OffsetHead head;
    const int ranges = 1 + static_cast<int>(random.below(draw++, 5));
    for (int i = 0; i < ranges; ++i) {
      const auto begin = static_cast<int64_t>(random.below(draw++, 1900));
      head.offset_ranges.push_back(
          {begin, begin + 1 + static_cast<int64_t>(random.below(draw++, 100))});
    }
    const auto got = block_diagonals(head, 30);
    EXPECT_EQ(std::set<int32_t>(got.begin(), got.end()), touched(head, 30));
    EXPECT_EQ(std::set<int32_t>(got.begin(), got.end()).size(), got.size());
    EXPECT_TRUE(std::is_sorted(got.begin(), got.end()));
  }
}

TEST(BlockDiagonals, AnOffsetOnTheGridTouchesOne) {
  EXPECT_EQ(block_diagonals({.offset_ranges = {{128, 129}}, .columns = {}}, 100),
            (std::vector<int32_t>{2}));
  EXPECT_EQ(block_diagonals({.offset_ranges = {{129, 130}}, .columns = {}}, 100),
            (std::vector<int32_t>{2, 3}));
  EXPECT_EQ(block_diagonals({.offset_ranges = {{0, 1}}, .columns = {}}, 100),
            (std::vector<int32_t>{0}));
  EXPECT_EQ(block_diagonals({.offset_ranges = {{0, 64}}, .columns = {}}, 1),
            (std::vector<int32_t>{0}));
  EXPECT_TRUE(block_diagonals({}, 100).empty());
}

TEST(PatternFile, ReadsWhatWasWritten) {
  const auto pattern = parse_pattern(
      R"({"name": "t", "seq_len": 1000, "heads": [{"offset_ranges": [[0, 64], [500, 501]], "columns": [3, 999]},
          {"offset_ranges": [], "columns": []}]})",
      "p.json");
  EXPECT_EQ(pattern.name, "t");
  ASSERT_EQ(pattern.heads.size(), 2u);
  EXPECT_EQ(pattern.heads[0].offset_ranges[1].begin, 500);
  const index::Index index = to_index(pattern);
  EXPECT_EQ(index.num_q_heads, 2);
  EXPECT_EQ(index.num_blocks(), 16);
  const auto diagonals = index.diagonals.row(0);
  EXPECT_EQ(std::vector<int32_t>(diagonals.begin(), diagonals.end()),
            (std::vector<int32_t>{0, 1, 7, 8}));
  EXPECT_EQ(index.columns.row(0)[1], 999);
  EXPECT_TRUE(index.diagonals.row(1).empty());
}

TEST(PatternFile, ReadsListsOfBlocks) {
  const NamedIndex read = parse_index(
      R"({"name": "b", "seq_len": 130, "heads": [{"key_blocks": [[0], [], [0, 2]]}, {"key_blocks": [[], [0, 1], [1]]}]})",
      "p.json");
  EXPECT_EQ(read.name, "b");
  ASSERT_TRUE(read.index.has_blocks());
  EXPECT_EQ(read.index.num_q_heads, 2);
  EXPECT_EQ(read.index.blocks.row_begin, (std::vector<int64_t>{0, 1, 1, 3, 3, 5, 6}));
  EXPECT_EQ(read.index.blocks.key_blocks, (std::vector<int32_t>{0, 0, 2, 0, 1, 1}));
  const NamedIndex offsets =
      parse_index(with_head(R"({"offset_ranges": [[0, 64]], "columns": [3]})"), "p.json");
  EXPECT_FALSE(offsets.index.has_blocks());
  EXPECT_EQ(offsets.index.columns.row(0)[0], 3);
}

TEST(PatternFile, WrongListsOfBlocksAreRefusedWithTheirPlace) {
  const auto error = [](const std::string& head) {
    return testing::error_of<InvalidArgument>([&] {
      parse_index(R"({"name": "x", "seq_len": 100, "heads": [)" + head + "]}", "p.json");
    });
  };
  EXPECT_EQ(error(R"({"key_blocks": [[0]]})"),
            "p.json: heads[0]: key_blocks: expected 2 lists, one a block of 64 tokens, got 1");
  EXPECT_EQ(error(R"({"key_blocks": [[1], []]})"),
            "p.json: heads[0]: key_blocks[0][0]: expected a number in [0, 0], got 1");
  EXPECT_EQ(error(R"({"key_blocks": [[], [0, 0]]})"),
            "p.json: heads[0]: key_blocks[1][1]: expected a number in [1, 1], got 0");
  EXPECT_EQ(error(R"({"key_blocks": [[], 3]})"),
            "p.json: heads[0]: key_blocks[1]: expected a list, got number");
  EXPECT_EQ(error(R"({"key_blocks": [[], []]}, {"offset_ranges": [], "columns": []})"),
            "p.json: heads[1]: expected key 'key_blocks', found none");
  EXPECT_EQ(error(R"({"key_blocks": [[], []], "columns": []})"),
            "p.json: heads[0]: unknown key \"columns\"");
  EXPECT_EQ(error(R"({"key_blocks": [[], [1, 1]]})"),
            "p.json: heads[0]: key_blocks[1]: expected ascending blocks up to 1, got [1,1]");
}

TEST(PatternFile, WrongTextIsRefusedWithItsPlace) {
  EXPECT_NE(error_of("{").find("p.json"), std::string::npos);
  EXPECT_NE(error_of("[]").find("p.json"), std::string::npos);
  EXPECT_NE(error_of(R"({"name": "x", "heads": []})").find("seq_len"), std::string::npos);
  EXPECT_NE(error_of(R"({"name": "x", "seq_len": 0, "heads": []})").find("seq_len"),
            std::string::npos);
  EXPECT_NE(error_of(R"({"name": "x", "seq_len": 1e3, "heads": []})").find("seq_len"),
            std::string::npos);
  EXPECT_NE(
      error_of(R"({"name": "x", "seq_len": 99999999999999999999, "heads": []})").find("seq_len"),
      std::string::npos);
  EXPECT_NE(
      error_of(R"({"name": "x", "seq_len": 18446744073709551615, "heads": []})").find("seq_len"),
      std::string::npos);
  EXPECT_NE(error_of(R"({"name": 3, "seq_len": 10, "heads": []})").find("name"), std::string::npos);
  EXPECT_NE(error_of(R"({"name": "x", "seq_len": 10, "heads": []})").find("heads"),
            std::string::npos);
  EXPECT_NE(
      error_of(
          R"({"name": "x", "seq_len": 10, "heads": [{"offset_ranges": [], "columns": []}], "more": 1})")
          .find("more"),
      std::string::npos);
  EXPECT_NE(error_of(with_head("3")).find("heads[0]"), std::string::npos);
  EXPECT_NE(error_of(with_head(R"({"columns": []})")).find("offset_ranges"), std::string::npos);
  EXPECT_NE(error_of(with_head(R"({"offset_ranges": []})")).find("columns"), std::string::npos);
  EXPECT_NE(
      error_of(with_head(R"({"offset_ranges": [[5, 5]], "columns": []})")).find("offset_ranges[0]"),
      std::string::npos);
  EXPECT_NE(error_of(with_head(R"({"offset_ranges": [[-1, 5]], "columns": []})"))
                .find("offset_ranges[0]"),
            std::string::npos);
  EXPECT_NE(error_of(with_head(R"({"offset_ranges": [[0, 1001]], "columns": []})"))
                .find("offset_ranges[0]"),
            std::string::npos);
  EXPECT_NE(
      error_of(with_head(R"({"offset_ranges": [[0]], "columns": []})")).find("offset_ranges[0]"),
      std::string::npos);
  EXPECT_NE(
      error_of(with_head(R"({"offset_ranges": [], "columns": [0, 1000]})")).find("columns[1]"),
      std::string::npos);
  EXPECT_NE(error_of(with_head(R"({"offset_ranges": [], "columns": [-2]})")).find("columns[0]"),
            std::string::npos);
  EXPECT_NE(error_of(with_head(R"({"offset_ranges": [], "columns": ["a"]})")).find("columns[0]"),
            std::string::npos);
}

TEST(PatternFile, MissingFileIsNamed) {
  try {
    read_pattern_file("no-such-pattern.json");
    ADD_FAILURE();
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("no-such-pattern.json"), std::string::npos);
  }
}

TEST(PatternShapes, AreLegalAndDifferByHeadWhereTheyShould) {
  for (std::string_view shape : pattern_shapes()) {
    for (int64_t seq_len : {1024, 32768, 131072}) {
      const OffsetPattern pattern = make_pattern(shape, seq_len, 16);
      const index::Index index = to_index(pattern);
      EXPECT_GT(index::density(index), 0);
      EXPECT_LE(index::density(index), 1 + 128.0 / static_cast<double>(seq_len));
      for (const OffsetHead& head : pattern.heads) {
        for (const OffsetRange& range : head.offset_ranges) EXPECT_LE(range.end, seq_len);
      }
    }
  }
  const index::Index uneven = to_index(make_pattern("uneven", 32768, 16));
  int64_t least = index::computed_pairs(uneven, 0, 0), most = least;
  for (int h = 1; h < 16; ++h) {
    least = std::min(least, index::computed_pairs(uneven, 0, h));
    most = std::max(most, index::computed_pairs(uneven, 0, h));
  }
  EXPECT_GT(most, 50 * least);
  EXPECT_THROW(make_pattern("broad", 32768, 16), InvalidArgument);
}

}  // namespace
}  // namespace mtraining::sim
