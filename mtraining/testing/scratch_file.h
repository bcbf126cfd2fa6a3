// ScratchFile: a file with a text for a test, removed at its end.
//
// In:   a text. Out: a path. Next: the tests of this folder.
#pragma once

#include <string>

#include "mtraining/checkpoint/scratch_folder.h"

namespace mtraining::eval {

class ScratchFile {
 public:
  explicit ScratchFile(const std::string& text) { put(text); }
  std::string path() const { return (folder_ / "file.jsonl").string(); }
  void put(const std::string& text) const { checkpoint::put_text(path(), text); }
  std::string get() const { return checkpoint::get_text(path()); }

 private:
  checkpoint::ScratchFolder folder_{checkpoint::memory_folder()};
};

}  // namespace mtraining::eval
