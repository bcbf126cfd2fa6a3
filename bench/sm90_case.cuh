// Attention problems for the benches of the Hopper kernels: fixed patterns, inputs, everything that one rank's launch needs.
//
// In:   PATTERN.json: {"name", "seq_len", "heads": [{"offset_ranges": [[lo, hi), ...], "columns": [...]}, ...]}; a layout.
// Out:  device memory and ForwardParams of one rank; its pairs. Next: sm90_forward.cu, sm90_backward.cu.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <stdexcept>
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
using mtraining::kernels::const_of;
using mtraining::kernels::Entry;
using mtraining::kernels::ForwardParams;
using mtraining::kernels::KeySource;
using mtraining::kernels::View;
using mtraining::kernels::sm90::check_device;
using mtraining::kernels::sm90::DeviceMemory;

/// What the program measures: set before the first case.
struct Shape {
  int heads = 16, kv_heads = 2, head_dim = 128;
  mtraining::kernels::DType dtype = mtraining::kernels::DType::kBFloat16;
};
inline Shape program_shape;
inline Shape& shape() { return program_shape; }

/// Untimed and timed launches of a case.
inline int program_runs = 9;
inline int warm_ups() { return program_runs < 9 ? 1 : 3; }
inline int timed_runs() { return program_runs; }

/// Takes --heads Q/KV, --head-dim D, --dtype bf16 or fp16, --runs N off the arguments, argv[a] and the value behind it. False: argv[a]
/// is no option.
inline bool take_option(int argc, char** argv, int& a) {
  const std::string name = argv[a];
  if (name.rfind("--", 0) != 0 || a + 1 == argc) return false;
  const std::string value = argv[++a];
  if (name == "--heads") {
    shape().heads = std::stoi(value);
    shape().kv_heads = std::stoi(value.substr(value.find('/') + 1));
  } else if (name == "--head-dim") {
    shape().head_dim = std::stoi(value);
  } else if (name == "--runs") {
    program_runs = std::max(1, std::stoi(value));
  } else if (name == "--dtype" && (value == "fp16" || value == "bf16")) {
    shape().dtype = value == "fp16" ? mtraining::kernels::DType::kFloat16
                                    : mtraining::kernels::DType::kBFloat16;
  } else {
    throw std::invalid_argument(name + " " + value);
  }
  return true;
}

/// Elements of the program's dtype on the device as floats.
inline std::vector<float> read_floats(const void* device, int64_t count) {
  std::vector<uint16_t> bits(count);
  check_device(cudaMemcpy(bits.data(), device, count * 2, cudaMemcpyDeviceToHost), "reading");
  std::vector<float> values(count);
  for (int64_t i = 0; i < count; ++i) {
    values[i] = shape().dtype == mtraining::kernels::DType::kFloat16
                    ? __half2float(__half(__half_raw{bits[i]}))
                    : __bfloat162float(__nv_bfloat16(__nv_bfloat16_raw{bits[i]}));
  }
  return values;
}

