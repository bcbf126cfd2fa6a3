// Element types of a Transport as the kernels of exchanges name them. Private to this folder's files over device memory.
//
// In:   an ElementType. Out: the kernels' one. Next: loopback_device.cc, peer_copies.cc.
#pragma once

#include "mtraining/base/check.h"
#include "mtraining/comm/transport.h"
#include "mtraining/kernels/exchange_cuda/exchange.h"

namespace mtraining::comm {

inline kernels::exchange_cuda::Element element_of(ElementType type) {
  using kernels::exchange_cuda::Element;
  switch (type) {
    case ElementType::kInt64:
      return Element::kInt64;
    case ElementType::kInt32:
      return Element::kInt32;
    case ElementType::kFloat32:
      return Element::kFloat32;
    case ElementType::kFloat64:
      return Element::kFloat64;
    case ElementType::kBFloat16:
      return Element::kBFloat16;
  }
  MT_ASSERT(false, "element type ", static_cast<int>(type));
}

}  // namespace mtraining::comm
