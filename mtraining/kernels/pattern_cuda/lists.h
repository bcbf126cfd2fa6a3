// Lists of an index on a GPU: from masses and bits to ascending lists of fixed capacity with counts, and to what kernels read.
//
// In:   masses by diagonal, bits of chosen columns; or the lists of an index. Out: index lists; diagonal bitmap; entries and
//       columns of one rank's part. Next: pattern/ (choice), torch_ops/ and attention/ (launches).
//
// A thread block a head. Whatever lists hold (unsorted values, duplicates, values out of range), what is written is ascending,
// without duplicates and in range. Stream: enqueues, never synchronises, allocates nothing.
#pragma once

#include <cstdint>

#include "mtraining/kernels/params.h"
#include "mtraining/kernels/pattern_cuda/fault.h"

namespace mtraining::kernels::pattern_cuda {

/// Sequences up to this many blocks of 64: their diagonals' bits fit shared memory.
inline constexpr int64_t kMaxBlocks = int64_t{1} << 16;

/// An index as device memory: rows = batch * num_q_heads.
struct IndexLists {
  int32_t* diagonals = nullptr;  // [rows, diagonal_capacity], -1 beyond the count
  int32_t* num_diagonals = nullptr;
  int32_t* columns = nullptr;  // [rows, column_capacity]
  int32_t* num_columns = nullptr;
  int64_t diagonal_capacity = 0, column_capacity = 0;
};

/// Bits of an index: what lists are made of. diagonals uint64 [rows, ceil(NB / 64)], columns uint32 [rows, ceil(N / 32)].
struct IndexBits {
  uint64_t* diagonals = nullptr;
  uint32_t* columns = nullptr;
};

struct ChoiceParams {
  int64_t batch = 0, num_q_heads = 0, seq_len = 0;
  int64_t heads_per_choice = 1;
  const int64_t* diagonal_masses = nullptr;  // [choices, NB + 1]; the last one does not exist
  double p_slash = 1;
  int64_t max_diagonals = -1;  // < 0: none
  /// [choices, ceil(N / 32)] chosen offsets, whose diagonals are taken in place of the best of diagonal_masses; or null
  const uint32_t* offset_bits = nullptr;
  const uint32_t* column_bits = nullptr;  // [choices, ceil(N / 32)]
  const int32_t* columns_cut = nullptr;   // [choices]
  int64_t local_blocks = 1, sink_tokens = 0;
  const int32_t* document_start = nullptr;  // [batch, N] or null
  double dense_threshold = 1;               // >= 1: off
  /// A code that is not 0 goes to the report, unless the host has yet to read an earlier one. Either may be null.
  const int64_t* fault = nullptr;
  FaultReport* report = nullptr;
  int64_t first_sample = 0;  // of the batch in the report
  void* stream = nullptr;
};
/// Chooses diagonals, unites with what is forced, makes heads dense, writes lists and bits. dense_heads uint8 [rows]; *caps_hit
/// int64 is overwritten. Errors: Unsupported above kMaxBlocks.
void write_choice(const ChoiceParams& params, const IndexLists& lists, const IndexBits& bits,
                  uint8_t* dense_heads, int64_t* caps_hit);

/// budgets int64 [choices]: how many diagonals top_p(masses, p) takes.
void slash_budgets(const int64_t* diagonal_masses, int64_t choices, int64_t seq_len, double p,
                   int64_t* budgets, void* stream);

/// heads uint8 [choices, heads_per_choice]: 1 where covered [.., num_rows] of any head of the choice is below `floor` of the whole.
void heads_below_floor(const int64_t* covered, int64_t choices, int64_t heads_per_choice,
                       int64_t num_rows, double floor, uint8_t* heads, void* stream);

/// Lists that a user gives, of a whole sequence on one rank, and what a launch over that reads.
struct GivenLists {
  IndexLists lists;
  int64_t batch = 0, num_q_heads = 0, seq_len = 0;
  IndexBits bits;  // overwritten; with entries, those of columns mean nothing
  /// Where the first count, value or document start goes that is out of range; or null. Values out of range are dropped, counts cut.
  FaultReport* report = nullptr;
  const int32_t* document_start =
      nullptr;  // [batch, N] contiguous, looked at for the report alone; or null
  // What a launch reads; entries null: not wanted.
  // [rows, entry_capacity] of one stripe that is the whole sequence
  Entry* entries = nullptr;
  int64_t entry_capacity =
      0;  // at least the smaller one of ceil(N / 64) and the capacity of diagonals
  int32_t* num_entries = nullptr;  // [rows]
  int32_t* positions = nullptr;    // [rows, capacity] of columns, which are their key rows too
  int32_t* counts = nullptr;       // [rows]
  int64_t capacity = 0;
  int32_t* block_starts = nullptr;  // [ceil(N / 64)]
  void* stream = nullptr;
};
void read_lists(const GivenLists& given);

/// Rows where heads[row] is set take all diagonals and no columns; others stay.
void make_dense(const uint8_t* heads, int64_t rows, int64_t seq_len, const IndexBits& bits,
                uint8_t* dense_heads, void* stream);
/// Lists of the bits.
void lists_of_bits(const IndexBits& bits, int64_t rows, int64_t seq_len, const IndexLists& lists,
                   void* stream);

/// Entries of one query rank against several sources (index/step_index.h): the same lists, in the same order.
struct EntriesParams {
  int64_t rows = 0, num_blocks = 0;         // heads; blocks of the sequence
  const uint64_t* diagonal_bits = nullptr;  // [rows, ceil(num_blocks / 64)]
  int64_t blocks_per_stripe = 1, ranks = 1, stripes_per_rank = 1;
  const int32_t* distances =
      nullptr;  // [num_sources] residue of the rank - residue of the source; null: one source at 0
  int64_t num_sources = 1;
  int64_t capacity = 0;            // of a list; at least entries_capacity()
  Entry* entries = nullptr;        // [num_sources, rows, capacity]
  int32_t* num_entries = nullptr;  // [num_sources, rows]
  void* stream = nullptr;
};
/// The most entries that a head can have against one source.
int64_t entries_capacity(int64_t blocks_per_stripe, int64_t stripes_per_rank, int64_t num_blocks,
                         int64_t ranks);
void write_entries(const EntriesParams& params);

/// Columns that live in sources' shards, as rows of them (columns = "per_step").
struct ShardColumnsParams {
  int64_t rows = 0, seq_len = 0;
  const uint32_t* column_bits = nullptr;  // [rows, ceil(N / 32)]
  const int32_t* owners =
      nullptr;  // [NB, 2] rank and local block of each block; null: one rank in order
  const int32_t* sources = nullptr;  // [num_sources] ranks; null: rank 0
  int64_t num_sources = 1;
  int64_t capacity = 0;
  int32_t* key_rows = nullptr;   // [num_sources, rows, capacity]
  int32_t* positions = nullptr;  // [num_sources, rows, capacity]
  int32_t* counts = nullptr;     // [num_sources, rows]
  void* stream = nullptr;
};
void write_shard_columns(const ShardColumnsParams& params);

/// Small arrays that a whole sequence on one rank needs: positions of the observation rows (the last ones, or strided), first
/// positions of blocks. Either may be null.
void write_positions(int64_t seq_len, int64_t num_rows, bool strided, int32_t* row_positions,
                     int64_t num_blocks, int32_t* block_starts, void* stream);

/// int64 [rows] pairs that a head computes (index::computed_pairs).
void count_pairs(const IndexBits& bits, int64_t rows, int64_t seq_len, int64_t* pairs,
                 void* stream);
/// bool [rows, N, N], for small N. document_start [batch, N] or null.
void write_mask(const IndexBits& bits, int64_t batch, int64_t num_q_heads, int64_t seq_len,
                const int32_t* document_start, uint8_t* mask, void* stream);

}  // namespace mtraining::kernels::pattern_cuda
