// Device memory for tests and benches of the CUDA kernels: owned, checked, filled from host vectors.
//
// In:   host vectors. Out: device pointers that live as long as the object. Next: *_test.cc, bench/.
// Stream: the default one; copies synchronise.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "mtraining/base/check.h"

namespace mtraining::kernels::sm90 {

inline void check_device(cudaError_t error, const char* what) {
  MT_CHECK_EXTERNAL(error == cudaSuccess, what, ": ", cudaGetErrorString(error));
}

/// Movable owner of device memory; every byte starts as 0xFF (NaN in all float types).
class DeviceMemory {
 public:
  DeviceMemory() = default;
  explicit DeviceMemory(int64_t bytes) : bytes_(bytes) {
    check_device(cudaMalloc(&data_, bytes > 0 ? bytes : 1), "cudaMalloc");
    check_device(cudaMemset(data_, 0xFF, bytes), "cudaMemset");
  }
  template <typename T>
  explicit DeviceMemory(const std::vector<T>& values)
      : DeviceMemory(static_cast<int64_t>(values.size() * sizeof(T))) {
    check_device(cudaMemcpy(data_, values.data(), bytes_, cudaMemcpyHostToDevice),
                 "cudaMemcpy to the device");
  }
  DeviceMemory(DeviceMemory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  DeviceMemory& operator=(DeviceMemory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~DeviceMemory() { cudaFree(data_); }

  template <typename T = void>
  T* get() const {
    return static_cast<T*>(data_);
  }
  int64_t bytes() const { return bytes_; }
  template <typename T>
  std::vector<T> read() const {
    std::vector<T> values(bytes_ / sizeof(T));
    check_device(
        cudaMemcpy(values.data(), data_, values.size() * sizeof(T), cudaMemcpyDeviceToHost),
        "cudaMemcpy from the device");
    return values;
  }

 private:
  void* data_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace mtraining::kernels::sm90
