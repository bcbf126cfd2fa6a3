// Rows: what a benchmark measured, one JSON object a line, with what is needed to believe it.
//
// In:   times of repeated runs, pairs, a device's name; from the machine: commit, program, load.
// Out:  a line with case, pattern, seq_len, pairs, fwd_ms, bwd_ms, index_ms, fwd_tflops, bwd_tflops, device, commit, and more.
// Next: docs/benchmarks/*.jsonl; python/mtraining/benchmarks.py makes tables and plots of them.
//
// A value that was not measured is null. Times are medians over the repeats; the smallest and the largest stand beside them. Torch-free and
// CUDA-free: a device bench fills the same struct with times of its events.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace mtraining::bench {

using Json = nlohmann::ordered_json;

/// Median, smallest, largest.
struct Spread {
  double median = 0, min = 0, max = 0;
};
/// Errors: InvalidArgument where there is no value.
Spread spread(std::vector<double> values);
/// To so many decimals.
double rounded(double value, int digits = 3);

/// One phase over the repeats, in their order.
struct Times {
  std::vector<double> wall_ms = {};
  std::vector<double> processor_ms = {};  ///< of all threads together; empty on a device
};
/// Runs `body` once and appends its wall and processor time.
template <typename Body>
void time_once(Times& times, const Body& body);

/// Where rows come from.
struct Provenance {
  std::string commit = {};   ///< "" where it is not known
  bool modified = false;     ///< the tree differed from that commit
  std::string harness = {};  ///< digest of the running program's bytes
  double load = 0;  ///< the machine's load average of the last minute, this program included
};
/// The tree is the one that the executable lies in; MTRAINING_COMMIT (a name) takes its place where a binary was copied elsewhere.
Provenance provenance();
/// "AMD EPYC 9B14, 2 threads"
std::string cpu_name(int threads);

/// 64 bits over bytes (xxhash), as 16 hexadecimal digits.
std::string digest(const void* data, int64_t bytes);

/// What an attention case ran: rows whose facts differ cannot be compared.
struct Workload {
  std::string
      mask;  ///< "causal": every row sees no later key; what of it is computed, `pattern` says
  std::string dtype;
  int64_t seq_len = 0, num_queries = 0;
  int64_t num_q_heads = 0, num_kv_heads = 0, head_dim = 0;
  std::string inputs;  ///< digest of q, k, v, dout
  std::string device;  ///< threads included
  std::string harness;
};
/// The first fact in which two workloads differ, as one sentence; "" where they can be compared.
std::string difference(const Workload& one, const Workload& other);

struct AttentionRow {
  std::string case_name;  ///< "attention", ..
  std::string pattern;    ///< what of the mask is computed
  Workload workload;
  double pairs = 0;                               ///< computed, all heads and samples
  Times forward = {}, backward = {}, index = {};  ///< empty: not measured
  std::optional<std::string> peer = {};           ///< whose row it is, where not ours
  Json more = Json::object();                     ///< further keys
};
/// One line, without its newline. Rates: 4 D flops a pair forward, 10 D backward, index not counted.
std::string to_line(const AttentionRow& row, const Provenance& from);

/// time(one) / time(other) of forward + backward + index, repeat by repeat: repeat r of both ran one after the other, so that what
/// else the machine did weighs on both. Processor time where both have it, else wall time. Errors: InvalidArgument with
/// difference(): masks, dtypes, lengths, inputs, devices or programs that are not the same; numbers of repeats that differ.
struct Ratio {
  Spread wall;
  std::optional<Spread> processor;
};
Ratio ratio(const AttentionRow& one, const AttentionRow& other);

double wall_now_ms();
double processor_now_ms();

template <typename Body>
void time_once(Times& times, const Body& body) {
  const double wall = wall_now_ms(), processor = processor_now_ms();
  body();
  times.processor_ms.push_back(processor_now_ms() - processor);
  times.wall_ms.push_back(wall_now_ms() - wall);
}

}  // namespace mtraining::bench
