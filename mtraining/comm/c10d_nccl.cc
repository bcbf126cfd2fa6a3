#ifdef USE_C10D_NCCL
#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

#include <atomic>
#include <cstdlib>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "mtraining/comm/c10d_group.h"
#include "mtraining/comm/call.h"

namespace mtraining::comm::c10d_detail {
namespace {

/// Buffers are memory of the current device. Sums are in NCCL's order. Calls are not compared over ranks (that would synchronise with
/// the host); a mismatch ends in the watchdog's timeout. Work::wait() makes the current stream wait.
class NcclCommunicator : public Communicator, public Breakable {
 public:
  NcclCommunicator(const GroupOptions& options, c10::intrusive_ptr<c10d::ProcessGroupNCCL> group)
      : name_(options.name),
        rank_(options.rank),
        size_(options.size),
        group_(std::move(group)),
        board_(options.board) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  const std::string& name() const override { return name_; }
  bool needs_multiprocessors() const override { return true; }
  void break_connections() noexcept override {
    try {
      group_->abort();
    } catch (...) {
    }
  }

  WorkPtr exchange(int to, std::vector<ConstBuffer> send, int from,
                   std::vector<Buffer> recv) override {
    check_exchange(*this, to, send, from, recv);
    ++counters_.calls;
    if (to != rank_) {
      for (const ConstBuffer& part : send) counters_.bytes_sent += part.bytes;
    }
    return guarded(
        describe_exchange(exchanges_++, to, part_bytes(send), from, part_bytes(recv)), [&] {
          // One NCCL group: sends and receives of all parts progress together, so no order of ranks can deadlock.
          group_->startCoalescing();
          for (const ConstBuffer& part : send) {
            if (part.bytes == 0) continue;
            std::vector<at::Tensor> tensors = {wrap_bytes(part.data, part.bytes, device())};
            group_->send(tensors, to, 0);
          }
          for (const Buffer& part : recv) {
            if (part.bytes == 0) continue;
            std::vector<at::Tensor> tensors = {wrap_bytes(part.data, part.bytes, device())};
            group_->recv(tensors, from, 0);
          }
          return group_->endCoalescing();
        });
  }

  WorkPtr all_gather(ConstBuffer send, std::vector<Buffer> recv) override {
    const Call call = count(check_all_gather(*this, send, recv));
    return guarded(describe(call), [&]() -> c10::intrusive_ptr<c10d::Work> {
      if (send.bytes == 0) return {};
      at::Tensor from = wrap_bytes(send.data, send.bytes, device());
      if (contiguous(recv)) {
        at::Tensor to = wrap_bytes(recv[0].data, send.bytes * size_, device());
        return group_->_allgather_base(to, from);
      }
      std::vector<std::vector<at::Tensor>> to(1);
      for (const Buffer& part : recv) to[0].push_back(wrap_bytes(part.data, part.bytes, device()));
      std::vector<at::Tensor> inputs = {from};
      return group_->allgather(to, inputs);
    });
  }

  WorkPtr reduce_scatter(std::vector<ConstBuffer> send, Buffer recv, ElementType type) override {
    const Call call = count(check_reduce_scatter(*this, send, recv, type));
    return guarded(describe(call), [&]() -> c10::intrusive_ptr<c10d::Work> {
      if (recv.bytes == 0) return {};
      at::Tensor to = wrap(recv.data, recv.bytes, type, device());
      if (contiguous(send)) {
        at::Tensor from = wrap(send[0].data, recv.bytes * size_, type, device());
        return group_->_reduce_scatter_base(to, from);
      }
      std::vector<std::vector<at::Tensor>> from(1);
      for (const ConstBuffer& part : send)
        from[0].push_back(wrap(part.data, part.bytes, type, device()));
      std::vector<at::Tensor> outputs = {to};
      return group_->reduce_scatter(outputs, from);
    });
  }

