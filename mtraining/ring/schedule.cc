#include "mtraining/ring/schedule.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>

#include "mtraining/base/check.h"

namespace mtraining::ring {
namespace {

int modulo(int value, int size) { return ((value % size) + size) % size; }

/// Appends operations and derives `after` from the slots that they read and write: a reader needs
/// the slot's last writer, a writer needs the last writer and everybody who has read the slot
/// since. Builders below choose order and slots only.
class ScheduleBuilder {
 public:
  /// Slot 0 of the kv slots is the own shard, there from the start.
  ScheduleBuilder() : kv_(1) {}

  int add_kv_slot() { return add_slot(kv_); }
  int add_grad_slot() { return add_slot(grad_); }
  std::vector<int> add_kv_slots(int count) { return add_slots(kv_, count); }
  std::vector<int> add_grad_slots(int count) { return add_slots(grad_, count); }

  /// Ring and outer step of the operations appended from now on.
  void at(int ring_step, int outer_step) {
    ring_step_ = ring_step;
    outer_step_ = outer_step;
  }

  void exchange(Channel channel, int to, int send_slot, int from, int recv_slot) {
    Op op = start(OpKind::kExchange, channel);
    op.to = to;
    op.from = from;
    op.send_slot = send_slot;
    op.recv_slot = recv_slot;
    auto& slots = is_kv(channel) ? kv_ : grad_;
    read(op, slots[send_slot]);
    write(op, slots[recv_slot]);
    append(std::move(op));
  }

  void all_gather(int send_slot, const std::vector<int>& slots) {
    Op op = start(OpKind::kAllGather, Channel::kInnerKv);
    op.send_slot = send_slot;
    op.slots = slots;
    read(op, kv_[send_slot]);
    for (int slot : slots) write(op, kv_[slot]);
    append(std::move(op));
  }

  void reduce_scatter(const std::vector<int>& slots, int recv_slot) {
    Op op = start(OpKind::kReduceScatter, Channel::kInnerGrad);
    op.slots = slots;
    op.recv_slot = recv_slot;
    for (int slot : slots) read(op, grad_[slot]);
    write(op, grad_[recv_slot]);
    append(std::move(op));
  }

  void launch(std::vector<SourceRef> sources) {
    Op op = start(OpKind::kLaunch, Channel::kFlatKv);
    for (const SourceRef& source : sources) {
      read(op, kv_[source.kv_slot]);
      if (source.grad_slot >= 0) write(op, grad_[source.grad_slot]);
    }
    op.sources = std::move(sources);
    append(std::move(op));
  }

  void zero_grad(Channel channel, int slot) {
    Op op = start(OpKind::kZeroGrad, channel);
    op.recv_slot = slot;
    write(op, grad_[slot]);
    append(std::move(op));
  }

  /// grad slot `slot` += grad slot `addend`.
  void add_grad(Channel channel, int slot, int addend) {
    Op op = start(OpKind::kAddGrad, channel);
    op.send_slot = addend;
    op.recv_slot = slot;
    read(op, grad_[addend]);
    write(op, grad_[slot]);
    append(std::move(op));
  }

  Schedule finish(int home_grad_slot) && {
    schedule_.num_kv_slots = static_cast<int>(kv_.size());
    schedule_.num_grad_slots = static_cast<int>(grad_.size());
    schedule_.home_grad_slot = home_grad_slot;
    return std::move(schedule_);
  }

 private:
  struct SlotUse {
    int writer = -1;
    std::vector<int> readers;  // since the last write
  };

  static int add_slot(std::vector<SlotUse>& slots) {
    slots.emplace_back();
    return static_cast<int>(slots.size()) - 1;
  }
  static std::vector<int> add_slots(std::vector<SlotUse>& slots, int count) {
    std::vector<int> added(static_cast<size_t>(count));
    for (int& slot : added) slot = add_slot(slots);
    return added;
  }

  Op start(OpKind kind, Channel channel) const {
    Op op;
    op.kind = kind;
    op.id = static_cast<int>(schedule_.ops.size());
    op.channel = channel;
    op.ring_step = ring_step_;
    op.outer_step = outer_step_;
    return op;
  }
  static void read(Op& op, SlotUse& slot) {
    if (slot.writer >= 0) op.after.push_back(slot.writer);
    slot.readers.push_back(op.id);
  }
  static void write(Op& op, SlotUse& slot) {
    if (slot.writer >= 0) op.after.push_back(slot.writer);
    op.after.insert(op.after.end(), slot.readers.begin(), slot.readers.end());
    slot.writer = op.id;
    slot.readers.clear();
  }

