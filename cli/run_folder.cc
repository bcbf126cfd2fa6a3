#include "cli/run_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

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

}  // namespace

RunFolder::RunFolder(const std::string& path) : path_(path) {
  namespace fs = std::filesystem;
  std::error_code error;
  fs::create_directories(path, error);
  if (error) refuse(path, error.value());
  if (!fs::is_directory(path, error)) refuse(path, ENOTDIR);
  const std::string lock = (fs::path(path) / kLock).string();
  lock_ = ::open(lock.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (lock_ < 0) refuse(lock, errno);
  try {
    const bool mine = ::flock(lock_, LOCK_EX | LOCK_NB) == 0;
    MT_CHECK_ARG(mine || errno != EWOULDBLOCK, "--out: ", path,
                 " is in use by another run; give this one a folder of its own");
    MT_CHECK_EXTERNAL(mine, lock, ": cannot be locked: ", std::strerror(errno));
  } catch (...) {
    ::close(lock_);
    throw;
  }
}

RunFolder::~RunFolder() { ::close(lock_); }

void RunFolder::write(const std::string& name, const std::string& text) const {
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
