// Checks, chunks and launches of the estimation kernels; row sums.
#include <algorithm>
#include <cmath>

#include "mtraining/base/check.h"
#include "mtraining/kernels/dispatch.h"
#include "mtraining/kernels/pattern_cuda/device.h"
#include "mtraining/kernels/pattern_cuda/window.h"
#include "mtraining/kernels/pattern_cuda/window_kernel.cuh"
#include "mtraining/kernels/pattern_cuda/window_sm90.h"
#include "mtraining/kernels/sm90/source_args.cuh"
#include "mtraining/kernels/validate.h"

namespace mtraining::kernels::pattern_cuda {
namespace {

constexpr int kRowSumThreads = 256;
// Beyond it a score's rounding in float32 exceeds 2^-8, and exponentials mean little.
constexpr float kLargestScore = 65536;

/// Bits of the first magnitude that is refused: 2^50, or what is no finite number.
uint32_t magnitude_limit(DType dtype) {
  return dtype == DType::kBFloat16 ? (127 + 50) << 7 : 0x7c00;
}
int64_t padded_rows(const WindowParams& p) { return (p.num_rows + 63) / 64 * 64; }
int64_t blocks_of(int64_t tokens) { return (tokens + kBlock - 1) / kBlock; }

WindowLauncher launcher(int64_t head_dim) {
  if (head_dim == 64) return launch_window_d64;
  if (head_dim == 96) return launch_window_d96;
  if (head_dim == 128) return launch_window_d128;
  if (head_dim == 256) return launch_window_d256;
  return nullptr;
}

void check_params(const WindowParams& p) {
  check(p);
  MT_CHECK_SUPPORTED(p.dtype == DType::kBFloat16 || p.dtype == DType::kFloat16,
                     "choosing an index on a GPU: expected bf16 or fp16, got ", to_string(p.dtype));
  MT_CHECK_SUPPORTED(launcher(p.head_dim) != nullptr,
                     "choosing an index on a GPU: expected head_dim 64, 96, 128 or 256, got ",
                     p.head_dim);
  MT_CHECK_SUPPORTED(p.position_stride == 1,
                     "choosing an index on a GPU: expected position_stride 1, got ",
                     p.position_stride);
  const auto aligned = [](const ConstView& view) {
    return reinterpret_cast<uintptr_t>(view.data) % 16 == 0 && view.stride_token % 8 == 0 &&
           view.stride_head % 8 == 0 && view.stride_batch % 8 == 0;
  };
  MT_CHECK_SUPPORTED(aligned(p.q) && aligned(p.k),
                     "choosing an index on a GPU: expected 16-byte aligned q and k with strides "
                     "that are multiples of 8 elements");
  MT_CHECK_SUPPORTED(p.num_keys < (int64_t{1} << 31) - 64,
                     "choosing an index on a GPU: expected fewer than 2^31 keys, got ", p.num_keys);
}

/// Row maxima before anything was seen.
__global__ void fill(float* values, int64_t count, float value) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) values[i] = value;
}

/// A thread block a (sample, head, row); 16-bit words.
__global__ void rows_kernel(const __grid_constant__ RowsParams p) {
  for (int i = 0; i < p.num_regions; ++i) {
    auto* words = static_cast<uint32_t*>(p.regions[i].data);
    for (int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
         at < p.regions[i].bytes / 4; at += static_cast<int64_t>(gridDim.x) * blockDim.x)
      words[at] = p.regions[i].word;
  }
  const int64_t row = blockIdx.x % p.num_rows, head = blockIdx.x / p.num_rows % p.num_q_heads,
                batch = blockIdx.x / p.num_rows / p.num_q_heads;
  const int position = p.row_positions[row];
  bool own = true;
  int64_t token = position;
  if (p.owners != nullptr) {
    own = p.owners[position / 64 * 2] == p.cp_rank;
    token = static_cast<int64_t>(p.owners[position / 64 * 2 + 1]) * 64 + position % 64;
  }
  const auto* from = static_cast<const uint16_t*>(p.q.data) + batch * p.q.stride_batch +
                     token * p.q.stride_token + head * p.q.stride_head;
  auto* to = static_cast<uint16_t*>(p.rows) +
             static_cast<int64_t>(blockIdx.x) / p.num_rows * p.num_rows * p.head_dim +
             row * p.head_dim;
  for (int d = threadIdx.x; d < p.head_dim; d += blockDim.x) to[d] = own ? from[d] : 0;
  if (p.document_start != nullptr && head == 0 && threadIdx.x == 0)
    p.row_document_start[batch * p.num_rows + row] = p.document_start[batch * p.seq_len + position];
}

