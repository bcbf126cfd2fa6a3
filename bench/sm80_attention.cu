// Speed of the sm_80 forward and backward on a fixed vertical-slash pattern: one JSON line a case and pass.
//
// sm80_attention PATTERN.json [--heads Q/KV] [--head-dim D] CASE...      CASE: one | csr | no_columns | rank8 | rank8_64 | dense:SEQ_LEN, as in sm90_forward.cu
// Passes: forward (error: 40 sampled rows of out against float64, relative to the row's norm); backward, backward_deterministic
// (error: norm of the difference of dq, dk, dv between the two, relative, the largest); delta's time on the backward's line.
// FLOPs are 4 D and 10 D a pair in both modes; blocks of chosen diagonals count whole, columns as their pairs outside those.
// Without CMake, from the repository's root:
//   nvcc -gencode arch=compute_90,code=sm_90 -gencode arch=compute_90a,code=sm_90a -O2 -std=c++20 -I. -o sm80_attention
//     bench/sm80_attention.cu mtraining/kernels/sm{80,90}/*.cu mtraining/kernels/validate.cc
//     mtraining/index/{index,columns,step_index,step_pairs,stripes}.cc mtraining/layout/layout.cc
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "bench/sm90_case.cuh"
#include "mtraining/kernels/sm80/backward.h"
#include "mtraining/kernels/sm80/forward.h"

using namespace mtraining::bench::sm90;
using mtraining::kernels::AttentionParams;
using mtraining::kernels::BackwardParams;

namespace {

struct Timing {
  double ms = 0, min_ms = 0, max_ms = 0, host_us = 0;
};

Timing measure(const std::function<void()>& launch) {
  cudaEvent_t start, stop;
  check_device(cudaEventCreate(&start), "event");
  check_device(cudaEventCreate(&stop), "event");
  std::vector<double> times, calls;
  for (int i = 0; i < kWarmUp + kRuns; ++i) {
    check_device(cudaEventRecord(start), "record");
    const auto before = std::chrono::steady_clock::now();
    launch();
    const auto after = std::chrono::steady_clock::now();
    check_device(cudaEventRecord(stop), "record");
    check_device(cudaEventSynchronize(stop), "the kernel");
    float ms = 0;
    check_device(cudaEventElapsedTime(&ms, start, stop), "elapsed");
    if (i < kWarmUp) continue;
    times.push_back(ms);
    calls.push_back(std::chrono::duration<double, std::micro>(after - before).count());
  }
  cudaEventDestroy(start);
  cudaEventDestroy(stop);
  std::sort(times.begin(), times.end());
  std::sort(calls.begin(), calls.end());
  return {times[times.size() / 2], times.front(), times.back(), calls[calls.size() / 2]};
}

void report(const std::string& pattern, const std::string& name, const char* pass, int64_t pairs,
            double flops_a_pair, const Timing& t, double error) {
  std::printf(
      "{\"bench\": \"sm80_attention\", \"pattern\": \"%s\", \"case\": \"%s\", \"pass\": \"%s\", "
      "\"pairs\": %ld, \"ms\": %.3f, \"min_ms\": %.3f, \"max_ms\": %.3f, \"tflops\": %.1f, "
      "\"host_us\": %.1f, \"error\": %.2e}\n",
      pattern.c_str(), name.c_str(), pass, static_cast<long>(pairs), t.ms, t.min_ms, t.max_ms,
      flops_a_pair * shape().head_dim * static_cast<double>(pairs) / t.ms / 1e9, t.host_us, error);
  std::fflush(stdout);
}

template <typename T>
std::vector<T> read_some(const T* from, int64_t count) {
  std::vector<T> values(count);
  check_device(cudaMemcpy(values.data(), from, count * sizeof(T), cudaMemcpyDeviceToHost), "read");
  return values;
}

/// Largest error of sampled rows of out against float64, relative to the row's norm.
double sampled_error(const Prepared& made, const RankRun& run) {
  const auto k = made.inputs->k.read<__nv_bfloat16>(), v = made.inputs->v.read<__nv_bfloat16>();
  const int64_t n = static_cast<int64_t>(run.positions.size());
  double worst = 0;
  uint64_t state = 12345;
  for (int sample = 0; sample < 40; ++sample) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    const int64_t t = static_cast<int64_t>((state >> 33) % n), i = run.positions[t];
    const int h = sample % shape().heads, g = h / (shape().heads / shape().kv_heads);
    const auto q = read_some(
        run.q.get<__nv_bfloat16>() + (t * shape().heads + h) * shape().head_dim, shape().head_dim);
    const auto out = read_some(run.out.get<float>() + (t * shape().heads + h) * shape().head_dim,
                               shape().head_dim);
    std::vector<uint8_t> keys(i + 1, 0);
    for (const int32_t d : made.index.diagonals.row(h))
      for (int64_t j = (i / 64 - d) * 64; d <= i / 64 && j < (i / 64 - d) * 64 + 64; ++j)
        if (j <= i) keys[j] = 1;
    if (made.index.columns.capacity > 0)
      for (const int32_t j : made.index.columns.row(h))
        if (j <= i) keys[j] = 1;
    double top = -INFINITY, sum = 0, norm = 0, error = 0;
    std::vector<double> scores(i + 1), row(shape().head_dim, 0);
    for (int64_t j = 0; j <= i; ++j) {
      if (!keys[j]) continue;
      double s = 0;
      for (int d = 0; d < shape().head_dim; ++d)
        s += double{__bfloat162float(q[d])} *
             __bfloat162float(k[(j * shape().kv_heads + g) * shape().head_dim + d]);
      scores[j] = s / std::sqrt(static_cast<double>(shape().head_dim));
      top = std::max(top, scores[j]);
    }
    for (int64_t j = 0; j <= i; ++j) {
      if (!keys[j]) continue;
      const double p = std::exp(scores[j] - top);
      sum += p;
      for (int d = 0; d < shape().head_dim; ++d)
        row[d] += p * __bfloat162float(v[(j * shape().kv_heads + g) * shape().head_dim + d]);
    }
    for (int d = 0; d < shape().head_dim; ++d) {
      norm += row[d] / sum * row[d] / sum;
      error += (out[d] - row[d] / sum) * (out[d] - row[d] / sum);
    }
    error = std::sqrt(error / norm);
    worst = std::isnan(error) ? INFINITY : std::max(worst, error);
  }
  return worst;
}

