#include "mtraining/sim/step_plan.h"

#include <algorithm>
#include <cmath>

#include "mtraining/base/check.h"
#include "mtraining/index/columns.h"
#include "mtraining/sim/event_simulation.h"
#include "mtraining/sim/imbalance.h"
#include "mtraining/sim/traffic_bytes.h"

namespace mtraining::sim {
namespace {

constexpr int64_t kStateBytes = 4;  // out, lse, gradients of attention; masters; moments; logits
/// Gradients that travel together, and how many such buckets are under way.
constexpr int64_t kBucketBytes = int64_t{32} << 20;
constexpr int64_t kBucketsUnderWay = 2;
/// Of a GPU's matrix library, for the thread of forward and that of backward.
constexpr int64_t kMatrixWorkspaceBytes = 2 * (int64_t{32} << 20);
/// Tokens of a run of a GPU's MLP without tiles (model/device_layer.h).
constexpr int64_t kMlpRunOnGpu = 32768;

int64_t tokens_of(const RunShape& run) {
  return layout_of(run).tokens_per_rank() * run.micro_batch;
}

ShardSizes shard_sizes(const DecoderSizes& model, const RunShape& run) {
  return {.batch = run.micro_batch,
          .tokens = layout_of(run).tokens_per_rank(),
          .num_kv_heads = model.num_kv_heads,
          .head_dim = model.head_dim,
          .kv_element_bytes = run.element_bytes,
          .grad_element_bytes = run.wire_element_bytes};
}

bool is_low_precision(const RunShape& run) { return run.element_bytes < kStateBytes; }

int64_t divided(int64_t value, int64_t by) { return (value + by - 1) / by; }

/// Forward passes of attention's ring in one micro-step: again in backward where layers are recomputed whole.
int forward_rings(const RunShape& run) { return run.recompute == RecomputeMode::kLayer ? 2 : 1; }

int64_t head_elements(const DecoderSizes& model) { return model.vocab_size * model.hidden_size; }

}  // namespace

int64_t layer_parameters(const DecoderSizes& m) {
  const int64_t q = m.num_q_heads * m.head_dim, kv = m.num_kv_heads * m.head_dim;
  int64_t count = 2 * m.hidden_size;                          // norms
  count += m.hidden_size * (q + 2 * kv) + q * m.hidden_size;  // q, k, v, o
  count += 3 * m.hidden_size * m.intermediate_size;           // gate, up, down
  if (m.qkv_bias) count += q + 2 * kv;
  if (m.out_bias) count += m.hidden_size;
  if (m.qk_norm) count += 2 * m.head_dim;
  return count;
}

int64_t total_parameters(const DecoderSizes& m) {
  return m.num_layers * layer_parameters(m) + (m.tied ? 1 : 2) * head_elements(m) + m.hidden_size;
}

layout::Layout layout_of(const RunShape& run) {
  return layout::Layout(
      {.kind = run.layout,
       .seq_len = run.seq_len,
       .cp_size = run.topology.cp_size(),
       .stripe = run.stripe,
       .nodes = run.ring == ring::RingKind::kHierarchical ? run.topology.nodes : 1});
}

ring::ScheduleOptions schedule_of(const RunShape& run) {
  return {.topology = run.topology,
          .ring = run.ring,
          .inner = run.inner,
          .ring_stride = run.ring == ring::RingKind::kFlat ? run.ring_stride : 1,
          .prefetch_steps = run.prefetch_steps,
          .launch_shards = run.launch_shards};
}

int64_t layer_activation_bytes(const DecoderSizes& m, const RunShape& run) {
  const int64_t n = tokens_of(run), q = m.num_q_heads * m.head_dim,
                kv = m.num_kv_heads * m.head_dim;
  // The inputs of both halves; q, k, v; out, and in low precision what its rounding lost; of the MLP gate and up.
  int64_t elements = 2 * m.hidden_size + q + 2 * kv + q * (is_low_precision(run) ? 2 : 1);
  if (run.mlp_tile == 0) elements += 2 * m.intermediate_size;
  if (run.on_gpu && m.qk_norm) elements += q + kv;  // before their norms
  int64_t bytes = elements * run.element_bytes + m.num_q_heads * kStateBytes;
  if (run.on_gpu && m.qk_norm) bytes += (m.num_q_heads + m.num_kv_heads) * kStateBytes;
  // A CPU keeps what the norms return, the value before their weight, and in low precision their input in float32.
  if (!run.on_gpu) {
    bytes += 4 * m.hidden_size * run.element_bytes + 2 * kStateBytes;
    if (is_low_precision(run)) bytes += 2 * m.hidden_size * kStateBytes;
  }
  return n * bytes;
}

int64_t kept_layer_bytes(const DecoderSizes& m, const RunShape& run) {
  const int64_t n = tokens_of(run), q = m.num_q_heads * m.head_dim;
  switch (run.recompute) {
    case RecomputeMode::kNone:
      return layer_activation_bytes(m, run);
    case RecomputeMode::kLayer:
      return n * m.hidden_size * run.element_bytes;
    case RecomputeMode::kExceptAttention:
      return n * ((m.hidden_size + q * (is_low_precision(run) ? 2 : 1)) * run.element_bytes +
                  m.num_q_heads * kStateBytes);
  }
  return 0;
}

int64_t ring_buffer_bytes(const DecoderSizes& m, const RunShape& run) {
  const ShardSizes sizes = shard_sizes(m, run);
  const int64_t n = tokens_of(run), q_bytes = n * m.num_q_heads * m.head_dim * kStateBytes;
  const ring::Schedule forward = ring::forward_schedule(schedule_of(run), 0);
  const ring::Schedule backward = ring::backward_schedule(schedule_of(run), 0);
  int64_t bytes = (std::max(forward.num_kv_slots, backward.num_kv_slots) - 1) * sizes.kv_bytes();
  const int64_t grad_state = 2 * n * m.num_kv_heads * m.head_dim * kStateBytes;
  bytes += backward.num_grad_slots * grad_state;
  if (run.wire_element_bytes != kStateBytes) bytes += backward.num_grad_slots * sizes.grad_bytes();
  if (!run.on_gpu) bytes += q_bytes;         // dq, and in low precision forward's out in its place
  bytes += n * m.num_q_heads * kStateBytes;  // delta
  // Backward's workspace on a GPU, but for columns: lse and delta again, by block.
  if (run.on_gpu) bytes += n * m.num_q_heads * 2 * kStateBytes;
  return bytes;
}

KeptBytes kept_bytes(const DecoderSizes& m, const RunShape& run) {
  const int64_t kept = kept_layer_bytes(m, run);
  // Of a layer that is not its span's first attention's result alone.
  const int64_t later = kept - tokens_of(run) * m.hidden_size * run.element_bytes;
  KeptBytes bytes;
  for (int64_t first = 0; first < m.num_layers; first += run.recompute_span) {
    const int64_t span = std::min(run.recompute_span, m.num_layers - first);
    (first < run.offload_layers ? bytes.host : bytes.device) += kept + (span - 1) * later;
  }
  // Spans that are on their way: while the last one goes back, one is being brought; where it is itself of the host's, two.
  const int64_t on_their_way = bytes.device > 0 ? 1 : 2;
  bytes.device +=
      std::min<int64_t>(bytes.host, on_their_way * (kept + (run.recompute_span - 1) * later));
  return bytes;
}

namespace {

/// Gradients as autograd has them, until they are added up or sent.
int64_t gradients_under_way(const DecoderSizes& m, const RunShape& run) {
  if (run.zero == 0 && run.element_bytes == kStateBytes && run.grad_element_bytes == kStateBytes)
    return 0;  // they are added where they lie
  // A span's own, and the head's, which waits for the embedding's where they are one.
  int64_t bytes = run.recompute_span * layer_parameters(m) * run.element_bytes;
  if (m.tied) bytes += head_elements(m) * run.element_bytes;
  if (run.zero != 0)
    bytes += kBucketsUnderWay * (kBucketBytes + divided(kBucketBytes, run.ranks()));
  return bytes;
}

/// The layer that backward is in, on a CPU: its activations again, their gradients, one tile of the MLP.
int64_t working_bytes_on_cpu(const DecoderSizes& m, const RunShape& run) {
  const int64_t n = tokens_of(run), input = n * m.hidden_size * run.element_bytes;
  const int64_t again = run.recompute == RecomputeMode::kNone ? 0 : layer_activation_bytes(m, run);
  const int64_t tile = run.mlp_tile == 0 ? n : std::min(n, run.mlp_tile);
  const int64_t mlp_work = 4 * tile * m.intermediate_size * run.element_bytes;
  return again + (run.mlp_tile == 0 ? 0 : mlp_work) + mlp_work / 2 + 2 * input;
}

/// The same on a GPU, at the largest of three moments (model/layer_gradient.h; without recomputation model/device_layer.h).
int64_t working_bytes_on_gpu(const DecoderSizes& m, const RunShape& run) {
  const bool again = run.recompute != RecomputeMode::kNone;
  const int64_t n = tokens_of(run), e = run.element_bytes;
  const int64_t q = m.num_q_heads * m.head_dim, kv = 2 * m.num_kv_heads * m.head_dim;
  const int64_t input = n * m.hidden_size * e, attended = n * q * e, keys = n * kv * e;
  const int64_t tile = std::min(n, run.mlp_tile == 0 ? kMlpRunOnGpu : run.mlp_tile);
  // The gradient of the output, which becomes that of the input where nothing else keeps it; a span's inputs made again.
  const int64_t always = (again ? 1 : 2) * input + (run.recompute_span - 1) * input;
  const int64_t heads = again ? attended + keys : 0;  // q, k, v
  int64_t result = 0;                                 // of attention's second run
  if (run.recompute == RecomputeMode::kLayer)
    result = attended * (is_low_precision(run) ? 2 : 1) + n * m.num_q_heads * kStateBytes;
  // The MLP, run by run: gate and up, their product, norms; the gradient of attention's result comes; sums over several runs.
  const int64_t products = (3 * m.intermediate_size + q) * m.hidden_size;
  const int64_t sums = tile < n ? products * kStateBytes : 0;
  const int64_t mlp = tile * (3 * m.intermediate_size + 3 * m.hidden_size) * e + sums;
  const int64_t in_mlp = heads + result + attended + mlp;
  // Attention: when its result has gone, dq; where it is summed over launches in the state's type, then rounded.
  const bool in_one_go = run.deterministic && is_low_precision(run) && run.topology.cp_size() == 1;
  const int64_t dq = in_one_go ? attended : n * q * kStateBytes;
  const int64_t copies = keys;  // k and v contiguous
  const int64_t in_attention = heads + attended + copies + dq;
  const int64_t rounded = (again ? 0 : attended) + dq + (in_one_go ? 0 : attended) + keys;
  return always + std::max({in_mlp, in_attention, rounded});
}

int64_t working_bytes(const DecoderSizes& m, const RunShape& run) {
  return run.on_gpu ? working_bytes_on_gpu(m, run) : working_bytes_on_cpu(m, run);
}

}  // namespace

std::vector<MemoryItem> memory_plan(const DecoderSizes& m, const RunShape& run) {
  const int64_t parameters = total_parameters(m), n = tokens_of(run);
  const int64_t owned = run.zero == 0 ? parameters : divided(parameters, run.ranks());
  const bool views = run.zero == 0 && run.element_bytes == kStateBytes;
  const int64_t input = n * m.hidden_size * run.element_bytes;
  std::vector<MemoryItem> items;
  items.push_back({"weights", parameters * run.element_bytes});
  items.push_back({"gradients", owned * run.grad_element_bytes});
  // float32 weights that are not divided are the masters themselves.
  items.push_back({"master weights", views && !run.offload_optimizer ? 0 : owned * kStateBytes,
                   run.offload_optimizer});
  items.push_back({"optimizer moments", 2 * owned * kStateBytes, run.offload_optimizer});
  const KeptBytes kept = kept_bytes(m, run);
  items.push_back({"activations kept", kept.device});
  if (kept.host > 0) items.push_back({"activations kept in host memory", kept.host, true});
  items.push_back({"attention buffers", ring_buffer_bytes(m, run)});
  if (run.columns_once && run.topology.cp_size() > 1) {
    // Two slices of gathered K and V rows and, in backward, of their float32 gradients.
    const int64_t rows =
        std::min(run.max_column_rows_per_rank, layout_of(run).tokens_per_rank() * m.num_kv_heads) *
        run.topology.cp_size();
    items.push_back({"gathered columns", 2 * 2 * rows * m.head_dim * run.element_bytes +
                                             2 * rows * m.head_dim * kStateBytes});
  }
  // Ids, labels, positions; the rotary tables, with temporaries of theirs.
  if (run.on_gpu) {
    items.push_back({"tokens and rotary tables", n * (24 + m.head_dim * kStateBytes)});
    items.push_back({"workspace of products", kMatrixWorkspaceBytes});
  }
  int64_t chunk = std::min(run.loss_chunk, n) * m.vocab_size * kStateBytes;
  const int64_t rounded = is_low_precision(run) ? head_elements(m) * run.element_bytes : 0;
  // The head's gradient is rounded when the logits have gone.
  if (run.on_gpu) chunk = std::max(chunk, rounded);
  const bool copied = is_low_precision(run) && !run.on_gpu;
  const std::vector<MemoryItem> of_loss = {
      // A chunk of logits, on a CPU with its exponentials.
      {"logits chunk", run.on_gpu ? chunk : 2 * chunk},
      {"head in float32", (copied ? 1 : 0) * head_elements(m) * kStateBytes +
                              head_elements(m) * kStateBytes + (run.on_gpu ? 0 : rounded)},
      // The last norm's input and output and the gradient of that.
      {"activations of the head", run.on_gpu ? 3 * input : input}};
  const std::vector<MemoryItem> of_layer = {
      {"gradients under way", gradients_under_way(m, run)},
      {"activations of the layer at work", working_bytes(m, run)}};
  const auto add = [&](const std::vector<MemoryItem>& more) {
    items.insert(items.end(), more.begin(), more.end());
  };
  // On a CPU the allocator's peak was seen to hold both.
  if (!run.on_gpu || device_bytes(of_loss) >= device_bytes(of_layer)) add(of_loss);
  if (!run.on_gpu || device_bytes(of_loss) < device_bytes(of_layer)) add(of_layer);
  return items;
}

int64_t device_bytes(const std::vector<MemoryItem>& items) {
  int64_t bytes = 0;
  for (const MemoryItem& item : items) bytes += item.on_host ? 0 : item.bytes;
  return bytes;
}

index::Index planned_index(int64_t seq_len, int num_heads, double density) {
  MT_CHECK_ARG(density > 0 && density <= 1, "--density: expected a number in (0, 1], got ",
               density);
  if (density == 1) return index::dense_index(1, num_heads, seq_len);
  const int64_t num_blocks = (seq_len + layout::kBlock - 1) / layout::kBlock;
  const double blocks = static_cast<double>(num_blocks);
  // Diagonal c holds NB - c blocks of 64 x 64; evenly spread ones hold half of NB each on average, diagonal 0 all.
  const auto diagonals = std::clamp<int64_t>(std::llround(density * blocks / 2), 1, num_blocks);
  std::vector<int32_t> chosen;
  for (int64_t i = 0; i < diagonals; ++i)
    chosen.push_back(static_cast<int32_t>(i * num_blocks / diagonals));
  // A column at j meets N - j rows: half of N on average, less those on chosen diagonals.
  const double share_left = 1 - density / 2;
  const auto columns = std::clamp<int64_t>(
      std::llround(density / 2 / share_left * static_cast<double>(seq_len)), 0, seq_len);
  std::vector<std::vector<int32_t>> column_lists;
  for (int h = 0; h < num_heads; ++h) {
    std::vector<int32_t> list;
    for (int64_t i = 0; i < columns; ++i)
      list.push_back(static_cast<int32_t>((i * seq_len / columns + h) % seq_len));
    column_lists.push_back(std::move(list));
  }
  return index::make_index(1, num_heads, seq_len,
                           std::vector<std::vector<int32_t>>(num_heads, chosen),
                           std::move(column_lists));
}

namespace {

bool columns_travel(const DecoderSizes& model, const RunShape& run, const index::Index& index) {
  const bool any = std::any_of(index.columns.counts.begin(), index.columns.counts.end(),
                               [](int32_t count) { return count > 0; });
  return any && run.columns_once &&
         ring::num_launches(ring::forward_schedule(schedule_of(run), 0)) > 1 &&
         !index::union_too_large(index, static_cast<int>(model.num_kv_heads));
}

LinkBytes most_of(const std::vector<LinkBytes>& ranks) {
  LinkBytes most;
  for (const LinkBytes& rank : ranks) {
    most.inner = std::max(most.inner, rank.inner);
    most.outer = std::max(most.outer, rank.outer);
  }
  return most;
}

}  // namespace

BytesPlan bytes_plan(const DecoderSizes& model, const RunShape& run, const index::Index& index) {
  const ShardSizes sizes = shard_sizes(model, run);
  const int64_t layers = model.num_layers * run.accumulation;
  const LinkBytes forward = most_of(ring_bytes(schedule_of(run), sizes, false));
  const LinkBytes backward = most_of(ring_bytes(schedule_of(run), sizes, true));
  BytesPlan plan;
  plan.ring_intra = layers * (forward_rings(run) * forward.inner + backward.inner);
  plan.ring_inter = layers * (forward_rings(run) * forward.outer + backward.outer);
  if (columns_travel(model, run, index)) {
    const index::ColumnPlan columns = index::plan_columns(
        index, layout_of(run), static_cast<int>(model.num_kv_heads), run.max_column_rows_per_rank);
    const int world = run.topology.cp_size();
    ShardSizes one_sample = sizes;  // planned columns are of one sample
    one_sample.batch = 1;
    plan.columns = layers * run.micro_batch *
                   (forward_rings(run) * column_bytes(columns, world, one_sample, false) +
                    column_bytes(columns, world, one_sample, true));
  }
  const int64_t parameters = total_parameters(model), ranks = run.ranks();
  if (run.zero == 0) {
    plan.gradients = 2 * (ranks - 1) * parameters * run.grad_element_bytes / ranks;
  } else {
    plan.gradients =
        (ranks - 1) * (run.accumulation * divided(parameters, ranks) * run.grad_element_bytes +
                       divided(parameters, ranks) * run.element_bytes);
  }
  return plan;
}

void check(const MachineRates& rates) {
  const auto positive = [](const char* flag, double value) {
    MT_CHECK_ARG(std::isfinite(value) && value > 0, flag, ": expected a number above 0, got ",
                 value);
  };
  positive("--attention-tflops", rates.attention_forward_tflops);
  positive("--attention-backward-tflops", rates.attention_backward_tflops);
  positive("--matmul-tflops", rates.matmul_tflops);
  positive("--intra-gb-per-s", rates.intra_gb_per_s);
  positive("--inter-gb-per-s", rates.inter_gb_per_s);
  positive("--host-gb-per-s", rates.host_gb_per_s);
  positive("--device-gb-per-s", rates.device_gb_per_s);
  MT_CHECK_ARG(std::isfinite(rates.index_ms) && rates.index_ms >= 0,
               "--index-ms: expected a number of at least 0, got ", rates.index_ms);
  MT_CHECK_ARG(std::isfinite(rates.launch_us) && rates.launch_us >= 0,
               "--launch-us: expected a number of at least 0, got ", rates.launch_us);
}

TimePlan time_plan(const DecoderSizes& model, const RunShape& run, const index::Index& index,
                   const MachineRates& rates) {
  check(rates);
  const layout::Layout layout = layout_of(run);
  const ring::ScheduleOptions schedule = schedule_of(run);
  const ShardSizes sizes = shard_sizes(model, run);
  const int world = run.topology.cp_size();
  const double micro_batch = static_cast<double>(run.micro_batch);
  // One head stands for all: planned heads differ in the places of their columns alone.
  index::Index one = index;
  if (index.num_q_heads > 1) {
    const auto list = [&](const index::Lists& lists) {
      const auto row = lists.row(0);
      return std::vector<std::vector<int32_t>>{{row.begin(), row.end()}};
    };
    one = index::make_index(1, 1, index.seq_len, list(index.diagonals), list(index.columns));
  }
  const ColumnCost columns =
      columns_travel(model, run, index) ? ColumnCost::kOnce : ColumnCost::kPerStep;
  const StepLoads loads = step_loads(count_pairs(one, layout), schedule, columns);
  const double heads = static_cast<double>(model.num_q_heads) * micro_batch;
  const CostModel cost{
      .inner = {.latency_us = 0, .bytes_per_us = rates.intra_gb_per_s * 1e3},
      .outer = {.latency_us = 0, .bytes_per_us = rates.inter_gb_per_s * 1e3},
      .kv_bytes = sizes.kv_bytes(),
      .grad_bytes = sizes.grad_bytes(),
      .grad_pass_us = static_cast<double>(sizes.grad_bytes()) / (rates.device_gb_per_s * 1e3)};
  TimePlan plan;
  plan.density = index::density(one);
  const auto layer_ms = [&](bool backward) {
    const double flops_per_pair = (backward ? 10.0 : 4.0) * static_cast<double>(model.head_dim);
    const double tflops =
        backward ? rates.attention_backward_tflops : rates.attention_forward_tflops;
    const LaunchCost launch{.us_per_pair = flops_per_pair * heads / (tflops * 1e6),
                            .fixed_us = rates.launch_us};
    const ComputeTimes compute = compute_times(loads, launch, backward);
    std::vector<ring::Schedule> schedules;
    for (int rank = 0; rank < world; ++rank) {
      schedules.push_back(backward ? ring::backward_schedule(schedule, rank)
                                   : ring::forward_schedule(schedule, rank));
    }
    const Timeline timeline = simulate(schedules, run.topology, compute, cost);
    const double busiest =
        *std::max_element(timeline.compute_us.begin(), timeline.compute_us.end());
    if (timeline.total_us > 1.1 * busiest) plan.compute_bound = false;
    return timeline.total_us * 1e-3;
  };
  const double layers = static_cast<double>(model.num_layers * run.accumulation);
  const double forward_ms = layer_ms(false), backward_ms = layer_ms(true);
  plan.attention_forward_s = layers * forward_ms * 1e-3;
  plan.attention_backward_s = layers * backward_ms * 1e-3;
  plan.attention_again_s = (forward_rings(run) - 1) * plan.attention_forward_s;
  plan.index_s = plan.density < 1 ? layers * rates.index_ms * 1e-3 : 0;

  // 2 flops a parameter and token forward, 4 backward, 2 more where layers are recomputed; the head is not.
  const double n = static_cast<double>(layout.tokens_per_rank()) * micro_batch;
  const double in_layers =
      static_cast<double>(model.num_layers) * static_cast<double>(layer_parameters(model));
  const double factor = run.recompute == RecomputeMode::kNone ? 6 : 8;
  const double flops = n * static_cast<double>(run.accumulation) *
                       (factor * in_layers + 6 * static_cast<double>(head_elements(model)));
  plan.matmul_s = flops / (rates.matmul_tflops * 1e12);

  const BytesPlan bytes = bytes_plan(model, run, index);
  // Over the slowest link that a group of all ranks crosses.
  const bool leaves_node = run.topology.nodes > 1 || run.dp_size > 1;
  const double link = leaves_node ? rates.inter_gb_per_s : rates.intra_gb_per_s;
  plan.gradients_s = static_cast<double>(bytes.gradients) / (link * 1e9);
  const double owned = static_cast<double>(total_parameters(model)) /
                       (run.zero == 0 ? 1.0 : static_cast<double>(run.ranks()));
  // Master, two moments read and written, the gradient read; offloaded: the gradient down and the weights up, the update on the host.
  const double update_bytes =
      owned * (6 * kStateBytes + static_cast<double>(run.grad_element_bytes));
  plan.optimizer_s =
      run.offload_optimizer
          ? (owned * static_cast<double>(run.grad_element_bytes + run.element_bytes) +
             update_bytes) /
                (rates.host_gb_per_s * 1e9)
          : update_bytes / (rates.device_gb_per_s * 1e9);
  return plan;
}

}  // namespace mtraining::sim
