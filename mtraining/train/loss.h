// Loss: LM head and cross entropy in chunks; whole logits never exist.
//
// In:   hidden [T, hidden], head weight [vocab, hidden], labels [T]. Out: the SUM of token losses, differentiable, and a count.
// Next: the trainer divides sums by the count of all ranks and micro-steps.
//
// Gradients of hidden and weight are made in the same pass as the loss (the upstream gradient of a sum is one number), so no
// product is done twice. Labels may lie in host memory, where they are checked without waiting for a GPU. Memory: about three times
// a chunk of logits, [chunk, vocab] float32, the gradient of hidden, a float32 gradient of the weight, and for a bf16 weight its
// float32 copy. bf16 on a GPU: products take bf16 and give float32; no copy of the weight, one chunk of logits, in whose place the
// gradient is made. Chunks of another size change the last bits: the sum is of double partial sums, the weight's gradient of
// float32 ones, and a matrix product's rows may round with their number.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace mtraining::train {

struct SummedLoss {
  at::Tensor sum;     ///< float32 scalar, differentiable in hidden and weight
  int64_t count = 0;  ///< labels that are not ignored
};

/// labels int64, data::kIgnored where there is none. Errors: InvalidArgument on shapes and on labels outside the vocabulary.
/// Cost: 6 T hidden vocab flops where a gradient is wanted, else 2.
SummedLoss chunked_loss(const at::Tensor& hidden, const at::Tensor& weight,
                        const at::Tensor& labels, int64_t chunk_tokens = 1024);

}  // namespace mtraining::train
