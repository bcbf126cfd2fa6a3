#include "mtraining/train/job.h"

#include <algorithm>
#include <numeric>

#include "mtraining/comm/members.h"

namespace mtraining::train {

Job::Job(comm::Transport& transport, int cp_size) : transport_(transport), cp_size_(cp_size) {
  metrics_ = transport.open_host("metrics", comm::all_ranks(transport.size()));
  gradients_ = transport.open("gradients", comm::all_ranks(transport.size()));
}

std::vector<int> Job::cp_members() const {
  std::vector<int> members(cp_size_);
  std::iota(members.begin(), members.end(), dp_rank() * cp_size_);
  return members;
}

int64_t Job::bytes_sent() const {
  return metrics_->counters().bytes_sent + gradients_->counters().bytes_sent;
}

void Job::sum(std::vector<double>& values) {
  metrics_
      ->all_reduce({values.data(), static_cast<int64_t>(values.size() * sizeof(double))},
                   comm::ElementType::kFloat64, comm::ReduceOp::kSum)
      ->wait();
}

bool Job::any(bool value) {
  int64_t flag = value ? 1 : 0;
  metrics_->all_reduce({&flag, sizeof(flag)}, comm::ElementType::kInt64, comm::ReduceOp::kMax)
      ->wait();
  return flag != 0;
}

std::vector<std::vector<double>> Job::gather(const std::vector<double>& values) {
  std::vector<std::vector<double>> all(size(), std::vector<double>(values.size()));
  const auto bytes = static_cast<int64_t>(values.size() * sizeof(double));
  std::vector<comm::Buffer> parts;
  for (auto& part : all) parts.push_back({part.data(), bytes});
  metrics_->all_gather({values.data(), bytes}, parts)->wait();
  return all;
}

std::vector<std::string> Job::gather_text(const std::string& text) {
  int64_t longest = 0;
  const auto lengths = gather({static_cast<double>(text.size())});
  for (const auto& length : lengths) longest = std::max(longest, static_cast<int64_t>(length[0]));
  std::string padded = text;
  padded.resize(std::max<int64_t>(longest, 1), ' ');
  const auto bytes = static_cast<int64_t>(padded.size());
  std::vector<std::string> all(size(), std::string(bytes, ' '));
  std::vector<comm::Buffer> parts;
  for (auto& part : all) parts.push_back({part.data(), bytes});
  metrics_->all_gather({padded.data(), bytes}, parts)->wait();
  for (size_t r = 0; r < all.size(); ++r) all[r].resize(static_cast<size_t>(lengths[r][0]));
  return all;
}

std::vector<float> Job::gather_floats(const float* values, int64_t count) {
  std::vector<float> all(size() * count);
  std::vector<comm::Buffer> parts;
  for (int r = 0; r < size(); ++r) parts.push_back({all.data() + r * count, count * 4});
  metrics_->all_gather({values, count * 4}, parts)->wait();
  return all;
}

}  // namespace mtraining::train
