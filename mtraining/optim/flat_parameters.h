// FlatParameters: all parameters as one float32 master vector, and all gradients as another.
//
// In:   the model's parameters, in id order, alike on every rank. Out: master and gradient vectors; buckets for the reduction.
// Next: adamw.h updates the master; the reduction sums the gradient vector over ranks.
//
// A parameter's place follows from its id alone, never from the order in which gradients arrive, and a tensor that is used
// twice (tied head) has one place. float32 parameters become views of the master; lower precisions are copies, refreshed by
// publish(). Gradients accumulate in float32 whatever the parameters' dtype.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "mtraining/comm/transport.h"

namespace mtraining::optim {

struct Segment {
  std::string name;
  int64_t begin = 0, size = 0;  ///< in the flat vectors
  bool decays = false;          ///< weight decay applies: matrices, not norms and biases
};

class FlatParameters {
 public:
  struct Named {
    std::string name;
    at::Tensor value;
  };
  /// Errors: InvalidArgument where a tensor is listed twice or is no leaf.
  explicit FlatParameters(std::vector<Named> parameters);

  int64_t size() const { return master_.numel(); }
  const std::vector<Segment>& segments() const { return segments_; }
  at::Tensor& master() { return master_; }
  at::Tensor& gradient() { return gradient_; }
  const at::Tensor& master() const { return master_; }
  const at::Tensor& gradient() const { return gradient_; }

  void zero_gradient();
  /// After each backward: adds what autograd left on lower-precision parameters to the float32 gradient. A no-op for float32
  /// parameters, whose .grad is a view of it.
  void collect_gradient();
  /// Copies the master to lower-precision parameters.
  void publish();

 private:
  std::vector<Named> parameters_;
  std::vector<Segment> segments_;
  at::Tensor master_, gradient_;
};

/// Sums `flat` (float32, contiguous) over the group in buckets of at most bucket_bytes. Collective; every rank ends with the same
/// bits. Two buckets are under way at a time.
void all_reduce_buckets(at::Tensor& flat, comm::Communicator& group,
                        int64_t bucket_bytes = int64_t{32} << 20);

}  // namespace mtraining::optim
