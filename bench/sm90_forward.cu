// Speed of the Hopper forward on a fixed vertical-slash pattern: one JSON line a case.
//
// sm90_forward PATTERN.json CASE...      CASE: one | csr | no_columns | rank8 | rank8_split | shards8 | dense:SEQ_LEN
//   one          one rank, everything in one source, columns inside it
//   csr          the same, block lists as CSR
//   no_columns   the same without columns
//   rank8        rank 0 of 8 (block_striped, stripe 128): 8 shards and the gathered columns in one launch
//   rank8_64     the same with stripe 64
//   rank8_split  rank 0 of 8, one launch a source, merged
//   shards8      all 8 ranks one after the other, each as rank8
//   dense:N      dense causal, no pattern
// PATTERN.json: {"name", "seq_len", "heads": [{"offset_ranges": [[lo, hi), ...], "columns": [...]}, ...]}.
// FLOPs are 4 * D a pair; blocks of chosen diagonals count whole, columns as their pairs outside those.
// Without CMake, from the repository's root:
//   nvcc -gencode arch=compute_90a,code=sm_90a -O3 -std=c++20 -I. -cudart static -o sm90_forward bench/sm90_forward.cu
//     mtraining/kernels/sm90/{forward,gather_columns,forward_{bf16,fp16}_d{64,128}}.cu mtraining/kernels/validate.cc
//     mtraining/index/{index,columns,step_index,step_pairs,stripes}.cc mtraining/layout/layout.cc
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "mtraining/index/columns.h"
#include "mtraining/index/index.h"
#include "mtraining/index/step_index.h"
#include "mtraining/kernels/sm90/device_memory.h"
#include "mtraining/kernels/sm90/forward.h"
#include "mtraining/layout/layout.h"

namespace {

using mtraining::kernels::BlockLists;
using mtraining::kernels::ColumnLists;
using mtraining::kernels::Entry;
using mtraining::kernels::ForwardParams;
using mtraining::kernels::KeySource;
using mtraining::kernels::sm90::check_device;
using mtraining::kernels::sm90::DeviceMemory;

constexpr int kHeads = 16, kKvHeads = 2, kD = 128;
constexpr int kWarmUp = 3, kRuns = 9;

/// Normal values from a counter, some rows louder than others so that row maxima move.
__global__ void fill(__nv_bfloat16* out, int64_t count, uint32_t seed, float scale) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    uint64_t z = (static_cast<uint64_t>(i) + 1) * 0x9e3779b97f4a7c15ull + seed;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    z ^= z >> 31;
    const float u = (static_cast<uint32_t>(z) >> 8) * 0x1p-24f + 0x1p-25f,
                angle = (z >> 40) * 0x1p-24f * 6.2831853f;
    const float loud = (i / kD) % 61 == 0 ? 2.0f : 1.0f;
    out[i] = __float2bfloat16(sqrtf(-2 * logf(u)) * cosf(angle) * scale * loud);
  }
}

/// out row r = in row rows[r], rows of `width` elements; negative: zeros.
__global__ void take(const __nv_bfloat16* in, const int64_t* rows, int64_t count, int64_t width,
                     __nv_bfloat16* out) {
  for (int64_t r = blockIdx.x; r < count; r += gridDim.x)
    for (int64_t d = threadIdx.x; d < width; d += blockDim.x)
      out[r * width + d] = rows[r] < 0 ? __float2bfloat16(0) : in[rows[r] * width + d];
}

struct Pattern {
  std::string name;
  int64_t seq_len = 0;
  std::vector<std::vector<int32_t>> diagonals, columns;
};

Pattern read_pattern(const std::string& path) {
  std::ifstream file(path);
  const auto json = nlohmann::json::parse(file);
  Pattern pattern{json["name"], json["seq_len"], {}, {}};
  for (const auto& head : json["heads"]) {
    std::vector<uint8_t> on(pattern.seq_len / 64 + 2, 0);
    for (const auto& range : head["offset_ranges"]) {
      for (int64_t o = range[0]; o < range[1].get<int64_t>(); ++o) {
        on[o / 64] = 1;
        if (o % 64 != 0) on[o / 64 + 1] = 1;
      }
    }
    std::vector<int32_t> diagonals;
    for (int64_t d = 0; d < pattern.seq_len / 64; ++d)
      if (on[d]) diagonals.push_back(static_cast<int32_t>(d));
    pattern.diagonals.push_back(diagonals);
    pattern.columns.push_back(head["columns"].get<std::vector<int32_t>>());
  }
  return pattern;
}

