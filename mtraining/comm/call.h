// Call: what one rank asked of a communicator, as data that ranks can compare, and the checks every transport does alike.
//
// In:   the arguments of a Communicator call. Out: a description; InvalidArgument where the arguments contradict themselves; the
//       counted bytes. Next: loopback.cc, c10d.cc.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "mtraining/comm/transport.h"

namespace mtraining::comm {

enum class CallKind : int32_t { kAllGather, kReduceScatter, kAllReduce, kBroadcast, kBarrier };

/// A collective call. All ranks of a group must make equal ones in the same order. Trivially copyable: it travels between processes.
struct Call {
  CallKind kind = CallKind::kBarrier;
  ElementType type = ElementType::kInt64;
  ReduceOp op = ReduceOp::kSum;
  int32_t root = -1;
  int64_t bytes = 0;     ///< of one part
  int64_t sequence = 0;  ///< how many collectives this rank called before on this communicator
  bool operator==(const Call&) const = default;
};
/// "all_reduce(64 bytes of float32, sum) as collective 3"
std::string describe(const Call& call);
/// "exchange 2: sends [16, 16] bytes to 1, receives [16, 16] bytes from 3"
std::string describe_exchange(int64_t sequence, int to, const std::vector<int64_t>& send_bytes,
                              int from, const std::vector<int64_t>& recv_bytes);

/// Each checks one call's own arguments; errors: InvalidArgument naming the communicator. Returns the call without its sequence.
Call check_all_gather(const Communicator& group, ConstBuffer send, const std::vector<Buffer>& recv);
Call check_reduce_scatter(const Communicator& group, const std::vector<ConstBuffer>& send,
                          Buffer recv, ElementType type);
Call check_all_reduce(const Communicator& group, Buffer data, ElementType type, ReduceOp op);
Call check_broadcast(const Communicator& group, Buffer data, int root);
void check_exchange(const Communicator& group, int to, const std::vector<ConstBuffer>& send,
                    int from, const std::vector<Buffer>& recv);

/// Payload that `rank` sends in this call, as Counters define it.
int64_t payload_bytes(const Call& call, int rank, int size);
template <typename AnyBuffer>
std::vector<int64_t> part_bytes(const std::vector<AnyBuffer>& parts) {
  std::vector<int64_t> bytes;
  for (const AnyBuffer& part : parts) bytes.push_back(part.bytes);
  return bytes;
}
/// InvalidArgument unless `members` is ascending, not empty and within the job.
void check_members(const std::string& name, const std::vector<int>& members, int job_size);
std::string describe_members(const std::string& name, const std::vector<int>& members);

}  // namespace mtraining::comm
