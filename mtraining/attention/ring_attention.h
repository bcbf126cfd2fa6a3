// RingAttention: the one executor. Interprets a ring::Schedule over communicators and kernels, forward and backward.
//
// In:   this rank's q, k, v shards and an index::Index. Out: out and lse of its rows; dq, dk, dv of its shard.
// Next: model/ calls the autograd function (autograd.h).
//
// No layout, pattern or architecture name decides anything here: schedule, step index and kernel parameters are data.
// Source: paper Alg. 2; docs/math/index.md (columns), ring.md.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "mtraining/base/words.h"
#include "mtraining/comm/transport.h"
#include "mtraining/index/index.h"
#include "mtraining/layout/layout.h"
#include "mtraining/ring/schedule.h"
#include "mtraining/topology/topology.h"

namespace mtraining::attention {

enum class ColumnMode { kOnce, kPerStep };
inline constexpr Word<ColumnMode> kColumnWords[] = {{"once", ColumnMode::kOnce},
                                                    {"per_step", ColumnMode::kPerStep}};
enum class GradientTransport { kFloat32, kBFloat16 };
inline constexpr Word<GradientTransport> kGradientTransportWords[] = {
    {"fp32", GradientTransport::kFloat32}, {"bf16", GradientTransport::kBFloat16}};
/// What moves K, V, columns and gradients between the ranks of a node: the transport's own collectives (NCCL on GPUs), or copies between
/// the GPUs of a host by their copy engines, which need no multiprocessors.
enum class Transfers { kCollectives, kPeerCopies };
inline constexpr Word<Transfers> kTransferWords[] = {{"collectives", Transfers::kCollectives},
                                                     {"peer_copies", Transfers::kPeerCopies}};

struct RingOptions {
  /// seq_len, cp_size, kind, stripe; `nodes` is set by RingContext from ring and topology.
  layout::LayoutOptions layout;
  topology::Topology topology;
  ring::RingKind ring = ring::RingKind::kHierarchical;
  ring::InnerKind inner = ring::InnerKind::kGather;
  int ring_stride = 1;
  int prefetch_steps = 2;
  /// Arrived shards that a launch takes on a flat or inner ring; 0: one on the CPU; on a GPU, where every launch reads and writes the
  /// state and fills the device anew, the own shard and then half of the others, or both of two ranks of a node at once.
  int launch_shards = 0;
  ColumnMode columns = ColumnMode::kOnce;
  GradientTransport gradient_transport = GradientTransport::kFloat32;
  Transfers transfers = Transfers::kCollectives;
  int64_t max_column_rows_per_rank = 16384;  ///< bound of a slice of gathered columns
  bool deterministic = true;
  /// Multiprocessors of a GPU that a launch leaves free while transfers are under way that need some: kernels of a transport that find
  /// no room wait for the launch to end.
  int sm_margin = 8;
};

/// One ring step as measured, for traces and imbalance. On a GPU the times are the device's: of the stream that the call was on.
struct StepTiming {
  /// "forward" | "backward" | "columns" | "wait" | "index"; on a GPU also "transfer", beside the others: from when the stream had come to it
  /// until the last byte was there.
  const char* what = "";
  int ring_step = 0;
  int64_t begin_us = 0, end_us = 0;  ///< steady clock
  int64_t pairs = 0;                 ///< (query, key) pairs computed, all heads
  int64_t tag = 0;                   ///< the context's when the step was run
  std::string_view channel = {};     ///< of a transfer: "inner_kv", "columns", ..
};
using StepObserver = std::function<void(const StepTiming&)>;

/// Everything that stays the same over layers and steps: layout, schedules, communicators, buffers (allocated once).
/// One per process (or loopback rank); used by one thread.
class RingContext {
 public:
  /// Collective over all ranks of `transport` that call it with the same options: opens the communicators.
  /// `members`: the job ranks of this context-parallel group in cp_rank order, ascending (all of the job's ranks if empty).
  /// Every rank of the job belongs to exactly one group.
  /// Errors: InvalidArgument / Unsupported before any communication; an agreement check then names a differing option.
  RingContext(const RingOptions& options, comm::Transport& transport,
              std::vector<int> members = {});
  ~RingContext();
  RingContext(const RingContext&) = delete;
  RingContext& operator=(const RingContext&) = delete;