/// Normal values from a counter, some rows louder than others so that row maxima move.
template <typename Element>
__global__ void fill(Element* out, int64_t count, int head_dim, uint32_t seed) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    uint64_t z = (static_cast<uint64_t>(i) + 1) * 0x9e3779b97f4a7c15ull + seed;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    z ^= z >> 31;
    const float u = (static_cast<uint32_t>(z) >> 8) * 0x1p-24f + 0x1p-25f,
                angle = (z >> 40) * 0x1p-24f * 6.2831853f;
    const float loud = (i / head_dim) % 61 == 0 ? 2.0f : 1.0f;
    out[i] = Element(sqrtf(-2 * logf(u)) * cosf(angle) * loud);
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
  DeviceMemory q, q_starts, out, rounded, residual, lse, workspace;
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
      : q(n * shape().heads * shape().head_dim * 2),
        k(n * shape().kv_heads * shape().head_dim * 2),
        v(n * shape().kv_heads * shape().head_dim * 2),
        dout(n * shape().heads * shape().head_dim * 2),
        seq_len(n) {
    uint32_t seed = 0;
    for (const DeviceMemory* memory : {&q, &k, &v, &dout}) {
      const int64_t count = memory->bytes() / 2;
      ++seed;
      if (shape().dtype == mtraining::kernels::DType::kFloat16) {
        fill<<<1024, 256>>>(memory->get<__half>(), count, shape().head_dim, seed);
      } else {
        fill<<<1024, 256>>>(memory->get<__nv_bfloat16>(), count, shape().head_dim, seed);
      }
    }
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
  run->q = take_rows(inputs.q, run->positions, shape().heads * shape().head_dim);
  run->q_starts = DeviceMemory(layout.block_starts(rank));
  const auto bitmap = mtraining::index::diagonal_bitmap(index);
  ForwardParams& p = run->params;
  p.diagonal_bits = keep(*run, bitmap.bits);
  p.diagonal_words = bitmap.words;
  for (int s = 0; s < world; ++s) {
    const auto blocks = csr ? mtraining::index::step_blocks_csr(index, layout, rank, s)
                            : mtraining::index::step_blocks(index, layout, rank, s);
    KeySource source;
    run->lists.push_back(
        take_rows(inputs.k, layout.positions(s), shape().kv_heads * shape().head_dim));
    source.k = {run->lists.back().get(), 0, shape().kv_heads * shape().head_dim, shape().head_dim};
    run->lists.push_back(
        take_rows(inputs.v, layout.positions(s), shape().kv_heads * shape().head_dim));
    source.v = {run->lists.back().get(), 0, shape().kv_heads * shape().head_dim, shape().head_dim};
    source.num_keys = layout.tokens_per_rank();
    source.block_starts = keep(*run, layout.block_starts(s));
    source.blocks = blocks.view();
    source.blocks.entries = keep(*run, blocks.entries);
    source.blocks.num_entries = keep(*run, blocks.num_entries);
    source.blocks.row_begin = keep(*run, blocks.row_begin);
    source.blocks.key_blocks = keep(*run, blocks.key_blocks);
    if (blocks.kind == mtraining::kernels::BlockListKind::kCsr) {
      const auto by_key = mtraining::index::transpose(blocks, layout.tokens_per_rank() / 64);
      source.blocks.key_row_begin = keep(*run, by_key.row_begin);
      source.blocks.query_blocks = keep(*run, by_key.key_blocks);
    }
    for (int h = 0; h < shape().heads; ++h)
      run->pairs += mtraining::index::step_pairs(index, layout, rank, s, h, true);
    if (world == 1 && index.columns.capacity > 0) {
      const auto step = mtraining::index::step_columns(index, layout, s);
      source.columns = keep_columns(*run, step.view(), shape().heads);
    }
    run->sources.push_back(source);
  }
  if (world > 1) {
    const auto plan =
        mtraining::index::plan_columns(index, layout, shape().kv_heads, int64_t{1} << 30);
    for (const auto& slice : plan.slices) {
      std::vector<int64_t> rows(world * slice.rows_per_rank, -1);  // of [S * kv heads]
      for (int r = 0; r < world; ++r)
        for (size_t i = 0; i < slice.rows[r].size(); ++i)
          rows[r * slice.rows_per_rank + static_cast<int64_t>(i)] =
              layout.position(r, slice.rows[r][i].offset) * shape().kv_heads +
              slice.rows[r][i].kv_head;
      KeySource source;
      run->lists.push_back(take_rows(inputs.k, rows, shape().head_dim));
      source.k = {run->lists.back().get(), 0, shape().head_dim, 0};
      run->lists.push_back(take_rows(inputs.v, rows, shape().head_dim));
      source.v = {run->lists.back().get(), 0, shape().head_dim, 0};
      source.num_keys = static_cast<int64_t>(rows.size());
      source.columns = keep_columns(*run, slice.view(), shape().heads);
      run->sources.push_back(source);
    }
  }
  const int64_t width = shape().heads * shape().head_dim;
  run->rounded = DeviceMemory(n * width * 2);
  run->residual = DeviceMemory(n * width * 2);
  run->lse = DeviceMemory(n * shape().heads * 4);
  p.batch = 1;
  p.num_q_heads = shape().heads;
  p.num_kv_heads = shape().kv_heads;
  p.head_dim = shape().head_dim;
  p.num_queries = n;
  p.dtype = shape().dtype;
  p.softmax_scale = 1 / std::sqrt(static_cast<double>(shape().head_dim));
  p.seq_len = layout.seq_len();
  p.q = {run->q.get(), 0, shape().heads * shape().head_dim, shape().head_dim};
  p.q_block_starts = run->q_starts.get<int32_t>();
  p.sources = run->sources.data();
  p.num_sources = static_cast<int>(run->sources.size());
  p.rounded = {run->rounded.get(), n * width, width, shape().head_dim};
  p.residual = {run->residual.get(), n * width, width, shape().head_dim};
  run->out = DeviceMemory(n * width * 4);
  p.out = {run->out.get(), n * width, width, shape().head_dim};
  p.lse = run->lse.get();
  run->workspace = DeviceMemory(mtraining::kernels::sm90::forward_workspace_bytes(p));
  p.workspace = run->workspace.get();
  p.workspace_bytes = run->workspace.bytes();
  return run;
}

