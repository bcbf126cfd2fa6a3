#include "mtraining/attention/dense_alone.h"

#include <ATen/ATen.h>

#include <limits>
#include <string_view>

namespace mtraining::attention {
namespace {

constexpr int64_t kMostCudnnHeadDim = 128;
constexpr int64_t kEfficientLseTile = 32;

bool is_cudnn(const at::Tensor& q) {
  return std::string_view(dense_alone_kernels(q.scalar_type(), q.size(3))) == "cudnn";
}

/// [B, H, seq_len, D] of [B, n, H, D]; no copy.
at::Tensor by_head(const at::Tensor& rows, int64_t seq_len) {
  return rows.narrow(1, 0, seq_len).transpose(1, 2);
}
/// [B, n, H, D] of [B, H, seq_len, D], zeros behind.
at::Tensor by_token(const at::Tensor& heads, int64_t n) {
  const at::Tensor rows = heads.transpose(1, 2);
  return rows.size(1) == n ? rows.contiguous()
                           : at::constant_pad_nd(rows, {0, 0, 0, 0, 0, n - rows.size(1)}, 0);
}

/// What kernels without grouped heads read: a copy of k or v for each query head.
at::Tensor repeated(const at::Tensor& heads, int64_t group) {
  return group == 1 ? heads : heads.repeat_interleave(group, 1);
}
at::Tensor summed(const at::Tensor& heads, int64_t group) {
  return group == 1 ? heads : heads.unflatten(1, {heads.size(1) / group, group}).sum(2);
}

}  // namespace

const char* dense_alone_kernels(at::ScalarType dtype, int64_t head_dim) {
  const bool half = dtype == at::kBFloat16 || dtype == at::kHalf;
  return half && head_dim % 8 == 0 && head_dim <= kMostCudnnHeadDim ? "cudnn" : "efficient";
}

ForwardResult dense_alone_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                  int64_t seq_len, double softmax_scale) {
  const int64_t n = q.size(1), group = q.size(2) / k.size(2);
  const at::Tensor queries = by_head(q, seq_len), keys = by_head(k, seq_len),
                   values = by_head(v, seq_len);
  at::Tensor out, lse;
  if (is_cudnn(q)) {
    const auto result = at::_scaled_dot_product_cudnn_attention(
        queries, keys, values, /*attn_bias=*/std::nullopt, /*compute_log_sumexp=*/true,
        /*dropout_p=*/0.0, /*is_causal=*/true, /*return_debug_mask=*/false, softmax_scale);
    out = std::get<0>(result);
    lse = std::get<1>(result);
  } else {
    const auto result = at::_scaled_dot_product_efficient_attention(
        queries, repeated(keys, group), repeated(values, group), /*attn_bias=*/std::nullopt,
        /*compute_log_sumexp=*/true, /*dropout_p=*/0.0, /*is_causal=*/true, softmax_scale);
    out = std::get<0>(result);
    lse = std::get<1>(result);
  }
  lse = lse.reshape({q.size(0), q.size(2), -1}).narrow(2, 0, seq_len);
  if (seq_len < n)
    lse = at::constant_pad_nd(lse, {0, n - seq_len}, -std::numeric_limits<double>::infinity());
  return {by_token(out, n), lse.contiguous(), {}};
}

BackwardResult dense_alone_backward(const at::Tensor& dout, const at::Tensor& q,
                                    const at::Tensor& k, const at::Tensor& v,
                                    const ForwardResult& saved, int64_t seq_len,
                                    double softmax_scale) {
  const int64_t n = q.size(1), group = q.size(2) / k.size(2);
  const at::Tensor queries = by_head(q, seq_len), keys = by_head(k, seq_len),
                   values = by_head(v, seq_len), out = by_head(saved.out, seq_len),
                   grad = by_head(dout, seq_len);
  const at::Tensor lse = saved.lse.narrow(2, 0, seq_len);
  const at::Tensor none,
      no_seed = at::zeros({}, at::TensorOptions().dtype(at::kLong).device(q.device()));
  if (is_cudnn(q)) {
    const auto [dq, dk, dv] = at::_scaled_dot_product_cudnn_attention_backward(
        grad, queries, keys, values, out, lse.contiguous().unsqueeze(-1), no_seed, no_seed,
        /*attn_bias=*/none, /*cum_seq_q=*/none, /*cum_seq_k=*/none, seq_len, seq_len,
        /*dropout_p=*/0.0, /*is_causal=*/true, softmax_scale);
    return {by_token(dq, n), by_token(dk, n), by_token(dv, n)};
  }
  const int64_t tail = (kEfficientLseTile - seq_len % kEfficientLseTile) % kEfficientLseTile;
  const auto [dq, dk, dv, dbias] = at::_scaled_dot_product_efficient_attention_backward(
      grad, queries, repeated(keys, group), repeated(values, group), /*attn_bias=*/none, out,
      at::constant_pad_nd(lse, {0, tail}, std::numeric_limits<double>::infinity()), no_seed,
      no_seed, /*dropout_p=*/0.0, {true, true, true, false}, /*is_causal=*/true, softmax_scale);
  return {by_token(dq, n), by_token(summed(dk, group), n), by_token(summed(dv, group), n)};
}

}  // namespace mtraining::attention
