#include "mtraining/torch_ops/index_tensors.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "mtraining/attention/tensors.h"
#include "mtraining/base/check.h"

namespace mtraining::torch_ops {
namespace {

std::pair<at::Tensor, at::Tensor> list_tensors(const index::Lists& lists, int64_t batch,
                                               int64_t heads, int64_t capacity) {
  at::Tensor values = at::full({batch, heads, capacity}, -1, at::kInt);
  at::Tensor counts = at::empty({batch, heads}, at::kInt);
  auto* to = values.mutable_data_ptr<int32_t>();
  auto* count = counts.mutable_data_ptr<int32_t>();
  for (int64_t row = 0; row < lists.rows; ++row) {
    const auto from = lists.row(row);
    MT_ASSERT(static_cast<int64_t>(from.size()) <= capacity, "a list of ", from.size(),
              " entries for a capacity of ", capacity);
    std::copy(from.begin(), from.end(), to + row * capacity);
    count[row] = static_cast<int32_t>(from.size());
  }
  return {values, counts};
}

std::vector<std::vector<int32_t>> rows_of(const char* name, const at::Tensor& given_values,
                                          const at::Tensor& given_counts) {
  const at::Tensor values = given_values.contiguous(), counts = given_counts.contiguous();
  const int64_t heads = values.size(1), capacity = values.size(2);
  const auto* from = values.const_data_ptr<int32_t>();
  const auto* count = counts.const_data_ptr<int32_t>();
  std::vector<std::vector<int32_t>> rows;
  rows.reserve(static_cast<size_t>(counts.numel()));
  for (int64_t row = 0; row < counts.numel(); ++row) {
    MT_CHECK_ARG(count[row] >= 0 && count[row] <= capacity, "num_", name, "[", row / heads, ", ",
                 row % heads, "]: expected 0 .. ", capacity, " (the capacity), got ", count[row]);
    rows.emplace_back(from + row * capacity, from + row * capacity + count[row]);
  }
  return rows;
}

void check_lists(const char* name, const char* counts_name, const at::Tensor& values,
                 const at::Tensor& counts, int64_t batch, int64_t heads) {
  MT_CHECK_ARG(values.dim() == 3, name, ": expected [B, H, capacity] int32, got ",
               attention::shape_text(values));
  attention::check_tensor(name, values, {{"B", batch}, {"H", heads}, {"capacity", values.size(2)}},
                          at::kInt, at::kCPU);
  attention::check_tensor(counts_name, counts, {{"B", batch}, {"H", heads}}, at::kInt, at::kCPU);
}

}  // namespace

IndexTensors to_tensors(const index::Index& index, int64_t diagonal_capacity,
                        int64_t column_capacity) {
  IndexTensors tensors;
  std::tie(tensors.diagonals, tensors.num_diagonals) =
      list_tensors(index.diagonals, index.batch, index.num_q_heads, diagonal_capacity);
  std::tie(tensors.columns, tensors.num_columns) =
      list_tensors(index.columns, index.batch, index.num_q_heads, column_capacity);
  tensors.dense_heads = at::zeros({index.batch, index.num_q_heads}, at::kBool);
  std::copy(index.dense_heads.begin(), index.dense_heads.end(),
            tensors.dense_heads.mutable_data_ptr<bool>());
  tensors.caps_hit = at::scalar_tensor(index.caps_hit, at::kLong);
  return tensors;
}

index::Index from_tensors(const IndexTensors& tensors, int64_t seq_len) {
  MT_CHECK_ARG(tensors.diagonals.defined() && tensors.diagonals.dim() == 3,
               "diagonals: expected [B, H, capacity] int32, got ",
               attention::shape_text(tensors.diagonals));
  const int64_t batch = tensors.diagonals.size(0), heads = tensors.diagonals.size(1);
  check_lists("diagonals", "num_diagonals", tensors.diagonals, tensors.num_diagonals, batch, heads);
  check_lists("columns", "num_columns", tensors.columns, tensors.num_columns, batch, heads);
  return index::make_index(static_cast<int>(batch), static_cast<int>(heads), seq_len,
                           rows_of("diagonals", tensors.diagonals, tensors.num_diagonals),
                           rows_of("columns", tensors.columns, tensors.num_columns));
}

}  // namespace mtraining::torch_ops