/// Memory of one rank's backward.
struct Gradients {
  DeviceMemory dout, dq, delta, workspace;
  std::vector<DeviceMemory> keys;  // dk, dv of every source
  BackwardParams params;

  Gradients(const Inputs& inputs, RankRun& run) {
    const int64_t n = run.params.num_queries, width = shape().heads * shape().head_dim;
    dout = take_rows(inputs.dout, run.positions, width);
    dq = DeviceMemory(n * width * 4);
    delta = DeviceMemory(n * shape().heads * 4);
    static_cast<AttentionParams&>(params) = run.params;
    params.dout = {dout.get(), 0, width, shape().head_dim};
    params.lse = run.lse.get();
    params.delta = delta.get();
    params.dq = {dq.get(), n * width, width, shape().head_dim};
    for (KeySource& source : run.sources) {
      const bool shared = source.block_starts == nullptr;  // gathered columns: one head a row
      const int64_t row = shared ? shape().head_dim : shape().kv_heads * shape().head_dim;
      for (auto* view : {&source.dk, &source.dv}) {
        keys.emplace_back(source.num_keys * row * 4);
        *view = {keys.back().get(), 0, row, shared ? 0 : shape().head_dim};
      }
    }
    params.sources = run.sources.data();
    workspace = DeviceMemory(mtraining::kernels::sm80::backward_workspace_bytes(params));
    params.workspace = workspace.get();
    params.workspace_bytes = workspace.bytes();
  }
  void clear() const {
    check_device(cudaMemset(dq.get(), 0, dq.bytes()), "clearing");
    for (const DeviceMemory& x : keys) check_device(cudaMemset(x.get(), 0, x.bytes()), "clearing");
  }
  std::vector<std::vector<float>> read() const {
    std::vector<std::vector<float>> all = {dq.read<float>()};
    for (const DeviceMemory& x : keys) all.push_back(x.read<float>());
    return all;
  }
};

double difference(const std::vector<std::vector<float>>& a,
                  const std::vector<std::vector<float>>& b) {
  double worst = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    double norm = 0, error = 0;
    for (size_t x = 0; x < a[i].size(); ++x) {
      norm += double{a[i][x]} * a[i][x];
      error += (double{a[i][x]} - b[i][x]) * (double{a[i][x]} - b[i][x]);
    }
    const double relative = norm > 0 ? std::sqrt(error / norm) : error > 0 ? INFINITY : 0;
    worst = std::isnan(relative) ? INFINITY : std::max(worst, relative);
  }
  return worst;
}

void run_case(const Pattern& pattern, const std::string& name) {
  Prepared made = prepare_case(pattern, name);
  RankRun& run = *made.runs[0];
  run.workspace = DeviceMemory(mtraining::kernels::sm80::forward_workspace_bytes(run.params));
  run.params.workspace = run.workspace.get();
  run.params.workspace_bytes = run.workspace.bytes();
  const Timing forward = measure([&] { mtraining::kernels::sm80::forward(run.params); });
  report(made.pattern.name, name, "forward", made.pairs, 4, forward, sampled_error(made, run));
  Gradients gradients(*made.inputs, run);
  BackwardParams& p = gradients.params;
  const mtraining::kernels::ConstView out{run.params.out.data, run.params.out.stride_batch,
                                          run.params.out.stride_token, run.params.out.stride_head};
  const Timing delta =
      measure([&] { mtraining::kernels::sm80::delta(p, out, gradients.delta.get()); });
  std::vector<std::vector<float>> results[2];
  for (const bool deterministic : {false, true}) {
    p.deterministic = deterministic;
    gradients.clear();
    mtraining::kernels::sm80::backward(p);
    results[deterministic] = gradients.read();
  }
  const double error = difference(results[0], results[1]);
  for (const bool deterministic : {false, true}) {
    p.deterministic = deterministic;
    const Timing backward = measure([&] { mtraining::kernels::sm80::backward(p); });
    report(made.pattern.name, name, deterministic ? "backward_deterministic" : "backward",
           made.pairs, 10, backward, error);
  }
  report(made.pattern.name, name, "delta", made.pairs, 0, delta, 0);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const Pattern pattern = read_pattern(argc > 1 ? argv[1] : "");
    for (int a = 2; a < argc; ++a)
      if (!take_option(argc, argv, a)) run_case(pattern, argv[a]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "sm80_attention: error: %s\n", error.what());
    return 1;
  }
  return 0;
}
