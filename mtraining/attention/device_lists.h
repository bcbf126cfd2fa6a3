// DeviceLists: an index that a GPU chose, as the lists that kernels read, made on that GPU; the host's copy of it comes later.
//
// In:   bits of the index in device memory. Out: block lists and columns for a rank's launches; the host's index when it is asked for.
// Next: index_plan.cc hands them out; autograd.cc keeps the host's index for backward and metrics.
//
// Nothing is asked of the device but how many columns the longest list has, once: room for lists, and for copies of columns, depends on
// it. One rank waits for nothing where max_columns bounds it; several, with columns = "once", wait for the counts of their union.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>

#include "mtraining/index/index.h"
#include "mtraining/kernels/params.h"

namespace mtraining::attention {

struct ListSizes {
  int batch = 0, num_q_heads = 0;
  int64_t seq_len = 0;
};

class DeviceLists {
 public:
  virtual ~DeviceLists() = default;
  virtual const ListSizes& sizes() const = 0;
  /// False only where no head has a column. May wait for counts.
  virtual bool has_columns() = 0;
  /// Columns of all heads, an upper bound of those of all unions. May wait for counts.
  virtual int64_t total_columns() = 0;
  /// Of one source, or nothing where the layout has no entries (zigzag) or the list is not made here (columns of several ranks).
  virtual std::optional<kernels::BlockLists> block_lists(int source_rank) = 0;
  /// Of CSR lists that block_lists made: adds those by key block.
  virtual void add_lists_by_key(int /*source_rank*/, kernels::BlockLists& /*lists*/) {}
  virtual std::optional<kernels::ColumnLists> column_lists(int source_rank) = 0;
  virtual const uint64_t* bitmap_words() = 0;
  virtual int64_t bitmap_words_a_row() const = 0;
  /// Waits for the choice, not for what was enqueued after it. Errors: InvalidArgument: values that no index can be chosen from.
  virtual std::shared_ptr<const index::Index> host_index() = 0;
  /// Of values that the device has refused by now; waits for nothing. Errors: as host_index.
  virtual void check_values() const = 0;
  virtual int64_t bytes() const = 0;
};

}  // namespace mtraining::attention
