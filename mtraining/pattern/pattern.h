// Pattern: which (query block, key) pairs are worth computing, chosen online from q and k.
//
// In:   this rank's q and k (after RoPE), where they sit in the sequence, a communicator over the context-parallel ranks.
// Out:  an index::Index, bit-identical on every rank and for every cp_size and layout.
// Next: index/ cuts it into rank-local parts, attention/ runs it.
//
// Source: paper Alg. 1; docs/math/pattern.md. Nothing here is differentiated. Sums are int64 fixed point.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "mtraining/comm/transport.h"
#include "mtraining/index/index.h"
#include "mtraining/kernels/params.h"
#include "mtraining/layout/layout.h"

namespace mtraining::pattern {

/// Observation rows at most: their masses, in units of 2^-46, must stay within int64 over a group of heads.
inline constexpr int64_t kMaxObservationRows = 4096;

enum class PatternKind { kDense, kVerticalSlash };
enum class SlashPooling { kBlock, kPaper, kToken };
enum class Selection { kHead, kKvGroup };
enum class Window { kLast, kStrided };

SlashPooling parse_slash_pooling(std::string_view name);  // "block" | "paper" | "token"
Selection parse_selection(std::string_view name);         // "head" | "kv_group"
Window parse_window(std::string_view name);               // "last" | "strided"

/// Keys of [attention] that belong to the pattern, with their defaults. sink_tokens and local_blocks are
/// ours, not the paper's.
struct VerticalSlashOptions {
  double p_vertical = 0.9;
  double p_slash = 0.9;
  int last_q = 64;
  Window window = Window::kLast;
  SlashPooling slash_pooling = SlashPooling::kBlock;
  Selection selection = Selection::kHead;
  int sink_tokens = 64;
  int local_blocks = 2;
  std::optional<int64_t> max_columns;    ///< a cap a head on chosen (not forced) columns
  std::optional<int64_t> max_diagonals;  ///< likewise diagonals
  double dense_threshold = 0.8;          ///< >= 1: off
  double recall_floor = 0;               ///< 0: off
  int recall_rows = 256;                 ///< rows sampled elsewhere as evidence
};
/// Errors: InvalidArgument naming the key, range and value (p outside [0, 1], last_q < 1, local_blocks < 1, ..).
void check(const VerticalSlashOptions& options);

/// This rank's part of one attention layer.
struct LocalAttention {
  const layout::Layout* layout = nullptr;
  int cp_rank = 0;
  int64_t batch = 0, num_q_heads = 0, num_kv_heads = 0, head_dim = 0;
  kernels::DType dtype = kernels::DType::kFloat32;
  double softmax_scale = 0;
  kernels::ConstView q, k;  // [B, n, H, D], [B, n, Hk, D], n = layout->tokens_per_rank()
  const int32_t* document_starts =
      nullptr;  // [B, N] of the whole (global) sequence, the same on every rank; or null
};

struct Recall {
  double window = 0;         ///< on the observation rows (no evidence: at least p by construction)
  double sampled = 0;        ///< on rows elsewhere, mean over heads
  double sampled_worst = 0;  ///< the worst head's
  std::vector<double> by_head;  ///< sampled, [B * H]
};

/// Collective over `group` (all context-parallel ranks; group rank == cp_rank), same order on all ranks.
/// Cost: last_q x n x D x 2 flops a head three times (maxima, sums, masses; recall_floor adds three more over the sampled
/// rows); messages: window [B,H,last_q,D] of q's dtype, two of [B,H,last_q], masses [B,H,NB+1] int64 (paper and token pooling:
/// [B,H,N] too), a histogram of 256 bins a head for each 8 bits of the radix search, the chosen columns.
/// Errors: Unsupported where the layout has no blocks (striped). InvalidArgument, on every rank alike: options, shapes, a group
/// that is not the layout's, NaN, inf or values from 2^50 on in the observed rows of q or in k.
index::Index build_vertical_slash(const LocalAttention& local, const VerticalSlashOptions& options,
                                  comm::Communicator& group);

/// Collective. Recall of `index` (share of the rows' attention that it covers) on the observation rows and on
/// `options.recall_rows` rows sampled elsewhere: one at random in each of as many equal parts of the rest of the sequence, by
/// `seed`, the same on every rank. Where there are no rows elsewhere (N <= last_q), sampled is the window's. Errors: as above.
Recall measure_recall(const LocalAttention& local, const VerticalSlashOptions& options,
                      const index::Index& index, comm::Communicator& group, uint64_t seed);

}  // namespace mtraining::pattern