  /// Keeps only dependencies that no other dependency implies: an executor pays for each one.
  void append(Op op) {
    std::sort(op.after.begin(), op.after.end());
    op.after.erase(std::unique(op.after.begin(), op.after.end()), op.after.end());
    std::erase(op.after, op.id);  // a slot that the operation itself both reads and writes
    std::vector<uint64_t> before(static_cast<size_t>(op.id) / 64 + 1, 0);  // one bit an operation
    std::vector<int> needed;
    for (auto id = op.after.rbegin(); id != op.after.rend(); ++id) {
      if (before[*id / 64] >> (*id % 64) & 1) continue;
      needed.push_back(*id);
      before[*id / 64] |= uint64_t{1} << (*id % 64);
      for (size_t word = 0; word < ancestors_[*id].size(); ++word) {
        before[word] |= ancestors_[*id][word];
      }
    }
    std::sort(needed.begin(), needed.end());
    op.after = std::move(needed);
    ancestors_.push_back(std::move(before));
    schedule_.ops.push_back(std::move(op));
  }

  Schedule schedule_;
  std::vector<SlotUse> kv_, grad_;
  std::vector<std::vector<uint64_t>> ancestors_;
  int ring_step_ = 0, outer_step_ = 0;
};

/// One ring over ranks: rank i of the ring sends to rank i + stride.
struct Ring {
  int size = 1;
  int place = 0;  // this rank's place in the ring
  int stride = 1;
  int first = 0;  // cp_rank of place 0
  int pitch = 1;  // cp_rank distance of neighbouring places

  int member(int at_place) const { return first + modulo(at_place, size) * pitch; }
  int next() const { return member(place + stride); }
  int previous() const { return member(place - stride); }
  /// The rank whose shard this rank holds after `hops` hops.
  int source(int hops) const { return member(place - hops * stride % size); }
};

/// Which steps of a ring share a launch: the first one has its own, or, `together`, all have one.
class Launches {
 public:
  Launches(int ring_size, int launch_shards, bool together)
      : size_(ring_size), shards_(launch_shards), together_(together) {}
  int count() const { return together_ ? 1 : 1 + (size_ - 1 + shards_ - 1) / shards_; }
  int begin(int launch) const { return launch == 0 ? 0 : 1 + (launch - 1) * shards_; }
  int end(int launch) const { return together_ ? size_ : std::min(size_, begin(launch + 1)); }
  int of_step(int step) const { return together_ ? 0 : (step + shards_ - 1) / shards_; }
  /// Of the steps after the first one, in any `launches` launches that follow one another.
  int most_steps(int launches) const { return std::min(launches * shards_, size_ - 1); }

 private:
  int size_, shards_;
  bool together_;
};

/// K and V around one ring, the transfers of prefetch_steps launches ahead of the launch that waits for them.
class KvRing {
 public:
  KvRing(ScheduleBuilder& builder, const Ring& ring, Channel channel, const Launches& launches,
         int prefetch_steps)
      : builder_(builder),
        ring_(ring),
        channel_(channel),
        launches_(launches),
        prefetch_steps_(prefetch_steps) {
    // At a launch: its own shards, and those of prefetch_steps launches that are coming.
    slots_ = builder.add_kv_slots(launches.most_steps(prefetch_steps + 1));
  }

  /// The shard of step 0 is in `base_slot`, which is only read.
  void begin(int base_slot) { held_ = {base_slot}; }
  /// Posts what may be under way while `launch` computes.
  void before_launch(int launch, int first_ring_step, int outer_step) {
    const int last = launches_.end(std::min(launch + prefetch_steps_, launches_.count() - 1)) - 1;
    while (static_cast<int>(held_.size()) <= last) {
      const int slot = slots_[received_++ % slots_.size()];
      builder_.at(first_ring_step + launches_.of_step(static_cast<int>(held_.size())), outer_step);
      builder_.exchange(channel_, ring_.next(), held_.back(), ring_.previous(), slot);
      held_.push_back(slot);
    }
    builder_.at(first_ring_step + launch, outer_step);
  }
  /// kv slot of a step that has been posted.
  int slot(int step) const { return held_[step]; }

