#include "mtraining/optim/flat_parameters.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "mtraining/base/check.h"
#include "mtraining/optim/arrival_hook.h"

namespace mtraining::optim {

FlatParameters::FlatParameters(std::vector<Named> parameters, const ShareOptions& options,
                               comm::Communicator* group)
    : ParameterShare(std::move(parameters), options), group_(group) {
  owned_ = {{0, size_, 0}};
  master_ = storage_->zeros(size_);
  gradient_ = at::zeros({size_}, at::TensorOptions(options_.grad_dtype).device(parameter_device()));
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const Segment& s = segments_[i];
    at::Tensor place = master_.narrow(0, s.begin, s.size).view(value(i).sizes());
    place.copy_(value(i).detach());
    if (values_are_views()) value(i).set_data(place);
    if (gradients_are_views()) {
      value(i).mutable_grad() = gradient_.narrow(0, s.begin, s.size).view(value(i).sizes());
    } else {
      on_gradient(value(i), [this, i] { add_gradient(i); });
    }
  }
}

FlatParameters::~FlatParameters() {
  // Parameters may outlive this.
  for (size_t i = 0; !gradients_are_views() && i < parameters_.size(); ++i)
    on_gradient(value(i), nullptr);
}

bool FlatParameters::values_are_views() const {
  return parameter_dtype() == at::kFloat && storage_->device() == parameter_device();
}
bool FlatParameters::gradients_are_views() const {
  return parameter_dtype() == at::kFloat && options_.grad_dtype == at::kFloat;
}

void FlatParameters::zero_gradient() {
  gradient_.zero_();
  if (gradients_are_views()) return;
  for (size_t i = 0; i < parameters_.size(); ++i) value(i).mutable_grad() = at::Tensor();
}

void FlatParameters::collect_gradient() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const Segment& s = segments_[i];
    at::Tensor place = gradient_.narrow(0, s.begin, s.size);
    if (gradients_are_views()) {
      // Autograd replaces .grad instead of adding to it where grad mode is on in backward; that would lose the gradient here.
      MT_ASSERT(value(i).grad().defined() && value(i).grad().data_ptr() == place.data_ptr(), s.name,
                ": its gradient has left the flat vector");
      continue;
    }
    if (value(i).grad().defined()) add_gradient(i);  // set by hand
  }
}

void FlatParameters::add_gradient(size_t id) {
  const at::NoGradGuard no_grad;
  const Segment& s = segments_[id];
  gradient_.narrow(0, s.begin, s.size).add_(value(id).grad().reshape({-1}));
  value(id).mutable_grad() = at::Tensor();
}

void FlatParameters::reduce_gradient() {
  if (group_ != nullptr) all_reduce_buckets(gradient_, *group_, options_.bucket_bytes);
}

void FlatParameters::publish() {
  if (values_are_views()) return;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const Segment& s = segments_[i];
    value(i).detach().copy_(master_.narrow(0, s.begin, s.size).view(value(i).sizes()));
  }
}

void FlatParameters::take(int64_t begin, const at::Tensor& values) {
  const at::NoGradGuard no_grad;
  for_each_part(segments_, begin, values.numel(),
                [&](size_t id, int64_t at, int64_t from, int64_t count) {
                  value(id)
                      .detach()
                      .view({-1})
                      .narrow(0, at, count)
                      .copy_(values.narrow(0, from, count), /*non_blocking=*/true);
                });
}

void all_reduce_buckets(at::Tensor& flat, comm::Communicator& group, int64_t bucket_bytes) {
  MT_CHECK_ARG(flat.is_contiguous(), "gradient: expected a contiguous vector, got strides ",
               flat.strides());
  const comm::ElementType type = element_type(flat.scalar_type());
  if (group.size() == 1) return;
  const int64_t element = comm::size_of(type);
  const int64_t step = std::max<int64_t>(1, bucket_bytes / element);
  auto* data = static_cast<char*>(flat.data_ptr());
  comm::WorkPtr before;
  for (int64_t begin = 0; begin < flat.numel(); begin += step) {
    const int64_t count = std::min(step, flat.numel() - begin);
    comm::WorkPtr work =
        group.all_reduce({data + begin * element, count * element}, type, comm::ReduceOp::kSum);
    if (before) before->wait();
    before = std::move(work);
  }
  if (before) before->wait();
}

}  // namespace mtraining::optim
