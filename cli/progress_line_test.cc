#include "cli/progress_line.h"

#include <gtest/gtest.h>

namespace mtraining::cli {
namespace {

TEST(ProgressLine, IsShorterThanEveryTerminal) {
  for (const int64_t total : {1, 100, 1000000}) {
    for (const int64_t step : {int64_t{1}, total / 2, total, total + 5}) {
      const ProgressFacts facts{"vertical_slash", step, total, 3.14159, .123, 123456.0, 98765.0};
      size_t last = 0;
      for (int columns = 1; columns <= 200; ++columns) {
        const std::string line = progress_line(facts, columns);
        EXPECT_LE(line.size(), static_cast<size_t>(std::max(columns - 1, 1))) << line;
        EXPECT_EQ(line.find_first_of("\r\n\x1b"), std::string::npos);
        last = line.size();
      }
      EXPECT_GT(last, 80u);
    }
  }
}

TEST(ProgressLine, KeepsStepAndTimeLeftTheLongest) {
  const ProgressFacts facts{"dense", 12, 100, 3.5, .5, 5000, 42};
  EXPECT_EQ(
      progress_line(facts, 200),
      "dense [##......................] 12/100  loss 3.5000  density 0.500  5000 tokens/s  42 s "
      "left");
  EXPECT_EQ(progress_line(facts, 80),
            "dense [........] 12/100  loss 3.5000  density 0.500  5000 tokens/s  42 s left");
  EXPECT_EQ(progress_line(facts, 70),
            "dense [........] 12/100  loss 3.5000  5000 tokens/s  42 s left");
  EXPECT_EQ(progress_line(facts, 50), "dense [........] 12/100  loss 3.5000  42 s left");
  EXPECT_EQ(progress_line(facts, 31), "12/100  loss 3.5000  42 s left");
  EXPECT_EQ(progress_line(facts, 20), "12/100  42 s left");
  EXPECT_EQ(progress_line(facts, 10), "12/100");
}

TEST(ProgressLine, BarIsFullAtTheEndAndEmptyAtTheBeginning) {
  ProgressFacts facts{"dense", 0, 1000, 1, 1, 1, 0};
  EXPECT_EQ(progress_line(facts, 200).find('#'), std::string::npos);
  facts.train_step = 999;
  EXPECT_NE(progress_line(facts, 200).find("#.]"), std::string::npos);
  facts.train_step = 1000;
  EXPECT_NE(progress_line(facts, 200).find("[########################]"), std::string::npos);
}

TEST(DurationText, GrowsWithItsUnit) {
  EXPECT_EQ(duration_text(0), "0 s");
  EXPECT_EQ(duration_text(59.4), "59 s");
  EXPECT_EQ(duration_text(59.6), "1:00 min");
  EXPECT_EQ(duration_text(187), "3:07 min");
  EXPECT_EQ(duration_text(7500), "2:05 h");
  EXPECT_EQ(duration_text(3 * 86400 + 4 * 3600), "3 d 04 h");
  EXPECT_EQ(duration_text(-1), "?");
  EXPECT_EQ(duration_text(0.0 / 0.0), "?");
  EXPECT_EQ(duration_text(1e300), "> 30 years");
}

}  // namespace
}  // namespace mtraining::cli
