// AttentionLayers: the model's attention function over a RingContext, and what it saw: density, recall, work per ring step.
//
// In:   RingContext, a pattern. Out: model::Attend; per layer the index that was used; per ring step the pairs and times.
// Next: trainer.h turns them into metrics and spans.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "mtraining/attention/autograd.h"
#include "mtraining/attention/ring_attention.h"
#include "mtraining/model/decoder.h"
#include "mtraining/trace/chrome_trace.h"
#include "mtraining/train/recompute.h"

namespace mtraining::train {

/// How the layers attend in the forward passes that follow.
struct AttendRequest {
  std::vector<attention::AttentionPattern> patterns;  ///< [layers]
  at::Tensor document_starts;  ///< [B, N] int32 of the whole samples, or undefined
  bool measure_recall = false;
  uint64_t recall_seed = 0;
  /// Given: one index a layer, replayed instead of built.
  const std::vector<std::shared_ptr<const index::Index>>* replay = nullptr;
  /// Called in each layer between its choice and its launches; may be empty.
  std::function<void()> chosen;
  int64_t keep_layer = -1;  ///< layer whose q and k (this rank's shards) are kept; -1: none
};

/// What the forward passes since begin() saw.
struct AttentionSeen {
  std::vector<double> density;  ///< [layers] mean over passes
  std::vector<double>
      recall;  ///< [layers] mean over heads and passes, rows elsewhere; NaN where not measured
  double recall_worst = 2;  ///< the worst head's; 2 where not measured
  int64_t heads_dense = 0, caps_hit = 0;
  int64_t dense_by_torch = 0;  ///< layers and samples that torch's dense kernels attended to
  int64_t columns_per_step =
      0;             ///< layers and passes whose columns were too many to be exchanged once
  double pairs = 0;  ///< (query, key) pairs of the indices, all heads, as computed_pairs counts
  std::vector<std::shared_ptr<const index::Index>> indices;  ///< [layers] of the last pass
  at::Tensor kept_q, kept_k;  ///< of keep_layer, [B, n, H, D], [B, n, Hk, D]

  double mean_density() const;
  std::optional<double> mean_recall() const;
};

/// Work of one ring step of one layer and direction on this rank.
struct StepWork {
  double pairs = 0;
  double seconds = 0;
};

class AttentionLayers {
 public:
  AttentionLayers(attention::RingContext& context, int64_t num_layers);
  ~AttentionLayers();
  AttentionLayers(const AttentionLayers&) = delete;
  AttentionLayers& operator=(const AttentionLayers&) = delete;

  /// Forgets what was seen; `recorder` (or null) gets a span for each timing from now on.
  void begin(trace::SpanRecorder* recorder, int64_t train_step);
  /// Called before each layer attends and before each layer's backward; what it throws ends the pass there.
  void set_boundary(std::function<void()> boundary) { boundary_ = std::move(boundary); }
  model::Attend attend(const AttendRequest& request);
  /// The same for layers that run twice (recompute.h); the second run is timed, but counted in seen() no more.
  TwiceAttend attend_twice(const AttendRequest& request);
  AttentionSeen seen() const;
  /// In the order of execution: the same number and meaning on every rank of the group. Waits for a GPU.
  const std::vector<StepWork>& work() const;

 private:
  attention::AttentionOutput first(const AttendRequest& request, int64_t layer, const at::Tensor& q,
                                   const at::Tensor& k, const at::Tensor& v);
  /// out, with a hook that names the layer to backward's spans.
  at::Tensor named(int64_t layer, at::Tensor out);
  void observe(const attention::StepTiming& timing);

  attention::RingContext& context_;
  int64_t num_layers_;
  trace::SpanRecorder* recorder_ = nullptr;
  int64_t train_step_ = 0;
  std::function<void()> boundary_;
  AttentionSeen seen_;
  std::vector<int64_t> passes_, recall_passes_;
  std::vector<StepWork> work_;
};

}  // namespace mtraining::train
