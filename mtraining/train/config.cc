#include "mtraining/train/config.h"

#include <algorithm>
#include <cmath>

#include "mtraining/base/check.h"
#include "mtraining/kernels/validate.h"
#include "mtraining/train/layer_patterns.h"

namespace mtraining::train {
namespace {

constexpr int64_t kMostTokens = int64_t{1} << 62;  ///< of a run

// Counts that are multiplied with each other stay far from 2^63.
void at_most(const char* key, int64_t value, int64_t most) {
  MT_CHECK_ARG(value <= most, key, ": expected at most ", most, ", got ", value);
}
void at_least(const char* key, int64_t value, int64_t least) {
  MT_CHECK_ARG(value >= least, key, ": expected at least ", least, ", got ", value);
}

void check_finite(const char* key, double value) {
  MT_CHECK_ARG(std::isfinite(value), key, ": expected a finite number, got ", value);
}

void check_sources(const char* key, const std::vector<data::Source>& sources) {
  for (const data::Source& source : sources) {
    MT_CHECK_ARG(!source.path.empty(), key, ": expected a path, got \"\"");
    MT_CHECK_ARG(source.weight > 0 && std::isfinite(source.weight), key, ": weight of ",
                 source.path, ": expected a positive finite number, got ", source.weight);
  }
}

/// What no machine holds is a slip of the pen; in double, because the product may pass 2^63.
void check_size(const model::DecoderConfig& m) {
  at_most("model.num_hidden_layers", m.num_hidden_layers, 10000);
  MT_CHECK_ARG(m.head_dim % 8 == 0 && m.head_dim <= kernels::kMaxHeadDim,
               "model.head_dim: expected a multiple of 8 up to ", kernels::kMaxHeadDim, ", got ",
               m.head_dim);
  const auto as_double = [](int64_t value) { return static_cast<double>(value); };
  const double hidden = as_double(m.hidden_size), head = as_double(m.head_dim);
  const double layer =
      2 * hidden * head * (as_double(m.num_attention_heads) + as_double(m.num_key_value_heads)) +
      3 * hidden * as_double(m.intermediate_size);
  const double count = (m.tie_word_embeddings ? 1 : 2) * as_double(m.vocab_size) * hidden +
                       as_double(m.num_hidden_layers) * layer;
  MT_CHECK_ARG(count < std::pow(2.0, 40), "model.hidden_size: the model has ", count,
               " parameters, expected fewer than 2^40");
  check_finite("model.initializer_range", m.initializer_range);
  check_finite("model.embedding_initializer_range", m.embedding_initializer_range);
  check_finite("model.rms_norm_eps", m.rms_norm_eps);
}

/// What config.json of a checkpoint cannot say is refused now, not when the first one is written.
void check_config_json(const model::DecoderConfig& m, int64_t seq_len) {
  try {
    model::hf_config(m, seq_len);
  } catch (const InvalidArgument& error) {
    throw InvalidArgument(concat("model.", error.what()));
  }
}

void check_attention(const RunConfig& config) {
  const AttentionSection& a = config.attention;
  check_patterns(config);
  at_least("attention.dense_steps", a.dense_steps, 0);
  MT_CHECK_ARG(a.stripe >= layout::kBlock && a.stripe % layout::kBlock == 0,
               "attention.stripe: expected a multiple of ", layout::kBlock, ", got ", a.stripe);
  at_least("attention.prefetch_steps", a.prefetch_steps, 1);
  at_least("attention.launch_shards", a.launch_shards, 0);
  at_least("attention.sm_margin", a.sm_margin, 0);
  at_most("attention.sm_margin", a.sm_margin, 1024);
  at_least("attention.ring_stride", a.ring_stride, 1);
}

topology::Topology resolve_topology(const RunConfig& config, int cp_size,
                                    const topology::LaunchEnvironment& launch) {
  const std::optional<int>& inner = config.parallel.cp_inner_size;
  if (inner) return topology::make_topology(cp_size, *inner);
  if (config.attention.ring == ring::RingKind::kFlat || cp_size == 1)
    return topology::make_topology(cp_size, cp_size);
  MT_CHECK_ARG(launch.local_world_size.has_value(),
               "parallel.cp_inner_size: attention.ring = \"hierarchical\" over ", cp_size,
               " ranks needs the ranks of a node; neither the key nor LOCAL_WORLD_SIZE is given");
  return topology::make_topology(cp_size, std::min(cp_size, *launch.local_world_size));
}

}  // namespace

ResolvedRun resolve(RunConfig& config, const topology::LaunchEnvironment& launch) {
  model::check(config.model);
  check_size(config.model);
  const TrainSection& train = config.train;
  at_least("train.seq_len", train.seq_len, 1);
  at_least("train.global_batch_size", train.global_batch_size, 1);
  at_least("train.micro_batch_size", train.micro_batch_size, 1);
  at_most("train.seq_len", train.seq_len, (int64_t{1} << 31) - 1);  // positions are int32
  check_config_json(config.model, train.seq_len);
  at_most("train.global_batch_size", train.global_batch_size, int64_t{1} << 31);
  at_most("train.micro_batch_size", train.micro_batch_size, int64_t{1} << 31);
  at_least("train.loss_chunk", train.loss_chunk, 1);
  at_least("train.mlp_tile", train.mlp_tile, 0);
  at_least("train.offload_layers", train.offload_layers, 0);
  at_most("train.offload_layers", train.offload_layers, config.model.num_hidden_layers);
  MT_CHECK_ARG(train.offload_layers == 0 || train.recompute != Recompute::kNone,
               "train.offload_layers: expected 0 where train.recompute = \"none\", got ",
               train.offload_layers);
  at_least("train.recompute_span", train.recompute_span, 1);
  at_most("train.recompute_span", train.recompute_span, config.model.num_hidden_layers);
  MT_CHECK_ARG(train.recompute_span == 1 || train.recompute != Recompute::kNone,
               "train.recompute_span: expected 1 where train.recompute = \"none\", got ",
               train.recompute_span);
  at_least("parallel.optimizer_threads", config.parallel.optimizer_threads, 0);
  at_most("parallel.optimizer_threads", config.parallel.optimizer_threads, 1024);
  MT_CHECK_SUPPORTED(train.device != DeviceKind::kCuda || config.model.dtype == at::kBFloat16,
                     "train.device: \"cuda\" needs model.dtype = \"bf16\", got ",
                     config.model.dtype == at::kFloat ? "float32" : "another type");
  MT_CHECK_SUPPORTED(
      config.attention.transfers != attention::Transfers::kPeerCopies ||
          train.device == DeviceKind::kCuda,
      "attention.transfers: \"peer_copies\" are between GPUs, train.device is \"cpu\"");
  at_least("train.recall_every", train.recall_every, 0);
  MT_CHECK_ARG(!train.peak_flops_per_s ||
                   (*train.peak_flops_per_s > 0 && std::isfinite(*train.peak_flops_per_s)),
               "train.peak_flops_per_s: expected a finite number above 0, got ",
               train.peak_flops_per_s.value_or(0));
  MT_CHECK_ARG(train.stop_grace_s > 0 && std::isfinite(train.stop_grace_s),
               "train.stop_grace_s: expected a finite number above 0, got ", train.stop_grace_s);
  MT_CHECK_ARG(train.steps.has_value() != train.tokens.has_value(),
               "train.steps: expected exactly one of train.steps and train.tokens, got ",
               train.steps ? "both" : "neither");
  if (train.steps) at_least("train.steps", *train.steps, 1);
  if (train.tokens) at_least("train.tokens", *train.tokens, 1);
  if (train.tokens) at_most("train.tokens", *train.tokens, kMostTokens);
  check_attention(config);
  optim::check(config.optim.adamw);
  optim::check(config.optim.schedule);
  MT_CHECK_ARG(config.optim.clip_norm >= 0 && std::isfinite(config.optim.clip_norm),
               "optim.clip_norm: expected a finite number of at least 0 (0: off), got ",
               config.optim.clip_norm);
  at_least("eval.every", config.eval.every, 0);
  at_least("eval.batches", config.eval.batches, 1);
  for (const double p : config.eval.also_p) {
    MT_CHECK_ARG(p >= 0 && p <= 1, "eval.also_p: expected values from 0 to 1, got ", p);
  }
  at_least("checkpoint.every", config.checkpoint.every, 0);
  at_least("checkpoint.keep", config.checkpoint.keep, 0);
  at_most("checkpoint.keep", config.checkpoint.keep, 1000000);
  MT_CHECK_ARG(config.checkpoint.save_every_minutes >= 0 &&
                   std::isfinite(config.checkpoint.save_every_minutes),
               "checkpoint.save_every_minutes: expected a finite number of at least 0, got ",
               config.checkpoint.save_every_minutes);
  at_least("trace.first_step", config.trace.first_step, 1);
  at_least("trace.steps", config.trace.steps, 0);
  MT_CHECK_ARG(config.trace.example_layer >= -1 &&
                   config.trace.example_layer < config.model.num_hidden_layers,
               "trace.example_layer: expected -1 to ", config.model.num_hidden_layers - 1, ", got ",
               config.trace.example_layer);
  MT_CHECK_ARG(config.trace.example_head >= 0 &&
                   config.trace.example_head < config.model.num_attention_heads,
               "trace.example_head: expected 0 to ", config.model.num_attention_heads - 1, ", got ",
               config.trace.example_head);
  MT_CHECK_ARG(!config.data.train.empty(),
               "data.train: expected at least one {path, weight}, got none");
  check_sources("data.train", config.data.train);
  check_sources("data.valid", config.data.valid);

  ResolvedRun resolved;
  if (train.device == DeviceKind::kCuda)
    resolved.device = at::Device(at::kCUDA, static_cast<at::DeviceIndex>(launch.local_rank));
  const int world = launch.world_size;
  const int local = launch.local_world_size.value_or(1);
  MT_CHECK_ARG(local <= world, "LOCAL_WORLD_SIZE: expected at most WORLD_SIZE = ", world, ", got ",
               local);
  MT_CHECK_ARG(config.parallel.zero == 0 || config.parallel.zero == 2,
               "parallel.zero: expected 0 or 2, got ", config.parallel.zero);
  at_least("parallel.dp_size", config.parallel.dp_size, 1);
  MT_CHECK_ARG(config.parallel.timeout_s >= 1 && config.parallel.timeout_s <= 1e6,
               "parallel.timeout_s: expected 1 .. 1000000 seconds, got ",
               config.parallel.timeout_s);
  if (config.parallel.cp_size) at_least("parallel.cp_size", *config.parallel.cp_size, 1);
  resolved.dp_size = config.parallel.dp_size;
  MT_CHECK_ARG(config.parallel.cp_size.has_value() || world % resolved.dp_size == 0,
               "parallel.dp_size: expected a divisor of the ", world, " ranks, got ",
               resolved.dp_size);
  resolved.cp_size = config.parallel.cp_size.value_or(world / resolved.dp_size);
  const int64_t ranks = int64_t{resolved.cp_size} * resolved.dp_size;
  MT_CHECK_ARG(ranks == world, "parallel.cp_size: ", resolved.cp_size, " x parallel.dp_size ",
               resolved.dp_size, " = ", ranks, " ranks expected, ", world,
               " are running (--nproc or the launcher's WORLD_SIZE)");
  resolved.topology = resolve_topology(config, resolved.cp_size, launch);
  const int64_t micro = train.micro_batch_size * resolved.dp_size;
  MT_CHECK_ARG(train.global_batch_size % micro == 0,
               "train.global_batch_size: expected a multiple of ",
               "micro_batch_size x dp_size = ", micro, ", got ", train.global_batch_size);
  resolved.accumulation = train.global_batch_size / micro;
  const int64_t step_tokens = train.global_batch_size * train.seq_len;
  if (train.steps) at_most("train.steps", *train.steps, kMostTokens / step_tokens);
  resolved.steps = train.steps ? *train.steps : (*train.tokens + step_tokens - 1) / step_tokens;
  config.optim.schedule.total_steps = resolved.steps;
  layout::Layout checked(
      ring_options(config, resolved).layout);  // its own checks, before any communication
  ring::forward_schedule({resolved.topology, config.attention.ring, config.attention.inner,
                          config.attention.ring_stride, config.attention.prefetch_steps},
                         0);
  return resolved;
}

attention::RingOptions ring_options(const RunConfig& config, const ResolvedRun& resolved) {
  const AttentionSection& a = config.attention;
  attention::RingOptions options;
  options.layout.kind = a.layout;
  options.layout.seq_len = config.train.seq_len;
  options.layout.cp_size = resolved.cp_size;
  options.layout.stripe = a.stripe;
  options.layout.nodes =
      a.layout == layout::LayoutKind::kBlockStriped && a.ring == ring::RingKind::kHierarchical
          ? resolved.topology.nodes
          : 1;
  options.topology = resolved.topology;
  options.ring = a.ring;
  options.inner = a.inner;
  options.ring_stride = a.ring_stride;
  options.prefetch_steps = a.prefetch_steps;
  options.launch_shards = a.launch_shards;
  options.columns = a.columns;
  options.gradient_transport = a.gradient_transport;
  options.transfers = a.transfers;
  options.deterministic = a.deterministic;
  options.sm_margin = a.sm_margin;
  return options;
}

}  // namespace mtraining::train
