// Layout: the bijection position <-> (cp_rank, offset) of a context-parallel group.
//
// In:   seq_len real tokens, cp_size ranks, a kind, for block_striped a stripe width and the number
//       of nodes.
// Out:  who holds which position, padded length, the residue that a rank works on, first positions
//       of 64-token blocks.
// Next: data/ applies it once to ids, labels and positions; ring/ and index/ reason about residues
//       and blocks.
//
// Source: paper section 3.3 (block-level striped layout); docs/math/ring.md. Pure integers,
// thread-safe, copyable.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "mtraining/base/words.h"

namespace mtraining::layout {

/// Tokens of one unit of the mask.
inline constexpr int64_t kBlock = 64;

enum class LayoutKind { kContiguous, kZigzag, kStriped, kBlockStriped };
inline constexpr Word<LayoutKind> kLayoutWords[] = {{"contiguous", LayoutKind::kContiguous},
                                                    {"zigzag", LayoutKind::kZigzag},
                                                    {"striped", LayoutKind::kStriped},
                                                    {"block_striped", LayoutKind::kBlockStriped}};

/// Errors: InvalidArgument names the known kinds.
LayoutKind parse_layout_kind(std::string_view name);
std::string_view to_string(LayoutKind kind);

/// Where a position lives.
struct Owner {
  int cp_rank = 0;
  int64_t offset = 0;
  bool operator==(const Owner&) const = default;
};

struct LayoutOptions {
  LayoutKind kind = LayoutKind::kBlockStriped;
  int64_t seq_len = 0;  ///< real tokens N, >= 1
  int cp_size = 1;      ///< W
  int64_t stripe = 64;  ///< block_striped only: multiple of 64
  /// block_striped under a hierarchical ring: nodes of the group (divides cp_size); flat ring: 1.
  int nodes = 1;
};

class Layout {
 public:
  /// Errors: InvalidArgument naming the option, what was expected and got (also used before any
  /// communication).
  explicit Layout(const LayoutOptions& options);

  const LayoutOptions& options() const { return options_; }
  LayoutKind kind() const { return options_.kind; }
  int64_t seq_len() const { return options_.seq_len; }
  int cp_size() const { return options_.cp_size; }
  /// seq_len rounded up: contiguous and striped to 64 W, zigzag to 128 W, block_striped to W *
  /// stripe.
  int64_t padded_len() const { return padded_len_; }
  /// Tokens a rank holds, n = padded_len / W; a multiple of 64.
  int64_t tokens_per_rank() const { return padded_len_ / options_.cp_size; }
  int64_t blocks_per_rank() const { return tokens_per_rank() / kBlock; }

  Owner owner(int64_t position) const;
  int64_t position(int cp_rank, int64_t offset) const;
  /// All n positions that a rank holds, in offset order (ascending for every kind).
  std::vector<int64_t> positions(int cp_rank) const;

  /// block_striped: which stripe residue (t mod W) the rank holds: local_rank * nodes + node, with
  /// cp_rank = node * (W / nodes) + local_rank. striped and contiguous: cp_rank. Errors:
  /// Unsupported on zigzag.
  int residue(int cp_rank) const;
  int rank_of_residue(int residue) const;

  /// False for striped only: there 64 local tokens are no 64 consecutive positions, so sparse
  /// patterns are Unsupported.
  bool has_blocks() const { return options_.kind != LayoutKind::kStriped; }
  /// Distance in positions of two neighbouring local tokens inside a 64-token unit: 1, or W for
  /// striped.
  int64_t position_stride() const { return has_blocks() ? 1 : options_.cp_size; }
  /// Position of the first token of each local 64-token unit, [blocks_per_rank()], ascending, int32
  /// for kernels.
  std::vector<int32_t> block_starts(int cp_rank) const;
  /// Blocks of a local stripe, m: block_striped stripe / 64; contiguous n / 64 (a rank is one
  /// stripe). Errors: Unsupported on zigzag and striped, whose blocks follow no single (stripe,
  /// residue) rule.
  int64_t blocks_per_stripe() const;

 private:
  LayoutOptions options_;
  int64_t padded_len_ = 0;
};

}  // namespace mtraining::layout
