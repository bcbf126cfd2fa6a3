// Shared memory of the forward kernel and what producer and consumers tell each other through it.
//
// In:   head_dim. Out: offsets, notes, ring positions. Next: forward_producer.cuh, forward_consumer.cuh.
#pragma once

#include <cstdint>

namespace mtraining::kernels::sm90 {

// A warp arrives at a barrier once, its first lane for all after __syncwarp(). compute-sanitizer racecheck does not follow that
// order from lane to lane: with MT_SM90_RACECHECK every lane arrives for itself, and the tool sees the same order.
#ifdef MT_SM90_RACECHECK
inline constexpr int kArrivals = 32;
#else
inline constexpr int kArrivals = 1;
#endif

/// kGradients: of the backward's walk by query blocks. Its queries stay in shared memory, dout and statistics beside them. The
/// forward's take a stage of the ring, from which they go to registers; where these cannot hold them, they stay, and there is so little
/// room for stages that the values of one come after the keys of the next, which are needed at the same time.
template <int kD, bool kGradients = false>
struct ForwardShape {
  static constexpr bool kWithGradients = kGradients;
  static constexpr int kGroups = 2;  // consumer warpgroups, one query block each
  static constexpr bool kQueriesInRing = !kGradients && kD <= 128;
  static constexpr bool kValuesApart = !kGradients && kD > 128;
  static constexpr int kStages = kGradients     ? 5 * 128 / kD
                                 : kValuesApart ? 2
                                 : kD <= 64     ? 13
                                                : 7 * 128 / kD;
  // Tiles: [D / kAtom][64 rows][kAtom of D], swizzled over rows of kAtom elements.
  static constexpr int kAtom = kD % 64 == 0 ? 64 : 32;
  static constexpr int kRowBytes = kAtom * 2, kAtomBytes = 64 * kRowBytes;
  static constexpr int kTileBytes = 64 * kD * 2;
  static constexpr int kQueryTiles = kGradients       ? 2
                                     : kQueriesInRing ? 0
                                                      : 1;  // of a group, beside the ring
  static constexpr int kStatisticsBytes = kGradients ? 2 * 64 * 4 : 0;
  static constexpr int kQ = kStages * 2 * kTileBytes;
  static constexpr int kStatistics = kQ + kGroups * kQueryTiles * kTileBytes;
  static constexpr int kNotes = kStatistics + kGroups * kStatisticsBytes;
  static constexpr int kPositions = kNotes + kStages * kGroups * 16;
  static constexpr int kItems = kPositions + kStages * 256;
  static constexpr int kBarriers = kItems + kGroups * 16;
  static constexpr int kBytes =
      kBarriers + ((kValuesApart ? 4 : 2) * kStages + 2 * kGroups + 1) * 8;
  static constexpr int kConsumerWarps = 4 * kGroups;
  static constexpr int kThreads =
      32 * kConsumerWarps + 128;  // the producer is one warp of a warpgroup
  static constexpr int kConsumerRegisters = 232,
                       kProducerRegisters = 40;  // of 65536 / kThreads each at launch

  /// Where the 16 bytes from element 8 * chunk on of a tile's row are.
  static __device__ __forceinline__ uint32_t chunk_at(uint32_t tile, uint32_t row, uint32_t chunk) {
    constexpr uint32_t kChunks = kRowBytes / 16;
    const uint32_t swizzle = kChunks == 8 ? row % 8 : row / 2 % 4;
    return tile + chunk / kChunks * kAtomBytes + row * kRowBytes + (chunk % kChunks ^ swizzle) * 16;
  }