/// A thread block per (head, chunk of key blocks): 64 rows by kRowSumThreads / 64 block lanes.
__global__ void __launch_bounds__(kRowSumThreads)
    row_sum_kernel(const float2* statistics, const float* row_max, int64_t* row_sum, int64_t* fault,
                   int num_rows, int padded_rows, int num_blocks, int chunks, int chunk_blocks) {
  const int64_t head_row = blockIdx.x / chunks;
  const int begin = static_cast<int>(blockIdx.x % chunks) * chunk_blocks;
  const int end = min(num_blocks, begin + chunk_blocks);
  bool finite = true;
  for (int first = 0; first < num_rows; first += 64) {
    const int row = first + static_cast<int>(threadIdx.x % 64);
    if (row >= num_rows) continue;
    const float top = row_max[head_row * num_rows + row];
    finite = finite && fabsf(top) < kLargestScore;
    int64_t sum = 0;
#pragma unroll 8
    for (int block = begin + static_cast<int>(threadIdx.x / 64); block < end;
         block += kRowSumThreads / 64) {
      const int64_t at = (head_row * num_blocks + block) * padded_rows + row;
      const float2 part = statistics[at];
      finite = finite && part.y == part.y;
      // A block without a visible key has maximum -inf and sum 0.
      sum += fixed_point(part.y * exp2f(part.x - top), 64.0f);
    }
    if (sum != 0) atomic_add(row_sum + head_row * num_rows + row, sum);
  }
  if (!finite) report(fault, FaultKind::kScore, head_row);
}

/// rows_of_block: stacked rows of a thread block; blocks_an_sm: thread blocks that fill one.
WindowArgs make_args(const WindowParams& p, int64_t rows_of_block, int64_t blocks_an_sm,
                     int64_t* grid) {
  WindowArgs args = {};
  const int64_t size = size_of(p.dtype);
  args.q = static_cast<const char*>(p.q.data);
  args.q_stride_batch = p.q.stride_batch * size;
  args.q_stride_row = p.q.stride_token * size;
  args.q_stride_head = p.q.stride_head * size;
  args.k = static_cast<const char*>(p.k.data);
  args.k_stride_batch = p.k.stride_batch * size;
  args.k_stride_token = p.k.stride_token * size;
  args.k_stride_head = p.k.stride_head * size;
  args.num_heads = static_cast<int32_t>(p.num_q_heads);
  args.num_kv_heads = static_cast<int32_t>(p.num_kv_heads);
  args.heads_per_kv_head = static_cast<int32_t>(p.num_q_heads / p.num_kv_heads);
  args.num_rows = static_cast<int32_t>(p.num_rows);
  args.padded_rows = static_cast<int32_t>(padded_rows(p));
  args.num_keys = static_cast<int32_t>(p.num_keys);
  args.num_blocks = static_cast<int32_t>(blocks_of(p.num_keys));
  args.seq_len = static_cast<int32_t>(p.seq_len);
  args.block_starts = p.k_block_starts;
  args.row_positions = p.row_positions;
  args.row_document_start = p.row_document_start;
  args.scale_log2 = static_cast<float>(p.softmax_scale * 1.4426950408889634);
  const int64_t stacked = int64_t{args.heads_per_kv_head} * args.padded_rows;
  args.row_groups = static_cast<int32_t>((stacked + rows_of_block - 1) / rows_of_block);
  const int64_t groups = p.batch * p.num_kv_heads * args.row_groups;
  // One wave of thread blocks, or as many equal ones as are needed.
  const int64_t slots = device_of_stream().num_sms * blocks_an_sm;
  const int64_t chunks =
      std::max(std::clamp<int64_t>(slots / groups, 1, std::max(1, args.num_blocks / 4)),
               (int64_t{args.num_blocks} + kMostBlocks - 1) / kMostBlocks);
  args.chunk_blocks = static_cast<int32_t>((args.num_blocks + chunks - 1) / chunks);
  args.chunks =
      args.chunk_blocks == 0
          ? 1
          : static_cast<int32_t>((args.num_blocks + args.chunk_blocks - 1) / args.chunk_blocks);
  *grid = LaunchPlanner(device_of_stream()).flat("estimation", groups, args.chunks).x;
  return args;
}

