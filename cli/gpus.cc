#include "cli/gpus.h"

#include <filesystem>

#ifdef MT_WITH_CUDA
#include <cuda_runtime_api.h>
#include <torch/csrc/cuda/nccl.h>
#endif

#include "mtraining/base/check.h"

namespace mtraining::cli {
namespace {

bool device_nodes_exist() {
  std::error_code error;
  return std::filesystem::exists("/dev/nvidia0", error) ||
         std::filesystem::exists("/dev/dxg", error);
}

#ifdef MT_WITH_CUDA
/// 13000 -> "13.0".
std::string version_text(int version) {
  return version == 0 ? "" : concat(version / 1000, ".", version % 1000 / 10);
}

Gpu read_gpu(int device, int count) {
  Gpu gpu;
  cudaDeviceProp properties{};
  if (cudaGetDeviceProperties(&properties, device) != cudaSuccess) return gpu;
  gpu.name = properties.name;
  gpu.kind = {true, properties.major, properties.minor, properties.multiProcessorCount};
  gpu.memory_bytes = static_cast<int64_t>(properties.totalGlobalMem);
  size_t free = 0, total = 0;
  if (cudaSetDevice(device) == cudaSuccess && cudaMemGetInfo(&free, &total) == cudaSuccess)
    gpu.free_bytes = static_cast<int64_t>(free);
  for (int other = 0; other < count; ++other) {
    int reaches = 0;
    if (other != device && cudaDeviceCanAccessPeer(&reaches, device, other) == cudaSuccess)
      gpu.peers += reaches;
  }
  return gpu;
}
#endif

}  // namespace

GpuFacts read_gpu_facts() {
  GpuFacts facts;
  facts.hardware = device_nodes_exist();
#ifdef MT_WITH_CUDA
  facts.built_with_cuda = true;
  int version = 0;
  if (cudaRuntimeGetVersion(&version) == cudaSuccess) facts.runtime_version = version_text(version);
  version = 0;
  if (cudaDriverGetVersion(&version) == cudaSuccess) facts.driver_version = version_text(version);
  const uint64_t nccl = torch::cuda::nccl::version();
  facts.nccl_version = concat(nccl >> 32, ".", nccl >> 16 & 0xffff, ".", nccl & 0xffff);
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) {
    facts.error = cudaGetErrorString(error);
    count = 0;
  }
  for (int device = 0; device < count; ++device) facts.gpus.push_back(read_gpu(device, count));
#endif
  return facts;
}

}  // namespace mtraining::cli
