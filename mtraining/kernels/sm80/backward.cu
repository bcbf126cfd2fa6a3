// Checks and launches of the backward.
#include <algorithm>

#include "mtraining/base/check.h"
#include "mtraining/kernels/sm80/attention_setup.cuh"
#include "mtraining/kernels/sm80/backward.h"
#include "mtraining/kernels/sm80/backward_keys_kernel.cuh"
#include "mtraining/kernels/sm80/backward_queries_kernel.cuh"
#include "mtraining/kernels/validate.h"

namespace mtraining::kernels::sm80 {
namespace {

// Query blocks of a column item: short enough that the few columns of a head fill the device.
constexpr int kChunkBlocks = 256;
// Of the counters: queues of blocks, of columns, of the query pass.
enum Queue { kBlocksQueue, kColumnsQueue, kQueriesQueue };

using Launcher = cudaError_t (*)(const BackwardArgs&, const Launch&);
struct Launchers {
  Launcher keys, queries;
};
Launchers launchers(DType dtype, int head_dim) {
  const bool bf16 = dtype == DType::kBFloat16;
  if (head_dim == 64)
    return bf16 ? Launchers{launch_backward_keys_bf16_d64, launch_backward_queries_bf16_d64}
                : Launchers{launch_backward_keys_fp16_d64, launch_backward_queries_fp16_d64};
  if (head_dim == 128)
    return bf16 ? Launchers{launch_backward_keys_bf16_d128, launch_backward_queries_bf16_d128}
                : Launchers{launch_backward_keys_fp16_d128, launch_backward_queries_fp16_d128};
  return bf16 ? Launchers{launch_backward_keys_bf16_d256, launch_backward_queries_bf16_d256}
              : Launchers{launch_backward_keys_fp16_d256, launch_backward_queries_fp16_d256};
}

/// A launch of Shape for `items` items; stages: the most that leave room for as many blocks as one would.
template <typename Shape>
Launch plan(const BackwardArgs& args, const DeviceSizes& device, int sm_margin, int64_t items,
            int32_t& stages) {
  const auto fit = [&](int n) {
    return blocks_per_sm(device, Shape::shared_bytes(n), Shape::kBlocksPerSm);
  };
  stages = 1;
  MT_CHECK_SUPPORTED(fit(1) > 0, "sm80 backward: head_dim ", args.head_dim, " needs ",
                     Shape::shared_bytes(1), " bytes of shared memory, this device gives ",
                     device.shared_per_block);
  while (stages < Shape::kMaxStages && fit(stages + 1) == fit(1)) ++stages;
  const int64_t most = int64_t{std::max(1, device.num_sms - std::max(0, sm_margin))} * fit(stages);
  return {static_cast<int32_t>(std::min(items, most)), Shape::shared_bytes(stages), nullptr};
}
template <template <int> class Shape>
Launch plan_for(int head_dim, const BackwardArgs& args, const DeviceSizes& device, int sm_margin,
                int64_t items, int32_t& stages) {
  if (head_dim == 64) return plan<Shape<64>>(args, device, sm_margin, items, stages);
  if (head_dim == 128) return plan<Shape<128>>(args, device, sm_margin, items, stages);
  return plan<Shape<256>>(args, device, sm_margin, items, stages);
}

int64_t column_tiles(const KeySource& source) {
  if (source.columns.counts == nullptr || source.num_keys == 0) return 0;
  return (source.columns.capacity + kBlock - 1) / kBlock;
}

int64_t turns_of(const BackwardParams& p) {
  return int64_t{std::min(p.num_sources, kMaxSources)} * p.batch * p.num_kv_heads;
}

class Range {
 public:
  Range(const BackwardParams& p, int first, int last, const DeviceSizes& device)
      : p_(p), device_(device), head_dim_(kernel_head_dim(p.head_dim)) {
    fill_attention(p, first, last, args_);
    args_.dout = rows_of(p.dout, p.dtype);
    args_.vectors = args_.vectors && rows_aligned(args_.dout);
    args_.lse = static_cast<const float*>(p.lse);
    args_.delta = static_cast<const float*>(p.delta);
    args_.dq = float_rows_of(p.dq);
    args_.vector_dq = pairs_aligned(args_.dq);
    args_.dq_rounded = device::half_rows_of(p.dq_rounded);
    args_.vector_rounded = device::rows_are_aligned(const_of(p.dq_rounded));
    args_.deterministic = p.deterministic;
    args_.chunk_blocks = kChunkBlocks;
    args_.num_chunks = (args_.num_q_blocks + kChunkBlocks - 1) / kChunkBlocks;
    const int64_t groups = p.batch * p.num_kv_heads;
    int64_t tiles_all = 0, most_blocks = 0;
    for (int s = first; s < last; ++s) {
      const KeySource& source = p.sources[s];
      args_.dk[s - first] = float_rows_of(source.dk);
      args_.dv[s - first] = float_rows_of(source.dv);
      const int64_t tiles = column_tiles(source);
      args_.column_tiles[s - first] = static_cast<int32_t>(tiles);
      tiles_all += tiles * groups;
      if (args_.sources[s - first].block_starts != nullptr)
        most_blocks = std::max<int64_t>(most_blocks, args_.sources[s - first].num_blocks);
    }
    column_items_ = tiles_all * args_.heads_per_kv_head * args_.num_chunks;
    block_items_ = most_blocks * args_.num_sources * groups;
    MT_CHECK_SUPPORTED(column_items_ + block_items_ < (int64_t{1} << 31) - (1 << 20),
                       "sm80 backward: expected fewer than 2^31 tiles of keys, got ", column_items_,
                       " of columns and ", block_items_, " of blocks");
    args_.num_column_items = static_cast<int32_t>(column_items_);
    args_.column_tiles_all = static_cast<int32_t>(tiles_all);
    char* memory = static_cast<char*>(p.workspace);
    counters_ = reinterpret_cast<int32_t*>(memory);
    bounds_ = reinterpret_cast<QueryBounds*>(memory + kCounterBytes);
    args_.turns = reinterpret_cast<int32_t*>(memory + kCounterBytes + bounds_bytes(p));
  }

