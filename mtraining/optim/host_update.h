// HostUpdate: runs an update in host memory over gradients that lie on a GPU, chunk by chunk, while others travel.
//
// In:   a ParameterShare whose masters are in host memory and whose parameters are not; an update of a chunk.
// Out:  updated masters; parameters that take their values. Next: adamw.cc.
//
// Three chunks are under way: one comes down, one is updated, one goes up, each direction on a stream of its own, through pinned memory
// that is allocated once. The host waits for a chunk's arrival, never for the device as a whole.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "mtraining/optim/parameter_share.h"

namespace mtraining::optim {

/// Elements [begin, begin + size) of a rank's vectors that are updated alike.
struct UpdateChunk {
  int64_t begin = 0, size = 0;
  bool decays = false;
};

class HostUpdate {
 public:
  /// `threads`: of the update; 0: torch's.
  HostUpdate(ParameterShare& parameters, int64_t most_elements, int64_t threads);

  /// update(chunk, gradient): gradient float32 in host memory, which may be changed. Chunks in their order.
  void run(const std::vector<UpdateChunk>& chunks,
           const std::function<void(const UpdateChunk&, at::Tensor&)>& update);

 private:
  static constexpr size_t kPlaces = 3;
  struct Place {
    at::Tensor gradient, values;  // pinned
    std::optional<c10::Event> arrived, left;
  };
  void bring_down(const UpdateChunk& chunk, Place& place);

  ParameterShare& parameters_;
  int64_t threads_;
  c10::Stream down_, up_;
  at::Tensor wide_;  // a gradient as float32
  Place places_[kPlaces];
};

}  // namespace mtraining::optim
