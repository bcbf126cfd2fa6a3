// The small kernels around the backward launch: see launch_prepare, launch_scatter_columns, launch_delta.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <climits>

#include "mtraining/kernels/device/rounded_rows.cuh"
#include "mtraining/kernels/sm90/backward_args.cuh"
#include "mtraining/kernels/sm90/gather_tile.cuh"

namespace mtraining::kernels::sm90 {
namespace {

constexpr int kWarps = 4;

/// Blocks below gather_blocks: a tile of 64 columns of a head. The others: a warp a query block, two rows a lane.
__global__ void __launch_bounds__(32 * kWarps)
    prepare(const __grid_constant__ PrepareArgs args, int64_t gather_blocks) {
  if (blockIdx.x == 0 && threadIdx.x < 2) args.counters[threadIdx.x] = 0;
  if (blockIdx.x < gather_blocks) {
    const GatherArgs& gather = args.gather;
    const int tile = static_cast<int>(blockIdx.x % gather.max_tiles);
    const int row = static_cast<int>(blockIdx.x / gather.max_tiles % args.num_rows);
    const GatherSource& source = gather.sources[blockIdx.x / gather.max_tiles / args.num_rows];
    if (static_cast<int64_t>(tile) * kBlock >= columns_of(source, row)) return;
    gather_tile<32 * kWarps>(gather, source, tile, row);
    if (args.gathered_dk == nullptr) return;
    const int row_floats = gather.row_bytes / 2;
    const int64_t first =
        (static_cast<int64_t>(row) * gather.gathered_rows + source.gathered_begin + tile * kBlock) *
        row_floats;
    for (int i = 4 * threadIdx.x; i < kBlock * row_floats; i += 4 * 32 * kWarps) {
      *reinterpret_cast<float4*>(args.gathered_dk + first + i) = make_float4(0, 0, 0, 0);
      *reinterpret_cast<float4*>(args.gathered_dv + first + i) = make_float4(0, 0, 0, 0);
    }
    return;
  }
  const int64_t unit =
      (static_cast<int64_t>(blockIdx.x) - gather_blocks) * kWarps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (unit >= static_cast<int64_t>(args.num_rows) * args.num_q_blocks) return;
  const int row = static_cast<int>(unit / args.num_q_blocks),
            block = static_cast<int>(unit % args.num_q_blocks);
  const int32_t start = args.q_block_starts[block];
  int32_t last = -1, document_min = INT_MAX, document_max = 0;
  bool empty = false;
  for (int i = 0; i < 2; ++i) {
    const int inside = lane + 32 * i, token = block * 64 + inside;
    float lse = -INFINITY, delta = 0;
    if (token < args.num_queries) {
      const int32_t position = start + inside * args.position_stride;
      const float natural = args.lse[static_cast<int64_t>(row) * args.num_queries + token];
      if (natural != -INFINITY && position < args.seq_len) {
        lse = -natural * 1.4426950408889634f;
        delta =
            -args.delta[static_cast<int64_t>(row) * args.num_queries + token] * args.delta_scale;
        last = position;
        const int32_t document =
            args.document_start == nullptr
                ? 0
                : args.document_start[row / args.num_heads * args.document_stride_batch + token];
        document_min = min(document_min, document);
        document_max = max(document_max, document);
      } else {
        empty = true;
      }
    }
    args.statistics[unit * 128 + inside] = lse;
    args.statistics[unit * 128 + 64 + inside] = delta;
  }
  last = __reduce_max_sync(~0u, last);
  document_min = __reduce_min_sync(~0u, document_min);
  document_max = __reduce_max_sync(~0u, document_max);
  empty = __any_sync(~0u, empty);
  if (lane == 0) {
    args.query_bounds[unit] =
        make_int4(start | (empty ? INT_MIN : 0), last, last < 0 ? 0 : document_min, document_max);
  }
}

/// A warp a column of a head; the first head of the kv head that has the column adds all of them up.
template <int kD>
__global__ void __launch_bounds__(32 * kWarps)
    scatter_columns(const __grid_constant__ ScatterArgs args) {
  constexpr int kEach = kD / 32;
  const ScatterSource& source = args.sources[blockIdx.z];
  const int lane = threadIdx.x % 32;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  for (int row = blockIdx.y; row < args.num_rows; row += gridDim.y) {
    if (column >= source.counts[row]) continue;
    const int32_t position = source.positions[row * source.capacity + column];
    const int group = args.heads_per_kv_head, first = row / group * group;
    float dk[kEach] = {}, dv[kEach] = {};
    bool owner = true;
    for (int base = 0; base < group && owner; base += 32) {
      // Where each of up to 32 heads has the position, or -1.
      int at = -1;
      if (base + lane < group) {
        const int32_t* list = source.positions + (first + base + lane) * source.capacity;
        int low = 0, high = source.counts[first + base + lane];
        while (low < high) {
          const int middle = (low + high) / 2;
          if (list[middle] < position) {
            low = middle + 1;
          } else {
            high = middle;
          }
        }
        if (low < source.counts[first + base + lane] && list[low] == position) at = low;
      }
      uint32_t found = __ballot_sync(~0u, at >= 0);
      for (; found != 0; found &= found - 1) {
        const int head = __ffs(found) - 1;
        if (first + base + head < row) {
          owner = false;
          break;
        }
        const int64_t from = ((static_cast<int64_t>(first) + base + head) * args.gathered_rows +
                              source.gathered_begin + __shfl_sync(~0u, at, head)) *
                                 kD +
                             lane * kEach;
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
          dk[i] += args.gathered_dk[from + i];
          dv[i] += args.gathered_dv[from + i];
        }
      }
    }
    if (!owner) continue;
    const int64_t token = source.key_rows[row * source.capacity + column];
    const int64_t batch = row / args.num_heads, kv_head = row % args.num_heads / group;
    float* dk_at = source.dk + batch * source.dk_stride_batch + token * source.dk_stride_token +
                   kv_head * source.dk_stride_head + lane * kEach;
    float* dv_at = source.dv + batch * source.dv_stride_batch + token * source.dv_stride_token +
                   kv_head * source.dv_stride_head + lane * kEach;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      dk_at[i] += dk[i];
      dv_at[i] += dv[i];
    }
  }
}

