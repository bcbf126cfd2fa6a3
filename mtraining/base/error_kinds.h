// Kinds of errors that callers react to, beyond the four of check.h: a message is for readers and decides nothing.
//
// In:   a condition and what to say when it does not hold. Out: an InvalidArgument that a caller can tell from others.
// Next: train/ makes a diverged run of NotFinite; cli/ says where files come from on FileMissing.
#pragma once

#include "mtraining/base/check.h"

namespace mtraining {

/// Values that must be finite are not, or are too large to compute with.
class NotFinite : public InvalidArgument {
 public:
  using InvalidArgument::InvalidArgument;
};

/// A file that the user named cannot be opened.
class FileMissing : public InvalidArgument {
 public:
  using InvalidArgument::InvalidArgument;
};

}  // namespace mtraining

#define MT_CHECK_FINITE(condition, ...)                                               \
  do {                                                                                \
    if (!(condition)) throw ::mtraining::NotFinite(::mtraining::concat(__VA_ARGS__)); \
  } while (false)