 private:
  ScheduleBuilder& builder_;
  Ring ring_;
  Channel channel_;
  Launches launches_;
  int prefetch_steps_;
  std::vector<int> slots_;
  std::vector<int> held_;  // kv slot of each step so far
  size_t received_ = 0;
};

/// dk and dv around one ring: each rank adds what it computed to what it received, and one hop more
/// than K and V make brings every shard's sum home.
class GradRing {
 public:
  GradRing(ScheduleBuilder& builder, const Ring& ring, Channel channel, const Launches& launches,
           int prefetch_steps)
      : builder_(builder), ring_(ring), channel_(channel) {
    // A launch may be prefetch_steps ahead of the hops that take its gradients along.
    computed_ = builder.add_grad_slots(launches.most_steps(prefetch_steps + 1) +
                                       (prefetch_steps + 1 >= launches.count() ? 1 : 0));
    if (ring.size > 1) received_ = builder.add_grad_slot();
  }

  /// Zeroes and returns the slot that the launch accumulates this step's gradients into.
  int before_launch(int step) {
    const int slot = computed_[step % computed_.size()];
    builder_.zero_grad(channel_, slot);
    return slot;
  }
  /// The hop after a step's launch; the last one lands in `last_slot` (-1: where the others land).
  /// Returns where it landed.
  int after_launch(int step, int last_slot = -1) {
    const int slot = computed_[step % computed_.size()];
    if (ring_.size == 1) return slot;
    if (step > 0) builder_.add_grad(channel_, slot, received_);
    const bool last = step == ring_.size - 1;
    const int landing = last && last_slot >= 0 ? last_slot : received_;
    builder_.exchange(channel_, ring_.next(), slot, ring_.previous(), landing);
    return landing;
  }
  /// The hops after a launch of all steps. Every sum begins one rank after its shard's own, which adds the last part: one hop fewer.
  /// Returns where the own shard's is.
  int after_all() {
    for (int step = 1; step < ring_.size; ++step) {
      if (step > 1) builder_.add_grad(channel_, computed_[step], received_);
      builder_.exchange(channel_, ring_.next(), computed_[step], ring_.previous(), received_);
    }
    if (ring_.size > 1) builder_.add_grad(channel_, computed_[0], received_);
    return computed_[0];
  }

 private:
  ScheduleBuilder& builder_;
  Ring ring_;
  Channel channel_;
  std::vector<int> computed_;
  int received_ = -1;
};

enum class Direction { kForward, kBackward };

Schedule single_ring(const Ring& ring, Channel kv_channel, Channel grad_channel, int prefetch_steps,
                     int launch_shards, bool steps_are_outer, Direction direction) {
  ScheduleBuilder builder;
  const Launches launches(ring.size, launch_shards, launch_shards >= ring.size);
  KvRing kv(builder, ring, kv_channel, launches, prefetch_steps);
  std::optional<GradRing> grad;
  if (direction == Direction::kBackward)
    grad.emplace(builder, ring, grad_channel, launches, prefetch_steps);
  int home = -1;
  kv.begin(0);
  for (int launch = 0; launch < launches.count(); ++launch) {
    const int outer_step = steps_are_outer ? launch : 0;
    kv.before_launch(launch, 0, outer_step);
    builder.at(launch, outer_step);
    std::vector<SourceRef> sources;
    for (int step = launches.begin(launch); step < launches.end(launch); ++step) {
      sources.push_back({.source_rank = ring.source(step),
                         .kv_slot = kv.slot(step),
                         .grad_slot = grad ? grad->before_launch(step) : -1});
    }
    builder.launch(std::move(sources));
    if (grad && launches.count() == 1) home = grad->after_all();
    if (launches.count() == 1) break;
    for (int step = launches.begin(launch); grad && step < launches.end(launch); ++step)
      home = grad->after_launch(step);
  }
  return std::move(builder).finish(home);
}

/// The outer ring of a hierarchical schedule: K and V of the previous nodes, and the nodes'
/// gradients.
class OuterRing {
 public:
  OuterRing(ScheduleBuilder& builder, const Ring& ring, Direction direction)
      : builder_(builder), ring_(ring) {
    kv_slots_ = builder.add_kv_slots(std::min(2, ring.size - 1));
    base_slots_ = {0};
    if (direction == Direction::kBackward) {
      // Two node sums, so that one can be sent while the next arrives.
      node_sums_ = builder.add_grad_slots(std::min(2, ring.size));
      if (ring.size > 1) received_ = builder.add_grad_slot();
    }
  }

