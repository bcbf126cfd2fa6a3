#include "bench/ring_ranks.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstring>

#include "bench/rows.h"
#include "bench/torch_device.h"
#include "mtraining/attention/tensors.h"
#include "mtraining/base/check.h"
#include "mtraining/base/parallel.h"
#include "mtraining/comm/call.h"
#include "mtraining/comm/loopback.h"
#ifdef MT_WITH_CUDA
#include "mtraining/comm/loopback_device.h"
#endif

namespace mtraining::bench {
namespace {

using namespace comm;  // NOLINT: a Transport of this file's own

class DoneWork : public Work {
 public:
  void wait() override {}
};

/// What every rank would have said is what this one says; nothing moves in device memory.
class AloneCommunicator : public Communicator {
 public:
  AloneCommunicator(std::string name, int size, bool on_host)
      : name_(std::move(name)), size_(size), on_host_(on_host) {}
  int rank() const override { return 0; }
  int size() const override { return size_; }
  const std::string& name() const override { return name_; }

  WorkPtr exchange(int to, std::vector<ConstBuffer> send, int from,
                   std::vector<Buffer> recv) override {
    check_exchange(*this, to, send, from, recv);
    for (const ConstBuffer& part : send) counters_.bytes_sent += to == 0 ? 0 : part.bytes;
    return std::make_unique<DoneWork>();
  }
  WorkPtr all_gather(ConstBuffer send, std::vector<Buffer> recv) override {
    count(check_all_gather(*this, send, recv));
    if (on_host_) {
      for (const Buffer& part : recv)
        std::memcpy(part.data, send.data, static_cast<size_t>(send.bytes));
    }
    return std::make_unique<DoneWork>();
  }
  WorkPtr reduce_scatter(std::vector<ConstBuffer> send, Buffer recv, ElementType type) override {
    count(check_reduce_scatter(*this, send, recv, type));
    return std::make_unique<DoneWork>();
  }
  WorkPtr all_reduce(Buffer data, ElementType type, ReduceOp op) override {
    count(check_all_reduce(*this, data, type, op));
    return std::make_unique<DoneWork>();
  }
  WorkPtr broadcast(Buffer data, int root) override {
    count(check_broadcast(*this, data, root));
    return std::make_unique<DoneWork>();
  }
  void barrier() override {}

 private:
  void count(const Call& call) { counters_.bytes_sent += payload_bytes(call, 0, size_); }

  std::string name_;
  int size_;
  bool on_host_;
};

class AloneTransport : public Transport {
 public:
  AloneTransport(int size, bool on_gpu) : size_(size), on_gpu_(on_gpu) {}
  int rank() const override { return 0; }
  int size() const override { return size_; }
  bool on_device() const override { return on_gpu_; }
  std::chrono::milliseconds timeout() const override { return std::chrono::minutes(1); }
  CommunicatorPtr open(const std::string& name, const std::vector<int>& members) override {
    return opened(name, members, !on_gpu_);
  }
  CommunicatorPtr open_host(const std::string& name, const std::vector<int>& members) override {
    return opened(name, members, true);
  }
  void abort(const std::string& /*cause*/) noexcept override {}

 private:
  CommunicatorPtr opened(const std::string& name, const std::vector<int>& members, bool on_host) {
    check_members(name, members, size_);
    if (members.front() != 0) return nullptr;
    return std::make_shared<AloneCommunicator>(name, static_cast<int>(members.size()), on_host);
  }
  int size_;
  bool on_gpu_;
};

LaunchPlace launch_place(const RingPlace& place) {
  LaunchPlace launch;
  launch.device = place.on_gpu ? "cuda" : "cpu";
  launch.threads = num_threads();
  return launch;
}

}  // namespace

void run_ranks(const RingPlace& place, const topology::Topology& topology,
               const std::function<void(Transport&, at::Device)>& body) {
  const int world = topology.cp_size();
  if (place.job != nullptr) {
    MT_CHECK_ARG(place.job->size() == world, "--topology: expected the job's ", place.job->size(),
                 " ranks, got ", topology::to_string(topology));
    // The job's GPU is current.
    const at::Device device =
        place.on_gpu ? c10::impl::VirtualGuardImpl(at::kCUDA).getDevice() : at::Device(at::kCPU);
    return body(*place.job, device);
  }
  const at::Device device = torch_device(launch_place(place));
  if (place.alone) {
    AloneTransport transport(world, place.on_gpu);
    return body(transport, device);
  }
  if (!place.on_gpu) {
    run_loopback(
        world, [&](Transport& transport) { body(transport, device); }, std::chrono::minutes(10));
    return;
  }
#ifdef MT_WITH_CUDA
  const c10::DeviceGuard guard(device);
  run_device_loopback(world,
                      [&](Transport& transport) {
                        const c10::impl::VirtualGuardImpl streams(device.type());
                        const c10::StreamGuard stream(streams.getStreamFromGlobalPool(device));
                        body(transport, device);
                        wait_for_stream(device);
                      },
                      {.current_stream = [device] { return attention::current_stream(device); },
                       .ranks_per_node = topology.ranks_per_node,
                       .inner_bytes_per_s = place.inner_bytes_per_s,
                       .outer_bytes_per_s = place.outer_bytes_per_s,
                       .timeout = std::chrono::minutes(10)});
#endif
}

std::string device_name(const RingPlace& place, const topology::Topology& topology) {
  const int world = topology.cp_size();
  if (!place.on_gpu && place.job == nullptr && !place.alone)
    return concat(cpu_name(world), " as ranks on ", num_threads(), " cores");
  const std::string name = device_name(launch_place(place));
  if (place.job != nullptr) return concat(world, " x ", name);
  if (place.alone) return concat(name, " as rank 0 of ", world);
  return concat(name, " as ", world, " ranks");
}

void wait_for_stream(at::Device device) {
  if (device.is_cpu()) return;
  c10::Event end(device.type(), c10::EventFlag::PYTORCH_DEFAULT);
  end.record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  end.synchronize();
}

}  // namespace mtraining::bench
