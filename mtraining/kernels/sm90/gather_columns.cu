// The gather before the attention launch: see launch_gather_columns.
#include "mtraining/kernels/sm90/forward_args.cuh"

namespace mtraining::kernels::sm90 {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    gather_columns(const __grid_constant__ GatherArgs args) {
  if (blockIdx.x == 0 && blockIdx.y == 0 && blockIdx.z == 0 && threadIdx.x == 0)
    *args.next_item = 0;
  const GatherSource& source = args.sources[blockIdx.z];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kBlock;
  const int chunks = args.row_bytes / 16;
  for (int row = blockIdx.y; row < args.num_rows; row += gridDim.y) {
    const int64_t count = source.counts == nullptr ? 0 : source.counts[row];
    if (first >= count) continue;
    const int64_t batch = row / args.num_heads;
    const int64_t kv_head = row % args.num_heads / args.heads_per_kv_head;
    const char* k = source.k + batch * source.k_stride_batch + kv_head * source.k_stride_head;
    const char* v = source.v + batch * source.v_stride_batch + kv_head * source.v_stride_head;
    const int64_t out =
        (static_cast<int64_t>(row) * args.gathered_rows + source.gathered_begin + first) *
        args.row_bytes;
    for (int i = threadIdx.x; i < kBlock * chunks; i += kThreads) {
      const int64_t c = first + i / chunks;
      const int64_t inside = i % chunks * 16;
      uint4 a{0, 0, 0, 0}, b{0, 0, 0, 0};
      if (c < count) {
        const int64_t token = source.key_rows[row * source.capacity + c];
        a = *reinterpret_cast<const uint4*>(k + token * source.k_stride_token + inside);
        b = *reinterpret_cast<const uint4*>(v + token * source.v_stride_token + inside);
      }
      const int64_t at = out + static_cast<int64_t>(i / chunks) * args.row_bytes + inside;
      *reinterpret_cast<uint4*>(args.gathered_k + at) = a;
      *reinterpret_cast<uint4*>(args.gathered_v + at) = b;
    }
  }
}

}  // namespace

cudaError_t launch_gather_columns(const GatherArgs& args, int max_tiles, cudaStream_t stream) {
  const dim3 grid(max_tiles, args.num_rows < 65535 ? args.num_rows : 65535, args.num_sources);
  gather_columns<<<grid, kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace mtraining::kernels::sm90
