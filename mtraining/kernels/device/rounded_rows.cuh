// Rounded rows: rows of float32 values as matrix products leave them in registers, written in 16 bits, and what that loses beside them.
//
// In:   of a row, two neighbouring columns of every eight in each of four neighbouring lanes. Out: 16-byte stores.
// Next: the ends of sm80's and sm90's forward kernels and of their passes over queries.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "mtraining/kernels/params.h"

namespace mtraining::kernels::device {

/// [B, tokens, heads, D] of 16-bit elements, written; null data: not wanted. Strides in elements.
struct HalfRows {
  uint16_t* data;
  int64_t stride_batch, stride_token, stride_head;

  __device__ __forceinline__ uint16_t* row(int64_t batch, int64_t token, int64_t head) const {
    return data + batch * stride_batch + token * stride_token + head * stride_head;
  }
};
inline HalfRows half_rows_of(const View& view) {
  return {static_cast<uint16_t*>(view.data), view.stride_batch, view.stride_token,
          view.stride_head};
}
/// Whether every row starts on 16 bytes.
inline bool rows_are_aligned(const ConstView& view) {
  return reinterpret_cast<uintptr_t>(view.data) % 16 == 0 && view.stride_batch % 8 == 0 &&
         view.stride_token % 8 == 0 && view.stride_head % 8 == 0;
}

/// Two floats rounded to nearest, the first in the low half.
template <typename Element>
__device__ __forceinline__ uint32_t round_pair(float2 x) {
  if constexpr (std::is_same_v<Element, __half>) {
    const __half2 pair = __float22half2_rn(x);
    return *reinterpret_cast<const uint32_t*>(&pair);
  } else {
    const __nv_bfloat162 pair = __float22bfloat162_rn(x);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
}
template <typename Element>
__device__ __forceinline__ float2 widen_pair(uint32_t pair) {
  if constexpr (std::is_same_v<Element, __half>) {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  } else {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u));
  }
}

/// words[c] of lane l was part l of chunk c; becomes part c of chunk l. l: the lane's last two bits. All lanes of the warp.
__device__ __forceinline__ void exchange_parts(uint32_t (&words)[4], int lane) {
  const bool odd = (lane & 1) != 0, upper = (lane & 2) != 0;
#pragma unroll
  for (int c = 0; c < 4; c += 2) {
    const uint32_t got = __shfl_xor_sync(~0u, odd ? words[c] : words[c + 1], 1);
    words[c] = odd ? got : words[c];
    words[c + 1] = odd ? words[c + 1] : got;
  }
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const uint32_t got = __shfl_xor_sync(~0u, upper ? words[c] : words[c + 2], 2);
    words[c] = upper ? got : words[c];
    words[c + 2] = upper ? words[c + 2] : got;
  }
}

/// The lane's 8 columns from `column` on.
__device__ __forceinline__ void store_chunk(uint16_t* row, int column, const uint32_t (&words)[4],
                                            bool aligned) {
  if (aligned) {
    __stcs(reinterpret_cast<uint4*>(row + column),
           make_uint4(words[0], words[1], words[2], words[3]));
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) row[column + i] = static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16));
}

/// A row of `columns` (a multiple of 8, at most kD): pair(j) gives columns 8 j + 2 (lane % 4) and the one behind it, for every j below
/// kD / 8. residual null: not wanted. All lanes of the warp call it; those of rows that are not `real` write nothing.
template <typename Element, int kD, typename Pair>
__device__ __forceinline__ void store_rounded(uint16_t* rounded, uint16_t* residual, bool real,
                                              int columns, bool aligned, int lane,
                                              const Pair& pair) {
  static_assert(kD % 32 == 0);
#pragma unroll
  for (int m = 0; m < kD / 32; ++m) {
    uint32_t near[4], rest[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 x = pair(4 * m + i);
      near[i] = round_pair<Element>(x);
      const float2 held = widen_pair<Element>(near[i]);
      rest[i] = round_pair<Element>(make_float2(x.x - held.x, x.y - held.y));
    }
    const int column = 32 * m + 8 * (lane & 3);
    const bool mine = real && column < columns;
    exchange_parts(near, lane);
    if (mine) store_chunk(rounded, column, near, aligned);
    if (residual == nullptr) continue;
    exchange_parts(rest, lane);
    if (mine) store_chunk(residual, column, rest, aligned);
  }
}

}  // namespace mtraining::kernels::device
