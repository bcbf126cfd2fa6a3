#include "mtraining/kernels/ref/launch_case.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "mtraining/base/check.h"
#include "mtraining/base/rng.h"
#include "mtraining/index/step_index.h"
#include "mtraining/kernels/attention_kernels.h"
#include "mtraining/testing/generator.h"
#include "mtraining/testing/rounding.h"

namespace mtraining::kernels::testing {
namespace {

constexpr int64_t kGuardElements = 256;
constexpr uint8_t kSentinel = 0xa5;
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

void store(DType dtype, uint8_t* to, double value) {
  switch (dtype) {
    case DType::kFloat64:
      std::memcpy(to, &value, 8);
      return;
    case DType::kFloat32: {
      const float x = static_cast<float>(value);
      std::memcpy(to, &x, 4);
      return;
    }
    default: {
      const float x = static_cast<float>(value);
      const uint16_t bits = dtype == DType::kBFloat16 ? mtraining::testing::to_bf16(x)
                                                      : mtraining::testing::to_fp16(x);
      std::memcpy(to, &bits, 2);
    }
  }
}

double fetch(DType dtype, const uint8_t* from) {
  if (dtype == DType::kFloat64) {
    double x;
    std::memcpy(&x, from, 8);
    return x;
  }
  if (dtype == DType::kFloat32) {
    float x;
    std::memcpy(&x, from, 4);
    return x;
  }
  uint16_t bits;
  std::memcpy(&bits, from, 2);
  return dtype == DType::kBFloat16 ? mtraining::testing::from_bf16(bits)
                                   : mtraining::testing::from_fp16(bits);
}

double round_to(DType dtype, double value) {
  uint8_t bytes[sizeof(double)];
  store(dtype, bytes, value);
  return fetch(dtype, bytes);
}

}  // namespace

mtraining::testing::Precision precision_of(DType dtype) {
  using mtraining::testing::Precision;
  switch (dtype) {
    case DType::kFloat64:
      return Precision::kFloat64;
    case DType::kFloat32:
      return Precision::kFloat32;
    case DType::kBFloat16:
      return Precision::kBFloat16;
    case DType::kFloat16:
      return Precision::kFloat16;
  }
  throw InternalError("dtype");
}

std::string to_string(const LaunchOptions& o) {
  return concat("B", o.batch, " H", o.num_q_heads, "/", o.num_kv_heads, " D", o.head_dim, " N",
                o.layout.seq_len, " ", layout::to_string(o.layout.kind), " W", o.layout.cp_size,
                " stripe", o.layout.stripe, " dtype", static_cast<int>(o.dtype), " memory",
                static_cast<int>(o.memory), " columns", static_cast<int>(o.columns), " documents",
                static_cast<int>(o.documents), o.csr ? " csr" : "",
                o.one_launch ? " one" : " several", " diagonals", o.chosen_diagonals, " columns",
                o.chosen_columns, " seed", o.seed);
}

GuardedTensor::GuardedTensor(int64_t batch, int64_t tokens, int64_t heads, int64_t head_dim,
                             DType dtype, Memory memory, double fill, int64_t misalign)
    : batch_(batch),
      tokens_(tokens),
      heads_(heads),
      head_dim_(head_dim),
      first_(kGuardElements + misalign),
      dtype_(dtype) {
  const int64_t width = memory == Memory::kSlice ? 4 : 1;
  if (memory == Memory::kHeadMajor) {
    stride_token_ = head_dim;
    stride_head_ = tokens * head_dim;
  } else {
    stride_head_ = head_dim;
    stride_token_ = heads * head_dim * width;
  }
  stride_batch_ = tokens * heads * head_dim * width;
  bytes_.assign((batch * stride_batch_ + 2 * kGuardElements + misalign) * size_of(dtype),
                kSentinel);
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t d = 0; d < head_dim; ++d) set(b, t, h, d, fill);
      }
    }
  }
}

