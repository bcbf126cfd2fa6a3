// Disk: every change that checkpoints make to a file system, each checked, each able to be flushed to the device.
//
// In:   paths and bytes. Out: files and folders that survive a power cut once finish() and sync_folder() have returned.
// Next: safetensors.h, publication.h.
//
// A write that the kernel took is not yet on the device, and a file on the device is not yet in its folder: only fsync of both
// makes them last. Errors: ExternalError naming operation, path, offset and the system's reason (disk full, no permission, ..).
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <string_view>

namespace mtraining::checkpoint {

/// Called before each change with its name (create, reserve, write, sync, close, make_folder, sync_folder, rename, remove) and path. What it throws, the operation throws. For tests, which fail or kill a process at each operation in turn.
using DiskObserver = std::function<void(std::string_view operation, const std::filesystem::path&)>;
/// Replaces the observer of the whole process; empty for none. Call it while nothing is being written.
void observe_disk(DiskObserver observer);

/// A new file (an old one of the same name is emptied). Not thread-safe.
class OutputFile {
 public:
  explicit OutputFile(const std::filesystem::path& path);
  /// Closes without flushing: what was not finished may be lost.
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  /// Takes `bytes` of disk now, so that a full disk is met before hours of work; no effect where the file system cannot.
  void reserve(int64_t bytes);
  void write(int64_t offset, std::span<const std::byte> bytes);
  /// Flushes to the device and closes.
  void finish();
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
  int file_ = -1;
};

/// Makes one folder; its parent must exist. `exists_ok`: an existing folder is no error.
void make_folder(const std::filesystem::path& path, bool exists_ok = false);
/// Flushes the names in a folder.
void sync_folder(const std::filesystem::path& path);
/// Flushes all files and folders of a tree, whoever wrote them on this machine.
void sync_tree(const std::filesystem::path& path);
/// Atomic. Replaces a file; a folder only where it is empty.
void rename_path(const std::filesystem::path& from, const std::filesystem::path& to);
/// Removes a file or a folder with all it holds; no error where there is none.
void remove_tree(const std::filesystem::path& path);
/// Writes and flushes a small file.
void write_text_file(const std::filesystem::path& path, std::string_view text);
/// Replaces a small file atomically: a reader sees the old or the new text, never a part.
void replace_text_file(const std::filesystem::path& path, std::string_view text);

}  // namespace mtraining::checkpoint
