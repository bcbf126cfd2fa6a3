#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "mtraining/base/check.h"
#include "mtraining/pattern/pattern.h"
#include "mtraining/pattern/pattern_cases_test.h"
#include "mtraining/testing/random.h"

namespace mtraining::pattern {
namespace {

using cases::bare;
using cases::build;
using cases::make_sequence;
using cases::same;
using cases::Sequence;
using testing::Documents;
using testing::Precision;

// ---- An independent float64 reference: A as a matrix, then the definition word by word ----

enum Membership { kOut, kAtThreshold, kIn };

// Whether each entry is among the fewest in descending order that reach p of the total and among the first `cap_low` to
// `cap_high`. An entry whose fate hangs on rounding is kAtThreshold.
std::vector<Membership> fewest(const std::vector<double>& scores, double p, int64_t cap_low,
                               int64_t cap_high) {
  const double total = std::accumulate(scores.begin(), scores.end(), 0.0), slack = 1e-5 * total;
  std::vector<Membership> member(scores.size(), kOut);
  for (size_t e = 0; e < scores.size(); ++e) {
    if (p <= 0) continue;
    // Mass and number of entries that certainly come before this one, and of those that may.
    double before = 0, perhaps = 0;
    int64_t count_before = 0, count_perhaps = 0;
    for (size_t other = 0; other < scores.size(); ++other) {
      if (other == e) continue;
      if (scores[other] == scores[e]) {  // a true tie: the lower index comes first
        if (other < e)
          before += scores[other], perhaps += scores[other], ++count_before, ++count_perhaps;
        continue;
      }
      const double near = 1e-4 * std::max(scores[other], scores[e]) + 1e-10;
      if (scores[other] > scores[e] + near) before += scores[other], ++count_before;
      if (scores[other] >= scores[e] - near) perhaps += scores[other], ++count_perhaps;
    }
    const bool surely_needed = p >= 1 || perhaps < p * total - slack;
    const bool surely_not = p < 1 && before >= p * total + slack;
    if (surely_needed && count_perhaps < cap_low)
      member[e] = kIn;
    else if (!surely_not && count_before < cap_high)
      member[e] = kAtThreshold;
  }
  return member;
}

struct Expected {
  std::vector<std::vector<Membership>> columns, diagonals;  // [B * H]
};

// Of sample b.
std::vector<int64_t> observed(const Sequence& s, const VerticalSlashOptions& options, int64_t b) {
  const int64_t n = s.seq_len;
  std::map<int64_t, int64_t> lengths;  // by first position
  for (int64_t i = 0; i < n && !s.document_starts.empty(); ++i)
    ++lengths[s.document_starts[b * n + i]];
  double longest = 0;
  for (const auto& [first, length] : lengths) longest = std::max<double>(longest, length);
  const int64_t local = 64 * (options.local_blocks - 1) + 1;  // a document that diagonals cover
  if (options.window == Window::kLast && lengths.size() > 1 && longest > local) {
    std::vector<int64_t> positions;
    for (const auto& [first, length] : lengths) {
      const auto rows = static_cast<int64_t>(std::ceil(options.last_q * length / longest));
      for (int64_t i = first + length - rows; length > local && i < first + length; ++i)
        if (i >= first) positions.push_back(i);
    }
    return positions;
  }
  const int64_t rows = std::min<int64_t>(options.last_q, n);
  std::vector<int64_t> positions;
  for (int64_t r = 1; r <= rows; ++r)
    positions.push_back(options.window == Window::kLast ? n - rows + r - 1 : r * n / rows - 1);
  return positions;
}

// Probabilities of row i over all keys.
std::vector<double> attention_row(const Sequence& s, int64_t b, int64_t h, int64_t i) {
  const int64_t g = h / (s.heads / s.kv_heads), n = s.seq_len;
  const int64_t start = s.document_starts.empty() ? 0 : s.document_starts[b * n + i];
  std::vector<double> a(n, 0);
  double top = -INFINITY, sum = 0;
  for (int64_t j = start; j <= i; ++j) {
    for (int64_t d = 0; d < s.dim; ++d)
      a[j] += s.q[((b * n + i) * s.heads + h) * s.dim + d] *
              s.k[((b * n + j) * s.kv_heads + g) * s.dim + d];
    a[j] *= s.scale();
    top = std::max(top, a[j]);
  }
  for (int64_t j = start; j <= i; ++j) sum += a[j] = std::exp(a[j] - top);
  for (int64_t j = start; j <= i; ++j) a[j] /= sum;
  return a;
}

Expected brute_force(const Sequence& s, const VerticalSlashOptions& o) {
  const int64_t n = s.seq_len, blocks = (n + 63) / 64, group = s.heads / s.kv_heads;
  Expected expected;
  std::vector<std::vector<double>> v, slash, pooled;
  for (int64_t b = 0; b < s.batch; ++b) {
    const auto rows = observed(s, o, b);
    for (int64_t h = 0; h < s.heads; ++h) {
      std::vector<double> vertical(n, 0), by_offset(n, 0), by_block(blocks + 1, 0);
      for (int64_t i : rows) {
        const std::vector<double> a = attention_row(s, b, h, i);
        for (int64_t j = 0; j <= i; ++j) {
          vertical[j] += a[j] / static_cast<double>(rows.size());
          by_offset[i - j] += a[j] / static_cast<double>(rows.size());
        }
      }
      for (int64_t offset = 0; offset < n; ++offset) {
        const double share = static_cast<double>(offset % 64) / 64;
        by_block[offset / 64] += by_offset[offset] * (1 - share);
        by_block[offset / 64 + 1] += by_offset[offset] * share;
      }
      by_block.pop_back();
      v.push_back(vertical);
      slash.push_back(by_offset);
      pooled.push_back(by_block);
    }
  }
  if (o.selection == Selection::kKvGroup) {
    for (auto* scores : {&v, &slash, &pooled}) {
      const auto own = *scores;
      for (size_t row = 0; row < own.size(); ++row) {
        std::fill((*scores)[row].begin(), (*scores)[row].end(), 0.0);
        const size_t first = row / group * group;
        for (size_t other = first; other < first + group; ++other)
          for (size_t e = 0; e < own[row].size(); ++e)
            (*scores)[row][e] += own[other][e] / static_cast<double>(group);
      }
    }
  }
  const auto no_cap = std::numeric_limits<int64_t>::max();
  for (size_t row = 0; row < v.size(); ++row) {
    const int64_t column_cap = o.max_columns.value_or(no_cap),
                  diagonal_cap = o.max_diagonals.value_or(no_cap);
    auto columns = fewest(v[row], o.p_vertical, column_cap, column_cap);
    std::vector<Membership> diagonals(blocks, kOut);
    if (o.slash_pooling == SlashPooling::kBlock) {
      diagonals = fewest(pooled[row], o.p_slash, diagonal_cap, diagonal_cap);
    } else {
      std::vector<Membership> offsets;
      if (o.slash_pooling == SlashPooling::kToken) {
        offsets = fewest(slash[row], o.p_slash, no_cap, no_cap);
      } else {
        const auto budget = fewest(pooled[row], o.p_slash, no_cap, no_cap);
        const int64_t sure = std::count(budget.begin(), budget.end(), kIn);
        offsets = fewest(slash[row], 1, sure,
                         sure + std::count(budget.begin(), budget.end(), kAtThreshold));
      }
      for (int64_t offset = 0; offset < n; ++offset) {
        for (int64_t c : {offset / 64, (offset + 63) / 64})
          if (c < blocks) diagonals[c] = std::max(diagonals[c], offsets[offset]);
      }
    }
    for (int64_t c = 0; c < std::min<int64_t>(o.local_blocks, blocks); ++c) diagonals[c] = kIn;
    const int64_t b = static_cast<int64_t>(row) / s.heads;
    for (int64_t j = 0; j < n; ++j)
      if (j - (s.document_starts.empty() ? 0 : s.document_starts[b * n + j]) < o.sink_tokens)
        columns[j] = kIn;
    expected.columns.push_back(columns);
    expected.diagonals.push_back(diagonals);
  }
  return expected;
}

// Entries at the threshold may differ; how many were open is added to `open`.
void expect_chosen(const std::vector<Membership>& expected, std::span<const int32_t> got,
                   const std::string& what, int64_t& open) {
  std::vector<bool> chosen(expected.size(), false);
  for (int32_t e : got) chosen.at(e) = true;
  for (size_t e = 0; e < expected.size(); ++e) {
    open += expected[e] == kAtThreshold;
    if (expected[e] != kAtThreshold) {
      ASSERT_EQ(chosen[e], expected[e] == kIn) << what << ", entry " << e;
    }
  }
}

void expect_brute_force(const Sequence& s, const VerticalSlashOptions& options,
                        const std::string& what) {
  const index::Index index = build(s, options);
  const Expected expected = brute_force(s, options);
  int64_t open = 0, entries = 0;
  for (int64_t row = 0; row < index.columns.rows; ++row) {
    const std::string place = concat(what, ", row ", row);
    expect_chosen(expected.columns[row], index.columns.row(row), place + " columns", open);
    expect_chosen(expected.diagonals[row], index.diagonals.row(row), place + " diagonals", open);
    entries += static_cast<int64_t>(expected.columns[row].size() + expected.diagonals[row].size());
  }
  EXPECT_LE(open, 2 * index.columns.rows + entries / 50)
      << what << ": the reference must decide nearly everything";
}

TEST(BuildVerticalSlash, IsTheDefinitionInFloat64UpToEntriesAtTheThreshold) {
  for (int64_t seq_len : {1, 50, 64, 65, 200, 700}) {
    for (Documents documents : testing::kAllDocuments) {
      if (seq_len < 200 && documents == Documents::kOnBlock) continue;
      const Sequence s = make_sequence(2, seq_len, 4, 2, Precision::kFloat32, documents);
      for (SlashPooling pooling :
           {SlashPooling::kBlock, SlashPooling::kPaper, SlashPooling::kToken}) {
        VerticalSlashOptions options = bare(0.9, pooling);
        const std::string what = concat("N ", seq_len, ", documents ", static_cast<int>(documents),
                                        ", pooling ", static_cast<int>(pooling));
        expect_brute_force(s, options, what);
        options.window = Window::kStrided;
        options.selection = Selection::kKvGroup;
        options.sink_tokens = 5;
        options.local_blocks = 2;
        expect_brute_force(s, options, what + ", strided, kv_group, forced");
      }
    }
  }
}

TEST(BuildVerticalSlash, IsTheDefinitionForEveryBudgetCapAndPrecision) {
  for (Precision precision :
       {Precision::kFloat64, Precision::kFloat32, Precision::kBFloat16, Precision::kFloat16}) {
    const Sequence s = make_sequence(1, 1000, 4, 1, precision);
    for (const auto& [p_vertical, p_slash] :
         {std::pair{0.0, 0.0}, {0.0, 0.95}, {0.95, 0.0}, {0.5, 0.7}, {0.99, 0.999}, {1.0, 1.0}}) {
      VerticalSlashOptions options = bare(0);
      options.p_vertical = p_vertical;
      options.p_slash = p_slash;
      options.last_q = 100;
      expect_brute_force(s, options, concat("p ", p_vertical, " ", p_slash));
      options.max_columns = 7;
      options.max_diagonals = 3;
      options.sink_tokens = 9;
      options.local_blocks = 4;
      expect_brute_force(s, options, concat("capped, p ", p_vertical, " ", p_slash));
    }
  }
}

TEST(BuildVerticalSlash, DoesNotDependOnRanksLayoutOrNumberingBitForBit) {
  struct Variant {
    const char* name;
    Precision precision;
    Documents documents;
    VerticalSlashOptions options;
  };
  std::vector<Variant> variants;
  VerticalSlashOptions options;  // the defaults
  variants.push_back({"defaults", Precision::kBFloat16, Documents::kOne, options});
  options.dense_threshold = 1;
  options.p_vertical = options.p_slash = 0.95;
  options.slash_pooling = SlashPooling::kToken;
  options.window = Window::kStrided;
  variants.push_back(
      {"token, strided, documents", Precision::kFloat32, Documents::kMidBlock, options});
  options.slash_pooling = SlashPooling::kPaper;
  options.selection = Selection::kKvGroup;
  options.window = Window::kLast;
  options.last_q = 100;
  options.max_columns = 6;
  options.max_diagonals = 2;
  variants.push_back({"paper, kv_group, caps", Precision::kFloat16, Documents::kOnBlock, options});
  options = bare(0.7);
  options.recall_floor = 0.8;
  options.recall_rows = 40;
  variants.push_back({"recall_floor, every token a document", Precision::kFloat64,
                      Documents::kEveryToken, options});
  variants.push_back({"recall_floor", Precision::kFloat64, Documents::kAtZero, options});
  for (const Variant& variant : variants) {
    for (int64_t seq_len : {1, 70, 515, 1000}) {
      const Sequence s = make_sequence(2, seq_len, 4, 2, variant.precision, variant.documents);
      const index::Index one = build(s, variant.options);
      for (const layout::Layout& layout : cases::all_layouts(seq_len))
        ASSERT_TRUE(same(one, build(s, variant.options, layout)))
            << variant.name << ", N " << seq_len << ", " << cases::name(layout);
    }
  }
}

TEST(BuildVerticalSlash, NearTiesComeOutTheSameEveryTimeWhateverTheThreadsAndRanks) {
  // Keys repeat with differences of 1e-7: which of them are chosen hangs on the last bits of their scores.
  Sequence s = make_sequence(1, 900, 2, 1, Precision::kFloat32);
  testing::Random random(11);
  for (int64_t j = 0; j < s.seq_len; ++j)
    for (int64_t d = 0; d < s.dim; ++d)
      s.k[j * s.dim + d] = static_cast<float>(s.k[(j % 30) * s.dim + d] *
                                              (1 + 1e-7 * static_cast<double>(random.below(3))));
  const VerticalSlashOptions options = bare(0.5);
  const index::Index first = build(s, options);
  EXPECT_GT(first.columns.counts[1], 100);
  for (int threads : {1, 2, 3}) {
    comm::run_loopback(1, [&](comm::Transport& transport) {
      const ThreadCountScope scope(threads);
      const layout::Layout layout = cases::one_rank(s.seq_len);
      const auto group = transport.open("index", {0});
      const cases::Shard shard(s, layout, 0);
      EXPECT_TRUE(same(first, build_vertical_slash(shard.local, options, *group)))
          << threads << " threads";
    });
  }
  for (const layout::Layout& layout : cases::all_layouts(s.seq_len))
    ASSERT_TRUE(same(first, build(s, options, layout))) << cases::name(layout);
}

TEST(BuildVerticalSlash, EqualKeysTieAndTheLowerPositionWins) {
  // 12 equal keys seen by one row: p = 1 takes all, p = 0.5 the first six, p = 0 none.
  Sequence s{.batch = 1,
             .seq_len = 12,
             .heads = 1,
             .kv_heads = 1,
             .dim = 16,
             .precision = Precision::kFloat32,
             .q = std::vector<double>(12 * 16, 1.0),
             .k = std::vector<double>(12 * 16, 0.25),
             .document_starts = {}};
  VerticalSlashOptions options = bare(1.0);
  options.last_q = 1;
  const auto columns = [&] {
    const index::Index index = build(s, options);
    const auto row = index.columns.row(0);
    return std::vector<int32_t>(row.begin(), row.end());
  };
  EXPECT_EQ(columns(), (std::vector<int32_t>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}));
  options.p_vertical = 0.499;
  EXPECT_EQ(columns(), (std::vector<int32_t>{0, 1, 2, 3, 4, 5}));
  options.p_vertical = 0;
  EXPECT_TRUE(columns().empty());
}

// docs/math/pattern.md
TEST(BuildVerticalSlash, TheWorkedExampleOfTheDocument) {
  Sequence s{.batch = 1,
             .seq_len = 160,
             .heads = 1,
             .kv_heads = 1,
             .dim = 8,
             .precision = Precision::kFloat32,
             .q = std::vector<double>(160 * 8, 0.0),
             .k = std::vector<double>(160 * 8, 0.0),
             .document_starts = {}};
  for (int64_t i = 0; i < 160; ++i) {
    s.q[i * 8] = std::sqrt(8.0);  // undoes softmax_scale: the score is the key's first value
    s.k[i * 8] = -60;             // exp(-60) is no mass at all
  }
  for (const auto& [key, probability] :
       {std::pair{159, 0.4}, {143, 0.2}, {95, 0.16}, {50, 0.04}, {0, 0.2}})
    s.k[key * 8] = static_cast<float>(std::log(probability));
  VerticalSlashOptions options = bare(0.85);
  options.last_q = 1;
  const auto list = [](std::span<const int32_t> row) {
    return std::vector<int32_t>(row.begin(), row.end());
  };
  const index::Index index = build(s, options);
  EXPECT_EQ(list(index.columns.row(0)), (std::vector<int32_t>{0, 95, 143, 159}));
  EXPECT_EQ(list(index.diagonals.row(0)), (std::vector<int32_t>{0, 1}));
  EXPECT_EQ(index::computed_pairs(index, 0, 0), 20544);
  options.slash_pooling = SlashPooling::kPaper;
  EXPECT_EQ(list(build(s, options).diagonals.row(0)), (std::vector<int32_t>{0, 1}));
  options.slash_pooling = SlashPooling::kToken;
  EXPECT_EQ(list(build(s, options).diagonals.row(0)), (std::vector<int32_t>{0, 1, 2}));
  options.slash_pooling = SlashPooling::kBlock;
  cases::on_ranks(s, cases::one_rank(160),
                  [&](const LocalAttention& local, comm::Communicator& group) {
                    EXPECT_NEAR(measure_recall(local, options, index, group, 1).window, 0.96, 1e-6);
                  });
  options.dense_threshold = 0.8;
  EXPECT_EQ(build(s, options).dense_heads[0], 1);
}

TEST(BuildVerticalSlash, WithoutBudgetDiagonalZeroRemains) {
  const Sequence s = make_sequence(1, 300, 2, 1, Precision::kFloat32);
  VerticalSlashOptions options = bare(0);
  for (SlashPooling pooling : {SlashPooling::kBlock, SlashPooling::kPaper, SlashPooling::kToken}) {
    options.slash_pooling = pooling;
    for (const auto& caps : {std::optional<int64_t>(), std::optional<int64_t>(0)}) {
      options.max_columns = options.max_diagonals = caps;
      const index::Index index = build(s, options);
      for (int64_t row = 0; row < 2; ++row) {
        EXPECT_EQ(index.diagonals.counts[row], 1);
        EXPECT_EQ(index.diagonals.row(row)[0], 0);
        EXPECT_EQ(index.columns.counts[row], 0);
      }
      EXPECT_EQ(index.caps_hit, 0) << "there was nothing to cut";
    }
  }
}

TEST(BuildVerticalSlash, CapsCutTheChoiceAndNotWhatIsForcedAndAreCounted) {
  const Sequence s = make_sequence(1, 1500, 4, 2, Precision::kFloat32);
  for (SlashPooling pooling : {SlashPooling::kBlock, SlashPooling::kPaper, SlashPooling::kToken}) {
    VerticalSlashOptions options = bare(0.95, pooling);
    const index::Index free = build(s, options);
    options.max_columns = 20;
    options.max_diagonals = 4;
    options.sink_tokens = 64;
    options.local_blocks = 3;
    const index::Index capped = build(s, options);
    int64_t cut = 0;
    for (int64_t row = 0; row < 4; ++row) {
      const auto columns = capped.columns.row(row), diagonals = capped.diagonals.row(row);
      cut += free.columns.counts[row] > 20 || free.diagonals.counts[row] > 4;
      EXPECT_LE(columns.size(), 64u + 20);
      EXPECT_LE(diagonals.size(), 3u + 4);
      for (int32_t j = 0; j < 64; ++j) EXPECT_EQ(columns[j], j);
      for (int32_t c = 0; c < 3; ++c) EXPECT_EQ(diagonals[c], c);
    }
    EXPECT_EQ(capped.caps_hit, cut);
    EXPECT_GT(cut, 0);
    // Each cap counts by itself.
    int64_t cut_columns = 0, cut_diagonals = 0;
    for (int64_t row = 0; row < 4; ++row) {
      cut_columns += free.columns.counts[row] > 20;
      cut_diagonals += free.diagonals.counts[row] > 4;
    }
    options.max_diagonals.reset();
    EXPECT_EQ(build(s, options).caps_hit, cut_columns);
    options.max_columns.reset();
    options.max_diagonals = 4;
    EXPECT_EQ(build(s, options).caps_hit, cut_diagonals);
    EXPECT_GT(cut_columns, 0);
    EXPECT_GT(cut_diagonals, 0);
    options.max_columns = 1500;
    options.max_diagonals = 24;
    EXPECT_EQ(build(s, options).caps_hit, 0);
  }
}

TEST(BuildVerticalSlash, AHeadThatCostsTheThresholdGoesDenseAndIsFlagged) {
  const Sequence s = make_sequence(2, 1100, 8, 2, Precision::kFloat32);
  VerticalSlashOptions options = bare(0.95);
  const index::Index off = build(s, options);
  const int64_t blocks = 18;
  int dense = 0;
  for (double threshold : {0.3, 0.8}) {
    options.dense_threshold = threshold;
    const index::Index on = build(s, options);
    for (int64_t row = 0; row < 16; ++row) {
      // Counted from the words: blocks of the mask whole, and columns per query block where no diagonal has them already.
      std::set<int32_t> diagonals(off.diagonals.row(row).begin(), off.diagonals.row(row).end());
      double pairs = 0;
      for (int64_t qb = 0; qb < blocks; ++qb) {
        for (int32_t c : diagonals) pairs += c <= qb ? 64 * 64 : 0;
        for (int32_t j : off.columns.row(row))
          pairs += j / 64 <= qb && !diagonals.contains(static_cast<int32_t>(qb - j / 64)) ? 64 : 0;
      }
      const bool expected = pairs >= threshold * 64 * 64 * blocks * (blocks + 1) / 2;
      EXPECT_EQ(on.dense_heads[row], expected) << "row " << row << ", pairs " << pairs;
      dense += expected;
      if (expected) {
        EXPECT_EQ(on.columns.counts[row], 0);
        EXPECT_EQ(on.diagonals.counts[row], blocks);
      } else {
        EXPECT_EQ(on.columns.counts[row], off.columns.counts[row]);
        EXPECT_EQ(on.diagonals.counts[row], off.diagonals.counts[row]);
      }
    }
  }
  EXPECT_GT(dense, 3);
  EXPECT_LT(dense, 29);
}

TEST(BuildVerticalSlash, EachDocumentsFirstTokensAreColumns) {
  const Sequence s = make_sequence(2, 500, 2, 2, Precision::kFloat32, Documents::kMidBlock);
  VerticalSlashOptions options = bare(0);
  options.sink_tokens = 3;
  const index::Index index = build(s, options);
  for (int64_t b = 0; b < 2; ++b) {
    std::vector<int32_t> expected;
    for (int32_t first : {int32_t{0}, static_cast<int32_t>(37 + b), static_cast<int32_t>(187 + b),
                          static_cast<int32_t>(337 + b), static_cast<int32_t>(487 + b)})
      for (int32_t j = 0; j < 3; ++j) expected.push_back(first + j);
    for (int64_t h = 0; h < 2; ++h) {
      const auto row = index.columns.row(b * 2 + h);
      EXPECT_EQ(std::vector<int32_t>(row.begin(), row.end()), expected);
    }
  }
}

TEST(BuildVerticalSlash, AGroupSharesOneIndex) {
  const Sequence s = make_sequence(2, 800, 6, 2, Precision::kFloat32);
  VerticalSlashOptions options;
  options.selection = Selection::kKvGroup;
  options.recall_floor = 0.9;
  const index::Index index = build(s, options), own = build(s, VerticalSlashOptions{});
  for (int64_t row = 0; row < 12; ++row) {
    const auto a = index.columns.row(row), b = index.columns.row(row / 3 * 3);
    EXPECT_TRUE(std::equal(a.begin(), a.end(), b.begin(), b.end()));
    const auto c = index.diagonals.row(row), d = index.diagonals.row(row / 3 * 3);
    EXPECT_TRUE(std::equal(c.begin(), c.end(), d.begin(), d.end()));
    EXPECT_EQ(index.dense_heads[row], index.dense_heads[row / 3 * 3]);
  }
  EXPECT_FALSE(same(index, own));
}

// ---- Faults of the input ----

// What each rank threw.
std::vector<std::string> refusals(const Sequence& s, const layout::Layout& layout,
                                  const VerticalSlashOptions& options = {}) {
  std::vector<std::string> texts(layout.cp_size());
  cases::on_ranks(s, layout, [&](const LocalAttention& local, comm::Communicator& group) {
    try {
      build_vertical_slash(local, options, group);
    } catch (const Error& error) {
      texts[local.cp_rank] = error.what();
    }
  });
  return texts;
}

TEST(BuildVerticalSlash, ValuesThatAreNotFiniteAreRefusedOnEveryRankAlike) {
  for (Precision precision :
       {Precision::kFloat64, Precision::kFloat32, Precision::kBFloat16, Precision::kFloat16}) {
    for (double bad : {static_cast<double>(NAN), static_cast<double>(INFINITY),
                       -static_cast<double>(INFINITY), 0x1p50}) {
      if (precision == Precision::kFloat16 && bad == 0x1p50) continue;
      const Sequence good = make_sequence(2, 700, 2, 1, precision);
      const layout::Layout layout(
          {.kind = layout::LayoutKind::kBlockStriped, .seq_len = 700, .cp_size = 4, .stripe = 64});
      Sequence s = good;
      s.k[(700 + 130) * s.dim + 3] = bad;
      s.k[(700 + 600) * s.dim + 3] = bad;
      for (const std::string& text : refusals(s, layout))
        EXPECT_EQ(text,
                  "k: expected finite values below 2^50, got NaN, inf or a larger one at sample 1, "
                  "position 130");
      s = good;
      s.q[(650 * 2 + 1) * s.dim] = bad;
      for (const std::string& text : refusals(s, layout))
        EXPECT_EQ(text,
                  "q: expected finite values below 2^50, got NaN, inf or a larger one at sample 0, "
                  "head 1, position 650");
      s = good;
      s.q[(600 * 2 + 1) * s.dim] = bad;  // a row that is not observed chooses nothing
      EXPECT_TRUE(same(build(good, {}, layout), build(s, {}, layout)));
    }
  }
}

TEST(BuildVerticalSlash, ADocumentThatStartsAfterItsTokenIsRefusedOnEveryRank) {
  Sequence s = make_sequence(2, 300, 2, 1, Precision::kFloat32, Documents::kMidBlock);
  for (int32_t bad : {-1, 201}) {
    s.document_starts[300 + 200] = bad;
    for (const std::string& text : refusals(s, layout::Layout({.seq_len = 300, .cp_size = 2})))
      EXPECT_EQ(text, concat("document_starts: expected a position in [0, 200] at sample 1, "
                             "position 200, got ",
                             bad));
  }
}

TEST(BuildVerticalSlash, LargeFiniteValuesAndNegativeZerosAreFine) {
  Sequence s = make_sequence(1, 300, 2, 1, Precision::kFloat32);
  for (size_t i = 0; i < s.q.size(); i += 7) s.q[i] = -0.0;
  s.k[5 * s.dim] = 0x1.8p49;
  s.q[(299 * 2) * s.dim] = -0x1p49;
  const index::Index one = build(s, bare(0.9));
  for (const layout::Layout& layout : cases::all_layouts(300))
    ASSERT_TRUE(same(one, build(s, bare(0.9), layout))) << cases::name(layout);
}

TEST(BuildVerticalSlash, StripedAndWrongOptionsAreRefusedBeforeAnyExchange) {
  const Sequence s = make_sequence(1, 300, 2, 1, Precision::kFloat32);
  const layout::Layout striped(
      {.kind = layout::LayoutKind::kStriped, .seq_len = 300, .cp_size = 2});
  for (const std::string& text : refusals(s, striped))
    EXPECT_NE(text.find("layout striped"), std::string::npos) << text;
  VerticalSlashOptions options;
  options.p_slash = 2;
  const layout::Layout layout({.seq_len = 300, .cp_size = 2});
  for (const std::string& text : refusals(s, layout, options))
    EXPECT_NE(text.find("p_slash"), std::string::npos) << text;
  cases::on_ranks(s, layout, [&](const LocalAttention& local, comm::Communicator& group) {
    LocalAttention wrong = local;
    wrong.num_kv_heads = 3;
    EXPECT_THROW(build_vertical_slash(wrong, {}, group), InvalidArgument);
    wrong = local;
    wrong.cp_rank = 1 - local.cp_rank;
    EXPECT_THROW(build_vertical_slash(wrong, {}, group), InvalidArgument);
    EXPECT_EQ(group.counters().calls, 0);
  });
}

}  // namespace
}  // namespace mtraining::pattern
