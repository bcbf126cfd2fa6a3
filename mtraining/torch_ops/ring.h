// Ring: ring attention over a process group of torch.distributed, as an object that Python holds.
//
// In:   a process group, what stays the same over calls (layout, ring, sequence length). Out: differentiable calls of the executor.
// Next: register.cc makes a class of it; python/mtraining/ring.py keeps one for each group and shape of the problem.
//
// Every communicator of the ring is its own, opened over the group's store. One thread of a process uses it.
#pragma once

#include <ATen/core/ivalue.h>
#include <torch/custom_class.h>

#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "mtraining/attention/autograd.h"
#include "mtraining/comm/transport.h"
#include "mtraining/torch_ops/block_bits.h"

namespace mtraining::torch_ops {

struct RingShape {
  std::vector<int64_t> members;  ///< the group's ranks that take part, in cp_rank order
  std::string scope;             ///< names this ring among all of the group's
  std::string master_addr;       ///< "": not known
  int64_t timeout_ms = 0;
  int64_t nodes = 1;  ///< of a hierarchical ring; members.size() / nodes ranks each
  int64_t seq_len = 0, stripe = 64, ring_stride = 1, prefetch_steps = 2;
  std::string layout, ring, inner, columns, gradient_transport;
  bool deterministic = true;
  bool on_device = false;  ///< shards in GPUs' memory
};

class Ring : public torch::CustomClassHolder {
 public:
  /// Collective over the members. `group`: torch's ProcessGroup, boxed.
  Ring(const c10::IValue& group, const RingShape& shape);

  /// One to replay, in host memory or a GPU's, as tensors or as bits of blocks; neither: none.
  struct GivenIndex {
    std::vector<at::Tensor> lists;
    BlockBits blocks;
  };
  /// Collective. q, k, v: this rank's shards, differentiable. Returns out, lse and, where wanted, the tensors of the index: of one of
  /// blocks its bits, in units of one block. A failure is told to the other ranks, and ends this ring's use.
  std::tuple<at::Tensor, at::Tensor, std::vector<at::Tensor>> attend(
      const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
      const at::Tensor& document_starts, double softmax_scale,
      const attention::AttentionPattern& pattern, const GivenIndex& index, bool want_index);
  /// Collective: all members are done with what they called before.
  void barrier();
  int64_t bytes_sent() const { return open_->context->bytes_sent(); }

 private:
  /// Lives until the last graph that was made with it is gone.
  struct Open {
    std::unique_ptr<comm::Transport> transport;
    std::unique_ptr<attention::RingContext> context;
  };
  std::shared_ptr<Open> open_;
};

}  // namespace mtraining::torch_ops
