// Speed of the CPU kernels (kernels/ref) on one rank: a JSON line a density, and one for the
// estimation passes.
//
//   ref_attention_bench [--seq-len 16384] [--heads 4] [--kv-heads 2] [--head-dim 64]
//                       [--dtype float32] [--threads 2] [--repeat 3] [--density 0.05 ...]
//
// Half of a density is block diagonals (0, 1 and others spread evenly), half single columns (spread
// evenly); 1 is dense. pairs as index/ counts them; flops 4 D a pair forward and 10 D backward.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <map>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "mtraining/base/parallel.h"
#include "mtraining/base/rng.h"
#include "mtraining/index/index.h"
#include "mtraining/index/step_index.h"
#include "mtraining/kernels/attention_kernels.h"
#include "mtraining/kernels/window.h"
#include "mtraining/layout/layout.h"
#include "mtraining/testing/rounding.h"

namespace mtraining {
namespace {

struct Options {
  int64_t seq_len = 16384, heads = 4, kv_heads = 2, head_dim = 64;
  std::string dtype = "float32";
  int threads = 2, repeat = 3;
  std::vector<double> densities = {0.02, 0.05, 0.1, 0.3, 1.0};
};

const std::map<std::string, kernels::DType> kDTypes = {{"float64", kernels::DType::kFloat64},
                                                       {"float32", kernels::DType::kFloat32},
                                                       {"bf16", kernels::DType::kBFloat16},
                                                       {"fp16", kernels::DType::kFloat16}};

/// Processor time of all threads: what counts on a machine that others use too.
double processor_ms() {
  timespec t;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) * 1e3 + static_cast<double>(t.tv_nsec) * 1e-6;
}

struct Timing {
  double ms = 1e30, cpu_ms = 1e30;
};

template <typename Fn>
Timing best_ms(int repeat, const Fn& fn) {
  Timing best;
  for (int i = 0; i < repeat; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    const double cpu = processor_ms();
    fn();
    best.cpu_ms = std::min(best.cpu_ms, processor_ms() - cpu);
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - begin;
    best.ms = std::min(best.ms, took.count());
  }
  return best;
}

/// Memory as tensors have it: 64-byte aligned.
class Buffer {
 public:
  explicit Buffer(int64_t bytes) : data_(new (kAlignment) uint8_t[static_cast<size_t>(bytes)]()) {}
  uint8_t* data() const { return data_.get(); }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(uint8_t* p) const { ::operator delete[](p, kAlignment); }
  };
  std::unique_ptr<uint8_t[], Free> data_;
};

Buffer random_tensor(kernels::DType dtype, int64_t count, uint64_t seed) {
  using testing::Precision;
  const Rng rng(seed);
  std::vector<double> values(count);
  for (int64_t i = 0; i < count; ++i) values[i] = rng.normal(i);
  const std::map<kernels::DType, Precision> precisions = {
      {kernels::DType::kFloat64, Precision::kFloat64},
      {kernels::DType::kFloat32, Precision::kFloat32},
      {kernels::DType::kBFloat16, Precision::kBFloat16},
      {kernels::DType::kFloat16, Precision::kFloat16}};
  const std::vector<uint8_t> packed = testing::pack(precisions.at(dtype), values);
  Buffer buffer(static_cast<int64_t>(packed.size()));
  std::copy(packed.begin(), packed.end(), buffer.data());
  return buffer;
}

index::Index make_pattern(const Options& o, double density) {
  if (density >= 1) return index::dense_index(1, static_cast<int>(o.heads), o.seq_len);
  const int64_t num_blocks = (o.seq_len + 63) / 64;
  const auto build = [&](int64_t diagonals, int64_t columns) {
    std::vector<int32_t> diagonal_list, column_list;
    for (int64_t i = 0; i < diagonals; ++i) {
      const int64_t spread = (i - 1) * num_blocks / std::max<int64_t>(1, diagonals - 1) + 1;
      diagonal_list.push_back(static_cast<int32_t>(i < 2 ? i : spread));
    }
    for (int64_t i = 0; i < columns; ++i) {
      column_list.push_back(static_cast<int32_t>(i * o.seq_len / columns));
    }
    return index::make_index(1, static_cast<int>(o.heads), o.seq_len,
                             std::vector<std::vector<int32_t>>(o.heads, diagonal_list),
                             std::vector<std::vector<int32_t>>(o.heads, column_list));
  };
  int64_t diagonals = 1, columns = 0;
  while (index::density(build(diagonals + 1, 0)) <= density / 2 + 1.0 / 512) ++diagonals;
  const int64_t step = std::max<int64_t>(1, o.seq_len / 1024);
  while (index::density(build(diagonals, columns + step)) <= density) columns += step;
  return build(diagonals, columns);
}

