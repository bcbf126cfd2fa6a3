// Patterns that choose key blocks one by one, each against its own definition in float64, and fixed budgets.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

#include "mtraining/base/check.h"
#include "mtraining/index/step_index.h"
#include "mtraining/index/step_pairs.h"
#include "mtraining/pattern/pattern.h"
#include "mtraining/pattern/pattern_cases_test.h"

namespace mtraining::pattern {
namespace {

using cases::make_sequence;
using cases::Sequence;
using testing::Documents;
using testing::Precision;

using Build = std::function<index::Index(const LocalAttention&, comm::Communicator&)>;

bool same_blocks(const index::Index& a, const index::Index& b) {
  return a.blocks.row_begin == b.blocks.row_begin && a.blocks.key_blocks == b.blocks.key_blocks;
}

/// Rank 0's; all ranks' must be the same.
index::Index build_on(const Sequence& s, const layout::Layout& layout, const Build& build) {
  std::vector<index::Index> built(layout.cp_size());
  cases::on_ranks(s, layout, [&](const LocalAttention& local, comm::Communicator& group) {
    built[local.cp_rank] = build(local, group);
  });
  for (const index::Index& other : built) EXPECT_TRUE(same_blocks(other, built[0]));
  return built[0];
}

int64_t start_of(const Sequence& s, int64_t b, int64_t i) {
  return s.document_starts.empty() ? 0 : s.document_starts[b * s.seq_len + i];
}
double q_at(const Sequence& s, int64_t b, int64_t i, int64_t h, int64_t d) {
  return i < s.seq_len ? s.q[((b * s.seq_len + i) * s.heads + h) * s.dim + d] : 0;
}
double k_at(const Sequence& s, int64_t b, int64_t j, int64_t h, int64_t d) {
  const int64_t g = h / (s.heads / s.kv_heads);
  return j < s.seq_len ? s.k[((b * s.seq_len + j) * s.kv_heads + g) * s.dim + d] : 0;
}

// The scores of the candidates must tell chosen from not chosen, but for differences in the last bits of float64.
void expect_best(const std::vector<double>& score, const std::set<int64_t>& candidates,
                 const std::set<int64_t>& chosen, const std::string& what) {
  double worst_chosen = INFINITY, best_left = -INFINITY;
  for (const int64_t c : candidates)
    (chosen.contains(c) ? worst_chosen : best_left) =
        chosen.contains(c) ? std::min(worst_chosen, score[c]) : std::max(best_left, score[c]);
  EXPECT_GE(worst_chosen, best_left - 1e-9 * (1 + std::abs(best_left))) << what;
}

TEST(Moba, EachQueryBlockTakesItsChunkAndTheBestBefore) {
  for (const int64_t seq_len : {1, 64, 700, 1100}) {
    for (const Documents documents : {Documents::kOne, Documents::kMidBlock}) {
      const Sequence s = make_sequence(2, seq_len, 4, 2, Precision::kFloat32, documents);
      for (const int64_t chunk : {64, 128, 192}) {
        for (const int64_t top_k : {1, 2, 3, 100}) {
          const MobaOptions options{chunk, top_k};
          const index::Index index = build_on(
              s, cases::one_rank(seq_len),
              [&](const auto& local, auto& group) { return build_moba(local, options, group); });
          for (int64_t b = 0; b < 2; ++b) {
            for (int64_t h = 0; h < 4; ++h) {
              for (int64_t block = 0; block < index.num_blocks(); ++block) {
                const int64_t own = block * 64 / chunk, first = start_of(s, b, block * 64) / chunk;
                std::vector<double> gate(own + 1, 0);
                std::set<int64_t> candidates, chosen;
                for (int64_t c = first; c < own; ++c) {
                  candidates.insert(c);
                  for (int64_t d = 0; d < s.dim; ++d) {
                    double mean_q = 0, mean_k = 0;
                    const int64_t real = std::min<int64_t>(64, seq_len - block * 64);
                    for (int64_t t = 0; t < real; ++t) mean_q += q_at(s, b, block * 64 + t, h, d);
                    for (int64_t t = 0; t < chunk; ++t) mean_k += k_at(s, b, c * chunk + t, h, d);
                    gate[c] +=
                        mean_q / static_cast<double>(real) * mean_k / static_cast<double>(chunk);
                  }
                }
                std::set<int64_t> blocks;
                for (const int64_t k :
                     index.blocks.row(index.row(b, h), block, index.num_blocks())) {
                  chosen.insert(k * 64 / chunk);
                  blocks.insert(k);
                }
                std::set<int64_t> whole;
                for (const int64_t c : chosen)
                  for (int64_t k = c * chunk / 64; k < (c + 1) * chunk / 64 && k <= block; ++k)
                    whole.insert(k);
                ASSERT_EQ(blocks, whole) << "chunks are whole, the own one up to the query block";
                ASSERT_TRUE(chosen.contains(own));
                ASSERT_EQ(static_cast<int64_t>(chosen.size()),
                          std::min<int64_t>(top_k, static_cast<int64_t>(candidates.size()) + 1));
                expect_best(gate, candidates, chosen, concat("N ", seq_len, " block ", block));
              }
            }
          }
        }
      }
    }
  }
}

TEST(XAttention, EachQueryBlockTakesTheFewestBestBlocksThatHoldTheThreshold) {
  for (const int64_t seq_len : {1, 130, 700, 1000}) {
    for (const Documents documents : {Documents::kOne, Documents::kMidBlock}) {
      const Sequence s = make_sequence(2, seq_len, 4, 2, Precision::kBFloat16, documents);
      for (const XAttentionOptions& options :
           {XAttentionOptions{128, 16, 0.9}, {64, 8, 0.6}, {192, 64, 0.97}, {128, 16, 0.0}}) {
        const index::Index index =
            build_on(s, cases::one_rank(seq_len), [&](const auto& local, auto& group) {
              return build_xattention(local, options, group);
            });
        for (int64_t b = 0; b < 2; ++b) {
          for (int64_t h = 0; h < 4; ++h) {
            for (int64_t qb = 0; qb * options.block < seq_len; ++qb) {
              std::vector<double> score(qb + 1, 0);
              for (int64_t i = qb * options.block;
                   i < std::min<int64_t>((qb + 1) * options.block, seq_len); i += options.stride) {
                std::vector<double> p(i / options.stride + 1, 0);
                double sum = 0;
                for (size_t j = 0; j < p.size(); ++j) {
                  if (static_cast<int64_t>(j + 1) * options.stride <=
                      start_of(s, b, i) / options.stride * options.stride)
                    continue;
                  double dot = 0;
                  for (int64_t t = 0; t < options.stride; ++t)
                    for (int64_t d = 0; d < s.dim; ++d)
                      dot += q_at(s, b, i + options.stride - 1 - t, h, d) *
                             k_at(s, b, static_cast<int64_t>(j) * options.stride + t, h, d);
                  sum += p[j] = std::exp(dot * s.scale() / options.stride);
                }
                for (size_t j = 0; j < p.size(); ++j)
                  score[static_cast<int64_t>(j) * options.stride / options.block] += p[j] / sum;
              }
              const int64_t sink = start_of(s, b, qb * options.block) / options.block;
              std::set<int64_t> chosen, candidates;
              const int64_t wide = options.block / 64;
              for (int64_t row = qb * wide; row < std::min((qb + 1) * wide, index.num_blocks());
                   ++row) {
                std::set<int64_t> blocks, whole;
                for (const int64_t k : index.blocks.row(index.row(b, h), row, index.num_blocks()))
                  blocks.insert(k);
                for (const int64_t k : blocks) chosen.insert(k / wide);
                for (const int64_t c : chosen)
                  for (int64_t k = c * wide; k < (c + 1) * wide && k <= row; ++k) whole.insert(k);
                ASSERT_EQ(blocks, whole);
              }
              ASSERT_TRUE(chosen.contains(sink) && chosen.contains(qb));
              ASSERT_EQ(*chosen.begin(), sink);
              for (int64_t c = sink + 1; c < qb; ++c) candidates.insert(c);
              expect_best(score, candidates, chosen, concat("N ", seq_len, " query block ", qb));
              double held = 0, least = INFINITY;
              for (const int64_t c : chosen) {
                held += score[c];
                if (candidates.contains(c)) least = std::min(least, score[c]);
              }
              const double needed =
                  options.threshold * std::accumulate(score.begin(), score.end(), 0.0);
              if (chosen.size() < candidates.size() + 2) {
                EXPECT_GE(held, needed - 1e-9);
              }
              if (least < INFINITY) {
                EXPECT_LT(held - least, needed + 1e-9);
              }
            }
          }
        }
      }
    }
  }
}

TEST(BlockPatterns, DoNotDependOnRanksOrLayoutAndEveryPairIsOneRanksOnce) {
  for (const int64_t seq_len : {70, 1000}) {
    const Sequence s = make_sequence(2, seq_len, 4, 2, Precision::kFloat32,
                                     seq_len > 100 ? Documents::kMidBlock : Documents::kOne);
    for (const Build& build : {Build([](const auto&local, auto&group) {
                                 return build_moba(local, {.chunk = 128, .top_k = 3}, group);
                               }),
                               Build([](const auto&local, auto&group) {
                                 return build_xattention(
                                     local, {.block = 128, .stride = 16, .threshold = 0.8}, group);
                               })}) {
      const index::Index one = build_on(s, cases::one_rank(seq_len), build);
      const int64_t blocks = one.num_blocks();
      for (const layout::Layout& layout : cases::all_layouts(seq_len)) {
        ASSERT_TRUE(same_blocks(one, build_on(s, layout, build))) << cases::name(layout);
        // The union over (rank, source) of what a kernel is given.
        std::vector<int> met(8 * blocks * blocks, 0);
        std::vector<int64_t> pairs(layout.cp_size() * layout.cp_size(), 0);
        for (int r = 0; r < layout.cp_size(); ++r) {
          const std::vector<int32_t> q_starts = layout.block_starts(r);
          for (int source = 0; source < layout.cp_size(); ++source) {
            const std::vector<int32_t> k_starts = layout.block_starts(source);
            const index::StepBlocks step = index::step_blocks(one, layout, r, source);
            const index::StepBlocks there_and_back = index::transpose(
                index::transpose(step, layout.blocks_per_rank()), layout.blocks_per_rank());
            ASSERT_EQ(there_and_back.key_blocks, step.key_blocks);
            ASSERT_EQ(there_and_back.row_begin, step.row_begin);
            for (int64_t row = 0; row < 8; ++row) {
              for (int64_t q = 0; q < layout.blocks_per_rank(); ++q) {
                const int64_t* at = &step.row_begin[row * (layout.blocks_per_rank() + 1) + q];
                for (int64_t e = at[0]; e < at[1]; ++e) {
                  ASSERT_TRUE(e == at[0] || step.key_blocks[e - 1] < step.key_blocks[e]);
                  ++met[(row * blocks + q_starts[q] / 64) * blocks +
                        k_starts[step.key_blocks[e]] / 64];
                  pairs[r * layout.cp_size() + source] += 64 * 64;
                }
              }
            }
          }
          const std::vector<int64_t> counted = index::rank_step_pairs(one, layout, r, true);
          for (int source = 0; source < layout.cp_size(); ++source)
            ASSERT_EQ(counted[source], pairs[r * layout.cp_size() + source]);
        }
        for (int64_t row = 0; row < 8; ++row) {
          for (int64_t q = 0; q < blocks; ++q) {
            std::vector<int> expected(blocks, 0);
            for (const int64_t k : one.blocks.row(row, q, blocks)) expected[k] = 1;
            ASSERT_TRUE(
                std::equal(expected.begin(), expected.end(), &met[(row * blocks + q) * blocks]));
          }
        }
        std::vector<int64_t> table(pairs.size(), 0);
        for (int64_t row = 0; row < 8; ++row) {
          const std::vector<int64_t> of_row = index::step_pair_table(one, layout, row, true);
          for (size_t i = 0; i < table.size(); ++i) table[i] += of_row[i];
        }
        EXPECT_EQ(table, pairs);
      }
    }
  }
}

TEST(BlockPatterns, RecallIsTheShareUnderTheirMask) {
  const int64_t n = 500;
  const Sequence s = make_sequence(2, n, 4, 2, Precision::kFloat32, Documents::kMidBlock);
  VerticalSlashOptions options;
  options.recall_rows = n;  // every row that is not observed
  for (const bool everything : {false, true}) {
    const Build build = [&](const auto& local, auto& group) {
      return build_moba(local, {.chunk = 64, .top_k = everything ? 100 : 2}, group);
    };
    const index::Index index = build_on(s, cases::one_rank(n), build);
    const std::vector<uint8_t> mask = index::mask(index, s.document_starts);
    for (const layout::Layout& layout :
         {cases::one_rank(n), layout::Layout({layout::LayoutKind::kZigzag, n, 3, 64, 1})}) {
      cases::on_ranks(s, layout, [&](const LocalAttention& local, comm::Communicator& group) {
        const Recall recall = measure_recall(local, options, index, group, 3);
        if (everything) {
          EXPECT_NEAR(recall.sampled_worst, 1, 1e-9);
          return;
        }
        for (int64_t row = 0; row < 8; ++row) {
          const int64_t b = row / 4, h = row % 4;
          // The rows elsewhere: all but the last of each document, of which the window has some.
          std::set<int64_t> window;
          std::vector<int64_t> lengths(n, 0);
          int64_t longest = 0;
          for (int64_t i = 0; i < n; ++i) longest = std::max(longest, ++lengths[start_of(s, b, i)]);
          for (int64_t first = 0; first < n; ++first) {
            if (lengths[first] - 1 <= 64) continue;
            const int64_t rows = (64 * lengths[first] + longest - 1) / longest;
            for (int64_t i = 0; i < rows; ++i) window.insert(first + lengths[first] - 1 - i);
          }
          double mean = 0;
          int64_t count = 0;
          for (int64_t i = 0; i < n; ++i) {
            if (window.contains(i)) continue;
            double all = 0, covered = 0;
            for (int64_t j = start_of(s, b, i); j <= i; ++j) {
              double dot = 0;
              for (int64_t d = 0; d < s.dim; ++d) dot += q_at(s, b, i, h, d) * k_at(s, b, j, h, d);
              const double weight = std::exp(dot * s.scale());
              all += weight;
              if (mask[(row * n + i) * n + j] != 0) covered += weight;
            }
            mean += covered / all;
            ++count;
          }
          EXPECT_NEAR(recall.by_head[row], mean / static_cast<double>(count), 1e-5) << row;
        }
        EXPECT_LT(recall.sampled_worst, 0.99);
      });
    }
  }
}

TEST(FixedBudgets, TakeTheBestColumnsAndDiagonalsOfEveryHead) {
  const int64_t n = 900;
  const Sequence s = make_sequence(1, n, 4, 2, Precision::kFloat32);
  VerticalSlashOptions options = cases::bare(0.3);
  options.dense_threshold = 0.01;
  options.recall_floor = 1;
  for (const auto& [columns, diagonals] :
       {std::pair<int64_t, int64_t>{17, 5}, {0, 0}, {5000, 99}}) {
    index::Index index;
    cases::on_ranks(s, cases::one_rank(n),
                    [&](const LocalAttention& local, comm::Communicator& group) {
                      index = build_fixed(local, options, {columns, diagonals}, group);
                    });
    EXPECT_EQ(index.caps_hit, 0);
    VerticalSlashOptions capped = options;
    capped.p_vertical = capped.p_slash = 1;
    capped.max_columns = columns;
    capped.max_diagonals = diagonals;
    capped.dense_threshold = 1;
    capped.recall_floor = 0;
    const index::Index best = cases::build(s, capped);
    for (int64_t row = 0; row < 4; ++row) {
      EXPECT_EQ(index.columns.counts[row], std::min<int64_t>(columns, n));
      // Diagonal 0 is local and always there.
      EXPECT_GE(index.diagonals.counts[row], std::clamp<int64_t>(diagonals, 1, 15));
      EXPECT_LE(index.diagonals.counts[row], std::min<int64_t>(diagonals + 1, 15));
      EXPECT_EQ(index.dense_heads[row], 0);
      EXPECT_TRUE(std::ranges::equal(index.columns.row(row), best.columns.row(row)));
    }
  }
}

TEST(BlockPatterns, BadValuesAreNamed) {
  const auto said = [](const auto& options) -> std::string {
    try {
      check(options);
    } catch (const InvalidArgument& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(said(MobaOptions{100, 3}), "moba_chunk: expected a multiple of 64, got 100");
  EXPECT_EQ(said(MobaOptions{128, 0}), "moba_top_k: expected at least 1, got 0");
  EXPECT_EQ(said(XAttentionOptions{100, 10, 0.5}),
            "xattention_block: expected a multiple of 64, got 100");
  EXPECT_EQ(said(XAttentionOptions{128, 12, 0.5}),
            "xattention_stride: expected a divisor of xattention_block = 128, got 12");
  EXPECT_EQ(said(XAttentionOptions{128, 16, 1.5}),
            "xattention_threshold: expected a number in [0, 1], got 1.5");
  EXPECT_EQ(said(FixedBudgets{-1, 0}), "fixed_columns: expected at least 0, got -1");
  // A key that is not finite: all ranks say so.
  Sequence s = make_sequence(1, 300, 2, 1, Precision::kFloat32);
  s.k[200 * 16 + 3] = NAN;
  const layout::Layout layout({layout::LayoutKind::kZigzag, 300, 2, 64, 1});
  for (const bool moba : {false, true}) {
    std::vector<std::string> texts(2);
    cases::on_ranks(s, layout, [&](const LocalAttention& local, comm::Communicator& group) {
      try {
        moba ? build_moba(local, {64, 2}, group) : build_xattention(local, {}, group);
      } catch (const InvalidArgument& error) {
        texts[local.cp_rank] = error.what();
      }
    });
    EXPECT_EQ(texts[0], texts[1]);
    EXPECT_NE(texts[0].find("k: expected finite values"), std::string::npos) << texts[0];
  }
}

}  // namespace
}  // namespace mtraining::pattern
