#include "mtraining/optim/parameter_share.h"

#include <ATen/ATen.h>

#include <unordered_set>

#include "mtraining/base/check.h"

namespace mtraining::optim {

ParameterShare::ParameterShare(std::vector<Named> parameters, const ShareOptions& options)
    : options_(options), parameters_(std::move(parameters)) {
  MT_CHECK_ARG(!parameters_.empty(), "parameters: expected at least one, got none");
  MT_CHECK_ARG(options_.grad_dtype == at::kFloat || options_.grad_dtype == at::kBFloat16,
               "optim.grad_dtype: expected \"float32\" or \"bf16\", got ", options_.grad_dtype);
  MT_CHECK_ARG(options_.bucket_bytes >= 1, "bucket_bytes: expected at least 1, got ",
               options_.bucket_bytes);
  std::unordered_set<const void*> seen;
  for (const Named& p : parameters_) {
    MT_CHECK_ARG(p.value.defined() && p.value.is_leaf() && p.value.requires_grad(), "parameter ",
                 p.name, ": expected a leaf that requires a gradient");
    MT_CHECK_ARG(seen.insert(p.value.unsafeGetTensorImpl()).second, "parameter ", p.name,
                 " is listed twice");
    MT_CHECK_ARG(
        p.value.scalar_type() == parameter_dtype() && p.value.device() == parameter_device(),
        "parameter ", p.name, ": expected ", parameter_dtype(), " on ", parameter_device(),
        " as the first, got ", p.value.scalar_type(), " on ", p.value.device());
    segments_.push_back({p.name, size_, p.value.numel(), p.value.dim() >= 2});
    size_ += p.value.numel();
  }
  MT_CHECK_ARG(size_ > 0, "parameters: expected at least one element, got none");
  storage_ = make_optimizer_storage(parameter_device(), options_.offload);
}

comm::ElementType element_type(at::ScalarType dtype) {
  MT_CHECK_SUPPORTED(dtype == at::kFloat || dtype == at::kBFloat16,
                     "parameters and gradients travel as float32 or bf16, not as ", dtype);
  return dtype == at::kFloat ? comm::ElementType::kFloat32 : comm::ElementType::kBFloat16;
}

}  // namespace mtraining::optim
