#include "mtraining/eval/samples.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "mtraining/base/check.h"
#include "mtraining/eval/answer.h"
#include "mtraining/testing/scratch_file.h"

namespace mtraining::eval {
namespace {

using testing::ScratchFile;

constexpr SampleLimits kLimits{100, 50};

const std::string kGood =
    R"({"id": "a", "task": "needle", "ids": [1, 2, 3], "max_new_tokens": 4, "answers": [[7, 8], [[9], [10, 11]]],)"
    R"( "length": 16, "depth": 0.25, "stops": [0], "truncated_tokens": 5, "text": {"question": "?"}})";

std::string refusal(const std::string& text, Kind kind = Kind::kNeedle) {
  const ScratchFile file(text);
  try {
    SampleFile samples(file.path(), kind, kLimits);
    return "accepted";
  } catch (const InvalidArgument& error) {
    const std::string message = error.what();
    EXPECT_TRUE(message.starts_with(file.path())) << message;
    return message.substr(file.path().size());
  }
}

std::string generation(const std::string& more) {
  return R"({"id": "b", "task": "needle", "ids": [1], "max_new_tokens": 4, "answers": [])" + more +
         "}";
}

TEST(SampleFile, GivesWhatALineSaysWhateverIsReadFirst) {
  const ScratchFile file(
      "\n" + kGood + "\r\n  \n" +
      R"({"id": "b", "task": "needle", "ids": [4], "options": [[5], [6, 7]], "correct": [1]})");
  const SampleFile samples(file.path(), Kind::kNeedle, kLimits);
  ASSERT_EQ(samples.facts().size(), 2u);
  const Sample b = samples.read(1), a = samples.read(0);
  EXPECT_EQ(a.facts.id, "a");
  EXPECT_EQ(a.ids, (std::vector<int64_t>{1, 2, 3}));
  EXPECT_EQ(a.answers, (std::vector<std::vector<std::vector<int64_t>>>{{{7, 8}}, {{9}, {10, 11}}}));
  EXPECT_EQ(a.stops, std::vector<int64_t>{0});
  EXPECT_EQ(a.max_new_tokens, 4);
  EXPECT_EQ(a.facts.length, 16);
  EXPECT_EQ(a.facts.depth, 0.25);
  EXPECT_EQ(a.facts.truncated_tokens, 5);
  EXPECT_FALSE(a.any || a.is_choice());
  EXPECT_TRUE(b.is_choice());
  EXPECT_EQ(b.options, (std::vector<std::vector<int64_t>>{{5}, {6, 7}}));
  EXPECT_EQ(b.correct, std::vector<int64_t>{1});
  EXPECT_FALSE(b.facts.length || b.facts.depth);
  EXPECT_NE(a.facts.digest, b.facts.digest);
}

TEST(SampleFile, AFileThatChangesIsNoticed) {
  const ScratchFile file(kGood + "\n");
  const SampleFile samples(file.path(), Kind::kNeedle, kLimits);
  std::string other = kGood;
  other[other.find("[1, 2") + 1] = '5';
  file.put(other + "\n");
  EXPECT_THROW(samples.read(0), ExternalError);
}

TEST(SampleFile, EveryMistakeNamesFileAndLine) {
  const std::string good = kGood + "\n";
  const auto second = [&](const std::string& line) { return refusal(good + line); };
  const auto expect = [](const std::string& got, const std::vector<std::string>& parts) {
    for (const std::string& part : parts)
      EXPECT_NE(got.find(part), std::string::npos) << got << " lacks " << part;
  };
  EXPECT_EQ(second(generation("")), "accepted");
  EXPECT_EQ(second(generation(R"(, "match": "any")")), "accepted");
  expect(second("{"), {":2: not valid JSON"});
  expect(second("[1]"), {":2: expected a JSON object", "[1]"});
  expect(second("{}"), {":2: expected the key \"id\""});
  expect(second(kGood), {":2: \"id\"", "\"a\"", "line 1's"});
  expect(second(generation(R"(, "id": "c")")), {":2: duplicate name"});
  expect(second(generation(R"(, "anwsers": [])")), {":2: unknown key \"anwsers\""});
  expect(second(generation(R"(, "match": "some")")),
         {":2: \"match\"", "\"all\" or \"any\"", "some"});
  expect(second(generation(R"(, "depth": 1.5)")), {":2: \"depth\"", "0 to 1", "1.5"});
  expect(second(generation(R"(, "length": 0)")), {":2: \"length\"", "from 1", "0"});
  expect(second(generation(R"(, "stops": [100])")), {":2: \"stops\"[0]", "0 to 99", "100"});
  expect(second(generation(R"(, "text": "x")")), {":2: \"text\"", "object"});
  expect(second(generation(R"(, "options": [[1]], "correct": [0])")),
         {":2: \"answers\": has no meaning beside \"options\""});
  const std::string choice = R"({"id": "c", "task": "needle", "ids": [1], "options": )";
  expect(second(choice + R"([], "correct": [0]})"), {":2: \"options\": expected at least one"});
  expect(second(choice + R"([[1], []], "correct": [0]})"), {":2: \"options\"[1]\"", "token ids"});
  expect(second(choice + R"([[1]]})"), {":2: expected the key \"correct\""});
  expect(second(choice + R"([[1]], "correct": [1]})"), {":2: \"correct\"", "0 to 0", "1"});
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string line = kGood;
    return line.replace(line.find(from), from.size(), to);
  };
  expect(refusal(with("[1, 2, 3]", "[1, 2.5]")), {":1: \"ids\"[1]", "2.5"});
  expect(refusal(with("[1, 2, 3]", "[1, -1]")), {":1: \"ids\"[1]", "-1"});
  expect(refusal(with("[1, 2, 3]", "[18446744073709551615]")), {":1: \"ids\"[0]"});
  expect(refusal(with("[1, 2, 3]", "[]")), {":1: \"ids\"", "array of token ids"});
  expect(refusal(with("[10, 11]", "\"x\"")), {":1: \"answers\"[1]\"", "x"});
  expect(refusal(with("\"max_new_tokens\": 4", "\"max_new_tokens\": 0")),
         {":1: \"max_new_tokens\""});
  expect(refusal(with("\"max_new_tokens\": 4", "\"max_new_tokens\": 48")),
         {":1: 3 ids and 48 new ones", "at most 50"});
  EXPECT_EQ(refusal(with("\"max_new_tokens\": 4", "\"max_new_tokens\": 47")), "accepted");
  expect(refusal(kGood, Kind::kRuler), {":1: \"task\"", "niah_single", "for ruler", "\"needle\""});
  expect(refusal("\n \n"), {": expected samples, got none"});
  EXPECT_THROW(SampleFile("/absent.jsonl", Kind::kNeedle, kLimits), InvalidArgument);
}

TEST(Kind, TasksMayHaveASuffixOfTheirOwn) {
  EXPECT_TRUE(is_task_of(Kind::kRuler, "vt"));
  EXPECT_TRUE(is_task_of(Kind::kRuler, "niah_single_3"));
  EXPECT_FALSE(is_task_of(Kind::kRuler, "niah"));
  EXPECT_FALSE(is_task_of(Kind::kRuler, "vt_"));
  EXPECT_FALSE(is_task_of(Kind::kRuler, "vtx"));
  EXPECT_TRUE(is_task_of(Kind::kInfiniteBench, "code_debug"));
  EXPECT_FALSE(is_task_of(Kind::kInfiniteBench, "needle"));
  for (const Kind kind : {Kind::kNeedle, Kind::kRuler, Kind::kInfiniteBench})
    EXPECT_EQ(kind_of(to_string(kind)), kind);
  EXPECT_FALSE(kind_of("perplexity"));
}

Model says(std::vector<int64_t> output) {
  return {[output](const Sample&) { return output; }, nullptr};
}

TEST(Answer, CountsAnswersThatStandAmongTheNewTokensWholeAndInOrder) {
  Sample sample;
  sample.answers = {{{7, 8}}, {{9}, {10, 11}}};
  const auto score = [&](std::vector<int64_t> output) {
    return *answer(sample, says(output)).score;
  };
  EXPECT_EQ(score({7, 8, 9}), 1);
  EXPECT_EQ(score({1, 10, 11, 7, 7, 8}), 1);
  EXPECT_EQ(score({7, 1, 8}), 0);
  EXPECT_EQ(score({8, 7}), 0);
  EXPECT_EQ(score({8, 7, 10, 11}), 0.5);
  EXPECT_EQ(score({10, 7}), 0);
  EXPECT_EQ(score({}), 0);
  sample.any = true;
  EXPECT_EQ(score({9}), 1);
  EXPECT_EQ(score({7}), 0);
  sample.answers.clear();
  EXPECT_FALSE(answer(sample, says({9})).score);
}

TEST(Answer, TakesTheMostLikelyOptionTheFirstOfEquals) {
  Sample sample;
  sample.options = {{1}, {2}, {3}};
  const auto chosen = [&](std::vector<double> values, std::vector<int64_t> correct) {
    sample.correct = std::move(correct);
    return answer(sample, {nullptr, [values](const Sample&) { return values; }});
  };
  EXPECT_EQ(*chosen({-3, -1, -2}, {1}).choice, 1);
  EXPECT_EQ(*chosen({-3, -1, -2}, {1}).score, 1);
  EXPECT_EQ(*chosen({-3, -1, -2}, {0, 2}).score, 0);
  EXPECT_EQ(*chosen({-3, -2, -2}, {0, 1}).choice, 1);
  EXPECT_EQ(*chosen({-3, -2, -2}, {0, 1}).score, 1);
}

}  // namespace
}  // namespace mtraining::eval
