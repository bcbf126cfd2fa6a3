// DeviceRingCase: a ring whose ranks are threads that share one GPU, for tests.
//
// In:   RingOptions, what each rank does. Out: it is done on every rank. Next: ring_cuda_test.cc, choice_cuda_test.cc.
//
// Each rank has a stream of its own and one thread of work; it ends when its stream is done.
#pragma once

#include <c10/cuda/CUDAGuard.h>

#include <functional>

#include "mtraining/attention/ring_case.h"
#include "mtraining/comm/loopback_device.h"

namespace mtraining::attention::testing {

inline void on_ranks(const RingOptions& options,
                     const std::function<void(RingContext&, comm::Transport&)>& body,
                     comm::DeviceLoopbackOptions links = {}) {
  links.current_stream = [] {
    return static_cast<void*>(c10::cuda::getCurrentCUDAStream().stream());
  };
  links.ranks_per_node = options.topology.ranks_per_node;
  comm::run_device_loopback(
      options.layout.cp_size,
      [&](comm::Transport& transport) {
        use_one_thread();
        const c10::cuda::CUDAStreamGuard stream(c10::cuda::getStreamFromPool());
        RingContext context(options, transport);
        body(context, transport);
        stream.current_stream().synchronize();
      },
      links);
}

}  // namespace mtraining::attention::testing