void bench(const Options& o) {
  const kernels::DType dtype = kDTypes.at(o.dtype);
  const int64_t n = o.seq_len, q_size = n * o.heads * o.head_dim,
                k_size = n * o.kv_heads * o.head_dim;
  const int64_t state_bytes = kernels::size_of(kernels::state_dtype(dtype));
  const auto q = random_tensor(dtype, q_size, 1), k = random_tensor(dtype, k_size, 2);
  const auto v = random_tensor(dtype, k_size, 3), dout = random_tensor(dtype, q_size, 4);
  const Buffer out(q_size * state_bytes), dq(q_size * state_bytes), dk(k_size * state_bytes);
  const Buffer dv(k_size * state_bytes), lse(o.heads * n * state_bytes);
  const Buffer delta(o.heads * n * state_bytes);
  const layout::Layout layout({.kind = layout::LayoutKind::kContiguous, .seq_len = n});
  const std::vector<int32_t> starts = layout.block_starts(0);
  const int64_t q_row = o.heads * o.head_dim, k_row = o.kv_heads * o.head_dim;

  for (const double density : o.densities) {
    const index::Index pattern = make_pattern(o, density);
    const index::StepBlocks blocks = index::step_blocks(pattern, layout, 0, 0);
    const index::StepColumns columns = index::step_columns(pattern, layout, 0);
    const index::DiagonalBitmap bitmap = index::diagonal_bitmap(pattern);
    kernels::KeySource source;
    source.k = {k.data(), n * k_row, k_row, o.head_dim};
    source.v = {v.data(), n * k_row, k_row, o.head_dim};
    source.num_keys = n;
    source.block_starts = starts.data();
    source.blocks = blocks.view();
    source.columns = columns.view();
    source.dk = {dk.data(), n * k_row, k_row, o.head_dim};
    source.dv = {dv.data(), n * k_row, k_row, o.head_dim};
    const auto fill = [&](kernels::AttentionParams& p) {
      p.batch = 1;
      p.num_q_heads = o.heads;
      p.num_kv_heads = o.kv_heads;
      p.head_dim = o.head_dim;
      p.num_queries = n;
      p.dtype = dtype;
      p.softmax_scale = 1 / std::sqrt(static_cast<double>(o.head_dim));
      p.seq_len = n;
      p.q = {q.data(), n * q_row, q_row, o.head_dim};
      p.q_block_starts = starts.data();
      p.sources = &source;
      p.num_sources = 1;
      p.diagonal_bits = bitmap.bits.data();
      p.diagonal_words = bitmap.words;
    };
    kernels::ForwardParams f;
    fill(f);
    f.out = {out.data(), n * q_row, q_row, o.head_dim};
    f.lse = lse.data();
    kernels::BackwardParams b;
    fill(b);
    b.dout = {dout.data(), n * q_row, q_row, o.head_dim};
    b.lse = lse.data();
    b.delta = delta.data();
    b.dq = {dq.data(), n * q_row, q_row, o.head_dim};
    const Timing fwd = best_ms(o.repeat, [&] { kernels::ref::forward(f); });
    const Timing bwd = best_ms(o.repeat, [&] {
      kernels::ref::delta(b, {out.data(), n * q_row, q_row, o.head_dim}, delta.data());
      kernels::ref::backward(b);
    });
    double pairs = 0;
    for (int h = 0; h < o.heads; ++h)
      pairs += static_cast<double>(index::computed_pairs(pattern, 0, h));
    const double flops = 4.0 * static_cast<double>(o.head_dim) * pairs;
    std::printf(
        "{\"case\": \"ref attention\", \"dtype\": \"%s\", \"seq_len\": %lld, \"heads\": "
        "\"%lld/%lld\", "
        "\"head_dim\": %lld, \"threads\": %d, \"density\": %.4f, \"pairs\": %.0f, \"fwd_ms\": "
        "%.2f, "
        "\"bwd_ms\": %.2f, \"fwd_cpu_ms\": %.2f, \"bwd_cpu_ms\": %.2f, \"fwd_gflops\": %.1f, "
        "\"bwd_gflops\": %.1f}\n",
        o.dtype.c_str(), static_cast<long long>(n), static_cast<long long>(o.heads),
        static_cast<long long>(o.kv_heads), static_cast<long long>(o.head_dim), o.threads,
        index::density(pattern), pairs, fwd.ms, bwd.ms, fwd.cpu_ms, bwd.cpu_ms,
        flops / fwd.ms * 1e-6, 2.5 * flops / bwd.ms * 1e-6);
    std::fflush(stdout);
  }

  const int64_t rows = std::min<int64_t>(64, n);
  std::vector<int32_t> row_positions(rows);
  for (int64_t r = 0; r < rows; ++r) row_positions[r] = static_cast<int32_t>(n - rows + r);
  std::vector<float> row_max(o.heads * rows);
  std::vector<int64_t> row_sum(o.heads * rows), column_mass(o.heads * n),
      diagonal_mass(o.heads * ((n + 63) / 64 + 1));
  kernels::WindowParams w;
  w.batch = 1;
  w.num_q_heads = o.heads;
  w.num_kv_heads = o.kv_heads;
  w.head_dim = o.head_dim;
  w.dtype = dtype;
  w.softmax_scale = 1 / std::sqrt(static_cast<double>(o.head_dim));
  w.num_rows = rows;
  w.q = {q.data() + (n - rows) * q_row * kernels::size_of(dtype), rows * q_row, q_row, o.head_dim};
  w.row_positions = row_positions.data();
  w.k = {k.data(), n * k_row, k_row, o.head_dim};
  w.num_keys = n;
  w.k_block_starts = starts.data();
  w.seq_len = n;
  const Timing max = best_ms(o.repeat, [&] { kernels::ref::window_row_max(w, row_max.data()); });
  const Timing sum = best_ms(o.repeat, [&] {
    std::fill(row_sum.begin(), row_sum.end(), 0);
    kernels::ref::window_row_sum(w, row_max.data(), row_sum.data());
  });
  const Timing mass = best_ms(o.repeat, [&] {
    kernels::ref::window_masses(w, row_max.data(), row_sum.data(),
                                {column_mass.data(), diagonal_mass.data(), nullptr});
  });
  std::printf(
      "{\"case\": \"ref window\", \"dtype\": \"%s\", \"seq_len\": %lld, \"heads\": \"%lld/%lld\", "
      "\"head_dim\": %lld, "
      "\"threads\": %d, \"rows\": %lld, \"max_ms\": %.2f, \"sum_ms\": %.2f, \"mass_ms\": %.2f}\n",
      o.dtype.c_str(), static_cast<long long>(n), static_cast<long long>(o.heads),
      static_cast<long long>(o.kv_heads), static_cast<long long>(o.head_dim), o.threads,
      static_cast<long long>(rows), max.ms, sum.ms, mass.ms);
}

}  // namespace
}  // namespace mtraining

int main(int argc, char** argv) {
  mtraining::Options options;
  CLI::App app("Speed of the CPU attention kernels, one JSON line a case.");
  app.add_option("--seq-len", options.seq_len)->check(CLI::PositiveNumber);
  app.add_option("--heads", options.heads)->check(CLI::PositiveNumber);
  app.add_option("--kv-heads", options.kv_heads)->check(CLI::PositiveNumber);
  app.add_option("--head-dim", options.head_dim)->check(CLI::PositiveNumber);
  app.add_option("--dtype", options.dtype)
      ->check(CLI::IsMember({"float64", "float32", "bf16", "fp16"}));
  app.add_option("--threads", options.threads)->check(CLI::PositiveNumber);
  app.add_option("--repeat", options.repeat)->check(CLI::PositiveNumber);
  app.add_option("--density", options.densities)->check(CLI::Range(0.0, 1.0));
  CLI11_PARSE(app, argc, argv);
  try {
    mtraining::set_num_threads(options.threads);
    mtraining::bench(options);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "ref_attention: error: %s\n", error.what());
    return 1;
  }
  return 0;
}
