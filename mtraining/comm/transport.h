// Transport: groups of ranks that exchange raw memory. Torch-free; c10d (Gloo, NCCL) and in-process loopback implement it.
//
// In:   buffers of bytes, peers by their index in the group.
// Out:  the same bytes elsewhere, sums and maxima; counters of what was sent.
// Next: attention/ runs ring schedules over it, pattern/ reduces masses, optim/ reduces gradients.
//
// A Communicator serves one purpose; two purposes never share one. Within one communicator all ranks call the same
// collectives in the same order; exchanges match pairwise in order. Calls are asynchronous until Work::wait(). Buffers must
// live and stay untouched until then, or until the Work goes. One thread per rank uses a communicator.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace mtraining::comm {

enum class ReduceOp { kSum, kMax };
enum class ElementType { kInt64, kInt32, kFloat32, kFloat64, kBFloat16 };
int64_t size_of(ElementType type);

/// Handle of an asynchronous call. wait() returns when done (CPU) or makes the current stream wait (CUDA); called again it does so for
/// the stream that is current then. Errors: ExternalError naming communicator, call, peer and cause (peer died, timeout).
/// One that goes without a wait: buffers are touched no more by this rank, on a GPU by what the current stream gets afterwards.
class Work {
 public:
  virtual ~Work() = default;
  virtual void wait() = 0;
  using Then = std::function<void(const std::function<void()>& wait)>;
  /// Calls `then` once the device knows all of the call: its `wait` is wait() without waiting on the host. At once where a transport
  /// never waits on the host; else from any thread, before this rank's wait() returns. Not called where the call fails or is dropped.
  virtual void when_enqueued(const Then& then) {
    then([this] { wait(); });
  }
};
using WorkPtr = std::unique_ptr<Work>;

struct ConstBuffer {
  const void* data = nullptr;
  int64_t bytes = 0;
};
struct Buffer {
  void* data = nullptr;
  int64_t bytes = 0;
};

struct Counters {
  /// Payload this rank sent: exchange send bytes (0 to itself); all-gather (size-1) x part; reduce-scatter likewise;
  /// all-reduce 2 (size-1)/size x bytes; broadcast as root (size-1) x bytes.
  int64_t bytes_sent = 0;
  int64_t calls = 0;
};

class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;  ///< in this group
  virtual int size() const = 0;
  virtual const std::string& name() const = 0;

  /// Sends the two parts to `to` and receives two parts from `from` (both group ranks; may be equal, may be self).
  /// parts: K and V (or dk and dv) travel in one call; sizes must match the peer's.
  virtual WorkPtr exchange(int to, std::vector<ConstBuffer> send, int from,
                           std::vector<Buffer> recv) = 0;
  /// recv[r] of rank r's send; every part has the same bytes.
  virtual WorkPtr all_gather(ConstBuffer send, std::vector<Buffer> recv) = 0;
  /// recv = sum over ranks of their send[rank()].
  virtual WorkPtr reduce_scatter(std::vector<ConstBuffer> send, Buffer recv, ElementType type) = 0;
  virtual WorkPtr all_reduce(Buffer data, ElementType type, ReduceOp op) = 0;  ///< in place
  virtual WorkPtr broadcast(Buffer data, int root) = 0;
  virtual void barrier() = 0;

  /// Exchanges and gathers run as kernels of a GPU: launches beside them leave multiprocessors free.
  virtual bool needs_multiprocessors() const { return false; }

  const Counters& counters() const { return counters_; }

 protected:
  Counters counters_;
};
using CommunicatorPtr = std::shared_ptr<Communicator>;

/// All ranks of the job; makes communicators.
class Transport {
 public:
  virtual ~Transport() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// Collective over all ranks of the job, in the same order, members included or not; `members` ascending job ranks.
  /// Returns null on ranks that are no member.
  virtual CommunicatorPtr open(const std::string& name, const std::vector<int>& members) = 0;
  /// The same for host memory, where open()'s communicators take device memory (NCCL): agreements and other small exchanges.
  virtual CommunicatorPtr open_host(const std::string& name, const std::vector<int>& members) {
    return open(name, members);
  }
  /// As open(), among GPUs of one host that read each other's memory: bytes move by copy engines, no kernel among them but for sums.
  /// Errors: Unsupported, on every member alike, naming why not.
  virtual CommunicatorPtr open_copies(const std::string& name, const std::vector<int>& members);
  /// Whether open()'s communicators take device memory.
  virtual bool on_device() const { return false; }
  virtual std::chrono::milliseconds timeout() const = 0;
  /// Says that this rank gives up, so that ranks that wait fail within seconds with `cause` instead of their timeout. The first
  /// cause of the job is kept. Every later call on this rank's communicators fails. Never throws; local.
  virtual void abort(const std::string& cause) noexcept = 0;
};

}  // namespace mtraining::comm
