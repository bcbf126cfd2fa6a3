// TorchDevice: what a bench asks of the device that torch's tensors live on: its name, its clock, its memory, the kernels that ran.
//
// In:   a place (attention_launch.h). Out: a device, times, bytes, names. Next: sdpa_peer.h, device_launch.h.
//
// On the CPU time is the wall clock's (rows.h); on a GPU it is that between two events on the current stream.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>

#include "bench/attention_launch.h"
#include "bench/rows.h"

namespace mtraining::bench {

at::ScalarType scalar_type(kernels::DType dtype);

/// Errors: Unsupported: no CUDA in this build, or no GPU in this machine.
at::Device torch_device(const LaunchPlace& place);
/// "AMD EPYC 9B14, 2 threads", "NVIDIA H200, CUDA 13.0"
std::string device_name(const LaunchPlace& place);

/// Runs `body` once and appends its time. Waits for the device.
void time_on(at::Device device, Times& times, const std::function<void()>& body);
/// A GPU: the most memory that `body` held at a time, above what was held before it.
int64_t peak_bytes(at::Device device, const std::function<void()>& body);
/// A GPU: microseconds of each kernel that `body` ran, by name, in the order of their first launch. Empty where the driver does not
/// let itself be traced.
Json kernels_of(at::Device device, const std::function<void()>& body);
/// Template arguments and parameters of a kernel, and this project's namespaces, are cut.
std::string short_kernel_name(std::string demangled);

}  // namespace mtraining::bench
