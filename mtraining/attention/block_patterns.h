// Block patterns: XAttention's and MoBA's choice by tensor operations, where q and k are: in a GPU's memory, or the host's.
//
// In:   this rank's shards. Out: an index in block form, the same on every rank. Next: autograd.cc.
//
// The rules are those of pattern/ (build_xattention, build_moba), and on equal masses and gates the choice is the same, entry for entry.
// These are baselines: the lists of key blocks are made where q is and then copied to the host, which waits. Collective over the
// context's ranks. Errors: as pattern/, on every rank alike.
#pragma once

#include <ATen/core/Tensor.h>

#include "mtraining/attention/ring_context.h"
#include "mtraining/pattern/pattern.h"

namespace mtraining::attention {

/// q [B, n, H, D], k [B, n, Hk, D]; document_starts [B, N] int32 on the CPU, or undefined. 16-bit inputs are multiplied as they are and
/// summed in float32, others in float64. Cost: N^2 D / stride multiply-adds a head over all ranks; several ranks gather q and k.
index::Index xattention_by_tensors(RingContext::State& state, const at::Tensor& q,
                                   const at::Tensor& k, double softmax_scale,
                                   const at::Tensor& document_starts,
                                   const pattern::XAttentionOptions& options);
/// Means and gates in float64.
index::Index moba_by_tensors(RingContext::State& state, const at::Tensor& q, const at::Tensor& k,
                             const at::Tensor& document_starts,
                             const pattern::MobaOptions& options);

/// The rule of pattern::best_blocks for query blocks `first`, `first + step`, ..: bool [R, KB] of int64 masses [R, KB], which are 0
/// outside a row's [sink, own]. sinks int64 [R].
at::Tensor best_blocks(const at::Tensor& masses, const at::Tensor& sinks, int64_t first,
                       int64_t step, double threshold);

}  // namespace mtraining::attention
