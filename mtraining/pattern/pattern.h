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

#include "mtraining/base/words.h"
#include "mtraining/comm/transport.h"
#include "mtraining/index/index.h"
#include "mtraining/kernels/params.h"
#include "mtraining/layout/layout.h"

namespace mtraining::pattern {

/// Observation rows at most: their masses, in units of 2^-46, must stay within int64 over a group of heads.
inline constexpr int64_t kMaxObservationRows = 4096;

enum class PatternKind { kDense, kVerticalSlash, kFixed, kXAttention, kMoba };
inline constexpr Word<PatternKind> kPatternWords[] = {
    {"dense", PatternKind::kDense},
    {"vertical_slash", PatternKind::kVerticalSlash},
    {"fixed", PatternKind::kFixed},
    {"xattention", PatternKind::kXAttention},
    {"moba", PatternKind::kMoba}};
std::string_view to_string(PatternKind kind);
enum class SlashPooling { kBlock, kPaper, kToken };
inline constexpr Word<SlashPooling> kPoolingWords[] = {{"block", SlashPooling::kBlock},
                                                       {"paper", SlashPooling::kPaper},
                                                       {"token", SlashPooling::kToken}};
enum class Selection { kHead, kKvGroup };
inline constexpr Word<Selection> kSelectionWords[] = {{"head", Selection::kHead},
                                                      {"kv_group", Selection::kKvGroup}};
enum class Window { kLast, kStrided };
inline constexpr Word<Window> kWindowWords[] = {{"last", Window::kLast},
                                                {"strided", Window::kStrided}};

/// Errors: InvalidArgument names the known ones.
SlashPooling parse_slash_pooling(std::string_view name);
Selection parse_selection(std::string_view name);
Window parse_window(std::string_view name);

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

/// pattern "fixed" with budgets: the best `columns` and `diagonals` of every head, forced ones apart. Rows, pooling, selection and
/// forced entries are those of VerticalSlashOptions; p, caps, dense_threshold and recall_floor are not looked at.
struct FixedBudgets {
  int64_t columns = 0;
  int64_t diagonals = 0;
};
/// Keys xattention_block, .. of [attention].
struct XAttentionOptions {
  int block = 128;  ///< tokens; a multiple of 64 and of stride
  int stride = 16;
  double threshold = 0.9;
};
/// Keys moba_chunk, moba_top_k of [attention].
struct MobaOptions {
  int64_t chunk = 4096;  ///< tokens; a multiple of 64
  int64_t top_k = 12;    ///< chunks, a query's own counted
};
/// Errors: InvalidArgument naming the key, range and value.
void check(const FixedBudgets& budgets);
void check(const XAttentionOptions& options);
void check(const MobaOptions& options);

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

/// What a choice with budgets is: of every entry the best, as many as a cap keeps.
VerticalSlashOptions options_of(const FixedBudgets& budgets, const VerticalSlashOptions& options);

/// The same with fixed budgets. Collective, cost, errors: as build_vertical_slash.
index::Index build_fixed(const LocalAttention& local, const VerticalSlashOptions& options,
                         const FixedBudgets& budgets, comm::Communicator& group);

/// XAttention: an index in block form. For query group i and key group j of `stride` tokens each, the score is
///   sum over s of q[stride i + stride-1 - s] . k[stride j + s] * softmax_scale / stride,
/// softmax over the groups j <= i; summed over the groups of a (query block, key block) of `block` tokens. A query block takes its own
/// and the first block (of its first row's document) and then the best, lower first among equals, until they hold `threshold` of
/// all. Computed in float64, one query block on one rank, and so the same for every split.
/// Collective. A baseline: gathers q and k of the whole sequence on each rank, and costs N^2 D / stride multiply-adds a head over all
/// ranks. Errors: as build_vertical_slash.
index::Index build_xattention(const LocalAttention& local, const XAttentionOptions& options,
                              comm::Communicator& group);

/// MoBA: an index in block form. The gate of a query block and a chunk is (mean of the block's q) . (mean of the chunk's k); MoBA
/// gates single queries, and a 64-token block is the unit here. A query block takes its own chunk, up to itself, and the
/// top_k - 1 chunks before it with the highest gates, lower first among equals; chunks that lie before the documents of all its rows
/// are none. Means are summed in one order, float64: the same for every split.
/// Collective. Messages: [B, Hk, NB, D] float64 and [B, H, NB, top_k] int32. Errors: as build_vertical_slash.
index::Index build_moba(const LocalAttention& local, const MobaOptions& options,
                        comm::Communicator& group);

/// Collective. Recall of `index` (share of the rows' attention that it covers) on the observation rows and on
/// `options.recall_rows` rows sampled elsewhere: one at random in each of as many equal parts of the rest of the sequence, by
/// `seed`, the same on every rank. Where there are no rows elsewhere (N <= last_q), sampled is the window's. Errors: as above.
Recall measure_recall(const LocalAttention& local, const VerticalSlashOptions& options,
                      const index::Index& index, comm::Communicator& group, uint64_t seed);

}  // namespace mtraining::pattern
