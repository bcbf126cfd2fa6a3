#include "mtraining/model/random_tensor.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "mtraining/base/check.h"
#include "mtraining/base/parallel.h"
#ifdef MT_WITH_CUDA
#include "mtraining/attention/tensors.h"
#include "mtraining/kernels/elementwise_cuda/random_normal.h"
#endif

namespace mtraining::model {
namespace {

void fill_on_host(const Rng& rng, double deviation, at::Tensor& values) {
  auto* data = values.data_ptr<float>();
  const int64_t count = values.numel(), part = int64_t{1} << 16;
  parallel_for((count + part - 1) / part, [&](int64_t index, int) {
    const int64_t end = std::min(count, (index + 1) * part);
    for (int64_t i = index * part; i < end; ++i)
      data[i] = static_cast<float>(deviation * rng.normal(static_cast<uint64_t>(i)));
  });
}

}  // namespace

at::Tensor random_normal(const Rng& rng, at::IntArrayRef shape, double deviation, at::Device device,
                         at::ScalarType dtype) {
#ifdef MT_WITH_CUDA
  if (device.is_cuda()) {
    at::Tensor there = at::empty(shape, at::TensorOptions(dtype).device(device));
    kernels::elementwise_cuda::random_normal(
        rng, deviation, there.numel(), attention::kernel_dtype(there, "random values"),
        there.mutable_data_ptr(), attention::current_stream(device));
    return there;
  }
#endif
  MT_ASSERT(device.is_cpu(), "random values on ", device.str());
  at::Tensor values = at::empty(shape, at::kFloat);
  fill_on_host(rng, deviation, values);
  return values.to(dtype);
}

}  // namespace mtraining::model
