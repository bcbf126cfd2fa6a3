#include "mtraining/optim/adamw.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "mtraining/base/check.h"

namespace mtraining::optim {
namespace {

constexpr int64_t kChunk = int64_t{1} << 22;  // bounds copies in another dtype or on another device

}  // namespace

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

AdamW::AdamW(const AdamWOptions& options, ParameterShare& parameters)
    : options_(options),
      parameters_(parameters),
      first_(parameters.storage().zeros(parameters.master().numel())),
      second_(parameters.storage().zeros(parameters.master().numel())) {
  check(options_);
  for (const OwnedRange& owned : parameters_.owned()) {
    for (const Segment& s : parameters_.segments()) {
      const int64_t begin = std::max(owned.begin, s.begin),
                    end = std::min(owned.end, s.begin + s.size);
      if (begin >= end) continue;
      const int64_t offset = owned.offset + begin - owned.begin;
      const bool decays = s.decays && options_.weight_decay > 0;
      if (!runs_.empty() && runs_.back().decays == decays &&
          runs_.back().offset + runs_.back().size == offset) {
        runs_.back().size += end - begin;
      } else {
        runs_.push_back({offset, end - begin, decays});
      }
    }
  }
}

void AdamW::step(double lr, double gradient_scale) {
  ++steps_;
  const OptimizerStorage& storage = parameters_.storage();
  const at::Tensor count = at::full({}, static_cast<double>(steps_),
                                    at::TensorOptions(at::kFloat).device(storage.device()));
  for (const Run& run : runs_) {
    for (int64_t begin = run.offset; begin < run.offset + run.size; begin += kChunk) {
      const int64_t size = std::min(kChunk, run.offset + run.size - begin);
      const auto part = [&](const at::Tensor& vector) { return vector.narrow(0, begin, size); };
      at::Tensor gradient = storage.bring(part(parameters_.gradient()));
      if (gradient_scale != 1) gradient.mul_(gradient_scale);
      at::_fused_adamw_({part(parameters_.master())}, {gradient}, {part(first_)}, {part(second_)},
                        {}, {count}, lr, options_.beta1, options_.beta2,
                        run.decays ? options_.weight_decay : 0, options_.eps, /*amsgrad=*/false,
                        /*maximize=*/false);
    }
  }
  parameters_.publish();
}

std::vector<OptimizerShard> AdamW::shards() {
  std::vector<OptimizerShard> shards;
  for (const OwnedRange& owned : parameters_.owned()) {
    const auto part = [&](const at::Tensor& vector) {
      return vector.narrow(0, owned.offset, owned.end - owned.begin);
    };
    shards.push_back({owned.begin, owned.end, part(parameters_.master()), part(first_),
                      part(second_), !parameters_.is_sharded()});
  }
  return shards;
}

void AdamW::restored(int64_t steps_taken) {
  MT_CHECK_ARG(steps_taken >= 0, "optimizer steps: expected at least 0, got ", steps_taken);
  steps_ = steps_taken;
  parameters_.publish();
}

int64_t AdamW::state_bytes() const {
  return static_cast<int64_t>(parameters_.master().nbytes() + first_.nbytes() + second_.nbytes());
}

double sum_of_squares(const at::Tensor& flat) {
  double squares = 0;
  for (int64_t begin = 0; begin < flat.numel(); begin += kChunk) {
    const at::Tensor part = flat.slice(0, begin, std::min(begin + kChunk, flat.numel()));
    squares += part.to(at::kDouble).square_().sum().item<double>();
  }
  return squares;
}

double clip_factor(double norm, double clip_norm) {
  return clip_norm > 0 && norm > clip_norm ? clip_norm / norm : 1;
}

}  // namespace mtraining::optim
