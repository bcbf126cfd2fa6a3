// KeyWalk: which blocks of keys a warpgroup of the Hopper estimation visits, and where each lies in a ring that one thread fills ahead.
//
// In:   the warpgroup, the tiles of rows that its thread block owns. Out: blocks, slots, parities of the barriers to wait for; which
//       blocks are copied when. Next: window_sm90_kernel.cuh.
//
// A barrier tells its phases apart by parity alone: who waits for one must have waited for the phase before it. Hence a ring of whole
// steps: a warpgroup comes back to the slots it has visited and to no others, and copies may land in any order.
#pragma once

#include "mtraining/kernels/pattern_cuda/fault.h"

namespace mtraining::kernels::pattern_cuda {

struct KeyWalk {
  static constexpr int kGroups = 8;      // warpgroups of a thread block
  static constexpr int kTilesHeld = 13;  // in shared memory: of rows, the others of keys
  /// Tiles of rows of a thread block at least. With one, every warpgroup would visit every eighth block, further apart than the copies
  /// that one visit begins reach: the others would never come.
  static constexpr int kLeastTiles = 2;

  int first, step;   // blocks first, first + step, ..
  int stages;        // slots of the ring
  int slot, parity;  // of the block at work

  /// tiles: kLeastTiles, 4 or kGroups.
  MT_HOST_DEVICE constexpr KeyWalk(int group, int tiles)
      : first(group / tiles),
        step(kGroups / tiles),
        stages((kTilesHeld - tiles) / step * step),
        slot(first),
        parity(0) {}
  MT_HOST_DEVICE constexpr void next() {
    slot += step;
    if (slot < stages) return;
    slot -= stages;
    parity ^= 1;
  }
  /// Before anything is visited blocks [0, load_until(0)) are copied, before block i > 0 those of [load_from(i), load_until(i)): into
  /// slots of two blocks back and earlier, and at least up to the next block.
  MT_HOST_DEVICE constexpr int load_from(int i) const { return i - step + stages - 1; }
  MT_HOST_DEVICE constexpr int load_until(int i) const { return i + stages - 1; }
};

}  // namespace mtraining::kernels::pattern_cuda
