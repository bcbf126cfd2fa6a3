#include "mtraining/optim/flat_parameters.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <unordered_set>

#include "mtraining/base/check.h"

namespace mtraining::optim {

FlatParameters::FlatParameters(std::vector<Named> parameters) : parameters_(std::move(parameters)) {
  std::unordered_set<const void*> seen;
  int64_t total = 0;
  for (const Named& p : parameters_) {
    MT_CHECK_ARG(p.value.defined() && p.value.is_leaf() && p.value.requires_grad(), "parameter ",
                 p.name, ": expected a leaf that requires a gradient");
    MT_CHECK_ARG(seen.insert(p.value.unsafeGetTensorImpl()).second, "parameter ", p.name,
                 " is listed twice");
    segments_.push_back({p.name, total, p.value.numel(), p.value.dim() >= 2});
    total += p.value.numel();
  }
  MT_CHECK_ARG(total > 0, "parameters: expected at least one, got none");
  const at::TensorOptions options =
      parameters_.front().value.options().dtype(at::kFloat).requires_grad(false);
  master_ = at::empty({total}, options);
  gradient_ = at::zeros({total}, options);
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const Segment& s = segments_[i];
    at::Tensor& value = parameters_[i].value;
    at::Tensor place = master_.narrow(0, s.begin, s.size).view(value.sizes());
    place.copy_(value.detach());
    if (value.scalar_type() == at::kFloat) {
      value.set_data(place);
      value.mutable_grad() = gradient_.narrow(0, s.begin, s.size).view(value.sizes());
    }
  }
}

void FlatParameters::zero_gradient() { gradient_.zero_(); }

void FlatParameters::collect_gradient() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    at::Tensor& value = parameters_[i].value;
    const Segment& s = segments_[i];
    at::Tensor place = gradient_.narrow(0, s.begin, s.size);
    if (value.scalar_type() == at::kFloat) {
      // Autograd replaces .grad instead of adding to it where grad mode is on in backward; that would lose the gradient here.
      MT_ASSERT(value.grad().defined() && value.grad().data_ptr() == place.data_ptr(), s.name,
                ": its gradient has left the flat vector");
      continue;
    }
    if (!value.grad().defined()) continue;
    place.add_(value.grad().reshape({-1}).to(at::kFloat));
    value.mutable_grad() = at::Tensor();
  }
}

void FlatParameters::publish() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    at::Tensor& value = parameters_[i].value;
    if (value.scalar_type() == at::kFloat) continue;
    value.detach().copy_(
        master_.narrow(0, segments_[i].begin, segments_[i].size).view(value.sizes()));
  }
}

void all_reduce_buckets(at::Tensor& flat, comm::Communicator& group, int64_t bucket_bytes) {
  MT_CHECK_ARG(flat.scalar_type() == at::kFloat && flat.is_contiguous(),
               "gradient: expected a contiguous float32 vector, got ", flat.scalar_type());
  if (group.size() == 1) return;
  const int64_t step = std::max<int64_t>(1, bucket_bytes / 4);
  float* data = flat.data_ptr<float>();
  comm::WorkPtr before;
  for (int64_t begin = 0; begin < flat.numel(); begin += step) {
    const int64_t count = std::min(step, flat.numel() - begin);
    comm::WorkPtr work = group.all_reduce({data + begin, count * 4}, comm::ElementType::kFloat32,
                                          comm::ReduceOp::kSum);
    if (before) before->wait();
    before = std::move(work);
  }
  if (before) before->wait();
}

}  // namespace mtraining::optim
