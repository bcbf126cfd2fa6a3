// RingCase: one attention problem run over ranks, put together again, to compare with the float64 oracle. For tests.
//
// In:   a Problem (sizes, documents, which index), RingOptions. Out: out, lse, dq, dk, dv of the whole sequence.
// Next: ring_attention_test.cc, ring_sweep_test.cc, autograd_test.cc, ring_process_test.cc.
//
// Padded rows of every input hold NaN: nothing may read them. Ranks are loopback threads with one thread of work each.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "mtraining/attention/ring_attention.h"
#include "mtraining/comm/loopback.h"
#include "mtraining/testing/comparator.h"
#include "mtraining/testing/documents.h"
#include "mtraining/testing/oracle.h"

namespace mtraining::attention::testing {

using mtraining::testing::Documents;
using mtraining::testing::Precision;
using mtraining::testing::Solution;

enum class Choice {
  kDense,   ///< all diagonals
  kSparse,  ///< some diagonals, some columns, uneven over heads; one head without columns, one without diagonal 0
  kFew,     ///< diagonal 0 and few columns: most ranks meet no block of most sources
  kEmpty,   ///< nothing for head 0, diagonal 0 for the others
  kBlocks,  ///< single blocks, no diagonals or columns; some query blocks have none
  kMany,    ///< so many columns that exchanging their union would move more than K and V
};

struct ProblemOptions {
  int64_t batch = 1, seq_len = 512, num_q_heads = 4, num_kv_heads = 2, head_dim = 64;
  Precision precision = Precision::kFloat32;
  Documents documents = Documents::kOne;
  Choice choice = Choice::kSparse;
  uint64_t seed = 1;
  /// Keys and values of position p are scaled by 1 + this * (p / 64 mod 7): a stale or swapped shard shows.
  double scale_by_block = 0;
  bool operator==(const ProblemOptions&) const = default;
};
std::string to_string(const ProblemOptions& options);

/// Inputs, index and documents of a whole sequence, with the oracle's and the plain computation's answers when asked for.
class RingProblem {
 public:
  explicit RingProblem(const ProblemOptions& options);
  const ProblemOptions& options() const { return options_; }
  const mtraining::testing::Problem& inputs() const { return inputs_; }
  const index::Index& index() const { return index_; }
  const std::vector<int32_t>& documents() const { return documents_; }
  mtraining::testing::Mask mask() const;
  const Solution& truth() const;
  const Solution& plain() const;
  at::ScalarType dtype() const;

 private:
  ProblemOptions options_;
  mtraining::testing::Problem inputs_;
  std::vector<std::vector<int32_t>> diagonals_, columns_;
  std::vector<uint8_t> blocks_;  // kBlocks: [B, H, query block, key block]
  index::Index index_;
  std::vector<int32_t> documents_;
  mutable std::unique_ptr<Solution> truth_, plain_;
};

/// One rank's tensors. Padded rows hold NaN.
struct RankInputs {
  at::Tensor q, k, v, dout, document_starts;
};
RankInputs rank_inputs(const RingProblem& problem, const layout::Layout& layout, int cp_rank);

struct RankResult {
  ForwardResult forward;
  BackwardResult backward;
};
/// The same on a GPU, but for document_starts.
RankInputs on_device(const RankInputs& inputs, at::Device device);
RankResult run_rank(RingContext& context, const RingProblem& problem);
RankResult run_rank(RingContext& context, const RingProblem& problem, const RankInputs& inputs);

/// Called on each rank after its forward and backward.
using Inspect = std::function<void(RingContext&, const RankInputs&, const RankResult&)>;
Solution run_ring(const RingProblem& problem, const RingOptions& options,
                  const Inspect& inspect = {});
void put_rank(const RankResult& result, const RingProblem& problem, const layout::Layout& layout,
              int cp_rank, Solution& whole);
Solution empty_solution(const RingProblem& problem);

/// Options of a ring over nodes x ranks_per_node.
RingOptions ring_options(int nodes, int ranks_per_node, layout::LayoutKind kind, int64_t stripe,
                         int64_t seq_len);
std::string to_string(const RingOptions& options);

/// The worst relative row error over out and gradients; "" or what was wrong.
struct Comparison {
  std::string fault;
  double worst_out = 0, worst_gradient = 0;
};
Comparison compare_with_truth(const Solution& got, const RingProblem& problem);
/// Bytes equal, NaN included.
bool same_bits(const Solution& a, const Solution& b);
double largest_difference(const Solution& a, const Solution& b);

/// Sets this thread to one thread of work.
void use_one_thread();

}  // namespace mtraining::attention::testing
