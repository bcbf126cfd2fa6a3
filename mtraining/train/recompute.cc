#include "mtraining/train/recompute.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <utility>

#include "mtraining/base/check.h"

namespace mtraining::train {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// One layer of one forward pass. Tensors live in the function's saved variables, which backward frees as it goes.
struct LayerPass : torch::CustomClassHolder {
  const model::Decoder* decoder = nullptr;
  Recompute mode = Recompute::kLayer;
  TwiceAttend attend;
  model::PartObserver observe;
  HostLayers* host = nullptr;
  int64_t layer = 0;
  model::RopeTable rope;  ///< all layers share it
  std::shared_ptr<const index::Index> index;

  const model::LayerParameters& parameters() const { return decoder->parameters().layers[layer]; }
  bool is_away() const { return host != nullptr && host->holds(layer); }
};

constexpr size_t kKeptTensors = 4;  // a layer's input, attention's out, lse and residual

class RecomputedLayer : public torch::autograd::Function<RecomputedLayer> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& h, at::TensorList weights,
                            const c10::intrusive_ptr<LayerPass>& pass) {
    KeptAttention kept;
    at::Tensor out = pass->decoder->layer(
        pass->layer, pass->parameters(), h, pass->rope,
        [&](int64_t layer, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
          return pass->attend.first(layer, q, k, v, kept);
        },
        pass->observe);
    pass->index = std::move(kept.index);
    if (pass->mode == Recompute::kLayer) kept.result = {};
    variable_list saved{h, kept.result.out, kept.result.lse, kept.result.out_residual};
    if (pass->is_away()) {
      pass->host->put(pass->layer, std::exchange(saved, variable_list(kKeptTensors)));
    }
    saved.insert(saved.end(), weights.begin(), weights.end());
    context->save_for_backward(std::move(saved));
    context->saved_data["pass"] = c10::IValue::make_capsule(pass);
    return out;
  }

  static variable_list backward(AutogradContext* context, const variable_list& upstream) {
    const auto pass =
        c10::static_intrusive_pointer_cast<LayerPass>(context->saved_data["pass"].toCapsule());
    variable_list saved = context->get_saved_variables();
    if (pass->is_away()) {
      variable_list back = pass->host->take(pass->layer);
      std::move(back.begin(), back.end(), saved.begin());
    }
    if (pass->host != nullptr) pass->host->fetch(pass->layer - 1);
    const KeptAttention kept{pass->index, {saved[1], saved[2], saved[3]}};
    variable_list inputs;
    for (size_t i = 0; i < saved.size(); ++i) {
      if (i == 0 || i >= kKeptTensors) inputs.push_back(saved[i].detach().requires_grad_(true));
    }
    at::Tensor out;
    {
      const at::AutoGradMode grad(true);
      if (pass->observe) pass->observe("recompute", pass->layer, true);
      out = pass->decoder->layer(
          pass->layer, pass->parameters().with(std::span(inputs).subspan(1)), inputs[0], pass->rope,
          [&](int64_t layer, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
            return pass->attend.again(layer, q, k, v, kept);
          });
      if (pass->observe) pass->observe("recompute", pass->layer, false);
    }
    variable_list gradients = torch::autograd::grad({out}, inputs, {upstream[0]});
    gradients.emplace_back();  // of the pass
    return gradients;
  }
};

}  // namespace

model::RunLayer recomputed_layers(const model::Decoder& decoder, Recompute mode, TwiceAttend attend,
                                  model::PartObserver observe, HostLayers* host) {
  MT_ASSERT(mode != Recompute::kNone, "recompute \"none\" keeps everything");
  return [&decoder, mode, host, attend = std::move(attend), observe = std::move(observe)](
             int64_t layer, const at::Tensor& h, const model::RopeTable& rope) {
    auto pass = c10::make_intrusive<LayerPass>();
    pass->decoder = &decoder;
    pass->mode = mode;
    pass->attend = attend;
    pass->observe = observe;
    pass->host = host;
    pass->layer = layer;
    pass->rope = rope;
    const variable_list weights = pass->parameters().tensors();
    return RecomputedLayer::apply(h, at::TensorList(weights), pass);
  };
}

}  // namespace mtraining::train
