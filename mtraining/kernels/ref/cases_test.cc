// Small inputs that hurt other implementations, by hand: what the right answer is can be seen
// without an oracle.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "mtraining/base/rng.h"
#include "mtraining/kernels/attention_kernels.h"
#include "mtraining/kernels/ref/rounding.h"
#include "mtraining/testing/rounding.h"

namespace mtraining::kernels {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/// float32, contiguous, every query block listed with every key block of every source; positions
/// consecutive from `q_start` and each source's `start`.
struct Small {
  int64_t batch = 1, heads = 1, kv_heads = 1, dim = 16, queries = 1, seq_len = 1 << 20;
  int32_t q_start = 0;
  double scale = 1;
  std::vector<float> q, dout, out, lse, delta, dq;
  struct Source {
    std::vector<float> k, v, dk, dv;
    int64_t keys = 0;
    std::vector<int32_t> starts, key_blocks;
    std::vector<int64_t> row_begin;
  };
  std::vector<Source> sources;
  std::vector<int32_t> q_starts, document_start;
  std::vector<KeySource> views;

  void set_queries(int64_t n, int32_t start) {
    queries = n;
    q_start = start;
    q.assign(batch * n * heads * dim, 0);
    dout.assign(q.size(), 1);
    out.assign(q.size(), kNan);
    lse.assign(batch * heads * n, kNan);
    delta.assign(lse.size(), kNan);
    dq.assign(q.size(), 0);
    q_starts.clear();
    for (int64_t i = 0; i < n; i += 64) q_starts.push_back(static_cast<int32_t>(start + i));
  }
  void add_source(int64_t n, int32_t start, bool listed = true) {
    Source s;
    s.keys = n;
    s.k.assign(batch * n * kv_heads * dim, 0);
    s.v = s.k;
    s.dk = s.k;
    s.dv = s.k;
    for (int64_t i = 0; i < n; i += 64) s.starts.push_back(static_cast<int32_t>(start + i));
    for (int64_t row = 0; row < batch * heads; ++row) {
      for (size_t b = 0; b < q_starts.size(); ++b) {
        s.row_begin.push_back(static_cast<int64_t>(s.key_blocks.size()));
        for (size_t j = 0; j < s.starts.size() && listed; ++j)
          s.key_blocks.push_back(static_cast<int32_t>(j));
      }
      s.row_begin.push_back(static_cast<int64_t>(s.key_blocks.size()));
    }
    sources.push_back(std::move(s));
  }
  void fill(AttentionParams& p) {
    p.batch = batch;
    p.num_q_heads = heads;
    p.num_kv_heads = kv_heads;
    p.head_dim = dim;
    p.num_queries = queries;
    p.softmax_scale = scale;
    p.seq_len = seq_len;
    p.q = {q.data(), queries * heads * dim, heads * dim, dim};
    p.q_block_starts = q_starts.data();
    if (!document_start.empty()) {
      p.document_start = document_start.data();
      p.document_stride_batch = queries;
    }
    views.clear();
    for (Source& s : sources) {
      KeySource view;
      const int64_t row = kv_heads * dim;
      view.k = {s.k.data(), s.keys * row, row, dim};
      view.v = {s.v.data(), s.keys * row, row, dim};
      view.dk = {s.dk.data(), s.keys * row, row, dim};
      view.dv = {s.dv.data(), s.keys * row, row, dim};
      view.num_keys = s.keys;
      view.block_starts = s.starts.data();
      view.blocks.kind = BlockListKind::kCsr;
      view.blocks.row_begin = s.row_begin.data();
      view.blocks.key_blocks = s.key_blocks.data();
      views.push_back(view);
    }
    p.sources = views.data();
    p.num_sources = static_cast<int>(views.size());
  }
  void forward(bool first = true) {
    ForwardParams p;
    fill(p);
    p.out = {out.data(), queries * heads * dim, heads * dim, dim};
    p.lse = lse.data();
    p.first = first;
    ref::forward(p);
  }
  void backward() {
    BackwardParams p;
    fill(p);
    p.dout = {dout.data(), queries * heads * dim, heads * dim, dim};
    p.lse = lse.data();
    p.delta = delta.data();
    p.dq = {dq.data(), queries * heads * dim, heads * dim, dim};
    ref::delta(p, {{out.data(), queries * heads * dim, heads * dim, dim}, {}}, delta.data());
    ref::backward(p);
  }
};

void expect_all(const std::vector<float>& values, float expected) {
  for (size_t i = 0; i < values.size(); ++i) EXPECT_EQ(values[i], expected) << i;
}

void fill_normal(std::vector<float>& values, uint64_t seed, double scale = 1) {
  const Rng rng(seed);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(rng.normal(i) * scale);
}

// B03, B10: five queries against two keys, bottom-right causal: the first three rows are empty.
TEST(Cases, RowsThatSeeNoKeyAreZeroAndMinusInfinity) {
  Small s;
  s.set_queries(5, 0);
  s.add_source(2, 3);
  fill_normal(s.sources[0].v, 1);
  s.forward();
  s.backward();
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(s.lse[i], i < 3 ? -kInf : i == 3 ? 0.0f : std::log(2.0f)) << i;
    for (int d = 0; d < 16 && i < 3; ++d) {
      EXPECT_EQ(s.out[i * 16 + d], 0);
      EXPECT_EQ(s.dq[i * 16 + d], 0);
    }
  }
  // Merging the empty rows into what is there changes nothing, bit for bit.
  Small t = s;
  fill_normal(t.out, 9);
  fill_normal(t.lse, 10);
  const std::vector<float> out = t.out, lse = t.lse;
  t.forward(false);
  EXPECT_EQ(std::memcmp(t.out.data(), out.data(), 3 * 16 * sizeof(float)), 0);
  EXPECT_EQ(std::memcmp(t.lse.data(), lse.data(), 3 * sizeof(float)), 0);
  EXPECT_NE(t.lse[3], lse[3]);
}

