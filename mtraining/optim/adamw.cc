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
  std::vector<UpdateChunk> runs;
  for (const OwnedRange& owned : parameters_.owned()) {
    for (const Segment& s : parameters_.segments()) {
      const int64_t begin = std::max(owned.begin, s.begin),
                    end = std::min(owned.end, s.begin + s.size);
      if (begin >= end) continue;
      const int64_t offset = owned.offset + begin - owned.begin;
      const bool decays = s.decays && options_.weight_decay > 0;
      if (!runs.empty() && runs.back().decays == decays &&
          runs.back().begin + runs.back().size == offset) {
        runs.back().size += end - begin;
      } else {
        runs.push_back({offset, end - begin, decays});
      }
    }
  }
  for (const UpdateChunk& run : runs) {
    for (int64_t begin = run.begin; begin < run.begin + run.size; begin += kChunk)
      chunks_.push_back({begin, std::min(kChunk, run.begin + run.size - begin), run.decays});
  }
  if (parameters_.storage().device() != parameters_.parameter_device()) {
    host_ =
        std::make_unique<HostUpdate>(parameters_, std::min(kChunk, parameters_.master().numel()),
                                     parameters_.options().host_threads);
  }
}

void AdamW::step(double lr, double gradient_scale) {
  ++steps_;
  const OptimizerStorage& storage = parameters_.storage();
  const at::Tensor count = at::full({}, static_cast<double>(steps_),
                                    at::TensorOptions(at::kFloat).device(storage.device()));
  const auto update = [&](const UpdateChunk& chunk, at::Tensor& gradient) {
    const auto part = [&](const at::Tensor& vector) {
      return vector.narrow(0, chunk.begin, chunk.size);
    };
    if (gradient_scale != 1) gradient.mul_(gradient_scale);
    at::_fused_adamw_({part(parameters_.master())}, {gradient}, {part(first_)}, {part(second_)}, {},
                      {count}, lr, options_.beta1, options_.beta2,
                      chunk.decays ? options_.weight_decay : 0, options_.eps, /*amsgrad=*/false,
                      /*maximize=*/false);
  };
  if (host_) {
    host_->run(chunks_, update);
    return;
  }
  for (const UpdateChunk& chunk : chunks_) {
    at::Tensor gradient = storage.bring(parameters_.gradient().narrow(0, chunk.begin, chunk.size));
    update(chunk, gradient);
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
  at::Tensor squares = at::zeros({}, flat.options().dtype(at::kDouble));
  for (int64_t begin = 0; begin < flat.numel(); begin += kChunk) {
    const at::Tensor part = flat.slice(0, begin, std::min(begin + kChunk, flat.numel()));
    squares.add_(part.to(at::kDouble).square_().sum());
  }
  return squares.item<double>();
}

double clip_factor(double norm, double clip_norm) {
  return clip_norm > 0 && norm > clip_norm ? clip_norm / norm : 1;
}

}  // namespace mtraining::optim
