#include "mtraining/eval/summary.h"

#include <algorithm>
#include <map>
#include <tuple>

namespace mtraining::eval {
namespace {

struct Mean {
  double sum = 0;
  int64_t count = 0;
  void add(double value) {
    sum += value;
    ++count;
  }
};
struct Group {
  SummaryRow row;
  double prompt_tokens = 0;
  std::map<std::string, Mean> scores;  // by task
};

}  // namespace

std::vector<SummaryRow> Summary::rows() const {
  const bool depths = std::any_of(results_.begin(), results_.end(),
                                  [](const Result& r) { return r.facts.depth.has_value(); });
  const bool lengths = std::any_of(results_.begin(), results_.end(),
                                   [](const Result& r) { return r.facts.length.has_value(); });
  struct Level {
    const char* by;
    bool wanted, task, length, depth;
  };
  const Level levels[] = {{"task,length,depth", depths, true, true, true},
                          {"task,length", lengths, true, true, false},
                          {"task", true, true, false, false},
                          {"length", lengths, false, true, false},
                          {"all", true, false, false, false}};
  std::vector<SummaryRow> made;
  for (const Level& level : levels) {
    if (!level.wanted) continue;
    using Key =
        std::tuple<std::optional<std::string>, std::optional<int64_t>, std::optional<double>>;
    std::map<Key, Group> groups;
    for (const Result& result : results_) {
      Key key;
      if (level.task) std::get<0>(key) = result.facts.task;
      if (level.length) std::get<1>(key) = result.facts.length;
      if (level.depth) std::get<2>(key) = result.facts.depth;
      Group& group = groups[key];
      ++group.row.samples;
      group.row.truncated += result.facts.truncated_tokens > 0 ? 1 : 0;
      group.prompt_tokens += static_cast<double>(result.facts.prompt_tokens);
      if (!result.score) continue;
      ++group.row.scored;
      group.scores[result.facts.task].add(*result.score);
    }
    for (auto& [key, group] : groups) {
      SummaryRow& row = group.row;
      row.by = level.by;
      std::tie(row.task, row.length, row.depth) = key;
      row.mean_prompt_tokens = group.prompt_tokens / static_cast<double>(row.samples);
      Mean over_tasks;
      for (const auto& [task, mean] : group.scores)
        over_tasks.add(mean.sum / static_cast<double>(mean.count));
      if (over_tasks.count > 0) row.score = over_tasks.sum / static_cast<double>(over_tasks.count);
      made.push_back(std::move(row));
    }
  }
  return made;
}

}  // namespace mtraining::eval