/// Everything that one rank's forward needs, on the device.
struct RankRun {
  DeviceMemory q, q_starts, out, lse, workspace;
  std::vector<DeviceMemory> lists;  // whatever the sources point to
  std::vector<KeySource> sources;
  ForwardParams params;
  std::vector<int64_t> positions;
  int64_t pairs = 0;
};

struct Inputs {
  DeviceMemory q, k, v;  // [S, heads, D]
  int64_t seq_len = 0;
  explicit Inputs(int64_t n)
      : q(n * kHeads * kD * 2), k(n * kKvHeads * kD * 2), v(n * kKvHeads * kD * 2), seq_len(n) {
    fill<<<1024, 256>>>(q.get<__nv_bfloat16>(), n * kHeads * kD, 1, 1.0f);
    fill<<<1024, 256>>>(k.get<__nv_bfloat16>(), n * kKvHeads * kD, 2, 1.0f);
    fill<<<1024, 256>>>(v.get<__nv_bfloat16>(), n * kKvHeads * kD, 3, 1.0f);
    check_device(cudaDeviceSynchronize(), "filling");
  }
};

DeviceMemory take_rows(const DeviceMemory& from, const std::vector<int64_t>& rows, int64_t width) {
  const DeviceMemory index(rows);
  DeviceMemory out(static_cast<int64_t>(rows.size()) * width * 2);
  take<<<2048, 128>>>(from.get<__nv_bfloat16>(), index.get<int64_t>(),
                      static_cast<int64_t>(rows.size()), width, out.get<__nv_bfloat16>());
  check_device(cudaDeviceSynchronize(), "taking rows");
  return out;
}

template <typename T>
const T* keep(RankRun& run, const std::vector<T>& values) {
  run.lists.emplace_back(values);
  return run.lists.back().template get<T>();
}

ColumnLists keep_columns(RankRun& run, const ColumnLists& host, int64_t rows) {
  const int64_t n = rows * host.capacity;
  return {keep(run, std::vector<int32_t>(host.key_rows, host.key_rows + n)),
          keep(run, std::vector<int32_t>(host.positions, host.positions + n)),
          keep(run, std::vector<int32_t>(host.counts, host.counts + rows)), host.capacity};
}

