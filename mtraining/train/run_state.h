// RunState: saves where a run stands and all that it needs to go on, and brings it back.
//
// In:   parameters, the optimizer's shard, gradients of a step that is not finished, counters. Out: a published checkpoint
//       (<out>/checkpoints/step-N: a Hugging Face folder with training_state/ inside); from it the same state, whatever number
//       of ranks wrote it.
// Next: trainer.cc; cli/resume.h chooses the folder.
//
// Tensors of the state are "<parameter>/master", "/first_moment", "/second_moment", all float32, and "/gradient" where a step was
// left in the middle: the sum over all ranks of its finished micro-steps. A rank writes the range of the flat vectors that it
// holds, or its even part where every rank holds all.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "mtraining/model/decoder.h"
#include "mtraining/model/hf_config.h"
#include "mtraining/optim/adamw.h"
#include "mtraining/optim/parameter_share.h"
#include "mtraining/train/config.h"
#include "mtraining/train/job.h"

namespace mtraining::checkpoint {
class TrainingState;
class WeightFolder;
}  // namespace mtraining::checkpoint

namespace mtraining::train {

/// Where a run stands; the same on every rank.
struct RunPosition {
  int64_t steps_done = 0;  ///< finished train steps
  int64_t tokens_total = 0;
  int64_t skipped = 0, skipped_in_a_row = 0;
  int64_t optimizer_steps = 0;
  bool evaluated =
      false;  ///< the evaluations of the end are written: a run with all its steps is finished
  /// Of the step that was left in the middle: samples whose gradients are kept, and their sums over all ranks.
  int64_t kept_samples = 0;
  double kept_loss = 0, kept_labels = 0;
};

/// What a checkpoint says of itself, without its tensors.
struct CheckpointInfo {
  RunPosition position;
  std::string config;  ///< TOML of the run that wrote it
};
/// `folder`: a published checkpoint. Opens all files of its state and checks them against one another.
/// Errors: InvalidArgument naming folder, file or tensor; Unsupported: another version.
CheckpointInfo read_checkpoint_info(const std::filesystem::path& folder);

/// What a training state's Progress::notes hold for this position; `config`: TOML of the run.
std::string checkpoint_notes(const RunPosition& position, const std::string& config);

class RunState {
 public:
  /// All must outlive it. Errors: those of model::read_hf_config and checkpoint::read_companion_files.
  RunState(const RunConfig& config, Job& job, const std::vector<model::Parameter>& parameters,
           optim::ParameterShare& share, optim::AdamW& adamw);

  /// Collective. Gradients are saved where position.kept_samples > 0, and are left as they are.
  /// `between` is called on each rank between its first and its last file, for tests.
  /// Errors: on every rank the same ExternalError; the checkpoint before stays whole.
  std::filesystem::path save(const RunPosition& position, const std::function<void()>& between);
  /// Collective. Fills master and parameters from a Hugging Face folder: the master as exactly as the file has it, where parameters
  /// are bf16 too. Errors: those of checkpoint::check_weights.
  void begin_from(const checkpoint::WeightFolder& folder);
  /// Collective. Fills master, moments, parameters and, where some are kept, gradients. Errors: InvalidArgument naming file and
  /// tensor; ExternalError where ranks see different checkpoints.
  RunPosition load(const std::filesystem::path& folder);

 private:
  /// Elements [begin, end) of the flat vectors and their values.
  struct Piece {
    int64_t begin = 0, end = 0;
    const char* suffix = "";
    at::Tensor values;
  };
  /// What lies of it in one parameter: elements [begin, end) of the parameter, from `offset` of the piece's values.
  struct Part {
    const model::Parameter* parameter = nullptr;
    int64_t begin = 0, end = 0, offset = 0;
  };
  std::vector<Part> parts_of(const Piece& piece) const;
  /// This rank's pieces to write. Collective with `with_gradient`.
  std::vector<Piece> pieces_to_write(bool with_gradient);
  void read(checkpoint::TrainingState& state, const Piece& piece) const;

  const RunConfig& config_;
  Job& job_;
  const std::vector<model::Parameter>& parameters_;
  optim::ParameterShare& share_;
  optim::AdamW& adamw_;
  // Read once: the folder of init_from may go away.
  model::HfConfig hf_;
  std::map<std::string, std::string> companions_;  // checkpoint::CompanionFiles, on rank 0
};

}  // namespace mtraining::train
