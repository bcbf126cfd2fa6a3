#include "bench/rows.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <numeric>

#include "mtraining/base/check.h"

namespace mtraining::bench {
namespace {

/// What a command prints, without the last newline; "" where it fails.
std::string output_of(const std::string& command) {
  std::string text;
  if (FILE* pipe = popen(command.c_str(), "r")) {
    char piece[256];
    while (fgets(piece, sizeof piece, pipe) != nullptr) text += piece;
    if (pclose(pipe) != 0) return "";
  }
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text;
}

std::string quoted(const std::string& text) {
  std::string result = "'";
  for (const char c : text) result += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return result + "'";
}

void put_times(Json& json, const std::string& name, const Times& times) {
  if (times.wall_ms.empty()) return;
  const Spread wall = spread(times.wall_ms);
  json[name + "_ms_min"] = rounded(wall.min, 3);
  json[name + "_ms_max"] = rounded(wall.max, 3);
  if (!times.processor_ms.empty()) {
    json[name + "_processor_ms"] = rounded(spread(times.processor_ms).median, 3);
  }
}

Json median_or_null(const Times& times) {
  if (times.wall_ms.empty()) return nullptr;
  return rounded(spread(times.wall_ms).median, 3);
}

Json rate(const Times& times, double flops) {
  if (times.wall_ms.empty()) return nullptr;
  const double ms = spread(times.wall_ms).median;
  return ms > 0 ? Json(rounded(flops / ms * 1e-9, 4)) : Json(nullptr);
}

/// Forward, backward and index of each repeat.
std::vector<double> totals(const AttentionRow& row, std::vector<double> Times::*which) {
  std::vector<double> sums;
  for (const Times* phase : {&row.forward, &row.backward, &row.index}) {
    const std::vector<double>& values = (*phase).*which;
    if ((*phase).wall_ms.empty()) continue;
    if (values.size() != phase->wall_ms.size()) return {};
    sums.resize(std::max(sums.size(), values.size()), 0.0);
    MT_CHECK_ARG(sums.size() == values.size(), "ratio: ", row.pattern,
                 ": expected as many repeats of every phase, got ", values.size(), " and ",
                 sums.size());
    for (size_t i = 0; i < values.size(); ++i) sums[i] += values[i];
  }
  return sums;
}

Spread quotient(const std::vector<double>& one, const std::vector<double>& other) {
  MT_CHECK_ARG(one.size() == other.size() && !one.empty(),
               "ratio: expected the same number of repeats of both, got ", one.size(), " and ",
               other.size());
  std::vector<double> values;
  for (size_t i = 0; i < one.size(); ++i) values.push_back(one[i] / other[i]);
  return spread(std::move(values));
}

}  // namespace

Spread spread(std::vector<double> values) {
  MT_CHECK_ARG(!values.empty(), "spread: expected at least one value, got none");
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  const double median =
      values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
  return {median, values.front(), values.back()};
}

double rounded(double value, int digits) {
  const double unit = std::pow(10.0, digits);
  return std::round(value * unit) / unit;
}

double wall_now_ms() {
  return std::chrono::duration<double, std::milli>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

double processor_now_ms() {
  timespec t;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) * 1e3 + static_cast<double>(t.tv_nsec) * 1e-6;
}

std::string digest(const void* data, int64_t bytes) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx",
                static_cast<unsigned long long>(XXH3_64bits(data, static_cast<size_t>(bytes))));
  return text;
}

Provenance provenance() {
  Provenance from;
  std::error_code ignored;
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe", ignored);
  if (const char* named = std::getenv("MTRAINING_COMMIT"); named != nullptr && *named != '\0') {
    from.commit = named;
  } else if (!program.empty()) {
    const std::string git = "git -C " + quoted(program.parent_path().string()) + " ";
    from.commit = output_of(git + "rev-parse --short HEAD 2>/dev/null");
    if (!from.commit.empty()) {
      from.modified =
          !output_of(git + "status --porcelain --untracked-files=no 2>/dev/null").empty();
    }
  }
  std::ifstream binary("/proc/self/exe", std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(binary), {}};
  from.harness = digest(bytes.data(), static_cast<int64_t>(bytes.size()));
  std::ifstream("/proc/loadavg") >> from.load;
  return from;
}

