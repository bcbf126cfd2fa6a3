// Estimation kernels: what the observation rows see of one rank's keys. Three passes with small
// exchanges between them, so that nothing depends on how keys are spread over ranks: scores are
// recomputed bit-identically per (row, key), maxima are exact, sums and masses are integers.
//
// In:   observation rows (q of R positions, all ranks alike), this rank's K shard.
// Out:  row maxima; fixed-point row sums; int64 masses by key, by block diagonal, by offset; masked
//       masses for recall.
// Next: pattern/ reduces them over ranks and selects.
//
// Source: paper Alg. 1; docs/math/pattern.md. A key is visible to a row iff document_start[row] <=
//       position <= row position and position < seq_len. Unit of mass: 2^-40 (kMassOne is
//       probability 1).
#pragma once

#include <cstdint>

#include "mtraining/kernels/params.h"

namespace mtraining::kernels {

inline constexpr int64_t kMassOne = int64_t{1} << 40;

struct WindowParams {
  int64_t batch = 0, num_q_heads = 0, num_kv_heads = 0, head_dim = 0;
  DType dtype = DType::kFloat32;  // of q and k (float64 is computed in float32 here)
  double softmax_scale = 0;
  int64_t num_rows = 0;                         // R
  ConstView q;                                  // [B, R, H, D]
  const int32_t* row_positions = nullptr;       // [R]
  const int32_t* row_document_start = nullptr;  // [B, R] or null
  ConstView k;                                  // [B, num_keys, Hk, D]
  int64_t num_keys = 0;
  const int32_t* k_block_starts = nullptr;  // [ceil(num_keys / 64)]
  int64_t position_stride = 1;
  int64_t seq_len = 0;
  void* stream = nullptr;
};

namespace ref {

/// row_max float [B, H, R]: max of q.k * softmax_scale over this rank's visible keys, -inf if none.
void window_row_max(const WindowParams& params, float* row_max);
/// row_sum int64 [B, H, R] += round(exp(s - row_max) * 2^40) over this rank's visible keys; row_max
/// is the global one.
void window_row_sum(const WindowParams& params, const float* row_max, int64_t* row_sum);

/// A = exp(s - row_max) / (row_sum * 2^-40); mass = round(A * 2^40), summed over rows. Any output
/// may be null.
struct WindowMasses {
  int64_t* columns = nullptr;  // [B, H, num_keys] += (by local key)
  // [B, H, NB + 1] += mass * 64-share: offset o gives 64 - o % 64 to o / 64, o % 64 to the next
  int64_t* diagonals = nullptr;
  int64_t* offsets = nullptr;  // [B, H, seq_len] +=
};
void window_masses(const WindowParams& params, const float* row_max, const int64_t* row_sum,
                   const WindowMasses& masses);

/// covered int64 [B, H, R] += mass of visible keys that the mask contains (diagonal bits [B*H,
/// words], or the key's position in the head's column list): recall = sum covered / sum of all.
void window_covered(const WindowParams& params, const float* row_max, const int64_t* row_sum,
                    const uint64_t* diagonal_bits, int64_t diagonal_words,
                    const ColumnLists& columns, int64_t* covered);

}  // namespace ref
}  // namespace mtraining::kernels
