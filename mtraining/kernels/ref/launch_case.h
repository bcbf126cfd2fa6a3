// LaunchCase: one attention problem spread over ranks, run through the kernel contract and put
// together again. For tests.
//
// In:   sizes, a layout, diagonals and columns per head, documents; how memory is laid out and
//       poisoned.
// Out:  out, lse, dq, dk, dv of the whole sequence as doubles, to compare with the oracle.
// Next: attention_test.cc.
//
// Ranks run one after the other, each launching over all shards (in one launch or one a source), as
// a ring would. Memory that must not be read holds NaN; memory that must not be written holds a
// sentinel that check_guards() looks for.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "mtraining/index/index.h"
#include "mtraining/kernels/attention_kernels.h"
#include "mtraining/kernels/params.h"
#include "mtraining/layout/layout.h"
#include "mtraining/testing/comparator.h"
#include "mtraining/testing/documents.h"
#include "mtraining/testing/oracle.h"

namespace mtraining::kernels::testing {

enum class Memory {
  kContiguous,  ///< [B, S, H, D]
  kHeadMajor,   ///< [B, H, S, D] seen as [B, S, H, D]
  kSlice,       ///< rows of a tensor four times as wide
};
enum class Columns {
  kPerStep,   ///< in each shard
  kGathered,  ///< a source of their own
};

struct LaunchOptions {
  int64_t batch = 1, num_q_heads = 4, num_kv_heads = 2, head_dim = 64;
  layout::LayoutOptions layout;
  DType dtype = DType::kFloat32;
  Memory memory = Memory::kContiguous;
  Columns columns = Columns::kPerStep;
  mtraining::testing::Documents documents = mtraining::testing::Documents::kOne;
  bool csr = false;            ///< CSR lists also where entries would do
  bool one_launch = true;      ///< all sources in one launch
  bool expanded_dout = false;  ///< dout is one row, expanded with stride 0
  double chosen_diagonals =
      0.5;  ///< share, besides diagonal 0; negative: not even diagonal 0; 1: all
  double chosen_columns = 0.1;  ///< share
  bool unequal_heads = false;   ///< a quarter, half, three quarters and all of these shares in turn
  double outlier_channel = 0;   ///< > 0: a few channels of q and k multiplied by it
  bool huge_hidden_scores = false;  ///< +500 and -500 between neighbouring documents
  double softmax_scale = 0;         ///< 0: 1 / sqrt(head_dim)
  int64_t misalign = 0;             ///< elements by which tensors are shifted in memory
  bool deterministic = true;
  int sm_margin = 0;
  uint64_t seed = 1;
};

std::string to_string(const LaunchOptions& options);

/// Host memory that a launch may read or write.
struct MemoryRange {
  void* data = nullptr;
  int64_t bytes = 0;
};

/// Who computes. Parameters point into `memory`.
class Backend {
 public:
  virtual ~Backend() = default;
  virtual void forward(const ForwardParams& params, std::span<const MemoryRange> memory) = 0;
  virtual void backward(const BackwardParams& params, std::span<const MemoryRange> memory) = 0;
  virtual void delta(const BackwardParams& params, const RoundedOut& out, void* delta,
                     std::span<const MemoryRange> memory) = 0;
  /// Whether backward can give dq in dtype.
  virtual bool rounds_dq(const BackwardParams&) const { return false; }
  virtual bool needs_out(const ForwardParams& params) const { return ref::needs_out(params); }
};

/// A tensor [B, S, H, D] in some memory order inside a guarded allocation.
class GuardedTensor {
 public:
  GuardedTensor(int64_t batch, int64_t tokens, int64_t heads, int64_t head_dim, DType dtype,
                Memory memory, double fill, int64_t misalign = 0);
  void set(int64_t b, int64_t t, int64_t h, int64_t d, double value);
  double get(int64_t b, int64_t t, int64_t h, int64_t d) const;
  View view();
  ConstView const_view() const;
  /// Name of the first byte outside the tensor's elements that changed, or "".
  std::string broken_guard() const;
  MemoryRange range() { return {bytes_.data(), static_cast<int64_t>(bytes_.size())}; }

 private:
  int64_t at(int64_t b, int64_t t, int64_t h, int64_t d) const;
  int64_t batch_, tokens_, heads_, head_dim_, first_, stride_batch_, stride_token_, stride_head_;
  DType dtype_;
  std::vector<uint8_t> bytes_;
};

class LaunchCase {
 public:
  explicit LaunchCase(const LaunchOptions& options);
  const mtraining::testing::Problem& problem() const { return problem_; }
  mtraining::testing::Mask mask() const;
  /// All ranks forward, then backward, on the CPU. dout of empty rows and saved out of empty rows
  /// hold NaN. Where a launch can give its result in dtype, it must be the other result rounded.
  mtraining::testing::Solution run();
  mtraining::testing::Solution run(Backend& backend);
  /// "" or what was overwritten, or is not what it should be.
  const std::string& broken_guard() const { return broken_guard_; }

 private:
  struct Rank;
  void make_rank(int r, Rank& rank) const;
  void note_guard(const std::string& name, const GuardedTensor& tensor);

  LaunchOptions options_;
  layout::Layout layout_;
  mtraining::testing::Problem problem_;
  std::vector<std::vector<int32_t>> diagonals_, columns_;
  index::Index index_;
  index::DiagonalBitmap bitmap_;
  std::vector<int32_t> documents_;
  std::string broken_guard_;
};

mtraining::testing::Precision precision_of(DType dtype);

}  // namespace mtraining::kernels::testing
