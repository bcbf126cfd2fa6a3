#include "bench/train_bench.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <chrono>
#include <map>

#include "bench/step_phases.h"
#include "bench/torch_device.h"
#include "mtraining/base/check.h"
#include "mtraining/base/parallel.h"
#include "mtraining/base/rng.h"
#include "mtraining/comm/loopback.h"
#include "mtraining/data/token_file.h"
#include "mtraining/testing/scratch_folder.h"
#include "mtraining/train/trainer.h"

namespace mtraining::bench {
namespace {

/// Documents of one sequence each, of ids that nothing predicts.
std::string write_tokens(const testing::ScratchFolder& folder, const train::RunConfig& config,
                         int64_t sequences) {
  const std::string prefix = (folder / "random").string();
  data::TokenFileWriter writer(prefix, data::TokenType::kInt32);
  std::vector<int64_t> ids(static_cast<size_t>(config.train.seq_len + 1));
  const Rng random(1);
  for (int64_t s = 0; s < sequences; ++s) {
    for (size_t i = 0; i < ids.size(); ++i) {
      ids[i] = static_cast<int64_t>(random.below(static_cast<uint64_t>(s) * ids.size() + i,
                                                 static_cast<uint64_t>(config.model.vocab_size)));
    }
    writer.add_sequence(ids);
    writer.end_document();
  }
  writer.finish();
  return prefix;
}

/// What one run of some train steps was.
struct Arm {
  train::RunConfig config;  // as run
  std::vector<trace::StepMetrics> steps;
  std::vector<std::map<std::string, double>> parts;  // by rank: ms of all steps
  std::vector<double> step_ms;
  StepPhases phases;  // of rank 0
  Json kernels = Json::object();
};

/// What is known of a step when it ends, so that a bench that is ended before its last step leaves something.
std::string step_row(const trace::StepMetrics& metrics, const train::RunConfig& config,
                     const Provenance& from) {
  const bool dense = config.attention.pattern == pattern::PatternKind::kDense;
  return Json{{"case", "train step"},
              {"pattern", dense ? "dense" : "sparse"},
              {"train_step", metrics.train_step},
              {"layers_run", config.model.num_hidden_layers},
              {"step_s", rounded(metrics.step_s)},
              {"tokens_per_s", rounded(metrics.tokens_per_s)},
              {"loss", metrics.loss},
              {"attention_density", metrics.attention_density},
              {"worker_imbalance_time", metrics.worker_imbalance_time},
              {"process_memory_bytes", metrics.peak_memory_bytes},
              {"peak_tensor_bytes", metrics.peak_tensor_bytes},
              {"commit", from.commit.empty() ? Json(nullptr) : Json(from.commit)}}
      .dump();
}

Arm run_arm(const TrainBenchOptions& options, const train::RunConfig& config,
            const train::ResolvedRun& resolved, const Provenance& from) {
  const int world = options.ranks.cp_size();
  const int64_t all_steps = options.warm_up + options.steps;
  Arm arm;
  arm.config = config;
  arm.parts.resize(static_cast<size_t>(world));
  const int threads = std::max(1, num_threads() / world);
  const auto rank_of = [&](comm::Transport& transport) {
    at::set_num_threads(threads);
    const ThreadCountScope scope(threads);
    train::Trainer trainer(config, resolved, transport);
    for (int64_t step = 0; step < all_steps; ++step) {
      const trace::StepMetrics metrics = trainer.step(step);
      if (transport.rank() == 0 && options.step_ended)
        options.step_ended(step_row(metrics, config, from));
      if (transport.rank() == 0 && step >= options.warm_up) arm.steps.push_back(metrics);
    }
    for (const trace::Span& span : trainer.spans()) {
      const double ms = static_cast<double>(span.end_us - span.begin_us) * 1e-3;
      arm.parts[transport.rank()][span.row + ": " + span.name] += ms;
      if (transport.rank() == 0 && span.name == "train_step") arm.step_ms.push_back(ms);
    }
    if (transport.rank() == 0) arm.phases = step_phases(trainer.spans(), options.steps);
    if (options.kernels)
      arm.kernels = kernels_of(resolved.device, [&] { trainer.step(all_steps); });
  };
  if (options.job != nullptr) {
    rank_of(*options.job);
    if (options.job->rank() != 0) return arm;
    arm.parts.resize(1);
  } else {
    comm::run_loopback(world, rank_of, std::chrono::minutes(30));
  }
  // The host sees a step's end before a GPU reaches it.
  if (resolved.device.is_cpu()) {
    arm.step_ms.clear();
    for (const trace::StepMetrics& m : arm.steps) arm.step_ms.push_back(m.step_s * 1e3);
  }
  return arm;
}

/// FLOPs of the model in a train step; no recomputation.
struct ModelFlops {
  double dense = 0;  ///< 6 a matrix parameter and token
  double attention = 0;
  double attention_if_dense = 0;  ///< of every causal pair
};
ModelFlops model_flops(const train::RunConfig& config, int64_t layers, double density) {
  const model::DecoderConfig& m = config.model;
  const double heads = static_cast<double>(m.num_attention_heads * m.head_dim);
  const double kv = static_cast<double>(m.num_key_value_heads * m.head_dim);
  const double hidden = static_cast<double>(m.hidden_size);
  const double layer = hidden * (2 * heads + 2 * kv + 3 * static_cast<double>(m.intermediate_size));
  const double head = hidden * static_cast<double>(m.vocab_size);
  const double samples = static_cast<double>(config.train.global_batch_size);
  const double length = static_cast<double>(config.train.seq_len);
  ModelFlops flops;
  flops.dense = 6 * (static_cast<double>(layers) * layer + head) * samples * length;
  // 4 D a pair forward, 2.5 times that backward.
  flops.attention_if_dense =
      static_cast<double>(layers) * samples * length * length / 2 * heads * 4 * 3.5;
  flops.attention = flops.attention_if_dense * density;
  return flops;
}

/// Dense bf16 FLOP/s of data sheets; absent where the device is not known.
std::optional<double> peak_flops_per_s(const train::RunConfig& config, const std::string& device) {
  if (config.train.peak_flops_per_s) return config.train.peak_flops_per_s;
  for (const auto& [name, peak] :
       {std::pair{"H100", 989.4e12}, std::pair{"H200", 989.4e12}, std::pair{"A100", 312e12}})
    if (device.find(name) != std::string::npos) return peak;
  return std::nullopt;
}

/// A step of all layers, from one of fewer.
double scaled_step_ms(const Arm& arm, int64_t all_layers) {
  const model::DecoderConfig& m = arm.config.model;
  const double run = static_cast<double>(m.num_hidden_layers);
  const double all = static_cast<double>(all_layers);
  const ModelFlops few = model_flops(arm.config, m.num_hidden_layers, 1);
  const ModelFlops many = model_flops(arm.config, all_layers, 1);
  const double fixed = arm.phases.step_ms - arm.phases.layers_ms - arm.phases.optimizer_ms;
  // The optimizer's work is the parameters'; those of matrices stand for all.
  return fixed + arm.phases.layers_ms * all / run +
         arm.phases.optimizer_ms * many.dense / few.dense;
}

struct Setting {
  train::ResolvedRun resolved;
  int64_t all_layers = 0;
  std::string device;
  const Provenance& from;
};

Json row_of(const Arm& arm, const Setting& setting) {
  const Spread step_ms = spread(arm.step_ms);
  const trace::StepMetrics& last = arm.steps.back();
  const train::RunConfig& config = arm.config;
  const int64_t layers = config.model.num_hidden_layers;
  int64_t comm_bytes = 0;
  for (const trace::StepMetrics& m : arm.steps) comm_bytes = std::max(comm_bytes, m.comm_bytes);
  const bool dense = config.attention.pattern == pattern::PatternKind::kDense;
  const bool scaled = layers < setting.all_layers;
  const double whole_ms = scaled ? scaled_step_ms(arm, setting.all_layers) : step_ms.median;
  Json row = {{"case", "train"},
              {"pattern", dense ? "dense" : "sparse"},
              {"seq_len", config.train.seq_len},
              {"global_batch_size", config.train.global_batch_size},
              {"layers_run", layers},
              {"layers", setting.all_layers},
              {"step_ms", rounded(step_ms.median)},
              {"step_ms_min", rounded(step_ms.min)},
              {"step_ms_max", rounded(step_ms.max)},
              {"step_ms_all_layers", rounded(whole_ms)},
              {"steps_per_s", rounded(1e3 / step_ms.median)},
              {"tokens_per_s", rounded(static_cast<double>(last.tokens) / whole_ms * 1e3)},
              {"repeats", arm.steps.size()},
              {"loss", last.loss},
              {"attention_density", last.attention_density},
              {"worker_imbalance", last.worker_imbalance},
              {"step_imbalance", last.step_imbalance},
              {"comm_bytes", comm_bytes},
              {"process_memory_bytes", last.peak_memory_bytes},
              {"peak_tensor_bytes", last.peak_tensor_bytes}};
  const auto peak = peak_flops_per_s(config, setting.device);
  if (peak && arm.phases.step_ms > 0) {
    const ModelFlops flops = model_flops(config, layers, last.attention_density);
    const double second = arm.phases.step_ms * 1e-3;
    const double rest = second - arm.phases.attention_ms * 1e-3 - arm.phases.optimizer_ms * 1e-3;
    const double ranks = static_cast<double>(setting.resolved.cp_size * setting.resolved.dp_size);
    const auto share = [&](double work, double seconds) {
      return rounded(work / (seconds * *peak * ranks));
    };
    row["peak_flops_per_s"] = *peak;
    row["mfu"] = share(flops.dense + flops.attention, second);
    row["mfu_if_dense"] = share(flops.dense + flops.attention_if_dense, second);
    row["mfu_outside_attention"] = share(flops.dense, rest);
    if (arm.phases.attention_ms > 0)
      row["mfu_attention"] = share(flops.attention, arm.phases.attention_ms * 1e-3);
  }
  row.update({{"cp_size", setting.resolved.cp_size},
              {"cp_inner_size", setting.resolved.topology.ranks_per_node},
              {"dp_size", setting.resolved.dp_size},
              {"accumulation", setting.resolved.accumulation},
              {"device", setting.device},
              {"commit", setting.from.commit.empty() ? Json(nullptr) : Json(setting.from.commit)},
              {"modified", setting.from.modified},
              {"harness", setting.from.harness},
              {"load", setting.from.load}});
  return row;
}

void add_parts(const Arm& arm, const Setting& setting, const Json& row,
               std::vector<std::string>& lines) {
  const double step_ms = row["step_ms"].get<double>();
  const Json& arm_name = row["pattern"];
  if (!setting.resolved.device.is_cpu()) {
    auto phases = arm.phases.ms;
    phases.emplace_back("norm, of the above", arm.phases.norm_ms);
    for (const auto& [phase, ms] : phases) {
      lines.push_back(Json{
          {"case", "train phase"},
          {"arm", arm_name},
          {"phase", phase},
          {"ms", rounded(ms)},
          {"share_of_step", rounded(ms / step_ms)},
          {"commit",
           row["commit"]}}.dump());
    }
    if (!arm.kernels.empty())
      lines.push_back(
          Json{{"case", "train kernels"}, {"arm", arm_name}, {"kernels_us", arm.kernels}}.dump());
    return;
  }
  std::map<std::string, std::pair<double, double>> by_part;  // largest, sum
  for (const auto& rank : arm.parts) {
    for (const auto& [part, ms] : rank) {
      auto& [largest, sum] = by_part[part];
      const double each = ms / static_cast<double>(arm.steps.size());
      largest = std::max(largest, each);
      sum += each;
    }
  }
  const auto world = static_cast<double>(arm.parts.size());
  for (const auto& [part, times_of] : by_part) {
    lines.push_back(Json{
        {"case", "train part"},
        {"part", part},
        {"ms_largest_rank", rounded(times_of.first)},
        {"ms_mean_rank", rounded(times_of.second / world)},
        {"share_of_step", rounded(times_of.second / world / step_ms)},
        {"device", setting.device},
        {"commit",
         row["commit"]}}.dump());
  }
}

}  // namespace

std::vector<std::string> bench_train(const TrainBenchOptions& options, const Provenance& from) {
  MT_CHECK_ARG(options.steps >= 1, "--steps: expected at least 1, got ", options.steps);
  MT_CHECK_ARG(options.warm_up >= 0, "--warm-up: expected at least 0, got ", options.warm_up);
  const int world = options.ranks.cp_size();
  MT_CHECK_ARG(world <= 64, "--ranks: expected at most 64, got ", world);
  train::RunConfig config = options.config;
  const bool on_gpu = config.train.device == train::DeviceKind::kCuda;
  MT_CHECK_ARG(
      !on_gpu || world == 1 || options.job != nullptr,
      "--ranks: expected 1 with train.device = \"cuda\" (--nproc: processes with a GPU each), "
      "got ",
      world);
  const bool reports = options.job == nullptr || options.job->rank() == 0;
  MT_CHECK_ARG(on_gpu || !options.kernels, "--kernels: expected train.device = \"cuda\"");
  const int64_t all_layers = config.model.num_hidden_layers;
  MT_CHECK_ARG(options.layers >= 0 && options.layers <= all_layers,
               "--layers: expected 0 or up to the configuration's ", all_layers, ", got ",
               options.layers);
  if (options.layers > 0) config.model.num_hidden_layers = options.layers;
  const int64_t all_steps = options.warm_up + options.steps;
  config.train.steps = all_steps + (options.kernels ? 1 : 0);
  config.train.tokens.reset();
  config.train.preflight = false;
  config.train.recall_every = 0;
  config.data.valid.clear();
  config.eval.every = 0;
  config.eval.also_p.clear();
  config.trace.chrome = true;
  config.trace.first_step = options.warm_up + 1;
  config.trace.steps = options.steps;
  config.trace.example_layer = -1;
  const auto with_estimate = [](train::PatternSection& section) {
    if (section.pattern_file && !section.estimate) section.estimate = true;
  };
  with_estimate(config.attention);
  for (train::LayerRange& range : config.attention.layers) with_estimate(range);
  config.data.train = {{"random", 1.0}};
  topology::LaunchEnvironment launch = options.launch;
  if (options.job == nullptr) {
    launch.world_size = world;
    launch.local_world_size = options.ranks.ranks_per_node;
  }
  {
    train::RunConfig checked = config;  // before anything is written
    train::resolve(checked, launch);
  }
  const testing::ScratchFolder folder;
  config.data.train = {
      {write_tokens(folder, config, *config.train.steps * config.train.global_batch_size + 1),
       1.0}};
  config.out = folder.path().string();
  LaunchPlace place;
  place.device = on_gpu ? "cuda" : "cpu";
  const std::string each = world == 1 ? "" : concat(world, " x ");
  const std::string device =
      on_gpu ? concat(each, device_name(place))
             : concat(cpu_name(world), " as ranks on ", num_threads(), " cores");
  const Setting setting{train::resolve(config, launch), all_layers, device, from};

  const Arm arm = run_arm(options, config, setting.resolved, from);
  Json row;
  std::vector<std::string> lines, parts;
  if (reports) {
    row = row_of(arm, setting);
    lines.push_back(row.dump());
    add_parts(arm, setting, row, parts);
  }
  if (options.dense_arm && config.attention.pattern != pattern::PatternKind::kDense) {
    train::RunConfig dense = config;
    dense.attention = train::AttentionSection();
    dense.attention.pattern = pattern::PatternKind::kDense;
    dense.attention.deterministic = config.attention.deterministic;
    const train::ResolvedRun resolved = train::resolve(dense, launch);
    const Arm dense_arm = run_arm(options, dense, resolved, from);
    if (!reports) return {};
    const Json dense_row = row_of(dense_arm, setting);
    lines.push_back(dense_row.dump());
    const auto ratio = [&](const char* key) {
      return rounded(dense_row[key].get<double>() / row[key].get<double>());
    };
    lines.push_back(Json{
        {"case", "train ratio"},
        {"dense_over_sparse", ratio("step_ms")},
        {"dense_over_sparse_all_layers", ratio("step_ms_all_layers")},
        {"seq_len", config.train.seq_len},
        {"attention_density", row["attention_density"]},
        {"device", device},
        {"commit",
         row["commit"]}}.dump());
    add_parts(dense_arm, setting, dense_row, parts);
  }
  lines.insert(lines.end(), parts.begin(), parts.end());
  return lines;
}

}  // namespace mtraining::bench
