#include "mtraining/sim/traffic_bytes.h"

#include <gtest/gtest.h>

#include "mtraining/layout/layout.h"

namespace mtraining::sim {
namespace {

TEST(TrafficBytes, AHopOfQwen25AtHalfAMillionTokensOver32RanksIs16MiB) {
  const ShardSizes sizes{.tokens = 524288 / 32, .num_kv_heads = 2};
  EXPECT_EQ(sizes.kv_bytes(), 16 << 20);
  EXPECT_EQ(sizes.grad_bytes(), 32 << 20);
  const auto bytes = ring_bytes({.topology = {4, 8}, .ring = ring::RingKind::kFlat}, sizes, false);
  EXPECT_EQ(bytes[7].outer, int64_t{31} * (16 << 20));
  EXPECT_EQ(bytes[7].inner, 0);
  EXPECT_EQ(bytes[6].inner, int64_t{31} * (16 << 20));
}

TEST(TrafficBytes, AHierarchicalRingSendsATenthOfAFlatOnesBytesBetweenNodesPerLink) {
  const ShardSizes sizes{.tokens = 1024, .num_kv_heads = 2};
  for (ring::InnerKind inner : {ring::InnerKind::kGather, ring::InnerKind::kRing}) {
    const ring::ScheduleOptions options{
        .topology = {4, 8}, .ring = ring::RingKind::kHierarchical, .inner = inner};
    for (const LinkBytes& rank : ring_bytes(options, sizes, false)) {
      EXPECT_EQ(rank.outer, 3 * sizes.kv_bytes());
      EXPECT_EQ(rank.inner, 28 * sizes.kv_bytes());
      EXPECT_EQ(rank.total(), 31 * sizes.kv_bytes());
    }
    for (const LinkBytes& rank : ring_bytes(options, sizes, true)) {
      EXPECT_EQ(rank.outer, 3 * sizes.kv_bytes() + 4 * sizes.grad_bytes());
    }
  }
}

TEST(TrafficBytes, ColumnRowsGoToEveryOtherRankOnce) {
  const auto index = index::make_index(1, 2, 256, {{0}, {0}}, {{0, 70}, {70, 200}});
  const layout::Layout layout({.seq_len = 256, .cp_size = 4});
  const auto plan = index::plan_columns(index, layout, 1, 100);
  const ShardSizes sizes{.tokens = 64, .num_kv_heads = 1};
  // Rows 0, 70 and 200 live on ranks 0, 1 and 3: one row a rank.
  EXPECT_EQ(column_bytes(plan, 4, sizes, false), 1 * 2 * 128 * 2 * 3);
  EXPECT_EQ(column_bytes(plan, 4, sizes, true), 1 * 2 * 128 * (2 + 4) * 3);
  EXPECT_EQ(column_bytes(plan, 1, sizes, true), 0);
}

}  // namespace
}  // namespace mtraining::sim