  const layout::Layout& layout() const;
  const topology::Topology& topology() const;
  const RingOptions& options() const;
  int cp_rank() const;
  int cp_size() const;
  /// Over all cp ranks, for pattern/ (index) and for nothing else.
  comm::Communicator& index_group();
  /// On a GPU a step is reported when the device has done it, at a later call of the context or of finish_observing().
  void set_observer(StepObserver observer);
  /// Reports every step that was run; on a GPU it waits for them.
  void finish_observing();
  /// What the timings of later calls carry, so that a late report says what it is about (a layer).
  void set_tag(int64_t tag);
  /// Payload bytes that this rank has sent on all of the context's communicators.
  int64_t bytes_sent() const;
  /// The same on one channel of the ring; 0 where this ring does not use it.
  int64_t bytes_sent(ring::Channel channel) const;
  /// Memory of the buffers that calls share: slots of the rings, gathered columns, float32 state.
  int64_t buffer_bytes() const;

  struct State;  ///< private to attention/
  State& state();

 private:
  std::unique_ptr<State> state_;
};

struct ForwardResult {
  at::Tensor out;  ///< [B, n, H, D] q's dtype
  at::Tensor lse;  ///< [B, H, n] float32 (float64 for float64 inputs)
  /// [B, n, H, D] q's dtype: what rounding `out` lost; undefined where nothing was rounded. Backward subtracts dout . out from
  /// dout . v; where one key has all the weight they cancel, and the rounding of a bf16 `out` would be all that is left.
  at::Tensor out_residual;
};

/// Shapes: q [B, n, H, D], k, v [B, n, Hk, D]; document_starts [B, N] int32 of the whole sequence, on every rank, or undefined.
/// Collective over the context's ranks. Errors: InvalidArgument (shape, dtype, device) before any communication; a small
/// agreement exchange then names what differs between ranks (shapes, index, documents) before any shard moves.
/// Rows at padded positions: out = 0, lse = -inf, whatever q, k and v hold there. Any strides.
ForwardResult ring_forward(RingContext& context, const at::Tensor& q, const at::Tensor& k,
                           const at::Tensor& v, const index::Index& index, double softmax_scale,
                           const at::Tensor& document_starts = {});
/// The same with an index whose plan the context keeps: for a layer that calls again.
ForwardResult ring_forward(RingContext& context, const at::Tensor& q, const at::Tensor& k,
                           const at::Tensor& v, const std::shared_ptr<const index::Index>& index,
                           double softmax_scale, const at::Tensor& document_starts = {});

struct BackwardResult {
  at::Tensor dq, dk, dv;  ///< shapes and dtype of q, k, v
};
/// dout [B, n, H, D]; out, lse, out_residual as forward returned them (the residual may be left out). Collective.
BackwardResult ring_backward(RingContext& context, const at::Tensor& dout, const at::Tensor& q,
                             const at::Tensor& k, const at::Tensor& v, const at::Tensor& out,
                             const at::Tensor& lse, const index::Index& index, double softmax_scale,
                             const at::Tensor& document_starts = {},
                             const at::Tensor& out_residual = {});

/// What backward reads. Moved in, each goes as soon as nothing needs it: out before dq comes, the others before the results do.
struct BackwardInputs {
  at::Tensor dout, q, k, v;
  ForwardResult saved;
};
/// The same with an index whose plan the context keeps.
BackwardResult ring_backward(RingContext& context, BackwardInputs inputs,
                             const std::shared_ptr<const index::Index>& index, double softmax_scale,
                             const at::Tensor& document_starts = {});

}  // namespace mtraining::attention
