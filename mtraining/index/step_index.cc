#include "mtraining/index/step_index.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "mtraining/base/check.h"
#include "mtraining/index/stripes.h"

namespace mtraining::index {
namespace {

using kernels::BlockListKind;
using kernels::Entry;

/// Calls emit(Entry) for each entry of the list, in the order of ascending diagonals.
template <typename Emit>
void for_each_entry(std::span<const int32_t> diagonals, int64_t m, int64_t ranks,
                    int64_t residue_distance, int64_t stripes_per_rank, const Emit& emit) {
  for (const int64_t c : diagonals) {
    const int64_t lower = c / m;
    const int64_t last = c % m == 0 ? lower : lower + 1;
    for (int64_t u = lower; u <= last; ++u) {
      if (mod(u - residue_distance, ranks) != 0) continue;
      const int64_t lambda = (u - residue_distance) / ranks;
      if (lambda >= stripes_per_rank) continue;  // no local stripe has that many before it
      emit(Entry{static_cast<int32_t>(lambda), static_cast<int32_t>(c - u * m)});
    }
  }
}

StepBlocks entry_lists(const Index& index, const layout::Layout& layout, int cp_rank,
                       int source_rank) {
  StepBlocks out;
  const int64_t m = layout.blocks_per_stripe();
  const int64_t rows = index.diagonals.rows;
  const int64_t distance = layout.residue(cp_rank) - layout.residue(source_rank);
  const int64_t stripes_per_rank = layout.blocks_per_rank() / m;
  out.kind = BlockListKind::kEntries;
  out.blocks_per_stripe = m;
  out.num_q_blocks = layout.blocks_per_rank();
  out.num_entries.assign(rows, 0);
  out.capacity = 1;
  for (int64_t r = 0; r < rows; ++r) {
    int32_t count = 0;
    for_each_entry(index.diagonals.row(r), m, layout.cp_size(), distance, stripes_per_rank,
                   [&](Entry) { ++count; });
    out.num_entries[r] = count;
    out.capacity = std::max<int64_t>(out.capacity, count);
  }
  out.entries.resize(rows * out.capacity);
  const auto before = [m](const Entry& a, const Entry& b) {
    return std::make_tuple(a.lambda * m + a.delta, a.lambda) <
           std::make_tuple(b.lambda * m + b.delta, b.lambda);
  };
  for (int64_t r = 0; r < rows; ++r) {
    Entry* const begin = out.entries.data() + r * out.capacity;
    Entry* end = begin;
    for_each_entry(index.diagonals.row(r), m, layout.cp_size(), distance, stripes_per_rank,
                   [&](Entry entry) { *end++ = entry; });
    if (!std::is_sorted(begin, end, before)) std::sort(begin, end, before);
  }
  return out;
}

/// Appends the local key blocks of class `key_class` that query block `g` meets, ascending.
/// `candidates`: diagonals that can lead from the query's class there, ascending.
void append_key_blocks(const Stripes& stripes, int64_t ranks, int64_t g, int64_t key_class,
                       std::span<const int32_t> candidates, std::vector<int32_t>& key_blocks) {
  const int64_t m = stripes.blocks;
  // A class of one stripe holds the key blocks [key_class * m, key_class * m + m); else only
  // causality bounds c.
  const int64_t highest = stripes.repeats ? g : g - key_class * m;
  const int64_t lowest = stripes.repeats ? 0 : highest - m + 1;
  const auto begin = std::lower_bound(candidates.begin(), candidates.end(), lowest);
  auto c = std::upper_bound(begin, candidates.end(), highest);
  while (c != begin) {
    const int64_t key = g - *--c;
    const int64_t stripe = key / m;
    if (stripe % stripes.classes == key_class) {
      key_blocks.push_back(static_cast<int32_t>(stripe / ranks * m + key % m));
    }
  }
}

StepBlocks csr_lists(const Index& index, const layout::Layout& layout, int cp_rank,
                     int source_rank) {
  const Stripes stripes = make_stripes(layout);
  const int64_t m = stripes.blocks;
  const int64_t ranks = layout.cp_size();
  const int64_t num_q_blocks = layout.blocks_per_rank();
  const std::vector<int64_t> query_classes = stripes.classes_of(cp_rank);
  const std::vector<int64_t> key_classes = stripes.classes_of(source_rank);

  StepBlocks out;
  out.kind = BlockListKind::kCsr;
  out.num_q_blocks = num_q_blocks;
  out.row_begin.reserve(index.diagonals.rows * (num_q_blocks + 1));
  std::vector<std::vector<int32_t>> candidates(query_classes.size() * key_classes.size());
  for (int64_t r = 0; r < index.diagonals.rows; ++r) {
    for (size_t q = 0; q < query_classes.size(); ++q) {
      for (size_t k = 0; k < key_classes.size(); ++k) {
        auto& list = candidates[q * key_classes.size() + k];
        list.clear();
        const int64_t distance = query_classes[q] - key_classes[k];
        for (const int32_t c : index.diagonals.row(r)) {
          const int64_t u = c / m;
          if (mod(u - distance, stripes.classes) == 0 ||
              (c % m != 0 && mod(u + 1 - distance, stripes.classes) == 0)) {
            list.push_back(c);
          }
        }
      }
    }
    out.row_begin.push_back(static_cast<int64_t>(out.key_blocks.size()));
    for (int64_t local = 0; local < num_q_blocks; ++local) {
      // Classes are in the order of local stripes, and a rank of several classes has one stripe of
      // each.
      const int64_t local_stripe = local / m;
      const size_t q = stripes.repeats ? 0 : static_cast<size_t>(local_stripe);
      const int64_t stripe =
          stripes.repeats ? local_stripe * ranks + query_classes[0] : query_classes[q];
      const int64_t g = stripe * m + local % m;
      if (g < index.num_blocks()) {
        for (size_t k = 0; k < key_classes.size(); ++k) {
          append_key_blocks(stripes, ranks, g, key_classes[k],
                            candidates[q * key_classes.size() + k], out.key_blocks);
        }
      }
      out.row_begin.push_back(static_cast<int64_t>(out.key_blocks.size()));
    }
  }
  return out;
}

/// An index in block form: the rank's query blocks, of each list the blocks that the source holds.
StepBlocks block_lists(const Index& index, const layout::Layout& layout, int cp_rank,
                       int source_rank) {
  const int64_t num_blocks = index.num_blocks();
  const BlockOwners owners = block_owners(layout, num_blocks);
  const std::vector<int32_t> starts = layout.block_starts(cp_rank);
  StepBlocks out;
  out.kind = BlockListKind::kCsr;
  out.num_q_blocks = layout.blocks_per_rank();
  for (int64_t r = 0; r < index.diagonals.rows; ++r) {
    out.row_begin.push_back(static_cast<int64_t>(out.key_blocks.size()));
    for (int64_t local = 0; local < out.num_q_blocks; ++local) {
      const int64_t query_block = starts[local] / kBlock;
      if (query_block < num_blocks) {
        for (const int32_t block : index.blocks.row(r, query_block, num_blocks)) {
          // Local blocks ascend with their positions on every layout.
          if (owners.cp_rank[block] == source_rank)
            out.key_blocks.push_back(owners.local_block[block]);
        }
      }
      out.row_begin.push_back(static_cast<int64_t>(out.key_blocks.size()));
    }
  }
  return out;
}

/// Units of 64 local tokens at positions first + i * W: key unit B is listed iff its first key is
/// not after the last real query.
StepBlocks striped_dense_lists(const Index& index, const layout::Layout& layout, int cp_rank,
                               int source_rank) {
  StepBlocks out;
  out.kind = BlockListKind::kCsr;
  out.num_q_blocks = layout.blocks_per_rank();
  for (int64_t r = 0; r < index.diagonals.rows; ++r) {
    out.row_begin.push_back(static_cast<int64_t>(out.key_blocks.size()));
    for (int64_t block = 0; block < out.num_q_blocks; ++block) {
      const int64_t listed = striped_key_units(layout, cp_rank, source_rank, block);
      for (int64_t key_block = 0; key_block < listed; ++key_block)
        out.key_blocks.push_back(static_cast<int32_t>(key_block));
      out.row_begin.push_back(static_cast<int64_t>(out.key_blocks.size()));
    }
  }
  return out;
}

}  // namespace

kernels::BlockLists StepBlocks::view() const {
  kernels::BlockLists lists;
  lists.kind = kind;
  lists.entries = entries.data();
  lists.num_entries = num_entries.data();
  lists.capacity = capacity;
  lists.blocks_per_stripe = blocks_per_stripe;
  lists.row_begin = row_begin.data();
  lists.key_blocks = key_blocks.data();
  return lists;
}

int64_t StepBlocks::bytes() const {
  return static_cast<int64_t>(
      entries.size() * sizeof(Entry) + num_entries.size() * sizeof(int32_t) +
      row_begin.size() * sizeof(int64_t) + key_blocks.size() * sizeof(int32_t));
}

StepBlocks step_blocks(const Index& index, const layout::Layout& layout, int cp_rank,
                       int source_rank) {
  const bool has_entries = layout.kind() == layout::LayoutKind::kBlockStriped ||
                           layout.kind() == layout::LayoutKind::kContiguous;
  if (!has_entries || index.has_blocks())
    return step_blocks_csr(index, layout, cp_rank, source_rank);
  check_ranks("step_blocks", index.seq_len, layout, cp_rank, source_rank);
  return entry_lists(index, layout, cp_rank, source_rank);
}

StepBlocks step_blocks_csr(const Index& index, const layout::Layout& layout, int cp_rank,
                           int source_rank) {
  check_ranks("step_blocks_csr", index.seq_len, layout, cp_rank, source_rank);
  if (layout.has_blocks() && index.has_blocks())
    return block_lists(index, layout, cp_rank, source_rank);
  if (layout.has_blocks()) return csr_lists(index, layout, cp_rank, source_rank);
  for (int64_t r = 0; r < index.diagonals.rows; ++r) check_dense_on_striped(index, r);
  return striped_dense_lists(index, layout, cp_rank, source_rank);
}

StepBlocks transpose(const StepBlocks& blocks, int64_t num_k_blocks) {
  StepBlocks out;
  out.kind = blocks.kind;
  out.blocks_per_stripe = blocks.blocks_per_stripe;
  out.capacity = blocks.capacity;
  out.num_q_blocks = num_k_blocks;
  if (blocks.kind == BlockListKind::kEntries) {
    MT_CHECK_ARG(num_k_blocks % blocks.blocks_per_stripe == 0,
                 "transpose: expected whole stripes of ", blocks.blocks_per_stripe,
                 " blocks, got num_k_blocks ", num_k_blocks);
    out.num_entries = blocks.num_entries;
    out.entries.resize(blocks.entries.size());
    // The order is by (distance, lambda): negated and reversed it is the order again.
    for (size_t r = 0; r < blocks.num_entries.size(); ++r) {
      const Entry* from = blocks.entries.data() + r * blocks.capacity;
      Entry* to = out.entries.data() + r * blocks.capacity;
      const int32_t count = blocks.num_entries[r];
      for (int32_t e = 0; e < count; ++e)
        to[count - 1 - e] = Entry{-from[e].lambda, -from[e].delta};
    }
    return out;
  }
  const int64_t rows = static_cast<int64_t>(blocks.row_begin.size()) / (blocks.num_q_blocks + 1);
  out.row_begin.assign(rows * (num_k_blocks + 1), 0);
  out.key_blocks.resize(blocks.key_blocks.size());
  std::vector<int64_t> cursor(num_k_blocks);
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t* from = blocks.row_begin.data() + r * (blocks.num_q_blocks + 1);
    int64_t* to = out.row_begin.data() + r * (num_k_blocks + 1);
    for (int64_t i = from[0]; i < from[blocks.num_q_blocks]; ++i) {
      const int32_t key_block = blocks.key_blocks[i];
      MT_CHECK_ARG(key_block >= 0 && key_block < num_k_blocks,
                   "transpose: expected key blocks in [0, ", num_k_blocks, "), got ", key_block);
      ++to[key_block + 1];
    }
    to[0] = from[0];
    for (int64_t k = 0; k < num_k_blocks; ++k) to[k + 1] += to[k];
    std::copy(to, to + num_k_blocks, cursor.begin());
    for (int64_t q = 0; q < blocks.num_q_blocks; ++q) {
      for (int64_t i = from[q]; i < from[q + 1]; ++i)
        out.key_blocks[cursor[blocks.key_blocks[i]]++] = static_cast<int32_t>(q);
    }
  }
  return out;
}

