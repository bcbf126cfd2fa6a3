// SdpaPeer: torch's scaled_dot_product_attention, dense and causal, on the same inputs in the same process.
//
// In:   sizes and inputs, or tensors of a device. Out: times of a forward and of a backward. Next: attention_bench.h runs it in turn
//       with ours.
//
// On a GPU cuDNN's kernels come first, then flash's; the quadratic fallback is left out. Which ones ran, the row says.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "bench/attention_case.h"
#include "bench/rows.h"

namespace mtraining::bench {

class SdpaPeer {
 public:
  /// `inputs` must live as long. Threads: both torch's and this project's are set to `threads`.
  SdpaPeer(const AttentionSizes& sizes, const AttentionInputs& inputs, int threads);
  /// q, dout [S, H, D], k, v [S, Hk, D] of one device.
  SdpaPeer(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& dout);
  ~SdpaPeer();
  SdpaPeer(const SdpaPeer&) = delete;
  SdpaPeer& operator=(const SdpaPeer&) = delete;

  /// is_causal, enable_gqa, no dropout. Backward follows its forward.
  void forward(Times& times);
  void backward(Times& times);
  /// Further keys of its row; on a GPU "fwd_kernels", "bwd_kernels", "peak_bytes".
  void add_facts(Json& row);
  /// Of the last forward, [S, H, D] as float64: for tests.
  std::vector<double> out() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};
std::string torch_version();

}  // namespace mtraining::bench
