// RunFolder: this process's claim on the folder of a run.
//
// In:   the path that --out gave. Out: an existing folder that no other launch writes to. What it holds is resume.h's matter.
// Next: train.cc writes config.toml; train/ the rest.
#pragma once

#include <string>

namespace mtraining::cli {

/// Held by rank 0 until it ends. The lock file stays in the folder, the lock goes with the process.
class RunFolder {
 public:
  /// Makes the folder and locks it. Errors: InvalidArgument where it is no folder, or another launch holds it; ExternalError with the system's words where it cannot be written.
  explicit RunFolder(const std::string& path);
  ~RunFolder();
  RunFolder(const RunFolder&) = delete;
  RunFolder& operator=(const RunFolder&) = delete;

  /// Errors: ExternalError with the system's words.
  void write(const std::string& name, const std::string& text) const;

 private:
  std::string path_;
  int lock_ = -1;
};

}  // namespace mtraining::cli