  WorkPtr all_reduce(Buffer data, ElementType type, ReduceOp op) override {
    const Call call = count(check_all_reduce(*this, data, type, op));
    return guarded(describe(call), [&]() -> c10::intrusive_ptr<c10d::Work> {
      if (data.bytes == 0) return {};
      std::vector<at::Tensor> tensors = {wrap(data.data, data.bytes, type, device())};
      c10d::AllreduceOptions options;
      options.reduceOp = op == ReduceOp::kSum ? c10d::ReduceOp::SUM : c10d::ReduceOp::MAX;
      return group_->allreduce(tensors, options);
    });
  }

  WorkPtr broadcast(Buffer data, int root) override {
    const Call call = count(check_broadcast(*this, data, root));
    return guarded(describe(call), [&]() -> c10::intrusive_ptr<c10d::Work> {
      if (data.bytes == 0) return {};
      std::vector<at::Tensor> tensors = {wrap_bytes(data.data, data.bytes, device())};
      c10d::BroadcastOptions options;
      options.rootRank = root;
      return group_->broadcast(tensors, options);
    });
  }

  void barrier() override {
    const Call call = count(Call{});
    guarded(describe(call), [&] {
      c10d::BarrierOptions options;
      options.device_ids = {device().index()};
      return group_->barrier(options);
    })->wait();
  }

 private:
  class NcclWork : public Work {
   public:
    NcclWork(c10::intrusive_ptr<c10d::Work> work, FailureBoardPtr board, std::string text)
        : work_(std::move(work)), board_(std::move(board)), text_(std::move(text)) {}
    ~NcclWork() override {
      try {
        if (work_ && !waited_) work_->wait();
      } catch (...) {  // what has failed is said to whoever waits
      }
    }
    void wait() override {
      hold();
      waited_ = true;
    }
    void when_enqueued(const Then& then) override {
      then([this] { hold(); });
    }

   private:
    void hold() {
      try {
        if (work_) work_->wait();
      } catch (const std::exception& e) {
        board_->raise(text_, first_line(e));
      }
    }

    c10::intrusive_ptr<c10d::Work> work_;
    FailureBoardPtr board_;
    std::string text_;
    bool waited_ = false;  // by a stream of the caller's: one that watches is another
  };

  static at::Device device() { return {at::kCUDA, c10::cuda::current_device()}; }
  template <typename AnyBuffer>
  static bool contiguous(const std::vector<AnyBuffer>& parts) {
    for (size_t p = 1; p < parts.size(); ++p) {
      if (static_cast<const char*>(parts[p].data) !=
          static_cast<const char*>(parts[p - 1].data) + parts[p - 1].bytes)
        return false;
    }
    return true;
  }
  Call count(Call call) {
    call.sequence = collectives_++;
    ++counters_.calls;
    counters_.bytes_sent += payload_bytes(call, rank_, size_);
    return call;
  }
  template <typename Issue>
  WorkPtr guarded(const std::string& call, Issue&& issue) {
    const std::string text = concat("communicator '", name_, "' rank ", rank_, ", ", call);
    try {
      return std::make_unique<NcclWork>(issue(), board_, text);
    } catch (const std::exception& e) {
      board_->raise(text, first_line(e));
    }
  }

  const std::string name_;
  const int rank_, size_;
  c10::intrusive_ptr<c10d::ProcessGroupNCCL> group_;
  FailureBoardPtr board_;
  int64_t exchanges_ = 0, collectives_ = 0;
};

}  // namespace

namespace {

/// While it lives groups are made that, when a transfer times out, are aborted at once, so that the device and whoever waits for it go on
/// and the next call fails with the cause; by default torch first waits a minute for a record of calls, which nobody keeps unless
/// asked to, and then ends the process, without a word to the others. Read from the environment when a group is made; what the user
/// has set stays.
class AbortOnTimeout {
 public:
  AbortOnTimeout() {
    set("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2");
    if (std::getenv("TORCH_NCCL_TRACE_BUFFER_SIZE") == nullptr &&
        std::getenv("TORCH_FR_BUFFER_SIZE") == nullptr)
      set("TORCH_NCCL_DUMP_ON_TIMEOUT", "0");
  }
  ~AbortOnTimeout() {
    for (const char* name : set_) ::unsetenv(name);
  }
  AbortOnTimeout(const AbortOnTimeout&) = delete;
  AbortOnTimeout& operator=(const AbortOnTimeout&) = delete;

