// Attention problems for the benches of the Hopper kernels: fixed patterns, inputs, everything that one rank's launch needs.
//
// In:   PATTERN.json: {"name", "seq_len", "heads": [{"offset_ranges": [[lo, hi), ...], "columns": [...]}, ...]}; a layout.
// Out:  device memory and ForwardParams of one rank; its pairs. Next: sm90_forward.cu, sm90_backward.cu.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cmath>
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

namespace mtraining::bench::sm90 {

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
static __global__ void fill(__nv_bfloat16* out, int64_t count, uint32_t seed, float scale) {
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
static __global__ void take(const __nv_bfloat16* in, const int64_t* rows, int64_t count,
                            int64_t width, __nv_bfloat16* out) {
  for (int64_t r = blockIdx.x; r < count; r += gridDim.x)
    for (int64_t d = threadIdx.x; d < width; d += blockDim.x)
      out[r * width + d] = rows[r] < 0 ? __float2bfloat16(0) : in[rows[r] * width + d];
}

struct Pattern {
  std::string name;
  int64_t seq_len = 0;
  std::vector<std::vector<int32_t>> diagonals, columns;
};

inline Pattern read_pattern(const std::string& path) {
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
  DeviceMemory q, k, v, dout;  // [S, heads, D]
  int64_t seq_len = 0;
  explicit Inputs(int64_t n)
      : q(n * kHeads * kD * 2),
        k(n * kKvHeads * kD * 2),
        v(n * kKvHeads * kD * 2),
        dout(n * kHeads * kD * 2),
        seq_len(n) {
    fill<<<1024, 256>>>(q.get<__nv_bfloat16>(), n * kHeads * kD, 1, 1.0f);
    fill<<<1024, 256>>>(k.get<__nv_bfloat16>(), n * kKvHeads * kD, 2, 1.0f);
    fill<<<1024, 256>>>(v.get<__nv_bfloat16>(), n * kKvHeads * kD, 3, 1.0f);
    fill<<<1024, 256>>>(dout.get<__nv_bfloat16>(), n * kHeads * kD, 4, 1.0f);
    check_device(cudaDeviceSynchronize(), "filling");
  }
};

inline DeviceMemory take_rows(const DeviceMemory& from, const std::vector<int64_t>& rows,
                              int64_t width) {
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

inline ColumnLists keep_columns(RankRun& run, const ColumnLists& host, int64_t rows) {
  const int64_t n = rows * host.capacity;
  return {keep(run, std::vector<int32_t>(host.key_rows, host.key_rows + n)),
          keep(run, std::vector<int32_t>(host.positions, host.positions + n)),
          keep(run, std::vector<int32_t>(host.counts, host.counts + rows)), host.capacity};
}

inline std::unique_ptr<RankRun> prepare(const Inputs& inputs, const mtraining::index::Index& index,
                                        const mtraining::layout::Layout& layout, int rank,
                                        bool csr) {
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
    if (csr) {
      const auto by_key = mtraining::index::transpose(blocks, layout.tokens_per_rank() / 64);
      source.blocks.key_row_begin = keep(*run, by_key.row_begin);
      source.blocks.query_blocks = keep(*run, by_key.key_blocks);
    }
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

/// The case's index, layout and ranks: see the benches for their names.
struct Prepared {
  Pattern pattern;
  std::unique_ptr<Inputs> inputs;
  mtraining::index::Index index;
  std::vector<std::unique_ptr<RankRun>> runs;
  int64_t pairs = 0;
  bool dense = false;
};

inline Prepared prepare_case(const Pattern& pattern, const std::string& name) {
  Prepared made;
  made.pattern = pattern;
  made.dense = name.rfind("dense:", 0) == 0;
  const int64_t seq_len = made.dense ? std::atoll(name.c_str() + 6) : pattern.seq_len;
  const bool ranks = name.rfind("rank8", 0) == 0 || name == "shards8";
  std::vector<std::vector<int32_t>> no_columns(kHeads);
  made.index = made.dense ? mtraining::index::dense_index(1, kHeads, seq_len)
                          : mtraining::index::make_index(
                                1, kHeads, seq_len, pattern.diagonals,
                                name == "no_columns" ? no_columns : pattern.columns);
  using mtraining::layout::LayoutKind;
  const mtraining::layout::Layout layout(
      {.kind = ranks ? LayoutKind::kBlockStriped : LayoutKind::kContiguous,
       .seq_len = seq_len,
       .cp_size = ranks ? 8 : 1,
       .stripe = name == "rank8_64" ? 64 : 128,
       .nodes = 1});
  made.inputs = std::make_unique<Inputs>(seq_len);
  for (int r = 0; r < (name == "shards8" ? 8 : 1); ++r) {
    made.runs.push_back(prepare(*made.inputs, made.index, layout, r, name == "csr"));
    made.pairs += made.runs.back()->pairs;
  }
  if (made.dense) {  // as the peers count it
    made.pairs = int64_t{kHeads} * seq_len * seq_len / 2;
    made.pattern.name = "dense";
  }
  return made;
}

}  // namespace mtraining::bench::sm90
