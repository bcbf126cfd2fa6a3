#include "mtraining/index/step_index.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "mtraining/base/check.h"
#include "mtraining/index/columns.h"
#include "mtraining/index/contract_reader.h"
#include "mtraining/index/index_cases.h"

namespace mtraining::index {
namespace {

using layout::Layout;
using layout::LayoutKind;
using layout::LayoutOptions;

/// The mask of the definition, from the lists as they were given, not from index/.
std::vector<uint8_t> defined_mask(const std::vector<int32_t>& diagonals,
                                  const std::vector<int32_t>& columns, int64_t seq_len) {
  const std::set<int64_t> on_diagonal(diagonals.begin(), diagonals.end());
  const std::set<int64_t> on_column(columns.begin(), columns.end());
  std::vector<uint8_t> mask(seq_len * seq_len, 0);
  for (int64_t i = 0; i < seq_len; ++i) {
    for (int64_t j = 0; j <= i; ++j)
      mask[i * seq_len + j] = on_diagonal.count(i / 64 - j / 64) || on_column.count(j);
  }
  return mask;
}

enum class Columns { kPerStep, kOnce };
enum class Blocks { kAsGiven, kCsr, kTransposedTwice };

/// How often each pair of head row r is computed over all (rank, source), saturating at 255.
std::vector<uint8_t> count_pairs(const Index& index, const Layout& layout, int64_t r,
                                 Columns columns, Blocks blocks) {
  const int64_t seq_len = layout.seq_len();
  const DiagonalBitmap bitmap = diagonal_bitmap(index);
  std::vector<uint8_t> counts(seq_len * seq_len, 0);
  const auto count = [&](int64_t i, int64_t j) {
    uint8_t& cell = counts[i * seq_len + j];
    if (cell < 255) ++cell;
  };
  const ColumnPlan plan =
      columns == Columns::kOnce ? plan_columns(index, layout, index.num_q_heads, 37) : ColumnPlan{};
  for (int rank = 0; rank < layout.cp_size(); ++rank) {
    const contract::Queries queries(layout, rank);
    for (int source = 0; source < layout.cp_size(); ++source) {
      StepBlocks step = blocks == Blocks::kCsr ? step_blocks_csr(index, layout, rank, source)
                                               : step_blocks(index, layout, rank, source);
      if (blocks == Blocks::kTransposedTwice) {
        step = transpose(transpose(step, layout.blocks_per_rank()), layout.blocks_per_rank());
      }
      contract::read_block_pairs(step.view(), r, queries, layout.block_starts(source), count);
      if (columns == Columns::kOnce) continue;
      const StepColumns step_cols = step_columns(index, layout, source);
      contract::read_column_pairs(step_cols.view(), r, queries, bitmap,
                                  [&](int64_t i, int64_t j, int64_t row) {
                                    EXPECT_EQ(layout.position(source, row), j);
                                    count(i, j);
                                  });
    }
    for (const ColumnSlice& slice : plan.slices) {
      contract::read_column_pairs(slice.view(), r, queries, bitmap,
                                  [&](int64_t i, int64_t j, int64_t) { count(i, j); });
    }
  }
  return counts;
}

/// Says where two tables first differ.
::testing::AssertionResult same(const std::vector<uint8_t>& got,
                                const std::vector<uint8_t>& expected, int64_t seq_len) {
  const auto at = std::mismatch(got.begin(), got.end(), expected.begin());
  if (at.first == got.end()) return ::testing::AssertionSuccess();
  const int64_t cell = at.first - got.begin();
  return ::testing::AssertionFailure()
         << "query " << cell / seq_len << ", key " << cell % seq_len << ": expected "
         << int{*at.second} << " times, got " << int{*at.first};
}

void expect_each_pair_once(int64_t seq_len, const std::vector<Layout>& layouts,
                           const std::vector<int64_t>& heads) {
  const cases::Chosen chosen = cases::six_heads(static_cast<uint32_t>(seq_len), seq_len);
  const Index index = cases::make_six_heads(static_cast<uint32_t>(seq_len), seq_len);
  for (const int64_t r : heads) {
    const std::vector<uint8_t> expected =
        defined_mask(chosen.diagonals[r], chosen.columns[r], seq_len);
    int turn = 0;
    for (const Layout& layout : layouts) {
      const auto blocks = static_cast<Blocks>(turn % 3);
      const auto columns = static_cast<Columns>(turn % 2);
      ++turn;
      ASSERT_TRUE(same(count_pairs(index, layout, r, columns, blocks), expected, seq_len))
          << cases::name(layout) << ", head row " << r << ", form " << turn;
    }
  }
}

TEST(StepIndex, UnionOverRanksIsTheMaskEachPairOnce) {
  expect_each_pair_once(2011, cases::layouts(2011), {0, 1});
}

TEST(StepIndex, UnionIsTheMaskForEmptySingleAndFullLists) {
  expect_each_pair_once(709, cases::layouts(709), {0, 1, 2, 3, 4, 5});
}

TEST(StepIndex, UnionIsTheMaskForRaggedAndTinyLengths) {
  for (const int64_t seq_len : {1, 2, 63, 64, 65, 100, 127, 128, 129, 385}) {
    expect_each_pair_once(seq_len, cases::layouts(seq_len), {0, 1, 4, 5});
  }
}

TEST(StepIndex, UnionIsTheMaskOverThirtyTwoRanksOfFourNodes) {
  const int64_t seq_len = 32 * 64 * 2 + 77;
  std::vector<Layout> layouts;
  for (const int64_t stripe : {64, 128}) {
    layouts.emplace_back(LayoutOptions{LayoutKind::kBlockStriped, seq_len, 32, stripe, 4});
  }
  layouts.emplace_back(LayoutOptions{LayoutKind::kZigzag, seq_len, 32});
  layouts.emplace_back(LayoutOptions{LayoutKind::kContiguous, seq_len, 32});
  expect_each_pair_once(seq_len, layouts, {0});
}

TEST(StepIndex, EntriesAndCsrListTheSameBlocks) {
  for (const int64_t seq_len : {64, 1000, 6007}) {
    const Index index = cases::make_six_heads(7, seq_len);
    for (const Layout& layout : cases::layouts(seq_len)) {
      if (layout.kind() == LayoutKind::kZigzag) continue;
      const int64_t blocks = layout.blocks_per_rank();
      for (int rank = 0; rank < layout.cp_size(); ++rank) {
        const auto starts = layout.block_starts(rank);
        for (int source = 0; source < layout.cp_size(); ++source) {
          const StepBlocks entries = step_blocks(index, layout, rank, source);
          const StepBlocks csr = step_blocks_csr(index, layout, rank, source);
          ASSERT_EQ(entries.kind, kernels::BlockListKind::kEntries);
          ASSERT_EQ(csr.kind, kernels::BlockListKind::kCsr);
          for (int64_t r = 0; r < 6; ++r) {
            // The order that params.h promises; equal distances by lambda.
            const int64_t m = entries.blocks_per_stripe;
            const kernels::Entry* list = entries.entries.data() + r * entries.capacity;
            for (int32_t e = 1; e < entries.num_entries[r]; ++e) {
              const auto place = [m](const kernels::Entry& entry) {
                return std::pair(entry.lambda * m + entry.delta, entry.lambda);
              };
              ASSERT_LT(place(list[e - 1]), place(list[e])) << cases::name(layout);
            }
            std::vector<std::pair<int64_t, int64_t>> from_entries, from_csr;
            contract::read_blocks(entries.view(), r, blocks, blocks, [&](int64_t q, int64_t k) {
              if (starts[q] < seq_len) from_entries.emplace_back(q, k);
            });
            contract::read_blocks(csr.view(), r, blocks, blocks,
                                  [&](int64_t q, int64_t k) { from_csr.emplace_back(q, k); });
            // In a query block entries list keys descending, CSR ascending.
            ASSERT_TRUE(std::is_sorted(from_entries.begin(), from_entries.end(),
                                       [](const auto& a, const auto& b) {
                                         return std::pair(a.first, -a.second) <
                                                std::pair(b.first, -b.second);
                                       }))
                << cases::name(layout);
            ASSERT_TRUE(std::is_sorted(from_csr.begin(), from_csr.end())) << cases::name(layout);
            std::sort(from_entries.begin(), from_entries.end());
            ASSERT_EQ(from_entries, from_csr)
                << cases::name(layout) << " rank " << rank << " source " << source;
          }
        }
      }
    }
  }
}

TEST(StepIndex, TransposeSwapsQueryAndKeyAndTwiceIsTheIdentity) {
  const int64_t seq_len = 3001;
  const Index index = cases::make_six_heads(11, seq_len);
  for (const Layout& layout : cases::layouts(seq_len)) {
    const int64_t blocks = layout.blocks_per_rank();
    for (int rank = 0; rank < layout.cp_size(); ++rank) {
      for (int source = 0; source < layout.cp_size(); ++source) {
        for (const bool csr : {false, true}) {
          const StepBlocks step = csr ? step_blocks_csr(index, layout, rank, source)
                                      : step_blocks(index, layout, rank, source);
          const StepBlocks flipped = transpose(step, blocks);
          const StepBlocks back = transpose(flipped, blocks);
          for (int64_t r = 0; r < 6; ++r) {
            std::vector<std::pair<int64_t, int64_t>> pairs, swapped;
            contract::read_blocks(step.view(), r, blocks, blocks,
                                  [&](int64_t q, int64_t k) { pairs.emplace_back(q, k); });
            contract::read_blocks(flipped.view(), r, blocks, blocks,
                                  [&](int64_t k, int64_t q) { swapped.emplace_back(q, k); });
            std::sort(pairs.begin(), pairs.end());
            std::sort(swapped.begin(), swapped.end());
            ASSERT_EQ(pairs, swapped) << cases::name(layout) << " csr " << csr;
          }
          ASSERT_EQ(back.row_begin, step.row_begin);
          ASSERT_EQ(back.key_blocks, step.key_blocks);
          ASSERT_EQ(back.num_entries, step.num_entries);
          ASSERT_EQ(back.num_q_blocks, step.num_q_blocks);
          for (size_t r = 0; r < step.num_entries.size(); ++r) {
            for (int32_t e = 0; e < step.num_entries[r]; ++e) {
              ASSERT_EQ(back.entries[r * step.capacity + e], step.entries[r * step.capacity + e]);
            }
          }
        }
      }
    }
  }
}

TEST(StepIndex, TransposeTakesDifferentNumbersOfQueryAndKeyBlocks) {
  StepBlocks step;
  step.kind = kernels::BlockListKind::kCsr;
  step.num_q_blocks = 2;
  step.row_begin = {0, 2, 3, 3, 3, 4};  // two heads: {0, 4}, {4}; {}, {2}
  step.key_blocks = {0, 4, 4, 2};
  const StepBlocks flipped = transpose(step, 5);
  EXPECT_EQ(flipped.row_begin, (std::vector<int64_t>{0, 1, 1, 1, 1, 3, 3, 3, 3, 4, 4, 4}));
  EXPECT_EQ(flipped.key_blocks, (std::vector<int32_t>{0, 0, 1, 1}));
  const StepBlocks back = transpose(flipped, 2);
  EXPECT_EQ(back.row_begin, step.row_begin);
  EXPECT_EQ(back.key_blocks, step.key_blocks);
}

TEST(StepIndex, WithOneBlockAStripeAStepSeesExactlyItsResidueOfDiagonals) {
  const int64_t seq_len = 64 * 64 * 5;
  const Index index = cases::make_six_heads(3, seq_len);
  for (const int cp_size : {1, 2, 3, 4, 8, 32}) {
    for (int nodes = 1; nodes <= cp_size; nodes *= 2) {
      if (cp_size % nodes != 0) continue;
      const Layout layout({LayoutKind::kBlockStriped, seq_len, cp_size, 64, nodes});
      for (int rank = 0; rank < cp_size; ++rank) {
        for (int source = 0; source < cp_size; ++source) {
          const StepBlocks step = step_blocks(index, layout, rank, source);
          const int64_t distance = layout.residue(rank) - layout.residue(source);
          for (int64_t r = 0; r < 6; ++r) {
            std::vector<int32_t> seen, expected;
            for (int32_t e = 0; e < step.num_entries[r]; ++e) {
              const kernels::Entry entry = step.entries[r * step.capacity + e];
              ASSERT_EQ(entry.delta, 0);
              seen.push_back(static_cast<int32_t>(entry.lambda * cp_size + distance));
            }
            for (const int32_t c : index.diagonals.row(r)) {
              // Only diagonals that the rank's last block can still go back by.
              const int64_t last = (layout.blocks_per_rank() - 1) * cp_size + layout.residue(rank);
              if ((c - distance) % cp_size == 0 && c <= last) expected.push_back(c);
            }
            ASSERT_EQ(seen, expected) << cases::name(layout);
          }
        }
      }
    }
  }
}

TEST(StepIndex, ADiagonalGivesAtMostTwoEntriesAPairOfRanksAndLessThanTwoStripesReach) {
  const int64_t seq_len = 64 * 97;
  for (const Layout& layout : cases::layouts(seq_len)) {
    if (layout.kind() == LayoutKind::kZigzag) continue;
    const int64_t m = layout.blocks_per_stripe();
    for (int32_t c = 0; c < 97; ++c) {
      const Index index = make_index(1, 1, seq_len, {{c}}, {{}});
      int64_t all = 0;
      for (int rank = 0; rank < layout.cp_size(); ++rank) {
        for (int source = 0; source < layout.cp_size(); ++source) {
          const StepBlocks step = step_blocks(index, layout, rank, source);
          ASSERT_LE(step.num_entries[0], 2) << cases::name(layout);
          all += step.num_entries[0];
          for (int32_t e = 0; e < step.num_entries[0]; ++e) {
            ASSERT_LT(std::abs(step.entries[e].delta), m);
            ASSERT_GE(step.entries[e].lambda, 0);
          }
        }
      }
      // A query's rank needs one or two source ranks for a diagonal, never more: worker traffic
      // does not fan out.
      ASSERT_LE(all, 2 * layout.cp_size());
    }
  }
}

// The worked example of docs/math/index.md.
TEST(StepIndex, WorkedExample) {
  // 16 stripes of 2 blocks over 4 ranks: 4 local stripes, 8 local blocks a rank.
  const Layout layout({LayoutKind::kBlockStriped, 2048, 4, 128, 1});
  const Index index = make_index(1, 1, 2048, {{0, 5, 9}}, {{}});
  const auto entries = [&](int rank, int source) {
    const StepBlocks step = step_blocks(index, layout, rank, source);
    return std::vector<kernels::Entry>(step.entries.begin(),
                                       step.entries.begin() + step.num_entries[0]);
  };
  using Entries = std::vector<kernels::Entry>;
  EXPECT_EQ(entries(3, 1), (Entries{{0, 1}}));          // c = 5 = 2 * 2 + 1, u = 2
  EXPECT_EQ(entries(3, 0), (Entries{{0, -1}}));         // c = 5 = 3 * 2 - 1, u = 3
  EXPECT_EQ(entries(0, 3), (Entries{{2, -1}}));         // c = 9 = 5 * 2 - 1, u = 5
  EXPECT_EQ(entries(0, 0), (Entries{{0, 0}, {1, 1}}));  // c = 0, and c = 9 = 4 * 2 + 1
  // What rank 0 meets of rank 3: its local blocks 4 and 6 (16 and 24 of the sequence) meet 1 and 3.
  const StepBlocks csr = step_blocks_csr(index, layout, 0, 3);
  EXPECT_EQ(csr.row_begin, (std::vector<int64_t>{0, 0, 0, 0, 0, 1, 1, 2, 2}));
  EXPECT_EQ(csr.key_blocks, (std::vector<int32_t>{1, 3}));
  const StepBlocks flipped = transpose(csr, 8);
  EXPECT_EQ(flipped.row_begin, (std::vector<int64_t>{0, 0, 1, 1, 2, 2, 2, 2, 2}));
  EXPECT_EQ(flipped.key_blocks, (std::vector<int32_t>{4, 6}));
}

TEST(StepIndex, StripedDenseIsTheCausalTriangleEachPairOnce) {
  for (const int64_t seq_len : {1, 5, 64, 100, 777, 1500}) {
    const Index index = dense_index(1, 2, seq_len);
    std::vector<uint8_t> triangle(seq_len * seq_len, 0);
    for (int64_t i = 0; i < seq_len; ++i) std::fill_n(triangle.begin() + i * seq_len, i + 1, 1);
    for (const int cp_size : {1, 2, 3, 4, 6, 8}) {
      const Layout layout({LayoutKind::kStriped, seq_len, cp_size});
      ASSERT_TRUE(same(count_pairs(index, layout, 1, Columns::kPerStep, Blocks::kAsGiven), triangle,
                       seq_len))
          << cases::name(layout);
      // No unit is listed for nothing.
      for (int rank = 0; rank < cp_size; ++rank) {
        const contract::Queries queries(layout, rank);
        for (int source = 0; source < cp_size; ++source) {
          const auto starts = layout.block_starts(source);
          const StepBlocks step = step_blocks(index, layout, rank, source);
          contract::read_blocks(
              step.view(), 0, queries.blocks(), queries.blocks(), [&](int64_t q, int64_t k) {
                int64_t last = -1;
                for (int64_t i = 0; i < 64 && queries.position(q, i) < seq_len; ++i)
                  last = queries.position(q, i);
                ASSERT_LE(starts[k], last) << cases::name(layout);
              });
        }
      }
    }
  }
}

// The paper's example of scale, index only: each block of each chosen diagonal exactly once.
TEST(StepIndex, HalfAMillionTokensOver128RanksAre64StripesEachAndEveryBlockOnce) {
  const int64_t seq_len = 512 * 1024;
  const std::vector<int32_t> diagonals = {0, 1, 2, 63, 64, 127, 128, 129, 1000, 4095, 8000, 8191};
  const Index index = make_index(1, 1, seq_len, {diagonals}, {{}});
  for (const int64_t stripe : {64, 128}) {
    const Layout layout({LayoutKind::kBlockStriped, seq_len, 128, stripe, 16});
    const int64_t blocks = layout.blocks_per_rank();
    ASSERT_EQ(blocks, 64);
    ASSERT_EQ(blocks / layout.blocks_per_stripe(), 64 * 64 / stripe);
    std::vector<std::vector<int32_t>> starts;
    for (int rank = 0; rank < 128; ++rank) starts.push_back(layout.block_starts(rank));
    std::vector<std::vector<uint8_t>> times(diagonals.size(), std::vector<uint8_t>(8192, 0));
    for (int rank = 0; rank < 128; ++rank) {
      for (int source = 0; source < 128; ++source) {
        const StepBlocks step = step_blocks(index, layout, rank, source);
        contract::read_blocks(step.view(), 0, blocks, blocks, [&](int64_t q, int64_t k) {
          const int64_t query = starts[rank][q] / 64;
          const int64_t c = query - starts[source][k] / 64;
          const auto at = std::lower_bound(diagonals.begin(), diagonals.end(), c);
          ASSERT_TRUE(at != diagonals.end() && *at == c) << "diagonal " << c << " was not chosen";
          ++times[at - diagonals.begin()][query];
        });
      }
    }
    for (size_t d = 0; d < diagonals.size(); ++d) {
      for (int64_t query = 0; query < 8192; ++query) {
        ASSERT_EQ(times[d][query], query >= diagonals[d])
            << "diagonal " << diagonals[d] << " query " << query;
      }
    }
  }
}

TEST(StepIndex, SparseOnStripedIsUnsupportedByName) {
  const Layout layout({LayoutKind::kStriped, 1000, 4});
  const Index sparse = make_index(1, 1, 1000, {{0, 1}}, {{3}});
  try {
    step_blocks(sparse, layout, 0, 0);
    FAIL();
  } catch (const Unsupported& error) {
    EXPECT_NE(std::string(error.what()).find("striped"), std::string::npos) << error.what();
  }
  EXPECT_THROW(step_pairs(sparse, layout, 0, 0, 0, true), Unsupported);
  EXPECT_THROW(step_pair_table(sparse, layout, 0, true), Unsupported);
}

TEST(StepIndex, ARankOfPaddingAloneGetsNoBlocks) {
  // 100 tokens over 8 ranks: contiguous ranks 2..7 and block_striped residues 2..7 hold padding
  // only.
  const Index index = dense_index(1, 1, 100);
  for (const LayoutKind kind :
       {LayoutKind::kContiguous, LayoutKind::kBlockStriped, LayoutKind::kZigzag}) {
    const Layout layout({kind, 100, 8});
    for (int rank = 2; rank < 8; ++rank) {
      for (int source = 0; source < 8; ++source) {
        const StepBlocks csr = step_blocks_csr(index, layout, rank, source);
        EXPECT_TRUE(csr.key_blocks.empty()) << cases::name(layout) << " rank " << rank;
        EXPECT_EQ(step_pairs(index, layout, rank, source, 0, true), 0);
        contract::read_block_pairs(step_blocks(index, layout, rank, source).view(), 0,
                                   contract::Queries(layout, rank), layout.block_starts(source),
                                   [&](int64_t, int64_t) { FAIL(); });
      }
    }
  }
}

TEST(StepIndex, DiagonalsAloneMayLeaveARankWithoutThreeOfFourShards) {
  const Layout layout({LayoutKind::kBlockStriped, 64 * 40, 4, 64, 1});
  const Index index = make_index(1, 1, 64 * 40, {{0, 4, 8}}, {{}});
  for (int rank = 0; rank < 4; ++rank) {
    for (int source = 0; source < 4; ++source) {
      EXPECT_EQ(step_blocks(index, layout, rank, source).num_entries[0], rank == source ? 3 : 0);
    }
  }
}

TEST(StepIndex, WrongInputIsNamed) {
  const Layout layout({LayoutKind::kBlockStriped, 1000, 4});
  EXPECT_THROW(step_blocks(dense_index(1, 1, 999), layout, 0, 0), InvalidArgument);
  EXPECT_THROW(step_blocks(dense_index(1, 1, 1000), layout, 4, 0), InvalidArgument);
  EXPECT_THROW(step_blocks(dense_index(1, 1, 1000), layout, 0, -1), InvalidArgument);
  EXPECT_THROW(step_columns(dense_index(1, 1, 1000), layout, 4), InvalidArgument);
  EXPECT_THROW(transpose(step_blocks(dense_index(1, 1, 1000),
                                     Layout({LayoutKind::kBlockStriped, 1000, 2, 128, 1}), 0, 0),
                         3),
               InvalidArgument);
}

}  // namespace
}  // namespace mtraining::index
