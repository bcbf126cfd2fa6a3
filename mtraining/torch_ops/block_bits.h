// BlockBits: which blocks each head attends to, a bit each: the form in which operators pass lists of single blocks.
//
// In:   a mask or lists of blocks that a user gives; or q and k, of which XAttention and MoBA choose. Out: bits, on the device of what
//       they were made of. Next: attend.cc, device_ops.cc make lists of them; register_blocks.cc makes operators.
//
// Every bit pattern is an index: blocks after a query's own, and beyond the sequence, do not count. A unit is some blocks of 64 in a row:
// one for masks of 64 x 64 tokens, two for 128 x 128, a chunk for MoBA's keys.
// Stream: on a GPU everything is enqueued on the current one; nobody waits but where a function says so. What the device finds wrong is
// left out, and a later call throws what the CPU throws at once (later_checks.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "mtraining/index/index.h"
#include "mtraining/pattern/pattern.h"

namespace mtraining::torch_ops {

struct BlockBits {
  at::Tensor
      bits;  ///< int32 [B, H, query units, words]; bit u is key unit u; undefined: not this form
  int64_t query_unit = 1, key_unit = 1;  ///< in blocks
  /// Blocks that the longest list of a head has room for, on a GPU; what has none is left out, and a later call throws.
  int64_t capacity = 0;

  bool defined() const { return bits.defined(); }
};

template <typename Int>
Int units_of(const Int& blocks, int64_t unit) {
  return (blocks + (unit - 1)) / unit;
}

/// Errors: InvalidArgument naming what is not as it has to be for B samples of H heads.
void check_block_bits(const BlockBits& blocks, int64_t batch, int64_t heads, int64_t seq_len,
                      at::Device device);
void check_block_bits(const BlockBits& blocks, int64_t seq_len);
/// Of the CPU's memory.
index::Index from_bits(const BlockBits& blocks, int64_t seq_len);

/// Of an index in block form, in units of one block; in the CPU's memory.
at::Tensor bits_of_index(const index::Index& index);

/// mask bool [B, H, N, N]. Errors: InvalidArgument.
at::Tensor bits_of_mask(const at::Tensor& mask);
/// List of row i of blocks: indices[offsets[b, h, i]] .. indices[offsets[b, h, i + 1] - 1], in any order, one twice is one.
/// offsets int64 [B, H, N + 1], ascending over all of them; indices int32 or int64 [entries], each in [0, N). Errors: InvalidArgument.
at::Tensor bits_of_lists(const at::Tensor& offsets, const at::Tensor& indices);

/// int64 []: blocks of 64 in the longest list of a head. Of the CPU's memory.
at::Tensor longest_list(const BlockBits& blocks, int64_t seq_len);

/// The options as Python passes them, checked.
pattern::XAttentionOptions xattention_options(int64_t block, int64_t stride, double threshold);
pattern::MobaOptions moba_options(int64_t chunk, int64_t top_k);

/// q [B, S, H, D], k [B, S, Hk, D]; document_starts [B, S] int32 or undefined; where the device has those, the host waits for them.
at::Tensor choose_xattention(const at::Tensor& q, const at::Tensor& k,
                             const at::Tensor& document_starts, double softmax_scale,
                             const pattern::XAttentionOptions& options);
at::Tensor choose_moba(const at::Tensor& q, const at::Tensor& k, const at::Tensor& document_starts,
                       const pattern::MobaOptions& options);

}  // namespace mtraining::torch_ops
