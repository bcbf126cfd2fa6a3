// Schedule: who sends what to whom and when, for one rank, as data. No tensors, no threads, no
// clocks.
//
// In:   a Topology, which ring (flat or hierarchical, inner gather or ring), ring_stride,
//       prefetch_steps.
// Out:  one list of operations for forward and one for backward, with explicit dependencies, buffer
//       slots and channels.
// Next: attention/ interprets it over comm/ and kernels/; sim/ interprets the same list over a cost
//       model.
//
// Source: paper Alg. 2 and section 3.4; docs/math/ring.md. Thread-safe once built.
//
// Words: a *kv slot* holds the K and V of one shard; slot 0 is the rank's own shard and never a
// receive target. A *grad slot* holds a float32 (dk, dv) of one shard. An operation may start when
// all operations in `after` have completed on this rank, and the list's order is one legal order of
// issue on every rank without deadlock, also where waiting for `after` blocks the issuing thread,
// given that exchanges, gathers and reduce-scatters are asynchronous until an operation that names
// them in `after` runs. Transfers of one channel are issued, and launches run, in list order.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "mtraining/base/words.h"
#include "mtraining/topology/topology.h"

namespace mtraining::ring {

enum class RingKind { kFlat, kHierarchical };
enum class InnerKind { kGather, kRing };
inline constexpr Word<RingKind> kRingWords[] = {{"flat", RingKind::kFlat},
                                                {"hierarchical", RingKind::kHierarchical}};
inline constexpr Word<InnerKind> kInnerWords[] = {{"gather", InnerKind::kGather},
                                                  {"ring", InnerKind::kRing}};

/// Errors: InvalidArgument names the known kinds.
RingKind parse_ring_kind(std::string_view name);
InnerKind parse_inner_kind(std::string_view name);
std::string_view to_string(RingKind kind);
std::string_view to_string(InnerKind kind);

/// Which communicator (and on a GPU which stream) an operation uses; they never share one. An
/// addition names the channel that it feeds: on a GPU that channel's stream can run it, so that the
/// next launch does not wait for received gradients. Launches and zeroings belong to the compute
/// stream; for a launch the channel means nothing, for a zeroing it tells whose slot it is.
enum class Channel { kFlatKv, kInnerKv, kOuterKv, kFlatGrad, kInnerGrad, kOuterGrad };
std::string_view to_string(Channel channel);
/// Carries K and V (else dk and dv).
bool is_kv(Channel channel);

enum class OpKind {
  kExchange,   ///< send `send_slot` to `to`, receive into `recv_slot` from `from` (cp ranks)
  kAllGather,  ///< inner: kv slot `send_slot` of every rank of the node into `slots` (local_rank
               ///< order; consecutive slots, never `send_slot` itself)
  kReduceScatter,  ///< inner: sums grad `slots` (local_rank order, consecutive) over the node; own
                   ///< part lands in `recv_slot`
  kLaunch,         ///< one kernel launch over `sources`
  kZeroGrad,       ///< grad slot `recv_slot` = 0
  kAddGrad,        ///< grad slot `recv_slot` += grad slot `send_slot`
};
std::string_view to_string(OpKind kind);

/// One shard that a launch attends to.
struct SourceRef {
  int source_rank = 0;
  int kv_slot = 0;
  int grad_slot = -1;  ///< backward only: where dk, dv of this shard are accumulated
};

struct Op {
  OpKind kind = OpKind::kLaunch;
  int id = 0;  ///< its index in the list
  std::vector<int>
      after;  ///< ids of earlier operations whose completion it needs (data arrived, or a
              ///< slot free again); none that another one of them already implies
  Channel channel = Channel::kFlatKv;
  int to = -1, from = -1;              ///< kExchange
  int send_slot = -1, recv_slot = -1;  ///< kv slots on Kv channels, grad slots on Grad channels
  std::vector<int> slots;              ///< kAllGather, kReduceScatter
  std::vector<SourceRef> sources;      ///< kLaunch; own shard first where it is among them
  int ring_step = 0;   ///< 0-based launch number that this operation serves (for traces and tables)
  int outer_step = 0;  ///< 0 for flat
};

struct Schedule {
  std::vector<Op> ops;
  int num_kv_slots = 1;  ///< slot 0 = own shard, not allocated by the executor
  int num_grad_slots = 0;
  int home_grad_slot = -1;  ///< backward: where this rank's own, complete (dk, dv) are at the end
};

struct ScheduleOptions {
  topology::Topology topology;
  RingKind ring = RingKind::kHierarchical;
  InnerKind inner = InnerKind::kGather;
  int ring_stride =
      1;  ///< flat only (1 otherwise); coprime to cp_size. A rank sends to the one that
          ///< many places on. Errors: InvalidArgument otherwise.
  /// >= 1: how many transfers of K and V may be under way or waiting ahead of the launch. flat and
  /// inner ring: before launch t those of launches up to t + prefetch_steps have been issued (inner
  /// ring: within the outer step, beside one outer transfer). inner gather: before launch t the
  /// gathers up to launch t + prefetch_steps - 1 and the outer transfer after them. On a ring, launches
  /// may also run that many steps ahead of the hops that take their gradients along.
  int prefetch_steps = 2;
  /// >= 1; flat and inner ring: how many arrived shards a launch takes. The first launch takes the own shard by itself, for transfers
  /// to travel under it. Prefetch then counts launches: transfers of that many whole launches are ahead. Memory: (prefetch_steps + 1) *
  /// launch_shards slots.
  int launch_shards = 1;
};

/// launch_shards where nobody gives it: one on the CPU. On a GPU, where every launch reads and writes the state and fills the device
/// anew, half of the ring's shards: the own one, then the others in two launches. Two ranks of a node: both at once, as the link between
/// them is quicker than a launch is dear.
int chosen_launch_shards(RingKind ring, const topology::Topology& topology, bool on_gpu);

/// Shapes: flat and inner ring have launches of one source, W of them, or of up to launch_shards; inner
/// gather `nodes` launches of L sources. The own shard is in the first launch. Every rank of the group
/// gets lists that match pairwise. A hierarchical ring over 1xL or Lx1 with one rank a node is one
/// ring on the inner or outer channels.
Schedule forward_schedule(const ScheduleOptions& options, int cp_rank);
/// As forward, plus gradients: flat (dk, dv) make W hops, or W - 1 after a launch of all shards; hierarchical: L inner hops or one
/// reduce-scatter an outer step, starting from zero, and `nodes` outer hops (none with one node).
/// With cp_size 1: one launch, grad slot 0 is home.
Schedule backward_schedule(const ScheduleOptions& options, int cp_rank);

int num_launches(const Schedule& schedule);

/// Payload units that a rank sends: kv units (one K and one V shard) and grad units (one dk and one
/// dv shard) by channel.
struct Traffic {
  int64_t kv_inner = 0, kv_outer = 0, grad_inner = 0,
          grad_outer = 0;  ///< flat hops count by whether they leave the node
};
/// An all-gather over L ranks counts L-1 units sent, a reduce-scatter likewise.
Traffic traffic(const Schedule& schedule, const topology::Topology& topology, int cp_rank);

}  // namespace mtraining::ring