std::string cpu_name(int threads) {
  std::ifstream info("/proc/cpuinfo");
  std::string name = "cpu";
  for (std::string line; std::getline(info, line);) {
    if (line.rfind("model name", 0) != 0) continue;
    const size_t colon = line.find(": ");
    if (colon != std::string::npos) name = line.substr(colon + 2);
    break;
  }
  return concat(name, ", ", threads, threads == 1 ? " thread" : " threads");
}

std::string difference(const Workload& one, const Workload& other) {
  const auto differ = [](const char* what, const auto& a, const auto& b) {
    return a == b ? std::string() : concat(what, ": ", a, " beside ", b);
  };
  for (std::string text :
       {differ("mask", one.mask, other.mask), differ("dtype", one.dtype, other.dtype),
        differ("seq_len", one.seq_len, other.seq_len),
        differ("query rows", one.num_queries, other.num_queries),
        differ("heads", one.num_q_heads, other.num_q_heads),
        differ("kv heads", one.num_kv_heads, other.num_kv_heads),
        differ("head_dim", one.head_dim, other.head_dim),
        differ("inputs", one.inputs, other.inputs), differ("device", one.device, other.device),
        differ("program", one.harness, other.harness)}) {
    if (!text.empty()) return text;
  }
  return "";
}

Ratio ratio(const AttentionRow& one, const AttentionRow& other) {
  const std::string why = difference(one.workload, other.workload);
  MT_CHECK_ARG(why.empty(), "ratio: expected the same work, got ", why);
  Ratio result;
  result.wall = quotient(totals(one, &Times::wall_ms), totals(other, &Times::wall_ms));
  const std::vector<double> processor_one = totals(one, &Times::processor_ms);
  const std::vector<double> processor_other = totals(other, &Times::processor_ms);
  if (!processor_one.empty() && !processor_other.empty()) {
    result.processor = quotient(processor_one, processor_other);
  }
  return result;
}

std::string to_line(const AttentionRow& row, const Provenance& from) {
  const double flops = 4.0 * static_cast<double>(row.workload.head_dim) * row.pairs;
  Json json;
  if (row.peer) json["peer"] = *row.peer;
  json["case"] = row.case_name;
  json["pattern"] = row.pattern;
  json["seq_len"] = row.workload.seq_len;
  json["pairs"] = static_cast<int64_t>(std::llround(row.pairs));
  json["fwd_ms"] = median_or_null(row.forward);
  json["bwd_ms"] = median_or_null(row.backward);
  json["index_ms"] = median_or_null(row.index);
  json["fwd_tflops"] = rate(row.forward, flops);
  json["bwd_tflops"] = rate(row.backward, 2.5 * flops);
  json["device"] = row.workload.device;
  json["commit"] = from.commit.empty() ? Json(nullptr) : Json(from.commit);
  put_times(json, "fwd", row.forward);
  put_times(json, "bwd", row.backward);
  put_times(json, "index", row.index);
  json["repeats"] = row.forward.wall_ms.size();
  json["mask"] = row.workload.mask;
  json["dtype"] = row.workload.dtype;
  json["query_rows"] = row.workload.num_queries;
  json["heads"] = row.workload.num_q_heads;
  json["kv_heads"] = row.workload.num_kv_heads;
  json["head_dim"] = row.workload.head_dim;
  json["inputs"] = row.workload.inputs;
  json["harness"] = row.workload.harness;
  json["modified"] = from.modified;
  json["load"] = from.load;
  for (const auto& [key, value] : row.more.items()) json[key] = value;
  return json.dump();
}

}  // namespace mtraining::bench
