#include "mtraining/base/parallel.h"

#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <thread>
#include <vector>

#include "mtraining/base/check.h"

namespace mtraining {
namespace {

TEST(ParallelFor, RunsEveryIndexOnce) {
  for (const int threads : {1, 2, 3, 8}) {
    const ThreadCountScope scope(threads);
    for (const int64_t count : {0, 1, 2, 7, 1000}) {
      std::vector<std::atomic<int>> seen(count);
      std::atomic<bool> worker_in_range{true};
      parallel_for(count, [&](int64_t i, int worker) {
        ++seen[i];
        if (worker < 0 || worker >= threads) worker_in_range = false;
      });
      for (int64_t i = 0; i < count; ++i) EXPECT_EQ(seen[i], 1) << i;
      EXPECT_TRUE(worker_in_range);
    }
  }
}

TEST(ParallelFor, NoTwoIndicesShareAWorkerAtOneTime) {
  const ThreadCountScope scope(4);
  std::vector<std::atomic<int>> busy(4);
  std::atomic<bool> shared{false};
  parallel_for(2000, [&](int64_t, int worker) {
    if (busy[worker].fetch_add(1) != 0) shared = true;
    busy[worker].fetch_sub(1);
  });
  EXPECT_FALSE(shared);
}

TEST(ParallelFor, ABodyMayWaitForALowerIndex) {
  const ThreadCountScope scope(3);
  for (int round = 0; round < 50; ++round) {
    std::vector<std::atomic<bool>> done(40);
    parallel_for(40, [&](int64_t i, int) {
      while (i > 0 && !done[i - 1]) std::this_thread::yield();
      done[i] = true;
    });
    for (const auto& flag : done) EXPECT_TRUE(flag);
  }
}

TEST(ParallelFor, RethrowsTheFirstExceptionAndStops) {
  for (const int threads : {1, 3}) {
    const ThreadCountScope scope(threads);
    std::atomic<int64_t> ran{0};
    try {
      parallel_for(1'000'000, [&](int64_t i, int) {
        ++ran;
        if (i == 10) throw std::runtime_error("ten");
      });
      FAIL() << "no exception";
    } catch (const std::runtime_error& error) {
      EXPECT_STREQ(error.what(), "ten");
    }
    EXPECT_LT(ran, 1'000'000);
  }
}

TEST(ParallelFor, NestedCallsRunSerially) {
  const ThreadCountScope scope(2);
  std::atomic<int> inner{0};
  std::atomic<bool> serial{true};
  parallel_for(8, [&](int64_t, int) {
    if (num_threads() != 1) serial = false;
    parallel_for(5, [&](int64_t, int worker) {
      ++inner;
      if (worker != 0) serial = false;
    });
  });
  EXPECT_EQ(inner, 40);
  EXPECT_TRUE(serial);
  EXPECT_EQ(num_threads(), 2);
}

TEST(ParallelFor, SeveralCallersAtOnceEachWithTheirOwnThreadCount) {
  std::vector<std::thread> callers;
  std::vector<int64_t> sums(6, 0);
  for (int c = 0; c < 6; ++c) {
    callers.emplace_back([c, &sums] {
      set_num_threads(1 + c % 3);
      for (int round = 0; round < 20; ++round) {
        std::atomic<int64_t> sum{0};
        parallel_for(100, [&](int64_t i, int) { sum += i; });
        sums[c] += sum;
      }
      EXPECT_EQ(num_threads(), 1 + c % 3);
    });
  }
  for (std::thread& caller : callers) caller.join();
  for (const int64_t sum : sums) EXPECT_EQ(sum, 20 * 4950);
}

TEST(ThreadCount, MustBePositive) { EXPECT_THROW(set_num_threads(0), InvalidArgument); }

}  // namespace
}  // namespace mtraining
