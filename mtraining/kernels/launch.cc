#include "mtraining/kernels/launch.h"

#include "mtraining/base/check.h"
#include "mtraining/kernels/attention_kernels.h"

#ifdef MT_WITH_CUDA
#include "mtraining/kernels/pattern_cuda/device.h"
#include "mtraining/kernels/sm80/backward.h"
#include "mtraining/kernels/sm80/forward.h"
#include "mtraining/kernels/sm90/backward.h"
#include "mtraining/kernels/sm90/forward.h"
#endif

namespace mtraining::kernels {
namespace {

[[noreturn]] void refuse(Backend backend) {
  throw Unsupported(concat("attention: this build has no back end ", to_string(backend),
                           " (configure with MTRAINING_CUDA=ON)"));
}

}  // namespace

DeviceKind current_cuda_device() {
#ifdef MT_WITH_CUDA
  return pattern_cuda::device_of_stream();
#else
  throw Unsupported(
      "a tensor on a GPU: this build has no CUDA kernels (configure with MTRAINING_CUDA=ON)");
#endif
}

int64_t workspace_bytes(Backend backend, const ForwardParams& params) {
  switch (backend) {
    case Backend::kRef:
      return 0;
#ifdef MT_WITH_CUDA
    case Backend::kSm80:
      return sm80::forward_workspace_bytes(params);
    case Backend::kSm90:
      return sm90::forward_workspace_bytes(params);
#endif
    default:
      static_cast<void>(params);
      refuse(backend);
  }
}

int64_t workspace_bytes(Backend backend, const BackwardParams& params) {
  switch (backend) {
    case Backend::kRef:
      return 0;
#ifdef MT_WITH_CUDA
    case Backend::kSm80:
      return sm80::backward_workspace_bytes(params);
    case Backend::kSm90:
      return sm90::backward_workspace_bytes(params);
#endif
    default:
      static_cast<void>(params);
      refuse(backend);
  }
}

bool needs_out(Backend backend, const ForwardParams& params) {
  switch (backend) {
    case Backend::kRef:
      return ref::needs_out(params);
#ifdef MT_WITH_CUDA
    case Backend::kSm80:
      return sm80::needs_out(params);
    case Backend::kSm90:
      return sm90::needs_out(params);
#endif
    default:
      refuse(backend);
  }
}

bool rounds_dq(Backend backend, const BackwardParams& params) {
  switch (backend) {
    case Backend::kRef:
      return false;
#ifdef MT_WITH_CUDA
    case Backend::kSm80:
      return sm80::rounds_dq(params);
    case Backend::kSm90:
      return sm90::rounds_dq(params);
#endif
    default:
      static_cast<void>(params);
      refuse(backend);
  }
}

void forward(Backend backend, const ForwardParams& params) {
  switch (backend) {
    case Backend::kRef:
      return ref::forward(params);
#ifdef MT_WITH_CUDA
    case Backend::kSm80:
      return sm80::forward(params);
    case Backend::kSm90:
      return sm90::forward(params);
#endif
    default:
      refuse(backend);
  }
}

void backward(Backend backend, const BackwardParams& params) {
  switch (backend) {
    case Backend::kRef:
      return ref::backward(params);
#ifdef MT_WITH_CUDA
    case Backend::kSm80:
      return sm80::backward(params);
    case Backend::kSm90:
      return sm90::backward(params);
#endif
    default:
      refuse(backend);
  }
}

void delta(Backend backend, const BackwardParams& params, const RoundedOut& out, void* delta) {
  switch (backend) {
    case Backend::kRef:
      return ref::delta(params, out, delta);
#ifdef MT_WITH_CUDA
    case Backend::kSm80:
      return sm80::delta(params, out, delta);
    case Backend::kSm90:
      return sm90::delta(params, out, delta);
#endif
    default:
      refuse(backend);
  }
}

}  // namespace mtraining::kernels
