#include "bench/sdpa_peer.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/version.h>

#include "mtraining/base/check.h"

namespace mtraining::bench {
namespace {

at::ScalarType scalar_type(kernels::DType dtype) {
  switch (dtype) {
    case kernels::DType::kFloat64:
      return at::kDouble;
    case kernels::DType::kFloat32:
      return at::kFloat;
    case kernels::DType::kBFloat16:
      return at::kBFloat16;
    case kernels::DType::kFloat16:
      return at::kHalf;
  }
  MT_ASSERT(false, "dtype ", static_cast<int>(dtype));
}

}  // namespace

struct SdpaPeer::State {
  at::Tensor q, k, v, dout, out;
};

SdpaPeer::SdpaPeer(const AttentionSizes& sizes, const AttentionInputs& inputs, int threads)
    : state_(std::make_unique<State>()) {
  at::set_num_threads(threads);
  // [1, H, S, D] over [S, H, D] in memory, as a model's projections leave it.
  const auto tensor = [&](const AlignedBytes& bytes, int64_t heads) {
    return at::from_blob(bytes.data(), {1, sizes.seq_len, heads, sizes.head_dim},
                         at::TensorOptions().dtype(scalar_type(sizes.dtype)))
        .transpose(1, 2);
  };
  state_->q = tensor(inputs.q, sizes.num_q_heads).requires_grad_(true);
  state_->k = tensor(inputs.k, sizes.num_kv_heads).requires_grad_(true);
  state_->v = tensor(inputs.v, sizes.num_kv_heads).requires_grad_(true);
  state_->dout = tensor(inputs.dout, sizes.num_q_heads);
}

SdpaPeer::~SdpaPeer() = default;

void SdpaPeer::forward(Times& times) {
  State& s = *state_;
  s.out.reset();
  time_once(times, [&] {
    s.out = at::scaled_dot_product_attention(s.q, s.k, s.v, /*attn_mask=*/{}, /*dropout_p=*/0.0,
                                             /*is_causal=*/true, /*scale=*/std::nullopt,
                                             /*enable_gqa=*/true);
  });
}

void SdpaPeer::backward(Times& times) {
  State& s = *state_;
  MT_CHECK_ARG(s.out.defined(), "backward: expected a forward before it");
  torch::autograd::variable_list gradients;
  time_once(times, [&] {
    gradients = torch::autograd::grad({s.out}, {s.q, s.k, s.v}, {s.dout}, /*retain_graph=*/true);
  });
}

std::vector<double> SdpaPeer::out() const {
  const at::Tensor rows =
      state_->out.detach().transpose(1, 2).contiguous().to(at::kDouble).reshape({-1});
  return {rows.data_ptr<double>(), rows.data_ptr<double>() + rows.numel()};
}

std::string torch_version() { return TORCH_VERSION; }

}  // namespace mtraining::bench
