// Reduction in rank order: one formula for every transport that sums on the host, so that loopback and Gloo agree bit for bit.
//
// In:   one array a rank. Out: their sum or maximum in every destination. Next: loopback.cc, c10d.cc.
//
// float32 is summed in float32 from rank 0 upwards, bf16 in float32 and rounded once at the end, float64 and integers in their
// own type. A NaN in any array makes the result NaN, for sums and maxima. Thread-safe.
#pragma once

#include <cstdint>
#include <span>

#include "mtraining/comm/transport.h"

namespace mtraining::comm {

/// destinations[d][i] = op over r of sources[r][i], 0 <= i < count. Destinations may be sources.
void reduce(ElementType type, ReduceOp op, int64_t count, std::span<const void* const> sources,
            std::span<void* const> destinations);

}  // namespace mtraining::comm
