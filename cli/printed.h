// Printed: numbers as text, and whether standard output took what was printed.
//
// In:   a printf format and a value. Out: text; an error where standard output cannot be written. Next: main.cc, progress.cc, doctor.cc.
#pragma once

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <string>

#include "mtraining/base/check.h"

namespace mtraining::cli {

/// `format` takes one double and gives less than 64 characters.
inline std::string number(const char* format, double value) {
  char text[64];
  std::snprintf(text, sizeof(text), format, value);
  return text;
}

/// Errors: ExternalError, with the system's words.
inline void check_printed() {
  MT_CHECK_EXTERNAL(std::cout.flush().good(),
                    "standard output cannot be written: ", std::strerror(errno));
}

}  // namespace mtraining::cli
