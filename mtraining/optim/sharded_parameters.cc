#include "mtraining/optim/sharded_parameters.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "mtraining/base/check.h"
#include "mtraining/optim/arrival_hook.h"
#include "mtraining/optim/flat_parameters.h"

namespace mtraining::optim {
namespace {

constexpr int64_t kPieceElements = 16;  // pieces begin where vector loads do
constexpr size_t kMostUnderWay = 2;     // bounds the memory of buckets under way

char* bytes_of(const at::Tensor& tensor) { return static_cast<char*>(tensor.data_ptr()); }

}  // namespace

ShardedParameters::ShardedParameters(std::vector<Named> parameters, comm::Communicator& group,
                                     const ShareOptions& options)
    : ParameterShare(std::move(parameters), options), group_(group) {
  element_type(parameter_dtype());
  make_buckets();
  const Bucket& end = buckets_.back();
  values_ = at::zeros({end.place + end.piece * group_.size()},
                      at::TensorOptions(parameter_dtype()).device(parameter_device()));
  master_ = storage_->zeros(end.offset + end.piece);
  gradient_ = at::zeros({end.offset + end.piece},
                        at::TensorOptions(options_.grad_dtype).device(parameter_device()));
  for (const Bucket& bucket : buckets_) {
    for (size_t i = bucket.first; i < bucket.last; ++i) {
      const Segment& s = segments_[i];
      at::Tensor place =
          values_.narrow(0, bucket.place + s.begin - bucket.begin, s.size).view(value(i).sizes());
      place.copy_(value(i).detach());
      value(i).set_data(place);
    }
    const int64_t piece_begin = group_.rank() * bucket.piece;
    const int64_t count = std::min(bucket.piece, bucket.size - piece_begin);
    master_piece(bucket).copy_(values_.narrow(0, bucket.place + piece_begin, bucket.piece));
    if (count > 0) {
      owned_.push_back(
          {bucket.begin + piece_begin, bucket.begin + piece_begin + count, bucket.offset});
    }
  }
  begin_backward();
  for (size_t i = 0; i < parameters_.size(); ++i) on_gradient(value(i), [this, i] { arrive(i); });
}

ShardedParameters::~ShardedParameters() {
  // Parameters may outlive this.
  for (size_t i = 0; i < parameters_.size(); ++i) on_gradient(value(i), nullptr);
}

void ShardedParameters::make_buckets() {
  const int64_t most = options_.bucket_bytes / comm::size_of(element_type(options_.grad_dtype));
  for (size_t i = 0; i < segments_.size(); ++i) {
    if (buckets_.empty() || buckets_.back().size + segments_[i].size > most) {
      buckets_.emplace_back();
      buckets_.back().first = i;
      buckets_.back().begin = segments_[i].begin;
    }
    buckets_.back().last = i + 1;
    buckets_.back().size += segments_[i].size;
    bucket_of_.push_back(buckets_.size() - 1);
  }
  int64_t place = 0, offset = 0;
  for (Bucket& bucket : buckets_) {
    const int64_t even = (bucket.size + group_.size() - 1) / group_.size();
    bucket.piece = (even + kPieceElements - 1) / kPieceElements * kPieceElements;
    bucket.place = place;
    bucket.offset = offset;
    place += bucket.piece * group_.size();
    offset += bucket.piece;
  }
}

at::Tensor ShardedParameters::master_piece(const Bucket& bucket) const {
  return master_.narrow(0, bucket.offset, bucket.piece);
}

at::Tensor ShardedParameters::value_piece(const Bucket& bucket) const {
  return values_.narrow(0, bucket.place + group_.rank() * bucket.piece, bucket.piece);
}

void ShardedParameters::arrive(size_t id) {
  MT_ASSERT(!arrived_[id], segments_[id].name, ": its gradient came twice in one backward");
  arrived_[id] = true;
  ++buckets_[bucket_of_[id]].arrived;
  send_complete();
}

void ShardedParameters::send_complete() {
  while (unsent_ > 0) {
    Bucket& bucket = buckets_[unsent_ - 1];
    if (bucket.arrived < bucket.last - bucket.first) return;
    send(bucket);
  }
}

void ShardedParameters::send(Bucket& bucket) {
  --unsent_;
  const at::NoGradGuard no_grad;
  const int ranks = group_.size();
  UnderWay job;
  job.bucket = &bucket;
  const at::TensorOptions options = gradient_.options();
  job.sent = at::empty({bucket.piece * ranks}, options);
  for (size_t i = bucket.first; i < bucket.last; ++i) {
    const Segment& s = segments_[i];
    at::Tensor place = job.sent.narrow(0, s.begin - bucket.begin, s.size);
    if (value(i).grad().defined()) {
      place.copy_(value(i).grad().reshape({-1}));
      value(i).mutable_grad() = at::Tensor();
    } else {
      place.zero_();
    }
  }
  job.sent.narrow(0, bucket.size, job.sent.numel() - bucket.size).zero_();
  if (ranks == 1) {
    gradient_.narrow(0, bucket.offset, bucket.piece).add_(job.sent);
    return;
  }
  job.received = at::empty({bucket.piece}, options);
  const auto type = element_type(options_.grad_dtype);
  const int64_t bytes = bucket.piece * comm::size_of(type);
  std::vector<comm::ConstBuffer> parts;
  for (int r = 0; r < ranks; ++r) parts.push_back({bytes_of(job.sent) + r * bytes, bytes});
  job.work = group_.reduce_scatter(parts, {bytes_of(job.received), bytes}, type);
  under_way_.push_back(std::move(job));
  if (under_way_.size() > kMostUnderWay) finish_oldest();
}

void ShardedParameters::finish_oldest() {
  UnderWay job = std::move(under_way_.front());
  under_way_.pop_front();
  job.work->wait();
  gradient_.narrow(0, job.bucket->offset, job.bucket->piece).add_(job.received);
}

void ShardedParameters::begin_backward() {
  for (Bucket& bucket : buckets_) bucket.arrived = 0;
  arrived_.assign(parameters_.size(), false);
  unsent_ = buckets_.size();
}

void ShardedParameters::zero_gradient() {
  while (!under_way_.empty()) finish_oldest();
  for (size_t i = 0; i < parameters_.size(); ++i) value(i).mutable_grad() = at::Tensor();
  begin_backward();
  gradient_.zero_();
}

void ShardedParameters::collect_gradient() {
  while (unsent_ > 0) send(buckets_[unsent_ - 1]);
  begin_backward();
}

void ShardedParameters::reduce_gradient() {
  while (!under_way_.empty()) finish_oldest();
}

void ShardedParameters::publish() {
  gather_values([this](const Bucket& bucket) {
    return master_piece(bucket).to(values_.options(), /*non_blocking=*/false, /*copy=*/true);
  });
}

void ShardedParameters::take(int64_t begin, const at::Tensor& values) {
  const at::NoGradGuard no_grad;
  const int64_t end = begin + values.numel();
  for (const Bucket& bucket : buckets_) {
    const int64_t from = std::max(begin, bucket.offset);
    const int64_t to = std::min(end, bucket.offset + bucket.piece);
    if (from >= to) continue;
    value_piece(bucket)
        .narrow(0, from - bucket.offset, to - from)
        .copy_(values.narrow(0, from - begin, to - from), /*non_blocking=*/true);
  }
}

void ShardedParameters::publish_taken() {
  // A copy: not every transport gathers in place.
  if (group_.size() > 1) gather_values([this](const Bucket& b) { return value_piece(b).clone(); });
}

void ShardedParameters::gather_values(const std::function<at::Tensor(const Bucket&)>& piece_of) {
  const at::NoGradGuard no_grad;
  const int64_t element = comm::size_of(element_type(parameter_dtype()));
  std::deque<std::pair<at::Tensor, comm::WorkPtr>> gathers;
  const auto finish = [&] {
    gathers.front().second->wait();
    gathers.pop_front();
  };
  for (const Bucket& bucket : buckets_) {
    const at::Tensor mine = piece_of(bucket);
    if (group_.size() == 1) {
      value_piece(bucket).copy_(mine);
      continue;
    }
    const int64_t bytes = bucket.piece * element;
    std::vector<comm::Buffer> parts;
    for (int r = 0; r < group_.size(); ++r)
      parts.push_back({bytes_of(values_) + bucket.place * element + r * bytes, bytes});
    comm::WorkPtr work = group_.all_gather({bytes_of(mine), bytes}, parts);
    gathers.emplace_back(mine, std::move(work));
    if (gathers.size() > kMostUnderWay) finish();
  }
  while (!gathers.empty()) finish();
}

std::unique_ptr<ParameterShare> make_parameter_share(std::vector<ParameterShare::Named> parameters,
                                                     comm::Communicator& group, int zero,
                                                     const ShareOptions& options) {
  MT_CHECK_ARG(zero == 0 || zero == 2, "parallel.zero: expected 0 or 2, got ", zero);
  if (zero == 2) return std::make_unique<ShardedParameters>(std::move(parameters), group, options);
  return std::make_unique<FlatParameters>(std::move(parameters), options, &group);
}

}  // namespace mtraining::optim
