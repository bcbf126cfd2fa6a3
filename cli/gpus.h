// Gpus: what the CUDA runtime, the driver and NCCL say about this machine.
//
// In:   nothing. Out: plain data; a machine without GPUs, or a build without CUDA, is an answer, not an error. Next: doctor.cc.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "mtraining/kernels/dispatch.h"

namespace mtraining::cli {

struct Gpu {
  std::string name;
  kernels::DeviceKind kind;
  int64_t memory_bytes = 0, free_bytes = 0;
  int peers = 0;  ///< other GPUs whose memory it reaches directly
};

struct GpuFacts {
  bool built_with_cuda = false;
  bool hardware = false;  ///< the system shows an NVIDIA device, whether or not it can be used
  std::string runtime_version, driver_version, nccl_version;  ///< "13.0"; "" where there is none
  std::string error;                                          ///< of the CUDA runtime
  std::vector<Gpu> gpus;
};

GpuFacts read_gpu_facts();

}  // namespace mtraining::cli
