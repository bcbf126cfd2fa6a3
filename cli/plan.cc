#include "cli/plan.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <vector>

#include "cli/config_file.h"
#include "cli/parse_options.h"
#include "mtraining/base/check.h"

namespace mtraining::cli {
namespace {

using Json = nlohmann::ordered_json;

/// Ranks x ranks launches of a split are simulated one by one.
constexpr int kMostRanks = 256;
constexpr size_t kMostSplits = 8;

struct Options {
  std::string config, topology_text;
  std::vector<std::string> set;
  double density = 0.05, gpu_gb = 141;
  sim::MachineRates rates;
  bool json = false;
};

const char* const kExamples =
    "Defaults of the rates are those of an H200 node with HDR between nodes; docs/math/plan.md "
    "says where each comes from.\n"
    "Examples:\n"
    "  mtraining plan --config recipes/qwen2.5-3b-512k.toml --topology 4x8\n"
    "  mtraining plan --config recipes/qwen2.5-3b-512k-two-gpus.toml --topology 1x2 --density .1 "
    "--gpu-gb 80\n";

void declare(CLI::App& app, Options& o) {
  app.name("mtraining plan");
  app.footer(kExamples);
  app.add_option("--config", o.config, "The configuration (required)");
  app.add_option("--set", o.set, "Overrides a key: key=value")->expected(1)->take_all();
  app.add_option("--topology", o.topology_text, "Nodes x GPUs of a node, such as 4x8 (required)");
  app.add_option("--density", o.density, "Of the pattern; a dense configuration has 1")
      ->capture_default_str();
  app.add_option("--gpu-gb", o.gpu_gb, "Memory of a GPU, GB (10^9)")->capture_default_str();
  app.add_option("--attention-tflops", o.rates.attention_forward_tflops, "Forward, TFLOP/s")
      ->capture_default_str();
  app.add_option("--attention-backward-tflops", o.rates.attention_backward_tflops,
                 "Backward, TFLOP/s")
      ->capture_default_str();
  app.add_option("--matmul-tflops", o.rates.matmul_tflops, "Projections, MLP and head, TFLOP/s")
      ->capture_default_str();
  app.add_option("--intra-gb-per-s", o.rates.intra_gb_per_s, "A GPU's link inside its node, GB/s")
      ->capture_default_str();
  app.add_option("--inter-gb-per-s", o.rates.inter_gb_per_s, "A GPU's link between nodes, GB/s")
      ->capture_default_str();
  app.add_option("--host-gb-per-s", o.rates.host_gb_per_s, "Between GPU and host memory, GB/s")
      ->capture_default_str();
  app.add_option("--device-gb-per-s", o.rates.device_gb_per_s, "A GPU's own memory, GB/s")
      ->capture_default_str();
  app.add_option("--index-ms", o.rates.index_ms, "Index of a layer, ms")->capture_default_str();
  app.add_option("--launch-us", o.rates.launch_us, "A launch, us")->capture_default_str();
  app.add_flag("--json", o.json, "One JSON object instead of text");
}

/// One way to split the ranks.
struct Split {
  train::RunConfig config;
  train::ResolvedRun resolved;
  sim::RunShape run;
  std::vector<sim::MemoryItem> memory;
  sim::BytesPlan bytes;
  sim::TimePlan time;
  bool fits = true;
};

Split make_split(const Options& o, train::RunConfig config, const topology::Topology& machine) {
  topology::LaunchEnvironment launch;
  launch.world_size = machine.cp_size();
  launch.local_world_size = machine.ranks_per_node;
  Split split{.config = std::move(config),
              .resolved = {},
              .run = {},
              .memory = {},
              .bytes = {},
              .time = {}};
  split.resolved = train::resolve(split.config, launch);
  split.run = run_shape(split.config, split.resolved);
  const sim::DecoderSizes sizes = decoder_sizes(split.config.model);
  const bool dense = split.config.attention.pattern == pattern::PatternKind::kDense;
  const index::Index index = sim::planned_index(
      split.run.seq_len, static_cast<int>(sizes.num_q_heads), dense ? 1 : o.density);
  split.memory = sim::memory_plan(sizes, split.run);
  split.bytes = sim::bytes_plan(sizes, split.run, index);
  split.time = sim::time_plan(sizes, split.run, index, o.rates);
  split.fits = static_cast<double>(sim::device_bytes(split.memory)) <= o.gpu_gb * 1e9;
  return split;
}

/// All cp x dp and inner sizes whose batch divides, fastest that fits first.
std::vector<Split> all_splits(const Options& o, const train::RunConfig& config,
                              const topology::Topology& machine) {
  std::vector<Split> splits;
  const int ranks = machine.cp_size();
  for (int cp = 1; cp <= ranks; ++cp) {
    if (ranks % cp != 0) continue;
    // A group lies within a node or fills whole nodes.
    if (cp <= machine.ranks_per_node ? machine.ranks_per_node % cp != 0
                                     : cp % machine.ranks_per_node != 0)
      continue;
    for (int inner = 1; inner <= std::min(cp, machine.ranks_per_node); ++inner) {
      if (std::min(cp, machine.ranks_per_node) % inner != 0) continue;
      // Smaller inner rings than the node's are another way of the same transfers; flat and full are the two that differ.
      if (inner != 1 && inner != std::min(cp, machine.ranks_per_node)) continue;
      train::RunConfig candidate = config;
      candidate.parallel.cp_size = cp;
      candidate.parallel.dp_size = ranks / cp;
      candidate.parallel.cp_inner_size = inner;
      try {
        splits.push_back(make_split(o, std::move(candidate), machine));
      } catch (const InvalidArgument&) {
        continue;  // the batch does not divide
      } catch (const Unsupported&) {
        continue;
      }
    }
  }
  std::stable_sort(splits.begin(), splits.end(), [](const Split& a, const Split& b) {
    if (a.fits != b.fits) return a.fits;
    return a.time.total() < b.time.total();
  });
  return splits;
}

struct Part {
  const char* name;
  double seconds;
};
std::vector<Part> parts_of(const sim::TimePlan& time) {
  return {{"attention forward", time.attention_forward_s},
          {"attention backward", time.attention_backward_s},
          {"attention again", time.attention_again_s},
          {"index", time.index_s},
          {"matmul", time.matmul_s},
          {"gradients", time.gradients_s},
          {"optimizer", time.optimizer_s}};
}

std::string binds(const Options& o, const Split& split) {
  const int64_t bytes = sim::device_bytes(split.memory);
  if (!split.fits) {
    const auto largest = std::max_element(
        split.memory.begin(), split.memory.end(), [](const auto& a, const auto& b) {
          return (a.on_host ? 0 : a.bytes) < (b.on_host ? 0 : b.bytes);
        });
    char text[160];
    std::snprintf(text, sizeof text, "memory: %.1f GB of %.1f; most of it %s",
                  static_cast<double>(bytes) * 1e-9, o.gpu_gb, largest->name.c_str());
    return text;
  }
  const auto parts = parts_of(split.time);
  const auto longest =
      std::max_element(parts.begin(), parts.end(),
                       [](const Part& a, const Part& b) { return a.seconds < b.seconds; });
  const bool ring = std::string_view(longest->name).starts_with("attention");
  return concat("time: ", longest->name,
                ring ? (split.time.compute_bound ? ", its kernels" : ", its links") : "");
}

std::string split_name(const Split& s) {
  return concat("cp ", s.resolved.cp_size, " (", topology::to_string(s.resolved.topology),
                ") x dp ", s.resolved.dp_size);
}

double gigabytes(int64_t bytes) { return static_cast<double>(bytes) * 1e-9; }

double tokens_per_s(const Split& s) {
  return static_cast<double>(s.run.seq_len * s.config.train.global_batch_size) / s.time.total();
}

Json to_json(const Options& o, const Split& s) {
  Json json = {{"cp_size", s.resolved.cp_size},
               {"cp_inner_size", s.resolved.topology.ranks_per_node},
               {"dp_size", s.resolved.dp_size},
               {"accumulation", s.resolved.accumulation},
               {"fits", s.fits},
               {"device_bytes", sim::device_bytes(s.memory)}};
  for (const sim::MemoryItem& item : s.memory)
    json["memory"][item.name] = {{"bytes", item.bytes}, {"on_host", item.on_host}};
  json["bytes"] = {{"ring_intra", s.bytes.ring_intra},
                   {"ring_inter", s.bytes.ring_inter},
                   {"columns", s.bytes.columns},
                   {"gradients", s.bytes.gradients}};
  for (const Part& part : parts_of(s.time)) json["seconds"][part.name] = part.seconds;
  json["step_s"] = s.time.total();
  json["tokens_per_s"] = tokens_per_s(s);
  json["binds"] = binds(o, s);
  return json;
}

void print(const Options& o, const Split& own, const std::vector<Split>& splits) {
  const sim::DecoderSizes sizes = decoder_sizes(own.config.model);
  std::printf(
      "%s: %lld parameters, %lld tokens a sequence, %lld sequences a train step, density %.4f\n",
      o.config.c_str(), static_cast<long long>(sim::total_parameters(sizes)),
      static_cast<long long>(own.run.seq_len),
      static_cast<long long>(own.config.train.global_batch_size), own.time.density);
  std::printf("%s, %lld micro-steps\n\nmemory of a GPU, GB\n", split_name(own).c_str(),
              static_cast<long long>(own.resolved.accumulation));
  for (const sim::MemoryItem& item : own.memory) {
    std::printf("  %-34s %9.3f%s\n", item.name.c_str(), gigabytes(item.bytes),
                item.on_host ? "  (host)" : "");
  }
  std::printf("  %-34s %9.3f  of %.1f\n", "together", gigabytes(sim::device_bytes(own.memory)),
              o.gpu_gb);
  std::printf("\nsent by a GPU in a train step, GB\n");
  std::printf("  %-34s %9.3f\n", "ring, inside the node", gigabytes(own.bytes.ring_intra));
  std::printf("  %-34s %9.3f\n", "ring, between nodes", gigabytes(own.bytes.ring_inter));
  std::printf("  %-34s %9.3f\n", "columns, to all ranks", gigabytes(own.bytes.columns));
  std::printf("  %-34s %9.3f\n", "gradients and parameters", gigabytes(own.bytes.gradients));
  std::printf("\ntrain step, s (predicted)\n");
  for (const Part& part : parts_of(own.time))
    std::printf("  %-34s %9.3f\n", part.name, part.seconds);
  std::printf("  %-34s %9.3f  %.0f tokens/s\n", "together", own.time.total(), tokens_per_s(own));
  std::printf("\nbinds: %s\n\nsplits of %d GPUs, fastest that fits first\n", binds(o, own).c_str(),
              own.run.ranks());
  for (size_t i = 0; i < std::min(kMostSplits, splits.size()); ++i) {
    const Split& s = splits[i];
    std::printf("  %-28s %9.3f s  %8.1f GB%s  %s\n", split_name(s).c_str(), s.time.total(),
                gigabytes(sim::device_bytes(s.memory)), s.fits ? "" : " (too much)",
                binds(o, s).c_str());
  }
}

}  // namespace

sim::DecoderSizes decoder_sizes(const model::DecoderConfig& model) {
  const model::OptionalTensors optional = model::optional_tensors(model);
  return {.vocab_size = model.vocab_size,
          .hidden_size = model.hidden_size,
          .intermediate_size = model.intermediate_size,
          .num_layers = model.num_hidden_layers,
          .num_q_heads = model.num_attention_heads,
          .num_kv_heads = model.num_key_value_heads,
          .head_dim = model.head_dim,
          .tied = model.tie_word_embeddings,
          .qkv_bias = optional.qkv_bias,
          .out_bias = optional.out_bias,
          .qk_norm = optional.qk_norm};
}

sim::RunShape run_shape(const train::RunConfig& config, const train::ResolvedRun& resolved) {
  const auto recompute = [&] {
    switch (config.train.recompute) {
      case train::Recompute::kNone:
        return sim::RecomputeMode::kNone;
      case train::Recompute::kLayer:
        return sim::RecomputeMode::kLayer;
      case train::Recompute::kExceptAttention:
        return sim::RecomputeMode::kExceptAttention;
    }
    return sim::RecomputeMode::kNone;
  };
  const int64_t element = static_cast<int64_t>(c10::elementSize(config.model.dtype));
  return {.seq_len = config.train.seq_len,
          .micro_batch = config.train.micro_batch_size,
          .accumulation = resolved.accumulation,
          .dp_size = resolved.dp_size,
          .topology = resolved.topology,
          .ring = config.attention.ring,
          .inner = config.attention.inner,
          .ring_stride = config.attention.ring_stride,
          .prefetch_steps = config.attention.prefetch_steps,
          .launch_shards =
              config.attention.launch_shards > 0
                  ? config.attention.launch_shards
                  : ring::chosen_launch_shards(config.attention.ring, resolved.topology,
                                               config.train.device == train::DeviceKind::kCuda),
          .layout = config.attention.layout,
          .stripe = config.attention.stripe,
          .columns_once = config.attention.columns == attention::ColumnMode::kOnce &&
                          config.attention.pattern != pattern::PatternKind::kDense,
          .element_bytes = element,
          .grad_element_bytes = static_cast<int64_t>(c10::elementSize(config.optim.grad_dtype)),
          .wire_element_bytes =
              config.attention.gradient_transport == attention::GradientTransport::kFloat32 ? 4 : 2,
          .zero = config.parallel.zero,
          .offload_optimizer = config.parallel.offload_optimizer,
          .recompute = recompute(),
          .recompute_span = config.train.recompute_span,
          .offload_layers = config.train.offload_layers,
          .mlp_tile = config.train.mlp_tile,
          .loss_chunk = config.train.loss_chunk,
          .deterministic = config.attention.deterministic};
}

int run_plan(int argc, char** argv) {
  CLI::App app("What a configuration needs: memory per GPU, bytes per link, time of a train step");
  Options o;
  declare(app, o);
  if (!parse_options(app, "plan", argc, argv)) return 0;
  MT_CHECK_ARG(!o.config.empty(), "plan: expected --config FILE, got none");
  MT_CHECK_ARG(!o.topology_text.empty(), "plan: expected --topology NODESxGPUS, got none");
  const topology::Topology machine = topology::parse_topology(o.topology_text);
  MT_CHECK_SUPPORTED(machine.cp_size() <= kMostRanks, "--topology: expected at most ", kMostRanks,
                     " GPUs, got ", topology::to_string(machine));
  MT_CHECK_ARG(o.density > 0 && o.density <= 1, "--density: expected a number in (0, 1], got ",
               o.density);
  MT_CHECK_ARG(std::isfinite(o.gpu_gb) && o.gpu_gb > 0, "--gpu-gb: expected a number above 0, got ",
               o.gpu_gb);
  sim::check(o.rates);
  std::vector<Override> overrides;
  for (const std::string& text : o.set) {
    const size_t equals = text.find('=');
    MT_CHECK_ARG(equals != std::string::npos && equals > 0, "--set: expected key=value, got '",
                 text, "'");
    overrides.push_back({text.substr(0, equals), text.substr(equals + 1)});
  }
  const LoadedConfig loaded = load_config(o.config, overrides);
  Split own;
  try {
    own = make_split(o, loaded.config, machine);
  } catch (const InvalidArgument& error) {
    throw InvalidArgument(with_place(loaded, error.what()));
  } catch (const Unsupported& error) {
    throw Unsupported(with_place(loaded, error.what()));
  }
  const std::vector<Split> splits = all_splits(o, loaded.config, machine);
  if (o.json) {
    Json json = {{"config", o.config},
                 {"topology", topology::to_string(machine)},
                 {"parameters", sim::total_parameters(decoder_sizes(own.config.model))},
                 {"density", own.time.density},
                 {"plan", to_json(o, own)},
                 {"splits", Json::array()}};
    for (const Split& split : splits) json["splits"].push_back(to_json(o, split));
    std::printf("%s\n", json.dump().c_str());
  } else {
    print(o, own, splits);
  }
  return 0;
}

}  // namespace mtraining::cli
