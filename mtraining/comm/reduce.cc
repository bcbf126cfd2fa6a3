#include "mtraining/comm/reduce.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>

#include "mtraining/base/check.h"

namespace mtraining::comm {
namespace {

struct BFloat16 {
  uint16_t bits;
};

float load(const BFloat16& value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}
template <typename T>
T load(const T& value) {
  return value;
}

void store(float value, BFloat16& to) {
  uint32_t bits = std::bit_cast<uint32_t>(value);
  if (value != value) {
    to.bits = static_cast<uint16_t>((bits >> 16) | 0x40);  // stays NaN after the cut
    return;
  }
  bits += 0x7fff + ((bits >> 16) & 1);  // to nearest, ties to even
  to.bits = static_cast<uint16_t>(bits >> 16);
}
template <typename T>
void store(T value, T& to) {
  to = value;
}

template <typename T>
T combine(T a, T b, ReduceOp op) {
  if (op == ReduceOp::kSum) {
    if constexpr (std::is_integral_v<T>) {
      // Wraps on overflow instead of being undefined.
      using U = std::make_unsigned_t<T>;
      return static_cast<T>(static_cast<U>(a) + static_cast<U>(b));
    } else {
      return a + b;
    }
  }
  return (b > a || b != b) ? b : a;
}

template <typename T>
void reduce_typed(ReduceOp op, int64_t count, std::span<const void* const> sources,
                  std::span<void* const> destinations) {
  using Acc = decltype(load(std::declval<T>()));
  constexpr int64_t kChunk =
      1024;  // read whole before anything is written: destinations may be sources
  Acc acc[kChunk];
  for (int64_t begin = 0; begin < count; begin += kChunk) {
    const int64_t n = std::min(kChunk, count - begin);
    const T* first = static_cast<const T*>(sources[0]) + begin;
    for (int64_t i = 0; i < n; ++i) acc[i] = load(first[i]);
    for (size_t s = 1; s < sources.size(); ++s) {
      const T* source = static_cast<const T*>(sources[s]) + begin;
      if (op == ReduceOp::kSum) {
        for (int64_t i = 0; i < n; ++i)
          acc[i] = combine<Acc>(acc[i], load(source[i]), ReduceOp::kSum);
      } else {
        for (int64_t i = 0; i < n; ++i)
          acc[i] = combine<Acc>(acc[i], load(source[i]), ReduceOp::kMax);
      }
    }
    T* out = static_cast<T*>(destinations[0]) + begin;
    for (int64_t i = 0; i < n; ++i) store(acc[i], out[i]);
    for (size_t d = 1; d < destinations.size(); ++d) {
      std::memcpy(static_cast<T*>(destinations[d]) + begin, out,
                  static_cast<size_t>(n) * sizeof(T));
    }
  }
}

}  // namespace

void reduce(ElementType type, ReduceOp op, int64_t count, std::span<const void* const> sources,
            std::span<void* const> destinations) {
  MT_ASSERT(!sources.empty() && !destinations.empty(), "nothing to reduce");
  if (count == 0) return;
  switch (type) {
    case ElementType::kInt64:
      return reduce_typed<int64_t>(op, count, sources, destinations);
    case ElementType::kInt32:
      return reduce_typed<int32_t>(op, count, sources, destinations);
    case ElementType::kFloat32:
      return reduce_typed<float>(op, count, sources, destinations);
    case ElementType::kFloat64:
      return reduce_typed<double>(op, count, sources, destinations);
    case ElementType::kBFloat16:
      return reduce_typed<BFloat16>(op, count, sources, destinations);
  }
  MT_ASSERT(false, "element type ", static_cast<int>(type));
}

}  // namespace mtraining::comm
