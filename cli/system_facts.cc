#include "cli/system_facts.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "cli/socket.h"
#include "mtraining/base/check.h"
#include "mtraining/base/parallel.h"

namespace mtraining::cli {
namespace {

namespace fs = std::filesystem;

int64_t meminfo(const std::string& key) {
  std::ifstream file("/proc/meminfo");
  for (std::string name; file >> name;) {
    int64_t kib = 0;
    file >> kib;
    if (name == key + ":") return kib * 1024;
    std::getline(file, name);
  }
  return 0;
}

/// A number of a control group file; nothing where there is none, or "max".
std::optional<int64_t> group_value(const char* path) {
  std::ifstream file(path);
  int64_t value = 0;
  return file >> value ? std::optional<int64_t>(value) : std::nullopt;
}

double quota_cores() {
  std::ifstream file("/sys/fs/cgroup/cpu.max");
  double quota = 0, period = 0;
  return file >> quota >> period && period > 0 ? quota / period : 0;
}

void read_memory(SystemFacts& facts) {
  facts.memory_bytes = meminfo("MemTotal");
  facts.available_bytes = meminfo("MemAvailable");
  for (const auto& [limit_path, used_path] :
       {std::pair{"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"},
        std::pair{"/sys/fs/cgroup/memory/memory.limit_in_bytes",
                  "/sys/fs/cgroup/memory/memory.usage_in_bytes"}}) {
    const auto limit = group_value(limit_path), used = group_value(used_path);
    if (!limit || *limit >= facts.memory_bytes) continue;
    facts.memory_bytes = *limit;
    facts.available_bytes = std::min(facts.available_bytes, *limit - used.value_or(0));
  }
}

int64_t soft_limit(__rlimit_resource_t resource) {
  rlimit limit{};
  ::getrlimit(resource, &limit);
  return limit.rlim_cur == RLIM_INFINITY ? -1 : static_cast<int64_t>(limit.rlim_cur);
}

std::string try_loopback() {
  int error = 0;
  const Socket listener = listen_on(0, true, error);
  if (!listener.open()) return concat("listening on 127.0.0.1: ", std::strerror(error));
  sockaddr_in address{};
  socklen_t length = sizeof(address);
  ::getsockname(listener.fd(), reinterpret_cast<sockaddr*>(&address), &length);
  const Socket client =
      connect_to("127.0.0.1", ntohs(address.sin_port), std::chrono::milliseconds(1000));
  return client.open() ? "" : "a port of 127.0.0.1 that is listened on cannot be reached";
}

void read_out_folder(const std::string& wanted, SystemFacts& facts) {
  std::error_code error;
  fs::path folder = fs::absolute(wanted, error);
  while (!fs::exists(folder, error) && folder.has_relative_path()) folder = folder.parent_path();
  facts.out_folder = folder.string();
  if (!fs::is_directory(folder, error)) {
    facts.out_error = std::strerror(ENOTDIR);
    return;
  }
  std::string name = (folder / ".mtraining-doctor-XXXXXX").string();
  const int fd = ::mkstemp(name.data());
  if (fd < 0) {
    facts.out_error = std::strerror(errno);
    return;
  }
  if (::write(fd, "x", 1) != 1) facts.out_error = std::strerror(errno);
  ::close(fd);
  ::unlink(name.c_str());
  struct statvfs disk {};
  if (::statvfs(folder.c_str(), &disk) == 0)
    facts.out_free_bytes =
        static_cast<int64_t>(disk.f_bavail) * static_cast<int64_t>(disk.f_frsize);
}

}  // namespace

SystemFacts read_system_facts(const std::string& out_folder) {
  SystemFacts facts;
  facts.cores = num_threads();
  facts.cores_of_quota = quota_cores();
  read_memory(facts);
  struct statvfs shm {};
  if (::statvfs("/dev/shm", &shm) == 0) {
    facts.shm_bytes = static_cast<int64_t>(shm.f_blocks) * static_cast<int64_t>(shm.f_frsize);
    facts.shm_free_bytes = static_cast<int64_t>(shm.f_bavail) * static_cast<int64_t>(shm.f_frsize);
  }
  facts.open_files = soft_limit(RLIMIT_NOFILE);
  facts.locked_memory_bytes = soft_limit(RLIMIT_MEMLOCK);
  char host[256] = "";
  ::gethostname(host, sizeof(host) - 1);
  facts.host = host;
  addrinfo* found = nullptr;
  facts.host_resolves = ::getaddrinfo(host, nullptr, nullptr, &found) == 0;
  if (facts.host_resolves) ::freeaddrinfo(found);
  facts.loopback_error = try_loopback();
  read_out_folder(out_folder, facts);
  return facts;
}

}  // namespace mtraining::cli
