// Estimation kernels: against plain double arithmetic, and the laws that make the index the same
// for every split of the keys.
#include "mtraining/kernels/window.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "mtraining/base/check.h"
#include "mtraining/base/parallel.h"
#include "mtraining/base/rng.h"
#include "mtraining/testing/rounding.h"

namespace mtraining::kernels {
namespace {

using mtraining::testing::Precision;

struct Problem {
  int64_t batch = 2, heads = 4, kv_heads = 2, dim = 32, seq_len = 333;
  DType dtype = DType::kFloat32;
  std::vector<int32_t> row_positions, document_start;  // [R], [B, R] or empty
  std::vector<float> q, k;                             // [B, R, H, D], [B, N, Hk, D] as numbers
  std::vector<uint8_t> q_memory;

  int64_t rows() const { return static_cast<int64_t>(row_positions.size()); }
  int64_t outputs() const { return batch * heads * rows(); }
  double scale() const { return 1 / std::sqrt(static_cast<double>(dim)); }
};

Precision precision_of(DType dtype) {
  return dtype == DType::kFloat64    ? Precision::kFloat64
         : dtype == DType::kFloat32  ? Precision::kFloat32
         : dtype == DType::kBFloat16 ? Precision::kBFloat16
                                     : Precision::kFloat16;
}

Problem make_problem(std::vector<int32_t> rows, uint64_t seed, DType dtype = DType::kFloat32,
                     bool documents = false, Problem p = {}) {
  p.dtype = dtype;
  p.row_positions = std::move(rows);
  const Rng rng(seed);
  uint64_t draw = 0;
  const auto number = [&] {
    return static_cast<float>(
        mtraining::testing::round_to(precision_of(dtype), rng.normal(draw++) * 1.5));
  };
  for (int64_t i = 0; i < p.batch * p.rows() * p.heads * p.dim; ++i) p.q.push_back(number());
  for (int64_t i = 0; i < p.batch * p.seq_len * p.kv_heads * p.dim; ++i) p.k.push_back(number());
  if (documents) {
    for (int64_t b = 0; b < p.batch; ++b) {
      for (const int32_t position : p.row_positions)
        p.document_start.push_back(position / 100 * 100 + static_cast<int32_t>(b));
    }
  }
  p.q_memory =
      mtraining::testing::pack(precision_of(dtype), std::vector<double>(p.q.begin(), p.q.end()));
  return p;
}

/// One rank's keys: blocks of 64 (or of 64 striped tokens) at `starts`, in memory `offset` elements
/// off alignment.
struct Shard {
  std::vector<int32_t> starts;
  int64_t position_stride = 1, num_keys = 0, offset = 0;
  std::vector<uint8_t> memory;
  std::vector<int64_t> positions;
};

Shard make_shard(const Problem& p, std::vector<int32_t> starts, int64_t position_stride = 1,
                 int64_t offset = 0, int64_t num_keys = -1) {
  Shard s;
  s.starts = std::move(starts);
  s.position_stride = position_stride;
  s.offset = offset;
  s.num_keys = num_keys >= 0 ? num_keys : static_cast<int64_t>(s.starts.size()) * 64;
  std::vector<double> values(offset, 0.0);
  for (int64_t t = 0; t < s.num_keys; ++t)
    s.positions.push_back(s.starts[t / 64] + t % 64 * position_stride);
  for (int64_t b = 0; b < p.batch; ++b) {
    for (const int64_t position : s.positions) {
      for (int64_t x = 0; x < p.kv_heads * p.dim; ++x) {
        values.push_back(position < p.seq_len
                             ? p.k[(b * p.seq_len + position) * p.kv_heads * p.dim + x]
                             : std::numeric_limits<double>::quiet_NaN());
      }
    }
  }
  s.memory = mtraining::testing::pack(precision_of(p.dtype), values);
  return s;
}

WindowParams params_of(const Problem& p, const Shard& s) {
  WindowParams w;
  w.batch = p.batch;
  w.num_q_heads = p.heads;
  w.num_kv_heads = p.kv_heads;
  w.head_dim = p.dim;
  w.dtype = p.dtype;
  w.softmax_scale = p.scale();
  w.num_rows = p.rows();
  w.q = {p.q_memory.data(), p.rows() * p.heads * p.dim, p.heads * p.dim, p.dim};
  w.row_positions = p.row_positions.data();
  w.row_document_start = p.document_start.empty() ? nullptr : p.document_start.data();
  w.k = {s.memory.data() + s.offset * size_of(p.dtype), s.num_keys * p.kv_heads * p.dim,
         p.kv_heads * p.dim, p.dim};
  w.num_keys = s.num_keys;
  w.k_block_starts = s.starts.data();
  w.position_stride = s.position_stride;
  w.seq_len = p.seq_len;
  return w;
}

struct Estimate {
  std::vector<float> row_max;
  std::vector<int64_t> row_sum, columns, diagonals, offsets, covered;
  bool operator==(const Estimate&) const = default;
};

/// As pattern/ does it: three passes over all shards with reductions between; columns by position.
Estimate estimate(const Problem& p, const std::vector<Shard>& shards,
                  const std::vector<uint64_t>& bits, const ColumnLists& columns) {
  Estimate e;
  const int64_t num_blocks = (p.seq_len + 63) / 64;
  e.row_max.assign(p.outputs(), -std::numeric_limits<float>::infinity());
  e.row_sum.assign(p.outputs(), 0);
  e.covered.assign(p.outputs(), 0);
  e.columns.assign(p.batch * p.heads * p.seq_len, 0);
  e.diagonals.assign(p.batch * p.heads * (num_blocks + 1), 0);
  e.offsets.assign(e.columns.size(), 0);
  for (const Shard& s : shards) {
    std::vector<float> local(p.outputs(), std::numeric_limits<float>::quiet_NaN());
    ref::window_row_max(params_of(p, s), local.data());
    for (size_t i = 0; i < local.size(); ++i) e.row_max[i] = std::max(e.row_max[i], local[i]);
  }
  for (const Shard& s : shards)
    ref::window_row_sum(params_of(p, s), e.row_max.data(), e.row_sum.data());
  for (const Shard& s : shards) {
    std::vector<int64_t> local(p.batch * p.heads * s.num_keys, 0);
    ref::window_masses(params_of(p, s), e.row_max.data(), e.row_sum.data(),
                       {local.data(), e.diagonals.data(), e.offsets.data()});
    for (int64_t r = 0; r < p.batch * p.heads; ++r) {
      for (int64_t t = 0; t < s.num_keys; ++t) {
        if (s.positions[t] < p.seq_len)
          e.columns[r * p.seq_len + s.positions[t]] += local[r * s.num_keys + t];
        else
          EXPECT_EQ(local[r * s.num_keys + t], 0);
      }
    }
    ref::window_covered(params_of(p, s), e.row_max.data(), e.row_sum.data(), bits.data(), 1,
                        columns, e.covered.data());
  }
  return e;
}

std::vector<int32_t> last_rows(int64_t seq_len, int64_t count) {
  std::vector<int32_t> rows(count);
  std::iota(rows.begin(), rows.end(), static_cast<int32_t>(seq_len - count));
  return rows;
}

std::vector<Shard> whole(const Problem& p) {
  std::vector<int32_t> starts;
  for (int64_t i = 0; i < p.seq_len; i += 64) starts.push_back(static_cast<int32_t>(i));
  return {make_shard(p, starts, 1, 0, p.seq_len)};
}

struct Mask {
  std::vector<uint64_t> bits;
  std::vector<int32_t> positions, counts;
  ColumnLists columns;
};
Mask make_mask(const Problem& p) {
  Mask m;
  const Rng rng(77);
  for (int64_t r = 0; r < p.batch * p.heads; ++r) {
    m.bits.push_back(1 | (rng.bits(r) & 0x3f));
    std::vector<int32_t> list;
    for (int32_t j = 0; j < p.seq_len; ++j) {
      if (rng.uniform(1000 + r * p.seq_len + j) < 0.1) list.push_back(j);
    }
    m.counts.push_back(static_cast<int32_t>(list.size()));
    list.resize(p.seq_len, -1);
    m.positions.insert(m.positions.end(), list.begin(), list.end());
  }
  m.columns = {nullptr, m.positions.data(), m.counts.data(), p.seq_len};
  return m;
}

void expect_equals_plain(const Problem& p) {
  const Mask m = make_mask(p);
  const Estimate got = estimate(p, whole(p), m.bits, m.columns);
  const int64_t num_blocks = (p.seq_len + 63) / 64;
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t h = 0; h < p.heads; ++h) {
      const int64_t row = b * p.heads + h;
      std::vector<double> columns(p.seq_len), diagonals(num_blocks + 1), offsets(p.seq_len);
      for (int64_t r = 0; r < p.rows(); ++r) {
        const int64_t position = p.row_positions[r];
        const int64_t begin = p.document_start.empty() ? 0 : p.document_start[b * p.rows() + r];
        std::vector<double> score(p.seq_len, -INFINITY);
        double top = -INFINITY, sum = 0, covered = 0;
        for (int64_t j = std::max<int64_t>(0, begin); j <= position && j < p.seq_len; ++j) {
          double dot = 0;
          for (int64_t d = 0; d < p.dim; ++d) {
            dot += double{p.q[((b * p.rows() + r) * p.heads + h) * p.dim + d]} *
                   p.k[((b * p.seq_len + j) * p.kv_heads + h / (p.heads / p.kv_heads)) * p.dim + d];
          }
          score[j] = dot * p.scale();
          top = std::max(top, score[j]);
        }
        for (int64_t j = 0; j < p.seq_len; ++j) sum += std::exp(score[j] - top);
        const int64_t at = row * p.rows() + r;
        if (top == -INFINITY) {
          EXPECT_EQ(got.row_max[at], -std::numeric_limits<float>::infinity());
          EXPECT_EQ(got.row_sum[at], 0);
          continue;
        }
        EXPECT_NEAR(got.row_max[at], top, 1e-5);
        EXPECT_NEAR(static_cast<double>(got.row_sum[at]) / kMassOne, sum, sum * 2e-5);
        for (int64_t j = 0; j < p.seq_len; ++j) {
          if (score[j] == -INFINITY) continue;
          const double a = std::exp(score[j] - top) / sum;
          const int64_t o = position - j;
          columns[j] += a;
          offsets[o] += a;
          diagonals[o / 64] += a * static_cast<double>(64 - o % 64);
          diagonals[o / 64 + 1] += a * static_cast<double>(o % 64);
          const auto* list = m.positions.data() + row * p.seq_len;
          const bool column =
              std::binary_search(list, list + m.counts[row], static_cast<int32_t>(j));
          if (column || (m.bits[row] >> (position / 64 - j / 64) & 1)) covered += a;
        }
        EXPECT_NEAR(static_cast<double>(got.covered[at]) / kMassOne, covered, 2e-5);
      }
      const double close = 2e-5 * static_cast<double>(p.rows());
      for (int64_t j = 0; j < p.seq_len; ++j) {
        ASSERT_NEAR(static_cast<double>(got.columns[row * p.seq_len + j]) / kMassOne, columns[j],
                    close)
            << j;
        ASSERT_NEAR(static_cast<double>(got.offsets[row * p.seq_len + j]) / kMassOne, offsets[j],
                    close)
            << j;
      }
      for (int64_t c = 0; c <= num_blocks; ++c) {
        ASSERT_NEAR(static_cast<double>(got.diagonals[row * (num_blocks + 1) + c]) / kMassOne,
                    diagonals[c], 64 * close);
      }
    }
  }
}

