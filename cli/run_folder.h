// RunFolder: this process's claim on the folder of a run.
//
// In:   the path that --out gave. Out: an existing folder that no other launch writes to. What it holds is resume.h's matter, which
//       looks at it under this claim. Where nothing is written, what was made for the claim goes again.
// Next: train.cc writes config.toml; train/ the rest.
#pragma once

#include <string>
#include <vector>

namespace mtraining::cli {

/// Held by rank 0 until it ends. The lock goes with the process; the lock file stays in a folder that was written to.
class RunFolder {
 public:
  /// Makes the folder and locks it. Errors: InvalidArgument where it is no folder, or another launch holds it; ExternalError with the system's words where it cannot be written.
  explicit RunFolder(const std::string& path);
  /// Until write() was called: removes the lock file and the folders that it made. So does a stop signal that ends the process (stop.h).
  ~RunFolder();
  RunFolder(const RunFolder&) = delete;
  RunFolder& operator=(const RunFolder&) = delete;

  /// The run begins. Errors: ExternalError with the system's words.
  void write(const std::string& name, const std::string& text);

 private:
  void make_and_lock();

  std::string path_;
  std::vector<std::string>
      made_;  // the lock file, then folders, innermost first; empty once the run has begun
  int lock_ = -1;
};

}  // namespace mtraining::cli
