// AdamW on the flat float32 master vector.
//
// In:   FlatParameters with a complete gradient, a learning rate. Out: the updated master; step count and moments.
// Next: FlatParameters::publish().
//
// m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2; x -= lr (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + decay x).
// Source: decoupled weight decay (AdamW).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "mtraining/optim/flat_parameters.h"

namespace mtraining::optim {

struct AdamWOptions {
  double beta1 = 0.9, beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0;
};
/// Errors: InvalidArgument naming the key.
void check(const AdamWOptions& options);

/// A part of the optimizer's state that this rank holds: elements [begin, end) of the flat vectors, whose tensors and names
/// parameters.segments() gives. A checkpoint is written from it and read into it; which ranks hold what may differ between the
/// run that writes and the one that reads.
struct OptimizerShard {
  int64_t begin = 0, end = 0;
  at::Tensor master, first_moment, second_moment;  ///< float32 [end - begin], contiguous views
  bool replicated = true;  ///< every rank holds all; else the ranks' parts cover the vectors once
};

class AdamW {
 public:
  AdamW(const AdamWOptions& options, FlatParameters& parameters);
  /// One update with the gradient that the parameters hold. Never called on a skipped step: then nothing here changes.
  void step(double lr);
  int64_t steps_taken() const { return steps_; }
  /// Ascending. One that is everything with parallel.zero = 0; with 2 one of each bucket of parameters.
  std::vector<OptimizerShard> shards();
  /// After shards() were filled from a checkpoint: the count goes on from there, parameters take the master's values.
  void restored(int64_t steps_taken);
  const at::Tensor& first_moment() const { return first_; }
  const at::Tensor& second_moment() const { return second_; }

 private:
  AdamWOptions options_;
  FlatParameters& parameters_;
  at::Tensor first_, second_;
  int64_t steps_ = 0;
};

/// sqrt of the sum of squares, in float64. Not collective: the gradient vector is complete on every rank.
double global_norm(const at::Tensor& flat);
/// Scales `flat` by clip_norm / norm where norm > clip_norm > 0.
void clip_by_norm(at::Tensor& flat, double norm, double clip_norm);

}  // namespace mtraining::optim
