// ListUploads: host lists where kernels read them: the lists themselves on the CPU, copies in device memory on a GPU.
//
// In:   vectors that stay where they are as long as this object, or until clear(). Out: pointers. Next: index_plan.cc,
//       ring_attention.cc.
//
// A vector is copied when it is first asked for, through pinned memory, on the current stream, while the host goes on. One thread, one
// stream: a later call on another stream must have waited for the first one.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

namespace mtraining::attention {

/// A copy in the device's memory of `bytes` bytes, made while the host goes on.
at::Tensor upload(const void* data, int64_t bytes, at::Device device);

class ListUploads {
 public:
  template <typename T>
  const T* get(const std::vector<T>& values, at::Device device) {
    if (device.is_cpu() || values.empty()) return values.data();
    return static_cast<const T*>(
        copy(values.data(), static_cast<int64_t>(values.size() * sizeof(T)), device));
  }
  void clear() { copies_.clear(); }
  int64_t bytes() const;

 private:
  const void* copy(const void* data, int64_t bytes, at::Device device);

  std::map<std::pair<const void*, at::DeviceIndex>, at::Tensor> copies_;
};

}  // namespace mtraining::attention