int64_t stacked_rows(const WindowParams& p) {
  return p.num_q_heads / p.num_kv_heads * padded_rows(p);
}

/// Runs a pass on the kernels of window_kernel.cuh or, where the device and the call allow it, on Hopper's own; `fill` sets what the
/// pass reads and writes.
template <typename Fill>
void launch(const WindowParams& p, Pass pass, bool consecutive, bool hopper, const char* what,
            const Fill& fill) {
  const auto stream = static_cast<cudaStream_t>(p.stream);
  int64_t grid = 0;
  if (hopper && device_of_stream().capability() == 90 && (p.head_dim == 64 || p.head_dim == 128)) {
    const int64_t tiles = stacked_rows(p) / 64;
    HopperArgs args = {};
    args.tiles = tiles <= KeyWalk::kLeastTiles ? KeyWalk::kLeastTiles
                 : tiles <= 4                  ? 4
                                               : KeyWalk::kGroups;
    args.window = make_args(p, 64 * args.tiles, 1, &grid);
    args.keys =
        sm90::tensor_map("k", p.k, p.dtype, p.head_dim, p.num_keys, p.num_kv_heads, p.batch);
    fill(args.window);
    check_cuda((p.head_dim == 64 ? launch_hopper_d64 : launch_hopper_d128)(pass, p.dtype, args,
                                                                           grid, stream),
               what);
    return;
  }
  // 8 warps fill an SM's registers, 2 a quarter of them.
  const int warps = stacked_rows(p) <= 64 ? 2 : 8;
  WindowArgs args = make_args(p, 32 * warps, warps == 8 ? 1 : 4, &grid);
  fill(args);
  check_cuda(launcher(p.head_dim)(pass, consecutive, p.dtype, warps, args, grid, stream), what);
}

bool nothing_to_do(const WindowParams& p) { return p.batch * p.num_rows == 0 || p.num_keys == 0; }

}  // namespace

void gather_rows(const RowsParams& params) {
  MT_CHECK_SUPPORTED(size_of(params.dtype) == 2,
                     "choosing an index on a GPU: expected bf16 or fp16, got ",
                     to_string(params.dtype));
  const int64_t rows = params.batch * params.num_q_heads * params.num_rows;
  if (rows == 0) return;
  rows_kernel<<<static_cast<unsigned>(LaunchPlanner(device_of_stream()).flat("rows", rows, 1).x),
                128, 0, static_cast<cudaStream_t>(params.stream)>>>(params);
  check_cuda(cudaGetLastError(), "estimation: gathering rows");
}

int64_t window_workspace_bytes(const WindowParams& p) {
  return 2 * p.batch * p.num_q_heads * blocks_of(p.num_keys) * padded_rows(p) * 4;
}

void window_scan(const WindowParams& p, void* workspace, float* row_max, int64_t* fault,
                 bool reset) {
  check_params(p);
  const auto stream = static_cast<cudaStream_t>(p.stream);
  const int64_t outputs = p.batch * p.num_q_heads * p.num_rows;
  MT_CHECK_ARG(outputs == 0 || (workspace != nullptr && row_max != nullptr),
               "workspace, row_max: expected pointers, got a null one");
  if (outputs == 0) return;
  if (!reset) {
    fill<<<static_cast<unsigned>((outputs + 255) / 256), 256, 0, stream>>>(row_max, outputs,
                                                                           -kInfinity);
    check_cuda(cudaGetLastError(), "estimation: resetting row maxima");
  }
  if (nothing_to_do(p)) return;
  launch(p, Pass::kScan, false, true, "estimation: scan", [&](WindowArgs& args) {
    args.block_statistics = static_cast<float2*>(workspace);
    args.row_max = row_max;
    args.fault = fault;
    args.magnitude_limit = magnitude_limit(p.dtype);
  });
}

