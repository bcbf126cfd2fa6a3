#include "mtraining/trace/chrome_trace.h"

#include <algorithm>
#include <chrono>
#include <fstream>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>

#include "mtraining/base/check.h"

namespace mtraining::trace {

int64_t now_us() {
  return std::chrono::duration_cast<std::chrono::microseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

std::string SpanRecorder::serialize() const {
  auto rows = nlohmann::json::array();
  for (const Span& s : spans_) {
    rows.push_back(
        {s.name, s.row, s.begin_us, s.end_us, s.train_step, s.layer, s.ring_step, s.pairs});
  }
  return rows.dump();
}

void write_chrome_trace(const std::filesystem::path& path,
                        const std::vector<std::string>& per_rank) {
  std::vector<nlohmann::json> ranks;
  int64_t origin = std::numeric_limits<int64_t>::max();
  for (size_t r = 0; r < per_rank.size(); ++r) {
    ranks.push_back(nlohmann::json::parse(per_rank[r], nullptr, false));
    MT_CHECK_ARG(ranks.back().is_array(), "trace of rank ", r, ": expected a JSON array of spans");
    for (const auto& span : ranks.back()) origin = std::min(origin, span.at(2).get<int64_t>());
  }
  auto events = nlohmann::ordered_json::array();
  for (size_t r = 0; r < ranks.size(); ++r) {
    events.push_back({{"ph", "M"},
                      {"name", "process_name"},
                      {"pid", r},
                      {"args", {{"name", concat("rank ", r)}}}});
    events.push_back(
        {{"ph", "M"}, {"name", "process_sort_index"}, {"pid", r}, {"args", {{"sort_index", r}}}});
    std::map<std::string, int> rows;
    for (const auto& span : ranks[r]) {
      const auto row = span.at(1).get<std::string>();
      const auto [it, added] = rows.emplace(row, static_cast<int>(rows.size()));
      if (added) {
        events.push_back({{"ph", "M"},
                          {"name", "thread_name"},
                          {"pid", r},
                          {"tid", it->second},
                          {"args", {{"name", row}}}});
      }
      nlohmann::ordered_json args = {{"train_step", span.at(4)}};
      if (span.at(5).get<int64_t>() >= 0) args["layer"] = span.at(5);
      if (span.at(6).get<int64_t>() >= 0) args["ring_step"] = span.at(6);
      if (span.at(7).get<int64_t>() >= 0) args["pairs"] = span.at(7);
      const int64_t begin = span.at(2).get<int64_t>();
      events.push_back({{"ph", "X"},
                        {"name", span.at(0)},
                        {"pid", r},
                        {"tid", it->second},
                        {"ts", begin - origin},
                        {"dur", span.at(3).get<int64_t>() - begin},
                        {"args", std::move(args)}});
    }
  }
  std::ofstream out(path);
  out << nlohmann::ordered_json{{"traceEvents", std::move(events)}, {"displayTimeUnit", "ms"}}
             .dump()
      << '\n';
  out.close();
  MT_CHECK_EXTERNAL(!out.fail(), path.string(), ": writing failed (missing folder, disk full?)");
}

}  // namespace mtraining::trace
