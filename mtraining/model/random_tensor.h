// RandomTensor: the normal values of a stream of base/rng.h as a tensor, the same bits on every device.
//
// In:   an Rng, a shape, a deviation, a device and a type. Out: element i = deviation x normal(i). Next: decoder.cc (first weights).
//
// On the CPU all threads make them; on a GPU the same integer arithmetic runs as tensor operations, about 10^9 values a second.
#pragma once

#include <ATen/core/Tensor.h>

#include "mtraining/base/rng.h"

namespace mtraining::model {

at::Tensor random_normal(const Rng& rng, at::IntArrayRef shape, double deviation, at::Device device,
                         at::ScalarType dtype);
/// The way of a GPU, on any device.
at::Tensor random_normal_by_tensors(const Rng& rng, at::IntArrayRef shape, double deviation,
                                    at::Device device, at::ScalarType dtype);

}  // namespace mtraining::model
