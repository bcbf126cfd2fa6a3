// PeerBoard: what the processes of a group of GPUs tell one another about memory that they share. Private to peer_copies.cc.
//
// In:   a communicator over host memory, to meet. Out: a page a rank in memory that all see; events of CUDA that all can wait for.
// Next: peer_copies.cc.
#pragma once

#include <cuda_runtime.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>

#include "mtraining/base/check.h"
#include "mtraining/comm/call.h"
#include "mtraining/comm/transport.h"

namespace mtraining::comm::peer_copies {

inline constexpr int kMaxRanks = 16, kSlots = 2, kMaxParts = 2;

inline void check_cuda(cudaError_t error, const char* what) {
  MT_CHECK_EXTERNAL(error == cudaSuccess, "peer copies: ", what, ": ", cudaGetErrorString(error));
}

/// What one rank has put into one of its slots. Written while nobody reads it: not before every addressee of the last content has taken
/// it. `number[r]` is set last: the how-many-th post to rank r this is, from 1; 0: not for r.
struct Post {
  std::array<std::atomic<uint64_t>, kMaxRanks> number;
  uint64_t generation;  // of the slot's memory
  void* address;        // in its process
  cudaIpcMemHandle_t memory;
  std::array<std::array<int64_t, kMaxParts>, kMaxRanks> offset, bytes;  // by rank
  Call call;                                                            // of a collective
  int32_t parts;  // of an exchange; -1: a collective
};
/// An event as other processes open it, and as threads of the same one use it.
struct EventShare {
  cudaIpcEventHandle_t handle;
  cudaEvent_t event;
};
/// One rank's page of the memory that all processes of the group see.
struct Page {
  int64_t process;
  int32_t device;
  std::array<Post, kSlots> posts;
  std::array<std::atomic<uint64_t>, kMaxRanks>
      taken;  // posts of rank s that this rank's stream has been told to read
  std::array<EventShare, kSlots> ready;                        // recorded when the slot is filled
  std::array<std::array<EventShare, kSlots>, kMaxRanks> done;  // [s]: when s's slot has been read
};
static_assert(std::atomic<uint64_t>::is_always_lock_free);

class Event {
 public:
  explicit Event(bool shared) {
    check_cuda(cudaEventCreateWithFlags(
                   &event_, cudaEventDisableTiming | (shared ? cudaEventInterprocess : 0u)),
               "making an event");
  }
  /// A peer's; of this process: it must outlive this object's use.
  Event(const EventShare& share, bool of_this_process) : owned_(!of_this_process) {
    if (of_this_process) {
      event_ = share.event;
    } else {
      check_cuda(cudaIpcOpenEventHandle(&event_, share.handle), "opening a peer's event");
    }
  }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  ~Event() {
    if (owned_) cudaEventDestroy(event_);
  }
  cudaEvent_t get() const { return event_; }
  EventShare share() const {
    EventShare share{{}, event_};
    check_cuda(cudaIpcGetEventHandle(&share.handle, event_), "sharing an event");
    return share;
  }
  void record(cudaStream_t stream) const {
    check_cuda(cudaEventRecord(event_, stream), "recording an event");
  }
  void hold(cudaStream_t stream) const {
    check_cuda(cudaStreamWaitEvent(stream, event_, 0), "waiting for an event");
  }

 private:
  cudaEvent_t event_ = nullptr;
  bool owned_ = true;
};
using EventPtr = std::unique_ptr<Event>;

/// A slot of this rank: memory that others read.
struct Slot {
  void* memory = nullptr;
  int64_t bytes = 0;
  uint64_t generation = 0;
  cudaIpcMemHandle_t handle = {};
  EventPtr ready;
  std::array<uint64_t, kMaxRanks> last = {};  // number of the last post to each rank that is in it
};
/// A slot of another rank, as this one sees it.
struct PeerSlot {
  void* memory = nullptr;
  uint64_t generation = 0;
  EventPtr ready;  // of the peer
  EventPtr done;   // of this rank: it has read the slot
  EventPtr read;   // of the peer: it has read this rank's slot
};

/// Memory that all processes of the group see: created by rank 0, gone from the file system once all have it.
class Board {
 public:
  explicit Board(Communicator& host) : bytes_(sizeof(Page) * static_cast<size_t>(host.size())) {
    std::array<char, 64> name{};
    static std::atomic<int> count{0};
    int file = -1;
    if (host.rank() == 0) {
      std::snprintf(name.data(), name.size(), "/mtraining-%d-%d", static_cast<int>(::getpid()),
                    count++);
      file = ::shm_open(name.data(), O_CREAT | O_EXCL | O_RDWR, 0600);
      if (file >= 0 && ::ftruncate(file, static_cast<off_t>(bytes_)) != 0) {
        ::close(file);
        file = -1;
      }
      if (file < 0) error_ = concat("shared memory: ", std::strerror(errno));
    }
    host.broadcast({name.data(), static_cast<int64_t>(name.size())}, 0)->wait();
    if (host.rank() != 0) {
      file = ::shm_open(name.data(), O_RDWR, 0600);
      if (file < 0)
        error_ = concat("no shared memory with rank 0 (", std::strerror(errno),
                        "): is it on another host?");
    }
    if (file >= 0) {
      void* mapped = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
      if (mapped == MAP_FAILED) {
        error_ = concat("mapping shared memory: ", std::strerror(errno));
      } else {
        pages_ = static_cast<Page*>(mapped);
      }
      ::close(file);
    }
    host.barrier();
    if (host.rank() == 0) ::shm_unlink(name.data());
  }
  Board(const Board&) = delete;
  Board& operator=(const Board&) = delete;
  ~Board() {
    if (pages_ != nullptr) ::munmap(pages_, bytes_);
  }
  const std::string& error() const { return error_; }
  Page& page(int rank) const { return pages_[rank]; }

 private:
  size_t bytes_;
  Page* pages_ = nullptr;  // zeros at first
  std::string error_;
};

}  // namespace mtraining::comm::peer_copies
