#include "mtraining/index/stripes.h"

#include <algorithm>

#include "mtraining/base/check.h"

namespace mtraining::index {
namespace {

constexpr const char* kSparseOnStriped =
    "a sparse pattern on layout striped: 64 local tokens are not 64 consecutive positions there; "
    "use block_striped, or dense "
    "attention";

}  // namespace

std::vector<int64_t> Stripes::classes_of(int cp_rank) const {
  std::vector<int64_t> held;
  for (int64_t k = 0; k < classes; ++k) {
    if (rank_of_class[k] == cp_rank) held.push_back(k);
  }
  return held;
}

Stripes make_stripes(const layout::Layout& layout) {
  MT_CHECK_SUPPORTED(layout.has_blocks(), kSparseOnStriped);
  const int64_t ranks = layout.cp_size();
  Stripes stripes;
  if (layout.kind() == layout::LayoutKind::kZigzag) {
    stripes.blocks = layout.blocks_per_rank() / 2;
    stripes.classes = 2 * ranks;
    for (int64_t k = 0; k < 2 * ranks; ++k) {
      stripes.rank_of_class.push_back(static_cast<int>(k < ranks ? k : 2 * ranks - 1 - k));
    }
    return stripes;
  }
  stripes.blocks = layout.blocks_per_stripe();
  stripes.classes = ranks;
  stripes.repeats = layout.kind() == layout::LayoutKind::kBlockStriped;
  for (int64_t k = 0; k < ranks; ++k)
    stripes.rank_of_class.push_back(layout.rank_of_residue(static_cast<int>(k)));
  return stripes;
}

int64_t striped_key_units(const layout::Layout& layout, int cp_rank, int source_rank,
                          int64_t block) {
  const int64_t ranks = layout.cp_size();
  const int64_t first_query = block * kBlock * ranks + cp_rank;
  if (first_query >= layout.seq_len()) return 0;
  const int64_t real_left = (layout.seq_len() - 1 - first_query) / ranks;
  const int64_t last_query = first_query + std::min(real_left, kBlock - 1) * ranks;
  return last_query < source_rank ? 0 : (last_query - source_rank) / (kBlock * ranks) + 1;
}

void check_dense_on_striped(const Index& index, int64_t row) {
  MT_CHECK_SUPPORTED(!index.has_blocks(), kSparseOnStriped, " (an index of single blocks)");
  MT_CHECK_SUPPORTED(index.diagonals.counts[row] == index.num_blocks(), kSparseOnStriped,
                     " (head row ", row, " chooses ", index.diagonals.counts[row], " of ",
                     index.num_blocks(), " diagonals)");
}

BlockOwners block_owners(const layout::Layout& layout, int64_t num_blocks) {
  BlockOwners owners;
  for (int64_t block = 0; block < num_blocks; ++block) {
    const layout::Owner owner = layout.owner(block * kBlock);
    owners.cp_rank.push_back(owner.cp_rank);
    owners.local_block.push_back(static_cast<int32_t>(owner.offset / kBlock));
  }
  return owners;
}

void check_ranks(const char* where, int64_t index_seq_len, const layout::Layout& layout,
                 int cp_rank, int source_rank) {
  MT_CHECK_ARG(index_seq_len == layout.seq_len(), where,
               ": expected index and layout of one seq_len, got ", index_seq_len, " and ",
               layout.seq_len());
  MT_CHECK_ARG(cp_rank >= 0 && cp_rank < layout.cp_size(), where, ": expected cp_rank in [0, ",
               layout.cp_size(), "), got ", cp_rank);
  MT_CHECK_ARG(source_rank >= 0 && source_rank < layout.cp_size(), where,
               ": expected source_rank in [0, ", layout.cp_size(), "), got ", source_rank);
}

}  // namespace mtraining::index
