// Errors at the border to Python: this project's kinds become the ones that torch turns into Python's.
//
// In:   a call. Out: its result; InvalidArgument as ValueError, Unsupported as NotImplementedError, the others as RuntimeError,
//       each with its one sentence. Next: every operator of this folder runs inside it.
#pragma once

#include <c10/util/Exception.h>

#include <utility>

#include "mtraining/base/check.h"

namespace mtraining::torch_ops {

template <typename Call>
decltype(auto) in_python_terms(Call&& call) {
  try {
    return std::forward<Call>(call)();
  } catch (const InvalidArgument& e) {
    C10_THROW_ERROR(ValueError, e.what());
  } catch (const Unsupported& e) {
    C10_THROW_ERROR(NotImplementedError, e.what());
  }
  // ExternalError and InternalError are std::runtime_error, which torch makes a RuntimeError of.
}

}  // namespace mtraining::torch_ops
