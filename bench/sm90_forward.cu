// Speed of the Hopper forward on a fixed vertical-slash pattern: one JSON line a case.
//
// sm90_forward PATTERN.json [--heads Q/KV] [--head-dim D] [--dtype fp16] CASE...
// CASE: one | csr | no_columns | rank8 | rank8_split | shards8 | dense:SEQ_LEN
//   one          one rank, everything in one source, columns inside it
//   csr          the same, block lists as CSR
//   no_columns   the same without columns
//   rank8        rank 0 of 8 (block_striped, stripe 128): 8 shards and the gathered columns in one launch
//   rank8_64     the same with stripe 64
//   rank8_split  rank 0 of 8, one launch a source, merged
//   shards8      all 8 ranks one after the other, each as rank8
//   dense:N      dense causal, no pattern
// FLOPs are 4 * D a pair; blocks of chosen diagonals count whole, columns as their pairs outside those.
// Without CMake, from the repository's root:
//   nvcc -gencode arch=compute_90a,code=sm_90a -O3 -std=c++20 -I. -cudart static -o sm90_forward bench/sm90_forward.cu
//     mtraining/kernels/sm90/{forward,source_args,gather_columns,forward_{bf16,fp16}_d{64,128}}.cu mtraining/kernels/validate.cc
//     mtraining/index/{index,columns,step_index,step_pairs,stripes}.cc mtraining/layout/layout.cc
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "bench/sm90_case.cuh"

using namespace mtraining::bench::sm90;

namespace {

void launch(const RankRun& run, bool split) {
  ForwardParams p = run.params;
  if (!split) return mtraining::kernels::sm90::forward(p);
  for (size_t s = 0; s < run.sources.size(); ++s) {
    p.sources = run.sources.data() + s;
    p.num_sources = 1;
    p.first = s == 0;
    p.rounded = s + 1 == run.sources.size() ? run.params.rounded : View{};
    p.residual = s + 1 == run.sources.size() ? run.params.residual : View{};
    mtraining::kernels::sm90::forward(p);
  }
}

/// Largest error of sampled rows against float64, relative to the row's norm.
double sampled_error(const Inputs& inputs, const mtraining::index::Index& index,
                     const RankRun& run) {
  const int64_t n = static_cast<int64_t>(run.positions.size());
  double worst = 0;
  const auto k = read_floats(inputs.k.get(), inputs.k.bytes() / 2),
             v = read_floats(inputs.v.get(), inputs.v.bytes() / 2);
  uint64_t state = 12345;
  for (int sample = 0; sample < 12; ++sample) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    const int64_t t = static_cast<int64_t>((state >> 33) % n);
    const int h = sample % shape().heads, g = h / (shape().heads / shape().kv_heads);
    const int64_t i = run.positions[t];
    const auto q = read_floats(run.q.get<uint16_t>() + (t * shape().heads + h) * shape().head_dim,
                               shape().head_dim);
    const int64_t at = (t * shape().heads + h) * shape().head_dim;
    auto out = read_floats(run.rounded.get<uint16_t>() + at, shape().head_dim);
    const auto rest = read_floats(run.residual.get<uint16_t>() + at, shape().head_dim);
    for (int d = 0; d < shape().head_dim; ++d) out[d] += rest[d];
    std::vector<uint8_t> keys(i + 1, 0);
    for (const int32_t d : index.diagonals.row(h))
      for (int64_t j = (i / 64 - d) * 64; j < (i / 64 - d) * 64 + 64 && d <= i / 64; ++j)
        if (j <= i) keys[j] = 1;
    if (index.columns.capacity > 0)
      for (const int32_t j : index.columns.row(h))
        if (j <= i) keys[j] = 1;
    double top = -INFINITY, sum = 0;
    std::vector<double> scores(i + 1), row(shape().head_dim, 0);
    for (int64_t j = 0; j <= i; ++j) {
      if (!keys[j]) continue;
      double s = 0;
      for (int d = 0; d < shape().head_dim; ++d)
        s += double{q[d]} * k[(j * shape().kv_heads + g) * shape().head_dim + d];
      scores[j] = s / std::sqrt(static_cast<double>(shape().head_dim));
      top = std::max(top, scores[j]);
    }
    for (int64_t j = 0; j <= i; ++j) {
      if (!keys[j]) continue;
      const double p = std::exp(scores[j] - top);
      sum += p;
      for (int d = 0; d < shape().head_dim; ++d)
        row[d] += p * v[(j * shape().kv_heads + g) * shape().head_dim + d];
    }
    double norm = 0, error = 0;
    for (int d = 0; d < shape().head_dim; ++d) {
      norm += row[d] / sum * row[d] / sum;
      error += (out[d] - row[d] / sum) * (out[d] - row[d] / sum);
    }
    error = std::sqrt(error / norm);
    worst = std::isnan(error) ? INFINITY : std::max(worst, error);
  }
  return worst;
}