 private:
  void set(const char* name, const char* value) {
    if (std::getenv(name) != nullptr) return;
    ::setenv(name, value, 0);
    set_.push_back(name);
  }
  std::vector<const char*> set_;
};

/// A group of one rank: what it sends is its own, so that opening it takes no time, and no memory of NCCL's.
class AloneOnDevice : public Communicator, public Breakable {
 public:
  explicit AloneOnDevice(const GroupOptions& options)
      : name_(options.name), board_(options.board) {}

  int rank() const override { return 0; }
  int size() const override { return 1; }
  const std::string& name() const override { return name_; }
  void break_connections() noexcept override { broken_ = true; }

  WorkPtr exchange(int to, std::vector<ConstBuffer> send, int from,
                   std::vector<Buffer> recv) override {
    check_exchange(*this, to, send, from, recv);
    const std::string call =
        count(describe_exchange(exchanges_++, to, part_bytes(send), from, part_bytes(recv)));
    MT_CHECK_ARG(part_bytes(send) == part_bytes(recv), call, ": does not match itself");
    for (size_t p = 0; p < send.size(); ++p) copy(send[p], recv[p]);
    return done();
  }
  WorkPtr all_gather(ConstBuffer send, std::vector<Buffer> recv) override {
    count(check_all_gather(*this, send, recv));
    copy(send, recv[0]);
    return done();
  }
  WorkPtr reduce_scatter(std::vector<ConstBuffer> send, Buffer recv, ElementType type) override {
    count(check_reduce_scatter(*this, send, recv, type));
    copy(send[0], recv);
    return done();
  }
  WorkPtr all_reduce(Buffer data, ElementType type, ReduceOp op) override {
    count(check_all_reduce(*this, data, type, op));
    return done();
  }
  WorkPtr broadcast(Buffer data, int root) override {
    count(check_broadcast(*this, data, root));
    return done();
  }
  void barrier() override { count(Call{}); }

 private:
  class Done : public Work {
   public:
    Done() { event_.record(); }
    void wait() override { event_.block(c10::cuda::getCurrentCUDAStream()); }

   private:
    at::cuda::CUDAEvent event_;
  };
  static WorkPtr done() { return std::make_unique<Done>(); }
  void copy(const ConstBuffer& from, const Buffer& to) const {
    if (from.bytes == 0 || from.data == to.data) return;
    const at::Device device(at::kCUDA, c10::cuda::current_device());
    wrap_bytes(to.data, to.bytes, device).copy_(wrap_bytes(from.data, from.bytes, device), true);
  }
  void count(Call call) {
    call.sequence = collectives_++;
    count(describe(call));
  }
  std::string count(const std::string& call) {
    const std::string text = concat("communicator '", name_, "' rank 0, ", call);
    if (broken_) board_->raise(text, "the communicator is closed");
    ++counters_.calls;
    return text;
  }

  const std::string name_;
  FailureBoardPtr board_;
  std::atomic<bool> broken_{false};
  int64_t exchanges_ = 0, collectives_ = 0;
};

}  // namespace

void* current_cuda_stream() { return c10::cuda::getCurrentCUDAStream().stream(); }

CommunicatorPtr make_nccl_group(const GroupOptions& options) {
  if (options.size == 1) return std::make_shared<AloneOnDevice>(options);
  // High priority: a transfer must not queue behind a kernel's thread blocks.
  auto nccl = c10d::ProcessGroupNCCL::Options::create(/*is_high_priority_stream=*/true);
  nccl->timeout = options.timeout;
  const AbortOnTimeout mode;
  auto group =
      c10::make_intrusive<c10d::ProcessGroupNCCL>(options.store, options.rank, options.size, nccl);
  // Connects now, on all members: otherwise the first call would, and a first call that is no collective could hang.
  group->eagerConnectSingleDevice({at::kCUDA, c10::cuda::current_device()});
  return std::make_shared<NcclCommunicator>(options, std::move(group));
}

}  // namespace mtraining::comm::c10d_detail
#endif  // USE_C10D_NCCL
