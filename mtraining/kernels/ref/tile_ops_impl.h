// The one source of TileOps, compiled by tile_ops_baseline.cc, tile_ops_v3.cc and tile_ops_v4.cc
// with different flags.
//
// In:   MT_VECTOR_BYTES, the width of a vector register. Out: make_ops<T>(isa). Next: tile_ops.cc
//       picks one.
//
// Everything is in an unnamed namespace and nothing of the standard library is used: an inline
// function emitted here with wide instructions must not be the copy that the linker keeps for the
// rest of the program.
#pragma once

#include <cstdint>

#include "mtraining/kernels/ref/tile_ops.h"

namespace mtraining::kernels::ref {
namespace {

template <typename T>
struct Vec;
template <>
struct Vec<float> {
  typedef float type __attribute__((vector_size(MT_VECTOR_BYTES), may_alias));
  typedef float anywhere __attribute__((vector_size(MT_VECTOR_BYTES), may_alias, aligned(4)));
  typedef int32_t bits __attribute__((vector_size(MT_VECTOR_BYTES), may_alias));
  typedef uint32_t words __attribute__((vector_size(MT_VECTOR_BYTES), may_alias));
};
template <>
struct Vec<double> {
  typedef double type __attribute__((vector_size(MT_VECTOR_BYTES), may_alias));
  typedef double anywhere __attribute__((vector_size(MT_VECTOR_BYTES), may_alias, aligned(8)));
  typedef int64_t bits __attribute__((vector_size(MT_VECTOR_BYTES), may_alias));
  typedef uint64_t words __attribute__((vector_size(MT_VECTOR_BYTES), may_alias));
};
template <typename T>
inline constexpr int kLanes = MT_VECTOR_BYTES / sizeof(T);
template <typename T>
inline constexpr int kVectors = kTile / kLanes<T>;  // vectors across 64 queries

#define MT_INLINE static inline __attribute__((always_inline))
#define MT_METHOD inline __attribute__((always_inline))

template <typename T>
MT_INLINE typename Vec<T>::type load(const T* p) {
  return *reinterpret_cast<const typename Vec<T>::type*>(p);
}
template <typename T>
MT_INLINE void store(T* p, typename Vec<T>::type v) {
  *reinterpret_cast<typename Vec<T>::type*>(p) = v;
}
template <typename T>
MT_INLINE typename Vec<T>::type load_unaligned(const T* p) {
  return *reinterpret_cast<const typename Vec<T>::anywhere*>(p);
}
template <typename T>
MT_INLINE void store_unaligned(T* p, typename Vec<T>::type v) {
  *reinterpret_cast<typename Vec<T>::anywhere*>(p) = v;
}
template <typename T>
MT_INLINE typename Vec<T>::type broadcast(T x) {
  return x - typename Vec<T>::type{};
}

// ---- exponential --------------------------------------------------------------------------------
// e^x = 2^n e^f with n = round(x / ln 2), |f| <= ln 2 / 2; ln 2 in two parts so that n ln 2 is
// exact. Results below the smallest normal number are 0.

MT_INLINE Vec<float>::type exponential(Vec<float>::type x) {
  using V = Vec<float>::type;
  using B = Vec<float>::words;  // sums beyond the range are thrown away below, and may wrap
  constexpr float kRound =
      0x1.8p23f;  // adding it rounds to an integer, which the low bits then hold
  const V t = x * 0x1.715476p+0f + kRound;
  const V n = t - kRound;
  V f = x - n * 0x1.62e4p-1f;
  f = f - n * 0x1.7f7d1cp-20f;
  // e^f = 1 + f + f^2 p(f); p interpolates at Chebyshev nodes, relative error 1.1e-8
  V p = f * 0x1.6d1606p-10f + 0x1.12106cp-7f;
  p = p * f + 0x1.555516p-5f;
  p = p * f + 0x1.5554d8p-3f;
  p = p * f + 0.5f;
  p = (p * f) * f + f;
  p = p + 1.0f;
  const V y = reinterpret_cast<V>(reinterpret_cast<B>(p) + (reinterpret_cast<B>(t) << 23));
  // ln(2^-126); x = -inf comes here too
  const V low = x < -0x1.5d589ep+6f ? V{} : y;
  return x <= 0x1.62e42ep+6f ? low : x + __builtin_inff();  // NaN comes here too, and stays
}

MT_INLINE Vec<double>::type exponential(Vec<double>::type x) {
  using V = Vec<double>::type;
  using B = Vec<double>::words;
  constexpr double kRound = 0x1.8p52;
  const V t = x * 0x1.71547652b82fep+0 + kRound;
  const V n = t - kRound;
  V f = x - n * 0x1.62e42feep-1;
  f = f - n * 0x1.a39ef35793c76p-33;
  V p = V{} + 1.0 / 6227020800.0;  // the Taylor series to f^13: the rest is below 1e-17
  p = p * f + 1.0 / 479001600.0;
  p = p * f + 1.0 / 39916800.0;
  p = p * f + 1.0 / 3628800.0;
  p = p * f + 1.0 / 362880.0;
  p = p * f + 1.0 / 40320.0;
  p = p * f + 1.0 / 5040.0;
  p = p * f + 1.0 / 720.0;
  p = p * f + 1.0 / 120.0;
  p = p * f + 1.0 / 24.0;
  p = p * f + 1.0 / 6.0;
  p = p * f + 0.5;
  p = (p * f) * f + f;
  p = p + 1.0;
  const V y = reinterpret_cast<V>(reinterpret_cast<B>(p) + (reinterpret_cast<B>(t) << 52));
  const V low = x < -0x1.6232bdd7abcd2p+9 ? V{} : y;  // ln(2^-1022)
  return x <= 0x1.62e42fefa39efp+9 ? low : x + __builtin_inf();
}

template <typename T>
void exponential_array(int64_t count, T* values) {
  constexpr int kN = kLanes<T>;
  for (int64_t i = 0; i < count; i += kN) {
    alignas(64) T lanes[kN] = {};
    const int64_t n = count - i < kN ? count - i : kN;
    for (int64_t l = 0; l < n; ++l) lanes[l] = values[i + l];
    store<T>(lanes, exponential(load<T>(lanes)));
    for (int64_t l = 0; l < n; ++l) values[i + l] = lanes[l];
  }
}

// ---- rows ---------------------------------------------------------------------------------------

MT_INLINE float as_float(uint32_t bits) { return __builtin_bit_cast(float, bits); }

struct BFloat16 {
  uint16_t bits;
  MT_INLINE float value(BFloat16 x) { return as_float(static_cast<uint32_t>(x.bits) << 16); }
};
struct Float16 {
  uint16_t bits;
  // The shifted exponent is 112 too small; the multiplication corrects it, subnormals included.
  // Infinities and NaNs keep the largest exponent.
  MT_INLINE float value(Float16 x) {
    const uint32_t magnitude = static_cast<uint32_t>(x.bits & 0x7fff) << 13;
    const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16;
    const float finite = as_float(magnitude) * 0x1p112f;
    const uint32_t special = magnitude | 0x7f800000u;
    const uint32_t bits = magnitude >= 0x0f800000u ? special : __builtin_bit_cast(uint32_t, finite);
    return as_float(bits | sign);
  }
};
MT_INLINE float value_of(BFloat16 x) { return BFloat16::value(x); }
MT_INLINE float value_of(Float16 x) { return Float16::value(x); }
MT_INLINE float value_of(float x) { return x; }
MT_INLINE double value_of(double x) { return x; }

template <typename T, typename Source>
void load_rows_of(const Source* base, int64_t stride, const int32_t* rows, int64_t num_rows,
                  int64_t head_dim, int64_t depth, T* tile) {
  for (int64_t j = 0; j < num_rows; ++j, tile += depth) {
    int64_t d = 0;
    if (rows[j] >= 0) {
      const Source* src = base + static_cast<int64_t>(rows[j]) * stride;
      for (; d < head_dim; ++d) tile[d] = static_cast<T>(value_of(src[d]));
    }
    for (; d < depth; ++d) tile[d] = 0;
  }
}

template <typename T>
void load_rows(DType dtype, const void* base, int64_t stride, const int32_t* rows, int64_t num_rows,
               int64_t head_dim, int64_t depth, T* tile) {
  switch (dtype) {
    case DType::kFloat64:
      return load_rows_of(static_cast<const double*>(base), stride, rows, num_rows, head_dim, depth,
                          tile);
    case DType::kFloat32:
      return load_rows_of(static_cast<const float*>(base), stride, rows, num_rows, head_dim, depth,
                          tile);
    case DType::kBFloat16:
      return load_rows_of(static_cast<const BFloat16*>(base), stride, rows, num_rows, head_dim,
                          depth, tile);
    case DType::kFloat16:
      return load_rows_of(static_cast<const Float16*>(base), stride, rows, num_rows, head_dim,
                          depth, tile);
  }
}

template <typename T>
void add_rows(const T* tile, int64_t depth, const int32_t* rows, int64_t num_rows, int64_t head_dim,
              T* dst, int64_t stride) {
  for (int64_t j = 0; j < num_rows; ++j, tile += depth) {
    if (rows[j] < 0) continue;
    T* row = dst + static_cast<int64_t>(rows[j]) * stride;
    for (int64_t d = 0; d < head_dim; ++d) row[d] += tile[d];
  }
}

template <typename T>
void transpose_to_lanes(const T* src, int64_t depth, T scale, T* dst) {
  constexpr int kStep = 8;
  for (int64_t d = 0; d < depth; d += kStep) {
    for (int64_t i = 0; i < kTile; i += kStep) {
      for (int x = 0; x < kStep; ++x) {
        for (int y = 0; y < kStep; ++y)
          dst[(d + x) * kTile + i + y] = src[(i + y) * depth + d + x] * scale;
      }
    }
  }
}

template <typename T>
void transpose_to_rows(const T* src, int64_t depth, const T* divisor, T* dst) {
  constexpr int kStep = 8;
  for (int64_t i = 0; i < kTile; i += kStep) {
    for (int64_t d = 0; d < depth; d += kStep) {
      for (int y = 0; y < kStep; ++y) {
        for (int x = 0; x < kStep; ++x)
          dst[(i + y) * depth + d + x] = src[(d + x) * kTile + i + y] / divisor[i + y];
      }
    }
  }
}

// ---- products -----------------------------------------------------------------------------------
// One micro-kernel; what differs is how an operand is reached. kM rows of c by kN vectors stay in
// registers over all k.

/// a[m][k], rows given by pointers.
template <typename T, int kM>
struct RowsOfA {
  const T* row[kM];
  MT_METHOD RowsOfA(const T* const* rows, int64_t m) {
    for (int i = 0; i < kM; ++i) row[i] = rows[m + i];
  }
  MT_METHOD T at(int m, int64_t k) const { return row[m][k]; }
};
/// a[m][k] in a tile.
template <typename T, int kM>
struct TileOfA {
  const T* first;
  MT_METHOD TileOfA(const T* tile, int64_t m) : first(tile + m * kTile) {}
  MT_METHOD T at(int m, int64_t k) const { return first[m * kTile + k]; }
};
/// a[k][m], rows given by pointers.
template <typename T, int kM>
struct ColumnsOfA {
  const T* const* rows;
  int64_t m0;
  MT_METHOD ColumnsOfA(const T* const* r, int64_t m) : rows(r), m0(m) {}
  MT_METHOD T at(int m, int64_t k) const { return rows[k][m0 + m]; }
};
/// a[k][m] in a tile.
template <typename T, int kM>
struct ColumnsOfTileA {
  const T* first;
  MT_METHOD ColumnsOfTileA(const T* tile, int64_t m) : first(tile + m) {}
  MT_METHOD T at(int m, int64_t k) const { return first[k * kTile + m]; }
};

/// Rows of b and c: row i at first + i * stride, or by pointer.
template <typename T>
struct Strided {
  T* first;
  int64_t stride;
  MT_METHOD T* row(int64_t i) const { return first + i * stride; }
};
template <typename T>
struct Pointers {
  T* const* rows;
  MT_METHOD T* row(int64_t i) const { return rows[i]; }
};

template <typename T, int kM, int kN, bool kAdd, typename A, typename B, typename C>
MT_INLINE void micro_product(int64_t k, const A& a, const B& b, const C& c, int64_t m, int64_t n) {
  using V = typename Vec<T>::type;
  V acc[kM][kN];
  for (int i = 0; i < kM; ++i) {
    for (int j = 0; j < kN; ++j) acc[i][j] = V{};
  }
  for (int64_t x = 0; x < k; ++x) {
    const T* from = b.row(x) + n;
    V row[kN];
    for (int j = 0; j < kN; ++j) row[j] = load_unaligned<T>(from + j * kLanes<T>);
    for (int i = 0; i < kM; ++i) {
      const T factor = a.at(i, x);
      for (int j = 0; j < kN; ++j) acc[i][j] += row[j] * factor;
    }
  }
  // Added at the end, not started from: the rounding of 64 small terms against a large sum would
  // be felt in delta.
  for (int i = 0; i < kM; ++i) {
    T* to = c.row(m + i) + n;
    for (int j = 0; j < kN; ++j) {
      T* at = to + j * kLanes<T>;
      store_unaligned<T>(at, kAdd ? load_unaligned<T>(at) + acc[i][j] : acc[i][j]);
    }
  }
}

template <typename T, template <typename, int> typename A, bool kAdd, typename Source, typename B,
          typename C>
MT_INLINE void product(int64_t m, int64_t n, int64_t k, const Source& a, const B& b, const C& c) {
  constexpr int kM = MT_PRODUCT_ROWS;
  static_assert(kRowGranule % kM == 0);
  constexpr int64_t kWide = 2 * kLanes<T>;
  int64_t x = 0;
  for (; x + kWide <= n; x += kWide) {
    for (int64_t i = 0; i < m; i += kM) {
      micro_product<T, kM, 2, kAdd>(k, A<T, kM>(a, i), b, c, i, x);
    }
  }
  for (; x < n; x += kLanes<T>) {
    for (int64_t i = 0; i < m; i += kM) {
      micro_product<T, kM, 1, kAdd>(k, A<T, kM>(a, i), b, c, i, x);
    }
  }
}

template <typename T>
void scores(int64_t num_keys, int64_t depth, const T* const* rows, const T* lanes, T* tile) {
  product<T, RowsOfA, false>(num_keys, kTile, depth, rows, Strided<const T>{lanes, kTile},
                             Strided<T>{tile, kTile});
}
template <typename T>
void weighted_values(int64_t num_keys, int64_t depth, const T* const* rows, const T* weights,
                     bool add, T* lanes) {
  const Strided<const T> b{weights, kTile};
  const Strided<T> c{lanes, kTile};
  if (add) {
    product<T, ColumnsOfA, true>(depth, kTile, num_keys, rows, b, c);
  } else {
    product<T, ColumnsOfA, false>(depth, kTile, num_keys, rows, b, c);
  }
}
template <typename T>
void key_gradients(int64_t num_keys, int64_t depth, const T* weights, const T* queries,
                   T* const* rows) {
  product<T, TileOfA, true>(num_keys, depth, kTile, weights, Strided<const T>{queries, depth},
                            Pointers<T>{rows});
}
template <typename T>
void query_gradients(int64_t num_keys, int64_t depth, const T* weights, const T* const* rows,
                     bool add, T* queries) {
  const Pointers<const T> b{rows};
  const Strided<T> c{queries, depth};
  if (add) {
    product<T, ColumnsOfTileA, true>(kTile, depth, num_keys, weights, b, c);
  } else {
    product<T, ColumnsOfTileA, false>(kTile, depth, num_keys, weights, b, c);
  }
}

// ---- softmax ------------------------------------------------------------------------------------

template <typename T>
MT_INLINE T infinity() {
  return static_cast<T>(__builtin_inff());
}

template <typename T>
void mask(int64_t num_keys, const LanePosition<T>* key, const LanePosition<T>* query,
          const LanePosition<T>* begin, T* scores) {
  using V = typename Vec<T>::type;
  using B = typename Vec<T>::bits;
  const V hidden = broadcast<T>(-infinity<T>());
  for (int v = 0; v < kVectors<T>; ++v) {
    const B last = *reinterpret_cast<const B*>(query + v * kLanes<T>);
    const B first = *reinterpret_cast<const B*>(begin + v * kLanes<T>);
    for (int64_t j = 0; j < num_keys; ++j) {
      T* p = scores + j * kTile + v * kLanes<T>;
      const B position = key[j] - B{};
      store<T>(p, ((position <= last) & (position >= first)) ? load<T>(p) : hidden);
    }
  }
}

template <typename T>
bool online_softmax(int64_t num_keys, T* scores, T* row_max, T* row_sum, T* rescale) {
  using V = typename Vec<T>::type;
  using B = typename Vec<T>::bits;
  const V lowest = broadcast<T>(-infinity<T>());
  B changed{};
  for (int v = 0; v < kVectors<T>; ++v) {
    T* column = scores + v * kLanes<T>;
    const V before = load<T>(row_max + v * kLanes<T>);
    V top = before;
    for (int64_t j = 0; j < num_keys; ++j) {
      const V s = load<T>(column + j * kTile);
      top = s > top ? s : top;
    }
    const V shift = top == lowest
                        ? V{}
                        : top;  // nothing seen yet: e^(-inf - 0) is 0, e^(-inf + inf) would be NaN
    const V factor = exponential(before - shift);
    V sum = load<T>(row_sum + v * kLanes<T>) * factor;
    for (int64_t j = 0; j < num_keys; ++j) {
      const V p = exponential(load<T>(column + j * kTile) - shift);
      sum += p;
      store<T>(column + j * kTile, p);
    }
    store<T>(row_max + v * kLanes<T>, top);
    store<T>(row_sum + v * kLanes<T>, sum);
    store<T>(rescale + v * kLanes<T>, factor);
    changed |= top > before;
  }
  int any = 0;
  for (int l = 0; l < kLanes<T>; ++l) any |= changed[l] != 0;
  return any != 0;
}

template <typename T>
void scale_lanes(int64_t depth, const T* scale, T* tile) {
  for (int64_t d = 0; d < depth; ++d) {
    for (int v = 0; v < kVectors<T>; ++v) {
      T* p = tile + d * kTile + v * kLanes<T>;
      store<T>(p, load<T>(p) * load<T>(scale + v * kLanes<T>));
    }
  }
}

template <typename T>
void probabilities(int64_t num_keys, const T* lse, T* scores) {
  for (int v = 0; v < kVectors<T>; ++v) {
    const auto shift = load<T>(lse + v * kLanes<T>);
    for (int64_t j = 0; j < num_keys; ++j) {
      T* p = scores + j * kTile + v * kLanes<T>;
      store<T>(p, exponential(load<T>(p) - shift));
    }
  }
}

template <typename T>
void score_gradients(int64_t num_keys, const T* p, const T* delta, T scale, T* dp) {
  using V = typename Vec<T>::type;
  for (int v = 0; v < kVectors<T>; ++v) {
    const V shift = load<T>(delta + v * kLanes<T>);
    for (int64_t j = 0; j < num_keys; ++j) {
      const int64_t at = j * kTile + v * kLanes<T>;
      const V weight = load<T>(p + at);
      const V gradient = weight * (load<T>(dp + at) - shift) * scale;
      store<T>(dp + at, weight == V{} ? V{} : gradient);
    }
  }
}

template <typename T>
void lane_dots(int64_t depth, const T* a, const T* b, T* sums) {
  for (int v = 0; v < kVectors<T>; ++v) {
    typename Vec<T>::type sum{};
    for (int64_t d = 0; d < depth; ++d) {
      sum += load<T>(a + d * kTile + v * kLanes<T>) * load<T>(b + d * kTile + v * kLanes<T>);
    }
    store<T>(sums + v * kLanes<T>, sum);
  }
}

// ---- window estimation --------------------------------------------------------------------------

void window_max(int64_t num_keys, const float* scores, float* row_max) {
  for (int v = 0; v < kVectors<float>; ++v) {
    float* out = row_max + v * kLanes<float>;
    auto top = load<float>(out);
    for (int64_t j = 0; j < num_keys; ++j) {
      const auto s = load<float>(scores + j * kTile + v * kLanes<float>);
      top = s > top ? s : top;
    }
    store<float>(out, top);
  }
}

/// Rounded to nearest, ties to even, for 0 <= x < 2^51: adding 2^52 leaves the integer in the low
/// bits.
MT_INLINE int64_t rounded(double x) {
  constexpr double kRound = 0x1p52;
  return __builtin_bit_cast(int64_t, x + kRound) - __builtin_bit_cast(int64_t, kRound);
}

/// e^(score - row_max) of one key for 64 rows. A row that saw nothing has row_max = -inf and only
/// hidden scores.
MT_INLINE void window_weights(const float* scores, const float* row_max, float* weights) {
  using V = Vec<float>::type;
  const V lowest = broadcast<float>(-infinity<float>());
  for (int v = 0; v < kVectors<float>; ++v) {
    const V top = load<float>(row_max + v * kLanes<float>);
    const V shift = top == lowest ? V{} : top;
    store<float>(weights + v * kLanes<float>,
                 exponential(load<float>(scores + v * kLanes<float>) - shift));
  }
}

void window_sum(int64_t num_keys, const float* scores, const float* row_max, int64_t* sums) {
  alignas(64) float weights[kTile];
  for (int64_t j = 0; j < num_keys; ++j) {
    window_weights(scores + j * kTile, row_max, weights);
    for (int i = 0; i < kTile; ++i) sums[i] += rounded(static_cast<double>(weights[i]) * 0x1p40);
  }
}

void window_mass(int64_t num_keys, const float* scores, const float* row_max, const double* factor,
                 int64_t* masses) {
  alignas(64) float weights[kTile];
  for (int64_t j = 0; j < num_keys; ++j) {
    window_weights(scores + j * kTile, row_max, weights);
    for (int i = 0; i < kTile; ++i)
      masses[j * kTile + i] = rounded(static_cast<double>(weights[i]) * factor[i]);
  }
}

template <typename T>
constexpr TileOps<T> make_ops(const char* isa) {
  TileOps<T> ops{};
  ops.isa = isa;
  ops.load_rows = load_rows<T>;
  ops.transpose_to_lanes = transpose_to_lanes<T>;
  ops.transpose_to_rows = transpose_to_rows<T>;
  ops.add_rows = add_rows<T>;
  ops.scores = scores<T>;
  ops.weighted_values = weighted_values<T>;
  ops.key_gradients = key_gradients<T>;
  ops.query_gradients = query_gradients<T>;
  ops.mask = mask<T>;
  ops.online_softmax = online_softmax<T>;
  ops.scale_lanes = scale_lanes<T>;
  ops.probabilities = probabilities<T>;
  ops.score_gradients = score_gradients<T>;
  ops.lane_dots = lane_dots<T>;
  if constexpr (sizeof(T) == sizeof(float)) {
    ops.window_max = window_max;
    ops.window_sum = window_sum;
    ops.window_mass = window_mass;
  }
  ops.exponential = exponential_array<T>;
  return ops;
}

}  // namespace
}  // namespace mtraining::kernels::ref
