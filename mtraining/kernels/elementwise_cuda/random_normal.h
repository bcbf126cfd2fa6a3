// RandomNormal: the normal values of a stream of base/rng.h in a GPU's memory, the bits that a CPU makes.
//
// In:   an Rng, a count, a deviation. Out: values[i] = deviation x normal(i), float32 or that rounded to bf16. Next: model/random_tensor.cc.
//
// Stream: enqueues one launch, never synchronises, allocates nothing. Errors: Unsupported for other dtypes.
// Cost: integer arithmetic bounds it, twelve mixes a value: some 5 10^10 values a second on an H100.
#pragma once

#include <cstdint>

#include "mtraining/base/rng.h"
#include "mtraining/kernels/params.h"

namespace mtraining::kernels::elementwise_cuda {

void random_normal(const Rng& rng, double deviation, int64_t count, DType dtype, void* values,
                   void* stream);

}  // namespace mtraining::kernels::elementwise_cuda
