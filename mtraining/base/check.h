// Checks and the four kinds of error that the whole project throws.
//
// In:   a condition and what to say when it does not hold.
// Out:  an exception whose what() is one sentence: what, expected, got, where from.
// Next: layout/ and everything above; Python maps the kinds to ValueError, NotImplementedError, RuntimeError.
//
// The library never exits and never prints; only cli/ turns an error into a line and an exit code.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace mtraining {

/// Base of everything that the project throws on purpose.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The caller passed something wrong (exit 2, ValueError).
class InvalidArgument : public Error {
 public:
  using Error::Error;
};

/// The request is meaningful but not supported; the message names the feature (exit 2, NotImplementedError).
class Unsupported : public Error {
 public:
  using Error::Error;
};

/// A file, the network, CUDA or NCCL failed (exit 1, RuntimeError).
class ExternalError : public Error {
 public:
  using Error::Error;
};

/// A fault of this project (exit 1, RuntimeError).
class InternalError : public Error {
 public:
  using Error::Error;
};

/// Streams all arguments into one string.
template <typename... Args>
std::string concat(const Args&... args) {
  std::ostringstream out;
  (out << ... << args);
  return out.str();
}

}  // namespace mtraining

#define MT_CHECK_ARG(condition, ...)                                                        \
  do {                                                                                      \
    if (!(condition)) throw ::mtraining::InvalidArgument(::mtraining::concat(__VA_ARGS__)); \
  } while (false)

#define MT_CHECK_SUPPORTED(condition, ...)                                              \
  do {                                                                                  \
    if (!(condition)) throw ::mtraining::Unsupported(::mtraining::concat(__VA_ARGS__)); \
  } while (false)

#define MT_CHECK_EXTERNAL(condition, ...)                                                 \
  do {                                                                                    \
    if (!(condition)) throw ::mtraining::ExternalError(::mtraining::concat(__VA_ARGS__)); \
  } while (false)

#define MT_ASSERT(condition, ...)                                                            \
  do {                                                                                       \
    if (!(condition))                                                                        \
      throw ::mtraining::InternalError(                                                      \
          ::mtraining::concat("internal: ", #condition, " does not hold at ", __FILE__, ":", \
                              __LINE__, ": ", ::mtraining::concat(__VA_ARGS__)));            \
  } while (false)
