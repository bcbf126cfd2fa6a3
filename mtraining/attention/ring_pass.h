// RingPass: walks one Schedule, forward or backward: posts transfers, waits only for what an operation needs, calls the launch.
//
// In:   a Schedule, its slots, the context's communicators, a launch. Out: every operation done, every source attended once.
// Next: ring_attention.cc gives it the launches.
#pragma once

#include <functional>
#include <vector>

#include "mtraining/attention/buffers.h"
#include "mtraining/attention/ring_context.h"

namespace mtraining::attention {

class RingPass {
 public:
  using Launch = std::function<void(const ring::Op&)>;
  RingPass(RingContext::State& state, const ring::Schedule& schedule, RingSlots& slots)
      : state_(state), schedule_(schedule), slots_(slots), pending_(schedule.ops.size()) {}

  /// Collective over the context's ranks: posts the transfers that wait for nothing. run() goes on from there.
  void begin();
  /// Collective over the context's ranks. After it no transfer is under way. Errors: InternalError where the launches did not
  /// attend to every shard exactly once.
  void run(const Launch& launch);
  /// A transfer was posted that nobody has waited for yet, and that needs multiprocessors.
  bool needs_multiprocessors() const;

 private:
  struct Transfer {
    std::vector<comm::WorkPtr> works;
    std::vector<int> grad_slots_to_unpack;  // came in the wire's type
    bool needs_multiprocessors = false;
  };

  /// Of a transfer that has been posted.
  void posted(const ring::Op& op, bool sums);
  void exchange(const ring::Op& op);
  void all_gather(const ring::Op& op);
  void reduce_scatter(const ring::Op& op);
  void zero_grad(const ring::Op& op);
  void add_grad(const ring::Op& op);
  void finish(int id, int for_ring_step);
  void pack_grad(int slot);

  RingContext::State& state_;
  const ring::Schedule& schedule_;
  RingSlots& slots_;
  std::vector<Transfer> pending_;  // by operation
  size_t begun_ = 0;               // operations
};

}  // namespace mtraining::attention
