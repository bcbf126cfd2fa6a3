// Block lists of one rank and one source, on the device, from the blocks that heads chose.
//
// In:   a bit for each (query unit, key unit) that a head chose; where the rank's and the source's blocks lie (device memory).
// Out:  row_begin, key_blocks of BlockLists: the lists that index::step_blocks_csr gives of the same choice, but for rows that begin
//       `capacity` entries apart. Next: transpose.h; attention/block_lists.h.
//
// A unit is some blocks of 64 in a row. Key blocks after the query block, and blocks beyond the sequence, are in no list.
// Stream: enqueues on `stream`, allocates nothing, never synchronises. Errors: InvalidArgument, ExternalError.
// Cost: a bit looked at for each pair of a query block and a key block not after it, twice.
#pragma once

#include <cstdint>

namespace mtraining::kernels::lists_cuda {

struct ChosenBlocks {
  int64_t rows = 0;                // batch * heads
  int64_t num_blocks = 0;          // of the sequence
  const uint32_t* bits = nullptr;  // [rows, query units, words]
  int64_t words = 0;               // of a query unit: ceil(key units / 32) or more
  int64_t query_blocks_per_unit = 1, key_blocks_per_unit = 1;
  // [num_q_blocks], [num_k_blocks] positions of local blocks' first tokens, ascending.
  const int32_t* q_block_starts = nullptr;
  const int32_t* k_block_starts = nullptr;
  int64_t num_q_blocks = 0, num_k_blocks = 0;
};

struct ExpandParams {
  ChosenBlocks chosen;
  int64_t capacity =
      0;  // of a row's list: what longest_row finds, or more; what has no room is left out
  int64_t* row_begin = nullptr;   // [rows, num_q_blocks + 1]
  int32_t* key_blocks = nullptr;  // [rows, capacity]
  int32_t* longest = nullptr;     // as longest_row's; or null
  void* stream = nullptr;
};
void expand_lists(const ExpandParams& params);

/// *longest = max(*longest, entries of the row that has most). row_begin: [rows, num_q_blocks + 1] of memory that may be overwritten.
void longest_row(const ChosenBlocks& chosen, int64_t* row_begin, int32_t* longest, void* stream);

}  // namespace mtraining::kernels::lists_cuda
