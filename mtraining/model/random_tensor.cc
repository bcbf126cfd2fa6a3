#include "mtraining/model/random_tensor.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "mtraining/base/parallel.h"

namespace mtraining::model {
namespace {

constexpr int64_t kChunk = int64_t{1} << 22;

void fill_on_host(const Rng& rng, double deviation, at::Tensor& values) {
  auto* data = values.data_ptr<float>();
  const int64_t count = values.numel(), part = int64_t{1} << 16;
  parallel_for((count + part - 1) / part, [&](int64_t index, int) {
    const int64_t end = std::min(count, (index + 1) * part);
    for (int64_t i = index * part; i < end; ++i)
      data[i] = static_cast<float>(deviation * rng.normal(static_cast<uint64_t>(i)));
  });
}

constexpr int64_t as_signed(uint64_t value) { return static_cast<int64_t>(value); }

/// x ^= x >> 32 without the sign's bits; `scratch` as x.
void fold(at::Tensor& x, at::Tensor& scratch) {
  at::bitwise_right_shift_out(scratch, x, 32);
  x.bitwise_xor_(scratch.bitwise_and_(0xffffffffLL));
}
/// mix_bits() of base/rng.h; products wrap as unsigned ones do.
void mix(at::Tensor& x, at::Tensor& scratch) {
  for (int round = 0; round < 2; ++round) {
    fold(x, scratch);
    x.mul_(as_signed(0xd6e8feb86659fd93ULL));
  }
  fold(x, scratch);
}

/// Values [begin, begin + count) of the stream, float64.
at::Tensor normal_on_device(const Rng& rng, int64_t begin, int64_t count, at::Device device) {
  const at::TensorOptions options = at::TensorOptions(at::kLong).device(device);
  const at::Tensor first =
      at::arange(begin, begin + count, options).mul_(6).add_(as_signed(0x9e3779b97f4a7c15ULL));
  at::Tensor sum = at::zeros({count}, options), word = at::empty_like(sum),
             scratch = at::empty_like(sum);
  for (int64_t i = 0; i < 6; ++i) {
    word.copy_(first).add_(i);
    mix(word, scratch);
    word.bitwise_xor_(as_signed(rng.key()));
    mix(word, scratch);
    at::bitwise_right_shift_out(scratch, word, 32);
    sum.add_(scratch.bitwise_and_(0xffffffffLL)).add_(word.bitwise_and_(0xffffffffLL));
  }
  return sum.add_(6).to(at::kDouble).mul_(0x1p-32).sub_(6.0);
}

}  // namespace

at::Tensor random_normal_by_tensors(const Rng& rng, at::IntArrayRef shape, double deviation,
                                    at::Device device, at::ScalarType dtype) {
  at::Tensor values = at::empty(shape, at::TensorOptions(dtype).device(device));
  at::Tensor flat = values.view({-1});
  for (int64_t begin = 0; begin < flat.numel(); begin += kChunk) {
    const int64_t count = std::min(kChunk, flat.numel() - begin);
    flat.narrow(0, begin, count)
        .copy_(normal_on_device(rng, begin, count, device).mul_(deviation).to(at::kFloat));
  }
  return values;
}

at::Tensor random_normal(const Rng& rng, at::IntArrayRef shape, double deviation, at::Device device,
                         at::ScalarType dtype) {
  if (!device.is_cpu()) return random_normal_by_tensors(rng, shape, deviation, device, dtype);
  at::Tensor values = at::empty(shape, at::kFloat);
  fill_on_host(rng, deviation, values);
  return values.to(dtype);
}

}  // namespace mtraining::model
