// Mlp: the SwiGLU part of a layer, over runs of tokens, so that its wide activations need not exist for all tokens at once.
//
// In:   x [.., hidden], three weights, tokens of a tile. Out: down(silu(gate(x)) * up(x)), differentiable. Next: decoder.h.
//
// Forward and backward go over the tokens in runs; within a run everything is one product, and the gradients of the weights are
// summed over the runs in their order, in float32. tile = 0: runs of kMlpRun tokens, of which gate(x) and up(x) are kept for
// backward (2 x tokens x ffn). tile > 0: runs of `tile` tokens, of which nothing but x is kept; backward makes them again. Where both
// have the same runs (tile = kMlpRun, or a tile that holds all tokens of at most kMlpRun) they are equal bit for bit; other tiles
// round the sums of the weights' gradients otherwise, and the rows of products as the matrix library does for their number.
// Source: SwiGLU; tiling along the sequence.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace mtraining::model {

inline constexpr int64_t kMlpRun = 4096;

/// Shapes: gate, up [ffn, hidden], down [hidden, ffn]. Errors: InvalidArgument on tile < 0. Memory: in backward about
/// 6 x run x ffn beside what is kept, and where there are several runs a float32 gradient of the three weights.
at::Tensor mlp(const at::Tensor& x, const at::Tensor& gate, const at::Tensor& up,
               const at::Tensor& down, int64_t tile);

}  // namespace mtraining::model
