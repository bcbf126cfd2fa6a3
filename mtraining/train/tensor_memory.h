// TensorMemory: bytes of the tensors that this thread has made and that still live, now and at most.
//
// In:   a device type; a Scope around the work. Out: live and peak bytes. Next: metrics (peak_tensor_bytes), tests of what is kept.
//
// The allocators report each tensor's memory to the thread's counter (torch's hook for profilers), on the CPU as well as on a GPU.
// Unlike the process's resident memory, what is freed is seen at once, ranks that are threads are counted apart, and a
// peak can be taken of a part of a step. What is freed outside of a Scope goes unseen; backward runs under the Scope of its caller.
#pragma once

#include <c10/core/DeviceType.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstdint>
#include <memory>

namespace mtraining::train {

class TensorMemory {
 public:
  explicit TensorMemory(c10::DeviceType device = c10::DeviceType::CPU);

  int64_t live_bytes() const;
  /// Since the start or the last reset_peak().
  int64_t peak_bytes() const;
  void reset_peak();

  /// Counts what the thread allocates and frees while it lives. Scopes of one thread end in reverse order.
  class Scope {
   public:
    explicit Scope(TensorMemory& memory);

   private:
    c10::DebugInfoGuard guard_;
  };

 private:
  class Counter;
  std::shared_ptr<Counter> counter_;
};

/// Largest resident memory of this process since its start.
int64_t peak_resident_bytes();

}  // namespace mtraining::train
