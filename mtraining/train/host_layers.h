// HostLayers: what the first layers keep between forward and backward, in pinned host memory.
//
// In:   a layer's tensors in forward. Out: the same bytes on the device in backward, on their way since the layer after it began.
// Next: recompute.h.
//
// Copies run on a stream of their own beside the layers' kernels. The host never waits and tensors are freed in the order of the
// current stream: one that is put away is held until the layer after the next comes, when its copy is long done. Host memory is
// allocated at a layer's first turn and stays: a train step allocates none of it again. On the CPU the tensors are kept as they are.
// A layer that is put away is not sent at once: a device's copies to the host run in the order of their coming, whatever their stream, and
// the next layer's choice of an index waits for few bytes of such a copy. send() is called behind that choice.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <vector>

namespace mtraining::train {

class HostLayers {
 public:
  /// Of layers 0 .. count - 1. One thread at a time.
  HostLayers(at::Device device, int64_t count);
  /// After an error too: what is allocated later on the current stream is not written to by copies that are still under way.
  ~HostLayers();
  HostLayers(const HostLayers&) = delete;
  HostLayers& operator=(const HostLayers&) = delete;

  bool holds(int64_t layer) const { return layer >= 0 && layer < count_; }
  /// Undefined tensors stay undefined. A layer's tensors are of the same sizes each time.
  /// Sent by the next send(), or by any other call that comes first.
  void put(int64_t layer, std::vector<at::Tensor> tensors);
  /// Begins to send what was put away last, behind the work that the current stream has now; else nothing.
  void send();
  /// Once a put(); the current stream waits for the bytes.
  std::vector<at::Tensor> take(int64_t layer);
  /// Begins to bring a layer back, where it has been put away; else nothing.
  void fetch(int64_t layer);
  /// Forgets what a pass that was given up has left.
  void clear();
  int64_t host_bytes() const;

 private:
  struct Kept {
    std::vector<at::Tensor> memory;  ///< pinned bytes, pieces of powers of two
    std::vector<at::Tensor>
        shapes;  ///< on the meta device: sizes and types; undefined where nothing was
    std::vector<at::Tensor> tensors;     ///< on the CPU what was put; else what comes back
    std::optional<c10::Event> returned;  ///< of the copies into `tensors`
    bool is_away = false;
  };
  struct Leaving {
    std::vector<at::Tensor> tensors;
    c10::Event copied;
  };
  void release_left();
  struct Waiting {
    int64_t layer = 0;
    std::vector<at::Tensor> tensors;
  };

  at::Device device_;
  int64_t count_;
  std::optional<c10::Stream> copies_;
  std::map<int64_t, Kept> kept_;
  std::optional<Waiting> waiting_;
  std::deque<Leaving> leaving_;
};

}  // namespace mtraining::train
