#include "mtraining/base/words.h"

#include <gtest/gtest.h>

#include "mtraining/testing/error_of.h"

namespace mtraining {
namespace {

enum class Fruit { kApple, kPear, kPlum };
constexpr Word<Fruit> kOne[] = {{"apple", Fruit::kApple}};
constexpr Word<Fruit> kTwo[] = {{"apple", Fruit::kApple}, {"pear", Fruit::kPear}};
constexpr Word<Fruit> kThree[] = {
    {"plum", Fruit::kPlum}, {"apple", Fruit::kApple}, {"pear", Fruit::kPear}};

TEST(Words, AWordAndItsValueFindEachOther) {
  for (const Word<Fruit>& word : kThree) {
    EXPECT_EQ(word_of(kThree, word.value), word.text);
    EXPECT_EQ(value_of(kThree, word.text), word.value);
  }
  for (const char* text : {"", "Plum", "plu", "plums"})
    EXPECT_EQ(value_of(kThree, text), std::nullopt);
  EXPECT_THROW(word_of(kTwo, Fruit::kPlum), InternalError);
}

TEST(Words, AreListedInTheTablesOrder) {
  EXPECT_EQ(listed(kOne, ", ", " or "), "apple");
  EXPECT_EQ(listed(kTwo, ", ", " or "), "apple or pear");
  EXPECT_EQ(listed(kThree, ", ", " or ", "\""), "\"plum\", \"apple\" or \"pear\"");
}

TEST(Words, AnUnknownWordIsRefusedWithTheKnownOnes) {
  EXPECT_EQ(parse_word("fruit", "pear", kThree), Fruit::kPear);
  EXPECT_EQ(testing::error_of<InvalidArgument>([] { parse_word("fruit", "fig", kThree); }),
            "fruit: expected plum | apple | pear, got \"fig\"");
}

}  // namespace
}  // namespace mtraining
