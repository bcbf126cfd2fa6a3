// ScratchFolder: a folder of its own for a test, removed at its end.
//
// In:   nothing. Out: a path that exists and is empty. Next: the tests that write files.
#pragma once

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include "mtraining/base/check.h"

namespace mtraining::testing {

/// A folder in memory where the machine has one: hundreds of flushes to a device take a minute and prove no more.
inline std::filesystem::path memory_folder() {
  const std::filesystem::path folder = "/dev/shm";
  return std::filesystem::is_directory(folder) ? folder : std::filesystem::temp_directory_path();
}

class ScratchFolder {
 public:
  explicit ScratchFolder(
      const std::filesystem::path& parent = std::filesystem::temp_directory_path()) {
    std::string name = (parent / "mtraining-test-XXXXXX").string();
    MT_CHECK_EXTERNAL(::mkdtemp(name.data()) != nullptr, parent.string(), ": cannot make a folder");
    path_ = name;
  }
  ~ScratchFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }

 private:
  std::filesystem::path path_;
};

inline void put_text(const std::filesystem::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

inline std::string get_text(const std::filesystem::path& path) {
  std::ostringstream out;
  out << std::ifstream(path, std::ios::binary).rdbuf();
  return out.str();
}

}  // namespace mtraining::testing
