// Checks of kernel parameters, before anything is written.
//
// In:   ForwardParams, BackwardParams, WindowParams. Out: nothing, or InvalidArgument / Unsupported
//       naming the field, what was expected and what was got. Next: every back end calls these
//       first.
#pragma once

#include <cstdint>

#include "mtraining/kernels/params.h"
#include "mtraining/kernels/window.h"

namespace mtraining::kernels {

inline constexpr int64_t kMaxHeadDim = 512;

/// Sizes, pointers, strides, capacities: what can be seen without reading a list. Works for device
/// memory.
/// most_sources: that one launch of the back end's kernel takes.
void check(const ForwardParams& params, int64_t most_sources);
/// rounds_dq: whether the back end can write dq_rounded.
void check(const BackwardParams& params, bool rounds_dq);
void check(const WindowParams& params);
/// What delta() reads and writes.
void check_delta(const BackwardParams& params, const RoundedOut& out, const void* delta);

/// Whether `out` is read or written: the launch is not the only one of its rows, or is several of the kernel.
bool needs_out(const ForwardParams& params, int64_t most_sources);

/// What the lists say: counts within capacity, entries, key blocks and positions strictly ascending
/// and in range. Reads host memory. Cost: the length of the lists.
void check_lists(const AttentionParams& params);
/// The same for one list of columns; `name` begins the message.
void check_columns(const ColumnLists& columns, int64_t rows, int64_t num_keys, bool read_key_rows,
                   const char* name);

}  // namespace mtraining::kernels