/// Block form of a causal mask of 128 x 128 blocks: each row of blocks has the same share of those before it, at random, and its own.
inline mtraining::index::Index uniform_index(int64_t seq_len, double density) {
  mtraining::index::BlockRows blocks;
  blocks.row_begin.push_back(0);
  uint64_t state = 1;
  const int64_t num_blocks = seq_len / 128;
  for (int h = 0; h < shape().heads; ++h) {
    for (int64_t i = 0; i < num_blocks; ++i) {
      std::vector<int32_t> before(i);
      std::iota(before.begin(), before.end(), 0);
      const auto count = static_cast<int64_t>(density * static_cast<double>(i + 1) + .5) - 1;
      for (int64_t n = 0; n < count; ++n) {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        std::swap(before[n], before[n + static_cast<int64_t>((state >> 33) % (i - n))]);
      }
      before.resize(std::max<int64_t>(count, 0));
      std::sort(before.begin(), before.end());
      for (int inside = 0; inside < 2; ++inside) {
        for (const int32_t j : before) {
          blocks.key_blocks.push_back(2 * j);
          blocks.key_blocks.push_back(2 * j + 1);
        }
        for (int k = 0; k <= inside; ++k)
          blocks.key_blocks.push_back(static_cast<int32_t>(2 * i + k));
        blocks.row_begin.push_back(static_cast<int64_t>(blocks.key_blocks.size()));
      }
    }
  }
  return mtraining::index::make_block_index(1, shape().heads, seq_len, std::move(blocks));
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
  const bool uniform =
      name.rfind("uniform:", 0) == 0;  // uniform:SEQ_LEN or uniform:SEQ_LEN:DENSITY
  const double density = uniform && name.find(':', 8) != std::string::npos
                             ? std::stod(name.substr(name.find(':', 8) + 1))
                             : .1;
  const int64_t seq_len = made.dense ? std::atoll(name.c_str() + 6)
                          : uniform  ? std::atoll(name.c_str() + 8)
                                     : pattern.seq_len;
  const bool ranks = name.rfind("rank8", 0) == 0 || name == "shards8";
  std::vector<std::vector<int32_t>> diagonals, columns, no_columns(shape().heads);
  for (int h = 0; h < shape().heads && !pattern.diagonals.empty(); ++h) {  // more heads: again
    diagonals.push_back(pattern.diagonals[h % pattern.diagonals.size()]);
    columns.push_back(pattern.columns[h % pattern.columns.size()]);
  }
  made.index =
      made.dense ? mtraining::index::dense_index(1, shape().heads, seq_len)
      : uniform  ? uniform_index(seq_len, density)
                 : mtraining::index::make_index(1, shape().heads, seq_len, diagonals,
                                               name.ends_with("no_columns") ? no_columns : columns);
  using mtraining::layout::LayoutKind;
  const mtraining::layout::Layout layout(
      {.kind = ranks ? LayoutKind::kBlockStriped : LayoutKind::kContiguous,
       .seq_len = seq_len,
       .cp_size = ranks ? 8 : 1,
       .stripe = name == "rank8_64" ? 64 : 128,
       .nodes = 1});
  made.inputs = std::make_unique<Inputs>(seq_len);
  for (int r = 0; r < (name == "shards8" ? 8 : 1); ++r) {
    made.runs.push_back(prepare(*made.inputs, made.index, layout, r, name.ends_with("csr")));
    made.pairs += made.runs.back()->pairs;
  }
  if (made.dense) {  // as the peers count it
    made.pairs = int64_t{shape().heads} * seq_len * seq_len / 2;
    made.pattern.name = "dense";
  } else if (uniform) {
    made.pattern.name = "uniform";
  }
  return made;
}

}  // namespace mtraining::bench::sm90
