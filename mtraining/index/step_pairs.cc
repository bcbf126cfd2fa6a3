#include "mtraining/index/step_pairs.h"

#include <algorithm>
#include <span>

#include "mtraining/base/check.h"
#include "mtraining/index/stripes.h"

namespace mtraining::index {
namespace {

constexpr int64_t kBlockPairs = kBlock * kBlock;

/// How many T in [0, end) have T % classes == k.
int64_t stripes_below(int64_t end, int64_t k, int64_t classes) {
  return end <= k ? 0 : (end - k - 1) / classes + 1;
}

/// One head's pairs by rank and source. Counts for the given ranks only, or for all.
class PairCounter {
 public:
  PairCounter(const Stripes& stripes, int64_t num_blocks, std::span<const int32_t> diagonals)
      : stripes_(stripes),
        num_blocks_(num_blocks),
        full_stripes_(num_blocks / stripes.blocks),
        tail_blocks_(num_blocks % stripes.blocks),
        diagonals_(diagonals) {}

  /// add(query class, key class, pairs) for the blocks of chosen diagonals whose query block is of
  /// class k.
  template <typename Add>
  void add_blocks(int64_t k, const Add& add) const {
    const int64_t m = stripes_.blocks;
    for (const int64_t c : diagonals_) {
      const int64_t lower = c / m;
      const int64_t last = c % m == 0 ? lower : lower + 1;
      for (int64_t u = lower; u <= last; ++u) {
        // Query blocks a of a stripe whose key block a - delta lies in the stripe u before it.
        const int64_t delta = c - u * m;
        const int64_t begin = std::max<int64_t>(0, delta);
        const int64_t end = std::min(m, m + delta);
        const int64_t whole =
            std::max<int64_t>(0, stripes_below(full_stripes_, k, stripes_.classes) -
                                     stripes_below(u, k, stripes_.classes));
        int64_t blocks = whole * (end - begin);
        if (tail_blocks_ > 0 && full_stripes_ >= u && full_stripes_ % stripes_.classes == k) {
          blocks += std::max<int64_t>(0, std::min(end, tail_blocks_) - begin);
        }
        if (blocks > 0) add(k, mod(k - u, stripes_.classes), blocks * kBlockPairs);
      }
    }
  }

  /// Query blocks g < end of class k.
  int64_t blocks_below(int64_t end, int64_t k) const {
    const int64_t stripe = end / stripes_.blocks;
    return stripes_below(stripe, k, stripes_.classes) * stripes_.blocks +
           (stripe % stripes_.classes == k ? end % stripes_.blocks : 0);
  }

  /// add(query class, key class, pairs) for each column (ascending positions) and each query class
  /// of `query_classes`.
  template <typename Add>
  void add_columns(std::span<const int32_t> columns, std::span<const int64_t> query_classes,
                   const Add& add) const {
    const int64_t m = stripes_.blocks;
    const int64_t period = stripes_.classes * m;
    // reached[p]: diagonals d with d % period == p that reach the current key block. From late key
    // blocks to early ones they only become more, so one pass over the diagonals serves all.
    std::vector<int64_t> reached(stripes_.repeats ? period : 0, 0);
    size_t num_reached = 0;
    for (size_t i = columns.size(); i > 0;) {
      const int64_t key_block = columns[i - 1] / kBlock;
      int64_t count = 0;
      for (; i > 0 && columns[i - 1] / kBlock == key_block; --i) ++count;
      const int64_t key_class = key_block / m % stripes_.classes;
      if (stripes_.repeats) {
        for (; num_reached < diagonals_.size() && diagonals_[num_reached] < num_blocks_ - key_block;
             ++num_reached) {
          ++reached[diagonals_[num_reached] % period];
        }
      }
      for (const int64_t k : query_classes) {
        const int64_t met = blocks_below(num_blocks_, k) - blocks_below(key_block, k);
        if (met == 0) continue;
        const int64_t on_diagonals = stripes_.repeats ? reached_of_class(reached, key_block, k)
                                                      : diagonals_of_stripe(key_block, k);
        add(k, key_class, (met - on_diagonals) * count * kBlock);
      }
    }
  }

 private:
  /// Diagonals d with key_block + d in a stripe of class k, from the histogram.
  int64_t reached_of_class(const std::vector<int64_t>& reached, int64_t key_block,
                           int64_t k) const {
    const int64_t m = stripes_.blocks;
    const int64_t period = static_cast<int64_t>(reached.size());
    int64_t at = mod(k * m - key_block, period);
    int64_t sum = 0;
    for (int64_t a = 0; a < m; ++a) {
      sum += reached[at];
      if (++at == period) at = 0;
    }
    return sum;
  }

  /// The same where class k is the one stripe k.
  int64_t diagonals_of_stripe(int64_t key_block, int64_t k) const {
    const int64_t begin = k * stripes_.blocks - key_block;
    const int64_t end = std::min((k + 1) * stripes_.blocks, num_blocks_) - key_block;
    const auto from = std::lower_bound(diagonals_.begin(), diagonals_.end(), begin);
    return end <= begin ? 0 : std::lower_bound(from, diagonals_.end(), end) - from;
  }