  /// Posts the transfers that bring the bases of all outer steps up to `outer_step`.
  void receive_up_to(int outer_step, int launches_an_outer_step) {
    while (static_cast<int>(base_slots_.size()) <= std::min(outer_step, ring_.size - 1)) {
      const int arriving = static_cast<int>(base_slots_.size());
      const int slot = kv_slots_[(arriving - 1) % kv_slots_.size()];
      builder_.at(arriving * launches_an_outer_step, arriving);
      builder_.exchange(Channel::kOuterKv, ring_.next(), base_slots_.back(), ring_.previous(),
                        slot);
      base_slots_.push_back(slot);
    }
  }
  /// kv slot of this local rank's shard of the node visited in `outer_step`.
  int base_slot(int outer_step) const { return base_slots_[outer_step]; }
  /// cp_rank of that shard.
  int base_rank(int outer_step) const { return ring_.source(outer_step); }

  /// Grad slot where the inner ring or reduce-scatter leaves this node's sum of `outer_step`.
  int node_sum(int outer_step) const { return node_sums_[outer_step % node_sums_.size()]; }
  /// Adds what came from the previous node and sends the sum on. Returns where the hop lands.
  int send_node_sum(int outer_step) {
    if (ring_.size == 1) return node_sum(0);
    if (outer_step > 0) {
      builder_.add_grad(Channel::kOuterGrad, node_sum(outer_step), received_);
    }
    builder_.exchange(Channel::kOuterGrad, ring_.next(), node_sum(outer_step), ring_.previous(),
                      received_);
    return received_;
  }

