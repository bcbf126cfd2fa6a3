// MirroredTransport: host buffers in and out of communicators over device memory, so that the laws of host memory can be asked of them.
//
// In:   a Transport over device memory. Out: one over host memory, whose every call goes through it. Next: loopback_device_test.cc,
//       peer_copies_test.cc.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "mtraining/base/check.h"
#include "mtraining/comm/transport.h"

namespace mtraining::comm::mirrored {

using std::chrono::milliseconds;

inline void run(cudaError_t error, const char* what) {
  MT_CHECK_EXTERNAL(error == cudaSuccess, what, ": ", cudaGetErrorString(error));
}

/// A stream of the rank's thread; the transport asks for it.
inline thread_local cudaStream_t stream_of_thread = nullptr;
class ThreadStream {
 public:
  ThreadStream() {
    run(cudaStreamCreateWithFlags(&stream_of_thread, cudaStreamNonBlocking), "making a stream");
  }
  ~ThreadStream() {
    cudaStreamSynchronize(stream_of_thread);
    cudaStreamDestroy(stream_of_thread);
    stream_of_thread = nullptr;
  }
};

class OnDevice {
 public:
  explicit OnDevice(int64_t bytes) : bytes_(bytes) {
    run(cudaMalloc(&data_, static_cast<size_t>(std::max<int64_t>(bytes, 1))), "cudaMalloc");
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  ~OnDevice() { cudaFree(data_); }
  void* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  void put(const void* from) const {
    run(cudaMemcpyAsync(data_, from, static_cast<size_t>(bytes_), cudaMemcpyHostToDevice,
                        stream_of_thread),
        "to the device");
  }
  void get(void* to) const {
    run(cudaMemcpyAsync(to, data_, static_cast<size_t>(bytes_), cudaMemcpyDeviceToHost,
                        stream_of_thread),
        "from the device");
    run(cudaStreamSynchronize(stream_of_thread), "waiting for the device");
  }

 private:
  void* data_ = nullptr;
  int64_t bytes_;
};
using OnDevicePtr = std::unique_ptr<OnDevice>;

/// Host buffers in and out of a communicator over device memory, so that the laws of host memory can be asked of it.
class Mirrored : public Communicator {
 public:
  explicit Mirrored(CommunicatorPtr inner) : inner_(std::move(inner)) {}
  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  const std::string& name() const override { return inner_->name(); }

  WorkPtr exchange(int to, std::vector<ConstBuffer> send, int from,
                   std::vector<Buffer> recv) override {
    Parts parts = mirrored(send, recv);
    WorkPtr work = inner_->exchange(to, parts.send, from, parts.recv);
    return finished_later(std::move(work), std::move(parts));
  }
  WorkPtr all_gather(ConstBuffer send, std::vector<Buffer> recv) override {
    Parts parts = mirrored({send}, recv);
    WorkPtr work = inner_->all_gather(parts.send[0], parts.recv);
    return finished_later(std::move(work), std::move(parts));
  }
  WorkPtr reduce_scatter(std::vector<ConstBuffer> send, Buffer recv, ElementType type) override {
    Parts parts = mirrored(send, {recv});
    WorkPtr work = inner_->reduce_scatter(parts.send, parts.recv[0], type);
    return finished_later(std::move(work), std::move(parts));
  }
  WorkPtr all_reduce(Buffer data, ElementType type, ReduceOp op) override {
    Parts parts = in_place(data);
    WorkPtr work = inner_->all_reduce(parts.recv[0], type, op);
    return finished_later(std::move(work), std::move(parts));
  }
  WorkPtr broadcast(Buffer data, int root) override {
    Parts parts = in_place(data);
    WorkPtr work = inner_->broadcast(parts.recv[0], root);
    return finished_later(std::move(work), std::move(parts));
  }
  void barrier() override {
    inner_->barrier();
    counters_ = inner_->counters();
  }

 private:
  struct Parts {
    std::vector<OnDevicePtr> memory;
    std::vector<ConstBuffer> send;
    std::vector<Buffer> recv, host;
    std::vector<const OnDevice*> received;
  };
  static Parts mirrored(const std::vector<ConstBuffer>& send, const std::vector<Buffer>& recv) {
    Parts parts;
    for (const ConstBuffer& part : send) {
      parts.memory.push_back(std::make_unique<OnDevice>(part.bytes));
      if (part.bytes > 0) parts.memory.back()->put(part.data);
      parts.send.push_back({parts.memory.back()->data(), part.bytes});
    }
    for (const Buffer& part : recv) add_received(parts, part);
    return parts;
  }
  static Parts in_place(const Buffer& data) {
    Parts parts;
    add_received(parts, data);
    if (data.bytes > 0) parts.memory.back()->put(data.data);
    return parts;
  }
  static void add_received(Parts& parts, const Buffer& part) {
    parts.memory.push_back(std::make_unique<OnDevice>(part.bytes));
    parts.received.push_back(parts.memory.back().get());
    parts.recv.push_back({parts.memory.back()->data(), part.bytes});
    parts.host.push_back(part);
  }

  class Later : public Work {
   public:
    Later(WorkPtr work, Parts parts) : parts_(std::move(parts)), work_(std::move(work)) {}
    void wait() override {
      work_->wait();
      for (size_t p = 0; p < parts_.host.size(); ++p)
        if (parts_.host[p].bytes > 0) parts_.received[p]->get(parts_.host[p].data);
    }

   private:
    Parts parts_;
    WorkPtr work_;  // goes first
  };
  WorkPtr finished_later(WorkPtr work, Parts parts) {
    counters_ = inner_->counters();
    return std::make_unique<Later>(std::move(work), std::move(parts));
  }

  CommunicatorPtr inner_;
};

class MirroredTransport : public Transport {
 public:
  /// copies: of the inner one's open_copies().
  explicit MirroredTransport(Transport& inner, bool copies = false)
      : inner_(inner), copies_(copies) {}
  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  milliseconds timeout() const override { return inner_.timeout(); }
  CommunicatorPtr open(const std::string& name, const std::vector<int>& members) override {
    CommunicatorPtr opened =
        copies_ ? inner_.open_copies(name, members) : inner_.open(name, members);
    return opened ? std::make_shared<Mirrored>(opened) : nullptr;
  }
  void abort(const std::string& cause) noexcept override { inner_.abort(cause); }

 private:
  Transport& inner_;
  bool copies_;
};

}  // namespace mtraining::comm::mirrored
