// Block patterns: XAttention's and MoBA's choice by tensor operations, where q and k are: in a GPU's memory, or the host's.
//
// In:   this rank's shards. Out: a choice as bits, the same on every rank; or its index in block form, which the host waits for.
// Next: block_lists.h makes a GPU's lists of the bits; autograd.cc.
//
// The rules are those of pattern/ (build_xattention, build_moba), and on equal masses and gates the choice is the same, entry for entry.
// Collective over the context's ranks. Errors: as pattern/, on every rank alike.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>
#include <vector>

#include "mtraining/attention/ring_context.h"
#include "mtraining/pattern/pattern.h"

namespace mtraining::attention {

/// Blocks that heads chose, where q is. Nobody has waited for it.
struct BlockChoice {
  /// Values that no choice can be made of.
  struct Refusal {
    at::Tensor place;  ///< int64 [1]: the first one, or `none`
    int64_t none = 0;
    const char* name = "";
    const char* unit = nullptr;  ///< null: a place is not known
    int64_t heads = 1, units = 1;
    /// Errors: InvalidArgument, unless place is none.
    void check(int64_t place) const;
  };

  ListSizes sizes;
  /// int32 [rows, query units, words]: bit u of a row is key unit u. Key blocks after the query block do not count.
  at::Tensor bits;
  int64_t query_blocks_per_unit = 1, key_blocks_per_unit = 1;
  int64_t most_key_blocks = 0;  ///< that a query block can have
  std::vector<Refusal> refusals;
};

/// host_bits: the choice's bits in host memory.
index::Index index_of(const BlockChoice& choice, const at::Tensor& host_bits);

/// A rank's part of the sequence, as a choice sees it.
struct BlockShard {
  int64_t seq_len = 0;
  int cp_rank = 0, cp_size = 1;
  std::span<const int32_t> block_starts;  ///< of this rank's blocks
  std::span<const int64_t> positions;     ///< of its rows; one rank holds them in order
  comm::Communicator* group = nullptr;    ///< for the memory of q and k; null: one rank
};

/// q [B, n, H, D], k [B, n, Hk, D], n a multiple of 64; document_starts [B, N] int32 on the CPU, or undefined. 16-bit inputs are multiplied as they are and
/// summed in float32, others in float64. Cost: N^2 D / stride multiply-adds a head over all ranks; several ranks gather q and k.
BlockChoice choose_xattention(const BlockShard& shard, const at::Tensor& q, const at::Tensor& k,
                              double softmax_scale, const at::Tensor& document_starts,
                              const pattern::XAttentionOptions& options);
BlockChoice choose_xattention(RingContext::State& state, const at::Tensor& q, const at::Tensor& k,
                              double softmax_scale, const at::Tensor& document_starts,
                              const pattern::XAttentionOptions& options);
index::Index xattention_by_tensors(RingContext::State& state, const at::Tensor& q,
                                   const at::Tensor& k, double softmax_scale,
                                   const at::Tensor& document_starts,
                                   const pattern::XAttentionOptions& options);
/// Means and gates in float64.
BlockChoice choose_moba(const BlockShard& shard, const at::Tensor& q, const at::Tensor& k,
                        const at::Tensor& document_starts, const pattern::MobaOptions& options);
BlockChoice choose_moba(RingContext::State& state, const at::Tensor& q, const at::Tensor& k,
                        const at::Tensor& document_starts, const pattern::MobaOptions& options);
index::Index moba_by_tensors(RingContext::State& state, const at::Tensor& q, const at::Tensor& k,
                             const at::Tensor& document_starts,
                             const pattern::MobaOptions& options);

/// bool [rows, columns], columns a multiple of 32, as bits: int32 [rows, columns / 32].
at::Tensor packed_bits(const at::Tensor& chosen);

/// The rule of pattern::best_blocks for query blocks `first`, `first + step`, ..: bool [R, KB] of int64 masses [R, KB], which are 0
/// outside a row's [sink, own]. sinks int64 [R].
at::Tensor best_blocks(const at::Tensor& masses, const at::Tensor& sinks, int64_t first,
                       int64_t step, double threshold);

}  // namespace mtraining::attention
