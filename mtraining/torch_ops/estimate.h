// Estimate: the choice of an index from q and k on one device, its recall, and what it covers.
//
// In:   q, k, the pattern's options, or the tensors of an index. Out: IndexTensors; recall; a mask; pairs.
// Next: register.cc makes operators of them; attend.cc and ring.cc use the index.
//
// Nothing here is differentiated. Errors: InvalidArgument, Unsupported naming the input, what was expected and got.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string_view>
#include <tuple>

#include "mtraining/pattern/pattern.h"
#include "mtraining/torch_ops/index_tensors.h"

namespace mtraining::torch_ops {

/// Errors: InvalidArgument naming the key.
int checked_int(const char* key, int64_t value);

/// The options as Python passes them: a keyword for each key. Checked.
pattern::VerticalSlashOptions make_options(double p_vertical, double p_slash, int64_t last_q,
                                           std::string_view window, std::string_view slash_pooling,
                                           std::string_view selection, int64_t sink_tokens,
                                           int64_t local_blocks, std::optional<int64_t> max_columns,
                                           std::optional<int64_t> max_diagonals,
                                           double dense_threshold, double recall_floor,
                                           int64_t recall_rows);

/// What recall looks at: the window's rows, and `rows` others.
pattern::VerticalSlashOptions recall_options(int64_t last_q, std::string_view window, int64_t rows);

/// Shapes: q [B, S, H, D], k [B, S, Hk, D], document_starts [B, S] int32 or undefined.
IndexTensors build_index(const at::Tensor& q, const at::Tensor& k,
                         const at::Tensor& document_starts, double softmax_scale,
                         const pattern::VerticalSlashOptions& options);
/// (window, sampled) float64 [B, H]: the share of attention that the index covers on the observation rows (mean over heads in
/// every place) and, by head, on rows sampled elsewhere.
std::tuple<at::Tensor, at::Tensor> measure_recall(const at::Tensor& q, const at::Tensor& k,
                                                  const IndexTensors& index,
                                                  const at::Tensor& document_starts,
                                                  double softmax_scale,
                                                  const pattern::VerticalSlashOptions& options,
                                                  int64_t seed);
/// bool [B, H, S, S]. Cost: B H S^2 bytes.
at::Tensor index_mask(const IndexTensors& index, const at::Tensor& document_starts,
                      int64_t seq_len);
/// int64 [B, H] (query, key) pairs that are computed: chosen blocks whole, and columns outside them 64 rows a block row.
at::Tensor index_pairs(const IndexTensors& index, int64_t seq_len);

}  // namespace mtraining::torch_ops
