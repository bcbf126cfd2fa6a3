// WeightFolder: the weights of a Hugging Face folder, in one safetensors file or in several with an index.
//
// In:   a folder with model.safetensors, or with model.safetensors.index.json and the shards it names. Out: tensors by name.
// Next: weights.h copies them into a model; WeightFolderWriter makes such a folder.
//
// Which files count is what the index says, never what lies in the folder: a left-over file may hold other values under the
// same names. All files are opened and checked before the first tensor is handed out. Torch-free.
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

inline constexpr std::string_view kWeightFile = "model.safetensors";
inline constexpr std::string_view kWeightIndexFile = "model.safetensors.index.json";

/// Thread-safe once open. Movable.
class WeightFolder {
 public:
  /// Errors (InvalidArgument, naming the files or tensors): no folder; neither file, or both where the index does not name
  /// model.safetensors; an index of another form; shards that are missing (all are named); a tensor that the index promises
  /// and its shard lacks, that two shards hold, or that a shard holds and the index does not name; what SafetensorsFile refuses.
  explicit WeightFolder(const std::filesystem::path& folder);

  const std::string& path() const { return path_; }
  /// Names of the files that are read.
  const std::vector<std::string>& files() const { return files_; }
  /// Names of further *.safetensors files in the folder, which are not read: worth a warning.
  const std::vector<std::string>& unused_files() const { return unused_files_; }
  /// Ascending.
  std::vector<std::string> names() const;
  /// Null where there is none of this name.
  const TensorSpec* find(std::string_view name) const;
  /// See SafetensorsFile::data. Errors: InvalidArgument naming the folder and the tensor.
  std::span<const std::byte> data(std::string_view name) const;
  /// See SafetensorsFile::release.
  void release(std::string_view name) const;
  /// The file that holds it, for messages.
  const std::string& file_of(std::string_view name) const;

 private:
  struct Place {
    const SafetensorsFile* file;
    const StoredTensor* tensor;
  };
  const Place& place_of(std::string_view name) const;
  void open_indexed();
  void open_single();
  void list_unused();

  std::string path_;
  std::vector<std::string> files_, unused_files_;
  std::vector<std::unique_ptr<SafetensorsFile>> open_;
  std::map<std::string, Place, std::less<>> places_;
};

/// Writes weights as one file, or as several of at most max_shard_bytes of data each (a larger tensor has a file of its own); with
/// checksums (safetensors.h).
class WeightFolderWriter {
 public:
  /// The folder must exist. Tensors go to shards in the order given. Errors: those of SafetensorsWriter.
  WeightFolderWriter(const std::filesystem::path& folder, const std::vector<TensorSpec>& specs,
                     int64_t max_shard_bytes = 5'000'000'000);
  ~WeightFolderWriter();

  /// See SafetensorsWriter::write.
  void write(std::string_view name, std::span<const std::byte> bytes);
  /// Finishes all files, then writes the index where there are several. Errors: see SafetensorsWriter::finish.
  void finish();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace mtraining::checkpoint
