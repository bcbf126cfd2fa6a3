// parallel_for: a loop spread over a small persistent set of threads.
//
// In:   a number of indices and one body. Out: the body ran once for every index.
// Next: kernels/ref, and whatever else works on the CPU.
//
// The thread count belongs to the calling thread: a process that runs several ranks as threads
// gives each of them 1. No OpenMP, so that ThreadSanitizer sees everything.
#pragma once

#include <cstdint>
#include <functional>

namespace mtraining {

/// Threads that parallel_for uses when this thread calls it, itself included. Default: the cores
/// this process may use; 1 inside a parallel_for body.
int num_threads();
/// For the calling thread alone. Errors: InvalidArgument where count < 1.
void set_num_threads(int count);

/// Restores the calling thread's count when it goes out of scope.
class ThreadCountScope {
 public:
  explicit ThreadCountScope(int count);
  ~ThreadCountScope();
  ThreadCountScope(const ThreadCountScope&) = delete;
  ThreadCountScope& operator=(const ThreadCountScope&) = delete;

 private:
  int saved_;
};

/// Calls body(index, worker) for index in [0, count); worker in [0, num_threads()) names the
/// thread, for scratch memory. Indices are taken one at a time in ascending order: when an index
/// runs, every lower one runs or has run, so a body may wait for a lower index. Returns when all
/// have finished. The first exception stops the rest and is rethrown here. Thread-safe; a call from
/// inside a body runs serially.
void parallel_for(int64_t count, const std::function<void(int64_t index, int worker)>& body);

}  // namespace mtraining
