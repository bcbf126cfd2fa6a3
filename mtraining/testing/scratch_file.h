// ScratchFile: a file with a text for a test, removed at its end.
//
// In:   a text. Out: a path. Next: scratch_folder.h.
#pragma once

#include <string>

#include "mtraining/testing/scratch_folder.h"

namespace mtraining::testing {

class ScratchFile {
 public:
  explicit ScratchFile(const std::string& text) { put(text); }
  std::string path() const { return (folder_ / "file.jsonl").string(); }
  void put(const std::string& text) const { put_text(path(), text); }
  std::string get() const { return get_text(path()); }

 private:
  ScratchFolder folder_{memory_folder()};
};

}  // namespace mtraining::testing
