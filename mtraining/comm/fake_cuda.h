// FakeCuda: CUDA's runtime as far as peer copies use it, on the host, for tests of what a device does rarely: be held up, and fail.
//
// In:   the calls themselves: a test that includes this defines them, and its executable takes them before the library's.
// Out:  streams whose work stands still while one of them is held; counts of what has been made and not given back.
// Next: peer_copies_host_test.cc.
//
// Work is done in the order of its stream, by whoever adds some or lets a held stream go. Ranks are threads that take themselves for
// processes: memory and events of another one are opened by handles. No kernels: sums are not to be had.
#pragma once

#include <cuda_runtime.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <set>

namespace mtraining::comm::fake_cuda {

struct EventState {
  uint64_t recorded = 0, done = 0;
};
using Op = std::function<bool()>;  // false: has to wait
struct StreamState {
  std::deque<Op> ops;
};
struct Device {
  std::mutex mutex;
  std::condition_variable moved;
  std::set<StreamState*> streams;
  std::set<void*> memory;
  int events = 0, mappings = 0;
  int waits_while_busy = 0;  // a device that stands still would have kept them for ever

  bool idle() const {
    for (const StreamState* stream : streams)
      if (!stream->ops.empty()) return false;
    return true;
  }
  void run() {
    for (bool moving = true; moving;) {
      moving = false;
      for (StreamState* stream : streams) {
        while (!stream->ops.empty() && stream->ops.front()()) {
          stream->ops.pop_front();
          moving = true;
        }
      }
    }
    moved.notify_all();
  }
  void add(StreamState* stream, Op op) {
    const std::lock_guard lock(mutex);
    stream->ops.push_back(std::move(op));
    run();
  }
};
inline Device& device() {
  static Device the_device;
  return the_device;
}
/// A stream of a test's rank; held: nothing that is added afterwards is done until release().
class Stream {
 public:
  Stream() {
    const std::lock_guard lock(device().mutex);
    device().streams.insert(&state_);
  }
  ~Stream() {
    const std::lock_guard lock(device().mutex);
    device().streams.erase(&state_);
  }
  void hold() {
    *held_ = true;
    device().add(&state_, [held = held_] { return !*held; });
  }
  void release() {
    const std::lock_guard lock(device().mutex);
    *held_ = false;
    device().run();
  }
  cudaStream_t get() { return reinterpret_cast<cudaStream_t>(&state_); }

 private:
  StreamState state_;
  std::shared_ptr<std::atomic<bool>> held_ = std::make_shared<std::atomic<bool>>(false);
};
/// The process that a thread takes itself for; 0: its own.
inline thread_local int process_of_thread = 0;

inline StreamState* state_of(cudaStream_t stream) { return reinterpret_cast<StreamState*>(stream); }
/// What an event is: a state that those who open it share.
using EventPointer = std::shared_ptr<EventState>;
inline EventPointer& state_of(cudaEvent_t event) { return *reinterpret_cast<EventPointer*>(event); }
inline cudaError_t new_event(cudaEvent_t* event, EventPointer state) {
  const std::lock_guard lock(device().mutex);
  ++device().events;
  *event = reinterpret_cast<cudaEvent_t>(new EventPointer(std::move(state)));
  return cudaSuccess;
}
template <typename Handle>
void* pointer_in(const Handle& handle) {
  void* pointer = nullptr;
  std::memcpy(&pointer, &handle, sizeof(pointer));
  return pointer;
}
template <typename Handle>
void put_pointer(Handle* handle, void* pointer) {
  std::memset(handle, 0, sizeof(*handle));
  std::memcpy(handle, &pointer, sizeof(pointer));
}
/// As the device does it that stands still: whoever needs all of its work waits, here for a while only.
inline void wait_for_device() {
  std::unique_lock lock(device().mutex);
  if (device().idle()) return;
  ++device().waits_while_busy;
  device().moved.wait_for(lock, std::chrono::seconds(5), [] { return device().idle(); });
}

}  // namespace mtraining::comm::fake_cuda

// NOLINTBEGIN: names are CUDA's
extern "C" {
using namespace mtraining::comm::fake_cuda;

pid_t getpid() noexcept {
  return process_of_thread != 0 ? process_of_thread : static_cast<pid_t>(::syscall(SYS_getpid));
}
cudaError_t cudaGetDevice(int* which) { return *which = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { return wait_for_device(), cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return *least = *greatest = 0, cudaSuccess;
}
cudaError_t cudaMalloc(void** memory, size_t bytes) {
  const std::lock_guard lock(device().mutex);
  *memory = std::calloc(bytes, 1);
  device().memory.insert(*memory);
  return cudaSuccess;
}
cudaError_t cudaFree(void* memory) {
  wait_for_device();
  const std::lock_guard lock(device().mutex);
  if (device().memory.erase(memory) == 0) return cudaErrorInvalidValue;
  std::free(memory);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  return std::memcpy(to, from, bytes), cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  device().add(state_of(stream), [=] { return std::memcpy(to, from, bytes), true; });
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  const std::lock_guard lock(device().mutex);
  auto* state = new StreamState;
  device().streams.insert(state);
  *stream = reinterpret_cast<cudaStream_t>(state);
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const std::lock_guard lock(device().mutex);
  device().streams.erase(state_of(stream));
  delete state_of(stream);
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  const std::lock_guard lock(device().mutex);
  return state_of(stream)->ops.empty() ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) { return wait_for_device(), cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  const EventPointer state = state_of(event);
  uint64_t wanted = 0;
  {
    const std::lock_guard lock(device().mutex);
    wanted = state->recorded;
  }
  device().add(state_of(stream), [=] { return state->done >= wanted; });
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  return new_event(event, std::make_shared<EventState>());
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  const std::lock_guard lock(device().mutex);
  --device().events;
  delete &state_of(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const EventPointer state = state_of(event);
  uint64_t number = 0;
  {
    const std::lock_guard lock(device().mutex);
    number = ++state->recorded;
  }
  device().add(state_of(stream), [=] { return state->done = std::max(state->done, number), true; });
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  const std::lock_guard lock(device().mutex);
  return state_of(event)->done >= state_of(event)->recorded ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* memory) {
  return put_pointer(handle, memory), cudaSuccess;
}
cudaError_t cudaIpcOpenMemHandle(void** memory, cudaIpcMemHandle_t handle, unsigned) {
  const std::lock_guard lock(device().mutex);
  ++device().mappings;
  *memory = pointer_in(handle);
  return cudaSuccess;
}
cudaError_t cudaIpcCloseMemHandle(void*) {
  const std::lock_guard lock(device().mutex);
  --device().mappings;
  return cudaSuccess;
}
cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t* handle, cudaEvent_t event) {
  return put_pointer(handle, event), cudaSuccess;
}
cudaError_t cudaIpcOpenEventHandle(cudaEvent_t* event, cudaIpcEventHandle_t handle) {
  return new_event(event, state_of(static_cast<cudaEvent_t>(pointer_in(handle))));
}
}
// NOLINTEND