TEST(Window, EqualsPlainArithmetic) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64}) {
    expect_equals_plain(make_problem(last_rows(333, 64), 1, dtype));
  }
  expect_equals_plain(make_problem(last_rows(333, 5), 2));
  expect_equals_plain(make_problem(last_rows(333, 333), 3));
  expect_equals_plain(make_problem(last_rows(333, 64), 4, DType::kFloat32, true));
  expect_equals_plain(make_problem({0, 3, 64, 65, 127, 200, 331, 332}, 5));  // rows anywhere
  expect_equals_plain(make_problem({0, 3, 64, 65, 127, 200, 331, 332}, 6, DType::kFloat32, true));
}

// The law: masses over any partition of the keys are the same integers, whatever ranks, alignment,
// thread count, layout.
TEST(Window, AnySplitOfTheKeysGivesTheSameIntegers) {
  for (const bool documents : {false, true}) {
    for (const bool scattered : {false, true}) {
      const std::vector<int32_t> rows =
          scattered ? std::vector<int32_t>{1, 40, 64, 100, 101, 190, 300, 332} : last_rows(333, 70);
      const Problem p = make_problem(rows, 21, DType::kFloat32, documents);
      const Mask m = make_mask(p);
      const Estimate one = estimate(p, whole(p), m.bits, m.columns);
      const Rng rng(5);
      uint64_t draw = 0;
      for (int round = 0; round < 12; ++round) {
        const ThreadCountScope threads(1 + round % 3);
        std::vector<Shard> shards;
        const int64_t ranks = 1 + static_cast<int64_t>(rng.below(draw++, 5));
        if (round % 4 == 3) {
          // Striped tokens, padded to whole blocks.
          const int64_t per_rank = (p.seq_len + 64 * ranks - 1) / (64 * ranks);
          for (int64_t r = 0; r < ranks; ++r) {
            std::vector<int32_t> starts;
            for (int64_t i = 0; i < per_rank; ++i)
              starts.push_back(static_cast<int32_t>(i * 64 * ranks + r));
            shards.push_back(
                make_shard(p, starts, ranks, static_cast<int64_t>(rng.below(draw++, 16))));
          }
        } else {
          std::vector<std::vector<int32_t>> starts(ranks);
          for (int32_t block = 0; block < 6; ++block)
            starts[rng.below(draw++, ranks)].push_back(block * 64);
          for (int64_t r = 0; r < ranks; ++r) {
            shards.push_back(
                make_shard(p, starts[r], 1, static_cast<int64_t>(rng.below(draw++, 16))));
          }
        }
        EXPECT_EQ(estimate(p, shards, m.bits, m.columns), one) << round;
      }
    }
  }
}

