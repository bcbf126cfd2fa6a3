// Buffers: memory that every call of one RingContext shares, allocated when first needed and grown only.
//
// In:   sizes and types. Out: tensors that are views of kept storage, valid until the same buffer is asked for again.
// Next: ring_pass.cc (slots), column_exchange.cc, ring_attention.cc (state).
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "mtraining/ring/schedule.h"

namespace mtraining::attention {

class Buffers {
 public:
  /// Contiguous, uninitialised.
  at::Tensor get(const std::string& name, at::IntArrayRef sizes, at::ScalarType dtype,
                 at::Device device);
  int64_t bytes() const;

 private:
  std::map<std::string, at::Tensor> storage_;  // flat uint8
};

/// The slots that a Schedule names: K and V of shards, dk and dv of shards. Slots of one kind lie one behind another, so that a
/// gather into a run of slots is a gather into one piece of memory.
class RingSlots {
 public:
  /// own_k, own_v: slot 0; contiguous where anything is sent. `grad_wire`: the type in which gradients travel.
  RingSlots(Buffers& buffers, const ring::Schedule& schedule, const at::Tensor& own_k,
            const at::Tensor& own_v, at::ScalarType grad_state, at::ScalarType grad_wire);

  /// Forgets own_k and own_v: the pass is over.
  void release_own() {
    k_.front().reset();
    v_.front().reset();
  }
  at::Tensor& k(int slot) { return k_[slot]; }
  at::Tensor& v(int slot) { return v_[slot]; }
  at::Tensor& dk(int slot) { return dk_[slot]; }
  at::Tensor& dv(int slot) { return dv_[slot]; }
  /// True where gradients travel in another type than they are summed in: then the wire tensors are what is sent and received.
  bool grads_are_converted() const { return !wire_dk_.empty(); }
  at::Tensor& wire_dk(int slot) { return grads_are_converted() ? wire_dk_[slot] : dk_[slot]; }
  at::Tensor& wire_dv(int slot) { return grads_are_converted() ? wire_dv_[slot] : dv_[slot]; }

 private:
  std::vector<at::Tensor> k_, v_, dk_, dv_, wire_dk_, wire_dv_;
};

}  // namespace mtraining::attention
