// Checks and launches of the forward.
#include <algorithm>

#include "mtraining/base/check.h"
#include "mtraining/kernels/sm80/attention_setup.cuh"
#include "mtraining/kernels/sm80/forward.h"
#include "mtraining/kernels/sm80/forward_kernel.cuh"
#include "mtraining/kernels/validate.h"

namespace mtraining::kernels::sm80 {
namespace {

// Keys and values beyond about half of a large L2: the heads of one kv head are done before the next one's.
constexpr int64_t kGroupAboveBytes = int64_t{24} << 20;

template <int kD>
Launch plan(const ForwardArgs& args, const DeviceSizes& device, int sm_margin, int32_t& slots) {
  using Shape = ForwardShape<kD>;
  // The most slots that still leave room for as many blocks as two slots would.
  slots = Shape::kMinSlots;
  const auto fit = [&](int n) {
    return blocks_per_sm(device, Shape::shared_bytes(n), Shape::kBlocksPerSm);
  };
  MT_CHECK_SUPPORTED(fit(slots) > 0, "sm80 forward: head_dim ", args.head_dim, " needs ",
                     Shape::shared_bytes(slots), " bytes of shared memory, this device gives ",
                     device.shared_per_block);
  while (slots < Shape::kMaxSlots && fit(slots + 1) == fit(Shape::kMinSlots)) ++slots;
  const int64_t items =
      int64_t{args.num_rows} * ((args.num_q_blocks + Shape::kGroups - 1) / Shape::kGroups);
  const int64_t most = int64_t{std::max(1, device.num_sms - std::max(0, sm_margin))} * fit(slots);
  return {static_cast<int32_t>(std::min(items, most)), Shape::shared_bytes(slots), nullptr};
}

using Launcher = cudaError_t (*)(const ForwardArgs&, const Launch&);
Launcher launcher(DType dtype, int head_dim) {
  const bool bf16 = dtype == DType::kBFloat16;
  if (head_dim == 64) return bf16 ? launch_forward_bf16_d64 : launch_forward_fp16_d64;
  if (head_dim == 128) return bf16 ? launch_forward_bf16_d128 : launch_forward_fp16_d128;
  return bf16 ? launch_forward_bf16_d256 : launch_forward_fp16_d256;
}

/// One launch over sources[first, last).
void forward_range(const ForwardParams& p, int first, int last, bool write,
                   const DeviceSizes& device) {
  ForwardArgs args = {};
  fill_attention(p, first, last, args);
  args.out = float_rows_of(p.out);
  args.lse = static_cast<float*>(p.lse);
  args.first = write;
  args.vector_out = pairs_aligned(args.out);
  if (last == p.num_sources) {
    args.rounded = device::half_rows_of(p.rounded);
    args.residual = device::half_rows_of(p.residual);
    args.vector_rounded = device::rows_are_aligned(const_of(p.rounded)) &&
                          device::rows_are_aligned(const_of(p.residual));
  }
  int64_t keys = 0;
  for (int s = first; s < last; ++s) keys += p.sources[s].num_keys;
  const bool large =
      keys * p.batch * p.num_kv_heads * p.head_dim * size_of(p.dtype) * 2 > kGroupAboveBytes;
  args.group_rows = large ? args.heads_per_kv_head : args.num_rows;
  char* memory = static_cast<char*>(p.workspace);
  args.next_item = reinterpret_cast<int32_t*>(memory);
  const int head_dim = kernel_head_dim(p.head_dim);
  Launch launch = head_dim == 64    ? plan<64>(args, device, p.sm_margin, args.slots)
                  : head_dim == 128 ? plan<128>(args, device, p.sm_margin, args.slots)
                                    : plan<256>(args, device, p.sm_margin, args.slots);
  launch.stream = static_cast<cudaStream_t>(p.stream);
  prepare(p, reinterpret_cast<QueryBounds*>(memory + kCounterBytes), args.next_item, 1, args);
  check_cuda(launcher(p.dtype, head_dim)(args, launch), "launching the forward");
}

}  // namespace

int64_t forward_workspace_bytes(const ForwardParams& params) {
  return kCounterBytes + bounds_bytes(params);
}

bool needs_out(const ForwardParams& params) { return kernels::needs_out(params, kMaxSources); }

void forward(const ForwardParams& params) {
  check(params, kMaxSources);
  check_attention(params, "sm80 forward", forward_workspace_bytes(params));
  if (params.batch == 0 || params.num_queries == 0) return;
  const DeviceSizes device = device_sizes();
  int first = 0;
  bool write = params.first;
  do {
    const int last = std::min(first + kMaxSources, params.num_sources);
    forward_range(params, first, last, write, device);
    first = last;
    write = false;
  } while (first < params.num_sources);
}

}  // namespace mtraining::kernels::sm80