  // Addresses from that of the whole.
  static __device__ __forceinline__ uint32_t keys(uint32_t base, uint32_t slot) {
    return base + slot * 2 * kTileBytes;
  }
  static __device__ __forceinline__ uint32_t values(uint32_t base, uint32_t slot) {
    return base + (slot * 2 + 1) * kTileBytes;
  }
  /// A group's queries in a stage that brings an item.
  static __device__ __forceinline__ uint32_t item_queries(uint32_t base, uint32_t slot,
                                                          uint32_t group) {
    return base + (slot * 2 + group) * kTileBytes;
  }
  static __device__ __forceinline__ uint32_t queries(uint32_t base, uint32_t group) {
    return base + kQ + group * kQueryTiles * kTileBytes;
  }
  static __device__ __forceinline__ uint32_t dout(uint32_t base, uint32_t group) {
    return queries(base, group) + kTileBytes;
  }
  static __device__ __forceinline__ uint32_t statistics(uint32_t base, uint32_t group) {
    return base + kStatistics + group * kStatisticsBytes;
  }
  static __device__ __forceinline__ uint32_t note(uint32_t base, uint32_t slot, uint32_t group) {
    return base + kNotes + (slot * kGroups + group) * 16;
  }
  static __device__ __forceinline__ uint32_t positions(uint32_t base, uint32_t slot) {
    return base + kPositions + slot * 256;
  }
  static __device__ __forceinline__ uint32_t item(uint32_t base, uint32_t group) {
    return base + kItems + group * 16;
  }
  // Barriers: a stage is loaded; a stage is done with (every consumer warp); where queries have no stage, a group's are loaded; done with.
  static __device__ __forceinline__ uint32_t full(uint32_t base, uint32_t slot) {
    return base + kBarriers + slot * 8;
  }
  static __device__ __forceinline__ uint32_t empty(uint32_t base, uint32_t slot) {
    return base + kBarriers + (kStages + slot) * 8;
  }
  static __device__ __forceinline__ uint32_t q_full(uint32_t base, uint32_t group) {
    return base + kBarriers + (2 * kStages + group) * 8;
  }
  static __device__ __forceinline__ uint32_t q_empty(uint32_t base, uint32_t group) {
    return base + kBarriers + (2 * kStages + kGroups + group) * 8;
  }
  /// Of kValuesApart: a stage's values are loaded; done with. full() and empty() are of the keys alone.
  static __device__ __forceinline__ uint32_t values_full(uint32_t base, uint32_t slot) {
    return base + kBarriers + (2 * (kStages + kGroups) + 1 + slot) * 8;
  }
  static __device__ __forceinline__ uint32_t values_empty(uint32_t base, uint32_t slot) {
    return base + kBarriers + (2 * (kStages + kGroups) + 1 + kStages + slot) * 8;
  }
  /// Of kGradients: keys whose padding must be cleaned are loaded.
  static __device__ __forceinline__ uint32_t uncleaned(uint32_t base) {
    return base + kBarriers + 2 * (kStages + kGroups) * 8;
  }
};

// A stage's note for one group: {flags, position of the first key, 64 bits of keys that count}.
inline constexpr uint32_t kNeeded = 1;    // this group uses the stage
inline constexpr uint32_t kMaskBits = 2;  // only the keys whose bit is set count
inline constexpr uint32_t kMaskEach = 4;  // also compare positions pair by pair
inline constexpr uint32_t kColumns = 8;   // key positions are in the stage's list
// The item is complete. Of kQueriesInRing: it brings the next, {kEnd, row, query block}, queries in place of keys and values.
inline constexpr uint32_t kEnd = 16;
inline constexpr int kFlagBits = 5;
inline constexpr uint32_t kNoSlot = ~0u;
// An item's row where there are no more.
inline constexpr uint32_t kNoRow = ~0u;

/// The next stage: how many came before it, its slot, the parity its barriers complete with.
template <int kStages>
struct RingCursor {
  uint32_t index = 0, slot = 0, parity = 0;
  __device__ __forceinline__ void advance() {
    ++index;
    if (++slot == kStages) {
      slot = 0;
      parity ^= 1;
    }
  }
};

}  // namespace mtraining::kernels::sm90
