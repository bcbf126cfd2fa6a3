// Choose: on one rank, columns and diagonals of all heads in one launch, from masses to lists.
//
// In:   masses by key and by diagonal. Out: what select.h and write_choice (lists.h) make of them in turn, bit for bit.
// Next: pattern/ (choice).
//
// Each choice has some thread blocks that share its keys and one that chooses its diagonals beside them; they wait for each other
// in device memory, and so the launch is cooperative. Stream: enqueues, never synchronises, allocates nothing.
#pragma once

#include <cstdint>

#include "mtraining/kernels/pattern_cuda/lists.h"

namespace mtraining::kernels::pattern_cuda {

struct ChooseParams {
  ChoiceParams choice;  // column_bits and columns_cut are not looked at
  int64_t num_keys = 0;
  const int64_t* column_masses = nullptr;  // [choices, num_keys], 0 .. 2^62
  /// int64 [choices] sums of them: lets keys that are too small for any choice be passed over; or null
  const int64_t* totals = nullptr;
  const int32_t* block_starts =
      nullptr;  // [ceil(num_keys / 64)], multiples of 64, every position below seq_len once
  double p_vertical = 1;
  int64_t max_columns = -1;  // < 0: none
  void* workspace = nullptr;
  /// The first choose_zeroed_bytes() of the workspace and *caps_hit are 0 already.
  bool zeroed = false;
};
int64_t choose_workspace_bytes(int64_t choices, int64_t num_keys, int64_t seq_len);
int64_t choose_zeroed_bytes(int64_t choices);
/// Errors: as write_choice; InvalidArgument where a pointer is missing.
void choose(const ChooseParams& params, const IndexLists& lists, const IndexBits& bits,
            uint8_t* dense_heads, int64_t* caps_hit);

}  // namespace mtraining::kernels::pattern_cuda
