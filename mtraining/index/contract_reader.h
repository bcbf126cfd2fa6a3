// Reads block lists and column lists as a kernel must (kernels/params.h), pair by pair. Only for
// tests.
//
// In:   a layout, an index, what index/ made of it for (cp_rank, source_rank).
// Out:  every (query position, key position) that a kernel would compute.
// Next: the tests of index/ count them against the mask.
#pragma once

#include <cstdint>
#include <vector>

#include "mtraining/index/index.h"
#include "mtraining/index/step_index.h"
#include "mtraining/kernels/params.h"
#include "mtraining/layout/layout.h"

namespace mtraining::index::contract {

/// visit(local query block, local key block) for head row r.
template <typename Visit>
void read_blocks(const kernels::BlockLists& lists, int64_t r, int64_t num_q_blocks,
                 int64_t num_k_blocks, const Visit& visit) {
  for (int64_t q = 0; q < num_q_blocks; ++q) {
    if (lists.kind == kernels::BlockListKind::kEntries) {
      const int64_t m = lists.blocks_per_stripe;
      for (int64_t e = 0; e < lists.num_entries[r]; ++e) {
        const kernels::Entry entry = lists.entries[r * lists.capacity + e];
        const int64_t stripe = q / m - entry.lambda;
        const int64_t a = q % m - entry.delta;
        if (stripe < 0 || stripe >= num_k_blocks / m || a < 0 || a >= m) continue;
        visit(q, stripe * m + a);
      }
    } else if (lists.kind == kernels::BlockListKind::kCsr) {
      const int64_t* begin = lists.row_begin + r * (num_q_blocks + 1) + q;
      for (int64_t i = begin[0]; i < begin[1]; ++i)
        visit(q, static_cast<int64_t>(lists.key_blocks[i]));
    }
  }
}

/// What a kernel knows of one rank's queries.
struct Queries {
  std::vector<int32_t> starts;
  int64_t position_stride = 1;
  int64_t seq_len = 0;

  Queries(const layout::Layout& layout, int cp_rank)
      : starts(layout.block_starts(cp_rank)),
        position_stride(layout.position_stride()),
        seq_len(layout.seq_len()) {}
  int64_t blocks() const { return static_cast<int64_t>(starts.size()); }
  int64_t position(int64_t block, int64_t i) const { return starts[block] + i * position_stride; }
};

/// visit(query position, key position) for the causal pairs of the listed blocks. The last key
/// block need not be looked at for seq_len: a key beyond it is in the future of every real query.
template <typename Visit>
void read_block_pairs(const kernels::BlockLists& lists, int64_t r, const Queries& queries,
                      const std::vector<int32_t>& key_starts, const Visit& visit) {
  read_blocks(lists, r, queries.blocks(), static_cast<int64_t>(key_starts.size()),
              [&](int64_t q, int64_t k) {
                for (int64_t i = 0; i < 64; ++i) {
                  const int64_t position = queries.position(q, i);
                  if (position >= queries.seq_len) break;
                  for (int64_t j = 0; j < 64; ++j) {
                    const int64_t key = key_starts[k] + j * queries.position_stride;
                    if (key > position) break;
                    visit(position, key);
                  }
                }
              });
}

/// visit(query position, key position, key row) for the column pairs: causal, and not on a diagonal
/// of the bitmap.
template <typename Visit>
void read_column_pairs(const kernels::ColumnLists& columns, int64_t r, const Queries& queries,
                       const DiagonalBitmap& bitmap, const Visit& visit) {
  for (int64_t q = 0; q < queries.blocks(); ++q) {
    for (int64_t i = 0; i < 64; ++i) {
      const int64_t position = queries.position(q, i);
      if (position >= queries.seq_len) break;
      for (int64_t n = 0; n < columns.counts[r]; ++n) {
        const int64_t key = columns.positions[r * columns.capacity + n];
        if (key > position) break;
        const int64_t c = position / 64 - key / 64;
        if ((bitmap.bits[r * bitmap.words + c / 64] >> (c % 64)) & 1) continue;
        visit(position, key, static_cast<int64_t>(columns.key_rows[r * columns.capacity + n]));
      }
    }
  }
}

}  // namespace mtraining::index::contract
