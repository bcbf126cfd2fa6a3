// Block lists: the blocks that heads chose on a GPU as the lists that kernels read, made on that GPU.
//
// In:   a BlockChoice in device memory. Out: DeviceLists. Next: index_plan.cc.
//
// Only the bits stay. Lists are made anew for each launch, in buffers that all layers share: two short launches. Room for them is the
// most that the choice can have; where that is much, the host waits for one number, which was on its way since the choice.
#pragma once

#include <memory>

#include "mtraining/attention/block_patterns.h"

namespace mtraining::attention {

/// Enqueues on the current stream; waits for nothing.
std::shared_ptr<DeviceLists> block_lists_on_device(RingContext::State& state, BlockChoice choice);

}  // namespace mtraining::attention
