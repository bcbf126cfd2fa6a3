#include "mtraining/layout/layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <vector>

#include "mtraining/base/check.h"
#include "mtraining/testing/error_of.h"

namespace mtraining::layout {
namespace {

constexpr LayoutKind kKinds[] = {LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kStriped,
                                 LayoutKind::kBlockStriped};

std::vector<int> divisors(int n) {
  std::vector<int> found;
  for (int d = 1; d <= n; ++d) {
    if (n % d == 0) found.push_back(d);
  }
  return found;
}

/// Every kind, stripe and number of nodes over many world sizes and lengths that divide nothing.
void sweep(const std::function<void(const Layout&)>& check) {
  for (int world : {1, 2, 3, 4, 5, 6, 7, 8, 32, 128}) {
    for (int64_t seq_len : {int64_t{1}, int64_t{63}, int64_t{64}, int64_t{65}, int64_t{999},
                            int64_t{2999}, int64_t{128} * world, int64_t{192} * world * 3 + 1}) {
      for (LayoutKind kind : kKinds) {
        const bool block_striped = kind == LayoutKind::kBlockStriped;
        for (int64_t stripe : {64, 128, 192}) {
          for (int nodes : divisors(world)) {
            if (!block_striped && (stripe != 64 || nodes != 1)) continue;
            SCOPED_TRACE(concat(to_string(kind), " W=", world, " N=", seq_len, " stripe=", stripe,
                                " nodes=", nodes));
            check(Layout({.kind = kind,
                          .seq_len = seq_len,
                          .cp_size = world,
                          .stripe = stripe,
                          .nodes = nodes}));
            if (::testing::Test::HasFailure()) return;
          }
        }
      }
    }
  }
}

TEST(Layout, EveryPositionHasExactlyOneOwnerAndTheMapsAreInverse) {
  sweep([](const Layout& layout) {
    std::vector<char> owned(layout.padded_len(), 0);
    for (int rank = 0; rank < layout.cp_size(); ++rank) {
      const std::vector<int64_t> held = layout.positions(rank);
      ASSERT_EQ(static_cast<int64_t>(held.size()), layout.tokens_per_rank());
      for (int64_t offset = 0; offset < layout.tokens_per_rank(); ++offset) {
        const int64_t position = held[offset];
        ASSERT_GE(position, 0);
        ASSERT_LT(position, layout.padded_len());
        ASSERT_EQ(owned[position]++, 0) << "position " << position << " has two owners";
        if (offset % 13 == 0 || offset + 1 == layout.tokens_per_rank()) {
          ASSERT_EQ(layout.position(rank, offset), position);
          ASSERT_EQ(layout.owner(position), (Owner{rank, offset}));
        }
      }
    }
  });
}

TEST(Layout, PositionsAscendOnEveryRank) {
  sweep([](const Layout& layout) {
    for (int rank = 0; rank < layout.cp_size(); ++rank) {
      const std::vector<int64_t> held = layout.positions(rank);
      ASSERT_TRUE(std::is_sorted(held.begin(), held.end()));
    }
  });
}

TEST(Layout, ShardThenUnshardIsIdentityAndDiffersFromShardingTwice) {
  int self_inverse = 0, cases = 0;
  sweep([&](const Layout& layout) {
    const int64_t n = layout.tokens_per_rank();
    std::vector<int64_t> shards, back(layout.padded_len(), -1);
    for (int rank = 0; rank < layout.cp_size(); ++rank) {
      const auto held = layout.positions(rank);
      shards.insert(shards.end(), held.begin(), held.end());
    }
    for (int64_t p = 0; p < layout.padded_len(); ++p) {
      const Owner owner = layout.owner(p);
      back[p] = shards[owner.cp_rank * n + owner.offset];
    }
    for (int64_t p = 0; p < layout.padded_len(); ++p) ASSERT_EQ(back[p], p);
    // A map that is its own inverse would not notice the wrong one of the two being used.
    bool own_inverse = true;
    for (int64_t p = 0; p < layout.padded_len(); ++p)
      own_inverse = own_inverse && shards[shards[p]] == p;
    self_inverse += own_inverse;
    ++cases;
  });
  EXPECT_GT(cases - self_inverse, 200) << "the sweep must contain maps that are not involutions";
}

TEST(Layout, PaddedLengthIsTheSmallestLegalMultiple) {
  sweep([](const Layout& layout) {
    const int64_t world = layout.cp_size();
    const int64_t multiple = layout.kind() == LayoutKind::kZigzag ? 128 * world
                             : layout.kind() == LayoutKind::kBlockStriped
                                 ? layout.options().stripe * world
                                 : 64 * world;
    EXPECT_EQ(layout.padded_len() % multiple, 0);
    EXPECT_GE(layout.padded_len(), layout.seq_len());
    EXPECT_LT(layout.padded_len() - layout.seq_len(), multiple);
    EXPECT_EQ(layout.tokens_per_rank() * world, layout.padded_len());
    EXPECT_EQ(layout.tokens_per_rank() % kBlock, 0);
    EXPECT_EQ(layout.blocks_per_rank() * kBlock, layout.tokens_per_rank());
  });
}

TEST(Layout, RealTokensOverAllRanksAreExactlySeqLen) {
  // Positions ascend, so real tokens are a prefix of each shard; their count is exact and never
  // total / W.
  sweep([](const Layout& layout) {
    int64_t real = 0;
    for (int rank = 0; rank < layout.cp_size(); ++rank) {
      const auto held = layout.positions(rank);
      real +=
          std::count_if(held.begin(), held.end(), [&](int64_t p) { return p < layout.seq_len(); });
    }
    EXPECT_EQ(real, layout.seq_len());
  });
}

TEST(Layout, BlockStartsAreBlockAlignedPositionsOfLocalBlocks) {
  sweep([](const Layout& layout) {
    for (int rank = 0; rank < layout.cp_size(); ++rank) {
      const auto starts = layout.block_starts(rank);
      const auto held = layout.positions(rank);
      ASSERT_EQ(static_cast<int64_t>(starts.size()), layout.blocks_per_rank());
      ASSERT_TRUE(std::is_sorted(starts.begin(), starts.end()));
      for (int64_t block = 0; block < layout.blocks_per_rank(); ++block) {
        for (int64_t i : {int64_t{0}, int64_t{1}, int64_t{63}}) {
          ASSERT_EQ(held[block * kBlock + i], starts[block] + i * layout.position_stride());
        }
        if (layout.has_blocks()) {
          ASSERT_EQ(starts[block] % kBlock, 0);
        }
      }
    }
  });
}

TEST(Layout, CausalPairsOverRanksAndSourcesAreTheLowerTriangleOnce) {
  for (LayoutKind kind : kKinds) {
    for (int world : {2, 3, 4}) {
      const Layout layout({.kind = kind, .seq_len = 64 * 2 * world, .cp_size = world});
      const int64_t n = layout.padded_len();
      std::vector<int> seen(n * n, 0);
      for (int rank = 0; rank < world; ++rank) {
        for (int source = 0; source < world; ++source) {
          for (int64_t query : layout.positions(rank)) {
            for (int64_t key : layout.positions(source)) seen[query * n + key] += key <= query;
          }
        }
      }
      for (int64_t i = 0; i < n; ++i) {
        for (int64_t j = 0; j < n; ++j) ASSERT_EQ(seen[i * n + j], j <= i ? 1 : 0) << i << " " << j;
      }
    }
  }
}

TEST(Contiguous, RankHoldsOneRun) {
  const Layout layout({.kind = LayoutKind::kContiguous, .seq_len = 64 * 8 - 5, .cp_size = 4});
  EXPECT_EQ(layout.positions(2).front(), 256);
  EXPECT_EQ(layout.positions(2).back(), 383);
  EXPECT_EQ(layout.blocks_per_stripe(), layout.blocks_per_rank());
  EXPECT_EQ(layout.residue(3), 3);
}

TEST(Zigzag, RankHoldsAChunkAndItsMirror) {
  // 16 units of two tokens' worth scaled to 64: with 4 ranks rank 0 holds chunks 0 and 7, that is
  // 64-units 0,1,14,15.
  const Layout layout({.kind = LayoutKind::kZigzag, .seq_len = 16 * 64, .cp_size = 4});
  std::vector<int32_t> units = layout.block_starts(0);
  for (int32_t& unit : units) unit /= 64;
  EXPECT_EQ(units, (std::vector<int32_t>{0, 1, 14, 15}));
  units = layout.block_starts(1);
  for (int32_t& unit : units) unit /= 64;
  EXPECT_EQ(units, (std::vector<int32_t>{2, 3, 12, 13}));
}

TEST(Zigzag, OddLengthIsPaddedToItsMultiple) {
  const Layout layout({.kind = LayoutKind::kZigzag, .seq_len = 2999, .cp_size = 4});
  EXPECT_EQ(layout.padded_len(), 3072);
  EXPECT_EQ(layout.tokens_per_rank(), 768);
}

TEST(Striped, TokensAreDealtOneByOne) {
  const Layout layout({.kind = LayoutKind::kStriped, .seq_len = 256, .cp_size = 4});
  EXPECT_EQ(layout.position(3, 5), 23);
  EXPECT_EQ(layout.position_stride(), 4);
  EXPECT_FALSE(layout.has_blocks());
}

TEST(BlockStriped, StripesAreDealtInTurn) {
  // Units 0-15 in stripes of 64 over two ranks: rank 0 holds stripes 0, 2, 4, .. (more stripes than
  // ranks squared, so the map is not its own inverse).
  const Layout layout({.seq_len = int64_t{16} * 64, .cp_size = 2, .stripe = 64});
  std::vector<int32_t> units = layout.block_starts(0);
  for (int32_t& unit : units) unit /= 64;
  EXPECT_EQ(units, (std::vector<int32_t>{0, 2, 4, 6, 8, 10, 12, 14}));
  const Layout wide({.seq_len = 16 * 64, .cp_size = 2, .stripe = 256});
  units = wide.block_starts(0);
  for (int32_t& unit : units) unit /= 64;
  EXPECT_EQ(units, (std::vector<int32_t>{0, 1, 2, 3, 8, 9, 10, 11}));
}

TEST(BlockStriped, ShortLengthIsPaddedToOneStripeARank) {
  const Layout layout({.seq_len = 100, .cp_size = 2, .stripe = 64});
  EXPECT_EQ(layout.padded_len(), 128);
  const Layout alone({.seq_len = 1, .cp_size = 8, .stripe = 192});
  EXPECT_EQ(alone.padded_len(), 8 * 192);
  EXPECT_EQ(alone.owner(0), (Owner{0, 0}));
}

TEST(BlockStriped, HundredTwentyEightRanksAtHalfAMillionHoldSixtyFourStripesEach) {
  const Layout layout({.seq_len = 524288, .cp_size = 128, .stripe = 64});
  EXPECT_EQ(layout.padded_len(), 524288);
  EXPECT_EQ(layout.blocks_per_rank(), 64);
  EXPECT_EQ(layout.blocks_per_stripe(), 1);
  for (int rank = 0; rank < 128; ++rank) {
    const auto starts = layout.block_starts(rank);
    ASSERT_EQ(starts.size(), 64u);
    for (int64_t stripe = 0; stripe < 64; ++stripe) {
      ASSERT_EQ(starts[stripe], (stripe * 128 + rank) * 64);
    }
  }
}

TEST(BlockStriped, ResidueIsLocalRankTimesNodesPlusNode) {
  for (int nodes : {1, 2, 3, 4, 16}) {
    for (int ranks_per_node : {1, 2, 3, 8}) {
      const int world = nodes * ranks_per_node;
      const Layout layout({.seq_len = 64 * world, .cp_size = world, .nodes = nodes});
      std::vector<char> taken(world, 0);
      for (int rank = 0; rank < world; ++rank) {
        const int node = rank / ranks_per_node, local_rank = rank % ranks_per_node;
        const int residue = layout.residue(rank);
        EXPECT_EQ(residue, local_rank * nodes + node);
        EXPECT_EQ(layout.rank_of_residue(residue), rank);
        EXPECT_EQ(layout.owner(int64_t{64} * residue).cp_rank, rank);
        EXPECT_EQ(taken[residue]++, 0);
      }
    }
  }
}

TEST(BlockStriped, OuterStepsSeeTheSameResidueDifferencesOnEveryNode) {
  // The reason for the numbering: between nodes a and a - t every pair of local ranks differs by a
  // multiple of `nodes` plus t, so that all nodes work on the same diagonals in one outer step,
  // wrap-around included.
  const int nodes = 4, ranks_per_node = 8, world = 32;
  const Layout layout({.seq_len = 64 * world, .cp_size = world, .nodes = nodes});
  for (int outer = 0; outer < nodes; ++outer) {
    std::vector<std::vector<int>> by_node;
    for (int node = 0; node < nodes; ++node) {
      const int source_node = (node - outer + nodes) % nodes;
      std::vector<int> differences;
      for (int q = 0; q < ranks_per_node; ++q) {
        for (int k = 0; k < ranks_per_node; ++k) {
          const int difference = layout.residue(node * ranks_per_node + q) -
                                 layout.residue(source_node * ranks_per_node + k);
          differences.push_back(((difference % nodes) + nodes) % nodes);
        }
      }
      by_node.push_back(differences);
    }
    for (int node = 1; node < nodes; ++node) EXPECT_EQ(by_node[node], by_node[0]);
  }
}

TEST(Layout, NamesRoundTripAndUnknownOnesListTheKnown) {
  for (LayoutKind kind : kKinds) EXPECT_EQ(parse_layout_kind(to_string(kind)), kind);
  EXPECT_THROW(parse_layout_kind("zig"), InvalidArgument);
  EXPECT_NE(testing::error_of([] { parse_layout_kind("zig"); }).find("block_striped"),
            std::string::npos);
}

TEST(Layout, WrongOptionsAreRefusedByName) {
  const auto fails = [](LayoutOptions options, const char* named) {
    EXPECT_THROW(Layout{options}, InvalidArgument) << named;
    const std::string message = testing::error_of([&] { Layout{options}; });
    EXPECT_EQ(message.rfind(named, 0), 0u) << message;
  };
  fails({.seq_len = 0, .cp_size = 1}, "seq_len");
  fails({.seq_len = -5, .cp_size = 1}, "seq_len");
  fails({.seq_len = 64, .cp_size = 0}, "cp_size");
  fails({.seq_len = 64, .cp_size = 2, .stripe = 48}, "stripe");
  fails({.seq_len = 64, .cp_size = 2, .stripe = 96}, "stripe");
  fails({.seq_len = 64, .cp_size = 2, .stripe = 0}, "stripe");
  fails({.seq_len = 64, .cp_size = 2, .stripe = -64}, "stripe");
  fails({.seq_len = 64, .cp_size = 4, .nodes = 3}, "nodes");
  fails({.seq_len = 64, .cp_size = 4, .nodes = 0}, "nodes");
  fails({.seq_len = (int64_t{1} << 31) - 1, .cp_size = 4}, "seq_len");
  const Layout layout({.seq_len = 64, .cp_size = 2});
  EXPECT_THROW(layout.owner(-1), InvalidArgument);
  EXPECT_THROW(layout.owner(128), InvalidArgument);
  EXPECT_THROW(layout.position(2, 0), InvalidArgument);
  EXPECT_THROW(layout.position(0, 64), InvalidArgument);
}

TEST(Layout, QuestionsThatALayoutCannotAnswerAreUnsupported) {
  const Layout zigzag({.kind = LayoutKind::kZigzag, .seq_len = 512, .cp_size = 2});
  EXPECT_THROW(zigzag.residue(0), Unsupported);
  EXPECT_THROW(zigzag.rank_of_residue(0), Unsupported);
  EXPECT_THROW(zigzag.blocks_per_stripe(), Unsupported);
  const Layout striped({.kind = LayoutKind::kStriped, .seq_len = 512, .cp_size = 2});
  EXPECT_THROW(striped.blocks_per_stripe(), Unsupported);
}

}  // namespace
}  // namespace mtraining::layout
