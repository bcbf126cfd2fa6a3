#include "cli/link_speed.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <future>
#include <mutex>
#include <numeric>
#include <thread>
#include <vector>

#ifdef MT_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

#include "mtraining/base/check.h"
#include "mtraining/comm/c10d.h"

namespace mtraining::cli {
namespace {

using Clock = std::chrono::steady_clock;

/// Memory of a rank: the host's, or of GPU `device`.
class Memory {
 public:
  Memory([[maybe_unused]] int device, int64_t bytes) {
    if (device < 0) {
      host_.assign(static_cast<size_t>(bytes), 1);
      data_ = host_.data();
      return;
    }
#ifdef MT_WITH_CUDA
    const cudaError_t error = cudaMalloc(&data_, static_cast<size_t>(bytes));
    MT_CHECK_EXTERNAL(error == cudaSuccess, "GPU ", device, ": ", cudaGetErrorString(error));
    on_gpu_ = true;
#endif
  }
  ~Memory() {
#ifdef MT_WITH_CUDA
    if (on_gpu_) cudaFree(data_);
#endif
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  void* data() const { return data_; }

 private:
  std::vector<char> host_;
  void* data_ = nullptr;
  [[maybe_unused]] bool on_gpu_ = false;
};

void enter_device([[maybe_unused]] int device) {
#ifdef MT_WITH_CUDA
  if (device >= 0) cudaSetDevice(device);
#endif
}

void wait_for_device([[maybe_unused]] int device) {
#ifdef MT_WITH_CUDA
  if (device < 0) return;
  const cudaError_t error = cudaDeviceSynchronize();
  MT_CHECK_EXTERNAL(error == cudaSuccess, "GPU ", device, ": ", cudaGetErrorString(error));
#endif
}

/// Seconds of one exchange: the shortest of `rounds`.
double best_of(comm::Communicator& group, int device, const Memory& send, const Memory& recv,
               int64_t bytes, int rounds) {
  const int next = (group.rank() + 1) % group.size();
  const int previous = (group.rank() + group.size() - 1) % group.size();
  double best = 1e30;
  for (int round = 0; round <= rounds; ++round) {  // the first one warms up
    const auto begin = Clock::now();
    group.exchange(next, {{send.data(), bytes}}, previous, {{recv.data(), bytes}})->wait();
    wait_for_device(device);
    const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    if (round > 0) best = std::min(best, seconds);
  }
  return best;
}

}  // namespace

LinkSpeed measure_link(const std::string& backend, int ranks, int64_t bytes, int rounds) {
  std::promise<int> port;
  const std::shared_future<int> known = port.get_future().share();
  std::vector<LinkSpeed> results(static_cast<size_t>(ranks));
  std::exception_ptr failure;
  std::mutex mutex;
  const auto run = [&](int rank) {
    std::unique_ptr<comm::Transport> transport;
    try {
      const bool copies = backend == "peer_copies";
      const int device = copies || backend == "nccl" ? rank : -1;
      enter_device(device);
      comm::C10dOptions options;
      options.backend = copies ? "nccl" : backend;
      options.rank = rank;
      options.size = ranks;
      options.timeout = std::chrono::seconds(30);
      options.share_port = [&](int own) {
        if (rank == 0) port.set_value(own);
        return known.get();
      };
      transport = comm::make_c10d(options);
      std::vector<int> members(static_cast<size_t>(ranks));
      std::iota(members.begin(), members.end(), 0);
      const comm::CommunicatorPtr group =
          copies ? transport->open_copies("doctor", members) : transport->open("doctor", members);
      const Memory send(device, bytes), recv(device, bytes);
      LinkSpeed& result = results[static_cast<size_t>(rank)];
      result.bytes_per_s =
          static_cast<double>(bytes) / best_of(*group, device, send, recv, bytes, rounds);
      result.small_us = best_of(*group, device, send, recv, 8, 20 * rounds) * 1e6;
      group->barrier();  // nobody reads a peer that has gone
    } catch (const std::exception& error) {
      if (transport) transport->abort(error.what());
      const std::scoped_lock lock(mutex);
      if (!failure) failure = std::current_exception();
      if (rank == 0 && known.wait_for(std::chrono::seconds(0)) != std::future_status::ready)
        port.set_exception(std::current_exception());
    }
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) threads.emplace_back(run, rank);
  for (std::thread& thread : threads) thread.join();
  if (failure) std::rethrow_exception(failure);
  LinkSpeed slowest = results.front();
  for (const LinkSpeed& result : results) {
    slowest.bytes_per_s = std::min(slowest.bytes_per_s, result.bytes_per_s);
    slowest.small_us = std::max(slowest.small_us, result.small_us);
  }
  return slowest;
}

}  // namespace mtraining::cli
