// DeviceLaunch: AttentionLaunch on a GPU, through the launches and lists that the executor and the operators use.
//
// In:   sizes and a seed; an index, a place. Out: inputs in the device's memory, a launch over them.
// Next: attention_bench.h times it in turn with the peer's.
//
// Lists are the executor's (attention/index_plan.h), launches kernels/launch.h's, the index torch_ops/device_ops.h's: nothing here runs
// that a user could not. Forward is the kernels alone; backward zeroes gradients, computes delta and runs the kernels. What the operators
// take around them (lists from index tensors, rounding) stands in keys of its own. A rank of several has the chosen columns of all
// ranks as gathered rows, like columns = "once". Builds with CUDA only.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>

#include "bench/attention_bench.h"
#include "bench/attention_launch.h"

namespace mtraining::bench {

/// q, dout [S, H, D] and k, v [S, Hk, D] on a GPU: from sharp to diffuse heads, some keys that all like. The same for the same seed on
/// the same kind of GPU.
struct DeviceInputs {
  at::Tensor q, k, v, dout;
  std::string digest;
};
/// Errors: InvalidArgument naming the flag; Unsupported: a dtype that no kernel of a GPU takes.
DeviceInputs make_device_inputs(const LaunchPlace& place, const AttentionSizes& sizes,
                                uint64_t seed);

/// Errors: those of dispatch; Unsupported where the back end asked for does not run on this GPU.
/// Beside what every launch tells: "backend", "deterministic", "peak_bytes" (of a forward and a backward, above the inputs), errors of
/// sampled rows (sampled_errors.h), "fwd_kernels" and "bwd_kernels" (microseconds by name), and with one rank and no back end asked for "op_fwd_ms",
/// "op_bwd_ms": the operators attend and its backward.
std::unique_ptr<AttentionLaunch> make_device_launch(const LaunchPlace& place,
                                                    const AttentionSizes& sizes,
                                                    const DeviceInputs& inputs,
                                                    const index::Index& index);
/// Launches and the peer over `inputs`, which must live as long.
AttentionArms device_arms(const AttentionBenchOptions& options, const DeviceInputs& inputs);
/// The index that the operator build_index chooses.
index::Index choose_device_index(const DeviceInputs& inputs,
                                 const pattern::VerticalSlashOptions& options);

}  // namespace mtraining::bench
