// Trainer::State: what a trainer holds, and one micro-step with it.
//
// In:   RunConfig, a Transport, perhaps a checkpoint. Out: the sum of a micro-step's losses, its gradients in `share`.
// Next: trainer.cc (steps and the run), evaluation.cc (losses without training), step_metrics.cc (what ranks measured).
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "mtraining/data/batches.h"
#include "mtraining/model/decoder.h"
#include "mtraining/optim/adamw.h"
#include "mtraining/optim/sharded_parameters.h"
#include "mtraining/trace/chrome_trace.h"
#include "mtraining/train/attention_layers.h"
#include "mtraining/train/fault.h"
#include "mtraining/train/host_layers.h"
#include "mtraining/train/job.h"
#include "mtraining/train/loss.h"
#include "mtraining/train/part_times.h"
#include "mtraining/train/run_state.h"
#include "mtraining/train/stop_poll.h"
#include "mtraining/train/tensor_memory.h"
#include "mtraining/train/trainer.h"

namespace mtraining::train {

/// What a step knows of itself before ranks compare.
struct StepUnderWay {
  int64_t begin_us = 0;
  int64_t bytes_before = 0;  ///< sent by this rank until the step began
  double data_wait_s = 0;
};

struct Trainer::State {
  TensorMemory memory;
  std::optional<TensorMemory::Scope> construction{std::in_place, memory};
  RunConfig config;
  ResolvedRun resolved;
  // Data first: what is wrong with a file is known to every rank alike, before any communication.
  data::Batches train_data;
  std::unique_ptr<data::Batches> valid_data;
  LayerPatterns patterns, dense_patterns;
  Job job;
  attention::RingContext context;
  model::Decoder decoder;
  std::vector<model::Parameter> parameters;
  std::unique_ptr<optim::ParameterShare> share;
  optim::AdamW adamw;
  AttentionLayers layers;
  HostLayers host_layers;
  Fault fault;
  RunState run_state;
  StopPoll stop_poll;
  RunPosition position;  // at the end of the last finished step, or in the middle of the next
  bool in_backward = false;
  int64_t whole_micro_steps =
      0;  // of the step under way, whose gradients are all there and nothing else
  int64_t saved_steps = 0;
  std::function<void(int64_t)> on_saved;
  std::chrono::steady_clock::time_point saved_at = std::chrono::steady_clock::now();
  trace::SpanRecorder recorder;
  PartTimes times;  // of the step under way
  bool recording = false;
  bool keeps_indices = false;  // else last_indices stays empty: a step's are gigabytes
  std::vector<std::vector<std::shared_ptr<const index::Index>>> last_indices;
  std::vector<std::string> warnings;
  const std::atomic<bool>* stop = nullptr;  // run()'s
  bool stop_agreed = false, step_dropped = false, save_agreed = false;
  int64_t current_step = 0;  // 0-based; what a fault of attention is said of

  State(const RunConfig& c, const ResolvedRun& r, comm::Transport& transport,
        const std::filesystem::path& resume);

  bool keeps_micro_steps() const {
    return config.checkpoint.save_accumulation && whole_micro_steps > 0;
  }
  /// Between two layers, on all ranks alike.
  void boundary();

  bool save_is_due() const;
  void save();
  /// `totals` of the micro-steps that this rank has finished: what a step that goes on later needs to know.
  void keep_micro_steps(std::vector<double> totals);

  const LayerPatterns& patterns_of_step(int64_t step) const {
    return step < config.attention.dense_steps ? dense_patterns : patterns;
  }
  model::PartObserver part_observer(int64_t step);
  model::RunLayer run_layer(const AttendRequest& request, int64_t step);
  SummedLoss forward(const data::Batch& batch, AttendRequest request, int64_t step);
  /// Ranks of a group that read different files would train on a text that nobody wrote. All ranks throw alike.
  void check_same_samples(const data::Batch& batch);
  /// Forward and backward of one micro-step; adds to the gradient vector. Returns the sum of losses and the count.
  SummedLoss micro_step(int64_t step, int64_t micro, const AttendRequest& request,
                        double& data_wait_s);
  /// Zero gradients, or those that a checkpoint kept, and the micro-step that comes next.
  int64_t first_micro_step();
  /// Before a micro-step: a step of many can take minutes. `stop` is given to all ranks or none.
  bool stops_between_micro_steps(const std::function<std::vector<double>()>& totals);
  data::Batch valid_batch(int64_t b) const;

  /// Collective: adds to `m` what the ranks measured; they agree whether to stop and to save after the step.
  /// Returns (query, key) pairs of the indices over all samples of the step.
  double gather_metrics(const StepUnderWay& step, const AttendRequest& request,
                        trace::StepMetrics& m);
  void write_example();

  /// While it lives, parts are not recorded: those of what is no train step. Ended ones have been collected before.
  class Unrecorded {
   public:
    explicit Unrecorded(State& state)
        : state_(state), was_recording_(std::exchange(state.recording, false)) {
      state_.times.record(false);
    }
    ~Unrecorded() {
      state_.recording = was_recording_;
      state_.times.record(was_recording_);
    }
    Unrecorded(const Unrecorded&) = delete;
    Unrecorded& operator=(const Unrecorded&) = delete;

   private:
    State& state_;
    bool was_recording_;
  };
};

}  // namespace mtraining::train
