#include "mtraining/index/columns.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "mtraining/base/check.h"

namespace mtraining::index {
namespace {

/// The union of the chosen columns per (sample, kv head) as keys position * (batch * num_kv_heads)
/// + kv row, ascending. Merges the heads' sorted lists pairwise: O(columns log heads).
std::vector<int64_t> union_keys(const Index& index, int num_kv_heads) {
  MT_CHECK_ARG(num_kv_heads >= 1 && index.num_q_heads % num_kv_heads == 0,
               "columns: expected num_kv_heads to divide num_q_heads ", index.num_q_heads, ", got ",
               num_kv_heads);
  const int64_t group = index.num_q_heads / num_kv_heads;
  const int64_t kv_rows = static_cast<int64_t>(index.batch) * num_kv_heads;
  std::vector<int64_t> keys;
  std::vector<size_t> ends{0};
  for (int64_t r = 0; r < index.columns.rows; ++r) {
    for (const int64_t position : index.columns.row(r))
      keys.push_back(position * kv_rows + r / group);
    ends.push_back(keys.size());
  }
  std::vector<int64_t> merged(keys.size());
  while (ends.size() > 2) {
    std::vector<size_t> next{0};
    for (size_t run = 0; run + 1 < ends.size(); run += 2) {
      const size_t middle = ends[run + 1];
      const size_t end = run + 2 < ends.size() ? ends[run + 2] : middle;
      std::merge(keys.begin() + ends[run], keys.begin() + middle, keys.begin() + middle,
                 keys.begin() + end, merged.begin() + ends[run]);
      next.push_back(end);
    }
    keys.swap(merged);
    ends.swap(next);
  }
  keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
  return keys;
}

/// Where a union row lies in its slice.
struct Place {
  int cp_rank = 0;
  int32_t packed = 0;
};

/// Walks the union in order and hands each query head the rows that it chose.
class HeadCursors {
 public:
  HeadCursors(const Index& index, int num_kv_heads)
      : index_(index), group_(index.num_q_heads / num_kv_heads), cursors_(index.columns.rows, 0) {}

  /// take(row) for each query head of `kv_row` whose next column is `position`.
  template <typename Take>
  void advance(int64_t position, int64_t kv_row, const Take& take) {
    for (int64_t r = kv_row * group_; r < (kv_row + 1) * group_; ++r) {
      const auto columns = index_.columns.row(r);
      if (cursors_[r] < columns.size() && columns[cursors_[r]] == position) {
        ++cursors_[r];
        take(r);
      }
    }
  }

 private:
  const Index& index_;
  int64_t group_;
  std::vector<size_t> cursors_;
};

}  // namespace

kernels::ColumnLists ColumnSlice::view() const {
  kernels::ColumnLists lists;
  lists.key_rows = gathered_rows.data();
  lists.positions = positions.data();
  lists.counts = counts.data();
  lists.capacity = capacity;
  return lists;
}

ColumnPlan plan_columns(const Index& index, const layout::Layout& layout, int num_kv_heads,
                        int64_t max_rows_per_rank) {
  MT_CHECK_ARG(index.seq_len == layout.seq_len(),
               "plan_columns: expected index and layout of one seq_len, got ", index.seq_len,
               " and ", layout.seq_len());
  MT_CHECK_ARG(max_rows_per_rank >= 1, "plan_columns: expected max_rows_per_rank >= 1, got ",
               max_rows_per_rank);
  const std::vector<int64_t> keys = union_keys(index, num_kv_heads);
  const int64_t kv_rows = static_cast<int64_t>(index.batch) * num_kv_heads;
  const int ranks = layout.cp_size();

  ColumnPlan plan;
  plan.union_rows = static_cast<int64_t>(keys.size());
  HeadCursors cursors(index, num_kv_heads);
  std::vector<std::vector<std::pair<int32_t, Place>>> chosen(
      index.columns.rows);  // (position, place) of the slice, per head

  for (size_t begin = 0; begin < keys.size();) {
    ColumnSlice& slice = plan.slices.emplace_back();
    slice.rows.resize(ranks);
    for (auto& list : chosen) list.clear();
    size_t end = begin;
    for (; end < keys.size(); ++end) {
      const int64_t position = keys[end] / kv_rows;
      const int64_t kv_row = keys[end] % kv_rows;
      const layout::Owner owner = layout.owner(position);
      auto& rows = slice.rows[owner.cp_rank];
      if (static_cast<int64_t>(rows.size()) == max_rows_per_rank) break;
      const Place place{owner.cp_rank, static_cast<int32_t>(rows.size())};
      rows.push_back({static_cast<int32_t>(kv_row / num_kv_heads),
                      static_cast<int32_t>(kv_row % num_kv_heads),
                      static_cast<int32_t>(owner.offset)});
      cursors.advance(position, kv_row, [&](int64_t r) {
        chosen[r].push_back({static_cast<int32_t>(position), place});
      });
    }
    begin = end;

    for (const auto& rows : slice.rows) {
      slice.rows_per_rank = std::max(slice.rows_per_rank, static_cast<int64_t>(rows.size()));
    }
    MT_CHECK_ARG(slice.rows_per_rank * ranks <= std::numeric_limits<int32_t>::max(),
                 "plan_columns: expected cp_size * rows_per_rank < 2^31, got ", ranks, " * ",
                 slice.rows_per_rank);
    slice.capacity = 1;
    for (const auto& list : chosen)
      slice.capacity = std::max(slice.capacity, static_cast<int64_t>(list.size()));
    slice.gathered_rows.assign(index.columns.rows * slice.capacity, 0);
    slice.positions.assign(index.columns.rows * slice.capacity, 0);
    slice.counts.resize(index.columns.rows);
    for (int64_t r = 0; r < index.columns.rows; ++r) {
      slice.counts[r] = static_cast<int32_t>(chosen[r].size());
      int64_t at = r * slice.capacity;
      for (const auto& [position, place] : chosen[r]) {
        slice.gathered_rows[at] =
            static_cast<int32_t>(place.cp_rank * slice.rows_per_rank + place.packed);
        slice.positions[at] = position;
        ++at;
      }
    }
  }
  return plan;
}

bool union_too_large(const Index& index, int num_kv_heads) {
  const auto rows = static_cast<int64_t>(union_keys(index, num_kv_heads).size());
  return rows * 2 > index.seq_len * index.batch * num_kv_heads;
}

}  // namespace mtraining::index