  void run() {
    static_assert(kQueriesQueue < kCounterBytes / sizeof(int32_t));
    // The turns lie behind the bounds; the queues before them.
    prepare(p_, bounds_, args_.turns, args_.num_sources * p_.batch * p_.num_kv_heads, args_);
    check_cuda(cudaMemsetAsync(counters_, 0, kCounterBytes, static_cast<cudaStream_t>(p_.stream)),
               "resetting the queues");
    if (args_.deterministic) {
      // Columns after blocks: both may add to the same rows.
      keys(args_.num_column_items, block_items_, kBlocksQueue);
      keys(0, column_items_, kColumnsQueue);
    } else {
      keys(0, column_items_ + block_items_, kBlocksQueue);
    }
    queries();
  }

 private:
  void keys(int64_t first, int64_t items, Queue queue) {
    if (items == 0) return;
    args_.first_item = static_cast<int32_t>(first);
    args_.num_items = static_cast<int32_t>(items);
    args_.next_item = counters_ + queue;
    launch(
        plan_for<BackwardKeysShape>(head_dim_, args_, device_, p_.sm_margin, items, args_.stages),
        launchers(p_.dtype, head_dim_).keys, "launching the key pass");
  }
  void queries() {
    args_.next_item = counters_ + kQueriesQueue;
    const int64_t items = int64_t{args_.num_rows} * args_.num_q_blocks;
    launch(plan_for<BackwardQueriesShape>(head_dim_, args_, device_, p_.sm_margin, items,
                                          args_.stages),
           launchers(p_.dtype, head_dim_).queries, "launching the query pass");
  }
  void launch(Launch l, Launcher launcher, const char* what) {
    l.stream = static_cast<cudaStream_t>(p_.stream);
    check_cuda(launcher(args_, l), what);
  }

  const BackwardParams& p_;
  const DeviceSizes& device_;
  const int head_dim_;
  BackwardArgs args_ = {};
  int64_t column_items_ = 0, block_items_ = 0;
  int32_t* counters_;
  QueryBounds* bounds_;
};

}  // namespace

int64_t backward_workspace_bytes(const BackwardParams& p) {
  return kCounterBytes + bounds_bytes(p) + turns_of(p) * static_cast<int64_t>(sizeof(int32_t));
}

bool rounds_dq(const BackwardParams& params) { return params.num_sources <= kMaxSources; }

void backward(const BackwardParams& params) {
  check(params, rounds_dq(params));
  check_attention(params, "sm80 backward", backward_workspace_bytes(params));
  if (params.batch == 0 || params.num_queries == 0) return;
  const DeviceSizes device = device_sizes();
  // Without any source dq_rounded is still to be written.
  int first = 0;
  do {
    const int last = std::min(first + kMaxSources, params.num_sources);
    Range(params, first, last, device).run();
    first = last;
  } while (first < params.num_sources);
}

void delta(const BackwardParams& params, const RoundedOut& out, void* delta) {
  check_delta(params, out, delta);
  MT_CHECK_SUPPORTED(params.dtype == DType::kBFloat16 || params.dtype == DType::kFloat16,
                     "sm80 delta: expected bf16 or fp16, got dtype code ",
                     static_cast<int>(params.dtype));
  if (params.batch == 0 || params.num_queries == 0) return;
  DeltaArgs args;
  args.dout = rows_of(params.dout, params.dtype);
  args.rounded = rows_of(out.rounded, params.dtype);
  args.residual = rows_of(out.residual, params.dtype);
  args.lse = static_cast<const float*>(params.lse);
  args.delta = static_cast<float*>(delta);
  args.batch = params.batch;
  args.num_heads = params.num_q_heads;
  args.num_queries = params.num_queries;
  args.head_dim = static_cast<int32_t>(params.head_dim);
  args.bf16 = params.dtype == DType::kBFloat16;
  args.vectors =
      rows_aligned(args.dout) && rows_aligned(args.rounded) && rows_aligned(args.residual);
  check_cuda(launch_delta(args, static_cast<cudaStream_t>(params.stream)), "launching delta");
}

}  // namespace mtraining::kernels::sm80
