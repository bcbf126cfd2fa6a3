// LocalAttention of tensors: what a rank's choice of an index looks at.
//
// In:   q and k of this rank, where they sit in the sequence. Out: pattern::LocalAttention over the tensors' memory.
// Next: autograd.cc, device_index.cc.
#pragma once

#include <ATen/core/Tensor.h>

#include <cmath>

#include "mtraining/attention/tensors.h"
#include "mtraining/layout/layout.h"
#include "mtraining/pattern/pattern.h"

namespace mtraining::attention {

/// Shapes: q [B, n, H, D], k [B, n, Hk, D]; document_starts int32 [B, N], or undefined. softmax_scale <= 0: 1 / sqrt(D).
/// Ownership: the memory of layout and tensors must live as long.
inline pattern::LocalAttention local_attention(const layout::Layout& layout, int cp_rank,
                                               const at::Tensor& q, const at::Tensor& k,
                                               double softmax_scale,
                                               const at::Tensor& document_starts = {}) {
  pattern::LocalAttention local;
  local.layout = &layout;
  local.cp_rank = cp_rank;
  local.batch = q.size(0);
  local.num_q_heads = q.size(2);
  local.num_kv_heads = k.size(2);
  local.head_dim = q.size(3);
  local.dtype = kernel_dtype(q, "q");
  local.softmax_scale =
      softmax_scale > 0 ? softmax_scale : 1 / std::sqrt(static_cast<double>(q.size(3)));
  local.q = const_view(q);
  local.k = const_view(k);
  if (document_starts.defined()) local.document_starts = document_starts.const_data_ptr<int32_t>();
  return local;
}

}  // namespace mtraining::attention