/// 8 values of a row.
__device__ __forceinline__ uint4 load_eight(const ConstView& view, int64_t batch, int64_t token,
                                            int64_t head, int lane) {
  return __ldcs(reinterpret_cast<const uint4*>(
                    static_cast<const uint16_t*>(view.data) + batch * view.stride_batch +
                    token * view.stride_token + head * view.stride_head) +
                lane);
}

/// kD / 8 lanes a row, each 8 values; neighbouring rows are the heads of a token, as they mostly lie in memory.
template <typename Element, int kD>
__global__ void __launch_bounds__(256) compute_delta(const __grid_constant__ DeltaArgs args) {
  constexpr int kLanes = kD / 8;
  const int lane = threadIdx.x % kLanes;
  const int64_t unit = static_cast<int64_t>(blockIdx.x) * (256 / kLanes) + threadIdx.x / kLanes;
  const int64_t units = static_cast<int64_t>(args.num_rows) * args.num_queries;
  const bool real = unit < units;
  int64_t head, token, batch;
  if (units <= UINT32_MAX) {  // 64-bit divisions would take as long as the memory
    const uint32_t row = static_cast<uint32_t>(unit) / args.num_heads;
    head = static_cast<uint32_t>(unit) - row * args.num_heads;
    batch = row / args.num_queries;
    token = row - batch * args.num_queries;
  } else {
    head = unit % args.num_heads;
    token = unit / args.num_heads % args.num_queries;
    batch = unit / args.num_heads / args.num_queries;
  }
  const int64_t at = (batch * args.num_heads + head) * args.num_queries + token;
  float sum = 0;
  if (real) {
    // Asked for before it is known whether the row counts: rows that do not may hold anything, and are then not used.
    const float lse = args.lse[at];
    const uint4 dout = load_eight(args.dout, batch, token, head, lane),
                near = load_eight(args.rounded, batch, token, head, lane);
    uint4 rest = make_uint4(0, 0, 0, 0);
    if (args.residual.data != nullptr) rest = load_eight(args.residual, batch, token, head, lane);
    const auto add = [&](uint32_t gradient, uint32_t rounded, uint32_t residual) {
      const float2 d = device::widen_pair<Element>(gradient),
                   a = device::widen_pair<Element>(rounded),
                   b = device::widen_pair<Element>(residual);
      sum = fmaf(d.x, a.x + b.x, fmaf(d.y, a.y + b.y, sum));
    };
    add(dout.x, near.x, rest.x);
    add(dout.y, near.y, rest.y);
    add(dout.z, near.z, rest.z);
    add(dout.w, near.w, rest.w);
    if (lse == -INFINITY) sum = 0;
  }
#pragma unroll
  for (int i = kLanes / 2; i > 0; i /= 2) sum += __shfl_xor_sync(~0u, sum, i);
  if (real && lane == 0) args.delta[at] = sum;
}

template <typename Element, int kD>
cudaError_t launch_delta_of(const DeltaArgs& args, cudaStream_t stream) {
  const int64_t units = static_cast<int64_t>(args.num_rows) * args.num_queries;
  const int64_t each = 256 / (kD / 8);
  compute_delta<Element, kD>
      <<<static_cast<unsigned>((units + each - 1) / each), 256, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_prepare(const PrepareArgs& args, cudaStream_t stream) {
  const int64_t units = static_cast<int64_t>(args.num_rows) * args.num_q_blocks;
  const int64_t gather_blocks =
      static_cast<int64_t>(args.gather.max_tiles) * args.num_rows * args.gather.num_sources;
  const int64_t blocks = gather_blocks + (units + kWarps - 1) / kWarps;
  if (blocks >= int64_t{1} << 31) return cudaErrorInvalidConfiguration;
  prepare<<<static_cast<unsigned>(blocks), 32 * kWarps, 0, stream>>>(args, gather_blocks);
  return cudaGetLastError();
}

cudaError_t launch_scatter_columns(const ScatterArgs& args, int64_t max_capacity,
                                   cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((max_capacity + kWarps - 1) / kWarps),
                  args.num_rows < 65535 ? args.num_rows : 65535, args.num_sources);
  if (args.head_dim == 128) {
    scatter_columns<128><<<grid, 32 * kWarps, 0, stream>>>(args);
  } else {
    scatter_columns<64><<<grid, 32 * kWarps, 0, stream>>>(args);
  }
  return cudaGetLastError();
}

cudaError_t launch_delta(const DeltaArgs& args, DType dtype, int head_dim, cudaStream_t stream) {
  if (dtype == DType::kBFloat16) {
    return head_dim == 128 ? launch_delta_of<__nv_bfloat16, 128>(args, stream)
                           : launch_delta_of<__nv_bfloat16, 64>(args, stream);
  }
  return head_dim == 128 ? launch_delta_of<__half, 128>(args, stream)
                         : launch_delta_of<__half, 64>(args, stream);
}

}  // namespace mtraining::kernels::sm90
