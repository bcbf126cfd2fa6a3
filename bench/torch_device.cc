#include "bench/torch_device.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include <set>

#include "mtraining/base/check.h"
#ifdef MT_WITH_CUDA
#include <cuda_runtime.h>
#endif

namespace mtraining::bench {
namespace {

void wait_for(at::Device device) {
  if (device.is_cpu()) return;
  c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

}  // namespace

at::ScalarType scalar_type(kernels::DType dtype) {
  switch (dtype) {
    case kernels::DType::kFloat64:
      return at::kDouble;
    case kernels::DType::kFloat32:
      return at::kFloat;
    case kernels::DType::kBFloat16:
      return at::kBFloat16;
    case kernels::DType::kFloat16:
      return at::kHalf;
  }
  MT_ASSERT(false, "dtype ", static_cast<int>(dtype));
}

at::Device torch_device(const LaunchPlace& place) {
  if (place.device == "cpu") return at::kCPU;
#ifdef MT_WITH_CUDA
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  MT_CHECK_SUPPORTED(error == cudaSuccess && count > 0,
                     "--device cuda: expected a GPU in this machine, got none (",
                     error == cudaSuccess ? "no device" : cudaGetErrorString(error), ")");
  return {at::kCUDA, 0};
#else
  throw Unsupported(
      "--device cuda: expected a build with CUDA kernels, got one without (configure with "
      "MTRAINING_CUDA=ON)");
#endif
}

std::string device_name(const LaunchPlace& place) {
  if (place.device == "cpu") return cpu_name(place.threads);
  const at::Device device = torch_device(place);
#ifdef MT_WITH_CUDA
  cudaDeviceProp properties;
  int runtime = 0;
  const cudaError_t error = cudaGetDeviceProperties(&properties, device.index());
  MT_CHECK_EXTERNAL(error == cudaSuccess, "asking for the GPU's name: ", cudaGetErrorString(error));
  cudaRuntimeGetVersion(&runtime);
  return concat(properties.name, ", CUDA ", runtime / 1000, ".", runtime % 1000 / 10);
#else
  return device.str();
#endif
}

void time_on(at::Device device, Times& times, const std::function<void()>& body) {
  if (device.is_cpu()) return time_once(times, body);
  const c10::impl::VirtualGuardImpl guard(device.type());
  c10::Event begin(device.type(), c10::EventFlag::BACKEND_DEFAULT);
  c10::Event end(device.type(), c10::EventFlag::BACKEND_DEFAULT);
  begin.record(guard.getStream(device));
  body();
  end.record(guard.getStream(device));
  end.synchronize();
  times.wall_ms.push_back(begin.elapsedTime(end));
}

int64_t peak_bytes(at::Device device, const std::function<void()>& body) {
  MT_ASSERT(!device.is_cpu(), "memory of a GPU");
  constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  c10::DeviceAllocator* allocator = c10::getDeviceAllocator(device.type());
  wait_for(device);
  allocator->resetPeakStats(device.index());
  const int64_t before = allocator->getDeviceStats(device.index()).allocated_bytes[kAll].current;
  body();
  wait_for(device);
  return allocator->getDeviceStats(device.index()).allocated_bytes[kAll].peak - before;
}

std::string short_kernel_name(std::string demangled) {
  const std::string unnamed = "(anonymous namespace)::";
  for (size_t at; (at = demangled.find(unnamed)) != std::string::npos;)
    demangled.erase(at, unnamed.size());
  std::string name;
  int depth = 0;
  for (const char c : demangled) {
    if (c == '(' && depth == 0 && !name.empty()) break;
    if (c == '<' && depth++ == 0) continue;
    if (c == '>' && --depth == 0) continue;
    if (depth == 0) name += c;
  }
  for (const std::string prefix : {"void ", "mtraining::kernels::"})
    if (name.rfind(prefix, 0) == 0) name = name.substr(prefix.size());
  while (!name.empty() && name.back() == ' ') name.pop_back();
  return name;
}

Json kernels_of(at::Device device, const std::function<void()>& body) {
  namespace profiler = torch::autograd::profiler;
  using torch::profiler::impl::ActivityType;
  const profiler::ProfilerConfig config(torch::profiler::impl::ProfilerState::KINETO);
  const std::set<ActivityType> activities = {ActivityType::CUDA};
  wait_for(device);
  profiler::prepareProfiler(config, activities);
  profiler::enableProfiler(config, activities);
  body();
  wait_for(device);
  const auto result = profiler::disableProfiler();
  Json kernels = Json::object();
  for (const profiler::KinetoEvent& event : result->events()) {
    if (event.deviceType() != device.type()) continue;
    const std::string name = short_kernel_name(event.name());
    const double before = kernels.value(name, 0.0);
    kernels[name] = before + static_cast<double>(event.durationNs() / 100) / 10;
  }
  return kernels;
}

}  // namespace mtraining::bench
