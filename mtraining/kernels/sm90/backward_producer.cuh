// The producer warp of the key-stationary backward: loads what the lister warp lists.
//
// In:   entries of the ring: items and their stages. Out: keys and values, stages of 64 queries and dout, notes, in shared memory.
// Next: backward_consumer.cuh.
#pragma once

#include <climits>

#include "mtraining/kernels/sm90/backward_args.cuh"
#include "mtraining/kernels/sm90/backward_shape.cuh"
#include "mtraining/kernels/sm90/ptx.cuh"

namespace mtraining::kernels::sm90 {

template <int kD, bool kWithQueries>
struct KeyProducer {
  using Shape = BackwardShape<kD, kWithQueries>;
  const BackwardArgs& args;
  uint32_t base;
  int lane;
  RingCursor<Shape::kListed> list;
  RingCursor<Shape::kStages> ring;
  uint64_t read_again = evict_normal_policy();
  uint32_t keys_parity = 1;  // with which the groups give back the keys of the item before
  uint32_t uncleaned_parity = 0;
  uint4 item = {};        // see kItemEntry
  bool keys_due = false;  // its keys are still to be loaded
  int32_t position[4];    // of its keys lane, lane + 32, ...; INT_MAX: none

  /// Lane 0 for the warp, after what the warp wrote or read.
  __device__ __forceinline__ void arrive(uint32_t barrier) const {
    __syncwarp();
    if (lane < kArrivals) mbarrier_arrive(barrier);
  }

  /// Zeros to rows of a tile whose bit is set: 0 times what padding holds may not be 0.
  __device__ __forceinline__ void clean(uint32_t tile, uint32_t low, uint32_t high) const {
    for (int row = 0; row < 64; ++row) {
      if (((row < 32 ? low : high) >> (row % 32) & 1) == 0) continue;
      if (lane < kD / 8)
        store_shared_v4(tile + lane / 8 * 8192 + row * 128 + lane % 8 * 16, 0, 0, 0, 0);
    }
  }

  /// Where the copies of a stage or an item report: directly, or to this warp, which then cleans rows.
  __device__ __forceinline__ uint32_t destination(uint32_t barrier, bool cleans) const {
    return cleans ? Shape::uncleaned(base) : barrier;
  }
  __device__ __forceinline__ void wait_uncleaned() {
    mbarrier_wait(Shape::uncleaned(base), uncleaned_parity);
    uncleaned_parity ^= 1;
  }

  /// The next stage. entry: {flags of both groups, position of the first query | 1 << 31 where rows must be cleaned, query block,
  /// head | batch << 16}.
  __device__ __forceinline__ void load_stage(const uint4& entry, const uint4& bits) {
    const uint32_t full = Shape::full(base, ring.slot), tile = Shape::queries(base, ring.slot),
                   statistics = Shape::statistics(base, ring.slot);
    const bool needed = (entry.x & (kNeeded | kNeeded << kGroupFlags)) != 0;
    const bool cleans = needed && static_cast<int32_t>(entry.y) < 0;
    mbarrier_wait(Shape::empty(base, ring.slot), ring.parity ^ 1);
    if (lane == 0) {
      const uint32_t note = Shape::note(base, ring.slot);
      const int head = static_cast<int>(entry.w & 0xffff), batch = static_cast<int>(entry.w >> 16),
                q_block = static_cast<int>(entry.z);
      store_shared_v4(note, entry.x, entry.y & INT_MAX, entry.z, entry.w);
      store_shared_v4(note + 16, bits.x, bits.y, bits.z, bits.w);
      if (needed) {
        const uint32_t barrier = destination(full, cleans);
        mbarrier_arrive_expect(barrier, 2 * Shape::kTileBytes + Shape::kStatisticsBytes);
        tensor_load_5d(tile, &args.q, barrier, read_again, 0, q_block * 64, 0,
                       head * args.q_head_step, batch * args.q_batch_step);
        tensor_load_5d(Shape::dout(base, ring.slot), &args.dout, barrier, read_again, 0,
                       q_block * 64, 0, head * args.dout_head_step, batch * args.dout_batch_step);
        const int64_t row = static_cast<int64_t>(batch) * args.num_heads + head;
        bulk_load(statistics, args.statistics + (row * args.num_q_blocks + q_block) * 128,
                  Shape::kStatisticsBytes, barrier);
      } else {
        mbarrier_arrive(full);
      }
    }
    if (cleans) {
      __syncwarp();
      wait_uncleaned();
      const bool low = load_shared_f32(statistics + lane * 4) == -INFINITY,
                 high = load_shared_f32(statistics + lane * 4 + 128) == -INFINITY;
      const uint32_t rows_low = __ballot_sync(~0u, low), rows_high = __ballot_sync(~0u, high);
      clean(tile, rows_low, rows_high);
      clean(tile + Shape::kTileBytes, rows_low, rows_high);
      fence_async_shared();
      arrive(full);
    } else if (kArrivals > 1 && lane > 0) {
      mbarrier_arrive(full);
    }
    __syncwarp();
    ring.advance();
  }

