// MetricsFile: metrics.jsonl, one JSON object a train step.
//
// In:   values of one train step. Out: a line of <run>/metrics.jsonl, flushed. Next: plots, tables, users' scripts.
//
// A value that was not measured in a step (recall, validation loss, mfu on the CPU) is null, never 0. Loss may be null too:
// JSON has no NaN.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <utility>

namespace mtraining::trace {

/// Names of the fields are the keys of the file.
struct StepMetrics {
  int64_t train_step = 0;            ///< 1-based
  double loss = 0;                   ///< mean over the step's valid tokens of all ranks
  std::optional<double> valid_loss;  ///< with the run's own pattern
  std::optional<double> valid_loss_dense;
  double grad_norm = 0;  ///< before clipping
  double lr = 0;
  int64_t tokens = 0;  ///< real tokens of this step, all ranks
  int64_t tokens_total = 0;
  double tokens_per_s = 0;  ///< all ranks
  double tokens_per_s_per_gpu = 0;
  std::optional<double> mfu;  ///< null where the device's peak is unknown
  double step_s = 0;
  double data_wait_s = 0;                  ///< slowest rank
  double attention_density = 1;            ///< mean over layers; the causal half is 1
  std::optional<double> attention_recall;  ///< rows sampled elsewhere, mean over layers and heads
  std::optional<double> attention_recall_worst;  ///< the worst head's
  double worker_imbalance = 1;  ///< attention work (pairs): slowest rank / mean rank
  double step_imbalance =
      1;  ///< sum over ring steps of the slowest rank's pairs / mean rank's pairs
  double worker_imbalance_time =
      1;  ///< the same from measured time, which on shared cores holds scheduling noise
  double step_imbalance_time = 1;
  int64_t comm_bytes = 0;         ///< payload sent by all ranks in this step
  int64_t peak_memory_bytes = 0;  ///< largest rank, since its start
  int64_t peak_tensor_bytes = 0;  ///< likewise, of its tensors alone, within this step
  int64_t skipped = 0;            ///< steps skipped so far because a gradient was not finite
  int64_t heads_dense = 0;        ///< over layers and samples of the step
  int64_t caps_hit = 0;
  /// Layers and samples of the step whose columns were too many for columns = "once" and went with the shards.
  int64_t columns_per_step = 0;
  /// Layers and samples of the step that torch's dense kernels attended to (dense attention, one GPU a sequence).
  int64_t dense_by_torch = 0;
};

/// One line of JSON, without the newline.
std::string to_json(const StepMetrics& metrics);

class MetricsFile {
 public:
  /// Rows of an older file up to train_step `keep_to` stay, later ones and a torn last line go. Errors: ExternalError where
  /// the file cannot be written.
  explicit MetricsFile(const std::filesystem::path& path, int64_t keep_to = 0);
  /// Errors: ExternalError where the row cannot be written, or the file is no longer the one that was opened.
  void write(const StepMetrics& metrics);

 private:
  std::string path_;
  std::pair<dev_t, ino_t> identity_;
  std::ofstream out_;
};

}  // namespace mtraining::trace
