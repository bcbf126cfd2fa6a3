// TrainingState: what a run needs besides its weights to go on: float32 master, moments, position in the data, counters.
//
// In:   each rank's pieces (a named tensor's flat range) and the run's Progress. Out: a folder; from it any flat range of any
//       tensor, whatever number of ranks wrote it.
// Next: publication.h puts the folder beside the weights and publishes both.
//
// Form: per writing rank r of W, rank-r-of-W.safetensors with one flat tensor "name[begin:end]" a piece, and
// rank-r-of-W.json: {version, progress, pieces: [{name, dtype, shape (of the whole tensor), begin, end, xxh3}]}. The pieces of
// all ranks cover each tensor exactly once, so that ranks of another number can read their own ranges. Torch-free.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "mtraining/checkpoint/safetensors.h"

namespace mtraining::checkpoint {

/// Where a run stands. Everything is global, nothing per rank, so that another number of ranks goes on from it.
struct Progress {
  int64_t train_step = 0;  ///< finished train steps
  int64_t micro_step =
      0;  ///< micro steps of the next train step that are already in saved gradients
  int64_t sample_position = 0;  ///< samples that all ranks together have taken out of the data
  int64_t tokens_total = 0;
  int64_t skipped_steps = 0;  ///< train steps dropped because a gradient was not finite
  uint64_t seed = 0;          ///< random numbers follow from it and the counters above
  std::string notes;          ///< a JSON object of the trainer's own; "" for none
  bool operator==(const Progress&) const = default;
};

/// Elements [begin, end) of a tensor in row-major order.
struct StatePiece {
  TensorSpec tensor;  ///< of the whole tensor
  int64_t begin = 0, end = 0;
};

/// One rank's files. Not collective: ranks need not wait for each other.
class TrainingStateWriter {
 public:
  /// The folder must exist. Errors: InvalidArgument where a range leaves its tensor or a piece is given twice;
  /// ExternalError where the disk has not room.
  TrainingStateWriter(const std::filesystem::path& folder, int rank, int world_size,
                      const std::vector<StatePiece>& pieces, const Progress& progress);
  ~TrainingStateWriter();

  /// The next bytes of pieces[piece]; pieces may take turns.
  void write(size_t piece, std::span<const std::byte> bytes);
  /// Flushes both files to the device. Errors: InvalidArgument naming a piece that did not get all its bytes.
  void finish();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Reads what TrainingStateWriter wrote on all ranks. Not thread-safe.
class TrainingState {
 public:
  /// Errors: InvalidArgument naming folder, file or tensor: a rank's file missing, ranks that disagree on progress, dtype or
  /// shape, ranges of a tensor that overlap or leave a hole, what SafetensorsFile refuses; Unsupported: another version.
  explicit TrainingState(const std::filesystem::path& folder);
  ~TrainingState();

  const std::string& path() const { return path_; }
  const Progress& progress() const { return progress_; }
  /// How many ranks wrote it.
  int world_size() const { return world_size_; }
  /// Ascending by name.
  std::vector<TensorSpec> tensors() const;
  /// Null where there is none of this name.
  const TensorSpec* find(std::string_view name) const;
  /// Elements [begin, end) into out, which holds exactly their bytes. A piece's checksum is verified when it is first touched.
  /// Errors: InvalidArgument on an unknown name, a range that leaves the tensor, an out of another size; or naming file and
  /// tensor where bytes are not those that were written.
  void read(std::string_view name, int64_t begin, int64_t end, std::span<std::byte> out);

 private:
  struct Piece {
    int64_t begin = 0, end = 0;
    std::string entry;  ///< name in the rank's file
    size_t file = 0;
    uint64_t checksum = 0;
    bool verified = false;
  };
  struct Tensor {
    TensorSpec spec;
    std::vector<Piece> pieces;  ///< ascending by begin
  };
  void add_rank(const std::string& stem, int rank);
  void check_coverage(Tensor& tensor) const;

  std::string path_;
  int world_size_ = 0;
  Progress progress_;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::map<std::string, Tensor, std::less<>> tensors_;
};

}  // namespace mtraining::checkpoint
