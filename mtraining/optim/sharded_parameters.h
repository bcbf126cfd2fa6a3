// ShardedParameters: a ParameterShare of which each of W ranks holds a W-th (parallel.zero = 2).
//
// In:   parameters; gradients as backward finishes them, layer by layer. Out: this rank's part of their sum over all ranks; after
//       an update, parameters gathered from all ranks.
// Next: adamw.h.
//
// Consecutive parameters form buckets, by id and size alone. As soon as the last gradient of a bucket is there, it is copied out,
// freed on the parameters and reduce-scattered while backward goes on; buckets leave from the last to the first on every rank,
// whatever the order of arrival. Piece r of every bucket belongs to rank r. Memory of a rank: parameters in their own dtype,
// gradient, master and moments of a W-th, and buckets under way.
// Source: ZeRO stage 2 (sharded optimizer state and gradients).
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "mtraining/optim/parameter_share.h"

namespace mtraining::optim {

class ShardedParameters : public ParameterShare {
 public:
  /// `group`: all ranks that hold the same parameters; used here alone, so that gradients never queue behind a ring's transfers.
  /// It must outlive this. One thread; backward must run in it or be waited for by it.
  ShardedParameters(std::vector<Named> parameters, comm::Communicator& group,
                    const ShareOptions& options = {});
  ~ShardedParameters() override;

  bool is_sharded() const override { return true; }
  /// All ranks must have given up a backward at the same place.
  void zero_gradient() override;
  /// Collective: sends the buckets that backward has not completed (parameters without a gradient).
  void collect_gradient() override;
  void reduce_gradient() override;
  void publish() override;
  void take(int64_t begin, const at::Tensor& values) override;
  void publish_taken() override;

  int64_t num_buckets() const { return static_cast<int64_t>(buckets_.size()); }

 private:
  struct Bucket {
    size_t first = 0, last = 0;    // parameter ids [first, last)
    int64_t begin = 0, size = 0;   // in the flat vectors
    int64_t place = 0, piece = 0;  // in values_, W pieces; a rank's piece, padded
    int64_t offset = 0;            // of this rank's piece in master and gradient
    size_t arrived = 0;
  };
  struct UnderWay {
    const Bucket* bucket = nullptr;
    at::Tensor sent, received;
    comm::WorkPtr work;
  };
  void make_buckets();
  void arrive(size_t id);
  void send_complete();
  void begin_backward();
  void send(Bucket& bucket);
  void finish_oldest();
  at::Tensor master_piece(const Bucket& bucket) const;
  at::Tensor value_piece(const Bucket& bucket) const;
  /// `piece_of(bucket)`: this rank's, which stays as it is until the gathering is over.
  void gather_values(const std::function<at::Tensor(const Bucket&)>& piece_of);

  comm::Communicator& group_;
  std::vector<Bucket> buckets_;
  std::vector<size_t> bucket_of_;  // by parameter id
  std::vector<bool> arrived_;      // likewise, in this backward
  size_t unsent_ = 0;              // buckets [0, unsent_) have not left in this backward
  std::deque<UnderWay> under_way_;
  at::Tensor values_;  // all parameters, bucket behind bucket, each padded to W pieces
};

/// `zero` (parallel.zero) 0: FlatParameters, 2: ShardedParameters. Errors: InvalidArgument on another one.
std::unique_ptr<ParameterShare> make_parameter_share(std::vector<ParameterShare::Named> parameters,
                                                     comm::Communicator& group, int zero,
                                                     const ShareOptions& options = {});

}  // namespace mtraining::optim
