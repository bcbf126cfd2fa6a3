#include "bench/ring_bench.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <mutex>

#include "bench/ring_ranks.h"
#include "bench/torch_device.h"
#include "mtraining/attention/autograd.h"
#ifdef MT_WITH_CUDA
#include "mtraining/attention/device_index.h"
#endif
#include "mtraining/attention/local_attention.h"
#include "mtraining/attention/ring_call.h"
#include "mtraining/attention/tensors.h"
#include "mtraining/base/check.h"
#include "mtraining/base/parallel.h"
#include "mtraining/index/columns.h"
#include "mtraining/sim/imbalance.h"
#include "mtraining/sim/traffic_bytes.h"

namespace mtraining::bench {
namespace {

using attention::RingContext;
using ring::Channel;

constexpr std::array kChannels = {Channel::kFlatKv,   Channel::kInnerKv,   Channel::kOuterKv,
                                  Channel::kFlatGrad, Channel::kInnerGrad, Channel::kOuterGrad};

at::Tensor shard(const AlignedBytes& whole, int64_t heads, const AttentionSizes& sizes,
                 const layout::Layout& layout, int cp_rank) {
  const at::Tensor result =
      at::zeros({1, layout.tokens_per_rank(), heads, sizes.head_dim}, scalar_type(sizes.dtype));
  const int64_t row = heads * sizes.head_dim * kernels::size_of(sizes.dtype);
  const std::vector<int64_t> positions = layout.positions(cp_rank);
  for (size_t i = 0; i < positions.size(); ++i) {
    if (positions[i] < layout.seq_len()) {
      std::memcpy(static_cast<uint8_t*>(result.data_ptr()) + static_cast<int64_t>(i) * row,
                  whole.data() + positions[i] * row, static_cast<size_t>(row));
    }
  }
  return result;
}

/// What the ranks choose from their shards. Collective.
index::Index chosen_together(RingContext& context, const at::Tensor& q, const at::Tensor& k,
                             const pattern::VerticalSlashOptions& options) {
#ifdef MT_WITH_CUDA
  if (q.is_cuda()) return attention::choose_on_device(context.state(), q, k, 0, {}, options);
#endif
  return pattern::build_vertical_slash(
      attention::local_attention(context.layout(), context.cp_rank(), q, k, 0), options,
      context.index_group());
}

/// As a layer runs them: what an index is for this rank is planned once, in the first forward that sees it, and kept.
attention::ForwardResult forward_of(RingContext& context, const at::Tensor& q, const at::Tensor& k,
                                    const at::Tensor& v,
                                    const std::shared_ptr<const index::Index>& index) {
  RingContext::State& state = context.state();
  const auto plan = state.plans.find_or_make(index, state.layout, state.cp_rank);
  return ring_forward(state, *plan, checked_call(state, *plan, "forward", q, k, v, 0, {}));
}
void backward_of(RingContext& context, const at::Tensor& dout, const at::Tensor& q,
                 const at::Tensor& k, const at::Tensor& v, const attention::ForwardResult& forward,
                 const std::shared_ptr<const index::Index>& index) {
  RingContext::State& state = context.state();
  const auto plan = state.plans.find_or_make(index, state.layout, state.cp_rank);
  checked_backward(state, *plan, {dout, q, k, v, forward}, 0, {});
}

/// A forward that chooses its index.
attention::ForwardResult chosen_forward(RingContext& context, const at::Tensor& q,
                                        const at::Tensor& k, const at::Tensor& v,
                                        const attention::AttentionPattern& pattern,
                                        std::shared_ptr<const index::Index>& index) {
  const at::NoGradGuard no_grad;
  attention::AttentionCall call;
  call.pattern = pattern;
  const attention::AttentionOutput output =
      attention::sparse_ring_attention(context, q, k, v, call);
  index = output.index;
  return {output.out, output.lse, output.out_residual};
}

/// Stretches of one direction of one repeat.
struct Timeline {
  struct Stretch {
    std::string what;
    int ring_step = 0;
    int64_t begin_us = 0, end_us = 0;
  };
  std::vector<Stretch> stretches;

