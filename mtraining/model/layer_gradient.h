// LayerGradient: the gradient of a layer that runs a second time, on a GPU, as one function.
//
// In:   the layer's input and its output's gradient, parameters, attention's second run and its backward.
// Out:  gradients of the input and of each parameter. Next: train/recompute.h.
//
// Autograd would keep what the second run makes until the layer's backward is over; here each tensor goes as soon as nothing needs it
// any more, the MLP's part is run forward and backward one run of tokens at a time, and the gradient of the output becomes that of the
// input in its place. The same products over the same runs as the layer's own functions, and so the same bits.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

#include "mtraining/attention/ring_attention.h"

namespace mtraining::model {

/// q, k, v, out: [B, n, heads, D].
struct AttentionRuns {
  std::function<attention::ForwardResult(const at::Tensor& q, const at::Tensor& k,
                                         const at::Tensor& v)>
      forward;
  std::function<attention::BackwardResult(attention::BackwardInputs inputs)> backward;
};

struct LayerGradients {
  at::Tensor h;                        ///< [B, n, hidden]
  std::vector<at::Tensor> parameters;  ///< as LayerParameters::tensors()
};

}  // namespace mtraining::model
