// Also counts what the pattern allocates.
#include <gtest/gtest.h>

#include <cmath>
#include <iostream>
#include <set>

#include "mtraining/base/check.h"
#include "mtraining/pattern/observation.h"
#include "mtraining/pattern/pattern.h"
#include "mtraining/pattern/pattern_cases_test.h"
#include "mtraining/testing/allocation_counter.h"

namespace mtraining::pattern {
namespace {

using cases::bare;
using cases::build;
using cases::make_sequence;
using cases::Sequence;
using testing::Documents;
using testing::Precision;

Recall measure(const Sequence& s, const VerticalSlashOptions& options, const index::Index& index,
               const layout::Layout& layout, uint64_t seed = 5) {
  std::vector<Recall> measured(layout.cp_size());
  cases::on_ranks(s, layout, [&](const LocalAttention& local, comm::Communicator& group) {
    measured[local.cp_rank] = measure_recall(local, options, index, group, seed);
  });
  for (const Recall& recall : measured) {
    EXPECT_EQ(recall.window, measured[0].window);
    EXPECT_EQ(recall.by_head, measured[0].by_head);
  }
  return measured[0];
}

// Share of the attention of these rows that the index covers, in float64 from the mask.
std::vector<double> exact_recall(const Sequence& s, const index::Index& index,
                                 const std::vector<std::vector<int32_t>>& rows_of_sample) {
  const int64_t n = s.seq_len;
  const std::vector<uint8_t> mask = index::mask(index, s.document_starts);
  std::vector<double> recall;
  for (int64_t b = 0; b < s.batch; ++b) {
    const std::vector<int32_t>& rows = rows_of_sample[b];
    for (int64_t h = 0; h < s.heads; ++h) {
      double mean = 0;
      for (int64_t i : rows) {
        const int64_t g = h / (s.heads / s.kv_heads),
                      start = s.document_starts.empty() ? 0 : s.document_starts[b * n + i];
        double all = 0, covered = 0, top = -INFINITY;
        std::vector<double> score(n);
        for (int64_t j = start; j <= i; ++j) {
          double dot = 0;
          for (int64_t d = 0; d < s.dim; ++d)
            dot += s.q[((b * n + i) * s.heads + h) * s.dim + d] *
                   s.k[((b * n + j) * s.kv_heads + g) * s.dim + d];
          top = std::max(top, score[j] = dot * s.scale());
        }
        for (int64_t j = start; j <= i; ++j) {
          const double weight = std::exp(score[j] - top);
          all += weight;
          if (mask[((b * s.heads + h) * n + i) * n + j] != 0) covered += weight;
        }
        mean += covered / all / static_cast<double>(rows.size());
      }
      recall.push_back(mean);
    }
  }
  return recall;
}

TEST(SampledPositions, AreDistinctOutsideTheWindowSpreadAndSeeded) {
  VerticalSlashOptions options;
  for (Window window_kind : {Window::kLast, Window::kStrided}) {
    options.window = window_kind;
    for (int64_t seq_len : {1, 64, 65, 66, 300, 1000, 20000}) {
      const std::vector<int32_t> window = window_positions(options, seq_len);
      EXPECT_EQ(static_cast<int64_t>(window.size()), std::min<int64_t>(64, seq_len));
      EXPECT_EQ(window.back(), seq_len - 1);
      const std::vector<int32_t> rows = sampled_positions(window, seq_len, 256, 3);
      EXPECT_EQ(static_cast<int64_t>(rows.size()),
                std::min<int64_t>(256, seq_len - static_cast<int64_t>(window.size())));
      std::set<int32_t> all(window.begin(), window.end());
      EXPECT_EQ(all.size(), window.size());
      for (int32_t row : rows) {
        EXPECT_TRUE(row >= 0 && row < seq_len);
        EXPECT_TRUE(all.insert(row).second) << row;
      }
      if (seq_len == 20000) {
        for (size_t i = 0; i < rows.size(); ++i)
          EXPECT_NEAR(rows[i], (static_cast<double>(i) + 0.5) * 20000 / 256, 220);
        EXPECT_EQ(rows, sampled_positions(window, seq_len, 256, 3));
        EXPECT_NE(rows, sampled_positions(window, seq_len, 256, 4));
      }
    }
  }
}

TEST(MeasureRecall, IsTheShareOfAttentionUnderTheMask) {
  for (int64_t seq_len : {1, 65, 400}) {
    for (Documents documents : {Documents::kOne, Documents::kMidBlock, Documents::kEveryToken}) {
      const Sequence s = make_sequence(2, seq_len, 4, 2, Precision::kBFloat16, documents);
      VerticalSlashOptions options = bare(0.6);
      options.recall_rows = 100;
      const index::Index index = build(s, options);
      std::vector<std::vector<int32_t>> window, sampled;
      for (int64_t b = 0; b < 2; ++b) {
        const int32_t* starts =
            s.document_starts.empty() ? nullptr : &s.document_starts[b * seq_len];
        window.push_back(window_positions(options, seq_len, starts));
        sampled.push_back(sampled_positions(window[b], seq_len, 100, 5));
        if (sampled[b].empty()) sampled[b] = window[b];
      }
      const Recall one = measure(s, options, index, cases::one_rank(seq_len));
      const std::vector<double> on_window = exact_recall(s, index, window);
      const std::vector<double> elsewhere = exact_recall(s, index, sampled);
      double mean = 0, mean_elsewhere = 0, worst = 1;
      for (size_t row = 0; row < on_window.size(); ++row) {
        EXPECT_NEAR(one.by_head[row], elsewhere[row], 1e-5);
        mean += on_window[row] / static_cast<double>(on_window.size());
        mean_elsewhere += elsewhere[row] / static_cast<double>(on_window.size());
        worst = std::min(worst, elsewhere[row]);
      }
      EXPECT_NEAR(one.window, mean, 1e-5);
      EXPECT_NEAR(one.sampled, mean_elsewhere, 1e-5);
      EXPECT_NEAR(one.sampled_worst, worst, 1e-5);
      for (const layout::Layout& layout : cases::all_layouts(seq_len)) {
        const Recall same = measure(s, options, index, layout);
        ASSERT_EQ(same.window, one.window) << cases::name(layout);
        ASSERT_EQ(same.by_head, one.by_head) << cases::name(layout);
      }
    }
  }
}

std::vector<int32_t> starts_of(const std::vector<int64_t>& lengths) {
  std::vector<int32_t> starts;
  for (const int64_t length : lengths)
    starts.insert(starts.end(), length, static_cast<int32_t>(starts.size()));
  return starts;
}

TEST(WindowPositions, AreTheLastRowsOfEachDocumentInProportionToItsLength) {
  VerticalSlashOptions options;
  const auto by_document = [&](const std::vector<int64_t>& lengths) {
    const std::vector<int32_t> starts = starts_of(lengths);
    const auto n = static_cast<int64_t>(starts.size());
    const std::vector<int32_t> window = window_positions(options, n, starts.data());
    EXPECT_LE(static_cast<int64_t>(window.size()), max_window_rows(options));
    std::vector<int64_t> rows;
    size_t at = 0;
    int64_t end = 0;
    for (const int64_t length : lengths) {
      rows.push_back(0);
      end += length;
      while (at < window.size() && window[at] < end) ++rows.back(), ++at;
      for (int64_t i = 0; i < rows.back(); ++i)  // its very last rows
        EXPECT_EQ(window[at - 1 - i], end - 1 - i);
    }
    EXPECT_EQ(at, window.size());
    return rows;
  };
  using Rows = std::vector<int64_t>;
  EXPECT_EQ(by_document({1000, 1000, 1000}), Rows({64, 64, 64}));
  EXPECT_EQ(by_document({4096, 1024, 2048, 300}), Rows({64, 16, 32, 5}));
  EXPECT_EQ(by_document({3000, 65, 66, 20}), Rows({64, 0, 2, 0}));  // covered by diagonals 0 and 1
  EXPECT_EQ(by_document({500}), Rows({64}));
  EXPECT_EQ(by_document({30, 20, 40}), Rows({4, 20, 40}));  // all covered: one document's rule
  options.local_blocks = 1;
  EXPECT_EQ(by_document({40, 20, 1}), Rows({40, 20, 0}));
  // Too many documents: the longest keep theirs in proportion.
  std::vector<int64_t> lengths(5000, 70);
  lengths[17] = lengths[4000] = 35000;
  const Rows rows = by_document(lengths);
  int64_t total = 0;
  for (const int64_t r : rows) total += r;
  EXPECT_EQ(total, max_window_rows(options));
  EXPECT_GT(rows[17], 30);
  EXPECT_EQ(rows[17], rows[4000]);
  EXPECT_EQ(rows[0], 1);
  options.window = Window::kStrided;
  EXPECT_EQ(by_document({64}), Rows({64}));
  const std::vector<int32_t> starts = starts_of({900, 100});
  EXPECT_EQ(window_positions(options, 1000, starts.data()), window_positions(options, 1000));
}

/// Documents with verticals and bands of their own, one behind another.
Sequence pack(const std::vector<int64_t>& lengths) {
  Sequence packed{.batch = 1,
                  .seq_len = 0,
                  .heads = 8,
                  .kv_heads = 2,
                  .dim = 16,
                  .precision = Precision::kFloat32,
                  .q = {},
                  .k = {},
                  .document_starts = starts_of(lengths)};
  for (size_t d = 0; d < lengths.size(); ++d) {
    const Sequence s =
        make_sequence(1, lengths[d], 8, 2, Precision::kFloat32, Documents::kOne, 40 + d);
    packed.q.insert(packed.q.end(), s.q.begin(), s.q.end());
    packed.k.insert(packed.k.end(), s.k.begin(), s.k.end());
    packed.seq_len += lengths[d];
  }
  return packed;
}

// docs/math/pattern.md, "Packed documents"
TEST(MeasureRecall, OfPackedDocumentsNeedsRowsOfEachDocument) {
  for (const std::vector<int64_t>& lengths :
       {std::vector<int64_t>{1500, 400, 900, 1200}, {600, 2000, 150, 90, 700, 460}}) {
    const Sequence s = pack(lengths);
    VerticalSlashOptions options = bare(0.9);
    const auto recall_of = [&](const Sequence& observed, const VerticalSlashOptions& chosen_by) {
      const index::Index index = build(observed, chosen_by);
      const Recall recall = measure(s, options, index, cases::one_rank(s.seq_len));
      std::cout << "  density " << index::density(index, s.document_starts) << ", recall elsewhere "
                << recall.sampled << ", worst head " << recall.sampled_worst << '\n';
      return recall.sampled;
    };
    // The last rows of the sample: as if nothing before its last document were worth observing.
    Sequence last = s;
    for (int64_t i = 0; i < s.seq_len - lengths.back(); ++i)
      last.document_starts[i] = static_cast<int32_t>(i);
    const double last_document = recall_of(last, options);
    const double each_document = recall_of(s, options);
    options.window = Window::kStrided;
    const double strided = recall_of(s, options);
    EXPECT_GT(each_document, last_document + 0.1);
    EXPECT_GT(each_document, 0.85);
    EXPECT_GT(each_document, strided - 0.05);
  }
}

TEST(MeasureRecall, OfEverythingIsOneAndOfTheChoiceIsAtLeastPOnTheWindow) {
  const Sequence s = make_sequence(1, 900, 8, 2, Precision::kFloat32);
  for (double p : {0.5, 0.9, 0.95}) {
    const VerticalSlashOptions options = bare(p);
    const Recall recall = measure(s, options, build(s, options), cases::one_rank(900));
    EXPECT_GE(recall.window, p);
    EXPECT_GE(recall.sampled, p - 0.05) << "structured input: rows elsewhere look alike";
    EXPECT_LE(recall.sampled_worst, recall.sampled);
  }
  const Recall all = measure(s, {}, index::dense_index(1, 8, 900), cases::one_rank(900));
  EXPECT_NEAR(all.window, 1, 1e-9);
  EXPECT_NEAR(all.sampled_worst, 1, 1e-9);
}

TEST(MeasureRecall, RefusesAnIndexOfAnotherShape) {
  const Sequence s = make_sequence(1, 100, 2, 1, Precision::kFloat32);
  EXPECT_THROW(measure(s, {}, index::dense_index(1, 2, 101), cases::one_rank(100)),
               InvalidArgument);
  EXPECT_THROW(measure(s, {}, index::dense_index(1, 1, 100), cases::one_rank(100)),
               InvalidArgument);
}

TEST(RecallFloor, HeadsBelowItGoDenseAndNoOthers) {
  const Sequence s = make_sequence(1, 900, 8, 2, Precision::kFloat32);
  VerticalSlashOptions options = bare(0.5);
  options.recall_rows = 200;
  const index::Index free = build(s, options);
  std::vector<double> recall = exact_recall(
      s, free, {sampled_positions(window_positions(options, 900), 900, 200, 0x6d7472)});
  std::vector<double> sorted = recall;
  std::sort(sorted.begin(), sorted.end());
  options.recall_floor = (sorted[3] + sorted[4]) / 2;
  ASSERT_GT(sorted[4] - sorted[3], 1e-3);
  const index::Index floored = build(s, options);
  for (int64_t row = 0; row < 8; ++row) {
    const bool dense = recall[row] < options.recall_floor;
    EXPECT_EQ(floored.dense_heads[row], dense) << row;
    EXPECT_EQ(floored.diagonals.counts[row], dense ? 15 : free.diagonals.counts[row]);
    EXPECT_EQ(floored.columns.counts[row], dense ? 0 : free.columns.counts[row]);
  }
}

// Four times the sequence, four times the memory: nothing grows with its square.
TEST(PatternMemory, GrowsWithTheSequenceAndNotWithItsSquare) {
  for (SlashPooling pooling : {SlashPooling::kBlock, SlashPooling::kToken}) {
    std::vector<int64_t> bytes;
    for (int64_t seq_len : {8192, 32768}) {
      const Sequence s = make_sequence(1, seq_len, 2, 1, Precision::kFloat32);
      const layout::Layout layout = cases::one_rank(seq_len);
      const auto single = comm::make_single();
      const auto group = single->open("index", {0});
      const cases::Shard shard(s, layout, 0);
      const ThreadCountScope one_thread(1);
      VerticalSlashOptions options = bare(0.9, pooling);
      options.recall_floor = 0.01;
      const int64_t before = testing::allocated_bytes;
      build_vertical_slash(shard.local, options, *group);
      bytes.push_back(testing::allocated_bytes - before);
    }
    EXPECT_LT(bytes[1], 5 * bytes[0]) << bytes[0] << " and " << bytes[1] << " bytes";
    EXPECT_LT(bytes[1], 2 * 32768 * 128) << "per head and token";
  }
}

}  // namespace
}  // namespace mtraining::pattern
