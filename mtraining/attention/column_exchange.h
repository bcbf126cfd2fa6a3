// ColumnExchange: columns = "once". Gathers the K and V rows of the union of chosen columns, slice by slice, and brings their
// gradients back to the ranks that own them.
//
// In:   a ColumnPlan, this rank's k and v. Out: a KeySource per slice; dk and dv of this rank's rows. Next: ring_attention.cc.
//
// A row of the exchange is K and V of one (sample, kv head, position) side by side, [2, D]. Two slices are in memory at a time: the
// first two are attended to beside shards, in a launch of the ring; of further ones each has a launch, under which the next one travels.
#pragma once

#include <algorithm>
#include <vector>

#include "mtraining/attention/ring_context.h"

namespace mtraining::attention {

class ColumnExchange {
 public:
  /// `plan`: index_plan's own.
  ColumnExchange(RingContext::State& state, IndexPlan& index_plan, const index::ColumnPlan& plan,
                 const at::Tensor& k, const at::Tensor& v);

  int num_slices() const { return static_cast<int>(plan_.slices.size()); }
  /// The first ones, that a launch of the ring takes along.
  int num_slices_beside_shards() const { return std::min(kSlicesInMemory, num_slices()); }
  /// A transfer was posted that nobody has waited for yet, and that needs multiprocessors.
  bool needs_multiprocessors() const;
  /// Collective: packs this rank's rows of a slice and posts the all-gather. Slices in order, at most two unfinished.
  void post_gather(int slice);
  /// Waits for it. The source is valid until slice + 2 is posted.
  kernels::KeySource gathered(int slice);

  /// Backward: a zeroed float32 dk and dv of the slice, set in `source`.
  void add_gradient_buffers(int slice, kernels::KeySource& source, at::ScalarType grad_state);
  /// Collective: sums the slice's gradients over ranks, each rank's own rows to it.
  void post_reduce(int slice, at::ScalarType grad_wire);
  /// Waits for the reductions and adds this rank's rows to dk and dv, [B, n, Hk, D].
  void add_reduced_to(at::Tensor& dk, at::Tensor& dv);

 private:
  struct Rows {
    at::Tensor batch, kv_head, offset;  // int64 [own rows of a slice]
  };
  static constexpr int kSlicesInMemory = 2;

  Rows own_rows(int slice) const;
  std::string buffer_name(const char* what, int slice) const;
  int64_t rows_per_rank(int slice) const { return plan_.slices[slice].rows_per_rank; }

  RingContext::State& state_;
  IndexPlan& index_plan_;
  const index::ColumnPlan& plan_;
  const at::Tensor &k_, &v_;
  std::vector<at::Tensor> packed_, gathered_, grads_, wire_, reduced_;  // by slice
  std::vector<comm::WorkPtr> gathers_, reductions_;  // after the memory that they use
};

}  // namespace mtraining::attention
