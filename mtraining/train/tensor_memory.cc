#include "mtraining/train/tensor_memory.h"

#include <c10/core/Allocator.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>

namespace mtraining::train {

/// Atomic: a GPU's backward runs in a thread of its own, which inherits the counter.
class TensorMemory::Counter : public c10::MemoryReportingInfoBase {
 public:
  explicit Counter(c10::DeviceType device) : device_(device) {}

  void reportMemoryUsage(void*, int64_t bytes, size_t, size_t, c10::Device device) override {
    if (device.type() != device_) return;
    const int64_t now = live_.fetch_add(bytes) + bytes;
    int64_t peak = peak_.load();
    while (now > peak && !peak_.compare_exchange_weak(peak, now)) {
    }
  }
  bool memoryProfilingEnabled() const override { return true; }

  int64_t live() const { return live_.load(); }
  int64_t peak() const { return peak_.load(); }
  void reset_peak() { peak_.store(live_.load()); }

 private:
  c10::DeviceType device_;
  std::atomic<int64_t> live_{0}, peak_{0};
};

TensorMemory::TensorMemory(c10::DeviceType device) : counter_(std::make_shared<Counter>(device)) {}

int64_t TensorMemory::live_bytes() const { return counter_->live(); }
int64_t TensorMemory::peak_bytes() const { return counter_->peak(); }
void TensorMemory::reset_peak() { counter_->reset_peak(); }

TensorMemory::Scope::Scope(TensorMemory& memory)
    : guard_(c10::DebugInfoKind::PROFILER_STATE, memory.counter_) {}

int64_t peak_resident_bytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss * 1024;
}

}  // namespace mtraining::train