 private:
  ScheduleBuilder& builder_;
  Ring ring_;
  std::vector<int> kv_slots_, base_slots_, node_sums_;
  int received_ = -1;
};

Schedule hierarchical_ring(const topology::Topology& topology, int cp_rank, int prefetch_steps,
                           int launch_shards, Direction direction) {
  const int ranks = topology.ranks_per_node;
  const int local_rank = topology.local_rank(cp_rank);
  const Ring outer_ring{
      .size = topology.nodes, .place = topology.node(cp_rank), .first = local_rank, .pitch = ranks};
  const Ring inner_ring{
      .size = ranks, .place = local_rank, .first = topology.cp_rank(topology.node(cp_rank), 0)};
  ScheduleBuilder builder;
  OuterRing outer(builder, outer_ring, direction);
  const Launches launches(ranks, launch_shards, false);
  KvRing kv(builder, inner_ring, Channel::kInnerKv, launches, prefetch_steps);
  std::optional<GradRing> grad;
  if (direction == Direction::kBackward)
    grad.emplace(builder, inner_ring, Channel::kInnerGrad, launches, prefetch_steps);
  int home = -1;
  for (int outer_step = 0; outer_step < topology.nodes; ++outer_step) {
    outer.receive_up_to(outer_step + 1, launches.count());
    kv.begin(outer.base_slot(outer_step));
    const int base_node = topology.node(outer.base_rank(outer_step));
    for (int launch = 0; launch < launches.count(); ++launch) {
      const int first = outer_step * launches.count();
      kv.before_launch(launch, first, outer_step);
      builder.at(first + launch, outer_step);
      std::vector<SourceRef> sources;
      for (int step = launches.begin(launch); step < launches.end(launch); ++step) {
        const int source_local = topology.local_rank(inner_ring.source(step));
        sources.push_back({.source_rank = topology.cp_rank(base_node, source_local),
                           .kv_slot = kv.slot(step),
                           .grad_slot = grad ? grad->before_launch(step) : -1});
      }
      builder.launch(std::move(sources));
      for (int step = launches.begin(launch); grad && step < launches.end(launch); ++step)
        grad->after_launch(step, outer.node_sum(outer_step));
    }
    if (grad) home = outer.send_node_sum(outer_step);
  }
  return std::move(builder).finish(home);
}

Schedule hierarchical_gather(const topology::Topology& topology, int cp_rank, int prefetch_steps,
                             Direction direction) {
  const int nodes = topology.nodes, ranks = topology.ranks_per_node;
  const int local_rank = topology.local_rank(cp_rank);
  const Ring outer_ring{
      .size = nodes, .place = topology.node(cp_rank), .first = local_rank, .pitch = ranks};
  ScheduleBuilder builder;
  OuterRing outer(builder, outer_ring, direction);
  // Each set is a run of slots in local_rank order, so that a transport can gather into one piece
  // of memory.
  std::vector<std::vector<int>> gathered(static_cast<size_t>(std::min(prefetch_steps, nodes)));
  for (auto& slots : gathered) slots = builder.add_kv_slots(ranks);
  std::vector<std::vector<int>> computed;
  if (direction == Direction::kBackward) {
    computed.resize(static_cast<size_t>(std::min(2, nodes)));
    for (auto& slots : computed) slots = builder.add_grad_slots(ranks);
  }
  int home = -1, num_gathered = 0;
  for (int outer_step = 0; outer_step < nodes; ++outer_step) {
    // Ahead of this launch: gathers of the next prefetch_steps - 1 outer steps and one outer
    // transfer more.
    const int last_gather = std::min(outer_step + prefetch_steps - 1, nodes - 1);
    for (; num_gathered <= last_gather; ++num_gathered) {
      outer.receive_up_to(num_gathered + 1, 1);
      builder.at(num_gathered, num_gathered);
      builder.all_gather(outer.base_slot(num_gathered), gathered[num_gathered % gathered.size()]);
    }
    builder.at(outer_step, outer_step);
    const int base_node = topology.node(outer.base_rank(outer_step));
    std::vector<SourceRef> sources;
    for (int visit = 0; visit < ranks; ++visit) {
      const int source_local = modulo(local_rank - visit, ranks);  // own shard first
      SourceRef source{.source_rank = topology.cp_rank(base_node, source_local),
                       .kv_slot = gathered[outer_step % gathered.size()][source_local]};
      if (direction == Direction::kBackward) {
        source.grad_slot = computed[outer_step % computed.size()][source_local];
        builder.zero_grad(Channel::kInnerGrad, source.grad_slot);
      }
      sources.push_back(source);
    }
    builder.launch(std::move(sources));
    if (direction == Direction::kBackward) {
      builder.reduce_scatter(computed[outer_step % computed.size()], outer.node_sum(outer_step));
      home = outer.send_node_sum(outer_step);
    }
  }
  return std::move(builder).finish(home);
}

Schedule make_schedule(const ScheduleOptions& options, int cp_rank, Direction direction) {
  const topology::Topology& topology = options.topology;
  MT_CHECK_ARG(topology.nodes >= 1 && topology.ranks_per_node >= 1,
               "topology: expected at least 1x1, got ", topology.nodes, "x",
               topology.ranks_per_node);
  const int cp_size = topology.cp_size();
  MT_CHECK_ARG(cp_rank >= 0 && cp_rank < cp_size, "cp_rank: expected in [0, ", cp_size, "), got ",
               cp_rank);
  MT_CHECK_ARG(options.prefetch_steps >= 1, "prefetch_steps: expected >= 1, got ",
               options.prefetch_steps);
  const int prefetch = std::min(options.prefetch_steps, cp_size);  // no more is ever to come
  MT_CHECK_ARG(options.launch_shards >= 1, "launch_shards: expected >= 1, got ",
               options.launch_shards);
  const int shards = std::min(options.launch_shards, cp_size);
  MT_CHECK_ARG(options.ring_stride >= 1 && std::gcd(options.ring_stride, cp_size) == 1,
               "ring_stride: expected a positive number coprime to cp_size ", cp_size, ", got ",
               options.ring_stride);
  if (options.ring == RingKind::kFlat) {
    const Ring ring{.size = cp_size, .place = cp_rank, .stride = options.ring_stride % cp_size};
    return single_ring(ring, Channel::kFlatKv, Channel::kFlatGrad, prefetch, shards, false,
                       direction);
  }
  MT_CHECK_ARG(options.ring_stride == 1, "ring_stride: expected 1 with ring = hierarchical, got ",
               options.ring_stride);
  if (topology.ranks_per_node == 1) {
    const Ring ring{.size = cp_size, .place = cp_rank};
    return single_ring(ring, Channel::kOuterKv, Channel::kOuterGrad, prefetch, shards, true,
                       direction);
  }
  return options.inner == InnerKind::kRing
             ? hierarchical_ring(topology, cp_rank, prefetch, shards, direction)
             : hierarchical_gather(topology, cp_rank, prefetch, direction);
}

}  // namespace

int chosen_launch_shards(RingKind ring, const topology::Topology& topology, bool on_gpu) {
  if (!on_gpu) return 1;
  if (ring == RingKind::kFlat && topology.nodes == 1 && topology.ranks_per_node == 2) return 2;
  const bool one_ring = ring == RingKind::kFlat || topology.ranks_per_node == 1;
  return std::max(1, (one_ring ? topology.cp_size() : topology.ranks_per_node) / 2);
}

RingKind parse_ring_kind(std::string_view name) {
  const auto kind = value_of(kRingWords, name);
  MT_CHECK_ARG(kind, "ring: expected ", listed(kRingWords, ", ", " or "), ", got '", name, "'");
  return *kind;
}

InnerKind parse_inner_kind(std::string_view name) {
  const auto kind = value_of(kInnerWords, name);
  MT_CHECK_ARG(kind, "inner: expected ", listed(kInnerWords, ", ", " or "), ", got '", name, "'");
  return *kind;
}

std::string_view to_string(RingKind kind) { return word_of(kRingWords, kind); }

std::string_view to_string(InnerKind kind) { return word_of(kInnerWords, kind); }

std::string_view to_string(Channel channel) {
  switch (channel) {
    case Channel::kFlatKv:
      return "flat_kv";
    case Channel::kInnerKv:
      return "inner_kv";
    case Channel::kOuterKv:
      return "outer_kv";
    case Channel::kFlatGrad:
      return "flat_grad";
    case Channel::kInnerGrad:
      return "inner_grad";
    case Channel::kOuterGrad:
      return "outer_grad";
  }
  MT_ASSERT(false, "channel ", static_cast<int>(channel));
  return {};
}

bool is_kv(Channel channel) {
  return channel == Channel::kFlatKv || channel == Channel::kInnerKv ||
         channel == Channel::kOuterKv;
}

std::string_view to_string(OpKind kind) {
  switch (kind) {
    case OpKind::kExchange:
      return "exchange";
    case OpKind::kAllGather:
      return "all_gather";
    case OpKind::kReduceScatter:
      return "reduce_scatter";
    case OpKind::kLaunch:
      return "launch";
    case OpKind::kZeroGrad:
      return "zero_grad";
    case OpKind::kAddGrad:
      return "add_grad";
  }
  MT_ASSERT(false, "operation kind ", static_cast<int>(kind));
  return {};
}

Schedule forward_schedule(const ScheduleOptions& options, int cp_rank) {
  return make_schedule(options, cp_rank, Direction::kForward);
}

Schedule backward_schedule(const ScheduleOptions& options, int cp_rank) {
  return make_schedule(options, cp_rank, Direction::kBackward);
}

int num_launches(const Schedule& schedule) {
  return static_cast<int>(std::count_if(schedule.ops.begin(), schedule.ops.end(),
                                        [](const Op& op) { return op.kind == OpKind::kLaunch; }));
}

Traffic traffic(const Schedule& schedule, const topology::Topology& topology, int cp_rank) {
  Traffic result;
  for (const Op& op : schedule.ops) {
    const int64_t others = topology.ranks_per_node - 1;
    switch (op.kind) {
      case OpKind::kExchange: {
        const bool inner = topology.node(op.to) == topology.node(cp_rank);
        if (is_kv(op.channel)) {
          ++(inner ? result.kv_inner : result.kv_outer);
        } else {
          ++(inner ? result.grad_inner : result.grad_outer);
        }
        break;
      }
      case OpKind::kAllGather:
        result.kv_inner += others;
        break;
      case OpKind::kReduceScatter:
        result.grad_inner += others;
        break;
      case OpKind::kLaunch:
      case OpKind::kZeroGrad:
      case OpKind::kAddGrad:
        break;
    }
  }
  return result;
}

}  // namespace mtraining::ring
