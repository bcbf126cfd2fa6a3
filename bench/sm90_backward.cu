// Speed of the Hopper backward on a fixed vertical-slash pattern: one JSON line a case and mode.
//
// sm90_backward PATTERN.json [--heads Q/KV] [--head-dim D] [--dtype fp16] [--runs N] CASE...
// CASE: those of sm90_forward.cu without rank8_split, uniform:SEQ_LEN[:DENSITY] (128 x 128 blocks, .1); a trailing + measures both
// modes, in turn, a trailing ! leaves the errors out. What follows another PATTERN.json or option is measured with that.
// Each line: the backward alone (workspace kernels and gather inside), delta apart; FLOPs are 10 * D a pair. Errors: sampled rows of dq
// and keys of dk, dv against float64, with the forward's lse; relative to the row's norm.
// Without CMake, from the repository's root:
//   nvcc -gencode arch=compute_90a,code=sm_90a -O3 -std=c++20 -I. -cudart static -o sm90_backward bench/sm90_backward.cu
//     mtraining/kernels/sm90/*.cu mtraining/kernels/validate.cc
//     mtraining/index/{index,columns,step_index,step_pairs,stripes}.cc mtraining/layout/layout.cc
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "bench/sm90_case.cuh"
#include "mtraining/kernels/sm90/backward.h"

using namespace mtraining::bench::sm90;
using mtraining::kernels::BackwardParams;

