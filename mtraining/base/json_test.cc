#include "mtraining/base/json.h"

#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "mtraining/base/check.h"
#include "mtraining/testing/error_of.h"

namespace mtraining {
namespace {

std::string error_of(std::string_view text) {
  return testing::error_of<InvalidArgument>([&] { parse_json(text, "here", 100, 4); });
}

TEST(Json, AKeyMayStandInTwoObjectsButNotTwiceInOne) {
  EXPECT_EQ(error_of(R"({"a": {"x": 1}, "b": {"x": 1}, "c": [{"x": 1}, {"x": 2}]})"), "");
  EXPECT_EQ(error_of(R"({"a": {"x": 1, "y": 2, "x": 1}})"),
            "here: duplicate name \"x\" in one JSON object: expected each name once");
  EXPECT_NE(error_of(R"({"a": 1, "b": {"c": 1}, "\u0061": 2})").find("\"a\""), std::string::npos);
}

TEST(Json, FaultsAreOneSentenceWithTheOffset) {
  EXPECT_EQ(error_of("{\"a\": }"), "here: not valid JSON at offset 107");
  EXPECT_EQ(error_of("{\"a\": 1} x"), "here: not valid JSON at offset 110");
  EXPECT_EQ(error_of("{\"\xff\": 1}"), "here: not valid JSON at offset 103");
  EXPECT_NE(error_of("[[[[[[1]]]]]]").find("nested at most 4 deep"), std::string::npos);
  EXPECT_NE(error_of("{\"a\": 1e999}").find("does not fit"), std::string::npos);
}

TEST(Json, NamesInMessagesStayOnOneLine) {
  EXPECT_EQ(in_quotes("a\nb\"\x80"), "\"a\\x0ab\\x22\\x80\"");
  EXPECT_EQ(in_quotes(std::string(500, 'x')).size(), 125u);
}

TEST(Json, FilesThatAreNoFilesAreNamed) {
  for (const char* path : {"/no/such/file.json", "/"}) {
    try {
      read_json_file(path);
      FAIL() << path;
    } catch (const InvalidArgument& error) {
      EXPECT_EQ(std::string(error.what()).find(path), 0u) << error.what();
    }
  }
}

}  // namespace
}  // namespace mtraining