std::unique_ptr<RankRun> prepare(const Inputs& inputs, const mtraining::index::Index& index,
                                 const mtraining::layout::Layout& layout, int rank, bool csr) {
  auto run = std::make_unique<RankRun>();
  const int world = layout.cp_size();
  run->positions = layout.positions(rank);
  const int64_t n = static_cast<int64_t>(run->positions.size());
  run->q = take_rows(inputs.q, run->positions, kHeads * kD);
  run->q_starts = DeviceMemory(layout.block_starts(rank));
  const auto bitmap = mtraining::index::diagonal_bitmap(index);
  ForwardParams& p = run->params;
  p.diagonal_bits = keep(*run, bitmap.bits);
  p.diagonal_words = bitmap.words;
  for (int s = 0; s < world; ++s) {
    const auto blocks = csr ? mtraining::index::step_blocks_csr(index, layout, rank, s)
                            : mtraining::index::step_blocks(index, layout, rank, s);
    KeySource source;
    run->lists.push_back(take_rows(inputs.k, layout.positions(s), kKvHeads * kD));
    source.k = {run->lists.back().get(), 0, kKvHeads * kD, kD};
    run->lists.push_back(take_rows(inputs.v, layout.positions(s), kKvHeads * kD));
    source.v = {run->lists.back().get(), 0, kKvHeads * kD, kD};
    source.num_keys = layout.tokens_per_rank();
    source.block_starts = keep(*run, layout.block_starts(s));
    source.blocks = blocks.view();
    source.blocks.entries = keep(*run, blocks.entries);
    source.blocks.num_entries = keep(*run, blocks.num_entries);
    source.blocks.row_begin = keep(*run, blocks.row_begin);
    source.blocks.key_blocks = keep(*run, blocks.key_blocks);
    for (int h = 0; h < kHeads; ++h)
      run->pairs += mtraining::index::step_pairs(index, layout, rank, s, h, true);
    if (world == 1 && index.columns.capacity > 0) {
      const auto step = mtraining::index::step_columns(index, layout, s);
      source.columns = keep_columns(*run, step.view(), kHeads);
    }
    run->sources.push_back(source);
  }
  if (world > 1) {
    const auto plan = mtraining::index::plan_columns(index, layout, kKvHeads, int64_t{1} << 30);
    for (const auto& slice : plan.slices) {
      std::vector<int64_t> rows(world * slice.rows_per_rank, -1);  // of [S * kv heads]
      for (int r = 0; r < world; ++r)
        for (size_t i = 0; i < slice.rows[r].size(); ++i)
          rows[r * slice.rows_per_rank + static_cast<int64_t>(i)] =
              layout.position(r, slice.rows[r][i].offset) * kKvHeads + slice.rows[r][i].kv_head;
      KeySource source;
      run->lists.push_back(take_rows(inputs.k, rows, kD));
      source.k = {run->lists.back().get(), 0, kD, 0};
      run->lists.push_back(take_rows(inputs.v, rows, kD));
      source.v = {run->lists.back().get(), 0, kD, 0};
      source.num_keys = static_cast<int64_t>(rows.size());
      source.columns = keep_columns(*run, slice.view(), kHeads);
      run->sources.push_back(source);
    }
  }
  run->out = DeviceMemory(n * kHeads * kD * 4);
  run->lse = DeviceMemory(n * kHeads * 4);
  p.batch = 1;
  p.num_q_heads = kHeads;
  p.num_kv_heads = kKvHeads;
  p.head_dim = kD;
  p.num_queries = n;
  p.dtype = mtraining::kernels::DType::kBFloat16;
  p.softmax_scale = 1 / std::sqrt(double{kD});
  p.seq_len = layout.seq_len();
  p.q = {run->q.get(), 0, kHeads * kD, kD};
  p.q_block_starts = run->q_starts.get<int32_t>();
  p.sources = run->sources.data();
  p.num_sources = static_cast<int>(run->sources.size());
  p.out = {run->out.get(), n * kHeads * kD, kHeads * kD, kD};
  p.lse = run->lse.get();
  run->workspace = DeviceMemory(mtraining::kernels::sm90::forward_workspace_bytes(p));
  p.workspace = run->workspace.get();
  p.workspace_bytes = run->workspace.bytes();
  return run;
}

void launch(const RankRun& run, bool split) {
  ForwardParams p = run.params;
  if (!split) return mtraining::kernels::sm90::forward(p);
  for (size_t s = 0; s < run.sources.size(); ++s) {
    p.sources = run.sources.data() + s;
    p.num_sources = 1;
    p.first = s == 0;
    mtraining::kernels::sm90::forward(p);
  }
}

