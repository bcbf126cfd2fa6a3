// The gather before the forward launch: see launch_gather_columns.
#include "mtraining/kernels/sm90/gather_tile.cuh"

namespace mtraining::kernels::sm90 {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    gather_columns(const __grid_constant__ GatherArgs args) {
  if (blockIdx.x == 0 && blockIdx.y == 0 && blockIdx.z == 0 && threadIdx.x == 0)
    *args.next_item = 0;
  const GatherSource& source = args.sources[blockIdx.z];
  for (int row = blockIdx.y; row < args.num_rows; row += gridDim.y) {
    if (static_cast<int64_t>(blockIdx.x) * kBlock < columns_of(source, row))
      gather_tile<kThreads>(args, source, static_cast<int>(blockIdx.x), row);
  }
}

}  // namespace

cudaError_t launch_gather_columns(const GatherArgs& args, cudaStream_t stream) {
  const dim3 grid(args.max_tiles, args.num_rows < 65535 ? args.num_rows : 65535, args.num_sources);
  gather_columns<<<grid, kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace mtraining::kernels::sm90
