// Registration: what the operators' wrappers share: devices of a call, shapes, operators by name.
//
// In:   the tensors of a call. Out: errors that name one; tensors without data. Next: register.cc, register_blocks.cc.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <initializer_list>
#include <optional>
#include <tuple>

#include "mtraining/base/check.h"
#include "mtraining/torch_ops/errors.h"

namespace mtraining::torch_ops {

using MaybeTensor = std::optional<at::Tensor>;
using AttendResult = std::tuple<at::Tensor, at::Tensor, at::Tensor>;  ///< out, lse, out_residual
using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;     ///< dq, dk, dv

inline at::Tensor or_undefined(const MaybeTensor& tensor) {
  return tensor ? *tensor : at::Tensor();
}
inline MaybeTensor or_none(const at::Tensor& tensor) {
  return tensor.defined() ? MaybeTensor(tensor) : std::nullopt;
}

template <typename Signature>
auto op_named(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

struct Named {
  const char* name;
  const at::Tensor& tensor;
};
/// A call whose tensors lie on several devices reaches the kernels of one of them; none may read the others' memory.
inline void check_devices(Named first, std::initializer_list<Named> others) {
  in_python_terms([&] {
    for (const Named& other : others) {
      if (!other.tensor.defined()) continue;
      MT_CHECK_ARG(other.tensor.device() == first.tensor.device(), other.name, ": expected device ",
                   first.tensor.device(), " as ", first.name, ", got ", other.tensor.device());
      MT_CHECK_ARG(other.tensor.layout() == at::kStrided, other.name,
                   ": expected a strided tensor, got layout ", other.tensor.layout());
    }
    MT_CHECK_ARG(first.tensor.layout() == at::kStrided, first.name,
                 ": expected a strided tensor, got layout ", first.tensor.layout());
  });
}

inline at::Tensor empty_as(const at::Tensor& tensor) {
  return at::empty_symint(tensor.sym_sizes(), tensor.options());
}
/// What attention over q returns.
inline AttendResult attended_shapes(const at::Tensor& q) {
  TORCH_CHECK_VALUE(q.dim() == 4, "q: expected [B, S, H, D], got ", q.dim(), " dimensions");
  const at::ScalarType held = q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return {empty_as(q),
          at::empty_symint({q.sym_size(0), q.sym_size(2), q.sym_size(1)}, q.options().dtype(held)),
          held == q.scalar_type() ? at::empty({0}, q.options()) : empty_as(q)};
}

}  // namespace mtraining::torch_ops