/// Largest error of sampled rows against float64, relative to the row's norm.
double sampled_error(const Inputs& inputs, const mtraining::index::Index& index,
                     const RankRun& run) {
  const int64_t n = static_cast<int64_t>(run.positions.size());
  double worst = 0;
  std::vector<__nv_bfloat16> q(kD);
  const auto k = inputs.k.read<__nv_bfloat16>(), v = inputs.v.read<__nv_bfloat16>();
  std::vector<float> out(kD);
  uint64_t state = 12345;
  for (int sample = 0; sample < 40; ++sample) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    const int64_t t = static_cast<int64_t>((state >> 33) % n);
    const int h = sample % kHeads, g = h / (kHeads / kKvHeads);
    const int64_t i = run.positions[t];
    check_device(cudaMemcpy(q.data(), run.q.get<__nv_bfloat16>() + (t * kHeads + h) * kD, kD * 2,
                            cudaMemcpyDeviceToHost),
                 "q");
    check_device(cudaMemcpy(out.data(), run.out.get<float>() + (t * kHeads + h) * kD, kD * 4,
                            cudaMemcpyDeviceToHost),
                 "out");
    std::vector<uint8_t> keys(i + 1, 0);
    for (const int32_t d : index.diagonals.row(h))
      for (int64_t j = (i / 64 - d) * 64; j < (i / 64 - d) * 64 + 64 && d <= i / 64; ++j)
        if (j <= i) keys[j] = 1;
    if (index.columns.capacity > 0)
      for (const int32_t j : index.columns.row(h))
        if (j <= i) keys[j] = 1;
    double top = -INFINITY, sum = 0;
    std::vector<double> scores(i + 1), row(kD, 0);
    for (int64_t j = 0; j <= i; ++j) {
      if (!keys[j]) continue;
      double s = 0;
      for (int d = 0; d < kD; ++d)
        s += double{__bfloat162float(q[d])} * __bfloat162float(k[(j * kKvHeads + g) * kD + d]);
      scores[j] = s / std::sqrt(double{kD});
      top = std::max(top, scores[j]);
    }
    for (int64_t j = 0; j <= i; ++j) {
      if (!keys[j]) continue;
      const double p = std::exp(scores[j] - top);
      sum += p;
      for (int d = 0; d < kD; ++d) row[d] += p * __bfloat162float(v[(j * kKvHeads + g) * kD + d]);
    }
    double norm = 0, error = 0;
    for (int d = 0; d < kD; ++d) {
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
  for (int i = 0; i < kWarmUp + kRuns; ++i) {
    check_device(cudaEventRecord(start), "record");
    for (const auto& run : runs) launch(*run, split);
    check_device(cudaEventRecord(stop), "record");
    check_device(cudaEventSynchronize(stop), "the kernel");
    float ms = 0;
    check_device(cudaEventElapsedTime(&ms, start, stop), "elapsed");
    if (i >= kWarmUp) times.push_back(ms);
  }
  std::sort(times.begin(), times.end());
  // Host time of a call while the device is behind.
  std::vector<double> calls;
  for (int i = 0; i < kRuns; ++i) {
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
      "{\"bench\": \"sm90_forward\", \"pattern\": \"%s\", \"case\": \"%s\", \"seq_len\": %ld, "
      "\"pairs\": %ld, "
      "\"ms\": %.3f, \"min_ms\": %.3f, \"max_ms\": %.3f, \"tflops\": %.1f, \"host_us\": %.1f, "
      "\"error\": %.2e}\n",
      pattern.c_str(), name.c_str(), static_cast<long>(inputs.seq_len), static_cast<long>(pairs),
      ms, times.front(), times.back(), 4.0 * kD * static_cast<double>(pairs) / ms / 1e9, host_us,
      error);
  std::fflush(stdout);
  cudaEventDestroy(start);
  cudaEventDestroy(stop);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const Pattern pattern = read_pattern(argc > 1 ? argv[1] : "");
    for (int a = 2; a < argc; ++a) {
      const std::string name = argv[a];
      const bool dense = name.rfind("dense:", 0) == 0;
      const int64_t seq_len = dense ? std::atoll(name.c_str() + 6) : pattern.seq_len;
      const bool ranks = name.rfind("rank8", 0) == 0 || name == "shards8";
      std::vector<std::vector<int32_t>> no_columns(kHeads);
      const auto index =
          dense ? mtraining::index::dense_index(1, kHeads, seq_len)
                : mtraining::index::make_index(1, kHeads, seq_len, pattern.diagonals,
                                               name == "no_columns" ? no_columns : pattern.columns);
      using mtraining::layout::LayoutKind;
      const mtraining::layout::Layout layout(
          {.kind = ranks ? LayoutKind::kBlockStriped : LayoutKind::kContiguous,
           .seq_len = seq_len,
           .cp_size = ranks ? 8 : 1,
           .stripe = name == "rank8_64" ? 64 : 128,
           .nodes = 1});
      const Inputs inputs(seq_len);
      std::vector<std::unique_ptr<RankRun>> runs;
      int64_t pairs = 0;
      for (int r = 0; r < (name == "shards8" ? 8 : 1); ++r) {
        runs.push_back(prepare(inputs, index, layout, r, name == "csr"));
        pairs += runs.back()->pairs;
      }
      if (dense) pairs = int64_t{kHeads} * seq_len * seq_len / 2;  // as the peers count it
      measure(dense ? "dense" : pattern.name, name, inputs, index, runs, name == "rank8_split",
              pairs);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "sm90_forward: error: %s\n", error.what());
    return 1;
  }
  return 0;
}
