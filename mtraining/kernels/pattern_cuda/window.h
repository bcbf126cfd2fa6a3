// Estimation on a GPU: what the observation rows see of one rank's keys, with tensor cores, in two passes over the keys.
//
// In:   WindowParams (window.h) whose pointers are device pointers, dtype bf16 or fp16, head_dim 64, 96, 128 or 256.
// Out:  row maxima, fixed-point row sums, int64 masses by key, by block diagonal and by offset; covered mass.
// Next: select.h chooses from the masses; between the calls pattern/ reduces maxima (max) and sums (int64) over ranks.
//
// The scan keeps one maximum and one sum a (row, block of 64 keys); a block lies on one rank whatever the layout, so that row
// sums and masses, integers once they leave a block, do not depend on ranks, chunks or order. Scores differ from the CPU's in
// the last bits (tensor cores, float32; exponentials to 2 units in the last place), hence masses by a relative 1e-5 or so.
// A score that is not finite counts as no mass. What the host refuses (NaN, inf and values from 2^50 on in the rows or the keys), and a
// maximum from 2^16 on (in units of log2), is reported: *fault becomes the largest code of fault.h, int64 in device memory, or null.
// Memory: no allocation here. Stream: enqueues on params.stream, never synchronises. Errors: InvalidArgument, Unsupported,
// ExternalError before anything is written. Cost: 2 * R * n * D flops a query head and pass.
#pragma once

#include <cstdint>

#include "mtraining/kernels/pattern_cuda/fault.h"
#include "mtraining/kernels/window.h"

namespace mtraining::kernels::pattern_cuda {

/// Words of memory to be set.
struct Region {
  void* data = nullptr;
  int64_t bytes = 0;  // a multiple of 4
  uint32_t word = 0;
};
/// What row_max is set to before window_scan: below every score.
inline constexpr uint32_t kNoMaximum = 0xff800000u;

/// Observation rows of q side by side, [B, H, R, D] of its dtype, and their document starts [B, R]: this rank's rows, zeros for
/// the others', so that the sum of the ranks' bits as integers is everybody's rows.
struct RowsParams {
  int64_t batch = 0, num_q_heads = 0, head_dim = 0, num_rows = 0, seq_len = 0;
  DType dtype = DType::kBFloat16;
  ConstView q;                             // [B, n, H, D]
  const int32_t* row_positions = nullptr;  // [R]
  const int32_t* owners =
      nullptr;  // [NB, 2] rank and local block of each block; null: one rank in order
  int cp_rank = 0;
  const int32_t* document_start = nullptr;  // [B, N] of the whole sequence, or null
  void* rows = nullptr;
  int32_t* row_document_start = nullptr;  // [B, R]; written where document_start is given
  /// Memory that the same launch sets.
  Region regions[8];
  int num_regions = 0;
  void* stream = nullptr;
};
void gather_rows(const RowsParams& params);

/// Bytes of scratch that window_scan fills and window_row_sum reads: 8 a (head, block of keys, row).
int64_t window_workspace_bytes(const WindowParams& params);

/// row_max float [B, H, R], in units of log2: max of q.k * softmax_scale * log2(e) over this rank's visible keys, -inf if none.
/// reset: row_max holds kNoMaximum, else it is overwritten.
void window_scan(const WindowParams& params, void* workspace, float* row_max, int64_t* fault,
                 bool reset = false);
/// row_sum int64 [B, H, R] = sum of round(2^40 * a block's sum of exp(s - max)); row_max is the global one. zeroed: row_sum holds zeros.
void window_row_sum(const WindowParams& params, const void* workspace, const float* row_max,
                    int64_t* row_sum, int64_t* fault, bool zeroed = false);

struct WindowOutputs {
  /// Query heads that share a choice: their masses are summed. 1, or num_q_heads / num_kv_heads.
  int64_t heads_per_choice = 1;
  /// [R] row positions are consecutive (the last rows of a sequence): quicker.
  bool consecutive_rows = false;
  int64_t* columns = nullptr;    ///< [B * H / heads_per_choice, num_keys]
  int64_t* diagonals = nullptr;  ///< [.., NB + 1] in units of 2^-46, as kernels::ref::WindowMasses
  int64_t* offsets = nullptr;    ///< [.., seq_len], or null
  int64_t* totals = nullptr;     ///< [..] sums of columns, or null
  bool zeroed =
      false;  ///< columns (where heads share or R > 64), diagonals, offsets, totals hold zeros
};
/// Overwrites the outputs.
void window_masses(const WindowParams& params, const float* row_max, const int64_t* row_sum,
                   const WindowOutputs& outputs);

/// covered int64 [B, H, R] = mass of visible keys that the mask contains. diagonal_bits uint64 [B * H, diagonal_words], column_bits
/// uint32 [B * H, column_words], a bit a position.
void window_covered(const WindowParams& params, const float* row_max, const int64_t* row_sum,
                    const uint64_t* diagonal_bits, int64_t diagonal_words,
                    const uint32_t* column_bits, int64_t column_words, int64_t* covered);

}  // namespace mtraining::kernels::pattern_cuda
