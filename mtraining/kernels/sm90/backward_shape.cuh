// Shared memory of the key-stationary backward and what producer and consumers tell each other through it.
//
// In:   head_dim. Out: offsets, notes. Next: backward_lister.cuh, backward_producer.cuh, backward_consumer.cuh.
#pragma once

#include <cstdint>

#include "mtraining/kernels/sm90/forward_shape.cuh"

namespace mtraining::kernels::sm90 {

/// kWithQueries: dq is computed too, by a third consumer warpgroup from the score gradients that the two groups leave.
template <int kD, bool kWithQueries>
struct BackwardShape {
  static constexpr int kGroups = 2;               // consumer warpgroups, 64 keys each
  static constexpr int kTileBytes = 64 * kD * 2;  // [D / 64][64 rows][64 of D], 128-byte swizzle
  // With dq, a third stage of head_dim 128 would fit; it made launches 1 % slower.
  static constexpr int kStages = (kWithQueries ? 2 : 4) * 128 / kD;
  // dq is computed 64 of D at a time: narrower products would read the score gradients from shared memory more often than it bears.
  static constexpr int kParts = kD / 64;
  static constexpr int kPartBytes = 2 * 16 * 128;  // a part of a warp: [2][16 rows][32 of D]
  static constexpr int kScoreBytes = 64 * 64 * 2;  // dS^T of a group: [64 keys][64 queries]
  static constexpr int kStatisticsBytes = 2 * 64 * 4;
  static constexpr int kNoteBytes = 32;
  static constexpr int kListed = 8;  // entries that the lister is ahead

  static constexpr int kQueries = 2 * kGroups * kTileBytes;
  static constexpr int kScores = kQueries + kStages * 2 * kTileBytes;
  static constexpr int kOutgoing = kScores + (kWithQueries ? 2 * kGroups * kScoreBytes : 0);
  static constexpr int kStatistics = kOutgoing + (kWithQueries ? 8 * kPartBytes : 0);
  /// Two places of each warp, in turn.
  static __device__ __forceinline__ uint32_t outgoing(uint32_t base, uint32_t place,
                                                      uint32_t warp) {
    return base + kOutgoing + (place * 4 + warp) * kPartBytes;
  }
  static constexpr int kNotes = kStatistics + kStages * kStatisticsBytes;
  static constexpr int kPositions = kNotes + kStages * kNoteBytes;
  static constexpr int kItem = kPositions + kGroups * 64 * 4;
  static constexpr int kEntries = kItem + 32;
  static constexpr int kBarriers = kEntries + kListed * kNoteBytes;
  static constexpr int kBytes = kBarriers + (2 * (kStages + kListed) + 11) * 8;
  static constexpr int kKeyWarps = 4 * kGroups;
  static constexpr int kConsumerWarps = kKeyWarps + (kWithQueries ? 4 : 0);
  static constexpr int kThreads = 32 * kConsumerWarps + 128;
  // Of a thread; times 128, they are the 65536 of an SM.
  static constexpr int kKeyRegisters = kWithQueries ? 208 : 232, kQueryRegisters = 64,
                       kProducerRegisters = kWithQueries ? 32 : 40;

  static __device__ __forceinline__ uint32_t keys(uint32_t base, uint32_t group) {
    return base + group * kTileBytes;
  }
  static __device__ __forceinline__ uint32_t values(uint32_t base, uint32_t group) {
    return base + (kGroups + group) * kTileBytes;
  }
  static __device__ __forceinline__ uint32_t queries(uint32_t base, uint32_t slot) {
    return base + kQueries + slot * 2 * kTileBytes;
  }
  static __device__ __forceinline__ uint32_t dout(uint32_t base, uint32_t slot) {
    return queries(base, slot) + kTileBytes;
  }
  static __device__ __forceinline__ uint32_t scores(uint32_t base, uint32_t buffer,
                                                    uint32_t group) {
    return base + kScores + (buffer * kGroups + group) * kScoreBytes;
  }
  static __device__ __forceinline__ uint32_t statistics(uint32_t base, uint32_t slot) {
    return base + kStatistics + slot * kStatisticsBytes;
  }
  static __device__ __forceinline__ uint32_t note(uint32_t base, uint32_t slot) {
    return base + kNotes + slot * kNoteBytes;
  }
  static __device__ __forceinline__ uint32_t positions(uint32_t base, uint32_t group) {
    return base + kPositions + group * 256;
  }
  static __device__ __forceinline__ uint32_t item(uint32_t base) { return base + kItem; }
  static __device__ __forceinline__ uint32_t entry(uint32_t base, uint32_t slot) {
    return base + kEntries + slot * kNoteBytes;
  }
  // Barriers: a stage is loaded; done with (every consumer warp); the item's keys are loaded; done with; rows to be cleaned are
  // loaded; a group's buffer of score gradients is written; read; an entry is listed; taken.
  static __device__ __forceinline__ uint32_t full(uint32_t base, uint32_t slot) {
    return base + kBarriers + slot * 8;
  }
  static __device__ __forceinline__ uint32_t empty(uint32_t base, uint32_t slot) {
    return base + kBarriers + (kStages + slot) * 8;
  }
  static __device__ __forceinline__ uint32_t keys_full(uint32_t base) {
    return base + kBarriers + 2 * kStages * 8;
  }
  static __device__ __forceinline__ uint32_t keys_empty(uint32_t base) {
    return keys_full(base) + 8;
  }
  static __device__ __forceinline__ uint32_t uncleaned(uint32_t base) {
    return keys_full(base) + 16;
  }
  static __device__ __forceinline__ uint32_t scores_full(uint32_t base, uint32_t buffer,
                                                         uint32_t group) {
    return keys_full(base) + 24 + (buffer * kGroups + group) * 8;
  }
  static __device__ __forceinline__ uint32_t scores_empty(uint32_t base, uint32_t buffer,
                                                          uint32_t group) {
    return keys_full(base) + 56 + (buffer * kGroups + group) * 8;
  }
  static __device__ __forceinline__ uint32_t listed(uint32_t base, uint32_t slot) {
    return keys_full(base) + 88 + slot * 8;
  }
  static __device__ __forceinline__ uint32_t taken(uint32_t base, uint32_t slot) {
    return listed(base, kListed + slot);
  }
};

// An item's note: {kind and source << 8, row or (sample, kv head), first key row or column, keys that exist from there on}.
inline constexpr uint32_t kItemBlocks = 0, kItemColumns = 1, kItemEnd = 2;
// A stage's note: {flags of group 0 | flags of group 1 << 8, position of the first query, query block, head | batch << 16},
// {bits of keys that count: group 0, group 1}. Flags as in the forward's notes; kEnd, in both: the item's last.
inline constexpr int kGroupFlags = 8;
// An entry of the list: a stage's note; with this bit in the first word, an item's.
inline constexpr uint32_t kItemEntry = 1u << 31;

/// The next place of a ring of kPlaces, a power of two: one register, where the consumers have none to spare.
template <int kPlaces>
struct CountedCursor {
  static_assert((kPlaces & (kPlaces - 1)) == 0);
  uint32_t count = 0;
  __device__ __forceinline__ uint32_t slot() const { return count % kPlaces; }
  __device__ __forceinline__ uint32_t parity() const { return count / kPlaces & 1; }
  __device__ __forceinline__ void advance() { ++count; }
};

}  // namespace mtraining::kernels::sm90
