// Checks and launches of the Hopper forward.
#include <algorithm>

#include "mtraining/base/check.h"
#include "mtraining/kernels/sm90/forward.h"
#include "mtraining/kernels/sm90/forward_args.cuh"
#include "mtraining/kernels/validate.h"

namespace mtraining::kernels::sm90 {
namespace {

constexpr int64_t kCounterBytes = 256;
// Keys and values beyond about half of L2: the heads of one kv head are done before the next one's.
constexpr int64_t kGroupAboveBytes = int64_t{24} << 20;

ForwardLauncher launcher(DType dtype, int64_t head_dim) {
  if (dtype == DType::kBFloat16 && head_dim == 128) return launch_forward_bf16_d128;
  if (dtype == DType::kBFloat16 && head_dim == 64) return launch_forward_bf16_d64;
  if (dtype == DType::kFloat16 && head_dim == 128) return launch_forward_fp16_d128;
  if (dtype == DType::kFloat16 && head_dim == 64) return launch_forward_fp16_d64;
#ifdef MTRAINING_ALL_KERNELS
  if (dtype == DType::kBFloat16 && head_dim == 96) return launch_forward_bf16_d96;
  if (dtype == DType::kFloat16 && head_dim == 96) return launch_forward_fp16_d96;
  if (dtype == DType::kBFloat16 && head_dim == 256) return launch_forward_bf16_d256;
  if (dtype == DType::kFloat16 && head_dim == 256) return launch_forward_fp16_d256;
#endif
  return nullptr;
}

void check_params(const ForwardParams& p) {
  MT_CHECK_SUPPORTED(launcher(p.dtype, p.head_dim) != nullptr,
                     "sm90 forward: expected bf16 or fp16 with head_dim 64 or 128 (96 and 256 "
                     "where MTRAINING_ALL_KERNELS is on), got dtype ",
                     static_cast<int>(p.dtype), " with head_dim ", p.head_dim);
  MT_CHECK_SUPPORTED(reinterpret_cast<uintptr_t>(p.out.data) % 8 == 0 &&
                         p.out.stride_batch % 2 == 0 && p.out.stride_token % 2 == 0 &&
                         p.out.stride_head % 2 == 0,
                     "out: expected 8-byte aligned memory and even strides, got strides ",
                     p.out.stride_batch, ", ", p.out.stride_token, ", ", p.out.stride_head);
  check_rounded_rows("rounded", p.rounded);
  check_rounded_rows("residual", p.residual);
  check_sizes(p);
  const int64_t needed = forward_workspace_bytes(p);
  MT_CHECK_ARG(p.workspace != nullptr && p.workspace_bytes >= needed &&
                   reinterpret_cast<uintptr_t>(p.workspace) % 256 == 0,
               "sm90 forward: expected a 256-byte aligned workspace of ", needed, " bytes, got ",
               p.workspace_bytes, " at ", p.workspace);
}

/// One launch over sources[first, last).
void forward_range(const ForwardParams& p, int first, int last, bool write, int num_sms) {
  ForwardArgs args = {};
  const auto stream = static_cast<cudaStream_t>(p.stream);
  const int64_t rows = p.batch * p.num_q_heads;
  args.q = tensor_map("q", p.q, p.dtype, p.head_dim, p.num_queries, p.num_q_heads, p.batch);
  args.q_head_step = p.q.stride_head != 0;
  args.q_batch_step = p.q.stride_batch != 0;
  args.num_sources = last - first;
  args.num_heads = static_cast<int32_t>(p.num_q_heads);
  args.heads_per_kv_head = static_cast<int32_t>(p.num_q_heads / p.num_kv_heads);
  args.num_rows = static_cast<int32_t>(rows);
  args.num_queries = static_cast<int32_t>(p.num_queries);
  args.num_q_blocks = static_cast<int32_t>((p.num_queries + kBlock - 1) / kBlock);
  args.group_rows =
      keys_bytes(p, first, last) > kGroupAboveBytes ? args.heads_per_kv_head : args.num_rows;
  args.seq_len = static_cast<int32_t>(p.seq_len);
  args.position_stride = static_cast<int32_t>(p.position_stride);
  args.q_block_starts = p.q_block_starts;
  args.document_start = p.document_start;
  args.document_stride_batch = p.document_stride_batch;
  args.diagonal_bits = p.diagonal_bits;
  args.diagonal_words = p.diagonal_words;
  args.scale_log2 = static_cast<float>(p.softmax_scale * 1.4426950408889634);
  args.reach = 8 / args.scale_log2;
  args.out = static_cast<float*>(p.out.data);
  args.out_stride_batch = p.out.stride_batch;
  args.out_stride_token = p.out.stride_token;
  args.out_stride_head = p.out.stride_head;
  args.lse = static_cast<float*>(p.lse);
  args.first = write ? 1 : 0;
  if (last == p.num_sources) {
    args.rounded = device::half_rows_of(p.rounded);
    args.residual = device::half_rows_of(p.residual);
  }
  args.next_item = static_cast<int32_t*>(p.workspace);

  const int64_t gathered =
      fill_sources(p, first, last, static_cast<char*>(p.workspace) + kCounterBytes, args.next_item,
                   args.sources, &args.gathered_k, &args.gathered_v);
  args.gathered_rows = static_cast<int32_t>(gathered);
  check_cuda(launcher(p.dtype, p.head_dim)(args, num_sms, stream), "launching");
}

}  // namespace

int64_t forward_workspace_bytes(const ForwardParams& params) {
  return kCounterBytes +
         2 * most_gathered_rows(params) * params.batch * params.num_q_heads * params.head_dim * 2;
}

bool needs_out(const ForwardParams& params) { return kernels::needs_out(params, kMaxSources); }

void forward(const ForwardParams& params) {
  check(params, kMaxSources);
  check_params(params);
  if (params.batch == 0 || params.num_queries == 0) return;
  const int num_sms = multiprocessors(params);
  int first = 0;
  bool write = params.first;
  do {
    const int last = std::min(first + kMaxSources, params.num_sources);
    forward_range(params, first, last, write, num_sms);
    first = last;
    write = false;
  } while (first < params.num_sources);
}

}  // namespace mtraining::kernels::sm90