  // ---- keys ----

  __device__ __forceinline__ void take_item(const uint4& entry) {
    item = make_uint4(entry.x & ~kItemEntry, entry.y, entry.z, entry.w);
    keys_due = true;
    const SourceArgs& from = args.sources[item.x >> 8];
    const int first = static_cast<int>(item.z), keys = static_cast<int>(item.w);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = lane + 32 * i;
      position[i] = INT_MAX;
      if (key < keys) {
        position[i] = (item.x & 255) == kItemColumns
                          ? from.column_positions[item.y * from.column_capacity + first + key]
                          : from.block_starts[(first + key) / 64] + key % 64 * args.position_stride;
      }
    }
  }

  /// The item's keys, values and their positions.
  __device__ __forceinline__ void load_keys() {
    keys_due = false;
    mbarrier_wait(Shape::keys_empty(base), keys_parity);
    const SourceArgs& from = args.sources[item.x >> 8];
    const int unit = static_cast<int>(item.y), first = static_cast<int>(item.z),
              keys = static_cast<int>(item.w);
    uint32_t rows[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      store_shared_s32(Shape::positions(base, 0) + (lane + 32 * i) * 4, position[i]);
      rows[i] = __ballot_sync(~0u, position[i] >= args.seq_len && position[i] < INT_MAX);
    }
    const bool cleans = (rows[0] | rows[1] | rows[2] | rows[3]) != 0;
    __syncwarp();  // lane 0 arrives for what all lanes stored; a vote orders no memory
    if (lane == 0) {
      store_shared_v4(Shape::item(base), item.x, item.y, item.z, item.w);
      const uint32_t barrier = destination(Shape::keys_full(base), cleans);
      const int groups = keys > 64 ? 2 : 1;
      mbarrier_arrive_expect(barrier, groups * 2 * Shape::kTileBytes);
      for (int g = 0; g < groups; ++g) {
        if ((item.x & 255) == kItemColumns) {
          const int token = unit * args.gathered_rows + from.gathered_begin + first + 64 * g;
          tensor_load_5d(Shape::keys(base, g), &args.gathered_k, barrier, read_again, 0, token, 0,
                         0, 0);
          tensor_load_5d(Shape::values(base, g), &args.gathered_v, barrier, read_again, 0, token, 0,
                         0, 0);
        } else {
          const int head = unit % args.num_kv_heads, batch = unit / args.num_kv_heads;
          tensor_load_5d(Shape::keys(base, g), &from.k, barrier, read_again, 0, first + 64 * g, 0,
                         head * from.k_head_step, batch * from.k_batch_step);
          tensor_load_5d(Shape::values(base, g), &from.v, barrier, read_again, 0, first + 64 * g, 0,
                         head * from.v_head_step, batch * from.v_batch_step);
        }
      }
    }
    if (cleans) {
      __syncwarp();
      wait_uncleaned();
      clean(Shape::keys(base, 0), rows[0], rows[1]);
      clean(Shape::keys(base, 1), rows[2], rows[3]);
      fence_async_shared();
      arrive(Shape::keys_full(base));
    } else if (kArrivals > 1 && lane > 0) {
      mbarrier_arrive(Shape::keys_full(base));
    }
    __syncwarp();
    keys_parity ^= 1;
  }

  __device__ __forceinline__ void run() {
    if (lane == 0) {
      prefetch_tensor_map(&args.q);
      prefetch_tensor_map(&args.dout);
    }
    for (;;) {
      mbarrier_wait(Shape::listed(base, list.slot), list.parity);
      const uint32_t at = Shape::entry(base, list.slot);
      const uint4 entry = load_shared_v4(at), bits = load_shared_v4(at + 16);
      arrive(Shape::taken(base, list.slot));
      list.advance();
      if ((entry.x & kItemEntry) != 0) {
        if ((entry.x & 255) == kItemEnd) break;
        take_item(entry);
        continue;
      }
      // The item's first stage is on its way before the groups give back the keys of the item before.
      load_stage(entry, bits);
      if (keys_due) load_keys();
    }
    mbarrier_wait(Shape::keys_empty(base), keys_parity);
    if (lane == 0) store_shared_v4(Shape::item(base), kItemEnd, 0, 0, 0);
    arrive(Shape::keys_full(base));
  }
};

}  // namespace mtraining::kernels::sm90