  const Stripes& stripes_;
  int64_t num_blocks_;
  int64_t full_stripes_;
  int64_t tail_blocks_;
  std::span<const int32_t> diagonals_;
};

int64_t striped_pairs(const layout::Layout& layout, int cp_rank, int source_rank) {
  int64_t units = 0;
  for (int64_t block = 0; block < layout.blocks_per_rank(); ++block) {
    units += striped_key_units(layout, cp_rank, source_rank, block);
  }
  return units * kBlockPairs;
}

/// An index in block form: calls add(query rank, key rank, pairs) for row's blocks.
template <typename Add>
void add_listed_blocks(const Index& index, const BlockOwners& owners, int64_t row, const Add& add) {
  const int64_t num_blocks = index.num_blocks();
  for (int64_t q = 0; q < num_blocks; ++q) {
    for (const int32_t k : index.blocks.row(row, q, num_blocks))
      add(owners.cp_rank[q], owners.cp_rank[k], kBlockPairs);
  }
}

void check_row(const char* where, const Index& index, int64_t row) {
  MT_CHECK_ARG(row >= 0 && row < index.diagonals.rows, where, ": expected a row in [0, ",
               index.diagonals.rows, "), got ", row);
}

}  // namespace

int64_t step_pairs(const Index& index, const layout::Layout& layout, int cp_rank, int source_rank,
                   int64_t row, bool with_columns) {
  check_ranks("step_pairs", index.seq_len, layout, cp_rank, source_rank);
  check_row("step_pairs", index, row);
  if (!layout.has_blocks()) {
    check_dense_on_striped(index, row);
    return striped_pairs(layout, cp_rank, source_rank);
  }
  int64_t pairs = 0;
  if (index.has_blocks()) {
    add_listed_blocks(index, block_owners(layout, index.num_blocks()), row,
                      [&](int query_rank, int key_rank, int64_t more) {
                        if (query_rank == cp_rank && key_rank == source_rank) pairs += more;
                      });
    return pairs;
  }
  const Stripes stripes = make_stripes(layout);
  const PairCounter counter(stripes, index.num_blocks(), index.diagonals.row(row));
  const std::vector<int64_t> query_classes = stripes.classes_of(cp_rank);
  const auto add = [&](int64_t, int64_t key_class, int64_t more) {
    if (stripes.rank_of_class[key_class] == source_rank) pairs += more;
  };
  for (const int64_t k : query_classes) counter.add_blocks(k, add);
  if (with_columns) counter.add_columns(index.columns.row(row), query_classes, add);
  return pairs;
}

std::vector<int64_t> rank_step_pairs(const Index& index, const layout::Layout& layout, int cp_rank,
                                     bool with_columns) {
  check_ranks("rank_step_pairs", index.seq_len, layout, cp_rank, cp_rank);
  std::vector<int64_t> pairs(layout.cp_size(), 0);
  if (!layout.has_blocks()) {
    for (int64_t row = 0; row < index.diagonals.rows; ++row) check_dense_on_striped(index, row);
    for (int source = 0; source < layout.cp_size(); ++source) {
      pairs[source] = index.diagonals.rows * striped_pairs(layout, cp_rank, source);
    }
    return pairs;
  }
  if (index.has_blocks()) {
    const BlockOwners owners = block_owners(layout, index.num_blocks());
    for (int64_t row = 0; row < index.diagonals.rows; ++row) {
      add_listed_blocks(index, owners, row, [&](int query_rank, int key_rank, int64_t more) {
        if (query_rank == cp_rank) pairs[key_rank] += more;
      });
    }
    return pairs;
  }
  const Stripes stripes = make_stripes(layout);
  const std::vector<int64_t> query_classes = stripes.classes_of(cp_rank);
  const auto add = [&](int64_t, int64_t key_class, int64_t more) {
    pairs[stripes.rank_of_class[key_class]] += more;
  };
  for (int64_t row = 0; row < index.diagonals.rows; ++row) {
    const PairCounter counter(stripes, index.num_blocks(), index.diagonals.row(row));
    for (const int64_t k : query_classes) counter.add_blocks(k, add);
    if (with_columns) counter.add_columns(index.columns.row(row), query_classes, add);
  }
  return pairs;
}

std::vector<int64_t> step_pair_table(const Index& index, const layout::Layout& layout, int64_t row,
                                     bool with_columns) {
  check_ranks("step_pair_table", index.seq_len, layout, 0, 0);
  check_row("step_pair_table", index, row);
  const int64_t ranks = layout.cp_size();
  std::vector<int64_t> table(ranks * ranks, 0);
  if (!layout.has_blocks()) {
    check_dense_on_striped(index, row);
    for (int r = 0; r < ranks; ++r) {
      for (int s = 0; s < ranks; ++s) table[r * ranks + s] = striped_pairs(layout, r, s);
    }
    return table;
  }
  if (index.has_blocks()) {
    add_listed_blocks(index, block_owners(layout, index.num_blocks()), row,
                      [&](int query_rank, int key_rank, int64_t more) {
                        table[query_rank * ranks + key_rank] += more;
                      });
    return table;
  }
  const Stripes stripes = make_stripes(layout);
  const PairCounter counter(stripes, index.num_blocks(), index.diagonals.row(row));
  const auto add = [&](int64_t query_class, int64_t key_class, int64_t more) {
    table[stripes.rank_of_class[query_class] * ranks + stripes.rank_of_class[key_class]] += more;
  };
  std::vector<int64_t> all_classes(stripes.classes);
  for (int64_t k = 0; k < stripes.classes; ++k) all_classes[k] = k;
  for (const int64_t k : all_classes) counter.add_blocks(k, add);
  if (with_columns) counter.add_columns(index.columns.row(row), all_classes, add);
  return table;
}

}  // namespace mtraining::index
