#include "mtraining/torch_ops/attend.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <cmath>
#include <vector>

#include "mtraining/attention/tensors.h"
#include "mtraining/base/check.h"
#include "mtraining/base/parallel.h"
#include "mtraining/index/step_index.h"
#include "mtraining/kernels/attention_kernels.h"
#include "mtraining/layout/layout.h"

namespace mtraining::torch_ops {
namespace {

using attention::check_tensor;
using attention::const_view;
using attention::shape_text;
using attention::with_contiguous_rows;

/// What the kernels read of one call, and the memory behind it: one shard, the whole sequence.
class Launch {
 public:
  explicit Launch(const AttendInputs& inputs)
      : q_(inputs.q), k_(inputs.k), v_(inputs.v), threads_(at::get_num_threads()) {
    check_shapes(q_, k_, &v_);
    const int64_t batch = q_.size(0), seq_len = q_.size(1), heads = q_.size(2);
    if (inputs.blocks.defined()) {
      check_block_bits(inputs.blocks, batch, heads, seq_len, q_.device());
      index_ = from_bits(inputs.blocks, seq_len);
    } else {
      index_ = from_tensors(inputs.index, seq_len);
    }
    MT_CHECK_ARG(index_.batch == batch && index_.num_q_heads == heads, "index: expected B=", batch,
                 ", H=", heads, " as q has, got B=", index_.batch, ", H=", index_.num_q_heads);
    documents_ = checked_document_starts(inputs.document_starts, batch, seq_len);
    q_ = with_contiguous_rows(q_);
    k_ = with_contiguous_rows(k_);
    v_ = with_contiguous_rows(v_);

    const layout::Layout layout({.kind = layout::LayoutKind::kContiguous, .seq_len = seq_len});
    block_starts_ = layout.block_starts(0);
    blocks_ = index::step_blocks(index_, layout, 0, 0);
    columns_ = index::step_columns(index_, layout, 0);
    bitmap_ = index::diagonal_bitmap(index_);

    source_.k = const_view(k_);
    source_.v = const_view(v_);
    source_.num_keys = seq_len;
    source_.block_starts = block_starts_.data();
    source_.blocks = blocks_.view();
    source_.columns = columns_.view();

    params_.batch = batch;
    params_.num_queries = seq_len;
    params_.num_q_heads = heads;
    params_.num_kv_heads = k_.size(2);
    params_.head_dim = q_.size(3);
    params_.dtype = attention::kernel_dtype(q_, "q");
    params_.softmax_scale = checked_scale(inputs.softmax_scale, q_.size(3));
    params_.seq_len = seq_len;
    params_.q = const_view(q_);
    params_.q_block_starts = block_starts_.data();
    if (documents_.defined()) {
      params_.document_start = documents_.const_data_ptr<int32_t>();
      params_.document_stride_batch = documents_.stride(0);
    }
    params_.sources = &source_;
    params_.num_sources = 1;
    params_.diagonal_bits = bitmap_.bits.data();
    params_.diagonal_words = bitmap_.words;
  }
  Launch(const Launch&) = delete;
  Launch& operator=(const Launch&) = delete;

  template <typename Params>
  void fill(Params& params) const {
    static_cast<kernels::AttentionParams&>(params) = params_;
  }
  kernels::KeySource& source() { return source_; }

