// Rounding on a GPU: a float32 result as a 16-bit one and what that lost, and back.
//
// In:   contiguous arrays in device memory, 16-byte aligned. Out: the others, in one pass. Next: attention/, torch_ops/.
//
// Stream: enqueues, never synchronises, allocates nothing. Errors: Unsupported for a dtype of more than 16 bits.
#pragma once

#include <cstdint>

#include "mtraining/kernels/params.h"

namespace mtraining::kernels::rounding_cuda {

/// rounded = values in dtype, residual = values - rounded in dtype (null: not wanted).
void split(const float* values, int64_t count, DType dtype, void* rounded, void* residual,
           void* stream);
/// values = rounded + residual (null: zeros).
void join(const void* rounded, const void* residual, int64_t count, DType dtype, float* values,
          void* stream);

}  // namespace mtraining::kernels::rounding_cuda
