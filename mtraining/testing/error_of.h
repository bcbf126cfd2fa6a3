// ErrorOf: what a call that must fail says.
//
// In:   a call, and the kind of error that it may throw; another kind passes through. Out: what(). Next: base/check.h, the kinds.
#pragma once

#include <string>

#include "mtraining/base/check.h"

namespace mtraining::testing {

/// "" where nothing is thrown.
template <typename Kind = Error, typename Call>
std::string error_of(Call&& call) {
  try {
    call();
  } catch (const Kind& error) {
    return error.what();
  }
  return "";
}

}  // namespace mtraining::testing
