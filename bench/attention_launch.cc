#include "bench/attention_launch.h"

#include <algorithm>
#include <cstring>

#include "mtraining/base/check.h"
#include "mtraining/base/parallel.h"
#include "mtraining/comm/loopback.h"
#include "mtraining/index/step_index.h"
#include "mtraining/index/step_pairs.h"
#include "mtraining/kernels/attention_kernels.h"
#include "mtraining/kernels/ref/rounding.h"

namespace mtraining::bench {
namespace {

kernels::ConstView rows_of(const AlignedBytes& bytes, int64_t tokens, int64_t heads, int64_t dim) {
  return {bytes.data(), tokens * heads * dim, heads * dim, dim};
}
kernels::View writable(const AlignedBytes& bytes, int64_t tokens, int64_t heads, int64_t dim) {
  return {bytes.data(), tokens * heads * dim, heads * dim, dim};
}

/// The rows of `whole` [S, row] that a rank holds; padding rows are zero.
AlignedBytes shard_of(const AlignedBytes& whole, const layout::Layout& layout, int cp_rank,
                      int64_t row_bytes) {
  AlignedBytes shard(layout.tokens_per_rank() * row_bytes);
  const std::vector<int64_t> positions = layout.positions(cp_rank);
  for (size_t i = 0; i < positions.size(); ++i) {
    if (positions[i] >= layout.seq_len()) continue;
    std::memcpy(shard.data() + static_cast<int64_t>(i) * row_bytes,
                whole.data() + positions[i] * row_bytes, static_cast<size_t>(row_bytes));
  }
  return shard;
}

pattern::LocalAttention local_attention(const AttentionSizes& sizes, const layout::Layout& layout,
                                        const AlignedBytes& q, const AlignedBytes& k) {
  const int64_t n = layout.tokens_per_rank();
  pattern::LocalAttention local;
  local.layout = &layout;
  local.batch = 1;
  local.num_q_heads = sizes.num_q_heads;
  local.num_kv_heads = sizes.num_kv_heads;
  local.head_dim = sizes.head_dim;
  local.dtype = sizes.dtype;
  local.softmax_scale = scale_of(sizes);
  local.q = rows_of(q, n, sizes.num_q_heads, sizes.head_dim);
  local.k = rows_of(k, n, sizes.num_kv_heads, sizes.head_dim);
  return local;
}

/// What one source shard needs beside its tensors.
struct Source {
  AlignedBytes k, v, dk, dv;
  std::vector<int32_t> starts;
  index::StepBlocks blocks;
  index::StepColumns columns;
};

class CpuLaunch : public AttentionLaunch {
 public:
  CpuLaunch(const LaunchPlace& place, const AttentionSizes& sizes, const AttentionInputs& inputs,
            const index::Index& index)
      : place_(place),
        sizes_(sizes),
        index_(index),
        layout_({.kind = place.layout,
                 .seq_len = sizes.seq_len,
                 .cp_size = place.cp_size,
                 .stripe = place.stripe}) {
    const int64_t element = kernels::size_of(sizes.dtype), n = layout_.tokens_per_rank();
    const int64_t state = kernels::size_of(kernels::state_dtype(sizes.dtype));
    const int64_t q_row = sizes.num_q_heads * sizes.head_dim;
    const int64_t k_row = sizes.num_kv_heads * sizes.head_dim;
    q_ = shard_of(inputs.q, layout_, place.cp_rank, q_row * element);
    dout_ = shard_of(inputs.dout, layout_, place.cp_rank, q_row * element);
    out_ = AlignedBytes(n * q_row * element);
    if (is_rounded()) residual_ = AlignedBytes(n * q_row * element);
    dq_ = AlignedBytes(n * q_row * state);
    lse_ = AlignedBytes(sizes.num_q_heads * n * state);
    delta_ = AlignedBytes(sizes.num_q_heads * n * state);
    starts_ = layout_.block_starts(place.cp_rank);
    for (int source = 0; source < place.cp_size; ++source) {
      sources_.push_back({.k = shard_of(inputs.k, layout_, source, k_row * element),
                          .v = shard_of(inputs.v, layout_, source, k_row * element),
                          .dk = AlignedBytes(n * k_row * state),
                          .dv = AlignedBytes(n * k_row * state),
                          .starts = layout_.block_starts(source),
                          .blocks = {},
                          .columns = {}});
    }
    make_lists();
    for (const int64_t pairs :
         index::rank_step_pairs(index_, layout_, place.cp_rank, /*with_columns=*/true)) {
      pairs_ += static_cast<double>(pairs);
    }
  }

