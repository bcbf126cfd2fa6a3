// Transport over torch's c10d: Gloo on the CPU, NCCL on GPUs. The only file pair of this folder that includes torch.
//
// In:   the launcher's environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) or explicit values; or torch.distributed's group.
// Out:  a Transport. Next: cli/ opens it once a process; torch_ops/ over a group that Python made.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "mtraining/comm/transport.h"

namespace c10 {
struct IValue;
}

namespace mtraining::comm {

struct C10dOptions {
  std::string backend = "gloo";  ///< "gloo" | "nccl"
  std::string master_addr = "127.0.0.1";
  int master_port = 0;
  int rank = 0;
  int size = 1;
  /// Replaces master_port: rank 0 is told the free port where its store listens, and returns it; the others return what rank 0
  /// was told. So no port is named before it is held.
  std::function<int(int port)> share_port = {};
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
};

/// Collective over all ranks. Errors: ExternalError naming address, port and cause.
std::unique_ptr<Transport> make_c10d(const C10dOptions& options);
/// A transport among some ranks of a process group that exists already.
struct GroupTransportOptions {
  std::vector<int64_t>
      members;  ///< ranks of the group, in the order that becomes the transport's; this rank among them
  std::string
      scope;  ///< the same on all members, and different from every other transport's of the group
  std::string master_addr;  ///< "": not known, so that Gloo looks the host's name up
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
  bool on_device =
      false;  ///< tensors on GPUs: communicators are NCCL's, those for host memory Gloo's
};
/// `group`: a boxed c10d::ProcessGroup (torch.distributed's ProcessGroup.boxed()). Only its store, rank and size are used: every
/// communicator that the transport opens is a group of its own. Local: the ranks meet at the first open. Errors:
/// InvalidArgument naming members.
std::unique_ptr<Transport> make_c10d_over(const c10::IValue& group,
                                          const GroupTransportOptions& options);
/// A free TCP port for a launcher on one host, which no other process is given until this goes: others that ask at the same time get other ones.
/// Whoever listens on it with SO_REUSEADDR, as torch's store does, is let in meanwhile.
class HeldPort {
 public:
  HeldPort();
  ~HeldPort();
  HeldPort(const HeldPort&) = delete;
  HeldPort& operator=(const HeldPort&) = delete;
  int port() const { return port_; }

 private:
  int fd_, port_ = 0;
};
/// One that nobody holds: for tests, whose ranks listen at once.
int free_port();

}  // namespace mtraining::comm