namespace {

struct GradientRun {
  DeviceMemory dout, dq, delta, workspace;
  std::vector<DeviceMemory> gradients;  // dk, dv of every source
  BackwardParams params;
  int64_t bytes[2];  // of the workspace that the default and the deterministic mode ask for
};

std::unique_ptr<GradientRun> prepare_gradients(const Inputs& inputs, RankRun& run) {
  auto made = std::make_unique<GradientRun>();
  mtraining::kernels::sm90::forward(run.params);
  const int64_t n = run.params.num_queries, width = shape().heads * shape().head_dim;
  made->dout = take_rows(inputs.dout, run.positions, width);
  made->dq = DeviceMemory(n * width * 4);
  made->delta = DeviceMemory(n * shape().heads * 4);
  BackwardParams& p = made->params;
  static_cast<mtraining::kernels::AttentionParams&>(p) = run.params;
  p.dout = {made->dout.get(), 0, width, shape().head_dim};
  p.lse = run.lse.get();
  p.delta = made->delta.get();
  p.dq = {made->dq.get(), n * width, width, shape().head_dim};
  for (KeySource& source : run.sources) {
    const bool shared = source.block_starts == nullptr;  // gathered columns: one head a row
    const int64_t row = shared ? shape().head_dim : shape().kv_heads * shape().head_dim;
    for (auto* view : {&source.dk, &source.dv}) {
      made->gradients.emplace_back(source.num_keys * row * 4);
      *view = {made->gradients.back().get(), 0, row, shared ? 0 : shape().head_dim};
    }
  }
  p.sources = run.sources.data();
  made->bytes[0] = mtraining::kernels::sm90::backward_workspace_bytes(p);
  p.deterministic = true;
  made->bytes[1] = mtraining::kernels::sm90::backward_workspace_bytes(p);
  p.deterministic = false;
  made->workspace = DeviceMemory(std::max(made->bytes[0], made->bytes[1]));
  p.workspace = made->workspace.get();
  p.workspace_bytes = made->workspace.bytes();
  return made;
}

void clear(const GradientRun& run) {
  check_device(cudaMemset(run.dq.get(), 0, run.dq.bytes()), "clearing dq");
  for (const DeviceMemory& memory : run.gradients)
    check_device(cudaMemset(memory.get(), 0, memory.bytes()), "clearing dk, dv");
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

using Launch = std::function<void()>;

/// Times of each of the launches, sorted. One after the other, again and again: the clock, which falls under load, is the same for all.
std::vector<std::vector<double>> times(const std::vector<Launch>& launches) {
  cudaEvent_t start, stop;
  check_device(cudaEventCreate(&start), "event");
  check_device(cudaEventCreate(&stop), "event");
  std::vector<std::vector<double>> found(launches.size());
  for (int i = 0; i < warm_ups() + timed_runs(); ++i) {
    for (size_t l = 0; l < launches.size(); ++l) {
      check_device(cudaEventRecord(start), "record");
      launches[l]();
      check_device(cudaEventRecord(stop), "record");
      check_device(cudaEventSynchronize(stop), "the kernel");
      float ms = 0;
      check_device(cudaEventElapsedTime(&ms, start, stop), "elapsed");
      if (i >= warm_ups()) found[l].push_back(ms);
    }
  }
  for (auto& each : found) std::sort(each.begin(), each.end());
  cudaEventDestroy(start);
  cudaEventDestroy(stop);
  return found;
}

struct Errors {
  double dq = 0, dk = 0, dv = 0;
};

void worsen(double& worst, const std::vector<double>& right, const float* got) {
  double norm = 0, error = 0;
  for (int d = 0; d < shape().head_dim; ++d) {
    norm += right[d] * right[d];
    error += (got[d] - right[d]) * (got[d] - right[d]);
  }
  const double relative = std::sqrt(error / norm);
  worst = std::isnan(relative) ? INFINITY : std::max(worst, relative);
}

/// One rank holds everything. Sampled rows and keys with the lse and delta that the kernels used.
Errors sampled_errors(const Inputs& inputs, const mtraining::index::Index& index,
                      const RankRun& run, const GradientRun& gradients) {
  const int64_t n = inputs.seq_len;
  const int D = shape().head_dim, H = shape().heads, Hk = shape().kv_heads;
  const auto widen = [](const DeviceMemory& memory) {
    const auto bits = memory.read<uint16_t>();
    std::vector<float> values(bits.size());
    const bool half = shape().dtype == mtraining::kernels::DType::kFloat16;
    for (size_t i = 0; i < bits.size(); ++i)
      values[i] = half ? __half2float(__half(__half_raw{bits[i]}))
                       : __bfloat162float(__nv_bfloat16(__nv_bfloat16_raw{bits[i]}));
    return values;
  };
  const auto q = widen(inputs.q), k = widen(inputs.k), v = widen(inputs.v),
             dout = widen(inputs.dout);
  const auto lse = run.lse.read<float>(), delta = gradients.delta.read<float>();
  const auto dq = gradients.dq.read<float>(), dk = gradients.gradients[0].read<float>(),
             dv = gradients.gradients[1].read<float>();
  const double scale = 1 / std::sqrt(static_cast<double>(D));
  std::vector<std::vector<uint8_t>> diagonal(H), column(H);
  for (int h = 0; h < H; ++h) {
    diagonal[h].assign(n / 64 + 1, 0);
    column[h].assign(n, 0);
    for (const int32_t d : index.diagonals.row(h)) diagonal[h][d] = 1;
    if (index.columns.capacity > 0)
      for (const int32_t j : index.columns.row(h)) column[h][j] = 1;
  }
  const auto sees = [&](int h, int64_t i, int64_t j) {
    return j <= i && (diagonal[h][i / 64 - j / 64] != 0 || column[h][j] != 0);
  };
  /// p and its gradient's factor of one pair.
  const auto pair = [&](int h, int64_t i, int64_t j, double& p, double& ds) {
    const float *a = &q[(i * H + h) * D], *b = &dout[(i * H + h) * D],
                *c = &k[(j * Hk + h / (H / Hk)) * D], *e = &v[(j * Hk + h / (H / Hk)) * D];
    double s = 0, dp = 0;
    for (int d = 0; d < D; ++d) {
      s += double{a[d]} * c[d];
      dp += double{b[d]} * e[d];
    }
    p = std::exp(s * scale - lse[h * n + i]);
    ds = scale * p * (dp - delta[h * n + i]);
  };
  Errors worst;
  uint64_t state = 12345;
  const auto draw = [&] {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<int64_t>((state >> 33) % n);
  };
  for (int sample = 0; sample < 12; ++sample) {
    const int h = sample % H;
    const int64_t i = draw();
    std::vector<double> right(D, 0);
    for (int64_t j = 0; j <= i; ++j) {
      if (!sees(h, i, j)) continue;
      double p, ds;
      pair(h, i, j, p, ds);
      for (int d = 0; d < D; ++d) right[d] += ds * k[(j * Hk + h / (H / Hk)) * D + d];
    }
    worsen(worst.dq, right, &dq[(i * H + h) * D]);
  }
  for (int sample = 0; sample < 4; ++sample) {
    const int g = sample % Hk;
    int64_t j = draw();
    while (sample >= 2 && column[g * (H / Hk)][j] == 0 && index.columns.capacity > 0)
      j = (j + 1) % n;
    std::vector<double> right_k(D, 0), right_v(D, 0);
    for (int h = g * (H / Hk); h < (g + 1) * (H / Hk); ++h) {
      for (int64_t i = j; i < n; ++i) {
        if (!sees(h, i, j)) continue;
        double p, ds;
        pair(h, i, j, p, ds);
        for (int d = 0; d < D; ++d) {
          right_k[d] += ds * q[(i * H + h) * D + d];
          right_v[d] += p * dout[(i * H + h) * D + d];
        }
      }
    }
    worsen(worst.dk, right_k, &dk[(j * Hk + g) * D]);
    worsen(worst.dv, right_v, &dv[(j * Hk + g) * D]);
  }
  return worst;
}

void measure(const Prepared& made, const std::string& name, bool both, bool check) {
  std::vector<std::unique_ptr<GradientRun>> runs;
  for (const auto& run : made.runs) runs.push_back(prepare_gradients(*made.inputs, *run));
  const auto delta = times({[&] {
    for (size_t r = 0; r < runs.size(); ++r)
      mtraining::kernels::sm90::delta(
          runs[r]->params,
          {const_of(made.runs[r]->params.rounded), const_of(made.runs[r]->params.residual)},
          runs[r]->delta.get());
  }})[0];
  const auto forward = times({[&] {
    for (const auto& run : made.runs) mtraining::kernels::sm90::forward(run->params);
  }})[0];
  int64_t gradient_bytes = 0;
  for (const auto& run : runs) {
    gradient_bytes += run->dq.bytes() + run->delta.bytes();
    for (const DeviceMemory& memory : run->gradients) gradient_bytes += memory.bytes();
  }
  std::vector<Launch> launches;
  for (const bool deterministic : {false, true}) {
    if (deterministic && !both) continue;
    launches.push_back([&runs, deterministic] {
      for (const auto& run : runs) {
        run->params.deterministic = deterministic;
        mtraining::kernels::sm90::backward(run->params);
      }
    });
  }
  const auto all_ms = times(launches);
  for (size_t mode = 0; mode < launches.size(); ++mode) {
    const bool deterministic = mode == 1;
    const Launch& launch = launches[mode];
    const std::vector<double>& ms = all_ms[mode];
    runs[0]->params.deterministic = deterministic;
    std::vector<double> calls;
    for (int i = 0; i < timed_runs(); ++i) {
      const auto before = std::chrono::steady_clock::now();
      mtraining::kernels::sm90::backward(runs[0]->params);
      calls.push_back(
          std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - before)
              .count());
    }
    check_device(cudaDeviceSynchronize(), "the kernel");
    std::string errors = "\"dq_error\": null, \"dk_error\": null, \"dv_error\": null";
    if (check && made.runs[0]->sources.size() == 1) {
      for (const auto& run : runs) clear(*run);
      launch();
      const Errors found = sampled_errors(*made.inputs, made.index, *made.runs[0], *runs[0]);
      char text[128];
      std::snprintf(text, sizeof text, "\"dq_error\": %.2e, \"dk_error\": %.2e, \"dv_error\": %.2e",
                    found.dq, found.dk, found.dv);
      errors = text;
    }
    std::printf(
        "{\"bench\": \"sm90_backward\", \"pattern\": \"%s\", \"case\": \"%s\", \"dtype\": \"%s\", "
        "\"heads\": %d, \"kv_heads\": %d, \"head_dim\": %d, \"deterministic\": %s, "
        "\"seq_len\": %ld, \"pairs\": %ld, \"ms\": %.3f, \"min_ms\": %.3f, \"max_ms\": %.3f, "
        "\"tflops\": %.1f, \"delta_ms\": %.3f, \"host_us\": %.1f, \"workspace_bytes\": %ld, "
        "\"gradient_bytes\": %ld, "
        "\"forward_ms\": %.3f, %s}\n",
        made.pattern.name.c_str(), name.c_str(),
        shape().dtype == mtraining::kernels::DType::kFloat16 ? "fp16" : "bf16", shape().heads,
        shape().kv_heads, shape().head_dim, deterministic ? "true" : "false",
        static_cast<long>(made.inputs->seq_len), static_cast<long>(made.pairs), ms[ms.size() / 2],
        ms.front(), ms.back(),
        10.0 * shape().head_dim * static_cast<double>(made.pairs) / ms[ms.size() / 2] / 1e9,
        delta[delta.size() / 2], median(calls), static_cast<long>(runs[0]->bytes[mode]),
        static_cast<long>(gradient_bytes), forward[forward.size() / 2], errors.c_str());
    std::fflush(stdout);
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    Pattern pattern;
    for (int a = 1; a < argc; ++a) {
      if (take_option(argc, argv, a)) continue;
      std::string name = argv[a];
      if (name.size() > 5 && name.ends_with(".json")) {
        pattern = read_pattern(name);
        continue;
      }
      bool both = false, check = true;
      for (; name.ends_with('+') || name.ends_with('!'); name.pop_back())
        (name.back() == '+' ? both : check) = name.back() == '+';
      const Prepared made = prepare_case(pattern, name);
      measure(made, name, both, check && (name == "one" || name == "csr"));
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "sm90_backward: error: %s\n", error.what());
    return 1;
  }
  return 0;
}
