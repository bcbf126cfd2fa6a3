// ErrorOf: what a call that must fail says.
//
// In:   a call, and the kind of error that it may throw; another kind passes through. Out: what(), and whether it has given parts. Next: base/check.h, the kinds.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

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

inline void expect_says(const std::string& error, const std::vector<std::string>& parts) {
  for (const std::string& part : parts)
    EXPECT_NE(error.find(part), std::string::npos) << "expected " << part << " in: " << error;
}

}  // namespace mtraining::testing
