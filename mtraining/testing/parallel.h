// parallel_for: runs independent iterations on a few threads, for oracles.
//
// In:   a count and a body(index) whose iterations write disjoint memory. Out: all ran; the first exception is rethrown.
// Next: oracle.cc, plain.cc.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace mtraining::testing {

template <typename Body>
void parallel_for(int64_t count, const Body& body) {
  constexpr int64_t kGrain = 16;
  const int64_t threads = std::min<int64_t>(2, (count + kGrain - 1) / kGrain);
  std::atomic<int64_t> next{0};
  std::exception_ptr failure;
  std::mutex mutex;
  const auto work = [&] {
    try {
      for (int64_t begin; (begin = next.fetch_add(kGrain)) < count;)
        for (int64_t i = begin; i < std::min(begin + kGrain, count); ++i) body(i);
    } catch (...) {
      std::lock_guard lock(mutex);
      if (!failure) failure = std::current_exception();
      next = count;
    }
  };
  std::vector<std::thread> pool;
  for (int64_t t = 1; t < threads; ++t) pool.emplace_back(work);
  work();
  for (std::thread& thread : pool) thread.join();
  if (failure) std::rethrow_exception(failure);
}

}  // namespace mtraining::testing
