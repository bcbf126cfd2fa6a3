#include "mtraining/train/recompute.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <span>
#include <utility>

#include "mtraining/base/check.h"

namespace mtraining::train {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// A span of layers of one forward pass. Tensors live in the function's saved variables, which backward frees as it goes.
struct SpanPass : torch::CustomClassHolder {
  const model::Decoder* decoder = nullptr;
  Recompute mode = Recompute::kLayer;
  TwiceAttend attend;
  model::PartObserver observe;
  HostLayers* host = nullptr;
  int64_t first = 0, count = 0, before = 0;  ///< layers; `before`: of the span before this one
  model::RopeTable rope;                     ///< all layers share it
  std::vector<std::shared_ptr<const index::Index>> indices;

  const model::LayerParameters& parameters(int64_t layer) const {
    return decoder->parameters().layers[layer];
  }
  bool is_away() const { return host != nullptr && host->holds(first); }
  /// The span's input, and for each layer attention's out, lse and residual.
  size_t num_kept() const { return static_cast<size_t>(1 + 3 * count); }
};

class RecomputedSpan : public torch::autograd::Function<RecomputedSpan> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& h, at::TensorList weights,
                            const c10::intrusive_ptr<SpanPass>& pass) {
    variable_list saved{h};
    at::Tensor out = h;
    for (int64_t layer = pass->first; layer < pass->first + pass->count; ++layer) {
      KeptAttention kept;
      out = pass->decoder->layer(
          layer, pass->parameters(layer), out, pass->rope,
          [&](int64_t index, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
            return pass->attend.first(index, q, k, v, kept);
          },
          pass->observe);
      pass->indices.push_back(std::move(kept.index));
      if (pass->mode == Recompute::kLayer) kept.result = {};
      saved.insert(saved.end(), {kept.result.out, kept.result.lse, kept.result.out_residual});
    }
    if (pass->is_away())
      pass->host->put(pass->first, std::exchange(saved, variable_list(pass->num_kept())));
    saved.insert(saved.end(), weights.begin(), weights.end());
    context->save_for_backward(std::move(saved));
    context->saved_data["pass"] = c10::IValue::make_capsule(pass);
    return out;
  }

  static variable_list backward(AutogradContext* context, variable_list& upstream) {
    const auto pass =
        c10::static_intrusive_pointer_cast<SpanPass>(context->saved_data["pass"].toCapsule());
    variable_list saved = context->get_saved_variables();
    if (pass->is_away()) {
      variable_list back = pass->host->take(pass->first);
      std::move(back.begin(), back.end(), saved.begin());
    }
    if (pass->host != nullptr && pass->first > 0) pass->host->fetch(pass->before);
    const auto kept = [&](int64_t i) {
      const at::Tensor* result = &saved[static_cast<size_t>(1 + 3 * i)];
      return KeptAttention{pass->indices[i], {result[0], result[1], result[2]}};
    };
    variable_list inputs{saved[0]};  // of each layer
    for (int64_t i = 0; i + 1 < pass->count; ++i)
      inputs.push_back(
          again(*pass, pass->first + i, pass->parameters(pass->first + i), inputs.back(), kept(i)));
    // Inputs of the function: h, the weights of all layers, the pass.
    variable_list gradients(saved.size() - pass->num_kept() + 2);
    size_t end = saved.size();
    at::Tensor upstream_of_layer = std::move(upstream[0]);  // nobody else's: it may be written over
    for (int64_t i = pass->count; i-- > 0;) {
      const int64_t layer = pass->first + i;
      const size_t num_weights = pass->parameters(layer).tensors().size();
      const at::Tensor h = std::move(inputs.back());
      inputs.pop_back();
      const variable_list weights(saved.begin() + static_cast<int64_t>(end - num_weights),
                                  saved.begin() + static_cast<int64_t>(end));
      model::LayerGradients of_layer =
          differentiate(*pass, layer, h, weights, kept(i), std::move(upstream_of_layer));
      upstream_of_layer = std::move(of_layer.h);
      std::move(of_layer.parameters.begin(), of_layer.parameters.end(),
                gradients.begin() + static_cast<int64_t>(1 + end - num_weights - pass->num_kept()));
      end -= num_weights;
    }
    gradients[0] = std::move(upstream_of_layer);
    return gradients;
  }

 private:
  /// Parts of a second run are one, "recompute"; those of its backward have names of their own.
  static model::PartObserver backward_parts(const model::PartObserver& observe) {
    if (!observe) return {};
    return [&observe](std::string_view part, int64_t layer, bool begins) {
      if (part.ends_with(" backward") || part == "norm") observe(part, layer, begins);
    };
  }

  static at::Tensor again(const SpanPass& pass, int64_t layer,
                          const model::LayerParameters& parameters, const at::Tensor& h,
                          const KeptAttention& kept) {
    if (pass.observe) pass.observe("recompute", layer, true);
    at::Tensor out = pass.decoder->layer(
        layer, parameters, h, pass.rope,
        [&](int64_t index, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
          return pass.attend.again(index, q, k, v, kept);
        },
        backward_parts(pass.observe));
    if (pass.observe) pass.observe("recompute", layer, false);
    return out;
  }

  static model::LayerGradients differentiate(const SpanPass& pass, int64_t layer,
                                             const at::Tensor& h, const variable_list& weights,
                                             const KeptAttention& kept, at::Tensor upstream) {
    if (h.is_cuda()) {
      return pass.decoder->layer_gradients(layer, pass.parameters(layer).with(weights), h,
                                           std::move(upstream), pass.rope,
                                           pass.attend.runs(layer, kept), pass.observe);
    }
    variable_list leaves{h.detach().requires_grad_(true)};
    for (const at::Tensor& weight : weights) leaves.push_back(weight.detach().requires_grad_(true));
    at::Tensor out;
    {
      const at::AutoGradMode grad(true);
      out = again(pass, layer, pass.parameters(layer).with(std::span(leaves).subspan(1)), leaves[0],
                  kept);
    }
    variable_list gradients = torch::autograd::grad({out}, leaves, {upstream});
    return {gradients[0], {gradients.begin() + 1, gradients.end()}};
  }
};

}  // namespace

model::RunLayer recomputed_layers(const model::Decoder& decoder, Recompute mode, TwiceAttend attend,
                                  model::PartObserver observe, HostLayers* host, int64_t span) {
  MT_ASSERT(mode != Recompute::kNone && span >= 1, "recompute \"none\" keeps everything");
  return [&decoder, mode, host, span, attend = std::move(attend), observe = std::move(observe)](
             int64_t layer, const at::Tensor& h, const model::RopeTable& rope) {
    if (layer % span != 0) return h;  // the span's first layer has run them all
    auto pass = c10::make_intrusive<SpanPass>();
    pass->decoder = &decoder;
    pass->mode = mode;
    pass->attend = attend;
    pass->observe = observe;
    pass->host = host;
    pass->first = layer;
    pass->count = std::min(span, decoder.config().num_hidden_layers - layer);
    pass->before = layer - span;
    pass->rope = rope;
    variable_list weights;
    for (int64_t l = layer; l < layer + pass->count; ++l) {
      const variable_list tensors = pass->parameters(l).tensors();
      weights.insert(weights.end(), tensors.begin(), tensors.end());
    }
    return RecomputedSpan::apply(h, at::TensorList(weights), pass);
  };
}

}  // namespace mtraining::train