void window_row_sum(const WindowParams& p, const void* workspace, const float* row_max,
                    int64_t* row_sum, int64_t* fault, bool zeroed) {
  check_params(p);
  const auto stream = static_cast<cudaStream_t>(p.stream);
  const int64_t heads = p.batch * p.num_q_heads;
  if (heads * p.num_rows == 0) return;
  if (!zeroed) {
    check_cuda(cudaMemsetAsync(row_sum, 0, heads * p.num_rows * sizeof(int64_t), stream),
               "estimation: resetting row sums");
  }
  if (nothing_to_do(p)) return;
  const LaunchPlanner planner(device_of_stream());
  const int64_t blocks = blocks_of(p.num_keys);
  const int64_t chunks = planner.chunks(heads, blocks, 16);
  const int64_t chunk_blocks = (blocks + chunks - 1) / chunks;
  row_sum_kernel<<<static_cast<unsigned>(planner.flat("row sums", heads, chunks).x), kRowSumThreads,
                   0, stream>>>(static_cast<const float2*>(workspace), row_max, row_sum, fault,
                                static_cast<int>(p.num_rows), static_cast<int>(padded_rows(p)),
                                static_cast<int>(blocks), static_cast<int>(chunks),
                                static_cast<int>(chunk_blocks));
  check_cuda(cudaGetLastError(), "estimation: row sums");
}

void window_masses(const WindowParams& p, const float* row_max, const int64_t* row_sum,
                   const WindowOutputs& outputs) {
  check_params(p);
  MT_CHECK_ARG(outputs.columns != nullptr, "columns: expected a pointer, got null");
  MT_CHECK_ARG(outputs.heads_per_choice >= 1 && p.num_q_heads % outputs.heads_per_choice == 0,
               "heads_per_choice: expected a divisor of ", p.num_q_heads, ", got ",
               outputs.heads_per_choice);
  const auto stream = static_cast<cudaStream_t>(p.stream);
  const int64_t num_diagonals = blocks_of(p.seq_len) + 1;
  const bool columns_shared = outputs.heads_per_choice > 1 || padded_rows(p) > 64;
  const int64_t choices = p.batch * p.num_q_heads / outputs.heads_per_choice;
  const auto reset = [&](int64_t* values, int64_t per_choice) {
    if (values == nullptr || outputs.zeroed) return;
    check_cuda(cudaMemsetAsync(values, 0, choices * per_choice * sizeof(int64_t), stream),
               "estimation: resetting masses");
  };
  if (columns_shared || p.num_rows == 0) reset(outputs.columns, p.num_keys);
  reset(outputs.diagonals, num_diagonals);
  reset(outputs.offsets, p.seq_len);
  reset(outputs.totals, 1);
  if (nothing_to_do(p)) return;
  launch(p, Pass::kMasses, outputs.consecutive_rows,
         outputs.consecutive_rows && outputs.offsets == nullptr, "estimation: masses",
         [&](WindowArgs& args) {
           args.known_row_max = row_max;
           args.row_sum = row_sum;
           args.heads_per_choice = static_cast<int32_t>(outputs.heads_per_choice);
           args.columns = outputs.columns;
           args.diagonals = outputs.diagonals;
           args.offsets = outputs.offsets;
           args.totals = outputs.totals;
           args.num_diagonals = static_cast<int32_t>(num_diagonals);
           args.columns_shared = columns_shared;
         });
}

void window_covered(const WindowParams& p, const float* row_max, const int64_t* row_sum,
                    const uint64_t* diagonal_bits, int64_t diagonal_words,
                    const uint32_t* column_bits, int64_t column_words, int64_t* covered) {
  check_params(p);
  MT_CHECK_ARG(diagonal_words * 64 >= blocks_of(p.seq_len) && column_words * 32 >= p.seq_len,
               "covered: expected a bit for each of ", blocks_of(p.seq_len), " diagonals and ",
               p.seq_len, " positions, got ", diagonal_words * 64, " and ", column_words * 32);
  const auto stream = static_cast<cudaStream_t>(p.stream);
  const int64_t outputs = p.batch * p.num_q_heads * p.num_rows;
  if (outputs == 0) return;
  check_cuda(cudaMemsetAsync(covered, 0, outputs * sizeof(int64_t), stream),
             "estimation: resetting covered mass");
  if (nothing_to_do(p)) return;
  launch(p, Pass::kCovered, false, false, "estimation: covered mass", [&](WindowArgs& args) {
    args.known_row_max = row_max;
    args.row_sum = row_sum;
    args.heads_per_choice = 1;
    args.diagonal_bits = diagonal_bits;
    args.diagonal_words = diagonal_words;
    args.column_bits = column_bits;
    args.column_words = column_words;
    args.covered = covered;
  });
}

}  // namespace mtraining::kernels::pattern_cuda
