// Rows: where a row of this rank's q or k lies; values that ranks add up, as a buffer.
//
// In:   a view and a place in it; a vector. Out: addresses. Next: observation.cc, block_choice.cc.
#pragma once

#include <cstdint>

#include "mtraining/comm/transport.h"
#include "mtraining/kernels/params.h"

namespace mtraining::pattern {

/// The row of (sample, local token, head).
inline const void* row_of(const kernels::ConstView& view, kernels::DType dtype, int64_t b,
                          int64_t token, int64_t head) {
  return static_cast<const uint8_t*>(view.data) +
         (b * view.stride_batch + token * view.stride_token + head * view.stride_head) *
             kernels::size_of(dtype);
}

comm::Buffer buffer_of(auto& values) {
  return {values.data(), static_cast<int64_t>(values.size() * sizeof(values[0]))};
}

}  // namespace mtraining::pattern
