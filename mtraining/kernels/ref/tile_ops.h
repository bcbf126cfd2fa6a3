// TileOps: the arithmetic of one tile (64 queries x up to 64 keys), compiled once per instruction
// set, chosen at run time.
//
// In:   rows in memory of any dtype; tiles of T (float or double) in this thread's scratch.
// Out:  tiles. Next: forward.cc, backward.cc and window.cc walk the lists and call these.
//
// Scores are kept transposed, [key][query], so that everything the softmax does runs down a column:
// 64 queries are the lanes of a few vectors, and no sum or maximum crosses lanes. K and V need no
// transposition then; only the query block's q (and dout in backward) is transposed, once.
//
// Every lane of every product is one chain of multiply-adds in ascending k, whatever the tile's
// shape, so that a score does not depend on where its key sits in the tile. Tiles are 64-byte
// aligned; leading dimensions are multiples of 16.
#pragma once

#include <cstdint>
#include <type_traits>

#include "mtraining/kernels/params.h"

namespace mtraining::kernels::ref {

inline constexpr int kTile = kBlock;      // queries of a tile; most keys of a tile
inline constexpr int kRowGranule = 8;     // keys of a tile are padded to a multiple of this
inline constexpr int kDepthGranule = 16;  // head_dim is padded to a multiple of this

/// Positions live in lanes as wide as the scores.
template <typename T>
using LanePosition = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;

template <typename T>
struct TileOps {
  const char* isa;

  /// tile[j][0..depth) = row rows[j] of the source as T, zero where rows[j] < 0 and beyond
  /// head_dim. base: first element of the (batch, head); stride in elements; num_rows any; depth:
  /// padded head_dim.
  void (*load_rows)(DType dtype, const void* base, int64_t stride, const int32_t* rows,
                    int64_t num_rows, int64_t head_dim, int64_t depth, T* tile);
  /// dst[d][i] = src[i][d] * scale for 64 rows.
  void (*transpose_to_lanes)(const T* src, int64_t depth, T scale, T* dst);
  /// dst[i][d] = src[d][i] / divisor[i] for 64 rows.
  void (*transpose_to_rows)(const T* src, int64_t depth, const T* divisor, T* dst);
  /// dst row rows[j] += tile[j], where rows[j] >= 0. dst: T, first element of the (batch, head);
  /// stride in elements.
  void (*add_rows)(const T* tile, int64_t depth, const int32_t* rows, int64_t num_rows,
                   int64_t head_dim, T* dst, int64_t stride);

  // The five products of attention. Keys are reached by a pointer to each row, so that they can
  // stay where they are; num_keys is a multiple of 8, depth of 16. Rows that are not computed point
  // to zeros, or to memory that nobody reads.

  /// scores[j][i] = sum_d rows[j][d] lanes[d][i]: k and q give the scores, v and dout give dp.
  void (*scores)(int64_t num_keys, int64_t depth, const T* const* rows, const T* lanes, T* scores);
  /// out[d][i] (+)= sum_j rows[j][d] weights[j][i].
  void (*weighted_values)(int64_t num_keys, int64_t depth, const T* const* rows, const T* weights,
                          bool add, T* out);
  /// rows[j][d] += sum_i weights[j][i] queries[i][d]: dv from p and dout, dk from ds and q.
  void (*key_gradients)(int64_t num_keys, int64_t depth, const T* weights, const T* queries,
                        T* const* rows);
  /// queries[i][d] (+)= sum_j weights[j][i] rows[j][d]: dq from ds and k.
  void (*query_gradients)(int64_t num_keys, int64_t depth, const T* weights, const T* const* rows,
                          bool add, T* queries);

  /// scores[j][i] = -inf unless begin[i] <= key[j] <= query[i].
  void (*mask)(int64_t num_keys, const LanePosition<T>* key, const LanePosition<T>* query,
               const LanePosition<T>* begin, T* scores);
  /// One step of the online softmax: scores become e^(score - max), row_max and row_sum (64 each)
  /// advance, rescale[i] is what earlier sums must be multiplied by. Returns false where that is 1
  /// for all.
  bool (*online_softmax)(int64_t num_keys, T* scores, T* row_max, T* row_sum, T* rescale);
  /// tile[d][i] *= scale[i].
  void (*scale_lanes)(int64_t depth, const T* scale, T* tile);
  /// scores[j][i] = e^(scores[j][i] - lse[i]); 0 where the score is -inf.
  void (*probabilities)(int64_t num_keys, const T* lse, T* scores);
  /// dp[j][i] = p (dp - delta[i]) scale; 0 where p is 0, whatever dp.
  void (*score_gradients)(int64_t num_keys, const T* p, const T* delta, T scale, T* dp);

  /// sums[i] = sum_d a[d][i] b[d][i], by the same chain as scores(): where out equals a row of v,
  /// delta equals that dp.
  void (*lane_dots)(int64_t depth, const T* a, const T* b, T* sums);

  /// Window estimation (float only; null for double). row_max[i] = max over keys.
  void (*window_max)(int64_t num_keys, const T* scores, T* row_max);
  /// sums[i] += round(e^(score - row_max[i]) * 2^40) over keys.
  void (*window_sum)(int64_t num_keys, const T* scores, const T* row_max, int64_t* sums);
  /// masses[j][i] = round(e^(score - row_max[i]) * factor[i]).
  void (*window_mass)(int64_t num_keys, const T* scores, const T* row_max, const double* factor,
                      int64_t* masses);

  /// values[i] = e^values[i] (the function that all of the above use; count any).
  void (*exponential)(int64_t count, T* values);
};

/// The best that this processor runs; MTRAINING_REF_ISA = baseline | v3 | v4 in the environment
/// asks for a lower one.
template <typename T>
const TileOps<T>& tile_ops();
/// By name, for tests; null where this processor or build does not have it.
template <typename T>
const TileOps<T>* find_tile_ops(const char* isa);

}  // namespace mtraining::kernels::ref
