#include "mtraining/attention/list_uploads.h"

#include <ATen/ATen.h>

#include <cstring>

namespace mtraining::attention {

at::Tensor upload(const void* data, int64_t bytes, at::Device device) {
  at::Tensor pinned = at::empty({bytes}, at::TensorOptions().dtype(at::kByte).pinned_memory(true));
  std::memcpy(pinned.mutable_data_ptr(), data, static_cast<size_t>(bytes));
  return pinned.to(device, /*non_blocking=*/true);
}

const void* ListUploads::copy(const void* data, int64_t bytes, at::Device device) {
  at::Tensor& kept = copies_[{data, device.index()}];
  if (!kept.defined()) kept = upload(data, bytes, device);
  return kept.const_data_ptr();
}

int64_t ListUploads::bytes() const {
  int64_t bytes = 0;
  for (const auto& [key, kept] : copies_) bytes += kept.numel();
  return bytes;
}

}  // namespace mtraining::attention
