// TrafficBytes: what one attention layer sends, by kind of link.
//
// In:   a ring, a shard's sizes, the index's union of columns.
// Out:  payload bytes that each rank sends, forward and backward, as comm::Counters counts them.
// Next: cli/ prints them; tests compare them with what a Transport counted.
#pragma once

#include <cstdint>
#include <vector>

#include "mtraining/index/columns.h"
#include "mtraining/ring/schedule.h"

namespace mtraining::sim {

/// Sizes of a rank's K (and V) shard, [batch, tokens, num_kv_heads, head_dim].
struct ShardSizes {
  int64_t batch = 1;
  int64_t tokens = 0;
  int64_t num_kv_heads = 1;
  int64_t head_dim = 128;
  int64_t kv_element_bytes = 2;
  int64_t grad_element_bytes = 4;

  int64_t kv_bytes() const {
    return 2 * batch * tokens * num_kv_heads * head_dim * kv_element_bytes;
  }
  int64_t grad_bytes() const {
    return 2 * batch * tokens * num_kv_heads * head_dim * grad_element_bytes;
  }
};

struct LinkBytes {
  int64_t inner = 0, outer = 0;  ///< to ranks of the same node, of other nodes
  int64_t total() const { return inner + outer; }
};

/// Per rank, [cp_size], the ring alone.
std::vector<LinkBytes> ring_bytes(const ring::ScheduleOptions& options, const ShardSizes& sizes,
                                  bool backward);

/// Column rows gathered once from all ranks, per rank and the same on each: K and V rows of every
/// slice to the W - 1 others; with `backward` also their gradients, reduced to the owners.
int64_t column_bytes(const index::ColumnPlan& plan, int cp_size, const ShardSizes& sizes,
                     bool backward);

}  // namespace mtraining::sim
