#include "mtraining/attention/buffers.h"

#include <algorithm>

namespace mtraining::attention {

at::Tensor Buffers::get(const std::string& name, at::IntArrayRef sizes, at::ScalarType dtype,
                        at::Device device) {
  int64_t bytes = static_cast<int64_t>(c10::elementSize(dtype));
  for (int64_t size : sizes) bytes *= size;
  at::Tensor& storage = storage_[name];
  if (!storage.defined() || storage.device() != device || storage.numel() < bytes) {
    storage.reset();  // the old one goes before the new one comes
    storage = at::empty({std::max<int64_t>(bytes, 16)},
                        at::TensorOptions().dtype(at::kByte).device(device));
  }
  return storage.slice(0, 0, bytes).view(dtype).view(sizes);
}

int64_t Buffers::bytes() const {
  int64_t bytes = 0;
  for (const auto& [name, storage] : storage_) bytes += storage.defined() ? storage.numel() : 0;
  return bytes;
}

RingSlots::RingSlots(Buffers& buffers, const ring::Schedule& schedule, const at::Tensor& own_k,
                     const at::Tensor& own_v, at::ScalarType grad_state, at::ScalarType grad_wire) {
  const auto slots = [&](const char* name, int count, at::ScalarType dtype) {
    std::vector<int64_t> sizes = own_k.sizes().vec();
    sizes.insert(sizes.begin(), count);
    return buffers.get(name, sizes, dtype, own_k.device()).unbind(0);
  };
  k_ = {own_k};
  v_ = {own_v};
  if (schedule.num_kv_slots > 1) {
    for (at::Tensor& slot : slots("k slots", schedule.num_kv_slots - 1, own_k.scalar_type()))
      k_.push_back(slot);
    for (at::Tensor& slot : slots("v slots", schedule.num_kv_slots - 1, own_v.scalar_type()))
      v_.push_back(slot);
  }
  if (schedule.num_grad_slots > 0) {
    dk_ = slots("dk slots", schedule.num_grad_slots, grad_state);
    dv_ = slots("dv slots", schedule.num_grad_slots, grad_state);
    if (grad_wire != grad_state) {
      wire_dk_ = slots("dk slots on the wire", schedule.num_grad_slots, grad_wire);
      wire_dv_ = slots("dv slots on the wire", schedule.num_grad_slots, grad_wire);
    }
  }
}

}  // namespace mtraining::attention
