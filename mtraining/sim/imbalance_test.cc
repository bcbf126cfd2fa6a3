#include "mtraining/sim/imbalance.h"

#include <gtest/gtest.h>

#include <numeric>

#include "mtraining/base/check.h"
#include "mtraining/sim/pattern_shapes.h"

namespace mtraining::sim {
namespace {

using layout::Layout;
using layout::LayoutKind;
using ring::InnerKind;
using ring::RingKind;
using ring::ScheduleOptions;
using topology::Topology;

ScheduleOptions flat(const Topology& topology) {
  return {.topology = topology, .ring = RingKind::kFlat};
}
ScheduleOptions hierarchical(const Topology& topology, InnerKind inner) {
  return {.topology = topology, .ring = RingKind::kHierarchical, .inner = inner};
}

Imbalance balance(const index::Index& index, LayoutKind kind, int64_t stripe,
                  const ScheduleOptions& ring, ColumnCost columns = ColumnCost::kOnce) {
  const int nodes = ring.ring == RingKind::kHierarchical ? ring.topology.nodes : 1;
  const Layout layout({.kind = kind,
                       .seq_len = index.seq_len,
                       .cp_size = ring.topology.cp_size(),
                       .stripe = stripe,
                       .nodes = nodes});
  return measure(step_loads(count_pairs(index, layout), ring, columns), ring);
}

int64_t computed_pairs(const index::Index& index) {
  int64_t sum = 0;
  for (int h = 0; h < index.num_q_heads; ++h) sum += index::computed_pairs(index, 0, h);
  return sum;
}

TEST(PairTable, SumsToThePairsOfTheIndexOnEveryLayout) {
  for (std::string_view shape : pattern_shapes()) {
    const index::Index index = to_index(make_pattern(shape, 9999, 8));
    for (LayoutKind kind :
         {LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kBlockStriped}) {
      for (int world : {1, 3, 8}) {
        const PairTable table =
            count_pairs(index, Layout({.kind = kind, .seq_len = 9999, .cp_size = world}));
        const int64_t blocks =
            std::accumulate(table.blocks.begin(), table.blocks.end(), int64_t{0});
        const int64_t columns =
            std::accumulate(table.columns.begin(), table.columns.end(), int64_t{0});
        EXPECT_EQ(blocks + columns, computed_pairs(index)) << shape;
      }
    }
  }
}

TEST(PairTable, SparseIndexOnStripedIsUnsupported) {
  const index::Index sparse = to_index(make_pattern("local", 4096, 1));
  const Layout striped({.kind = LayoutKind::kStriped, .seq_len = 4096, .cp_size = 4});
  EXPECT_THROW(count_pairs(sparse, striped), Unsupported);
  EXPECT_NO_THROW(count_pairs(index::dense_index(1, 1, 4096), striped));
}

/// Two nodes of two ranks; pairs by (rank, source) written out.
PairTable small_table() {
  return {.cp_size = 4,
          .blocks = {4, 1, 2, 3,   //
                     5, 4, 3, 2,   //
                     2, 2, 6, 0,   //
                     3, 1, 2, 2},  //
          .columns = {1, 0, 0, 0,  //
                      0, 2, 0, 0,  //
                      0, 0, 3, 0,  //
                      0, 0, 0, 2}};
}

TEST(Imbalance, FlatRingWaitsForTheSlowestAtEveryLaunch) {
  const ScheduleOptions ring = flat({2, 2});
  const StepLoads loads = step_loads(small_table(), ring, ColumnCost::kNone);
  // Launch t of rank r is on source r - t.
  EXPECT_EQ(loads.by_step, (std::vector<std::vector<int64_t>>{
                               {4, 3, 2, 1}, {4, 5, 2, 3}, {6, 2, 2, 0}, {2, 2, 1, 3}}));
  const Imbalance result = measure(loads, ring);
  EXPECT_EQ(result.total_pairs, 42);
  EXPECT_DOUBLE_EQ(result.worker, 14 / 10.5);
  EXPECT_DOUBLE_EQ(result.lockstep, (6 + 5 + 2 + 3) / 10.5);
  EXPECT_DOUBLE_EQ(result.step_worst, 6 / 2.5);
  EXPECT_DOUBLE_EQ(result.step, (4 / 2.5 + 5 / 3.5 + 6 / 2.5 + 3 / 2.0) / 4);
}

TEST(Imbalance, HierarchicalRingWaitsInsideANodeAndAtOuterSteps) {
  const ScheduleOptions inner_ring = hierarchical({2, 2}, InnerKind::kRing);
  const StepLoads by_ring = step_loads(small_table(), inner_ring, ColumnCost::kNone);
  EXPECT_EQ(by_ring.outer_step, (std::vector<int>{0, 0, 1, 1}));
  EXPECT_EQ(by_ring.by_step, (std::vector<std::vector<int64_t>>{
                                 {4, 1, 2, 3}, {4, 5, 2, 3}, {6, 0, 2, 2}, {2, 2, 1, 3}}));
  // Outer step 0: node 0 takes 4 + 5, node 1 takes 6 + 2 (together 6 + 5). Outer step 1: 2 + 3 both.
  EXPECT_DOUBLE_EQ(measure(by_ring, inner_ring).lockstep, (9 + 5) / 10.5);

  const ScheduleOptions gather = hierarchical({2, 2}, InnerKind::kGather);
  const StepLoads by_gather = step_loads(small_table(), gather, ColumnCost::kNone);
  EXPECT_EQ(by_gather.by_step, (std::vector<std::vector<int64_t>>{{5, 5}, {9, 5}, {6, 4}, {4, 4}}));
  EXPECT_DOUBLE_EQ(measure(by_gather, gather).lockstep, (9 + 5) / 10.5);
}

TEST(Imbalance, ColumnsCountWhereTheyAreComputed) {
  const ScheduleOptions ring = flat({2, 2});
  const Imbalance once = measure(step_loads(small_table(), ring, ColumnCost::kOnce), ring);
  EXPECT_EQ(once.total_pairs, 50);
  EXPECT_DOUBLE_EQ(once.lockstep, (6 + 5 + 2 + 3 + 3) / 12.5);
  EXPECT_DOUBLE_EQ(once.worker, 16 / 12.5);
  const Imbalance per_step = measure(step_loads(small_table(), ring, ColumnCost::kPerStep), ring);
  EXPECT_EQ(per_step.total_pairs, 50);
  EXPECT_DOUBLE_EQ(per_step.lockstep, (9 + 5 + 2 + 3) / 12.5);
}

TEST(Imbalance, NothingToComputeIsBalanced) {
  const PairTable empty{.cp_size = 2, .blocks = {0, 0, 0, 0}, .columns = {0, 0, 0, 0}};
  const Imbalance result =
      measure(step_loads(empty, flat({1, 2}), ColumnCost::kOnce), flat({1, 2}));
  EXPECT_EQ(result.worker, 1);
  EXPECT_EQ(result.step, 1);
  EXPECT_EQ(result.lockstep, 1);
  EXPECT_THROW(step_loads(empty, flat({1, 3}), ColumnCost::kOnce), InvalidArgument);
}

// What the layouts promise.

TEST(BlockStripedBalance, SmallOnEveryShapeFromThirtyTwoThousandTokens) {
  for (std::string_view shape : pattern_shapes()) {
    for (int64_t seq_len : {32768, 131072, 524288}) {
      const index::Index index = to_index(make_pattern(shape, seq_len, 16));
      for (const Topology& topology : {Topology{2, 4}, Topology{4, 8}}) {
        SCOPED_TRACE(concat(shape, " ", seq_len, " ", topology::to_string(topology)));
        const Imbalance ours = balance(index, LayoutKind::kBlockStriped, 64, flat(topology));
        const Imbalance zigzag = balance(index, LayoutKind::kZigzag, 64, flat(topology));
        EXPECT_LE(ours.lockstep, 1.07);
        EXPECT_LE(ours.worker, 1.1);
        EXPECT_GT(zigzag.lockstep, ours.lockstep + 0.01);
        EXPECT_EQ(ours.total_pairs, computed_pairs(index));
        EXPECT_EQ(zigzag.total_pairs, computed_pairs(index));
        if (seq_len < 524288) continue;
        for (InnerKind inner : {InnerKind::kGather, InnerKind::kRing}) {
          EXPECT_LE(
              balance(index, LayoutKind::kBlockStriped, 64, hierarchical(topology, inner)).lockstep,
              1.02);
          EXPECT_LE(balance(index, LayoutKind::kBlockStriped, 128, hierarchical(topology, inner))
                        .lockstep,
                    1.02);
        }
      }
    }
  }
}

TEST(BlockStripedBalance, ResiduesNumberedNodeByNodeWouldMixDiagonals) {
  // The hierarchical ring on residues numbered for a flat one: the reason for local_rank * nodes +
  // node.
  const index::Index index = to_index(make_pattern("local", 131072, 16));
  const ScheduleOptions ring = hierarchical({4, 8}, InnerKind::kRing);
  const Layout as_flat({.seq_len = index.seq_len, .cp_size = 32, .nodes = 1});
  const double mixed =
      measure(step_loads(count_pairs(index, as_flat), ring, ColumnCost::kOnce), ring).lockstep;
  const double numbered = balance(index, LayoutKind::kBlockStriped, 64, ring).lockstep;
  EXPECT_LT(numbered, 1.02);
  EXPECT_GT(mixed, numbered + 0.05);
}

TEST(BlockStripedBalance, ColumnsPerStepUndoIt) {
  // Early columns crowd in few shards. In every step of the ring one rank holds such a shard and
  // all others wait for it. Attended to once, columns are spread like the query rows.
  const index::Index index = to_index(make_pattern("typical", 131072, 16));
  const ScheduleOptions ring = flat({4, 8});
  EXPECT_LT(balance(index, LayoutKind::kBlockStriped, 64, ring, ColumnCost::kOnce).lockstep, 1.02);
  EXPECT_GT(balance(index, LayoutKind::kBlockStriped, 64, ring, ColumnCost::kPerStep).lockstep,
            1.2);
}

TEST(BlockStripedBalance, DenseIsBalancedBothWays) {
  const index::Index dense = index::dense_index(1, 1, 131072);
  EXPECT_LE(balance(dense, LayoutKind::kBlockStriped, 64, flat({4, 8})).lockstep, 1.02);
  EXPECT_LE(balance(dense, LayoutKind::kZigzag, 64, flat({4, 8})).worker, 1.001);
  EXPECT_GT(balance(dense, LayoutKind::kContiguous, 64, flat({4, 8})).worker, 1.9);
}

}  // namespace
}  // namespace mtraining::sim
