// AttentionLaunch: the kernels of one attention layer on one rank, ready to be timed phase by phase.
//
// In:   inputs, a case, a layout over cp_size ranks and this rank's number, a device.
// Out:  functions that run the index's estimation, the forward and the backward once.
// Next: attention_bench.h times them in turn with the peer's.
//
// A rank of cp_size > 1 attends to all shards in one launch, as a ring does whose shards have arrived; nothing is sent. This interface is
// the seam of devices: here is the CPU's, device_launch.h has a GPU's with its own memory and clock.
#pragma once

#include <memory>
#include <string>

#include "bench/attention_case.h"
#include "bench/rows.h"
#include "mtraining/layout/layout.h"
#include "mtraining/pattern/pattern.h"

namespace mtraining::bench {

struct LaunchPlace {
  std::string device = "cpu";
  int threads = 1;
  layout::LayoutKind layout = layout::LayoutKind::kContiguous;
  int64_t stripe = 64;
  int cp_size = 1, cp_rank = 0;
  bool deterministic = false;  ///< of a GPU's backward; the CPU's always is
  std::string backend = {};    ///< of a GPU: sm80, sm90; empty: what dispatch chooses
};
/// Errors: InvalidArgument naming the flag.
void check(const LaunchPlace& place, const AttentionSizes& sizes);

class AttentionLaunch {
 public:
  virtual ~AttentionLaunch() = default;
  /// Once each; appends to `times`. Backward needs a forward before it.
  virtual void forward(Times& times) = 0;
  virtual void backward(Times& times) = 0;
  /// Estimation from q and k with `options`, choice, and the lists that the kernels read. One rank alone (cp_size 1).
  virtual void index(Times& times, const pattern::VerticalSlashOptions& options) = 0;
  /// Pairs that this rank computes, all heads.
  virtual double pairs() const = 0;
  /// Of the last forward, rows of out as float64, [n, H, D]: for tests.
  virtual std::vector<double> out() const = 0;
  /// Further keys of its row, after the timed runs; what is timed for them runs `repeats` times.
  virtual void add_facts(Json& /*row*/, int /*repeats*/) {}
};

/// On the CPU. `inputs` must live as long.
std::unique_ptr<AttentionLaunch> make_launch(const LaunchPlace& place, const AttentionSizes& sizes,
                                             const AttentionInputs& inputs,
                                             const index::Index& index);
/// The index that the pattern chooses from the inputs.
index::Index choose_index(const AttentionSizes& sizes, const AttentionInputs& inputs,
                          const pattern::VerticalSlashOptions& options);

}  // namespace mtraining::bench