  void forward(Times& times) override {
    kernels::ForwardParams p;
    fill(p);
    const int64_t n = layout_.tokens_per_rank();
    if (is_rounded()) {
      p.rounded = writable(out_, n, sizes_.num_q_heads, sizes_.head_dim);
      p.residual = writable(residual_, n, sizes_.num_q_heads, sizes_.head_dim);
    } else {
      p.out = writable(out_, n, sizes_.num_q_heads, sizes_.head_dim);
    }
    p.lse = lse_.data();
    const ThreadCountScope threads(place_.threads);
    time_once(times, [&] { kernels::ref::forward(p); });
  }

  void backward(Times& times) override {
    kernels::BackwardParams p;
    fill(p);
    const int64_t n = layout_.tokens_per_rank();
    p.dout = rows_of(dout_, n, sizes_.num_q_heads, sizes_.head_dim);
    p.lse = lse_.data();
    p.delta = delta_.data();
    p.dq = writable(dq_, n, sizes_.num_q_heads, sizes_.head_dim);
    const ThreadCountScope threads(place_.threads);
    time_once(times, [&] {
      // Gradients are added to what is there.
      std::memset(dq_.data(), 0, static_cast<size_t>(dq_.size()));
      for (const Source& source : sources_) {
        std::memset(source.dk.data(), 0, static_cast<size_t>(source.dk.size()));
        std::memset(source.dv.data(), 0, static_cast<size_t>(source.dv.size()));
      }
      kernels::RoundedOut out = {rows_of(out_, n, sizes_.num_q_heads, sizes_.head_dim), {}};
      if (is_rounded()) out.residual = rows_of(residual_, n, sizes_.num_q_heads, sizes_.head_dim);
      kernels::ref::delta(p, out, delta_.data());
      kernels::ref::backward(p);
    });
  }

  void index(Times& times, const pattern::VerticalSlashOptions& options) override {
    MT_CHECK_ARG(place_.cp_size == 1, "index: expected one rank, got cp_size ", place_.cp_size,
                 ": the estimation of several ranks needs all of them");
    const ThreadCountScope threads(place_.threads);
    const auto transport = comm::make_single();
    const auto group = transport->open("index", {0});
    const pattern::LocalAttention local = local_attention(sizes_, layout_, q_, sources_[0].k);
    time_once(times, [&] {
      chosen_ = pattern::build_vertical_slash(local, options, *group);
      make_lists();
    });
  }

  double pairs() const override { return pairs_; }

  std::vector<double> out() const override {
    const int64_t count = out_.size() / kernels::size_of(sizes_.dtype);
    std::vector<double> values(static_cast<size_t>(count));
    if (kernels::state_dtype(sizes_.dtype) == kernels::DType::kFloat64) {
      std::memcpy(values.data(), out_.data(), static_cast<size_t>(out_.size()));
    } else if (is_rounded()) {
      const auto widened = [&](const AlignedBytes& bytes, int64_t i) {
        const uint16_t bits = reinterpret_cast<const uint16_t*>(bytes.data())[i];
        return static_cast<double>(sizes_.dtype == kernels::DType::kBFloat16
                                       ? kernels::ref::from_bfloat16(bits)
                                       : kernels::ref::from_float16(bits));
      };
      for (int64_t i = 0; i < count; ++i)
        values[static_cast<size_t>(i)] = widened(out_, i) + widened(residual_, i);
    } else {
      const auto* floats = reinterpret_cast<const float*>(out_.data());
      std::copy(floats, floats + count, values.begin());
    }
    return values;
  }

 private:
  /// Whether out has another type than the state.
  bool is_rounded() const { return kernels::state_dtype(sizes_.dtype) != sizes_.dtype; }

  void make_lists() {
    for (int source = 0; source < place_.cp_size; ++source) {
      sources_[source].blocks = index::step_blocks(index_, layout_, place_.cp_rank, source);
      if (layout_.has_blocks())
        sources_[source].columns = index::step_columns(index_, layout_, source);
    }
    bitmap_ = index::diagonal_bitmap(index_);
    key_sources_.clear();
    const int64_t n = layout_.tokens_per_rank();
    for (const Source& source : sources_) {
      kernels::KeySource s;
      s.k = rows_of(source.k, n, sizes_.num_kv_heads, sizes_.head_dim);
      s.v = rows_of(source.v, n, sizes_.num_kv_heads, sizes_.head_dim);
      s.num_keys = n;
      s.block_starts = source.starts.data();
      s.blocks = source.blocks.view();
      if (layout_.has_blocks()) s.columns = source.columns.view();
      s.dk = writable(source.dk, n, sizes_.num_kv_heads, sizes_.head_dim);
      s.dv = writable(source.dv, n, sizes_.num_kv_heads, sizes_.head_dim);
      key_sources_.push_back(s);
    }
  }

