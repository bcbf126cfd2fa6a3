#include "mtraining/optim/optimizer_storage.h"

#include <ATen/ATen.h>

namespace mtraining::optim {
namespace {

class ResidentStorage : public OptimizerStorage {
 public:
  explicit ResidentStorage(at::Device device) : device_(device) {}
  at::Device device() const override { return device_; }
  at::Tensor zeros(int64_t size) const override {
    return at::zeros({size}, at::TensorOptions(at::kFloat).device(device_));
  }
  at::Tensor bring(const at::Tensor& values) const override { return values.to(at::kFloat); }

 private:
  at::Device device_;
};

class HostStorage : public OptimizerStorage {
 public:
  at::Device device() const override { return at::kCPU; }
  at::Tensor zeros(int64_t size) const override { return at::zeros({size}, at::kFloat); }
  at::Tensor bring(const at::Tensor& values) const override {
    return values.to(at::TensorOptions(at::kFloat).device(at::kCPU));
  }
};

}  // namespace

std::shared_ptr<const OptimizerStorage> make_optimizer_storage(at::Device parameters,
                                                               bool offload) {
  if (offload) return std::make_shared<HostStorage>();
  return std::make_shared<ResidentStorage>(parameters);
}

}  // namespace mtraining::optim