void measure(const std::string& pattern, const std::string& name, const Inputs& inputs,
             const mtraining::index::Index& index,
             const std::vector<std::unique_ptr<RankRun>>& runs, bool split, int64_t pairs) {
  cudaEvent_t start, stop;
  check_device(cudaEventCreate(&start), "event");
  check_device(cudaEventCreate(&stop), "event");
  std::vector<float> times;
  for (int i = 0; i < warm_ups() + timed_runs(); ++i) {
    check_device(cudaEventRecord(start), "record");
    for (const auto& run : runs) launch(*run, split);
    check_device(cudaEventRecord(stop), "record");
    check_device(cudaEventSynchronize(stop), "the kernel");
    float ms = 0;
    check_device(cudaEventElapsedTime(&ms, start, stop), "elapsed");
    if (i >= warm_ups()) times.push_back(ms);
  }
  std::sort(times.begin(), times.end());
  // Host time of a call while the device is behind.
  std::vector<double> calls;
  for (int i = 0; i < timed_runs(); ++i) {
    const auto before = std::chrono::steady_clock::now();
    launch(*runs[0], split);
    calls.push_back(
        std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - before)
            .count() /
        static_cast<double>(split ? runs[0]->sources.size() : 1));
  }
  std::sort(calls.begin(), calls.end());
  const double host_us = calls[calls.size() / 2];
  check_device(cudaDeviceSynchronize(), "the kernel");
  const double ms = times[times.size() / 2];
  const double error = sampled_error(inputs, index, *runs[0]);
  std::printf(
      "{\"bench\": \"sm90_forward\", \"pattern\": \"%s\", \"case\": \"%s\", \"dtype\": \"%s\", "
      "\"heads\": \"%d/%d\", "
      "\"head_dim\": %d, \"seq_len\": %ld, "
      "\"pairs\": %ld, "
      "\"ms\": %.3f, \"min_ms\": %.3f, \"max_ms\": %.3f, \"tflops\": %.1f, \"host_us\": %.1f, "
      "\"error\": %.2e}\n",
      pattern.c_str(), name.c_str(),
      shape().dtype == mtraining::kernels::DType::kFloat16 ? "fp16" : "bf16", shape().heads,
      shape().kv_heads, shape().head_dim, static_cast<long>(inputs.seq_len),
      static_cast<long>(pairs), ms, times.front(), times.back(),
      4.0 * shape().head_dim * static_cast<double>(pairs) / ms / 1e9, host_us, error);
  std::fflush(stdout);
  cudaEventDestroy(start);
  cudaEventDestroy(stop);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const Pattern pattern = read_pattern(argc > 1 ? argv[1] : "");
    for (int a = 2; a < argc; ++a) {
      if (take_option(argc, argv, a)) continue;
      const std::string name = argv[a];
      const Prepared made = prepare_case(pattern, name);
      measure(made.pattern.name, name, *made.inputs, made.index, made.runs, name == "rank8_split",
              made.pairs);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "sm90_forward: error: %s\n", error.what());
    return 1;
  }
  return 0;
}
