#include "mtraining/kernels/pattern_cuda/device.h"

#include <map>
#include <mutex>

#include "mtraining/base/check.h"

namespace mtraining::kernels::pattern_cuda {

void check_cuda(cudaError_t error, const char* what) {
  MT_CHECK_EXTERNAL(error == cudaSuccess, what, ": ", cudaGetErrorString(error));
}

const DeviceKind& device_of_stream() {
  static std::mutex mutex;
  static std::map<int, DeviceKind> known;
  int device = 0;
  check_cuda(cudaGetDevice(&device), "asking for the device");
  const std::lock_guard<std::mutex> lock(mutex);
  const auto [at, is_unknown] = known.try_emplace(device);
  if (is_unknown) {
    DeviceKind& kind = at->second;
    kind.cuda = true;
    const auto ask = [&](int* value, cudaDeviceAttr attribute) {
      check_cuda(cudaDeviceGetAttribute(value, attribute, device), "asking for the device's kind");
    };
    ask(&kind.major, cudaDevAttrComputeCapabilityMajor);
    ask(&kind.minor, cudaDevAttrComputeCapabilityMinor);
    ask(&kind.num_sms, cudaDevAttrMultiProcessorCount);
  }
  return at->second;
}

}  // namespace mtraining::kernels::pattern_cuda
