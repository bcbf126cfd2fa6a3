// RandomTensor: the normal values of a stream of base/rng.h as a tensor, the same bits on every device.
//
// In:   an Rng, a shape, a deviation, a device and a type. Out: element i = deviation x normal(i). Next: decoder.cc (first weights).
//
// On the CPU all threads make them; on a GPU a kernel of the same integer arithmetic (elementwise_cuda/random_normal.h).
#pragma once

#include <ATen/core/Tensor.h>

#include "mtraining/base/rng.h"

namespace mtraining::model {

/// Stream: the current one. Errors: Unsupported on a GPU for other types than float32 and bf16.
at::Tensor random_normal(const Rng& rng, at::IntArrayRef shape, double deviation, at::Device device,
                         at::ScalarType dtype);

}  // namespace mtraining::model
