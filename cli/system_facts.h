// SystemFacts: what the operating system grants this process: cores, memory, shared memory, files, disk.
//
// In:   the folder that a run would write to. Out: plain data. Next: doctor.cc judges it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace mtraining::cli {

struct SystemFacts {
  int cores = 1;              ///< that this process may use
  double cores_of_quota = 0;  ///< of the control group; 0: no limit
  int64_t memory_bytes = 0;   ///< the machine's, or the control group's limit where that is smaller
  int64_t available_bytes = 0;
  int64_t shm_bytes = -1, shm_free_bytes = -1;  ///< of /dev/shm; -1: there is none
  int64_t open_files = 0;                       ///< soft limit
  int64_t locked_memory_bytes = -1;             ///< soft limit; -1: none
  std::string host;
  bool host_resolves = false;
  std::string loopback_error;  ///< "" where a port of 127.0.0.1 can be listened on and reached
  std::string out_folder;      ///< the nearest folder that exists
  std::string out_error;       ///< why it cannot be written to; "": it can
  int64_t out_free_bytes = 0;
};

/// Writes and removes an empty file in the folder, or in the nearest one above it that exists.
SystemFacts read_system_facts(const std::string& out_folder);

}  // namespace mtraining::cli
