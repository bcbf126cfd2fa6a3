// LoopbackMemory: how the bytes of a matched loopback call move. Private to the loopback files of this folder.
//
// In:   copies and sums that ranks of one process have agreed on. Out: done at once (host memory), or enqueued (a GPU's).
// Next: loopback.cc calls it; loopback_device.cc is the one over device memory.
//
// A Mark stands for "everything that a thread had enqueued when it made the mark". In host memory nothing is enqueued: marks are null.
// Thread-safe: the rank that comes last to a call moves its bytes, for all.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "mtraining/comm/transport.h"

namespace mtraining::comm {

class LoopbackMemory {
 public:
  using Mark = std::shared_ptr<void>;
  /// Calls of one communicator that one rank receives: they keep their order, those of two lines have none.
  struct Line {
    int64_t communicator = 0;
    int job_rank = 0;
  };
  struct Copy {
    const void* from = nullptr;
    void* to = nullptr;
    int64_t bytes = 0;
  };

  virtual ~LoopbackMemory() = default;
  virtual bool on_device() const { return true; }
  /// Of the calling rank's thread.
  virtual Mark mark() = 0;
  /// What the calling thread enqueues from here on waits for it.
  virtual void await(const Mark& mark) = 0;
  /// Copies of one transfer from job rank `from` to the line's, once `after` is reached. The mark of its end.
  virtual Mark copy(const Line& line, std::span<const Mark> after, int from,
                    std::span<const Copy> copies) = 0;
  /// As reduce() of reduce.h, once `after` is reached. senders: job ranks whose links carry the sources; empty: not looked at.
  virtual Mark reduce(const Line& line, std::span<const Mark> after, std::span<const int> senders,
                      ElementType type, ReduceOp op, int64_t count,
                      std::span<const void* const> sources,
                      std::span<void* const> destinations) = 0;
};

/// run_loopback whose open() gives communicators over `device` (null: host memory) and whose open_host() those over host memory.
void run_loopback_over(LoopbackMemory* device, int ranks,
                       const std::function<void(Transport&)>& body,
                       std::chrono::milliseconds timeout);

}  // namespace mtraining::comm
