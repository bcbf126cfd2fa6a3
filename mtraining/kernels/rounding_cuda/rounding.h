// Rounding on a GPU: float32 sums as 16-bit results.
//
// In:   contiguous arrays in device memory, 16-byte aligned. Out: the same in dtype. Next: attention/, torch_ops/.
//
// Stream: enqueues one launch, never synchronises, allocates nothing. Errors: Unsupported for a dtype of more than 16 bits and
// for more arrays than kMaxRounded.
#pragma once

#include <cstdint>
#include <span>

#include "mtraining/kernels/params.h"

namespace mtraining::kernels::rounding_cuda {

inline constexpr int kMaxRounded = 4;

struct Rounded {
  const float* values = nullptr;
  int64_t count = 0;
  void* to = nullptr;
};
/// To nearest, ties to even.
void round(std::span<const Rounded> arrays, DType dtype, void* stream);

}  // namespace mtraining::kernels::rounding_cuda