// B03, B40: a head whose list is empty, in a launch where another head has keys; and no source at
// all.
TEST(Cases, AHeadWithAnEmptyListIsEmpty) {
  Small s;
  s.heads = 2;
  s.set_queries(70, 0);
  s.add_source(70, 0);
  for (int64_t i = 0; i <= 2; ++i) s.sources[0].row_begin[3 + i] = s.sources[0].row_begin[3];
  fill_normal(s.sources[0].k, 3);
  fill_normal(s.sources[0].v, 4);
  s.forward();
  s.backward();
  for (int i = 0; i < 70; ++i) {
    EXPECT_TRUE(std::isfinite(s.lse[i]));
    EXPECT_EQ(s.lse[70 + i], -kInf);
    for (int d = 0; d < 16; ++d) EXPECT_EQ(s.out[(i * 2 + 1) * 16 + d], 0);
    for (int d = 0; d < 16; ++d) EXPECT_EQ(s.dq[(i * 2 + 1) * 16 + d], 0);
  }
  Small none;
  none.set_queries(3, 5);
  none.forward();
  none.backward();
  expect_all(none.out, 0);
  expect_all(none.lse, -kInf);
  expect_all(none.dq, 0);
}

// B04: five keys, all masked: 0, not their mean 3; no gradient anywhere.
TEST(Cases, AllKeysMaskedIsNoUniformSoftmax) {
  for (const bool by_document : {false, true}) {
    Small s;
    s.set_queries(1, by_document ? 10 : 0);
    s.add_source(5, by_document ? 0 : 1);
    if (by_document) s.document_start = {5};
    for (int j = 0; j < 5; ++j)
      std::fill_n(s.sources[0].v.begin() + j * 16, 16, static_cast<float>(j + 1));
    s.forward();
    s.backward();
    expect_all(s.out, 0);
    expect_all(s.lse, -kInf);
    expect_all(s.dq, 0);
    expect_all(s.sources[0].dk, 0);
    expect_all(s.sources[0].dv, 0);
  }
}

// B05: natural logarithm throughout: 3072 keys of value 0 and 64 of value 1, all scores equal.
TEST(Cases, PartialsOfUnequalSizeMergeByNaturalLogarithm) {
  Small s;
  s.set_queries(1, 4000);
  s.add_source(3072, 0);
  s.forward(true);
  s.sources.clear();
  s.add_source(64, 3072);
  std::fill(s.sources[0].v.begin(), s.sources[0].v.end(), 1.0f);
  s.forward(false);
  EXPECT_NEAR(s.out[0], 64.0 / 3136, 1e-6);
  EXPECT_NEAR(s.lse[0], std::log(3136.0), 1e-6);
}

// B08: one key: its weight is one whatever its score, so dq and dk are exactly zero and dv is dout.
TEST(Cases, ASingleKeyHasNoScoreGradient) {
  for (const int64_t dim : {16, 64, 96, 128}) {
    for (uint64_t seed = 0; seed < 20; ++seed) {
      Small s;
      s.dim = dim;
      s.scale = 1 / std::sqrt(static_cast<double>(dim));
      s.set_queries(1, 0);
      s.add_source(1, 0);
      fill_normal(s.q, 3 * seed, 3);
      fill_normal(s.sources[0].k, 3 * seed + 1, 3);
      fill_normal(s.sources[0].v, 3 * seed + 2, 3);
      s.forward();
      s.backward();
      expect_all(s.dq, 0);
      expect_all(s.sources[0].dk, 0);
      expect_all(s.sources[0].dv, 1);
      EXPECT_EQ(s.out, s.sources[0].v);
    }
  }
}

