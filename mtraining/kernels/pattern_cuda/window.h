// Estimation on a GPU: what the observation rows see of one rank's keys, with tensor cores, in two passes over the keys.
//
// In:   WindowParams (window.h) whose pointers are device pointers, dtype bf16 or fp16, head_dim 64 or 128.
// Out:  row maxima, fixed-point row sums, int64 masses by key, by block diagonal and by offset; covered mass.
// Next: select.h chooses from the masses; between the calls pattern/ reduces maxima (max) and sums (int64) over ranks.
//
// The scan keeps one maximum and one sum a (row, block of 64 keys); a block lies on one rank whatever the layout, so that row
// sums and masses, integers once they leave a block, do not depend on ranks, chunks or order. Scores differ from the CPU's in
// the last bits (tensor cores, float32; exponentials to 2 units in the last place), hence masses by a relative 1e-5 or so.
// A score that is not finite counts as no mass; it, or a maximum from 2^16 on (in units of log2), sets *status.
// Memory: no allocation here. Stream: enqueues on params.stream, never synchronises. Errors: InvalidArgument, Unsupported,
// ExternalError before anything is written. Cost: 2 * R * n * D flops a query head and pass.
#pragma once

#include <cstdint>

#include "mtraining/kernels/window.h"

namespace mtraining::kernels::pattern_cuda {

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
  void* stream = nullptr;
};
void gather_rows(const RowsParams& params);

/// Bytes of scratch that window_scan fills and window_row_sum reads: 8 a (head, block of keys, row).
int64_t window_workspace_bytes(const WindowParams& params);

/// row_max float [B, H, R], in units of log2: max of q.k * softmax_scale * log2(e) over this rank's visible keys, -inf if none.
void window_scan(const WindowParams& params, void* workspace, float* row_max);
/// row_sum int64 [B, H, R] = sum of round(2^40 * a block's sum of exp(s - max)); row_max is the global one. *status (int32, device)
/// becomes 1 as said above, and is left alone otherwise.
void window_row_sum(const WindowParams& params, const void* workspace, const float* row_max,
                    int64_t* row_sum, int32_t* status);

struct WindowOutputs {
  /// Query heads that share a choice: their masses are summed. 1, or num_q_heads / num_kv_heads.
  int64_t heads_per_choice = 1;
  /// [R] row positions are consecutive (the last rows of a sequence): quicker.
  bool consecutive_rows = false;
  int64_t* columns = nullptr;    ///< [B * H / heads_per_choice, num_keys]
  int64_t* diagonals = nullptr;  ///< [.., NB + 1] in units of 2^-46, as kernels::ref::WindowMasses
  int64_t* offsets = nullptr;    ///< [.., seq_len], or null
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
