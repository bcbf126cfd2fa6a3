#include "bench/sdpa_peer.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/version.h>

#include "bench/torch_device.h"
#include "mtraining/base/check.h"

namespace mtraining::bench {

struct SdpaPeer::State {
  at::Tensor q, k, v, dout, out;
  torch::autograd::variable_list gradients;

  void forward() {
    out = at::scaled_dot_product_attention(q, k, v, /*attn_mask=*/{}, /*dropout_p=*/0.0,
                                           /*is_causal=*/true, /*scale=*/std::nullopt,
                                           /*enable_gqa=*/true);
  }
  void backward() {
    gradients = torch::autograd::grad({out}, {q, k, v}, {dout}, /*retain_graph=*/true);
  }
  void forget() {
    out.reset();
    gradients.clear();
  }
};

SdpaPeer::SdpaPeer(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                   const at::Tensor& dout)
    : state_(std::make_unique<State>()) {
  // [1, H, S, D] over [S, H, D] in memory, as a model's projections leave it.
  const auto seen = [](const at::Tensor& rows) {
    return rows.detach().unsqueeze(0).transpose(1, 2);
  };
  state_->q = seen(q).requires_grad_(true);
  state_->k = seen(k).requires_grad_(true);
  state_->v = seen(v).requires_grad_(true);
  state_->dout = seen(dout);
  if (q.is_cpu()) return;
  using at::SDPBackend;
  at::globalContext().setSDPPriorityOrder({static_cast<int64_t>(SDPBackend::cudnn_attention),
                                           static_cast<int64_t>(SDPBackend::flash_attention),
                                           static_cast<int64_t>(SDPBackend::efficient_attention),
                                           static_cast<int64_t>(SDPBackend::math),
                                           static_cast<int64_t>(SDPBackend::overrideable)});
  at::globalContext().setSDPUseMath(false);
}

namespace {

at::Tensor seen(const AlignedBytes& bytes, int64_t heads, const AttentionSizes& sizes) {
  return at::from_blob(bytes.data(), {sizes.seq_len, heads, sizes.head_dim},
                       at::TensorOptions().dtype(scalar_type(sizes.dtype)));
}

}  // namespace

SdpaPeer::SdpaPeer(const AttentionSizes& sizes, const AttentionInputs& inputs, int threads)
    : SdpaPeer(seen(inputs.q, sizes.num_q_heads, sizes), seen(inputs.k, sizes.num_kv_heads, sizes),
               seen(inputs.v, sizes.num_kv_heads, sizes),
               seen(inputs.dout, sizes.num_q_heads, sizes)) {
  at::set_num_threads(threads);
}

SdpaPeer::~SdpaPeer() = default;

void SdpaPeer::forward(Times& times) {
  State& s = *state_;
  s.forget();
  time_on(s.q.device(), times, [&] { s.forward(); });
}

void SdpaPeer::backward(Times& times) {
  State& s = *state_;
  MT_CHECK_ARG(s.out.defined(), "backward: expected a forward before it");
  time_on(s.q.device(), times, [&] { s.backward(); });
}

void SdpaPeer::add_facts(Json& row) {
  State& s = *state_;
  row["torch"] = torch_version();
  if (s.q.is_cpu()) return;
  s.forget();
  row["peak_bytes"] = peak_bytes(s.q.device(), [&] {
    s.forward();
    s.backward();
  });
  row["fwd_kernels"] = kernels_of(s.q.device(), [&] { s.forward(); });
  row["bwd_kernels"] = kernels_of(s.q.device(), [&] { s.backward(); });
  s.forget();
}

std::vector<double> SdpaPeer::out() const {
  const at::Tensor rows =
      state_->out.detach().transpose(1, 2).to(at::kCPU, at::kDouble).contiguous().reshape({-1});
  return {rows.data_ptr<double>(), rows.data_ptr<double>() + rows.numel()};
}

std::string torch_version() { return TORCH_VERSION; }

}  // namespace mtraining::bench