// B10: the mask follows positions: two queries at 3 and 4 see four and five keys.
TEST(Cases, CausalityFollowsPositionsNotIndices) {
  Small s;
  s.set_queries(2, 3);
  s.add_source(5, 0);
  s.forward();
  EXPECT_NEAR(s.lse[0], std::log(4.0), 1e-6);
  EXPECT_NEAR(s.lse[1], std::log(5.0), 1e-6);
  // A listed key block that lies wholly in the future is not looked at.
  Small later;
  later.set_queries(64, 0);
  later.add_source(64, 64);
  std::fill(later.sources[0].k.begin(), later.sources[0].k.end(), kNan);
  std::fill(later.sources[0].v.begin(), later.sources[0].v.end(), kNan);
  later.forward();
  expect_all(later.out, 0);
  expect_all(later.lse, -kInf);
}

// B11: masked lanes score +500 while lse is about 0: e^500 must never appear.
TEST(Cases, HugeScoresOnMaskedLanesLeaveNoTrace) {
  for (const int first_huge : {16, 33, 64}) {
    Small s;
    s.set_queries(70, 0);
    s.add_source(70, 0);
    s.document_start.assign(70, 0);
    // Rows below first_huge see only small keys by causality; later rows belong to a document that
    // begins there.
    for (int i = first_huge; i < 70; ++i) s.document_start[i] = first_huge;
    for (int i = 0; i < 70; ++i) {
      s.q[i * 16] = i < first_huge ? 1.0f : -1.0f;
      s.sources[0].k[i * 16] = i < first_huge ? 0.01f * i : 500.0f;
      s.sources[0].v[i * 16] = static_cast<float>(i);
    }
    // For the second document the small keys are the ones that would overwhelm: -1 * 0.01 i against
    // -500.
    s.forward();
    s.backward();
    for (const std::vector<float>* x :
         {&s.out, &s.lse, &s.dq, &s.sources[0].dk, &s.sources[0].dv}) {
      for (const float value : *x) ASSERT_TRUE(std::isfinite(value)) << first_huge;
    }
    for (int i = 0; i < 70; ++i) {
      double sum = 0, out = 0;
      for (int j = i < first_huge ? 0 : first_huge; j <= i; ++j) {
        const double p = std::exp(static_cast<double>(s.q[i * 16]) * s.sources[0].k[j * 16] +
                                  (i < first_huge ? 0 : 500));
        sum += p;
        out += p * j;
      }
      EXPECT_NEAR(s.out[i * 16], out / sum, 1e-4) << i;
    }
  }
}

// B13: 70 keys, all scores 0: the mean of 70 values, not of 128.
TEST(Cases, PaddingOfTheLastBlockHasNoWeight) {
  Small s;
  s.set_queries(1, 100);
  s.add_source(70, 0);
  double mean = 0;
  for (int j = 0; j < 70; ++j) {
    std::fill_n(s.sources[0].v.begin() + j * 16, 16, static_cast<float>(j * j));
    mean += j * j / 70.0;
  }
  s.forward();
  EXPECT_NEAR(s.out[0], mean, mean * 1e-6);
  EXPECT_NEAR(s.lse[0], std::log(70.0), 1e-6);
}

// B16: the saved out, dout, delta and q of an empty row hold NaN.
TEST(Cases, AnEmptyRowContributesNothingWhateverWasSaved) {
  Small s;
  s.set_queries(66, 0);
  s.add_source(66, 2);
  fill_normal(s.q, 1);
  fill_normal(s.sources[0].k, 2);
  fill_normal(s.sources[0].v, 3);
  s.forward();
  Small clean = s;
  clean.backward();
  for (int row = 0; row < 2; ++row) {
    EXPECT_EQ(s.lse[row], -kInf);
    for (int d = 0; d < 16; ++d)
      s.out[row * 16 + d] = s.dout[row * 16 + d] = s.q[row * 16 + d] = kNan;
  }
  s.backward();
  EXPECT_EQ(s.dq, clean.dq);
  EXPECT_EQ(s.sources[0].dk, clean.sources[0].dk);
  EXPECT_EQ(s.sources[0].dv, clean.sources[0].dv);
  for (int d = 0; d < 32; ++d) EXPECT_EQ(s.dq[d], 0);
}

