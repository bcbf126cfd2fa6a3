// Sparse attention as a differentiable function: builds (or takes) the index, runs the ring, saves out, lse and the index.
//
// In:   q, k, v shards with gradients; a pattern or a given index. Out: out with gradient; the index that was used.
// Next: model/ (training), torch_ops/ (Python).
//
// The index made in forward is saved; backward never rebuilds it (docs/math/pattern.md).
#pragma once

#include <functional>
#include <memory>
#include <optional>

#include "mtraining/attention/ring_attention.h"
#include "mtraining/pattern/pattern.h"

namespace mtraining::attention {

struct AttentionPattern {
  pattern::PatternKind kind = pattern::PatternKind::kVerticalSlash;
  pattern::VerticalSlashOptions vertical_slash;
  pattern::XAttentionOptions xattention;
  pattern::MobaOptions moba;
  /// kFixed: an index for the call's batch, or how much of the best each head takes.
  std::shared_ptr<const index::Index> given;
  pattern::FixedBudgets budgets;
  /// For benchmarks, beside a given index: one is chosen all the same (vertical_slash), so that a call costs what it would; nothing is
  /// made of it. Errors: those of the choice; on a GPU in a later call.
  bool estimate = false;
};

struct AttentionOutput {
  at::Tensor out;           ///< [B, n, H, D] q's dtype, differentiable
  at::Tensor lse;           ///< [B, H, n], not differentiable
  at::Tensor out_residual;  ///< what rounding `out` lost, or undefined (ring_attention.h)
  std::shared_ptr<const index::Index> index;
  std::optional<pattern::Recall> recall;  ///< where asked for
  /// columns = "once" was asked for, and the union of the columns is so large that they went with the shards.
  bool columns_per_step = false;
  /// Dense attention on one GPU: torch's kernels ran (dense_alone.h).
  bool by_torch = false;
};

struct AttentionCall {
  AttentionPattern pattern;
  double softmax_scale = 0;                   ///< 0: 1 / sqrt(head_dim)
  at::Tensor document_starts;                 ///< [B, N] int32 or undefined
  std::shared_ptr<const index::Index> index;  ///< given: replayed instead of built
  /// Given (its out defined), with the index: what an earlier call with the same q, k, v returned. Taken instead of running the
  /// ring; gradients as ever. No communication in forward.
  ForwardResult result;
  bool measure_recall = false;
  uint64_t recall_seed = 0;
  /// Called once, also where nothing is chosen, when all of the choice has been enqueued and nothing of the launches; may be empty.
  std::function<void()> chosen;
  std::shared_ptr<void> owner;  ///< of the context: kept as long as the graph; may be null
};

/// Collective over the context's ranks.
AttentionOutput sparse_ring_attention(RingContext& context, const at::Tensor& q,
                                      const at::Tensor& k, const at::Tensor& v,
                                      const AttentionCall& call);

}  // namespace mtraining::attention
