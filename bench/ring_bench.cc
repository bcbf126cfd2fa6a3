#include "bench/ring_bench.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>

#include "mtraining/attention/autograd.h"
#include "mtraining/base/check.h"
#include "mtraining/base/parallel.h"
#include "mtraining/comm/loopback.h"
#include "mtraining/index/columns.h"
#include "mtraining/sim/imbalance.h"
#include "mtraining/sim/traffic_bytes.h"

namespace mtraining::bench {
namespace {

using attention::RingContext;
using ring::Channel;

constexpr std::array kChannels = {Channel::kFlatKv,   Channel::kInnerKv,   Channel::kOuterKv,
                                  Channel::kFlatGrad, Channel::kInnerGrad, Channel::kOuterGrad};

at::ScalarType scalar_type(kernels::DType dtype) {
  switch (dtype) {
    case kernels::DType::kFloat64:
      return at::kDouble;
    case kernels::DType::kFloat32:
      return at::kFloat;
    case kernels::DType::kBFloat16:
      return at::kBFloat16;
    case kernels::DType::kFloat16:
      return at::kHalf;
  }
  MT_ASSERT(false, "dtype ", static_cast<int>(dtype));
}

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

double rounded(double value) { return std::round(value * 1000) / 1000; }

ring::ScheduleOptions schedule_of(const RingBenchOptions& options) {
  return {.topology = options.ring.topology,
          .ring = options.ring.ring,
          .inner = options.ring.inner,
          .ring_stride = options.ring.ring_stride,
          .prefetch_steps = options.ring.prefetch_steps};
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
  const AttentionInputs inputs = make_inputs(sizes, options.seed);

  attention::AttentionPattern pattern;
  pattern.vertical_slash.p_vertical = pattern.vertical_slash.p_slash = options.p;
  std::shared_ptr<const index::Index> index;
  if (options.given != nullptr) index = std::make_shared<index::Index>(options.given->index);

  AttentionRow row{.case_name = "ring", .pattern = "", .workload = {}, .peer = {}};
  std::vector<RankSeen> seen(static_cast<size_t>(world));
  std::mutex mutex;
  comm::run_loopback(
      world,
      [&](comm::Transport& transport) {
        at::set_num_threads(1);
        const ThreadCountScope one_thread(1);
        RingContext context(options.ring, transport);
        std::vector<int> everyone(static_cast<size_t>(world));
        for (int r = 0; r < world; ++r) everyone[r] = r;
        const auto group = transport.open("bench", everyone);
        const int rank = context.cp_rank();
        const at::Tensor q = shard(inputs.q, sizes.num_q_heads, sizes, layout, rank);
        const at::Tensor k = shard(inputs.k, sizes.num_kv_heads, sizes, layout, rank);
        const at::Tensor v = shard(inputs.v, sizes.num_kv_heads, sizes, layout, rank);
        const at::Tensor dout = shard(inputs.dout, sizes.num_q_heads, sizes, layout, rank);
        RankSeen mine;
        // From barrier to barrier: the time until the slowest rank is done.
        const auto phase = [&](Times& times, const auto& body) {
          group->barrier();
          Times here;
          time_once(here, [&] {
            body();
            group->barrier();
          });
          if (rank == 0) times.wall_ms.push_back(here.wall_ms[0]);
        };
        std::string direction;
        for (int repeat = -options.warm_up; repeat < options.repeats; ++repeat) {
          if (repeat == 0) {
            mine.bytes_before = sent(context);
            context.set_observer([&](const attention::StepTiming& timing) {
              const std::string what = timing.what;
              const bool split = what == "wait" || what == "columns";
              mine.phase_ms[split ? direction + " " + what : what] +=
                  static_cast<double>(timing.end_us - timing.begin_us) * 1e-3;
            });
          }
          Times ignored_forward, ignored_backward, ignored_index;
          std::shared_ptr<const index::Index> used = index;
          if (used == nullptr) {
            phase(repeat < 0 ? ignored_index : row.index, [&] {
              const double scale = 1 / std::sqrt(static_cast<double>(sizes.head_dim));
              pattern::LocalAttention local;
              local.layout = &context.layout();
              local.cp_rank = rank;
              local.batch = 1;
              local.num_q_heads = sizes.num_q_heads;
              local.num_kv_heads = sizes.num_kv_heads;
              local.head_dim = sizes.head_dim;
              local.dtype = sizes.dtype;
              local.softmax_scale = scale;
              local.q = {q.const_data_ptr(), q.stride(0), q.stride(1), q.stride(2)};
              local.k = {k.const_data_ptr(), k.stride(0), k.stride(1), k.stride(2)};
              used = std::make_shared<index::Index>(pattern::build_vertical_slash(
                  local, pattern.vertical_slash, context.index_group()));
            });
          }
          attention::ForwardResult result;
          direction = "forward";
          phase(repeat < 0 ? ignored_forward : row.forward,
                [&] { result = attention::ring_forward(context, q, k, v, *used, 0); });
          direction = "backward";
          phase(repeat < 0 ? ignored_backward : row.backward, [&] {
            attention::ring_backward(context, dout, q, k, v, result.out, result.lse, *used, 0, {},
                                     result.out_residual);
          });
          if (rank == 0) {
            const std::lock_guard lock(mutex);
            row.more["density"] = std::round(index::density(*used) * 1e5) / 1e5;
            row.pairs = total_pairs(*used);
            if (index == nullptr && repeat == options.repeats - 1)
              index = used;  // read after the ranks have ended
          }
        }
        context.set_observer({});
        mine.bytes_after = sent(context);
        mine.buffer_bytes = context.buffer_bytes();
        seen[rank] = std::move(mine);
      },
      std::chrono::minutes(10));

  row.pattern =
      options.given != nullptr ? options.given->pattern : concat("vertical_slash p ", options.p);
  row.workload = {.mask = "causal",
                  .dtype = std::string(to_string(sizes.dtype)),
                  .seq_len = sizes.seq_len,
                  .num_queries = sizes.seq_len,
                  .num_q_heads = sizes.num_q_heads,
                  .num_kv_heads = sizes.num_kv_heads,
                  .head_dim = sizes.head_dim,
                  .inputs = inputs.digest,
                  .device = concat(cpu_name(world), " as ranks on ", num_threads(), " cores"),
                  .harness = from.harness};
  const bool once = options.ring.columns == attention::ColumnMode::kOnce &&
                    !index::union_too_large(*index, static_cast<int>(sizes.num_kv_heads));
  row.more["virtual"] = topology::to_string(topology);
  row.more["ring"] = ring::to_string(options.ring.ring);
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
      if (phase.find("wait") == std::string::npos) busy += each;
    }
    busy_sum += busy;
    busy_max = std::max(busy_max, busy);
  }
  row.more["bytes_by_channel"] = most;
  row.more["predicted_ring_bytes"] = predicted_ring_bytes(sizes, layout, options);
  row.more["bytes_largest_rank"] = largest;
  row.more["bytes_all_ranks"] = total;
  row.more["buffer_bytes"] = buffers;
  row.more["worker_imbalance_time"] = busy_sum > 0 ? rounded(busy_max * world / busy_sum) : 1;
  std::vector<std::string> lines = {to_line(row, from)};
  if (options.breakdown) {
    for (const auto& [phase, sum] : phase_sum) {
      lines.push_back(Json{
          {"case", "ring phase"},
          {"phase", phase},
          {"ring", row.more["ring"]},
          {"virtual", row.more["virtual"]},
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
