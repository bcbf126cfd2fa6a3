// IndexTensors: an index::Index as tensors of fixed capacity with counts, the form in which operators pass it.
//
// In:   an Index, or the tensors of one. Out: the other. Next: estimate.cc, attend.cc, ring.cc.
//
// Shapes, int32 on the CPU: diagonals [B, H, capacity], num_diagonals [B, H], columns [B, H, capacity], num_columns [B, H];
// ascending, -1 beyond a count; dense_heads bool [B, H]; caps_hit int64 [].
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "mtraining/index/index.h"
#include "mtraining/pattern/pattern.h"

namespace mtraining::torch_ops {

struct IndexTensors {
  at::Tensor diagonals, num_diagonals, columns, num_columns;
  at::Tensor dense_heads, caps_hit;  ///< undefined where only the choice itself is passed
};

/// Diagonals a head can have: all of them.
template <typename Int>
Int diagonal_capacity(const Int& seq_len) {
  return (seq_len + 63) / 64;
}
/// Columns a head can have: max_columns chosen ones and the forced ones of one document, or any number.
template <typename Int>
Int column_capacity(const Int& seq_len, const pattern::VerticalSlashOptions& options,
                    bool has_documents) {
  if (!options.max_columns || has_documents) return seq_len;
  const Int most = Int(*options.max_columns + options.sink_tokens);
  return most < seq_len ? most : seq_len;
}

/// Cost: the capacities, written once.
IndexTensors to_tensors(const index::Index& index, int64_t diagonal_capacity,
                        int64_t column_capacity);
/// Lists are sorted and duplicates dropped. Errors: InvalidArgument naming tensor, shape, dtype, device, count or value.
index::Index from_tensors(const IndexTensors& tensors, int64_t seq_len);

}  // namespace mtraining::torch_ops
