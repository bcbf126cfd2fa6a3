// Transport over torch's c10d: Gloo on the CPU, NCCL on GPUs. The only file pair of this folder that includes torch.
//
// In:   the launcher's environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) or explicit values. Out: a Transport.
// Next: cli/ opens it once a process.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "mtraining/comm/transport.h"

namespace mtraining::comm {

struct C10dOptions {
  std::string backend = "gloo";  ///< "gloo" | "nccl"
  std::string master_addr = "127.0.0.1";
  int master_port = 0;
  int rank = 0;
  int size = 1;
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
};

/// Collective over all ranks. Errors: ExternalError naming address, port and cause.
std::unique_ptr<Transport> make_c10d(const C10dOptions& options);
/// A free TCP port on the loopback address, for a launcher on one host.
int free_port();

}  // namespace mtraining::comm
