// Peer copies: a communicator among processes of one host whose GPUs read each other's memory; bytes move by copy engines.
//
// In:   a communicator of the same ranks over host memory, by which they meet. Out: a Communicator over device memory.
// Next: c10d.cc opens it where a ring asks for copies.
//
// What a rank sends is copied into memory that it shares with the others (CUDA IPC), on the caller's stream; two such slots, so that one
// is filled while the other is read. Whoever receives copies out of it on a stream of its own, as soon as the sender has come to the
// call: a thread of the communicator waits for that, not the caller. Streams wait for one another by events that processes share. Sums
// are a kernel that reads all ranks' slots, in rank order: the same bits in every repeat and as over host memory.
#pragma once

#include <chrono>
#include <functional>
#include <string>

#include "mtraining/comm/transport.h"

namespace mtraining::comm {

struct PeerCopiesOptions {
  CommunicatorPtr host;                   ///< the same ranks, over host memory
  std::function<void*()> current_stream;  ///< cudaStream_t of the calling thread
  std::function<std::string()>
      failure;  ///< the job's first cause of failure, or nothing; asked while waiting
  std::function<void(const std::string& cause)> report;  ///< told of what a wait fails with
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
};

/// A communicator that somebody can break, so that whoever waits in it fails at once.
class PeerCopiesCommunicator : public Communicator {
 public:
  virtual void break_off(const std::string& cause) noexcept = 0;
};

/// Collective over the group; the current device is the rank's. Errors: Unsupported on every member alike: more than 16 ranks, no common
/// shared memory, GPUs that cannot map each other's memory, with CUDA's words.
std::shared_ptr<PeerCopiesCommunicator> make_peer_copies(const std::string& name,
                                                         const PeerCopiesOptions& options);

}  // namespace mtraining::comm
