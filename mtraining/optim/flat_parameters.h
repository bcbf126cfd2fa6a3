// FlatParameters: a ParameterShare that is everything, on every rank (parallel.zero = 0).
//
// In:   parameters; gradients of this rank's micro-steps. Out: their sum over ranks, once a train step; updated parameters.
// Next: adamw.h.
//
// float32 parameters are views of the master where it lies on their device, and their .grad a view of the gradient where that is
// float32; lower precisions are copies, refreshed by publish(). Where a .grad is no view, backward's is added and freed as soon as
// it is there, so that all of a model's never exist at a time.
#pragma once

#include <cstdint>
#include <vector>

#include "mtraining/optim/parameter_share.h"

namespace mtraining::optim {

class FlatParameters : public ParameterShare {
 public:
  /// `group`: the ranks that hold the same parameters, or null for this one alone. It must outlive this.
  explicit FlatParameters(std::vector<Named> parameters, const ShareOptions& options = {},
                          comm::Communicator* group = nullptr);

  ~FlatParameters() override;

  bool is_sharded() const override { return false; }
  void zero_gradient() override;
  void collect_gradient() override;
  /// Collective. Every rank ends with the same bits.
  void reduce_gradient() override;
  void publish() override;
  void take(int64_t begin, const at::Tensor& values) override;
  void publish_taken() override {}

 private:
  void add_gradient(size_t id);
  bool values_are_views() const;
  bool gradients_are_views() const;
  comm::Communicator* group_;
};

/// Sums `flat` (float32 or bf16, contiguous) over the group in buckets of at most bucket_bytes. Collective; every rank ends with
/// the same bits. Two buckets are under way at a time.
void all_reduce_buckets(at::Tensor& flat, comm::Communicator& group,
                        int64_t bucket_bytes = int64_t{32} << 20);

}  // namespace mtraining::optim
