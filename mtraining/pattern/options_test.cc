#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>

#include "mtraining/base/check.h"
#include "mtraining/pattern/pattern.h"
#include "mtraining/testing/error_of.h"

namespace mtraining::pattern {
namespace {

TEST(VerticalSlashOptions, NamesParseAndUnknownOnesNameTheKnown) {
  EXPECT_EQ(parse_slash_pooling("block"), SlashPooling::kBlock);
  EXPECT_EQ(parse_slash_pooling("paper"), SlashPooling::kPaper);
  EXPECT_EQ(parse_slash_pooling("token"), SlashPooling::kToken);
  EXPECT_EQ(parse_selection("head"), Selection::kHead);
  EXPECT_EQ(parse_selection("kv_group"), Selection::kKvGroup);
  EXPECT_EQ(parse_window("last"), Window::kLast);
  EXPECT_EQ(parse_window("strided"), Window::kStrided);
  EXPECT_EQ(testing::error_of([] { parse_slash_pooling("blok"); }),
            "slash_pooling: expected block | paper | token, got \"blok\"");
  EXPECT_EQ(testing::error_of([] { parse_selection(""); }),
            "selection: expected head | kv_group, got \"\"");
  EXPECT_EQ(testing::error_of([] { parse_window("Last"); }),
            "window: expected last | strided, got \"Last\"");
}

TEST(VerticalSlashOptions, DefaultsAreValidAndEachKeyIsCheckedByName) {
  check(VerticalSlashOptions{});
  const auto refused = [](const std::function<void(VerticalSlashOptions&)>& change) {
    VerticalSlashOptions options;
    change(options);
    return testing::error_of([&] { check(options); });
  };
  EXPECT_EQ(refused([](auto& o) { o.p_vertical = 1.01; }),
            "p_vertical: expected a number in [0, 1], got 1.01");
  EXPECT_EQ(refused([](auto& o) { o.p_slash = -0.5; }),
            "p_slash: expected a number in [0, 1], got -0.5");
  EXPECT_EQ(refused([](auto& o) { o.p_slash = std::nan(""); }),
            "p_slash: expected a number in [0, 1], got nan");
  EXPECT_EQ(refused([](auto& o) { o.last_q = 0; }), "last_q: expected at least 1, got 0");
  EXPECT_EQ(refused([](auto& o) { o.last_q = 5000; }), "last_q: expected at most 4096, got 5000");
  EXPECT_EQ(refused([](auto& o) { o.sink_tokens = -1; }),
            "sink_tokens: expected at least 0, got -1");
  EXPECT_EQ(refused([](auto& o) { o.local_blocks = 0; }),
            "local_blocks: expected at least 1, got 0");
  EXPECT_EQ(refused([](auto& o) { o.max_columns = -2; }),
            "max_columns: expected at least 0, got -2");
  EXPECT_EQ(refused([](auto& o) { o.max_diagonals = -2; }),
            "max_diagonals: expected at least 0, got -2");
  EXPECT_EQ(refused([](auto& o) { o.max_columns = int64_t{1} << 31; }),
            "max_columns: expected a number below 2^31, got 2147483648");
  EXPECT_EQ(refused([](auto& o) { o.max_diagonals = std::numeric_limits<int64_t>::max(); }),
            "max_diagonals: expected a number below 2^31, got 9223372036854775807");
  EXPECT_EQ(refused([](auto& o) { o.dense_threshold = 0; }),
            "dense_threshold: expected a number above 0 (1: off), got 0");
  EXPECT_EQ(refused([](auto& o) { o.recall_floor = 1.5; }),
            "recall_floor: expected a number in [0, 1], got 1.5");
  EXPECT_EQ(refused([](auto& o) { o.recall_rows = 0; }), "recall_rows: expected at least 1, got 0");
}

}  // namespace
}  // namespace mtraining::pattern