int64_t GuardedTensor::at(int64_t b, int64_t t, int64_t h, int64_t d) const {
  return (first_ + b * stride_batch_ + t * stride_token_ + h * stride_head_ + d) * size_of(dtype_);
}
void GuardedTensor::set(int64_t b, int64_t t, int64_t h, int64_t d, double value) {
  store(dtype_, bytes_.data() + at(b, t, h, d), value);
}
double GuardedTensor::get(int64_t b, int64_t t, int64_t h, int64_t d) const {
  return fetch(dtype_, bytes_.data() + at(b, t, h, d));
}
View GuardedTensor::view() {
  return {bytes_.data() + at(0, 0, 0, 0), stride_batch_, stride_token_, stride_head_};
}
ConstView GuardedTensor::const_view() const {
  return {bytes_.data() + at(0, 0, 0, 0), stride_batch_, stride_token_, stride_head_};
}
std::string GuardedTensor::broken_guard() const {
  std::vector<uint8_t> owned(bytes_.size(), 0);
  for (int64_t b = 0; b < batch_; ++b) {
    for (int64_t t = 0; t < tokens_; ++t) {
      for (int64_t h = 0; h < heads_; ++h) {
        std::memset(owned.data() + at(b, t, h, 0), 1, head_dim_ * size_of(dtype_));
      }
    }
  }
  for (size_t i = 0; i < bytes_.size(); ++i) {
    if (!owned[i] && bytes_[i] != kSentinel) return concat("byte ", i, " of ", bytes_.size());
  }
  return "";
}

namespace {

/// Queries of even documents look along one axis, keys of odd ones lie on it, and the other way round.
void hide_huge_scores(const LaunchOptions& o, const std::vector<int32_t>& document_starts,
                      mtraining::testing::Qkv& values) {
  const int64_t n = o.layout.seq_len, d = o.head_dim;
  const float size = std::round(std::sqrt(500 * std::sqrt(static_cast<float>(d))));
  for (int64_t b = 0; b < o.batch; ++b) {
    int parity = 0;
    for (int64_t t = 0; t < n; ++t) {
      const int64_t at = b * n + t;
      if (t > 0 && document_starts[at] != document_starts[at - 1]) parity = 1 - parity;
      for (int64_t h = 0; h < o.num_q_heads; ++h) {
        float* q = values.q.data() + (at * o.num_q_heads + h) * d;
        q[parity] = size;
        q[1 - parity] = 0;
      }
      for (int64_t h = 0; h < o.num_kv_heads; ++h) {
        float* k = values.k.data() + (at * o.num_kv_heads + h) * d;
        k[parity] = 0;
        k[1 - parity] = t % 3 == 0 ? -size : size;
      }
    }
  }
}

}  // namespace

LaunchCase::LaunchCase(const LaunchOptions& options) : options_(options), layout_(options.layout) {
  const int64_t n = options.layout.seq_len, rows = options.batch * options.num_q_heads;
  mtraining::testing::QkvOptions qkv;
  qkv.batch = options.batch;
  qkv.seq_len = n;
  qkv.num_q_heads = options.num_q_heads;
  qkv.num_kv_heads = options.num_kv_heads;
  qkv.head_dim = options.head_dim;
  qkv.seed = options.seed;
  qkv.outlier_channel = options.outlier_channel;
  mtraining::testing::Qkv values = mtraining::testing::make_qkv(qkv);
  documents_ = mtraining::testing::make_document_starts(options.documents, options.batch, n);
  if (options.huge_hidden_scores) hide_huge_scores(options, documents_, values);
  const auto round = [&](const std::vector<float>& x) {
    return mtraining::testing::round_to(precision_of(options.dtype), std::span<const float>(x));
  };
  problem_ = {.batch = options.batch,
              .num_queries = n,
              .num_keys = n,
              .num_q_heads = options.num_q_heads,
              .num_kv_heads = options.num_kv_heads,
              .head_dim = options.head_dim};
  problem_.softmax_scale = options.softmax_scale > 0
                               ? options.softmax_scale
                               : 1.0 / std::sqrt(static_cast<double>(options.head_dim));
  problem_.q = round(values.q);
  problem_.k = round(values.k);
  problem_.v = round(values.v);
  problem_.dout = round(values.dout);
  if (options.expanded_dout) {
    for (size_t i = 0; i < problem_.dout.size(); ++i)
      problem_.dout[i] = problem_.dout[i % options.head_dim];
  }
  const int64_t num_blocks = (n + kBlock - 1) / kBlock;
  const Rng rng(options.seed, 7);
  uint64_t draw = 0;
  diagonals_.resize(rows);
  columns_.resize(rows);
  for (int64_t r = 0; r < rows; ++r) {
    const double share = options.unequal_heads ? static_cast<double>(r % 4 + 1) / 4 : 1;
    for (int64_t c = 0; c < num_blocks; ++c) {
      if (rng.uniform(draw++) < options.chosen_diagonals * share ||
          (c == 0 && options.chosen_diagonals >= 0)) {
        diagonals_[r].push_back(static_cast<int32_t>(c));
      }
    }
    for (int64_t j = 0; j < n; ++j) {
      if (rng.uniform(draw++) < options.chosen_columns * share)
        columns_[r].push_back(static_cast<int32_t>(j));
    }
  }
  index_ = index::make_index(static_cast<int>(options.batch), static_cast<int>(options.num_q_heads),
                             n, diagonals_, columns_);
  bitmap_ = index::diagonal_bitmap(index_);
}

