// Top-p over single keys on a GPU: a radix search on the unique key (mass, N-1-position), as pattern/top_p.h has it, bit for bit.
//
// In:   int64 masses of this rank's keys. Out: a bit a position for every chosen key of this rank, a flag where the cap cut.
// Next: lists.h makes lists of the bits.
//
// The first histogram has 4096 bins (64 an octave of mass); the search goes on in the bin where the budget ends, 8 bits at a
// time. One rank: begin(), finish(). Several ranks: the histograms that begin() and round() return are summed over ranks
// (int64) before the next call, and the bits at the end (int32: a position is one rank's); the number of rounds is fixed, since
// nobody asks the device how far it is.
// Stream: enqueues, never synchronises, allocates nothing. Memory: O(rows x keys) of int32 in the workspace.
#pragma once

#include <cstdint>

namespace mtraining::kernels::pattern_cuda {

struct SelectionParams {
  int64_t rows = 0, num_keys = 0, seq_len = 0;  // keys at positions >= seq_len do not exist
  const int64_t* masses = nullptr;              // [rows, num_keys], 0 .. 2^62
  const int32_t* block_starts = nullptr;        // [ceil(num_keys / 64)], multiples of 64
  double p = 1;
  int64_t cap = -1;               // < 0: none
  const int64_t* caps = nullptr;  // [rows] in device memory, in place of cap; or null
  uint32_t* bits = nullptr;       // [rows, ceil(seq_len / 32)]
  int32_t* cut = nullptr;         // [rows]
  void* workspace = nullptr;
  void* stream = nullptr;
};

/// Numbers that ranks sum before the next step.
struct Summed {
  int64_t* values = nullptr;
  int64_t count = 0;
};

class KeySelection {
 public:
  static int64_t workspace_bytes(int64_t rows, int64_t num_keys);
  /// Errors: InvalidArgument where a pointer is missing.
  explicit KeySelection(const SelectionParams& params);

  Summed begin();
  /// One rank, after begin(): the rest.
  void finish();

  /// Several ranks, after begin(): rounds() times round(), each time summing what it returns; then mark().
  int rounds() const;
  Summed round(int number);
  void mark();

 private:
  SelectionParams p_;
  int64_t words_;
  int64_t* histogram_;         // [rows, 4096, 2]
  int32_t* candidates_;        // [rows, num_keys]
  void* state_;                // [rows]
  bool round_is_last_ = true;  // the last round's histogram is yet to be read
};

}  // namespace mtraining::kernels::pattern_cuda
