#include "cli/run_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "cli/stop.h"
#include "mtraining/base/check.h"

namespace mtraining::cli {
namespace {

constexpr const char* kLock = ".lock";

/// A path that runs through a file, or names none, is the user's; a full or read-only disk is not.
[[noreturn]] void refuse(const std::string& path, int error) {
  const std::string text =
      concat(path, ": cannot be written: ", std::strerror(error), "; --out names a run's folder");
  if (error == ENOTDIR || error == EEXIST || error == ENOENT || error == ENAMETOOLONG)
    throw InvalidArgument(text);
  throw ExternalError(text);
}

/// Folders that hold something by now stay.
void remove_unless_begun(const std::vector<std::string>& made) {
  for (const std::string& path : made) ::remove(path.c_str());
}

/// Opens the lock file, and says whether it made it.
int open_lock(const std::string& path, bool& made) {
  const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  made = fd >= 0;
  return made || errno != EEXIST ? fd : ::open(path.c_str(), O_RDWR | O_CLOEXEC);
}

/// Whether the file is still the one of this name: a launch that was refused may have taken it away.
bool is_at(int fd, const std::string& path) {
  struct stat opened = {}, named = {};
  return ::fstat(fd, &opened) == 0 && ::stat(path.c_str(), &named) == 0 &&
         opened.st_dev == named.st_dev && opened.st_ino == named.st_ino;
}

}  // namespace

RunFolder::RunFolder(const std::string& path) : path_(path) {
  try {
    // Another launch may take away between two of our calls what it had made.
    for (int attempt = 0; lock_ < 0; ++attempt) {
      MT_CHECK_EXTERNAL(attempt < 100, "--out: ", path,
                        " is made and removed by others all the time");
      make_and_lock();
    }
  } catch (...) {
    remove_unless_begun(made_);
    throw;
  }
  remove_on_stop(made_);
}

void RunFolder::make_and_lock() {
  namespace fs = std::filesystem;
  const fs::path folder = path_;
  std::error_code error;
  for (fs::path each = folder; !each.empty() && !fs::exists(each, error); each = each.parent_path())
    if (std::find(made_.begin(), made_.end(), each) == made_.end()) made_.push_back(each.string());
  fs::create_directories(folder, error);
  if (error) refuse(path_, error.value());
  if (!fs::is_directory(folder, error)) refuse(path_, ENOTDIR);
  const std::string lock = (folder / kLock).string();
  bool made = false;
  const int fd = open_lock(lock, made);
  if (fd < 0 && errno == ENOENT) return;
  if (fd < 0) refuse(lock, errno);
  const bool mine = ::flock(fd, LOCK_EX | LOCK_NB) == 0;
  if (!mine) {
    const int code = errno;
    ::close(fd);
    made_.clear();  // whoever holds it needs them
    MT_CHECK_ARG(code != EWOULDBLOCK, "--out: ", path_,
                 " is in use by another run; give this one a folder of its own");
    throw ExternalError(concat(lock, ": cannot be locked: ", std::strerror(code)));
  }
  if (!is_at(fd, lock)) {
    ::close(fd);
    return;
  }
  if (made) made_.insert(made_.begin(), lock);
  lock_ = fd;
}

RunFolder::~RunFolder() {
  remove_on_stop({});
  remove_unless_begun(made_);  // before the lock goes
  ::close(lock_);
}

void RunFolder::write(const std::string& name, const std::string& text) {
  remove_on_stop({});
  made_.clear();
  const std::string path = (std::filesystem::path(path_) / name).string();
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd < 0) refuse(path, errno);
  size_t done = 0;
  int error = 0;
  while (done < text.size() && error == 0) {
    const ssize_t count = ::write(fd, text.data() + done, text.size() - done);
    if (count >= 0) {
      done += static_cast<size_t>(count);
    } else if (errno != EINTR) {
      error = errno;
    }
  }
  if (::close(fd) != 0 && error == 0) error = errno;
  if (error != 0) refuse(path, error);
}

}  // namespace mtraining::cli
