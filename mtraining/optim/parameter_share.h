// ParameterShare: the part of all parameters that this rank updates, as float32 masters and gradients in flat vectors.
//
// In:   the model's parameters, in id order, alike on every rank; gradients as backward leaves them.
// Out:  master() and gradient() of this rank's part; parameters that all ranks hold alike after publish().
// Next: flat_parameters.h (all of it on every rank), sharded_parameters.h (a W-th a rank); adamw.h updates the part.
//
// The flat vectors of a run are all parameters one behind another. A parameter's place follows from its id alone, never from
// the order in which gradients arrive, and a tensor that is used twice (tied head) has one place.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "mtraining/comm/transport.h"
#include "mtraining/optim/optimizer_storage.h"

namespace mtraining::optim {

struct Segment {
  std::string name;
  int64_t begin = 0, size = 0;  ///< in the flat vectors
  bool decays = false;          ///< weight decay applies: matrices, not norms and biases
};

/// Elements [begin, end) of the flat vectors, which this rank holds from `offset` of its own ones.
struct OwnedRange {
  int64_t begin = 0, end = 0, offset = 0;
};

struct ShareOptions {
  at::ScalarType grad_dtype = at::kFloat;    ///< in which gradients are added up and sent
  bool offload = false;                      ///< masters and moments in host memory
  int64_t bucket_bytes = int64_t{32} << 20;  ///< of gradients that travel together
  int64_t host_threads = 0;                  ///< of an update in host memory; 0: torch's
};

class ParameterShare {
 public:
  struct Named {
    std::string name;
    at::Tensor value;
  };
  virtual ~ParameterShare() = default;
  ParameterShare(const ParameterShare&) = delete;
  ParameterShare& operator=(const ParameterShare&) = delete;

  /// Elements of the flat vectors: of all parameters.
  int64_t size() const { return size_; }
  const std::vector<Segment>& segments() const { return segments_; }
  /// Ascending. Whole ranks: one range, everything. Sharded: the ranks' ranges cover the flat vectors once.
  const std::vector<OwnedRange>& owned() const { return owned_; }
  virtual bool is_sharded() const = 0;
  const OptimizerStorage& storage() const { return *storage_; }

  /// float32, on storage().device(). What lies outside owned() stays zero.
  at::Tensor& master() { return master_; }
  const at::Tensor& master() const { return master_; }
  /// grad_dtype, on the parameters' device. Before reduce_gradient() it is a whole share's own sum, and of a sharded one the sum
  /// over all ranks of the buckets that have come home.
  at::Tensor& gradient() { return gradient_; }
  const at::Tensor& gradient() const { return gradient_; }

  /// Also forgets what a backward that was given up has left.
  virtual void zero_gradient() = 0;
  /// After each backward: takes what autograd left on the parameters. Collective where sharded.
  virtual void collect_gradient() = 0;
  /// After the last micro-step: gradient() is the sum over all ranks and micro-steps. Collective. A sharded one may be asked after
  /// any micro-step, and goes on from there.
  virtual void reduce_gradient() = 0;
  /// The parameters take the master's values, on every rank. Collective where sharded.
  virtual void publish() = 0;
  /// The same in parts: what stands for [begin, begin + values.numel()) of this rank's vectors becomes `values`, of the parameters'
  /// type, on the current stream; when all of owned() has been taken, publish_taken() tells the other ranks.
  virtual void take(int64_t begin, const at::Tensor& values) = 0;
  virtual void publish_taken() = 0;
  at::ScalarType parameter_dtype() const { return parameters_.front().value.scalar_type(); }
  at::Device parameter_device() const { return parameters_.front().value.device(); }
  const ShareOptions& options() const { return options_; }

 protected:
  /// Errors: InvalidArgument where a tensor is listed twice, is no leaf, or has another dtype than the first.
  ParameterShare(std::vector<Named> parameters, const ShareOptions& options);
  at::Tensor& value(size_t id) { return parameters_[id].value; }

  ShareOptions options_;
  std::vector<Named> parameters_;
  std::vector<Segment> segments_;
  std::vector<OwnedRange> owned_;
  std::shared_ptr<const OptimizerStorage> storage_;
  at::Tensor master_, gradient_;
  int64_t size_ = 0;
};

/// Calls body(parameter id, first element of the parameter, first of [begin, begin + size), how many) for each parameter that
/// meets elements [begin, begin + size) of the flat vectors.
template <typename Body>
void for_each_part(const std::vector<Segment>& segments, int64_t begin, int64_t size, Body&& body) {
  auto next = std::upper_bound(segments.begin(), segments.end(), begin,
                               [](int64_t b, const Segment& s) { return b < s.begin + s.size; });
  for (; next != segments.end() && next->begin < begin + size; ++next) {
    const int64_t from = std::max(begin, next->begin);
    const int64_t to = std::min(begin + size, next->begin + next->size);
    if (from < to) body(next - segments.begin(), from - next->begin, from - begin, to - from);
  }
}

/// The element type of a transport. Errors: Unsupported.
comm::ElementType element_type(at::ScalarType dtype);

}  // namespace mtraining::optim
