// OptimizerStorage: where float32 masters and moments live, and so where AdamW runs.
//
// In:   the device of the parameters, parallel.offload_optimizer. Out: vectors there; gradients brought there.
// Next: parameter_share.h keeps masters in it, adamw.h moments.
//
// On the device of the parameters nothing is copied. Offloaded, the vectors are host memory, the update runs on the host, and a rank
// moves its part of the gradient down and of the parameters up, once a train step (host_update.h). On the CPU both are the same
// memory.
// Source: paper section 4 (ZeRO-2 with the optimizer offloaded).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

namespace mtraining::optim {

class OptimizerStorage {
 public:
  virtual ~OptimizerStorage() = default;
  virtual at::Device device() const = 0;
  /// float32 [size], zero.
  virtual at::Tensor zeros(int64_t size) const = 0;
  /// The values as float32 on device(): the tensor itself where it is that already. Stream: complete on the host when it returns.
  virtual at::Tensor bring(const at::Tensor& values) const = 0;
};

std::shared_ptr<const OptimizerStorage> make_optimizer_storage(at::Device parameters, bool offload);

}  // namespace mtraining::optim