 private:
  at::Tensor q_, k_, v_, documents_;
  ThreadCountScope threads_;  // what torch.set_num_threads says
  index::Index index_;
  std::vector<int32_t> block_starts_;
  index::StepBlocks blocks_;
  index::StepColumns columns_;
  index::DiagonalBitmap bitmap_;
  kernels::KeySource source_;
  kernels::AttentionParams params_;
};

}  // namespace

void check_shapes(const at::Tensor& q, const at::Tensor& k, const at::Tensor* v) {
  MT_CHECK_ARG(q.dim() == 4 && q.size(0) >= 1 && q.size(1) >= 1 && q.size(2) >= 1 && q.size(3) >= 1,
               "q: expected [B, S, H, D] with none of them 0, got ", shape_text(q));
  MT_CHECK_SUPPORTED(q.is_cpu() || q.is_cuda(),
                     "q: expected a tensor on the CPU or a GPU, got one on ", q.device());
  attention::kernel_dtype(q, "q");
  attention::check_storage("q", q);
  MT_CHECK_ARG(k.dim() == 4, "k: expected [B=", q.size(0), ", S=", q.size(1), ", Hk, D=", q.size(3),
               "], got ", shape_text(k));
  const int64_t kv_heads = k.size(2);
  const auto check = [&](const char* name, const at::Tensor& tensor) {
    check_tensor(name, tensor,
                 {{"B", q.size(0)}, {"S", q.size(1)}, {"Hk", kv_heads}, {"D", q.size(3)}},
                 q.scalar_type(), q.device());
  };
  check("k", k);
  MT_CHECK_ARG(kv_heads >= 1 && q.size(2) % kv_heads == 0,
               "k: expected num_kv_heads Hk that divides H=", q.size(2), ", got ", shape_text(k));
  if (v != nullptr) check("v", *v);
}

at::Tensor checked_document_starts(const at::Tensor& document_starts, int64_t batch,
                                   int64_t seq_len) {
  if (!document_starts.defined()) return {};
  check_tensor("document_starts", document_starts, {{"B", batch}, {"S", seq_len}}, at::kInt,
               at::kCPU);
  at::Tensor contiguous = document_starts.contiguous();
  const auto* starts = contiguous.const_data_ptr<int32_t>();
  for (int64_t i = 0; i < batch * seq_len; ++i) {
    MT_CHECK_ARG(starts[i] >= 0 && starts[i] <= i % seq_len, "document_starts[", i / seq_len, ", ",
                 i % seq_len, "]: expected 0 .. ", i % seq_len, ", got ", starts[i]);
  }
  return contiguous;
}

double checked_scale(double softmax_scale, int64_t head_dim) {
  MT_CHECK_ARG(std::isfinite(softmax_scale) && softmax_scale >= 0,
               "softmax_scale: expected a positive number, or none for 1/sqrt(D), got ",
               softmax_scale);
  return softmax_scale > 0 ? softmax_scale : 1 / std::sqrt(static_cast<double>(head_dim));
}

Attended attend(const AttendInputs& inputs) {
  Launch launch(inputs);
  const at::Tensor& q = inputs.q;
  const at::ScalarType held = attention::state_type(q.scalar_type());
  at::Tensor rounded = at::empty(q.sizes(), q.scalar_type());
  at::Tensor lse = at::empty({q.size(0), q.size(2), q.size(1)}, held);
  kernels::ForwardParams params;
  launch.fill(params);
  params.rounded = attention::view(rounded);
  params.lse = lse.mutable_data_ptr();
  at::Tensor residual = at::empty({0}, held);
  if (held != q.scalar_type()) {
    residual = at::empty(q.sizes(), q.scalar_type());
    params.residual = attention::view(residual);
  }
  kernels::ref::forward(params);
  return {rounded, lse, residual};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> attend_backward(const AttendInputs& inputs,
                                                               const at::Tensor& dout,
                                                               const Attended& attended) {
  Launch launch(inputs);
  const at::Tensor& q = inputs.q;
  const at::ScalarType dtype = q.scalar_type(), held = attention::state_type(dtype);
  const attention::NamedSizes rows = {
      {"B", q.size(0)}, {"S", q.size(1)}, {"H", q.size(2)}, {"D", q.size(3)}};
  check_tensor("dout", dout, rows, dtype, q.device());
  check_tensor("out", attended.out, rows, dtype, q.device());
  if (held != dtype) check_tensor("out_residual", attended.out_residual, rows, dtype, q.device());
  check_tensor("lse", attended.lse, {{"B", q.size(0)}, {"H", q.size(2)}, {"S", q.size(1)}}, held,
               q.device());
  at::Tensor dq = at::zeros(q.sizes(), held);
  at::Tensor dk = at::zeros(inputs.k.sizes(), held), dv = at::zeros(inputs.k.sizes(), held);
  const at::Tensor dout_rows = with_contiguous_rows(dout), lse_rows = attended.lse.contiguous();
  const at::Tensor rounded = with_contiguous_rows(attended.out);
  kernels::RoundedOut out = {const_view(rounded), {}};
  at::Tensor residual;
  if (held != dtype) {
    residual = with_contiguous_rows(attended.out_residual);
    out.residual = const_view(residual);
  }
  at::Tensor delta = at::empty(lse_rows.sizes(), held);

  launch.source().dk = attention::view(dk);
  launch.source().dv = attention::view(dv);
  kernels::BackwardParams params;
  launch.fill(params);
  params.dout = const_view(dout_rows);
  params.lse = lse_rows.const_data_ptr();
  params.delta = delta.const_data_ptr();
  params.dq = attention::view(dq);
  kernels::ref::delta(params, out, delta.mutable_data_ptr());
  kernels::ref::backward(params);
  return {dq.to(dtype), dk.to(dtype), dv.to(dtype)};
}

}  // namespace mtraining::torch_ops