  void fill(kernels::AttentionParams& p) const {
    p.batch = 1;
    p.num_q_heads = sizes_.num_q_heads;
    p.num_kv_heads = sizes_.num_kv_heads;
    p.head_dim = sizes_.head_dim;
    p.num_queries = layout_.tokens_per_rank();
    p.dtype = sizes_.dtype;
    p.softmax_scale = scale_of(sizes_);
    p.seq_len = sizes_.seq_len;
    p.q = rows_of(q_, p.num_queries, sizes_.num_q_heads, sizes_.head_dim);
    p.q_block_starts = starts_.data();
    p.position_stride = layout_.position_stride();
    p.sources = key_sources_.data();
    p.num_sources = static_cast<int>(key_sources_.size());
    p.diagonal_bits = bitmap_.bits.data();
    p.diagonal_words = bitmap_.words;
  }

  LaunchPlace place_;
  AttentionSizes sizes_;
  index::Index index_;   // what runs
  index::Index chosen_;  // what the last estimation chose
  layout::Layout layout_;
  AlignedBytes q_, dout_, out_, residual_, dq_, lse_, delta_;
  std::vector<int32_t> starts_;
  std::vector<Source> sources_;
  std::vector<kernels::KeySource> key_sources_;
  index::DiagonalBitmap bitmap_;
  double pairs_ = 0;
};

}  // namespace

void check(const LaunchPlace& place, const AttentionSizes& sizes) {
  MT_CHECK_ARG(place.device == "cpu" || place.device == "cuda",
               "--device: expected cpu or cuda, got '", place.device, "'");
  MT_CHECK_ARG(place.backend.empty() || place.device == "cuda",
               "--backend: expected it with --device cuda, got ", place.device);
  MT_CHECK_ARG(place.backend.empty() || place.backend == "sm80" || place.backend == "sm90",
               "--backend: expected sm80 or sm90, got '", place.backend, "'");
  MT_CHECK_ARG(place.threads >= 1 && place.threads <= 1024,
               "--threads: expected a number from 1 to 1024, got ", place.threads);
  MT_CHECK_ARG(place.cp_size >= 1 && place.cp_size <= 4096,
               "--cp-size: expected a number from 1 to 4096, got ", place.cp_size);
  MT_CHECK_ARG(place.cp_rank >= 0 && place.cp_rank < place.cp_size,
               "--cp-rank: expected a number from 0 to ", place.cp_size - 1, ", got ",
               place.cp_rank);
  const layout::Layout layout({.kind = place.layout,
                               .seq_len = sizes.seq_len,
                               .cp_size = place.cp_size,
                               .stripe = place.stripe});
}

std::unique_ptr<AttentionLaunch> make_launch(const LaunchPlace& place, const AttentionSizes& sizes,
                                             const AttentionInputs& inputs,
                                             const index::Index& index) {
  check(place, sizes);
  MT_CHECK_ARG(place.device == "cpu", "make_launch: expected the CPU, got ", place.device);
  return std::make_unique<CpuLaunch>(place, sizes, inputs, index);
}

index::Index choose_index(const AttentionSizes& sizes, const AttentionInputs& inputs,
                          const pattern::VerticalSlashOptions& options) {
  const layout::Layout layout(
      {.kind = layout::LayoutKind::kContiguous, .seq_len = sizes.seq_len, .cp_size = 1});
  const int64_t element = kernels::size_of(sizes.dtype);
  const AlignedBytes q =
      shard_of(inputs.q, layout, 0, sizes.num_q_heads * sizes.head_dim * element);
  const AlignedBytes k =
      shard_of(inputs.k, layout, 0, sizes.num_kv_heads * sizes.head_dim * element);
  const auto transport = comm::make_single();
  const auto group = transport->open("index", {0});
  return pattern::build_vertical_slash(local_attention(sizes, layout, q, k), options, *group);
}

}  // namespace mtraining::bench
