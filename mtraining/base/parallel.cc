#include "mtraining/base/parallel.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "mtraining/base/check.h"

namespace mtraining {
namespace {

thread_local int thread_count = 0;  // 0: not set, the default
thread_local bool inside_body = false;

// One parallel_for call. Workers that arrive late find no index left and go away.
struct Loop {
  const std::function<void(int64_t, int)>* body = nullptr;
  int64_t count = 0;
  std::atomic<int64_t> next{0};
  std::atomic<int> next_worker{1};  // the caller is worker 0
  std::atomic<bool> failed{false};
  int wanted = 0;   // workers that may still join; guarded by the pool's mutex
  int running = 0;  // workers inside; guarded by the pool's mutex
  std::mutex error_mutex;
  std::exception_ptr error;

  void work(int worker) {
    const bool was_inside = inside_body;
    inside_body = true;
    while (!failed.load(std::memory_order_relaxed)) {
      const int64_t index = next.fetch_add(1, std::memory_order_relaxed);
      if (index >= count) break;
      try {
        (*body)(index, worker);
      } catch (...) {
        const std::lock_guard<std::mutex> lock(error_mutex);
        if (!error) error = std::current_exception();
        failed = true;
      }
    }
    inside_body = was_inside;
  }
};

class Pool {
 public:
  static Pool& instance() {
    static Pool pool;
    return pool;
  }

  void run(Loop& loop, int helpers) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      loop.wanted = helpers;
      waiting_.push_back(&loop);
      wanted_ += helpers;
      // Loops of several callers overlap: enough threads for all, never fewer than before.
      while (static_cast<int>(threads_.size()) < wanted_ + busy_) {
        threads_.emplace_back([this] { serve(); });
      }
    }
    wake_.notify_all();
    loop.work(0);
    std::unique_lock<std::mutex> lock(mutex_);
    const auto it = std::find(waiting_.begin(), waiting_.end(), &loop);
    if (it != waiting_.end()) {
      wanted_ -= loop.wanted;
      waiting_.erase(it);
    }
    done_.wait(lock, [&] { return loop.running == 0; });
  }

 private:
  Pool() = default;
  ~Pool() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      wake_.wait(lock, [&] { return stop_ || !waiting_.empty(); });
      if (stop_) return;
      Loop* loop = waiting_.front();
      --wanted_;
      if (--loop->wanted == 0) waiting_.pop_front();
      ++loop->running;
      ++busy_;
      lock.unlock();
      loop->work(loop->next_worker.fetch_add(1));
      lock.lock();
      --busy_;
      if (--loop->running == 0) done_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::deque<Loop*> waiting_;  // loops that take more workers
  std::vector<std::thread> threads_;
  int wanted_ = 0;
  int busy_ = 0;
  bool stop_ = false;
};

}  // namespace

int num_threads() {
  if (inside_body) return 1;
  if (thread_count > 0) return thread_count;
  static const int cores = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  return cores;
}

void set_num_threads(int count) {
  MT_CHECK_ARG(count >= 1, "set_num_threads: expected at least 1 thread, got ", count);
  thread_count = count;
}

ThreadCountScope::ThreadCountScope(int count) : saved_(thread_count) { set_num_threads(count); }
ThreadCountScope::~ThreadCountScope() { thread_count = saved_; }

void parallel_for(int64_t count, const std::function<void(int64_t index, int worker)>& body) {
  if (count <= 0) return;
  const int helpers = static_cast<int>(std::min<int64_t>(num_threads(), count)) - 1;
  Loop loop;
  loop.body = &body;
  loop.count = count;
  if (helpers == 0) {
    loop.work(0);
  } else {
    Pool::instance().run(loop, helpers);
  }
  if (loop.error) std::rethrow_exception(loop.error);
}

}  // namespace mtraining
