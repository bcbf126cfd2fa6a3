#include "mtraining/checkpoint/disk.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include "mtraining/base/check.h"

namespace mtraining::checkpoint {
namespace {

namespace fs = std::filesystem;

std::mutex observer_mutex;
DiskObserver current_observer;

void notify(std::string_view operation, const fs::path& path) {
  DiskObserver observer;
  {
    std::lock_guard lock(observer_mutex);
    observer = current_observer;
  }
  if (observer) observer(operation, path);
}

[[noreturn]] void fail(std::string_view what, const fs::path& path, int code) {
  throw ExternalError(concat(path.string(), ": cannot ", what, ": ", std::strerror(code)));
}

}  // namespace

void observe_disk(DiskObserver observer) {
  std::lock_guard lock(observer_mutex);
  current_observer = std::move(observer);
}

OutputFile::OutputFile(const fs::path& path) : path_(path) {
  notify("create", path_);
  file_ = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (file_ < 0) fail("create", path_, errno);
}

OutputFile::~OutputFile() {
  if (file_ >= 0) ::close(file_);
}

void OutputFile::reserve(int64_t bytes) {
  notify("reserve", path_);
  if (bytes == 0) return;
  int result = 0;
  // Not posix_fallocate: where the file system cannot reserve, that one writes zeros byte by byte.
  do {
    result = ::fallocate(file_, 0, 0, bytes);
  } while (result != 0 && errno == EINTR);
  if (result != 0 && errno != EOPNOTSUPP && errno != ENOSYS)
    fail(concat("reserve ", bytes, " bytes"), path_, errno);
}

void OutputFile::write(int64_t offset, std::span<const std::byte> bytes) {
  MT_ASSERT(file_ >= 0, path_.string(), " is already finished");
  // In pieces, so that an interruption between two of them can be met by a test.
  constexpr size_t kPiece = size_t{64} << 20;
  while (!bytes.empty()) {
    notify("write", path_);
    const ssize_t done = ::pwrite(file_, bytes.data(), std::min(bytes.size(), kPiece), offset);
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0)
      fail(concat("write ", bytes.size(), " bytes at offset ", offset), path_,
           done < 0 ? errno : ENOSPC);
    offset += done;
    bytes = bytes.subspan(static_cast<size_t>(done));
  }
}

void OutputFile::finish() {
  MT_ASSERT(file_ >= 0, path_.string(), " is already finished");
  notify("sync", path_);
  if (::fsync(file_) != 0) fail("flush", path_, errno);
  notify("close", path_);
  // Network file systems may report a full disk only here.
  if (::close(std::exchange(file_, -1)) != 0) fail("close", path_, errno);
}

void make_folder(const fs::path& path, bool exists_ok) {
  notify("make_folder", path);
  if (::mkdir(path.c_str(), 0755) == 0) return;
  const int code = errno;
  if (code == EEXIST && exists_ok && fs::is_directory(path)) return;
  fail("make the folder", path, code);
}

void sync_folder(const fs::path& path) {
  notify("sync_folder", path);
  const int file = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (file < 0) fail("open the folder", path, errno);
  const int result = ::fsync(file);
  const int code = errno;
  ::close(file);
  // Some network file systems flush names by themselves and refuse to be asked.
  if (result != 0 && code != EINVAL && code != ENOTSUP) fail("flush the folder", path, code);
}

void sync_tree(const fs::path& path) {
  for (const fs::directory_entry& entry : fs::directory_iterator(path)) {
    if (entry.is_directory()) {
      sync_tree(entry.path());
      continue;
    }
    notify("sync", entry.path());
    const int file = ::open(entry.path().c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) fail("open", entry.path(), errno);
    const int result = ::fsync(file);
    const int code = errno;
    ::close(file);
    if (result != 0) fail("flush", entry.path(), code);
  }
  sync_folder(path);
}

void rename_path(const fs::path& from, const fs::path& to) {
  notify("rename", to);
  if (::rename(from.c_str(), to.c_str()) != 0) fail(concat("rename to ", to.string()), from, errno);
}

void remove_tree(const fs::path& path) {
  notify("remove", path);
  std::error_code code;
  fs::remove_all(path, code);
  if (code) fail("remove", path, code.value());
}

void write_text_file(const fs::path& path, std::string_view text) {
  OutputFile file(path);
  file.write(0, std::as_bytes(std::span(text)));
  file.finish();
}

void replace_text_file(const fs::path& path, std::string_view text) {
  fs::path part = path;
  part += ".part";
  write_text_file(part, text);
  rename_path(part, path);
  sync_folder(path.parent_path());
}

}  // namespace mtraining::checkpoint