// Long enough for one shard to be several threads' work.
TEST(Window, ManyKeysInOneShardGiveTheSameIntegersAsInSeveral) {
  Problem shape;
  shape.batch = 1;
  shape.heads = 2;
  shape.kv_heads = 1;
  shape.dim = 8;
  shape.seq_len = 7000;
  const Problem p = make_problem(last_rows(7000, 64), 31, DType::kFloat32, false, shape);
  const Mask m = make_mask(p);
  std::vector<Shard> several;
  for (int r = 0; r < 7; ++r) {
    std::vector<int32_t> starts;
    for (int32_t i = r * 64; i < 7000; i += 7 * 64) starts.push_back(i);
    several.push_back(make_shard(p, starts));
  }
  const Estimate expected = estimate(p, several, m.bits, m.columns);
  for (const int threads : {1, 2, 3}) {
    const ThreadCountScope scope(threads);
    EXPECT_EQ(estimate(p, whole(p), m.bits, m.columns), expected) << threads;
  }
}

TEST(Window, SumsAreConsistent) {
  const Problem p = make_problem(last_rows(333, 64), 9);
  const Mask m = make_mask(p);
  const Estimate e = estimate(p, whole(p), m.bits, m.columns);
  const int64_t num_blocks = (p.seq_len + 63) / 64;
  for (int64_t row = 0; row < p.batch * p.heads; ++row) {
    const auto sum = [&](const std::vector<int64_t>& x, int64_t n) {
      return std::accumulate(x.begin() + row * n, x.begin() + (row + 1) * n, int64_t{0});
    };
    const int64_t total = sum(e.columns, p.seq_len);
    EXPECT_EQ(sum(e.offsets, p.seq_len), total);
    EXPECT_EQ(sum(e.diagonals, num_blocks + 1), 64 * total);  // shares of 64, exact
    EXPECT_NEAR(static_cast<double>(total), 64.0 * kMassOne, 1e6);
    EXPECT_LE(sum(e.covered, p.rows()), total);
  }
}

