// Recompute: layers that keep their input instead of their activations and run a second time in backward.
//
// In:   a Decoder, the attention of a first and of a second run. Out: model::RunLayer. Next: trainer.h gives it to the decoder.
//
// kLayer keeps a layer's input and attention's index; kExceptAttention keeps attention's out, residual and lse too, so that its
// kernels and their ring run once, in forward, and the second run makes q, k and v by projection alone. The index is never made
// again: the second run's scores might choose otherwise. A layer is one autograd function whose inputs are h and the layer's
// parameters; on the CPU its backward builds the layer's graph afresh and differentiates that, on a GPU it is model/layer_gradient.h:
// every mode gives the same bits.
// A span of several layers is one function that keeps the first one's input; its backward makes the other inputs again, one after
// the other, and then goes back through the layers, each as above: one more forward of all layers but the last, for a span-th of
// what is kept.
// Works inside a data- or context-parallel run: all ranks of a group run the same layers a second time in the same order.
// Source: paper section 4 (activation recomputation).
#pragma once

#include <functional>
#include <memory>

#include "mtraining/attention/ring_attention.h"
#include "mtraining/model/decoder.h"
#include "mtraining/model/layer_gradient.h"
#include "mtraining/train/host_layers.h"

namespace mtraining::train {

/// train.recompute
enum class Recompute { kNone, kLayer, kExceptAttention };

/// What attention's second run takes from its first.
struct KeptAttention {
  std::shared_ptr<const index::Index> index;
  attention::ForwardResult result;  ///< undefined tensors: the ring runs again
};

struct TwiceAttend {
  /// Runs attention, counted, and fills `kept` whole.
  std::function<at::Tensor(int64_t layer, const at::Tensor& q, const at::Tensor& k,
                           const at::Tensor& v, KeptAttention& kept)>
      first;
  /// The same out, differentiable in q, k, v; counted nowhere.
  std::function<at::Tensor(int64_t layer, const at::Tensor& q, const at::Tensor& k,
                           const at::Tensor& v, const KeptAttention& kept)>
      again;
  /// The same once more in two parts, for a layer whose gradients are one function (model/layer_gradient.h).
  std::function<model::AttentionRuns(int64_t layer, const KeptAttention& kept)> runs;
};

/// Spans begin at multiples of `span`. The decoder and `host` must outlive the graph. `observe` hears of the second runs as part "recompute". Layers that `host` holds
/// (null: none) keep there what the mode keeps. Errors: InternalError for kNone, which needs none of this.
model::RunLayer recomputed_layers(const model::Decoder& decoder, Recompute mode, TwiceAttend attend,
                                  model::PartObserver observe = {}, HostLayers* host = nullptr,
                                  int64_t span = 1);

}  // namespace mtraining::train
