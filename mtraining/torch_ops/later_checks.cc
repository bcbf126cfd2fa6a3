#include "mtraining/torch_ops/later_checks.h"

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <deque>
#include <mutex>
#include <utility>
#include <vector>

namespace mtraining::torch_ops {
namespace {

struct Awaited {
  at::Device device;
  at::Tensor host;
  c10::Event came;
  NumberCheck check;
};

std::mutex& mutex() {
  static std::mutex mutex;
  return mutex;
}
std::deque<Awaited>& awaited() {
  // Never freed: when the process ends, the device may be gone before it.
  static auto* const all = new std::deque<Awaited>();
  return *all;
}

}  // namespace

void check_when_known(const at::Tensor& numbers, NumberCheck check) {
  if (numbers.is_cpu()) {
    check(numbers.const_data_ptr<int64_t>());
    return;
  }
  const at::Device device = numbers.device();
  Awaited one{device, numbers.to(at::kCPU, /*non_blocking=*/true),  // pinned
              c10::Event(device.type(), c10::EventFlag::PYTORCH_DEFAULT), std::move(check)};
  one.came.record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  const std::lock_guard<std::mutex> lock(mutex());
  awaited().push_back(std::move(one));
}

at::Tensor first_where(const at::Tensor& wrong, const at::Tensor& values) {
  const at::Tensor flat = wrong.flatten(),
                   place = at::arange(flat.numel(), flat.options().dtype(at::kLong));
  const at::Tensor first = at::where(flat, place, flat.numel()).min().view({1});
  const at::Tensor at = at::where(first.eq(flat.numel()), -1, first);
  return at::cat({at, values.flatten().index_select(0, at.clamp_min(0)).to(at::kLong)});
}

void check_what_came(at::Device device) {
  std::vector<Awaited> came;
  {
    const std::lock_guard<std::mutex> lock(mutex());
    std::deque<Awaited> others;
    for (Awaited& one : awaited()) {
      if (one.device == device && one.came.query()) {
        came.push_back(std::move(one));
      } else {
        others.push_back(std::move(one));
      }
    }
    awaited() = std::move(others);
  }
  for (const Awaited& one : came) one.check(one.host.const_data_ptr<int64_t>());
}

}  // namespace mtraining::torch_ops
