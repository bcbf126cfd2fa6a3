// Stripes: the one view of a layout that index/ reasons with. Private to index/.
//
// In:   a Layout with blocks.
// Out:  block g of the sequence lies in stripe T = g / m at a = g % m; stripe T is held by
//       rank_of_class[T % classes] as its local stripe T / W: local block (T / W) * m + a.
// Next: entries, CSR lists and pair counts, each written once for all layouts.
//
// block_striped: m = stripe / 64, W classes (residues). contiguous: m = n / 64, W classes, one
// stripe each. zigzag: a stripe is a chunk, 2W classes of one chunk each, two per rank.
#pragma once

#include <cstdint>
#include <vector>

#include "mtraining/index/index.h"
#include "mtraining/layout/layout.h"

namespace mtraining::index {

inline constexpr int64_t kBlock = layout::kBlock;

/// Mathematical modulus, in [0, n).
constexpr int64_t mod(int64_t value, int64_t n) {
  const int64_t rest = value % n;
  return rest < 0 ? rest + n : rest;
}

struct Stripes {
  int64_t blocks = 1;    ///< m, 64-token blocks of a stripe
  int64_t classes = 1;   ///< how many stripes until the owners repeat
  bool repeats = false;  ///< block_striped: more stripes than classes; else a class is one stripe
  std::vector<int> rank_of_class;  ///< [classes]

  /// The classes that a rank holds, in the order of its local stripes.
  std::vector<int64_t> classes_of(int cp_rank) const;
};

/// Errors: Unsupported on `striped`.
Stripes make_stripes(const layout::Layout& layout);

/// Which rank holds each 64-token block of the sequence, and as which of its blocks.
struct BlockOwners {
  std::vector<int32_t> cp_rank, local_block;  ///< [num_blocks]
};
/// Of a layout with blocks.
BlockOwners block_owners(const layout::Layout& layout, int64_t num_blocks);

/// `striped`: how many 64-token units of the source (from its first on) hold a key that some real
/// query of unit `block` may see.
int64_t striped_key_units(const layout::Layout& layout, int cp_rank, int source_rank,
                          int64_t block);
/// Errors: Unsupported where the row does not choose every diagonal.
void check_dense_on_striped(const Index& index, int64_t row);

/// What every function that takes an index and a layout checks first. Errors: InvalidArgument.
void check_ranks(const char* where, int64_t index_seq_len, const layout::Layout& layout,
                 int cp_rank, int source_rank);

}  // namespace mtraining::index