// B35: k and v of kv head j are constant j: query head h must see h / (H / Hk).
TEST(Cases, EveryQueryHeadReadsItsOwnKvHead) {
  for (const auto& [heads, kv_heads] :
       {std::pair{16, 2}, {32, 8}, {28, 4}, {12, 2}, {64, 8}, {7, 1}}) {
    Small s;
    s.heads = heads;
    s.kv_heads = kv_heads;
    s.batch = 2;
    s.set_queries(3, 0);
    s.add_source(3, 0);
    for (size_t i = 0; i < s.sources[0].v.size(); ++i) {
      s.sources[0].k[i] = s.sources[0].v[i] = static_cast<float>(i / 16 % kv_heads);
    }
    s.forward();
    for (size_t i = 0; i < s.out.size(); ++i) {
      ASSERT_EQ(s.out[i], static_cast<float>(static_cast<int>(i / 16 % heads) / (heads / kv_heads)))
          << heads;
    }
    // B36: with v constant, dv of kv head j is the sum over its group and rows of the weights:
    // group * sum of P.
    s.backward();
    double sum = 0;
    for (const float x : s.sources[0].dv) sum += x;
    EXPECT_NEAR(sum, 2.0 * 3 * heads * 16, 1e-3);  // every row's weights sum to 1; dout is 1
    const float group = static_cast<float>(heads / kv_heads);
    const double expected[] = {1 + 0.5 + 1.0 / 3, 0.5 + 1.0 / 3, 1.0 / 3};
    for (size_t i = 0; i < s.sources[0].dv.size(); ++i) {
      ASSERT_NEAR(s.sources[0].dv[i], group * expected[i / 16 / kv_heads % 3], 1e-4);
    }
  }
}

// B40: a rank that holds only padding, whose memory is NaN.
TEST(Cases, ARankOfPaddingAloneIsEmpty) {
  Small s;
  s.seq_len = 64;
  s.set_queries(64, 64);
  std::fill(s.q.begin(), s.q.end(), kNan);
  std::fill(s.dout.begin(), s.dout.end(), kNan);
  s.add_source(64, 0);
  fill_normal(s.sources[0].k, 1);
  s.add_source(64, 64);
  std::fill(s.sources[1].k.begin(), s.sources[1].k.end(), kNan);
  std::fill(s.sources[1].v.begin(), s.sources[1].v.end(), kNan);
  s.forward();
  s.backward();
  expect_all(s.out, 0);
  expect_all(s.lse, -kInf);
  expect_all(s.dq, 0);
  for (const auto& source : s.sources) {
    expect_all(source.dk, 0);
    expect_all(source.dv, 0);
  }
}

// B19: rows 2^30 elements apart: an offset of 8 GiB, past 32 bits in elements and in bytes.
TEST(Cases, StridesBeyondThirtyTwoBits) {
  constexpr int64_t kStride = int64_t{1} << 30, kRows = 4;
  constexpr size_t kBytes = (kRows * kStride) * sizeof(float);
  void* memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) GTEST_SKIP() << "no " << kBytes << " bytes of address space";
  float* wide = static_cast<float*>(memory);
  Small s;
  s.set_queries(kRows, 0);
  s.add_source(kRows, 0);
  fill_normal(s.q, 1);
  fill_normal(s.sources[0].k, 2);
  fill_normal(s.sources[0].v, 3);
  Small reference = s;
  reference.forward();
  reference.backward();
  // The same v and dv, rows far apart; what lies between stays untouched.
  for (int64_t j = 0; j < kRows; ++j)
    std::copy_n(s.sources[0].v.data() + j * 16, 16, wide + j * kStride);
  ForwardParams f;
  s.fill(f);
  s.views[0].v = {wide, 0, kStride, 16};
  f.out = {s.out.data(), kRows * 16, 16, 16};
  f.lse = s.lse.data();
  ref::forward(f);
  EXPECT_EQ(s.out, reference.out);
  BackwardParams b;
  s.fill(b);
  s.views[0].v = {wide, 0, kStride, 16};
  s.views[0].dv = {wide + 64, 0, kStride, 16};
  b.dout = {s.dout.data(), kRows * 16, 16, 16};
  b.lse = s.lse.data();
  b.delta = reference.delta.data();
  b.dq = {s.dq.data(), kRows * 16, 16, 16};
  ref::backward(b);
  EXPECT_EQ(s.dq, reference.dq);
  for (int64_t j = 0; j < kRows; ++j) {
    for (int d = 0; d < 16; ++d)
      EXPECT_EQ(wide[j * kStride + 64 + d], reference.sources[0].dv[j * 16 + d]);
  }
  munmap(memory, kBytes);
}

