#include "bench/train_bench.h"

#include <ATen/Parallel.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <map>

#include "mtraining/base/check.h"
#include "mtraining/base/parallel.h"
#include "mtraining/base/rng.h"
#include "mtraining/comm/loopback.h"
#include "mtraining/data/token_file.h"
#include "mtraining/train/trainer.h"

namespace mtraining::bench {
namespace {

/// A folder that goes away.
class Folder {
 public:
  Folder() {
    std::string form = (std::filesystem::temp_directory_path() / "mtraining_bench_XXXXXX").string();
    MT_CHECK_EXTERNAL(::mkdtemp(form.data()) != nullptr, form, ": cannot be created");
    path_ = form;
  }
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

/// Documents of one sequence each, of ids that nothing predicts.
std::string write_tokens(const Folder& folder, const train::RunConfig& config, int64_t sequences) {
  const std::string prefix = (folder.path() / "random").string();
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

struct PartTimes {
  std::map<std::string, double> ms;  // all recorded steps
};

double rounded(double value) { return std::round(value * 1000) / 1000; }

}  // namespace

std::vector<std::string> bench_train(const TrainBenchOptions& options, const Provenance& from) {
  MT_CHECK_ARG(options.steps >= 1, "--steps: expected at least 1, got ", options.steps);
  MT_CHECK_ARG(options.warm_up >= 0, "--warm-up: expected at least 0, got ", options.warm_up);
  const int world = options.ranks.cp_size();
  MT_CHECK_ARG(world <= 64, "--ranks: expected at most 64, got ", world);
  train::RunConfig config = options.config;
  const int64_t all_steps = options.warm_up + options.steps;
  config.train.steps = all_steps;
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
  config.data.train = {{"random", 1.0}};
  topology::LaunchEnvironment launch;
  launch.world_size = world;
  launch.local_world_size = options.ranks.ranks_per_node;
  {
    train::RunConfig checked = config;  // before anything is written
    train::resolve(checked, launch);
  }
  const Folder folder;
  config.data.train = {
      {write_tokens(folder, config, all_steps * config.train.global_batch_size + 1), 1.0}};
  config.out = folder.path().string();
  const train::ResolvedRun resolved = train::resolve(config, launch);

  std::vector<trace::StepMetrics> steps;
  std::vector<PartTimes> parts(static_cast<size_t>(world));
  const int threads = std::max(1, num_threads() / world);
  comm::run_loopback(
      world,
      [&](comm::Transport& transport) {
        at::set_num_threads(threads);
        const ThreadCountScope scope(threads);
        train::Trainer trainer(config, resolved, transport);
        for (int64_t step = 0; step < all_steps; ++step) {
          const trace::StepMetrics metrics = trainer.step(step);
          if (transport.rank() == 0 && step >= options.warm_up) steps.push_back(metrics);
        }
        for (const trace::Span& span : trainer.spans()) {
          parts[transport.rank()].ms[span.row + ": " + span.name] +=
              static_cast<double>(span.end_us - span.begin_us) * 1e-3;
        }
      },
      std::chrono::minutes(30));

  Times times;
  int64_t comm_bytes = 0;
  for (const trace::StepMetrics& m : steps) {
    times.wall_ms.push_back(m.step_s * 1e3);
    comm_bytes = std::max(comm_bytes, m.comm_bytes);
  }
  const Spread step_ms = spread(times.wall_ms);
  const trace::StepMetrics& last = steps.back();
  const double tokens = static_cast<double>(last.tokens);
  const std::string device = concat(cpu_name(world), " as ranks on ", num_threads(), " cores");
  Json row = {
      {"case", "train"},
      {"pattern", config.attention.pattern == pattern::PatternKind::kDense ? "dense" : "sparse"},
      {"seq_len", config.train.seq_len},
      {"global_batch_size", config.train.global_batch_size},
      {"step_ms", rounded(step_ms.median)},
      {"step_ms_min", rounded(step_ms.min)},
      {"step_ms_max", rounded(step_ms.max)},
      {"steps_per_s", rounded(1e3 / step_ms.median)},
      {"tokens_per_s", rounded(tokens / step_ms.median * 1e3)},
      {"repeats", steps.size()},
      {"loss", last.loss},
      {"attention_density", last.attention_density},
      {"worker_imbalance", last.worker_imbalance},
      {"step_imbalance", last.step_imbalance},
      {"comm_bytes", comm_bytes},
      {"process_memory_bytes", last.peak_memory_bytes},
      {"cp_size", resolved.cp_size},
      {"cp_inner_size", resolved.topology.ranks_per_node},
      {"dp_size", resolved.dp_size},
      {"accumulation", resolved.accumulation},
      {"device", device},
      {"commit", from.commit.empty() ? Json(nullptr) : Json(from.commit)},
      {"modified", from.modified},
      {"harness", from.harness},
      {"load", from.load}};
  std::vector<std::string> lines = {row.dump()};
  std::map<std::string, std::pair<double, double>> by_part;  // largest, sum
  for (const PartTimes& rank : parts) {
    for (const auto& [part, ms] : rank.ms) {
      auto& [largest, sum] = by_part[part];
      const double each = ms / static_cast<double>(options.steps);
      largest = std::max(largest, each);
      sum += each;
    }
  }
  for (const auto& [part, times_of] : by_part) {
    lines.push_back(Json{
        {"case", "train part"},
        {"part", part},
        {"ms_largest_rank", rounded(times_of.first)},
        {"ms_mean_rank", rounded(times_of.second / world)},
        {"share_of_step", rounded(times_of.second / world / step_ms.median)},
        {"device", device},
        {"commit",
         row["commit"]}}.dump());
  }
  return lines;
}

}  // namespace mtraining::bench
