// RingRanks: where the ranks of a ring bench run: threads over memory, threads that share one GPU, one rank alone, or this process as
// one rank of a job.
//
// In:   a topology and a place. Out: `body` ran once per rank that lives in this process. Next: ring_bench.cc.
//
// Alone: rank 0 of the ring runs its launches on whatever its buffers hold; transfers cost nothing and bring nothing, so that what
// launches take, and how long the host takes to issue them, can be told from what transfers take.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>

#include "mtraining/comm/transport.h"
#include "mtraining/topology/topology.h"

namespace mtraining::bench {

struct RingPlace {
  bool on_gpu = false;
  bool alone = false;
  /// Of ranks that share a GPU: what leaves one, inside a node and between nodes; 0: no limit.
  double inner_bytes_per_s = 0, outer_bytes_per_s = 0;
  /// This process is one rank of a job; its GPU is current. Null: all ranks are here.
  comm::Transport* job = nullptr;
};
/// Errors: Unsupported: no CUDA in this build, or no GPU; InvalidArgument: a job of another size.
void run_ranks(const RingPlace& place, const topology::Topology& topology,
               const std::function<void(comm::Transport&, at::Device)>& body);
/// "NVIDIA H200, CUDA 13.0 as 8 ranks"
std::string device_name(const RingPlace& place, const topology::Topology& topology);
/// Returns when the device has done what this thread's stream holds.
void wait_for_stream(at::Device device);

}  // namespace mtraining::bench
