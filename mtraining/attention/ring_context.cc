#include "mtraining/attention/ring_context.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <iterator>
#include <numeric>
#include <set>
#include <sstream>

#include "mtraining/attention/recorded_event.h"
#include "mtraining/base/check.h"
#include "mtraining/comm/members.h"
#include "mtraining/trace/chrome_trace.h"

namespace mtraining::attention {
namespace {

/// Options as numbers that ranks compare, with the names that an error gives them.
constexpr const char* kOptionNames[] = {"parallel.cp_size",
                                        "seq_len",
                                        "attention.layout",
                                        "attention.stripe",
                                        "nodes",
                                        "parallel.cp_inner_size",
                                        "attention.ring",
                                        "attention.inner",
                                        "attention.ring_stride",
                                        "attention.prefetch_steps",
                                        "attention.launch_shards",
                                        "attention.columns",
                                        "attention.gradient_transport",
                                        "attention.transfers",
                                        "max_column_rows_per_rank",
                                        "attention.deterministic",
                                        "attention.sm_margin"};
using OptionValues = std::array<int64_t, std::size(kOptionNames)>;

OptionValues values_of(const RingOptions& options) {
  return {options.layout.cp_size,
          options.layout.seq_len,
          static_cast<int64_t>(options.layout.kind),
          options.layout.stripe,
          options.topology.nodes,
          options.topology.ranks_per_node,
          static_cast<int64_t>(options.ring),
          static_cast<int64_t>(options.inner),
          options.ring_stride,
          options.prefetch_steps,
          options.launch_shards,
          static_cast<int64_t>(options.columns),
          static_cast<int64_t>(options.gradient_transport),
          static_cast<int64_t>(options.transfers),
          options.max_column_rows_per_rank,
          options.deterministic,
          options.sm_margin};
}

/// Everything that can be seen to be wrong on one rank, before any communication.
RingOptions checked(RingOptions options, const comm::Transport& transport,
                    const std::vector<int>& members) {
  const int cp_size = options.layout.cp_size;
  MT_CHECK_ARG(options.topology.nodes >= 1 && options.topology.ranks_per_node >= 1,
               "topology: expected at least 1x1, got ", topology::to_string(options.topology));
  MT_CHECK_ARG(options.topology.cp_size() == cp_size,
               "topology: expected nodes x ranks_per_node = cp_size ", cp_size, ", got ",
               topology::to_string(options.topology),
               options.ring == ring::RingKind::kHierarchical
                   ? " (ring = hierarchical needs parallel.cp_inner_size)"
                   : "");
  MT_CHECK_ARG(static_cast<int>(members.size()) == cp_size, "cp_size: expected the ",
               members.size(), " ranks of the context-parallel group, got ", cp_size);
  MT_CHECK_ARG(std::find(members.begin(), members.end(), transport.rank()) != members.end(),
               "rank ", transport.rank(), " is not in its own context-parallel group");
  MT_CHECK_ARG(
      std::adjacent_find(members.begin(), members.end(), std::greater_equal<>()) == members.end(),
      "members: expected ascending ranks");
  MT_CHECK_ARG(options.prefetch_steps >= 1, "attention.prefetch_steps: expected >= 1, got ",
               options.prefetch_steps);
  MT_CHECK_ARG(options.launch_shards >= 0, "attention.launch_shards: expected >= 0, got ",
               options.launch_shards);
  MT_CHECK_ARG(options.max_column_rows_per_rank >= 1,
               "max_column_rows_per_rank: expected >= 1, got ", options.max_column_rows_per_rank);
  MT_CHECK_ARG(options.sm_margin >= 0 && options.sm_margin <= 1024,
               "attention.sm_margin: expected 0 .. 1024, got ", options.sm_margin);
  options.layout.nodes = options.ring == ring::RingKind::kHierarchical ? options.topology.nodes : 1;
  if (options.launch_shards == 0)
    options.launch_shards =
        ring::chosen_launch_shards(options.ring, options.topology, transport.on_device());
  return options;
}

template <typename T>
std::vector<T> gather_values(comm::Communicator& group, const T* mine, int64_t count) {
  std::vector<T> all(static_cast<size_t>(count * group.size()));
  std::vector<comm::Buffer> parts;
  const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
  for (int r = 0; r < group.size(); ++r) parts.push_back({all.data() + r * count, bytes});
  group.all_gather({mine, bytes}, parts)->wait();
  return all;
}

void agree_on_options(const RingOptions& options, comm::Communicator& job) {
  const OptionValues mine = values_of(options);
  const std::vector<int64_t> all = gather_values(job, mine.data(), std::ssize(mine));
  for (int r = 0; r < job.size(); ++r) {
    for (size_t i = 0; i < mine.size(); ++i) {
      const int64_t other = all[static_cast<size_t>(r) * mine.size() + i];
      MT_CHECK_ARG(other == mine[i], kOptionNames[i], ": ranks differ: rank ", job.rank(), " has ",
                   mine[i], ", rank ", r, " has ", other);
    }
  }
}

/// All context-parallel groups of the job, ascending: opening a communicator is a call of all ranks of the job.
std::vector<std::vector<int>> agree_on_groups(const std::vector<int>& members,
                                              comm::Communicator& job) {
  const std::vector<int> all = gather_values(job, members.data(), std::ssize(members));
  std::set<std::vector<int>> groups;
  for (auto at = all.begin(); at != all.end(); at += std::ssize(members))
    groups.emplace(at, at + std::ssize(members));
  std::set<int> seen;
  for (const std::vector<int>& group : groups) seen.insert(group.begin(), group.end());
  MT_CHECK_ARG(
      seen.size() == groups.size() * members.size() && static_cast<int>(seen.size()) == job.size(),
      "members: the context-parallel groups of the ranks overlap");
  return {groups.begin(), groups.end()};
}

struct ChannelGroups {
  ring::Channel channel;
  const char* name;
  std::vector<std::vector<int>> cp_ranks;
  bool in_node;
};

/// Which cp ranks talk to one another on each channel that this ring uses.
std::vector<ChannelGroups> channel_groups(const RingOptions& options) {
  const topology::Topology& topology = options.topology;
  if (options.ring == ring::RingKind::kFlat) {
    const std::vector<std::vector<int>> all = {comm::all_ranks(topology.cp_size())};
    return {{ring::Channel::kFlatKv, "kv", all, topology.nodes == 1},
            {ring::Channel::kFlatGrad, "grad", all, topology.nodes == 1}};
  }
  std::vector<std::vector<int>> inner(static_cast<size_t>(topology.nodes)),
      outer(static_cast<size_t>(topology.ranks_per_node));
  for (int r = 0; r < topology.cp_size(); ++r) {
    inner[topology.node(r)].push_back(r);
    outer[topology.local_rank(r)].push_back(r);
  }
  return {{ring::Channel::kInnerKv, "inner kv", inner, true},
          {ring::Channel::kOuterKv, "outer kv", outer, false},
          {ring::Channel::kInnerGrad, "inner grad", inner, true},
          {ring::Channel::kOuterGrad, "outer grad", outer, false}};
}

}  // namespace

RingContext::State::State(const RingOptions& given, comm::Transport& transport,
                          std::vector<int> members)
    : options(checked(given, transport, members)), layout(options.layout) {
  cp_rank = static_cast<int>(std::find(members.begin(), members.end(), transport.rank()) -
                             members.begin());
  const ring::ScheduleOptions schedule{.topology = options.topology,
                                       .ring = options.ring,
                                       .inner = options.inner,
                                       .ring_stride = options.ring_stride,
                                       .prefetch_steps = options.prefetch_steps,
                                       .launch_shards = options.launch_shards};
  forward = ring::forward_schedule(schedule, cp_rank);
  backward = ring::backward_schedule(schedule, cp_rank);
  positions = layout.positions(cp_rank);
  source_ranks.resize(static_cast<size_t>(layout.cp_size()));
  std::iota(source_ranks.begin(), source_ranks.end(), 0);
  for (int r = 0; r < layout.cp_size(); ++r) block_starts.push_back(layout.block_starts(r));
  for (int64_t p = 0; layout.has_blocks() && p < layout.padded_len(); p += layout::kBlock) {
    const layout::Owner owner = layout.owner(p);
    block_owners.push_back(owner.cp_rank);
    block_owners.push_back(static_cast<int32_t>(owner.offset / layout::kBlock));
  }

  if (layout.kind() == layout::LayoutKind::kBlockStriped ||
      layout.kind() == layout::LayoutKind::kContiguous) {
    for (int r = 0; r < layout.cp_size(); ++r)
      residue_distances.push_back(
          static_cast<int32_t>(layout.residue(cp_rank) - layout.residue(r)));
  }

  comm::CommunicatorPtr job =
      transport.open_host("attention agreement", comm::all_ranks(transport.size()));
  agree_on_options(options, *job);
  for (const std::vector<int>& group : agree_on_groups(members, *job)) {
    const auto open = [&](const char* name, const std::vector<int>& cp_ranks,
                          bool in_node = false) {
      std::vector<int> ranks;
      for (int r : cp_ranks) ranks.push_back(group[r]);
      const std::string whole = concat("attention ", name);
      return in_node && options.transfers == Transfers::kPeerCopies
                 ? transport.open_copies(whole, ranks)
                 : transport.open(whole, ranks);
    };
    const std::vector<int> all = comm::all_ranks(layout.cp_size());
    // pattern/ works in host memory, and on a GPU in the device's.
    if (auto opened = transport.open_host("attention index", group)) index_group = opened;
    if (transport.on_device()) {
      if (auto opened = open("index on the device", all)) device_index_group = opened;
    }
    if (auto opened = open("columns", all, options.topology.nodes == 1)) columns_group = opened;
    if (auto opened = transport.open_host("attention calls", group)) agreement_group = opened;
    for (const ChannelGroups& channel : channel_groups(options)) {
      for (const std::vector<int>& cp_ranks : channel.cp_ranks) {
        if (auto opened = open(channel.name, cp_ranks, channel.in_node))
          channels[static_cast<size_t>(channel.channel)] = opened;
      }
    }
  }
}

int RingContext::State::group_rank(ring::Channel channel, int rank) const {
  switch (channel) {
    case ring::Channel::kFlatKv:
    case ring::Channel::kFlatGrad:
      return rank;
    case ring::Channel::kInnerKv:
    case ring::Channel::kInnerGrad:
      return options.topology.local_rank(rank);
    case ring::Channel::kOuterKv:
    case ring::Channel::kOuterGrad:
      return options.topology.node(rank);
  }
  MT_ASSERT(false, "channel ", static_cast<int>(channel));
}

RingContext::State::Stretch RingContext::State::begin_stretch(at::Device device) const {
  Stretch stretch;
  if (!observer) return stretch;
  if (device.is_cpu()) {
    stretch.begin_us = trace::now_us();
  } else {
    stretch.begin = recorded(device);
  }
  return stretch;
}

void RingContext::State::end_stretch(Stretch stretch, const char* what, int ring_step,
                                     int64_t pairs) {
  if (!observer) return;
  StepTiming timing{.what = what,
                    .ring_step = ring_step,
                    .begin_us = stretch.begin_us,
                    .end_us = 0,
                    .pairs = pairs,
                    .tag = tag};
  if (!stretch.begin) {
    timing.end_us = trace::now_us();
    observer(timing);
    return;
  }
  const at::Device device = stretch.begin->device();
  const auto whole = std::make_shared<DeviceStretch>(timing, std::move(*stretch.begin));
  whole->end = recorded(device);
  unreported.push_back(whole);
  report_stretches(/*wait=*/false);
}

void RingContext::State::watch_transfer(std::span<const comm::WorkPtr> works, at::Device device,
                                        std::string_view channel, int ring_step) {
  if (!observer || device.is_cpu()) return;
  const auto stretch = std::make_shared<DeviceStretch>(
      StepTiming{.what = "transfer", .ring_step = ring_step, .tag = tag, .channel = channel},
      recorded(device));
  const c10::impl::VirtualGuardImpl streams(device.type());
  const c10::Stream stream =
      watching.try_emplace(channel, streams.getStreamFromGlobalPool(device)).first->second;
  const auto left = std::make_shared<std::atomic<size_t>>(works.size());
  for (const comm::WorkPtr& work : works) {
    work->when_enqueued([stretch, stream, left, device](const std::function<void()>& wait) {
      const c10::StreamGuard guard(stream);
      wait();
      if (--*left > 0) return;
      c10::Event end = recorded(device);
      const std::lock_guard lock(stretch->mutex);
      stretch->end = std::move(end);
    });
  }
  unreported.push_back(stretch);
}

void RingContext::State::report_stretches(bool wait) {
  while (!unreported.empty()) {
    const std::shared_ptr<DeviceStretch> next = unreported.front();
    {
      const std::lock_guard lock(next->mutex);
      if (!next->end && !wait) return;
      if (!next->end) {  // of a transfer that failed: whoever waited for it knows
        unreported.pop_front();
        continue;
      }
    }
    c10::Event& end = *next->end;
    // A transfer may be over before its rank's stream has come to where it was posted.
    if (wait) {
      next->begin.synchronize();
      end.synchronize();
    }
    if (!next->begin.query() || !end.query()) return;
    if (!clock) {
      clock = recorded(end.device());
      clock->synchronize();
      clock_us = static_cast<double>(trace::now_us());
    }
    // From event to event, not from the first one on: what tells their distance is a float.
    const double begin_us = clock_us + clock->elapsedTime(next->begin) * 1e3;
    const double end_us = begin_us + std::max(0.0, next->begin.elapsedTime(end) * 1e3);
    next->timing.begin_us = static_cast<int64_t>(begin_us);
    next->timing.end_us = static_cast<int64_t>(end_us);
    clock = std::move(end);
    clock_us = end_us;
    const StepTiming timing = next->timing;
    unreported.pop_front();
    if (observer) observer(timing);
  }
}

RingContext::RingContext(const RingOptions& options, comm::Transport& transport,
                         std::vector<int> members) {
  if (members.empty()) members = comm::all_ranks(transport.size());
  state_ = std::make_unique<State>(options, transport, std::move(members));
}
RingContext::~RingContext() = default;

const layout::Layout& RingContext::layout() const { return state_->layout; }
const topology::Topology& RingContext::topology() const { return state_->options.topology; }
const RingOptions& RingContext::options() const { return state_->options; }
int RingContext::cp_rank() const { return state_->cp_rank; }
int RingContext::cp_size() const { return state_->layout.cp_size(); }
comm::Communicator& RingContext::index_group() { return *state_->index_group; }
void RingContext::set_observer(StepObserver observer) {
  if (observer) {
    finish_observing();
  } else {
    // Called by destructors, after errors too: a device that failed, or whose stream waits for a rank that is gone, must not be
    // waited for.
    state_->unreported.clear();
  }
  state_->observer = std::move(observer);
}
void RingContext::finish_observing() { state_->report_stretches(/*wait=*/true); }
void RingContext::set_tag(int64_t tag) { state_->tag = tag; }
RingContext::State& RingContext::state() { return *state_; }

int64_t RingContext::bytes_sent(ring::Channel channel) const {
  const comm::CommunicatorPtr& group = state_->channels[static_cast<size_t>(channel)];
  return group ? group->counters().bytes_sent : 0;
}

int64_t RingContext::bytes_sent() const {
  int64_t bytes =
      state_->index_group->counters().bytes_sent +
      (state_->device_index_group ? state_->device_index_group->counters().bytes_sent : 0) +
      state_->columns_group->counters().bytes_sent + state_->agreement_group->counters().bytes_sent;
  for (int c = 0; c < kNumChannels; ++c) bytes += bytes_sent(static_cast<ring::Channel>(c));
  return bytes;
}

int64_t RingContext::buffer_bytes() const { return state_->buffers.bytes(); }

}  // namespace mtraining::attention
