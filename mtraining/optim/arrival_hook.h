// ArrivalHook: calls a function when backward has finished a parameter's gradient.
//
// In:   a leaf, a function. Out: the function runs in backward, once the gradient is whole. Next: flat_parameters.cc,
//       sharded_parameters.cc.
#pragma once

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <functional>
#include <memory>
#include <utility>

namespace mtraining::optim {

class ArrivalHook : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit ArrivalHook(std::function<void()> arrived) : arrived_(std::move(arrived)) {}
  void operator()(const torch::autograd::Variable&) override { arrived_(); }

 private:
  std::function<void()> arrived_;
};

/// Replaces the leaf's hook; null takes it away.
inline void on_gradient(const at::Tensor& leaf, std::function<void()> arrived) {
  torch::autograd::impl::set_post_acc_grad_hooks(
      leaf, arrived ? std::make_unique<ArrivalHook>(std::move(arrived)) : nullptr);
}

}  // namespace mtraining::optim