mtraining::testing::Mask LaunchCase::mask() const {
  return mtraining::testing::vertical_slash_mask(diagonals_, columns_, options_.num_q_heads,
                                                 documents_, options_.layout.seq_len);
}

/// One rank's memory.
struct LaunchCase::Rank {
  std::vector<int64_t> positions;
  std::vector<int32_t> block_starts, document_start;
  std::unique_ptr<GuardedTensor> q, k, v, dout, out, state, rounded, residual, dq, dq_rounded, dk,
      dv;
  std::vector<double> lse64, delta64;
  std::vector<float> lse32, delta32;
};

void LaunchCase::make_rank(int r, Rank& rank) const {
  const LaunchOptions& o = options_;
  const int64_t n = layout_.tokens_per_rank(), d = o.head_dim;
  rank.positions = layout_.positions(r);
  rank.block_starts = layout_.block_starts(r);
  const DType state = state_dtype(o.dtype);
  const auto tensor = [&](int64_t heads, DType dtype, double fill) {
    return std::make_unique<GuardedTensor>(o.batch, n, heads, d, dtype, o.memory, fill, o.misalign);
  };
  rank.q = tensor(o.num_q_heads, o.dtype, kNan);
  rank.k = tensor(o.num_kv_heads, o.dtype, kNan);
  rank.v = tensor(o.num_kv_heads, o.dtype, kNan);
  rank.dout = tensor(o.num_q_heads, o.dtype, kNan);
  rank.out = tensor(o.num_q_heads, state, kNan);
  rank.state = tensor(o.num_q_heads, state, kNan);
  rank.rounded = tensor(o.num_q_heads, o.dtype, kNan);
  rank.residual = tensor(o.num_q_heads, o.dtype, kNan);
  rank.dq = tensor(o.num_q_heads, state, 0);
  rank.dq_rounded = tensor(o.num_q_heads, o.dtype, kNan);
  rank.dk = tensor(o.num_kv_heads, state, 0);
  rank.dv = tensor(o.num_kv_heads, state, 0);
  for (int64_t b = 0; b < o.batch; ++b) {
    for (int64_t t = 0; t < n; ++t) {
      const int64_t p = rank.positions[t];
      if (!documents_.empty()) {
        rank.document_start.push_back(p < o.layout.seq_len ? documents_[b * o.layout.seq_len + p]
                                                           : 0);
      }
      if (p >= o.layout.seq_len) continue;  // padding stays NaN
      for (int64_t x = 0; x < o.num_q_heads * d; ++x) {
        const int64_t at = (b * o.layout.seq_len + p) * o.num_q_heads * d + x;
        rank.q->set(b, t, x / d, x % d, problem_.q[at]);
        rank.dout->set(b, t, x / d, x % d, problem_.dout[at]);
      }
      for (int64_t x = 0; x < o.num_kv_heads * d; ++x) {
        const int64_t at = (b * o.layout.seq_len + p) * o.num_kv_heads * d + x;
        rank.k->set(b, t, x / d, x % d, problem_.k[at]);
        rank.v->set(b, t, x / d, x % d, problem_.v[at]);
      }
    }
  }
  rank.lse64.assign(o.batch * o.num_q_heads * n, kNan);
  rank.delta64.assign(o.batch * o.num_q_heads * n, kNan);
  rank.lse32.assign(rank.lse64.size(), std::numeric_limits<float>::quiet_NaN());
  rank.delta32 = rank.lse32;
}

