// Device loopback: N ranks as threads of one process that share one GPU, for rings of any shape on one card.
//
// In:   a number of ranks, one function, the stream that each thread works on, how fast links are.
// Out:  that function ran once per rank, each with a Transport over device memory. Next: attention's tests, bench/.
//
// torch runs the backward of all threads of a GPU on one thread: here a backward that waits for other ranks is called directly, not through
// torch::autograd. The laws are those of loopback.h. A call is matched between threads; its bytes are then moved by copies (sums: a kernel, in rank
// order) on a stream of their own, one a communicator and receiving rank, ordered by events: after what sender and receiver had
// enqueued when they called. Work::wait() waits until the peers have called, then lets the thread's stream wait: never for the device.
// A link with a rate is held as long as its bytes would take: transfers that leave one rank over one kind of link follow one another.
#pragma once

#include <chrono>
#include <functional>

#include "mtraining/comm/transport.h"

namespace mtraining::comm {

struct DeviceLoopbackOptions {
  /// cudaStream_t that the calling thread's work is ordered on; null or absent: the default stream.
  std::function<void*()> current_stream;
  /// Ranks of a node, for the kind of a link; 0: all of them.
  int ranks_per_node = 0;
  /// What leaves a rank, to a rank of its node and to others; 0: no limit. Exchanges, all-gathers and reduce-scatters are held back;
  /// all-reduces and broadcasts, which are small here, are not.
  double inner_bytes_per_s = 0, outer_bytes_per_s = 0;
  std::chrono::milliseconds timeout = std::chrono::seconds(60);
};

/// As run_loopback, on the current device; `body` runs with it current. The device has done everything when this returns.
/// Errors: those of body; ExternalError from CUDA.
void run_device_loopback(int ranks, const std::function<void(Transport&)>& body,
                         const DeviceLoopbackOptions& options);

}  // namespace mtraining::comm