// All diagonals or all columns: everything is covered, to the last unit.
TEST(Window, AFullMaskCoversAllMass) {
  const Problem p = make_problem(last_rows(333, 64), 10);
  Mask m = make_mask(p);
  const Estimate partial = estimate(p, whole(p), m.bits, m.columns);
  std::fill(m.bits.begin(), m.bits.end(), ~uint64_t{0});
  const Estimate by_diagonals = estimate(p, whole(p), m.bits, {});
  std::fill(m.bits.begin(), m.bits.end(), 0);
  for (int64_t r = 0; r < p.batch * p.heads; ++r) {
    std::iota(m.positions.begin() + r * p.seq_len, m.positions.begin() + (r + 1) * p.seq_len, 0);
    m.counts[r] = static_cast<int32_t>(p.seq_len);
  }
  const Estimate by_columns = estimate(p, whole(p), m.bits, m.columns);
  EXPECT_EQ(by_diagonals.covered, by_columns.covered);
  for (int64_t row = 0; row < p.batch * p.heads; ++row) {
    int64_t covered = 0, total = 0;
    for (int64_t r = 0; r < p.rows(); ++r) {
      covered += by_columns.covered[row * p.rows() + r];
      EXPECT_LE(partial.covered[row * p.rows() + r], by_columns.covered[row * p.rows() + r]);
    }
    for (int64_t j = 0; j < p.seq_len; ++j) total += by_columns.columns[row * p.seq_len + j];
    EXPECT_EQ(covered, total);
  }
}

