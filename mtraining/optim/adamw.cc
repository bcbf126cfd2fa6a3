#include "mtraining/optim/adamw.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "mtraining/base/check.h"

namespace mtraining::optim {

void check(const AdamWOptions& options) {
  const auto beta = [](const char* which, double value) {
    MT_CHECK_ARG(value >= 0 && value < 1, "optim.betas: expected ", which, " in [0, 1), got ",
                 value);
  };
  beta("the first", options.beta1);
  beta("the second", options.beta2);
  MT_CHECK_ARG(options.eps > 0 && std::isfinite(options.eps),
               "optim.eps: expected a finite number above 0, got ", options.eps);
  MT_CHECK_ARG(options.weight_decay >= 0 && std::isfinite(options.weight_decay),
               "optim.weight_decay: expected a finite number of at least 0, got ",
               options.weight_decay);
}

AdamW::AdamW(const AdamWOptions& options, FlatParameters& parameters)
    : options_(options),
      parameters_(parameters),
      first_(at::zeros_like(parameters.master())),
      second_(at::zeros_like(parameters.master())) {
  check(options_);
}

void AdamW::step(double lr) {
  ++steps_;
  const at::Tensor& gradient = parameters_.gradient();
  at::Tensor& master = parameters_.master();
  first_.mul_(options_.beta1).add_(gradient, 1 - options_.beta1);
  second_.mul_(options_.beta2).addcmul_(gradient, gradient, 1 - options_.beta2);
  const double correction1 = 1 - std::pow(options_.beta1, static_cast<double>(steps_));
  const double correction2 = 1 - std::pow(options_.beta2, static_cast<double>(steps_));
  if (options_.weight_decay > 0) {
    for (const Segment& s : parameters_.segments()) {
      if (s.decays) master.narrow(0, s.begin, s.size).mul_(1 - lr * options_.weight_decay);
    }
  }
  const at::Tensor denominator = second_.div(correction2).sqrt_().add_(options_.eps);
  master.addcdiv_(first_, denominator, -lr / correction1);
  parameters_.publish();
}

std::vector<OptimizerShard> AdamW::shards() {
  return {{0, parameters_.size(), parameters_.master(), first_, second_, true}};
}

void AdamW::restored(int64_t steps_taken) {
  MT_CHECK_ARG(steps_taken >= 0, "optimizer steps: expected at least 0, got ", steps_taken);
  steps_ = steps_taken;
  parameters_.publish();
}

double global_norm(const at::Tensor& flat) {
  constexpr int64_t kChunk = int64_t{1} << 22;  // bounds the float64 copy
  double squares = 0;
  for (int64_t begin = 0; begin < flat.numel(); begin += kChunk) {
    const at::Tensor part = flat.slice(0, begin, std::min(begin + kChunk, flat.numel()));
    squares += part.to(at::kDouble).square_().sum().item<double>();
  }
  return std::sqrt(squares);
}

void clip_by_norm(at::Tensor& flat, double norm, double clip_norm) {
  if (clip_norm > 0 && norm > clip_norm) flat.mul_(clip_norm / norm);
}

}  // namespace mtraining::optim
