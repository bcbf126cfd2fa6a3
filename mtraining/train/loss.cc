#include "mtraining/train/loss.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

#include "mtraining/attention/tensors.h"
#include "mtraining/base/check.h"
#include "mtraining/data/batches.h"
#include "mtraining/train/device.h"
#ifdef MT_WITH_CUDA
#include "mtraining/kernels/elementwise_cuda/elementwise.h"
#endif

namespace mtraining::train {
namespace {

/// Adds up the loss of the rows; where `hidden_gradient` is given, fills it and adds to weight_gradient.
at::Tensor sum_over_chunks(const at::Tensor& hidden, const at::Tensor& weight,
                           const at::Tensor& labels, int64_t chunk_tokens,
                           at::Tensor* hidden_gradient, at::Tensor* weight_gradient) {
  at::Tensor sum = at::zeros({}, hidden.options().dtype(at::kDouble));
  const at::Tensor wide_weight = weight.to(at::kFloat);
  for (int64_t begin = 0; begin < hidden.size(0); begin += chunk_tokens) {
    const int64_t count = std::min(chunk_tokens, hidden.size(0) - begin);
    const at::Tensor x = hidden.narrow(0, begin, count).to(at::kFloat);
    const at::Tensor y = labels.narrow(0, begin, count);
    const at::Tensor valid = y.ne(data::kIgnored);
    const at::Tensor target = at::where(valid, y, at::zeros_like(y)).unsqueeze(1);
    at::Tensor logits = at::linear(x, wide_weight);
    const at::Tensor lse = at::logsumexp(logits, {1}, true);
    const at::Tensor losses = (lse - logits.gather(1, target)).squeeze(1);
    // Selected, not multiplied: an infinite loss of an ignored row must not become NaN.
    sum += at::where(valid, losses, at::zeros_like(losses)).sum(at::kDouble);
    if (hidden_gradient == nullptr) continue;
    at::Tensor d = logits.sub_(lse).exp_();
    d.scatter_add_(1, target, at::full_like(target, -1, d.options()));
    d.masked_fill_(valid.logical_not().unsqueeze(1), 0);
    hidden_gradient->narrow(0, begin, count).copy_(at::mm(d, wide_weight));
    weight_gradient->addmm_(d.t(), x);
  }
  return sum.to(at::kFloat);
}

/// Fills losses [rows]; the gradient, in `dtype`, takes the logits' place: its rows begin where theirs did.
at::Tensor cross_entropy([[maybe_unused]] at::Tensor logits,
                         [[maybe_unused]] const at::Tensor& labels,
                         [[maybe_unused]] at::Tensor losses, at::ScalarType dtype,
                         [[maybe_unused]] bool gradient) {
#ifdef MT_WITH_CUDA
  const at::Tensor ids = labels.contiguous();
  kernels::elementwise_cuda::cross_entropy(
      {.logits_dtype = kernels::DType::kFloat32,
       .gradient_dtype = attention::kernel_dtype(at::empty({0}, dtype), "the head's weight"),
       .rows = logits.size(0),
       .vocab = logits.size(1),
       .logits = logits.data_ptr(),
       .row_stride = logits.stride(0),
       .labels = ids.const_data_ptr<int64_t>(),
       .ignored = data::kIgnored,
       .loss = losses.data_ptr<float>(),
       .gradient = gradient,
       .stream = attention::current_stream(logits.device())});
#endif
  return logits.view(dtype).narrow(1, 0, logits.size(1));
}

/// The same where products of bf16 give float32 (tensor cores): no float32 copy of the head or of hidden, and one chunk of float32
/// logits, in which the gradient is made; it enters the products rounded to the head's type.
at::Tensor sum_over_low_chunks(const at::Tensor& hidden, const at::Tensor& weight,
                               const at::Tensor& labels, int64_t chunk_tokens,
                               at::Tensor* hidden_gradient, at::Tensor* weight_gradient) {
  at::Tensor row_losses = at::empty({hidden.size(0)}, hidden.options().dtype(at::kFloat));
  const int64_t most = std::min(chunk_tokens, hidden.size(0));
  at::Tensor memory = at::empty({most, weight.size(0)}, hidden.options().dtype(at::kFloat));
  for (int64_t begin = 0; begin < hidden.size(0); begin += chunk_tokens) {
    const int64_t count = std::min(chunk_tokens, hidden.size(0) - begin);
    const at::Tensor x = hidden.narrow(0, begin, count);
    at::Tensor logits = memory.narrow(0, 0, count), losses = row_losses.narrow(0, begin, count);
    at::mm_out(logits, x, weight.t(), at::kFloat);
    const at::Tensor d = cross_entropy(logits, labels.narrow(0, begin, count), losses,
                                       weight.scalar_type(), hidden_gradient != nullptr);
    if (hidden_gradient == nullptr) continue;
    at::Tensor rows = hidden_gradient->narrow(0, begin, count);
    at::mm_out(rows, d, weight);
    at::addmm_out(*weight_gradient, *weight_gradient, d.t(), x, at::kFloat);
  }
  return row_losses.sum(at::kDouble).to(at::kFloat);
}

bool multiplies_low(const at::Tensor& hidden) {
  return hidden.is_cuda() && at::isReducedFloatingType(hidden.scalar_type());
}

at::Tensor summed(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& labels,
                  int64_t chunk_tokens, at::Tensor* hidden_gradient, at::Tensor* weight_gradient) {
  const auto sum = multiplies_low(hidden) ? sum_over_low_chunks : sum_over_chunks;
  return sum(hidden, weight, labels, chunk_tokens, hidden_gradient, weight_gradient);
}

class ChunkedLoss : public torch::autograd::Function<ChunkedLoss> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& hidden,
                            const at::Tensor& weight, const at::Tensor& labels,
                            int64_t chunk_tokens) {
    at::Tensor hidden_gradient = at::empty_like(hidden);
    at::Tensor weight_gradient = at::zeros(weight.sizes(), weight.options().dtype(at::kFloat));
    at::Tensor sum =
        summed(hidden, weight, labels, chunk_tokens, &hidden_gradient, &weight_gradient);
    context->save_for_backward({hidden_gradient, weight_gradient.to(weight.scalar_type())});
    return sum;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list upstream) {
    const auto saved = context->get_saved_variables();
    const at::Tensor& scale = upstream[0];
    if (multiplies_low(saved[0])) {  // in place: hidden's is as large as a layer's input
      MT_CHECK_SUPPORTED(context->saved_data.count("was_run") == 0,
                         "loss: a second backward through one loss is not supported on a GPU");
      context->saved_data["was_run"] = true;
      at::Tensor hidden_gradient = saved[0], weight_gradient = saved[1];
      return {hidden_gradient.mul_(scale), weight_gradient.mul_(scale), at::Tensor(), at::Tensor()};
    }
    return {saved[0] * scale.to(saved[0].scalar_type()),
            saved[1] * scale.to(saved[1].scalar_type()), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

SummedLoss chunked_loss(const at::Tensor& hidden, const at::Tensor& weight,
                        const at::Tensor& labels, int64_t chunk_tokens) {
  MT_CHECK_ARG(hidden.dim() == 2 && weight.dim() == 2 && hidden.size(1) == weight.size(1) &&
                   labels.dim() == 1 && labels.size(0) == hidden.size(0) &&
                   labels.scalar_type() == at::kLong,
               "loss: expected hidden [T, hidden], weight [vocab, hidden], labels [T] int64, got ",
               hidden.sizes(), ", ", weight.sizes(), ", ", labels.sizes(), " ",
               labels.scalar_type());
  MT_CHECK_ARG(chunk_tokens >= 1, "train.loss_chunk: expected at least 1, got ", chunk_tokens);
  const at::Tensor valid = labels.ne(data::kIgnored);
  const at::Tensor outside = valid.logical_and(labels.lt(0).logical_or(labels.ge(weight.size(0))));
  MT_CHECK_ARG(!outside.any().item<bool>(), "loss: a label is outside the vocabulary of ",
               weight.size(0));
  SummedLoss result;
  result.count = valid.sum().item<int64_t>();
  if (at::GradMode::is_enabled() && (hidden.requires_grad() || weight.requires_grad())) {
    result.sum =
        ChunkedLoss::apply(hidden, weight, to_device(labels, hidden.device()), chunk_tokens);
  } else {
    result.sum =
        summed(hidden, weight, to_device(labels, hidden.device()), chunk_tokens, nullptr, nullptr);
  }
  return result;
}

}  // namespace mtraining::train
