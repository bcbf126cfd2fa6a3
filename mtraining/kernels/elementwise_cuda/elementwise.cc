#include "mtraining/kernels/elementwise_cuda/elementwise.h"

#include "mtraining/base/check.h"
#include "mtraining/kernels/dispatch.h"
#include "mtraining/kernels/elementwise_cuda/launches.h"

namespace mtraining::kernels::elementwise_cuda {
namespace {

constexpr int64_t kMostNormWidth = 16384;
constexpr int64_t kMost = int64_t{1} << 31;

void check_dtype(const char* what, DType dtype) {
  MT_CHECK_SUPPORTED(dtype == DType::kFloat32 || dtype == DType::kBFloat16, what,
                     ": expected float32 or bf16 on a GPU, got ", to_string(dtype));
}
void check_pointer(const char* what, const char* name, const void* pointer) {
  MT_CHECK_ARG(pointer != nullptr, what, ": ", name, " is null");
  MT_CHECK_ARG(reinterpret_cast<uintptr_t>(pointer) % 16 == 0, what, ": ", name,
               ": expected 16-byte aligned memory");
}
void check_rows(const char* what, int64_t rows, int64_t width) {
  MT_CHECK_ARG(rows >= 0 && width >= 1, what, ": expected rows and a width of at least 1, got ",
               rows, " x ", width);
  MT_CHECK_SUPPORTED(width % 8 == 0, what, ": expected a width that 8 divides on a GPU, got ",
                     width);
}
void check_norm(DType dtype, int64_t rows, int64_t width) {
  check_dtype("rms_norm", dtype);
  check_rows("rms_norm", rows, width);
  MT_CHECK_SUPPORTED(width <= kMostNormWidth, "rms_norm: expected a width of at most ",
                     kMostNormWidth, " on a GPU, got ", width);
}
/// Fills in plain rows; vectors must not straddle.
Rows checked(Rows rows, int64_t width) {
  if (rows.token_stride == 0) rows = {1, width};
  MT_CHECK_ARG(
      rows.heads >= 1 && rows.token_stride >= rows.heads * width && rows.token_stride % 8 == 0,
      "rms_norm: expected tokens of at least ", rows.heads, " x ", width,
      " elements, a multiple of 8 apart, got ", rows.token_stride);
  return rows;
}
void check_rope(DType dtype, int64_t tokens, int64_t head_dim, int64_t table_tokens) {
  check_dtype("rope", dtype);
  MT_CHECK_ARG(tokens >= 0 && head_dim >= 8 && head_dim % 8 == 0,
               "rope: expected a head_dim that 8 divides, got ", head_dim);
  MT_CHECK_ARG(tokens == 0 || (table_tokens >= 1 && tokens % table_tokens == 0),
               "rope: expected tokens to be a multiple of the table's ", table_tokens, ", got ",
               tokens);
}
void check_stride(const char* name, int64_t stride, int64_t heads, int64_t head_dim) {
  MT_CHECK_ARG(stride >= heads * head_dim && stride % 8 == 0, "rope: ", name,
               ": expected tokens of at least ", heads, " x ", head_dim,
               " elements, a multiple of 8 apart, got ", stride);
}

}  // namespace

void rms_norm(const RmsNormForward& params) {
  RmsNormForward p = params;
  check_norm(p.dtype, p.rows, p.width);
  p.x_rows = checked(p.x_rows, p.width);
  MT_CHECK_ARG((p.added == nullptr) == (p.sum == nullptr),
               "rms_norm: expected `sum` beside `added` and only there");
  if (p.rows == 0) return;
  check_pointer("rms_norm", "x", p.x);
  check_pointer("rms_norm", "weight", p.weight);
  check_pointer("rms_norm", "out", p.out);
  check_pointer("rms_norm", "inverse_root", p.inverse_root);
  if (p.added != nullptr) {
    check_pointer("rms_norm", "added", p.added);
    check_pointer("rms_norm", "sum", p.sum);
  }
  p.dtype == DType::kFloat32 ? rms_norm_float32(p) : rms_norm_bf16(p);
}

int64_t rms_norm_partial_rows(DType dtype, int64_t rows, int64_t width) {
  check_norm(dtype, rows, width);
  return dtype == DType::kFloat32 ? rms_norm_partial_rows_float32(rows, width)
                                  : rms_norm_partial_rows_bf16(rows, width);
}

void rms_norm_backward(const RmsNormBackward& params) {
  RmsNormBackward p = params;
  check_norm(p.dtype, p.rows, p.width);
  p.dout_rows = checked(p.dout_rows, p.width);
  p.x_rows = checked(p.x_rows, p.width);
  p.dx_rows = checked(p.dx_rows, p.width);
  check_pointer("rms_norm backward", "dweight", p.dweight);
  check_pointer("rms_norm backward", "partials", p.partials);
  if (p.rows > 0) {
    check_pointer("rms_norm backward", "dout", p.dout);
    check_pointer("rms_norm backward", "x", p.x);
    check_pointer("rms_norm backward", "weight", p.weight);
    check_pointer("rms_norm backward", "inverse_root", p.inverse_root);
    check_pointer("rms_norm backward", "dx", p.dx);
    if (p.added != nullptr) check_pointer("rms_norm backward", "added", p.added);
  }
  p.dtype == DType::kFloat32 ? rms_norm_backward_float32(p) : rms_norm_backward_bf16(p);
}

void rope(const Rope& p) {
  check_rope(p.dtype, p.tokens, p.head_dim, p.table_tokens);
  MT_CHECK_ARG(p.rotated_heads >= 1, "rope: expected at least one head, got ", p.rotated_heads);
  check_stride("x", p.token_stride, p.rotated_heads, p.head_dim);
  if (p.tokens == 0) return;
  check_pointer("rope", "cos", p.cos);
  check_pointer("rope", "sin", p.sin);
  check_pointer("rope", "x", p.x);
  rope_launch(p);
}

void rope_backward(const RopeBackward& p) {
  check_rope(p.dtype, p.tokens, p.head_dim, p.table_tokens);
  MT_CHECK_ARG(p.q_heads >= 1 && p.kv_heads >= 1, "rope: expected at least one head, got ",
               p.q_heads, " and ", p.kv_heads);
  check_stride("dq", p.dq_token_stride, p.q_heads, p.head_dim);
  check_stride("dk", p.dk_token_stride, p.kv_heads, p.head_dim);
  check_stride("dv", p.dv_token_stride, p.kv_heads, p.head_dim);
  if (p.dbias != nullptr) {
    check_pointer("rope backward", "dbias", p.dbias);
    check_pointer("rope backward", "partials", p.partials);
  }
  if (p.tokens > 0) {
    check_pointer("rope backward", "cos", p.cos);
    check_pointer("rope backward", "sin", p.sin);
    check_pointer("rope backward", "dq", p.dq);
    check_pointer("rope backward", "dk", p.dk);
    check_pointer("rope backward", "dv", p.dv);
    check_pointer("rope backward", "drow", p.drow);
  }
  rope_backward_launch(p);
}

void swiglu(const Swiglu& p) {
  check_dtype("swiglu", p.dtype);
  check_rows("swiglu", p.rows, p.width);
  if (p.rows == 0) return;
  check_pointer("swiglu", "gate_up", p.gate_up);
  check_pointer("swiglu", "product", p.product);
  swiglu_launch(p);
}

void swiglu_backward(const SwigluBackward& p) {
  check_dtype("swiglu", p.dtype);
  check_rows("swiglu", p.rows, p.width);
  if (p.rows == 0) return;
  check_pointer("swiglu backward", "gate_up", p.gate_up);
  check_pointer("swiglu backward", "dproduct", p.dproduct);
  check_pointer("swiglu backward", "dgate_up", p.dgate_up);
  check_pointer("swiglu backward", "product", p.product);
  swiglu_backward_launch(p);
}

void cross_entropy(const CrossEntropy& p) {
  check_dtype("cross entropy", p.logits_dtype);
  check_dtype("cross entropy", p.gradient_dtype);
  MT_CHECK_ARG(size_of(p.gradient_dtype) <= size_of(p.logits_dtype),
               "cross entropy: expected a gradient no wider than the logits");
  MT_CHECK_ARG(
      p.rows >= 0 && p.vocab >= 1 && p.row_stride >= p.vocab,
      "cross entropy: expected rows of at least one logit, no longer than their stride, got ",
      p.rows, " x ", p.vocab, ", stride ", p.row_stride);
  MT_CHECK_SUPPORTED(p.rows < kMost && p.vocab < kMost - (1 << 16),
                     "cross entropy: expected fewer than 2^31 rows and logits, got ", p.rows, " x ",
                     p.vocab);
  if (p.rows == 0) return;
  check_pointer("cross entropy", "logits", p.logits);
  MT_CHECK_ARG(p.labels != nullptr && p.loss != nullptr, "cross entropy: labels or loss is null");
  cross_entropy_launch(p);
}

}  // namespace mtraining::kernels::elementwise_cuda
