#include "mtraining/comm/loopback_device.h"

#include <cuda_runtime.h>

#include <map>
#include <mutex>
#include <vector>

#include "mtraining/base/check.h"
#include "mtraining/comm/device_element.h"
#include "mtraining/comm/loopback_memory.h"
#include "mtraining/kernels/exchange_cuda/exchange.h"

namespace mtraining::comm {
namespace {

namespace exchange = kernels::exchange_cuda;

void check_cuda(cudaError_t error, const char* what) {
  MT_CHECK_EXTERNAL(error == cudaSuccess, "device loopback: ", what, ": ",
                    cudaGetErrorString(error));
}

/// Events that are used again: a wait that was enqueued keeps what the event stood for then.
class Events {
 public:
  ~Events() {
    for (cudaEvent_t event : free_) cudaEventDestroy(event);
  }
  static std::shared_ptr<void> record(const std::shared_ptr<Events>& events, cudaStream_t stream) {
    cudaEvent_t event = events->take();
    std::shared_ptr<void> mark(event, [events](void* used) {
      const std::lock_guard lock(events->mutex_);
      events->free_.push_back(static_cast<cudaEvent_t>(used));
    });
    check_cuda(cudaEventRecord(event, stream), "recording an event");
    return mark;
  }

 private:
  cudaEvent_t take() {
    const std::lock_guard lock(mutex_);
    cudaEvent_t event = nullptr;
    if (free_.empty()) {
      check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "making an event");
    } else {
      event = free_.back();
      free_.pop_back();
    }
    return event;
  }

  std::mutex mutex_;
  std::vector<cudaEvent_t> free_;
};

class DeviceMemory : public LoopbackMemory {
 public:
  DeviceMemory(int ranks, const DeviceLoopbackOptions& options)
      : options_(options), ranks_(ranks), events_(std::make_shared<Events>()) {
    if (options_.ranks_per_node == 0) options_.ranks_per_node = ranks;
    const size_t bytes = sizeof(uint64_t) * static_cast<size_t>(2 * ranks + kMaxLines);
    check_cuda(cudaMalloc(&clocks_, bytes), "cudaMalloc");
    check_cuda(cudaMemset(clocks_, 0, bytes), "cudaMemset");
  }
  ~DeviceMemory() override {
    for (const auto& [key, line] : lines_) cudaStreamDestroy(line.stream);
    cudaFree(clocks_);
  }

  Mark mark() override { return Events::record(events_, caller_stream()); }
  void await(const Mark& mark) override { wait(caller_stream(), mark); }

  Mark copy(const Line& line, std::span<const Mark> after, int from,
            std::span<const Copy> copies) override {
    const OpenLine open = open_line(line);
    for (const Mark& mark : after) wait(open.stream, mark);
    int64_t bytes = 0;
    for (const Copy& part : copies) bytes += part.from == part.to ? 0 : part.bytes;
    const bool held = take_link(open, from, line.job_rank, bytes);
    for (const Copy& part : copies) {
      if (part.bytes == 0 || part.from == part.to) continue;
      check_cuda(cudaMemcpyAsync(part.to, part.from, static_cast<size_t>(part.bytes),
                                 cudaMemcpyDeviceToDevice, open.stream),
                 "copying");
    }
    if (held) exchange::hold_until(open.deadline, open.stream);
    return Events::record(events_, open.stream);
  }

  Mark reduce(const Line& line, std::span<const Mark> after, std::span<const int> senders,
              ElementType type, ReduceOp op, int64_t count, std::span<const void* const> sources,
              std::span<void* const> destinations) override {
    const OpenLine open = open_line(line);
    for (const Mark& mark : after) wait(open.stream, mark);
    for (const int from : senders) {
      if (take_link(open, from, line.job_rank, count * size_of(type)))
        exchange::hold_until(open.deadline, open.stream);
    }
    exchange::reduce_in_order(element_of(type), op == ReduceOp::kMax, count, sources, destinations,
                              open.stream);
    return Events::record(events_, open.stream);
  }

 private:
  struct OpenLine {
    cudaStream_t stream = nullptr;
    uint64_t* deadline = nullptr;
  };

  /// True where the link has a rate: the line's deadline is then when it has carried the bytes.
  bool take_link(const OpenLine& open, int from, int to, int64_t bytes) {
    const bool outer = from / options_.ranks_per_node != to / options_.ranks_per_node;
    const double rate = outer ? options_.outer_bytes_per_s : options_.inner_bytes_per_s;
    if (rate <= 0 || bytes == 0 || from == to) return false;
    exchange::take_link(clocks_ + 2 * from + (outer ? 1 : 0), open.deadline,
                        static_cast<int64_t>(static_cast<double>(bytes) / rate * 1e9), open.stream);
    return true;
  }
  cudaStream_t caller_stream() const {
    return options_.current_stream ? static_cast<cudaStream_t>(options_.current_stream()) : nullptr;
  }
  static void wait(cudaStream_t stream, const Mark& mark) {
    if (mark)
      check_cuda(cudaStreamWaitEvent(stream, static_cast<cudaEvent_t>(mark.get()), 0),
                 "waiting for an event");
  }
  OpenLine open_line(const Line& line) {
    const std::lock_guard lock(mutex_);
    OpenLine& open = lines_[{line.communicator, line.job_rank}];
    if (open.stream == nullptr) {
      MT_CHECK_SUPPORTED(std::ssize(lines_) <= kMaxLines, "device loopback: expected at most ",
                         kMaxLines, " pairs of a communicator and a rank");
      // High priority: a transfer must not queue behind a kernel's thread blocks.
      int least = 0, greatest = 0;
      check_cuda(cudaDeviceGetStreamPriorityRange(&least, &greatest), "asking for priorities");
      check_cuda(cudaStreamCreateWithPriority(&open.stream, cudaStreamNonBlocking, greatest),
                 "making a stream");
      open.deadline = clocks_ + 2 * ranks_ + (std::ssize(lines_) - 1);
    }
    return open;
  }

  static constexpr int64_t kMaxLines = 8192;
  DeviceLoopbackOptions options_;
  int ranks_;
  std::shared_ptr<Events> events_;
  uint64_t* clocks_ = nullptr;  // [2 * ranks] when a link is free again; [kMaxLines] deadlines
  std::mutex mutex_;
  std::map<std::pair<int64_t, int>, OpenLine> lines_;
};

}  // namespace

void run_device_loopback(int ranks, const std::function<void(Transport&)>& body,
                         const DeviceLoopbackOptions& options) {
  MT_CHECK_ARG(ranks >= 1, "run_device_loopback: expected at least one rank, got ", ranks);
  MT_CHECK_ARG(options.ranks_per_node >= 0 && options.inner_bytes_per_s >= 0 &&
                   options.outer_bytes_per_s >= 0,
               "run_device_loopback: expected ranks_per_node and rates of at least 0, got ",
               options.ranks_per_node, ", ", options.inner_bytes_per_s, " and ",
               options.outer_bytes_per_s, " bytes/s");
  int device = 0;
  check_cuda(cudaGetDevice(&device), "asking for the device");
  DeviceMemory memory(ranks, options);
  const auto on_device = [&](Transport& transport) {
    check_cuda(cudaSetDevice(device), "choosing the device");
    body(transport);
  };
  try {
    run_loopback_over(&memory, ranks, on_device, options.timeout);
  } catch (...) {
    cudaDeviceSynchronize();  // nothing under way may outlive `memory`
    throw;
  }
  check_cuda(cudaDeviceSynchronize(), "the ranks' work");
}

}  // namespace mtraining::comm
