#include "mtraining/eval/results.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>

#include "mtraining/base/check.h"
#include "mtraining/testing/scratch_file.h"

namespace mtraining::eval {
namespace {

using testing::ScratchFile;

const nlohmann::ordered_json kRun = {{"run", "0001"}, {"attention", "dense"}};

SampleFacts facts(const std::string& id) {
  SampleFacts made;
  made.id = id;
  made.task = "needle";
  made.length = 64;
  made.prompt_tokens = 60;
  made.digest = "d" + id;
  return made;
}
Row row(const std::string& id, double score) {
  Row made{{facts(id), "dense", "0001", score}, {}};
  made.answer.output = {1, 2};
  made.answer.score = score;
  return made;
}
std::string refusal(const std::string& text) {
  const ScratchFile file(text);
  std::string said = "accepted";
  try {
    const ResultFile results(file.path());
  } catch (const InvalidArgument& error) {
    said = error.what();
  }
  EXPECT_TRUE(said == "accepted" || file.get() == text) << "a file that was refused has changed";
  return said;
}

TEST(ResultFile, ALaterRunFindsWhatAnEarlierOneWrote) {
  const ScratchFile file("");
  {
    ResultFile results(file.path());
    results.begin_run(kRun);
    EXPECT_EQ(results.find(facts("a"), "dense", "0001"), nullptr);
    results.add(row("a", 0.5));
    EXPECT_EQ(results.find(facts("a"), "dense", "0001")->score, 0.5);
  }
  const std::string before = file.get();
  {
    ResultFile results(file.path());
    results.begin_run(kRun);
    EXPECT_EQ(file.get(), before);  // the run is there
    const Result* a = results.find(facts("a"), "dense", "0001");
    ASSERT_NE(a, nullptr);
    EXPECT_EQ(a->score, 0.5);
    EXPECT_EQ(a->facts.length, 64);
    EXPECT_FALSE(a->facts.depth);
    EXPECT_EQ(results.find(facts("a"), "vertical_slash", "0001"), nullptr);
    EXPECT_EQ(results.find(facts("b"), "dense", "0001"), nullptr);
    results.add(row("b", 1));
  }
  EXPECT_TRUE(file.get().starts_with(before));
  EXPECT_NE(ResultFile(file.path()).find(facts("b"), "dense", "0001"), nullptr);
}

TEST(ResultFile, NothingOfOtherWeightsOrAnotherSampleIsTakenForDone) {
  const ScratchFile file("");
  ResultFile results(file.path());
  results.add(row("a", 1));
  SampleFacts changed = facts("a");
  changed.digest = "other";
  EXPECT_THROW(results.find(changed, "dense", "0001"), InvalidArgument);
  EXPECT_THROW(results.find(facts("a"), "dense", "0002"), InvalidArgument);
}

TEST(ResultFile, EveryPlaceWhereAWriterMayDieLeavesAFileThatGoesOn) {
  const ScratchFile file("");
  {
    ResultFile results(file.path());
    results.begin_run(kRun);
    results.add(row("a", 1));
    results.add(row("b", 0));
  }
  const std::string whole = file.get();
  for (size_t bytes = 0; bytes <= whole.size(); ++bytes) {
    const std::string left = whole.substr(0, bytes);
    const ScratchFile torn(left);
    const int64_t lines = std::count(left.begin(), left.end(), '\n');
    {
      ResultFile results(torn.path());
      const size_t kept = left.rfind('\n') == std::string::npos ? 0 : left.rfind('\n') + 1;
      EXPECT_EQ(results.cut_bytes(), static_cast<int64_t>(bytes - kept));
      results.begin_run(kRun);
      for (const Row& each : {row("a", 1), row("b", 0)})
        if (results.find(each.result.facts, "dense", "0001") == nullptr) results.add(each);
    }
    ASSERT_EQ(torn.get(), whole) << "after " << lines << " lines, " << bytes << " bytes";
  }
}

TEST(ResultFile, AFileThatIsNotOursIsLeftAsItIs) {
  for (const char* text :
       {"{\"a\": 1}", "{\"a\": 1}\n", "x", "[1]\n", "{\"id\":\"a\"", "{\"run\": 1}\n"})
    EXPECT_NE(refusal(text), "accepted") << text;
  ScratchFile file("");
  {
    ResultFile results(file.path());
    results.begin_run(kRun);
    results.add(row("a", 1));
  }
  const std::string whole = file.get();
  EXPECT_NE(refusal(whole + "{\"x\"").find(":3: expected a row"), std::string::npos);
  const std::string last = whole.substr(whole.find('\n') + 1);
  EXPECT_NE(refusal(whole + last).find(":3: has the sample and pattern of line 2"),
            std::string::npos);
  const ResultFile held(file.path());
  EXPECT_THROW(ResultFile again(file.path()), InvalidArgument);
  EXPECT_THROW(ResultFile("/absent/file.jsonl"), InvalidArgument);
}

}  // namespace
}  // namespace mtraining::eval
