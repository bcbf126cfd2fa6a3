#include "mtraining/optim/host_update.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

namespace mtraining::optim {
namespace {

class TorchThreads {
 public:
  explicit TorchThreads(int64_t count) : before_(at::get_num_threads()) {
    if (count > 0) at::set_num_threads(static_cast<int>(count));
  }
  ~TorchThreads() { at::set_num_threads(before_); }
  TorchThreads(const TorchThreads&) = delete;
  TorchThreads& operator=(const TorchThreads&) = delete;

 private:
  int before_;
};

c10::impl::VirtualGuardImpl guard_of(const at::Tensor& tensor) {
  return c10::impl::VirtualGuardImpl(tensor.device().type());
}

}  // namespace

HostUpdate::HostUpdate(ParameterShare& parameters, int64_t most_elements, int64_t threads)
    : parameters_(parameters),
      threads_(threads),
      down_(
          guard_of(parameters.gradient()).getStreamFromGlobalPool(parameters.gradient().device())),
      up_(guard_of(parameters.gradient()).getStreamFromGlobalPool(parameters.gradient().device())),
      wide_(at::empty({most_elements}, at::kFloat)) {
  for (Place& place : places_) {
    const auto pinned = at::TensorOptions().pinned_memory(true);
    place.gradient = at::empty({most_elements}, pinned.dtype(parameters.gradient().scalar_type()));
    place.values = at::empty({most_elements}, pinned.dtype(parameters.parameter_dtype()));
  }
}

void HostUpdate::bring_down(const UpdateChunk& chunk, Place& place) {
  const c10::StreamGuard guard(down_);
  place.gradient.narrow(0, 0, chunk.size)
      .copy_(parameters_.gradient().narrow(0, chunk.begin, chunk.size), /*non_blocking=*/true);
  place.arrived.emplace(down_.device_type());
  place.arrived->record(down_);
}

void HostUpdate::run(const std::vector<UpdateChunk>& chunks,
                     const std::function<void(const UpdateChunk&, at::Tensor&)>& update) {
  const at::NoGradGuard no_grad;
  const TorchThreads threads(threads_);
  const at::Device device = parameters_.gradient().device();
  const c10::Stream current = guard_of(parameters_.gradient()).getStream(device);
  c10::Event complete(device.type());
  complete.record(current);
  complete.block(down_);
  complete.block(up_);
  for (size_t i = 0; i + 1 < std::min(kPlaces, chunks.size() + 1); ++i)
    bring_down(chunks[i], places_[i]);
  for (size_t i = 0; i < chunks.size(); ++i) {
    const UpdateChunk& chunk = chunks[i];
    Place& place = places_[i % kPlaces];
    const size_t ahead = i + kPlaces - 1;
    if (ahead < chunks.size()) bring_down(chunks[ahead], places_[ahead % kPlaces]);
    place.arrived->synchronize();
    at::Tensor gradient = wide_.narrow(0, 0, chunk.size);
    gradient.copy_(place.gradient.narrow(0, 0, chunk.size));
    update(chunk, gradient);
    if (place.left) place.left->synchronize();
    at::Tensor values = place.values.narrow(0, 0, chunk.size);
    values.copy_(parameters_.master().narrow(0, chunk.begin, chunk.size));
    const c10::StreamGuard guard(up_);
    parameters_.take(chunk.begin, values);
    place.left.emplace(device.type());
    place.left->record(up_);
  }
  c10::Event written(device.type());
  written.record(up_);
  written.block(current);
  parameters_.publish_taken();
}

}  // namespace mtraining::optim