void LaunchCase::note_guard(const std::string& name, const GuardedTensor& tensor) {
  const std::string broken = tensor.broken_guard();
  if (broken_guard_.empty() && !broken.empty()) broken_guard_ = name + ": " + broken;
}

namespace {

class RefBackend : public Backend {
 public:
  void forward(const ForwardParams& params, std::span<const MemoryRange>) override {
    ref::forward(params);
  }
  void backward(const BackwardParams& params, std::span<const MemoryRange>) override {
    ref::backward(params);
  }
  void delta(const BackwardParams& params, const RoundedOut& out, void* delta,
             std::span<const MemoryRange>) override {
    ref::delta(params, out, delta);
  }
};

template <typename T>
MemoryRange range_of(const std::vector<T>& values) {
  return {const_cast<T*>(values.data()), static_cast<int64_t>(values.size() * sizeof(T))};
}

}  // namespace

mtraining::testing::Solution LaunchCase::run() {
  RefBackend backend;
  return run(backend);
}

mtraining::testing::Solution LaunchCase::run(Backend& backend) {
  const LaunchOptions& o = options_;
  const int world = o.layout.cp_size;
  const int64_t n = layout_.tokens_per_rank(), d = o.head_dim, heads = o.num_q_heads,
                rows = o.batch * heads;
  const bool wide = o.dtype == DType::kFloat64;
  const int64_t group = heads / o.num_kv_heads;
  std::vector<Rank> ranks(world);
  for (int r = 0; r < world; ++r) make_rank(r, ranks[r]);

  // The gathered columns: the union per (sample, kv head), one after the other; every head's list
  // points into it.
  std::vector<int32_t> gathered_rows, gathered_positions, gathered_counts(rows, 0);
  int64_t num_gathered = 0, capacity = 1;
  for (const auto& list : columns_) capacity = std::max<int64_t>(capacity, list.size());
  gathered_rows.assign(rows * capacity, -1);
  gathered_positions.assign(rows * capacity, -1);
  std::vector<std::vector<int64_t>> packed;  // {batch, kv head, position}
  for (int64_t g = 0; g < o.batch * o.num_kv_heads; ++g) {
    std::vector<int32_t> all;
    const auto list_of = [&](int64_t i) -> const std::vector<int32_t>& {
      return columns_[g / o.num_kv_heads * heads + g % o.num_kv_heads * group + i];
    };
    for (int64_t i = 0; i < group; ++i) all.insert(all.end(), list_of(i).begin(), list_of(i).end());
    std::sort(all.begin(), all.end());
    all.erase(std::unique(all.begin(), all.end()), all.end());
    std::reverse(all.begin(), all.end());  // rows need not follow positions
    for (int64_t i = 0; i < group; ++i) {
      const int64_t row = g / o.num_kv_heads * heads + g % o.num_kv_heads * group + i;
      for (const int32_t p : list_of(i)) {
        const int64_t at = row * capacity + gathered_counts[row]++;
        gathered_positions[at] = p;
        gathered_rows[at] = static_cast<int32_t>(
            num_gathered + (std::find(all.begin(), all.end(), p) - all.begin()));
      }
    }
    for (const int32_t p : all) packed.push_back({g / o.num_kv_heads, g % o.num_kv_heads, p});
    num_gathered += static_cast<int64_t>(all.size());
  }
  const bool gathered = o.columns == Columns::kGathered && num_gathered > 0;
  const auto column_tensor = [&](DType dtype, double fill) {
    return GuardedTensor(1, std::max<int64_t>(1, num_gathered), 1, d, dtype, o.memory, fill,
                         o.misalign);
  };
  GuardedTensor ck = column_tensor(o.dtype, kNan), cv = column_tensor(o.dtype, kNan);
  GuardedTensor cdk = column_tensor(state_dtype(o.dtype), 0),
                cdv = column_tensor(state_dtype(o.dtype), 0);
  for (size_t i = 0; i < packed.size(); ++i) {
    for (int64_t x = 0; x < d; ++x) {
      const int64_t at =
          ((packed[i][0] * o.layout.seq_len + packed[i][2]) * o.num_kv_heads + packed[i][1]) * d +
          x;
      ck.set(0, static_cast<int64_t>(i), 0, x, problem_.k[at]);
      cv.set(0, static_cast<int64_t>(i), 0, x, problem_.v[at]);
    }
  }

  mtraining::testing::Solution result;
  result.out.assign(problem_.q.size(), kNan);
  result.dq = result.out;
  result.lse.assign(rows * o.layout.seq_len, kNan);
  result.dk.assign(problem_.k.size(), kNan);
  result.dv = result.dk;

  for (int r = 0; r < world; ++r) {
    Rank& rank = ranks[r];
    std::vector<index::StepBlocks> blocks;
    std::vector<index::StepColumns> columns;
    std::vector<KeySource> sources;
    for (int s = 0; s < world; ++s) {
      const bool entries =
          !o.csr && layout_.kind() != layout::LayoutKind::kZigzag && layout_.has_blocks();
      blocks.push_back(entries ? index::step_blocks(index_, layout_, r, s)
                               : index::step_blocks_csr(index_, layout_, r, s));
      columns.push_back(index::step_columns(index_, layout_, s));
    }
    for (int s = 0; s < world; ++s) {
      KeySource source;
      source.k = ranks[s].k->const_view();
      source.v = ranks[s].v->const_view();
      source.num_keys = n;
      source.block_starts = ranks[s].block_starts.data();
      source.blocks = blocks[s].view();
      if (o.columns == Columns::kPerStep) source.columns = columns[s].view();
      source.dk = ranks[s].dk->view();
      source.dv = ranks[s].dv->view();
      sources.push_back(source);
    }
    if (gathered) {
      KeySource source;
      source.k = ck.const_view();
      source.v = cv.const_view();
      source.k.stride_batch = source.k.stride_head = source.v.stride_batch = source.v.stride_head =
          0;
      source.num_keys = num_gathered;
      source.columns = {gathered_rows.data(), gathered_positions.data(), gathered_counts.data(),
                        capacity};
      source.dk = cdk.view();
      source.dv = cdv.view();
      source.dk.stride_batch = source.dk.stride_head = source.dv.stride_batch =
          source.dv.stride_head = 0;
      sources.push_back(source);
    }
    std::vector<MemoryRange> memory = {range_of(bitmap_.bits),
                                       range_of(gathered_rows),
                                       range_of(gathered_positions),
                                       range_of(gathered_counts),
                                       range_of(rank.document_start),
                                       range_of(rank.lse32),
                                       range_of(rank.lse64),
                                       range_of(rank.delta32),
                                       range_of(rank.delta64),
                                       ck.range(),
                                       cv.range(),
                                       cdk.range(),
                                       cdv.range(),
                                       rank.q->range(),
                                       rank.dout->range(),
                                       rank.out->range(),
                                       rank.state->range(),
                                       rank.rounded->range(),
                                       rank.residual->range(),
                                       rank.dq->range(),
                                       rank.dq_rounded->range()};
    if (o.expanded_dout && r > 0) memory.push_back(ranks[0].dout->range());
    for (int s = 0; s < world; ++s) {
      for (const MemoryRange& range :
           {range_of(ranks[s].block_starts), range_of(blocks[s].entries),
            range_of(blocks[s].num_entries), range_of(blocks[s].row_begin),
            range_of(blocks[s].key_blocks), range_of(columns[s].rows),
            range_of(columns[s].positions), range_of(columns[s].counts), ranks[s].k->range(),
            ranks[s].v->range(), ranks[s].dk->range(), ranks[s].dv->range()})
        memory.push_back(range);
    }
    const auto fill = [&](AttentionParams& p) {
      p.sm_margin = o.sm_margin;
      p.batch = o.batch;
      p.num_q_heads = heads;
      p.num_kv_heads = o.num_kv_heads;
      p.head_dim = d;
      p.num_queries = n;
      p.dtype = o.dtype;
      p.softmax_scale = problem_.softmax_scale;
      p.seq_len = o.layout.seq_len;
      p.q = rank.q->const_view();
      p.q_block_starts = rank.block_starts.data();
      p.position_stride = layout_.position_stride();
      if (!documents_.empty()) {
        p.document_start = rank.document_start.data();
        p.document_stride_batch = n;
      }
      p.diagonal_bits = bitmap_.bits.data();
      p.diagonal_words = bitmap_.words;
    };
    void* lse = wide ? static_cast<void*>(rank.lse64.data()) : rank.lse32.data();
    void* delta = wide ? static_cast<void*>(rank.delta64.data()) : rank.delta32.data();
    const auto lse_at = [&](int64_t at) {
      return wide ? rank.lse64[at] : static_cast<double>(rank.lse32[at]);
    };
    const auto lses = [&] {
      return wide ? rank.lse64 : std::vector<double>(rank.lse32.begin(), rank.lse32.end());
    };

    const size_t step = o.one_launch ? sources.size() : 1;
    const auto attend = [&](const View& out, bool rounds) {
      ForwardParams f;
      fill(f);
      f.lse = lse;
      for (size_t s = 0; s < sources.size(); s += step) {
        f.sources = sources.data() + s;
        f.num_sources = static_cast<int>(step);
        f.first = s == 0;
        if (rounds && s + step >= sources.size()) {
          f.rounded = rank.rounded->view();
          f.residual = rank.residual->view();
        }
        f.out = backend.needs_out(f) ? out : View{};
        backend.forward(f, memory);
      }
    };
    attend(rank.out->view(), false);
    const std::vector<double> first_lse = lses();
    attend(rank.state->view(), true);
    if (lses() != first_lse && broken_guard_.empty()) broken_guard_ = "lse of the rounded result";
    for (int64_t b = 0; b < o.batch; ++b) {
      for (int64_t t = 0; t < n; ++t) {
        const int64_t p = rank.positions[t];
        for (int64_t h = 0; h < heads; ++h) {
          const double row_lse = lse_at((b * heads + h) * n + t);
          const bool empty = row_lse == -std::numeric_limits<double>::infinity();
          if (p < o.layout.seq_len)
            result.lse[(b * heads + h) * o.layout.seq_len + p] = row_lse;
          else if (!empty && broken_guard_.empty())
            broken_guard_ = "lse of a padding row";
          for (int64_t x = 0; x < d; ++x) {
            const double value = rank.out->get(b, t, h, x);
            const double near = round_to(o.dtype, value);
            if (rank.rounded->get(b, t, h, x) != near && broken_guard_.empty())
              broken_guard_ = "rounded is not out rounded";
            if (rank.residual->get(b, t, h, x) != round_to(o.dtype, value - near) &&
                broken_guard_.empty())
              broken_guard_ = "residual is not what rounding lost";
            if (p < o.layout.seq_len)
              result.out[((b * o.layout.seq_len + p) * heads + h) * d + x] = value;
            if (empty && value != 0 && broken_guard_.empty()) broken_guard_ = "out of an empty row";
            // What was saved for an empty row must not matter.
            if (empty) {
              rank.rounded->set(b, t, h, x, kNan);
              rank.residual->set(b, t, h, x, kNan);
            }
            if (empty && !o.expanded_dout) rank.dout->set(b, t, h, x, kNan);
          }
        }
      }
    }

    BackwardParams g;
    fill(g);
    g.dout = rank.dout->const_view();
    if (o.expanded_dout) g.dout.stride_batch = g.dout.stride_token = g.dout.stride_head = 0;
    // Row 0 of the expanded dout must be real: position 0 of the sequence is, on rank 0; elsewhere
    // take rank 0's.
    if (o.expanded_dout) g.dout.data = ranks[0].dout->const_view().data;
    g.lse = lse;
    g.delta = delta;
    g.dq = rank.dq->view();
    g.deterministic = o.deterministic;
    backend.delta(g, {rank.rounded->const_view(), rank.residual->const_view()}, delta, memory);
    for (size_t s = 0; s < sources.size(); s += step) {
      g.sources = sources.data() + s;
      g.num_sources = static_cast<int>(step);
      backend.backward(g, memory);
    }
    note_guard("out", *rank.out);
    note_guard("state", *rank.state);
    note_guard("rounded", *rank.rounded);
    note_guard("residual", *rank.residual);
    note_guard("dq", *rank.dq);
    // Once more, into gradients of keys that nobody looks at.
    g.sources = sources.data();
    g.num_sources = static_cast<int>(sources.size());
    if (backend.rounds_dq(g)) {
      g.dq = {};
      g.dq_rounded = rank.dq_rounded->view();
      std::vector<GuardedTensor> kept;
      for (const Rank& other : ranks) {
        kept.push_back(*other.dk);
        kept.push_back(*other.dv);
      }
      const GuardedTensor kept_cdk = cdk, kept_cdv = cdv;
      backend.backward(g, memory);
      for (int s = 0; s < world; ++s) {
        *ranks[s].dk = kept[2 * s];
        *ranks[s].dv = kept[2 * s + 1];
      }
      cdk = kept_cdk;
      cdv = kept_cdv;
      note_guard("dq_rounded", *rank.dq_rounded);
      for (int64_t i = 0; i < o.batch * n * heads * d && o.one_launch; ++i) {
        const int64_t b = i / d / heads / n, t = i / d / heads % n, h = i / d % heads, x = i % d;
        if (rank.dq_rounded->get(b, t, h, x) != round_to(o.dtype, rank.dq->get(b, t, h, x)) &&
            broken_guard_.empty())
          broken_guard_ = "dq_rounded is not dq rounded";
      }
    }
    for (int64_t b = 0; b < o.batch; ++b) {
      for (int64_t t = 0; t < n; ++t) {
        for (int64_t x = 0; x < heads * d; ++x) {
          const double value = rank.dq->get(b, t, x / d, x % d);
          if (rank.positions[t] < o.layout.seq_len) {
            result.dq[((b * o.layout.seq_len + rank.positions[t]) * heads) * d + x] = value;
          } else if (value != 0 && broken_guard_.empty()) {
            broken_guard_ = "dq of a padding row";
          }
        }
      }
    }
  }
  for (int r = 0; r < world; ++r) {
    note_guard("dk", *ranks[r].dk);
    note_guard("dv", *ranks[r].dv);
    for (int64_t b = 0; b < o.batch; ++b) {
      for (int64_t t = 0; t < n; ++t) {
        for (int64_t x = 0; x < o.num_kv_heads * d; ++x) {
          const double dk = ranks[r].dk->get(b, t, x / d, x % d),
                       dv = ranks[r].dv->get(b, t, x / d, x % d);
          if (ranks[r].positions[t] < o.layout.seq_len) {
            const int64_t at =
                (b * o.layout.seq_len + ranks[r].positions[t]) * o.num_kv_heads * d + x;
            result.dk[at] = dk;
            result.dv[at] = dv;
          } else if ((dk != 0 || dv != 0) && broken_guard_.empty()) {
            broken_guard_ = "dk or dv of a padding row";
          }
        }
      }
    }
  }
  if (gathered) {
    note_guard("gathered dk", cdk);
    note_guard("gathered dv", cdv);
    for (size_t i = 0; i < packed.size(); ++i) {
      for (int64_t x = 0; x < d; ++x) {
        const int64_t at =
            ((packed[i][0] * o.layout.seq_len + packed[i][2]) * o.num_kv_heads + packed[i][1]) * d +
            x;
        result.dk[at] += cdk.get(0, static_cast<int64_t>(i), 0, x);
        result.dv[at] += cdv.get(0, static_cast<int64_t>(i), 0, x);
      }
    }
  }
  return result;
}

}  // namespace mtraining::kernels::testing
