#include "mtraining/base/check.h"
#include "mtraining/kernels/attention_kernels.h"
#include "mtraining/kernels/merge_row.h"

namespace mtraining::kernels {
namespace {

template <typename T>
void merge_rows(int64_t rows, int64_t head_dim, void* out_a, void* lse_a, const void* out_b,
                const void* lse_b) {
  for (int64_t r = 0; r < rows; ++r) {
    merge_row(head_dim, static_cast<T*>(out_a) + r * head_dim, static_cast<T*>(lse_a) + r,
              static_cast<const T*>(out_b) + r * head_dim, static_cast<const T*>(lse_b)[r]);
  }
}

}  // namespace

void merge(DType state, int64_t rows, int64_t head_dim, void* out_a, void* lse_a, const void* out_b,
           const void* lse_b) {
  MT_CHECK_ARG(rows >= 0 && head_dim >= 1, "merge: expected rows >= 0 and head_dim >= 1, got ",
               rows, " and ", head_dim);
  MT_CHECK_ARG(rows == 0 || (out_a && lse_a && out_b && lse_b),
               "merge: expected four pointers, got a null one");
  MT_CHECK_ARG(state == DType::kFloat64 || state == DType::kFloat32,
               "merge: expected a float64 or float32 state, got dtype code ",
               static_cast<int>(state));
  if (state == DType::kFloat64) {
    merge_rows<double>(rows, head_dim, out_a, lse_a, out_b, lse_b);
  } else {
    merge_rows<float>(rows, head_dim, out_a, lse_a, out_b, lse_b);
  }
}

}  // namespace mtraining::kernels
