// AdamW on the float32 masters of a ParameterShare.
//
// In:   a ParameterShare with a complete gradient, a learning rate. Out: the updated masters, published to the parameters; step
//       count and moments.
// Next: checkpoint/ writes and reads shards().
//
// m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2; x -= lr (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + decay x), in one
// pass over memory without temporaries. Masters and moments are float32 and lie in the share's OptimizerStorage.
// Source: decoupled weight decay (AdamW).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "mtraining/optim/host_update.h"
#include "mtraining/optim/parameter_share.h"

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
  AdamW(const AdamWOptions& options, ParameterShare& parameters);
  /// One update with gradient() x gradient_scale; float32 gradients are left scaled. Never called on a skipped step: then nothing
  /// here changes. Collective where the parameters are sharded.
  void step(double lr, double gradient_scale = 1);
  int64_t steps_taken() const { return steps_; }
  /// Ascending. One that is everything with parallel.zero = 0; with 2 one of each bucket of parameters (none of a bucket that
  /// other ranks hold).
  std::vector<OptimizerShard> shards();
  /// After shards() were filled from a checkpoint: the count goes on from there, parameters take the master's values. Collective
  /// where the parameters are sharded.
  void restored(int64_t steps_taken);
  const at::Tensor& first_moment() const { return first_; }
  const at::Tensor& second_moment() const { return second_; }
  /// Of masters and moments on this rank. float32 parameters that are views of the master count as it.
  int64_t state_bytes() const;

 private:
  AdamWOptions options_;
  ParameterShare& parameters_;
  at::Tensor first_, second_;
  std::vector<UpdateChunk> chunks_;   // of this rank's vectors: neighbours that decay alike
  std::unique_ptr<HostUpdate> host_;  // where parameters lie on a GPU and masters do not
  int64_t steps_ = 0;
};

/// In float64, of this rank's vector. A sharded gradient's norm is the root of the sum over ranks.
double sum_of_squares(const at::Tensor& flat);
/// What brings a gradient of this norm to at most clip_norm (0: no limit): 1 or less.
double clip_factor(double norm, double clip_norm);

}  // namespace mtraining::optim
