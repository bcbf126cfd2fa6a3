#include "mtraining/eval/digest.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace mtraining::eval {

std::string digest_of(std::string_view bytes) {
  constexpr char kHex[] = "0123456789abcdef";
  const uint64_t value = XXH3_64bits(bytes.data(), bytes.size());
  std::string text;
  for (int shift = 60; shift >= 0; shift -= 4) text += kHex[(value >> shift) & 15];
  return text;
}

}  // namespace mtraining::eval
