// SdpaPeer: torch's scaled_dot_product_attention, dense and causal, on the same inputs in the same process.
//
// In:   sizes and inputs. Out: times of a forward and of a backward. Next: attention_bench.h runs it in turn with ours.
#pragma once

#include <memory>

#include "bench/attention_case.h"
#include "bench/rows.h"

namespace mtraining::bench {

class SdpaPeer {
 public:
  /// `inputs` must live as long. Threads: both torch's and this project's are set to `threads`.
  SdpaPeer(const AttentionSizes& sizes, const AttentionInputs& inputs, int threads);
  ~SdpaPeer();
  SdpaPeer(const SdpaPeer&) = delete;
  SdpaPeer& operator=(const SdpaPeer&) = delete;

  /// is_causal, enable_gqa, no dropout. Backward follows its forward.
  void forward(Times& times);
  void backward(Times& times);
  /// Of the last forward, [S, H, D] as float64: for tests.
  std::vector<double> out() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};
std::string torch_version();

}  // namespace mtraining::bench