kernels::ColumnLists StepColumns::view() const {
  kernels::ColumnLists lists;
  lists.key_rows = rows.data();
  lists.positions = positions.data();
  lists.counts = counts.data();
  lists.capacity = capacity;
  return lists;
}

StepColumns step_columns(const Index& index, const layout::Layout& layout, int source_rank) {
  check_ranks("step_columns", index.seq_len, layout, source_rank, source_rank);
  StepColumns out;
  const int64_t heads = index.columns.rows;
  out.counts.assign(heads, 0);
  out.capacity = 1;
  std::vector<std::pair<int32_t, int32_t>> found;  // (offset, position), head after head
  for (int64_t r = 0; r < heads; ++r) {
    for (const int32_t position : index.columns.row(r)) {
      const layout::Owner owner = layout.owner(position);
      if (owner.cp_rank != source_rank) continue;
      found.emplace_back(static_cast<int32_t>(owner.offset), position);
      ++out.counts[r];
    }
    out.capacity = std::max<int64_t>(out.capacity, out.counts[r]);
  }
  out.rows.assign(heads * out.capacity, 0);
  out.positions.assign(heads * out.capacity, 0);
  auto next = found.begin();
  for (int64_t r = 0; r < heads; ++r) {
    for (int32_t n = 0; n < out.counts[r]; ++n, ++next) {
      out.rows[r * out.capacity + n] = next->first;
      out.positions[r * out.capacity + n] = next->second;
    }
  }
  return out;
}

}  // namespace mtraining::index
