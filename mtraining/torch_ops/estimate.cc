#include "mtraining/torch_ops/estimate.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <span>
#include <string>

#include "mtraining/attention/local_attention.h"
#include "mtraining/attention/tensors.h"
#include "mtraining/base/check.h"
#include "mtraining/base/parallel.h"
#include "mtraining/comm/loopback.h"
#include "mtraining/layout/layout.h"
#include "mtraining/torch_ops/attend.h"

namespace mtraining::torch_ops {
namespace {

/// pattern/ takes shards of whole blocks. Zeros behind the last position are never looked at.
at::Tensor padded_to_blocks(const at::Tensor& tensor, int64_t rows) {
  const at::Tensor whole = tensor.detach();
  return attention::with_contiguous_rows(
      whole.size(1) == rows ? whole
                            : at::constant_pad_nd(whole, {0, 0, 0, 0, 0, rows - whole.size(1)}, 0));
}

/// One rank that holds the whole sequence, and the memory that it is seen through.
struct WholeSequence {
  WholeSequence(const at::Tensor& given_q, const at::Tensor& given_k,
                const at::Tensor& document_starts, double softmax_scale)
      : threads(at::get_num_threads()) {
    check_shapes(given_q, given_k, nullptr);
    const int64_t seq_len = given_q.size(1);
    layout.emplace(
        layout::LayoutOptions{.kind = layout::LayoutKind::kContiguous, .seq_len = seq_len});
    documents = checked_document_starts(document_starts, given_q.size(0), seq_len);
    q = padded_to_blocks(given_q, layout->tokens_per_rank());
    k = padded_to_blocks(given_k, layout->tokens_per_rank());
    local = attention::local_attention(*layout, 0, q, k, checked_scale(softmax_scale, q.size(3)),
                                       documents);
    transport = comm::make_single();
    group = transport->open("pattern", {0});
  }

  ThreadCountScope threads;  // what torch.set_num_threads says
  std::optional<layout::Layout> layout;
  at::Tensor q, k, documents;
  pattern::LocalAttention local;
  std::unique_ptr<comm::Transport> transport;
  comm::CommunicatorPtr group;
};

}  // namespace

int checked_int(const char* key, int64_t value) {
  MT_CHECK_ARG(value >= std::numeric_limits<int>::min() && value <= std::numeric_limits<int>::max(),
               key, ": expected a number below 2^31, got ", value);
  return static_cast<int>(value);
}

pattern::VerticalSlashOptions make_options(double p_vertical, double p_slash, int64_t last_q,
                                           std::string_view window, std::string_view slash_pooling,
                                           std::string_view selection, int64_t sink_tokens,
                                           int64_t local_blocks, std::optional<int64_t> max_columns,
                                           std::optional<int64_t> max_diagonals,
                                           double dense_threshold, double recall_floor,
                                           int64_t recall_rows) {
  pattern::VerticalSlashOptions options;
  options.p_vertical = p_vertical;
  options.p_slash = p_slash;
  options.last_q = checked_int("last_q", last_q);
  options.window = pattern::parse_window(window);
  options.slash_pooling = pattern::parse_slash_pooling(slash_pooling);
  options.selection = pattern::parse_selection(selection);
  options.sink_tokens = checked_int("sink_tokens", sink_tokens);
  options.local_blocks = checked_int("local_blocks", local_blocks);
  options.max_columns = max_columns;
  options.max_diagonals = max_diagonals;
  options.dense_threshold = dense_threshold;
  options.recall_floor = recall_floor;
  options.recall_rows = checked_int("recall_rows", recall_rows);
  pattern::check(options);
  return options;
}

pattern::VerticalSlashOptions recall_options(int64_t last_q, std::string_view window,
                                             int64_t rows) {
  pattern::VerticalSlashOptions options;
  options.last_q = checked_int("last_q", last_q);
  options.window = pattern::parse_window(window);
  options.recall_rows = checked_int("recall_rows", rows);
  return options;
}

IndexTensors build_index(const at::Tensor& q, const at::Tensor& k,
                         const at::Tensor& document_starts, double softmax_scale,
                         const pattern::VerticalSlashOptions& options) {
  const WholeSequence whole(q, k, document_starts, softmax_scale);
  const int64_t seq_len = q.size(1);
  return to_tensors(pattern::build_vertical_slash(whole.local, options, *whole.group),
                    diagonal_capacity(seq_len),
                    column_capacity(seq_len, options, document_starts.defined()));
}

std::tuple<at::Tensor, at::Tensor> measure_recall(const at::Tensor& q, const at::Tensor& k,
                                                  const IndexTensors& index,
                                                  const at::Tensor& document_starts,
                                                  double softmax_scale,
                                                  const pattern::VerticalSlashOptions& options,
                                                  int64_t seed) {
  const WholeSequence whole(q, k, document_starts, softmax_scale);
  const pattern::Recall recall =
      pattern::measure_recall(whole.local, options, from_tensors(index, q.size(1)), *whole.group,
                              static_cast<uint64_t>(seed));
  at::Tensor sampled = at::empty({q.size(0), q.size(2)}, at::kDouble);
  std::copy(recall.by_head.begin(), recall.by_head.end(), sampled.mutable_data_ptr<double>());
  return {at::full({q.size(0), q.size(2)}, recall.window, at::kDouble), sampled};
}

at::Tensor index_mask(const IndexTensors& tensors, const at::Tensor& document_starts,
                      int64_t seq_len) {
  const index::Index index = from_tensors(tensors, seq_len);
  const at::Tensor documents = checked_document_starts(document_starts, index.batch, seq_len);
  const std::span<const int32_t> starts =
      documents.defined() ? std::span<const int32_t>(documents.const_data_ptr<int32_t>(),
                                                     static_cast<size_t>(documents.numel()))
                          : std::span<const int32_t>();
  const std::vector<uint8_t> bytes = index::mask(index, starts);
  at::Tensor mask = at::empty({index.batch, index.num_q_heads, seq_len, seq_len}, at::kBool);
  std::copy(bytes.begin(), bytes.end(), mask.mutable_data_ptr<bool>());
  return mask;
}

at::Tensor index_pairs(const IndexTensors& tensors, int64_t seq_len) {
  const index::Index index = from_tensors(tensors, seq_len);
  at::Tensor pairs = at::empty({index.batch, index.num_q_heads}, at::kLong);
  auto* to = pairs.mutable_data_ptr<int64_t>();
  for (int b = 0; b < index.batch; ++b) {
    for (int h = 0; h < index.num_q_heads; ++h)
      to[index.row(b, h)] = index::computed_pairs(index, b, h);
  }
  return pairs;
}

}  // namespace mtraining::torch_ops