  /// Time in which a transfer is under way, whatever else is.
  double transferring_ms() const {
    std::vector<std::pair<int64_t, int64_t>> transfers;
    for (const Stretch& stretch : stretches) {
      if (stretch.what.starts_with("transfer"))
        transfers.emplace_back(stretch.begin_us, stretch.end_us);
    }
    std::sort(transfers.begin(), transfers.end());
    int64_t sum = 0, until = std::numeric_limits<int64_t>::min();
    for (const auto& [begin, end] : transfers) {
      sum += std::max<int64_t>(0, end - std::max(begin, until));
      until = std::max(until, end);
    }
    return static_cast<double>(sum) * 1e-3;
  }
  Json to_json() const {
    int64_t origin = std::numeric_limits<int64_t>::max();
    for (const Stretch& stretch : stretches) origin = std::min(origin, stretch.begin_us);
    Json json = Json::array();
    for (const Stretch& stretch : stretches) {
      json.push_back({stretch.what, stretch.ring_step,
                      static_cast<double>(stretch.begin_us - origin) * 1e-3,
                      static_cast<double>(stretch.end_us - origin) * 1e-3});
    }
    return json;
  }
};

/// Bytes by channel; "other" is what is on none: columns, index, agreements.
std::map<std::string, int64_t> sent(const RingContext& context) {
  std::map<std::string, int64_t> bytes;
  int64_t on_channels = 0;
  for (const Channel channel : kChannels) {
    const int64_t count = context.bytes_sent(channel);
    if (count > 0) bytes[std::string(ring::to_string(channel))] = count;
    on_channels += count;
  }
  bytes["other"] = context.bytes_sent() - on_channels;
  return bytes;
}

/// What one rank saw of the timed repeats.
struct RankSeen {
  std::map<std::string, double> phase_ms;  // all repeats
  std::map<std::string, int64_t> bytes_before, bytes_after;
  int64_t buffer_bytes = 0;
};

/// All ranks' in the order of ranks. Collective.
std::vector<RankSeen> gathered(const RankSeen& mine, comm::Communicator& group) {
  std::string text = Json{{"phases", mine.phase_ms},
                          {"before", mine.bytes_before},
                          {"after", mine.bytes_after},
                          {"buffers", mine.buffer_bytes}}
                         .dump();
  constexpr size_t kRoom = 4096;
  MT_ASSERT(text.size() <= kRoom, "what a rank saw takes ", text.size(), " bytes");
  text.resize(kRoom, ' ');
  std::vector<std::string> all(static_cast<size_t>(group.size()), std::string(kRoom, ' '));
  std::vector<comm::Buffer> parts;
  for (std::string& part : all) parts.push_back({part.data(), kRoom});
  group.all_gather({text.data(), kRoom}, parts)->wait();
  std::vector<RankSeen> seen;
  for (const std::string& part : all) {
    const Json json = Json::parse(part);
    seen.push_back({json["phases"], json["before"], json["after"], json["buffers"]});
  }
  return seen;
}

ring::ScheduleOptions schedule_of(const RingBenchOptions& options) {
  return {.topology = options.ring.topology,
          .ring = options.ring.ring,
          .inner = options.ring.inner,
          .ring_stride = options.ring.ring_stride,
          .prefetch_steps = options.ring.prefetch_steps,
          .launch_shards = std::max(1, options.ring.launch_shards)};
}

Json imbalance_json(const index::Index& index, const layout::Layout& layout,
                    const RingBenchOptions& options, bool columns_once) {
  const ring::ScheduleOptions schedule = schedule_of(options);
  const sim::Imbalance imbalance = sim::measure(
      sim::step_loads(sim::count_pairs(index, layout), schedule,
                      columns_once ? sim::ColumnCost::kOnce : sim::ColumnCost::kPerStep),
      schedule);
  return {{"worker", rounded(imbalance.worker)},
          {"step", rounded(imbalance.step)},
          {"lockstep", rounded(imbalance.lockstep)}};
}

/// Of K, V, dk and dv that the rank which sends most sends, forward and backward: what sim/ says.
int64_t predicted_ring_bytes(const AttentionSizes& sizes, const layout::Layout& layout,
                             const RingBenchOptions& options) {
  const sim::ShardSizes shard{
      .tokens = layout.tokens_per_rank(),
      .num_kv_heads = sizes.num_kv_heads,
      .head_dim = sizes.head_dim,
      .kv_element_bytes = kernels::size_of(sizes.dtype),
      .grad_element_bytes =
          options.ring.gradient_transport == attention::GradientTransport::kBFloat16
              ? 2
              : kernels::size_of(kernels::state_dtype(sizes.dtype))};
  const ring::ScheduleOptions schedule = schedule_of(options);
  const auto forward = sim::ring_bytes(schedule, shard, false);
  const auto backward = sim::ring_bytes(schedule, shard, true);
  int64_t most = 0;
  for (size_t rank = 0; rank < forward.size(); ++rank)
    most = std::max(most, forward[rank].total() + backward[rank].total());
  return most;
}

}  // namespace

std::vector<std::string> bench_ring(const RingBenchOptions& given, const Provenance& from) {
  RingBenchOptions options = given;
  const AttentionSizes& sizes = options.sizes;
  check(sizes);
  MT_CHECK_ARG(options.repeats >= 1, "--repeats: expected at least 1, got ", options.repeats);
  MT_CHECK_ARG(!options.whole_layer || options.given == nullptr,
               "--layer: expected a choice (--p), got a given mask");
  MT_CHECK_ARG(options.warm_up >= 0, "--warm-up: expected at least 0, got ", options.warm_up);
  MT_CHECK_ARG(options.p >= 0 && options.p <= 1, "--p: expected a number in [0, 1], got ",
               options.p);
  const topology::Topology& topology = options.ring.topology;
  const int world = topology.cp_size();
  MT_CHECK_ARG(world <= 256, "--virtual: expected at most 256 ranks, got ",
               topology::to_string(topology));
  options.ring.layout.seq_len = sizes.seq_len;
  options.ring.layout.cp_size = world;
  options.ring.layout.nodes = options.ring.ring == ring::RingKind::kFlat ? 1 : topology.nodes;
  const layout::Layout layout(options.ring.layout);
  ring::forward_schedule(schedule_of(options), 0);
  // Inputs of a given mask need no structure, and a GPU makes its own.
  const bool made_there = options.place.on_gpu && options.given != nullptr;
  AttentionInputs inputs;
  if (!made_there) inputs = make_inputs(sizes, options.seed);

  attention::AttentionPattern pattern;
  pattern.vertical_slash.p_vertical = pattern.vertical_slash.p_slash = options.p;
  std::shared_ptr<const index::Index> index;
  if (options.given != nullptr) index = std::make_shared<index::Index>(options.given->index);

  AttentionRow row{.case_name = "ring", .pattern = "", .workload = {}, .peer = {}};
  std::vector<RankSeen> seen;
  std::vector<double> forward_host_ms, backward_host_ms;
  bool prints = false;
  Json last_repeat;
  std::mutex mutex;
  run_ranks(options.place, topology, [&](comm::Transport& transport, at::Device device) {
    at::set_num_threads(1);
    const ThreadCountScope one_thread(1);
    RingContext context(options.ring, transport);
    std::vector<int> everyone(static_cast<size_t>(world));
    for (int r = 0; r < world; ++r) everyone[r] = r;
    const auto group = transport.open_host("bench", everyone);
    const int rank = context.cp_rank();
    const auto input = [&](const AlignedBytes& whole, int64_t heads) {
      if (!made_there) return shard(whole, heads, sizes, layout, rank).to(device);
      return at::randn({1, layout.tokens_per_rank(), heads, sizes.head_dim},
                       at::TensorOptions().dtype(scalar_type(sizes.dtype)).device(device));
    };
    const at::Tensor q = input(inputs.q, sizes.num_q_heads);
    const at::Tensor k = input(inputs.k, sizes.num_kv_heads);
    const at::Tensor v = input(inputs.v, sizes.num_kv_heads);
    const at::Tensor dout = input(inputs.dout, sizes.num_q_heads);
    wait_for_stream(device);
    RankSeen mine;
    // From barrier to barrier: the time until the slowest rank is done.
    const auto phase = [&](Times* times, std::vector<double>* host_ms, const auto& body) {
      group->barrier();
      const double begin = wall_now_ms();
      body();
      const double issued = wall_now_ms();
      wait_for_stream(device);
      group->barrier();
      if (rank != 0 || times == nullptr) return;
      times->wall_ms.push_back(wall_now_ms() - begin);
      if (host_ms != nullptr) host_ms->push_back(issued - begin);
    };
    std::string direction;
    std::map<std::string, Timeline> timelines;  // of one repeat
    const auto observed = [&] {
      context.finish_observing();
      const double ms = timelines[direction].transferring_ms();
      if (ms > 0) mine.phase_ms[direction + " transferring"] += ms;
    };
    for (int repeat = -options.warm_up; repeat < options.repeats; ++repeat) {
      const bool timed = repeat >= 0;
      if (repeat == 0) {
        context.set_observer({});
        mine.bytes_before = sent(context);
        if (options.breakdown || device.is_cpu()) {
          context.set_observer([&](const attention::StepTiming& timing) {
            std::string what = timing.what;
            if (what == "transfer") {
              what += concat(" ", timing.channel);
            } else {
              const bool split = what == "wait" || what == "columns";
              mine.phase_ms[split ? direction + " " + what : what] +=
                  static_cast<double>(timing.end_us - timing.begin_us) * 1e-3;
            }
            timelines[direction].stretches.push_back(
                {what, timing.ring_step, timing.begin_us, timing.end_us});
          });
        }
      }
      timelines.clear();
      std::shared_ptr<const index::Index> used = index;
      if (used == nullptr && !options.whole_layer) {
        direction = "index";
        phase(timed ? &row.index : nullptr, nullptr, [&] {
          used = std::make_shared<index::Index>(
              chosen_together(context, q, k, pattern.vertical_slash));
        });
      }
      attention::ForwardResult result;
      direction = "forward";
      phase(timed ? &row.forward : nullptr, &forward_host_ms, [&] {
        result = used ? forward_of(context, q, k, v, used)
                      : chosen_forward(context, q, k, v, pattern, used);
      });
      observed();
      direction = "backward";
      phase(timed ? &row.backward : nullptr, &backward_host_ms,
            [&] { backward_of(context, dout, q, k, v, result, used); });
      observed();
      if (rank == 0) {
        const std::lock_guard lock(mutex);
        row.more["density"] = rounded(index::density(*used), 5);
        row.pairs = total_pairs(*used);
        if (index == nullptr && repeat == options.repeats - 1)
          index = used;  // read after the ranks have ended
      }
    }
    context.set_observer({});
    mine.bytes_after = sent(context);
    mine.buffer_bytes = context.buffer_bytes();
    const std::vector<RankSeen> all = gathered(mine, *group);
    if (rank == 0) {
      const std::lock_guard lock(mutex);
      seen = all;
      prints = true;
      for (const auto& [name, timeline] : timelines)
        if (options.timeline) last_repeat[name] = timeline.to_json();
      row.more["launch_shards"] = context.options().launch_shards;
      row.more["prefetch_steps"] = context.options().prefetch_steps;
      row.more["sm_margin"] = context.options().sm_margin;
      row.more["transfers"] = word_of(attention::kTransferWords, context.options().transfers);
    }
  });
  if (!prints) return {};  // another process does

  row.pattern =
      options.given != nullptr ? options.given->pattern : concat("vertical_slash p ", options.p);
  row.workload = {.mask = "causal",
                  .dtype = std::string(to_string(sizes.dtype)),
                  .seq_len = sizes.seq_len,
                  .num_queries = sizes.seq_len,
                  .num_q_heads = sizes.num_q_heads,
                  .num_kv_heads = sizes.num_kv_heads,
                  .head_dim = sizes.head_dim,
                  .inputs = made_there ? "normal" : inputs.digest,
                  .device = device_name(options.place, topology),
                  .harness = from.harness};
  const bool once = options.ring.columns == attention::ColumnMode::kOnce &&
                    !index::union_too_large(*index, static_cast<int>(sizes.num_kv_heads));
  row.more[options.place.job != nullptr ? "topology" : "virtual"] = topology::to_string(topology);
  row.more["ring"] = ring::to_string(options.ring.ring);
  if (options.whole_layer) row.more["index_in_forward"] = true;
  if (options.ring.ring == ring::RingKind::kHierarchical)
    row.more["inner"] = ring::to_string(options.ring.inner);
  row.more["layout"] = layout::to_string(layout.kind());
  if (layout.kind() == layout::LayoutKind::kBlockStriped)
    row.more["stripe"] = options.ring.layout.stripe;
  row.more["columns"] = once ? "once" : "per_step";
  if (layout.has_blocks()) row.more["imbalance"] = imbalance_json(*index, layout, options, once);
  // Of the rank that sends most, one layer, forward and backward.
  std::map<std::string, int64_t> most;
  int64_t total = 0, largest = 0, buffers = 0;
  std::map<std::string, double> phase_sum, phase_max;
  double busy_sum = 0, busy_max = 0;
  for (const RankSeen& rank : seen) {
    int64_t rank_total = 0;
    for (const auto& [channel, bytes] : rank.bytes_after) {
      const auto before = rank.bytes_before.find(channel);
      const int64_t each =
          (bytes - (before == rank.bytes_before.end() ? 0 : before->second)) / options.repeats;
      most[channel] = std::max(most[channel], each);
      rank_total += each;
    }
    total += rank_total;
    largest = std::max(largest, rank_total);
    buffers = std::max(buffers, rank.buffer_bytes);
    double busy = 0;
    for (const auto& [phase, ms] : rank.phase_ms) {
      const double each = ms / options.repeats;
      phase_sum[phase] += each;
      phase_max[phase] = std::max(phase_max[phase], each);
      if (!phase.ends_with("wait") && !phase.ends_with("transferring")) busy += each;
    }
    busy_sum += busy;
    busy_max = std::max(busy_max, busy);
  }
  row.more["bytes_by_channel"] = most;
  row.more["predicted_ring_bytes"] = predicted_ring_bytes(sizes, layout, options);
  row.more["bytes_largest_rank"] = largest;
  row.more["bytes_all_ranks"] = total;
  row.more["buffer_bytes"] = buffers;
  if (busy_sum > 0) row.more["worker_imbalance_time"] = rounded(busy_max * world / busy_sum);
  if (options.place.on_gpu) {
    row.more["fwd_host_ms"] = rounded(spread(forward_host_ms).median);
    row.more["bwd_host_ms"] = rounded(spread(backward_host_ms).median);
    if (options.place.inner_bytes_per_s > 0)
      row.more["inner_gb_per_s"] = options.place.inner_bytes_per_s * 1e-9;
    if (options.place.outer_bytes_per_s > 0)
      row.more["outer_gb_per_s"] = options.place.outer_bytes_per_s * 1e-9;
  }
  std::vector<std::string> lines = {to_line(row, from)};
  if (options.timeline) {
    lines.push_back(Json{
        {"case", "ring timeline"},
        {"ring", row.more["ring"]},
        {"topology", topology::to_string(topology)},
        {"stretches", last_repeat},
        {"unit", "ms"},
        {"commit",
         from.commit}}.dump());
  }
  if (options.breakdown) {
    for (const auto& [phase, sum] : phase_sum) {
      lines.push_back(Json{
          {"case", "ring phase"},
          {"phase", phase},
          {"ring", row.more["ring"]},
          {"topology", topology::to_string(topology)},
          {"ms_largest_rank", rounded(phase_max[phase])},
          {"ms_mean_rank", rounded(sum / world)},
          {"device", row.workload.device},
          {"commit",
           from.commit}}.dump());
    }
  }
  return lines;
}

}  // namespace mtraining::bench