// A query block that begins inside a block of the mask: whether a column lies on a chosen diagonal
// differs from row to row.
TEST(Cases, ColumnsAreHiddenByDiagonalsRowByRowWhereQueriesStraddleBlocks) {
  Small s;
  s.set_queries(64, 96);  // positions 96 .. 159: blocks 1 and 2
  s.add_source(64, 0, false);
  fill_normal(s.sources[0].v, 5);
  const std::vector<int32_t> columns = {
      3, 40};  // block 0: diagonal 1 from block 1, diagonal 2 from block 2
  const int32_t count = 2;
  const uint64_t bits = uint64_t{1} << 1;  // diagonal 1 is chosen
  ForwardParams f;
  s.fill(f);
  s.views[0].columns = {columns.data(), columns.data(), &count, 2};
  f.diagonal_bits = &bits;
  f.diagonal_words = 1;
  f.seq_len = 160;
  f.out = {s.out.data(), 64 * 16, 16, 16};
  f.lse = s.lse.data();
  ref::forward(f);
  for (int i = 0; i < 64; ++i) {
    const bool hidden = 96 + i < 128;
    EXPECT_EQ(s.lse[i], hidden ? -kInf : std::log(2.0f)) << i;
    const float mean = (s.sources[0].v[3 * 16] + s.sources[0].v[40 * 16]) / 2;
    EXPECT_NEAR(s.out[i * 16], hidden ? 0.0f : mean, 1e-6) << i;
  }
}

// Where all of a 16-bit type's numbers, the middles between them and their neighbours go.
TEST(Cases, TheHostRoundsToTheNearestAndTiesToEven) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    for (const bool brain : {true, false}) {
      const auto widen = [&](uint16_t x) {
        return brain ? ref::from_bfloat16(x) : ref::from_float16(x);
      };
      const auto narrow = [&](float x) {
        return brain ? ref::bfloat16_bits(x) : ref::float16_bits(x);
      };
      const float x = widen(half);
      EXPECT_EQ(narrow(x), brain ? mtraining::testing::to_bf16(x) : mtraining::testing::to_fp16(x));
      if (std::isnan(x)) {
        EXPECT_TRUE(std::isnan(widen(narrow(x)))) << bits;
        continue;
      }
      ASSERT_EQ(narrow(x), half) << bits;
      const float above = widen(static_cast<uint16_t>(half + 1));
      if ((bits & 0x7FFF) == 0x7FFF || !std::isfinite(x) || !std::isfinite(above)) continue;
      const float middle = x + (above - x) / 2;
      EXPECT_EQ(narrow(middle), half & 1 ? half + 1 : half) << bits;
      EXPECT_EQ(narrow(std::nextafter(middle, x)), half) << bits;
      EXPECT_EQ(narrow(std::nextafter(middle, above)), half + 1) << bits;
    }
  }
  EXPECT_EQ(ref::float16_bits(65519.996f), 0x7BFF);
  EXPECT_EQ(ref::float16_bits(65520.0f), 0x7C00);
}

// The result in 16 bits needs no float32 rows; without any source, or with nothing to merge, it is what was there.
TEST(Cases, TheRoundedResultOfALaunchThatSeesNothing) {
  for (const bool first : {true, false}) {
    Small s;
    s.set_queries(70, 0);
    fill_normal(s.out, 5);
    std::fill(s.lse.begin(), s.lse.end(), 1.0f);
    std::vector<uint16_t> rounded(s.out.size(), 7), residual(rounded);
    ForwardParams p;
    s.fill(p);
    p.dtype = DType::kBFloat16;
    p.first = first;
    if (!first) p.out = {s.out.data(), 70 * 16, 16, 16};
    p.rounded = {rounded.data(), 70 * 16, 16, 16};
    p.residual = {residual.data(), 70 * 16, 16, 16};
    p.lse = s.lse.data();
    ref::forward(p);
    for (size_t i = 0; i < rounded.size(); ++i) {
      const float x = first ? 0.0f : s.out[i];
      const uint16_t near = mtraining::testing::to_bf16(x);
      ASSERT_EQ(rounded[i], near);
      ASSERT_EQ(residual[i], mtraining::testing::to_bf16(x - mtraining::testing::from_bf16(near)));
    }
    expect_all(s.lse, first ? -kInf : 1.0f);
  }
}

}  // namespace
}  // namespace mtraining::kernels