// Four million keys with equal scores: the row sum is 2^62, the largest there is.
TEST(Window, FourMillionKeysDoNotOverflow) {
  Problem p;
  p.batch = p.heads = p.kv_heads = 1;
  p.dim = 8;
  p.seq_len = int64_t{1} << 22;
  p.row_positions = {static_cast<int32_t>(p.seq_len - 1)};
  const std::vector<float> zero(p.dim, 0);
  std::vector<int32_t> starts;
  for (int64_t i = 0; i < p.seq_len; i += 64) starts.push_back(static_cast<int32_t>(i));
  WindowParams w;
  w.batch = w.num_q_heads = w.num_kv_heads = w.num_rows = 1;
  w.head_dim = p.dim;
  w.softmax_scale = 1;
  w.q = {zero.data(), 0, 0, 0};
  w.row_positions = p.row_positions.data();
  w.k = {zero.data(), 0, 0, 0};  // one row of zeros, expanded
  w.num_keys = w.seq_len = p.seq_len;
  w.k_block_starts = starts.data();
  float row_max;
  int64_t row_sum = 0;
  ref::window_row_max(w, &row_max);
  EXPECT_EQ(row_max, 0);
  ref::window_row_sum(w, &row_max, &row_sum);
  EXPECT_EQ(row_sum, int64_t{1} << 62);
  std::vector<int64_t> columns(p.seq_len), diagonals(p.seq_len / 64 + 1);
  ref::window_masses(w, &row_max, &row_sum, {columns.data(), diagonals.data(), nullptr});
  EXPECT_EQ(*std::min_element(columns.begin(), columns.end()), int64_t{1} << 18);
  EXPECT_EQ(*std::max_element(columns.begin(), columns.end()), int64_t{1} << 18);
  EXPECT_EQ(std::accumulate(diagonals.begin(), diagonals.end(), int64_t{0}), kMassOne * 64);
}

TEST(Window, NamesWhatIsWrong) {
  const Problem p = make_problem(last_rows(333, 4), 1);
  const std::vector<Shard> shards = whole(p);
  std::vector<float> row_max(p.outputs());
  std::vector<int64_t> sums(p.outputs());
  const auto expect = [&](const char* named, const WindowParams& w) {
    try {
      ref::window_row_max(w, row_max.data());
      ADD_FAILURE() << named << " accepted";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(named), std::string::npos) << error.what();
    }
  };
  WindowParams w = params_of(p, shards[0]);
  w.num_q_heads = 5;
  expect("num_q_heads", w);
  w = params_of(p, shards[0]);
  w.k_block_starts = nullptr;
  expect("k_block_starts", w);
  w = params_of(p, shards[0]);
  w.row_positions = nullptr;
  expect("row_positions", w);
  const std::vector<int32_t> negative = {-1, 2, 3, 4};
  w.row_positions = negative.data();
  expect("row_positions[0]", w);
  const std::vector<int32_t> beyond = {1, 2, 3, static_cast<int32_t>(p.seq_len)};
  w.row_positions = beyond.data();
  expect("row_positions[3]", w);
  w = params_of(p, shards[0]);
  const std::vector<int32_t> positions = {3, 2}, counts(p.batch * p.heads, 2);
  EXPECT_THROW(ref::window_covered(w, row_max.data(), sums.data(), nullptr, 0,
                                   {nullptr, positions.data(), counts.data(), 2}, sums.data()),
               InvalidArgument);
}

}  // namespace
}  // namespace mtraining::kernels
