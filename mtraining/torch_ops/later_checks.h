// Later checks: what a device finds wrong is said by a later call on that device, since nobody waits for it.
//
// In:   a few numbers in device memory and what they must be. Out: the sentence, thrown once. Next: block_bits.cc, device_ops.cc.
//
// Any thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

namespace mtraining::torch_ops {

/// Throws where it dislikes the numbers.
using NumberCheck = std::function<void(const int64_t* numbers)>;

/// numbers: int64, contiguous. In the CPU's memory they are looked at now, in a GPU's once a copy of them has come. Stream: enqueues the
/// copy, does not synchronise.
void check_when_known(const at::Tensor& numbers, NumberCheck check);
/// int64 [2], where `wrong` (bool, of the shape of values) is: the first place there, flat, or -1, and the value at it.
at::Tensor first_where(const at::Tensor& wrong, const at::Tensor& values);
/// Looks at what has come from this device; what throws is not looked at again.
void check_what_came(at::Device device);

}  // namespace mtraining::torch_ops
