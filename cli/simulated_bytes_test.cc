// What sim/ says a layer sends is what the ring's communicators counted.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <vector>

#include "mtraining/attention/ring_attention.h"
#include "mtraining/base/check.h"
#include "mtraining/base/parallel.h"
#include "mtraining/comm/loopback.h"
#include "mtraining/index/columns.h"
#include "mtraining/sim/pattern_shapes.h"
#include "mtraining/sim/traffic_bytes.h"

namespace mtraining {
namespace {

using attention::ColumnMode;
using attention::RingContext;
using attention::RingOptions;

constexpr int64_t kSeqLen = 1024;
constexpr int kKvHeads = 2, kHeadDim = 64;

struct LayerBytes {
  std::vector<int64_t> forward, backward;  // by rank
};

LayerBytes counted(const RingOptions& options, const index::Index& index) {
  const layout::Layout layout(options.layout);
  const int world = layout.cp_size();
  LayerBytes bytes{std::vector<int64_t>(world), std::vector<int64_t>(world)};
  comm::run_loopback(world, [&](comm::Transport& transport) {
    ThreadCountScope one_thread(1);
    RingContext context(options, transport);
    const int rank = context.cp_rank();
    const auto made = [&](int heads) {
      return at::ones({1, layout.tokens_per_rank(), heads, kHeadDim},
                      at::TensorOptions().dtype(at::kBFloat16));
    };
    const at::Tensor q = made(index.num_q_heads), k = made(kKvHeads), v = made(kKvHeads);
    const int64_t start = context.bytes_sent();
    const auto result = attention::ring_forward(context, q, k, v, index, 0);
    bytes.forward[rank] = context.bytes_sent() - start;
    attention::ring_backward(context, q, q, k, v, result.out, result.lse, index, 0);
    bytes.backward[rank] = context.bytes_sent() - start - bytes.forward[rank];
  });
  return bytes;
}

struct Case {
  topology::Topology topology;
  ring::RingKind ring;
  ring::InnerKind inner;
};

TEST(SimulatedBytes, AreThoseThatATransportCounts) {
  // Few columns, so that "once" is not given up for "per_step".
  sim::OffsetPattern pattern = sim::make_pattern("uneven", kSeqLen, 4);
  for (sim::OffsetHead& head : pattern.heads) {
    if (head.columns.size() > 40) head.columns.resize(40);
  }
  const index::Index index = sim::to_index(pattern);
  ASSERT_FALSE(index::union_too_large(index, kKvHeads));
  for (const Case& c : {Case{{1, 4}, ring::RingKind::kFlat, ring::InnerKind::kGather},
                        Case{{2, 2}, ring::RingKind::kFlat, ring::InnerKind::kGather},
                        Case{{2, 2}, ring::RingKind::kHierarchical, ring::InnerKind::kGather},
                        Case{{2, 2}, ring::RingKind::kHierarchical, ring::InnerKind::kRing},
                        Case{{3, 1}, ring::RingKind::kHierarchical, ring::InnerKind::kRing}}) {
    SCOPED_TRACE(concat(topology::to_string(c.topology), " ", ring::to_string(c.ring), " ",
                        ring::to_string(c.inner)));
    const int world = c.topology.cp_size();
    const int nodes = c.ring == ring::RingKind::kFlat ? 1 : c.topology.nodes;
    RingOptions options;
    options.layout = {.seq_len = kSeqLen, .cp_size = world, .nodes = nodes};
    options.topology = c.topology;
    options.ring = c.ring;
    options.inner = c.inner;
    options.max_column_rows_per_rank = 20;  // several slices

    const layout::Layout layout(options.layout);
    const sim::ShardSizes sizes{
        .tokens = layout.tokens_per_rank(), .num_kv_heads = kKvHeads, .head_dim = kHeadDim};
    const ring::ScheduleOptions schedule{.topology = c.topology, .ring = c.ring, .inner = c.inner};
    const auto ring_forward = sim::ring_bytes(schedule, sizes, false);
    const auto ring_backward = sim::ring_bytes(schedule, sizes, true);
    const auto plan =
        index::plan_columns(index, layout, kKvHeads, options.max_column_rows_per_rank);
    ASSERT_GT(plan.slices.size(), 1u);
    const int64_t columns_forward = sim::column_bytes(plan, world, sizes, false);
    const int64_t columns_backward = sim::column_bytes(plan, world, sizes, true);
    ASSERT_GT(columns_forward, 0);

    options.columns = ColumnMode::kPerStep;
    const LayerBytes per_step = counted(options, index);
    options.columns = ColumnMode::kOnce;
    const LayerBytes once = counted(options, index);
    for (int rank = 0; rank < world; ++rank) {
      SCOPED_TRACE(concat("rank ", rank));
      // Before a call the ranks compare a few numbers: some words a rank, the same in each call.
      const int64_t agreement = per_step.forward[rank] - ring_forward[rank].total();
      EXPECT_GE(agreement, 0);
      EXPECT_LE(agreement, 128 * (world - 1));
      EXPECT_EQ(per_step.backward[rank], ring_backward[rank].total() + agreement);
      EXPECT_EQ(once.forward[rank], ring_forward[rank].total() + columns_forward + agreement);
      EXPECT_EQ(once.backward[rank], ring_backward[rank].total() + columns_backward + agreement);
    }
  }
}

}  // namespace
}  // namespace mtraining
