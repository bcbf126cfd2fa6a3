// Job: this rank's place in a run, and the exchanges of small host values that all ranks make together.
//
// In:   Transport, cp_size x dp_size. Out: cp_rank, dp_rank, communicators of the job; sums, maxima, gathers of doubles and text.
// Next: trainer.h.
//
// rank = dp_rank * cp_size + cp_rank. Metrics and gradients have a communicator each. Everything here is collective over the
// whole job, in the same order on all ranks.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "mtraining/comm/transport.h"

namespace mtraining::train {

class Job {
 public:
  Job(comm::Transport& transport, int cp_size);

  int rank() const { return transport_.rank(); }
  int size() const { return transport_.size(); }
  int cp_rank() const { return rank() % cp_size_; }
  int dp_rank() const { return rank() / cp_size_; }
  int cp_size() const { return cp_size_; }
  /// Job ranks of this rank's context-parallel group, in cp_rank order.
  std::vector<int> cp_members() const;
  comm::Transport& transport() { return transport_; }
  comm::Communicator& gradients() { return *gradients_; }
  /// Takes host memory.
  comm::Communicator& metrics() { return *metrics_; }
  int64_t bytes_sent() const;

  void sum(std::vector<double>& values);
  bool any(bool value);
  /// [rank][values]; every rank gives equally many.
  std::vector<std::vector<double>> gather(const std::vector<double>& values);
  /// [rank] of texts of any lengths.
  std::vector<std::string> gather_text(const std::string& text);
  /// [rank] of equally large arrays of floats, concatenated.
  std::vector<float> gather_floats(const float* values, int64_t count);

 private:
  comm::Transport& transport_;
  int cp_size_;
  comm::CommunicatorPtr metrics_, gradients_;
};

}  // namespace mtraining::train
