// Trainer: the loop. Batch, forward, loss, backward, sum over ranks, clip, update, metrics; held-out loss; traces.
//
// In:   RunConfig, a Transport, the launcher's environment. Out: the run's folder: metrics.jsonl, trace.json, summary.json;
//       what happened, to an observer (the library prints nothing).
// Next: cli/ prints; python/ draws.
//
// One loss for every split: each rank sums the losses of its own tokens; sums, counts and gradients are added over all ranks
// and micro-steps, and divided once by the count of all valid tokens. So context-parallel ranks are never averaged as if they
// held whole samples, and a rank or micro-step without valid tokens adds nothing.
#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "mtraining/attention/autograd.h"
#include "mtraining/comm/transport.h"
#include "mtraining/topology/topology.h"
#include "mtraining/trace/chrome_trace.h"
#include "mtraining/trace/metrics.h"
#include "mtraining/train/config.h"
#include "mtraining/train/layer_patterns.h"

namespace mtraining::train {

/// Held-out loss of one set of weights under one pattern.
struct Evaluation {
  std::string pattern;  ///< the name of [attention]'s, or "dense" where every layer is
  double p = 1;         ///< p_vertical and p_slash where they agree, else p_slash
  double loss = 0;
  int64_t tokens = 0;
  std::vector<double> density_by_layer;
  std::vector<double>
      recall_by_layer;  ///< rows sampled elsewhere, mean over heads; empty where not measured
  double recall_worst = 0;
};

/// The first batch before step 1.
struct Preflight {
  double loss_dense = 0, loss_pattern = 0, density = 1;
  std::optional<double> recall_worst;
};

/// Called on every rank; cli/ prints on rank 0 alone.
struct TrainObserver {
  std::function<void(const Preflight&)> preflight;
  std::function<void(const trace::StepMetrics&, int64_t total_steps)> step;
  std::function<void(const std::string&)> warning;
  std::function<void(int64_t steps_done)> saved;  ///< a checkpoint was published
};

struct TrainResult {
  int64_t steps_done = 0;
  bool stopped = false;                 ///< a rank was asked to stop
  std::vector<data::PassCount> data;    ///< by source of data.train
  std::vector<Evaluation> evaluations;  ///< at the end: dense, the run's pattern, then eval.also_p
};

/// Opens the data and reads the first sample of each, which needs no ranks and writes nothing. Errors: those of data/.
void check_data(const RunConfig& config, const ResolvedRun& resolved);

/// Opens the files of config.init_from and compares names, shapes and types with the model, which needs no memory for it.
/// Returns names of safetensors files there that are not read. Errors: those of checkpoint::WeightFolder and check_weights.
std::vector<std::string> check_weights(const RunConfig& config);

/// The same on every rank of a job; holds model, optimizer, data and communicators.
class Trainer {
 public:
  /// Collective over the transport. Opens the data. `config` has been through resolve().
  /// Errors: those of data/, attention/, comm/; before any communication where a rank can know alone.
  /// `resume`: a published checkpoint to go on from; "": begins with step 1. Errors also: those of checkpoint/.
  Trainer(const RunConfig& config, const ResolvedRun& resolved, comm::Transport& transport,
          const std::filesystem::path& resume = {});
  ~Trainer();
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  /// Runs to the end, or until *stop is set on any rank; then all ranks stop together at the next layer (stop_poll.h) and drop
  /// the step under way. What is finished is saved as [checkpoint] says, at a stop and at the end always.
  /// Errors: ExternalError naming the train step where training diverged, or the file that could not be written.
  TrainResult run(const TrainObserver& observer, const std::atomic<bool>* stop = nullptr);

  /// One optimizer step, 0-based. For run() and tests. `replay` (one index a layer for each micro-step) replaces the pattern.
  trace::StepMetrics step(
      int64_t step,
      const std::vector<std::vector<std::shared_ptr<const index::Index>>>* replay = nullptr);
  /// From here on each step's indices are kept until the next one, of all its micro-steps: for tests and replays.
  void keep_indices();
  /// The indices that the last step() used: [micro_step][layer]; empty without keep_indices().
  const std::vector<std::vector<std::shared_ptr<const index::Index>>>& last_indices() const;
  /// Held-out loss, collective.
  Evaluation evaluate(const LayerPatterns& patterns, bool measure_recall);
  /// The run's own.
  const LayerPatterns& patterns() const;
  /// Named tensors of the model, as they are now.
  const std::vector<model::Parameter>& parameters() const;
  /// Steps taken by the optimizer; skipped ones do not count.
  int64_t optimizer_steps() const;
  /// This rank's, of the train steps that [trace] asks for.
  const std::vector<trace::Span>& spans() const;

 private:
  void evaluate_at_end(TrainResult& result);
  Preflight look_at_first_batch();

  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace mtraining::train
