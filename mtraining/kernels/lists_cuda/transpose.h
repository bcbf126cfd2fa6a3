// Transpose of CSR block lists on the device: the lists by key block that the Hopper backward walks.
//
// In:   row_begin, key_blocks of BlockLists (device memory). Out: key_row_begin, query_blocks of the same lists, the same bits as
//       index::transpose gives. Next: BlockLists, attention/index_plan.cc.
//
// Stream: enqueues on `stream`, allocates nothing, never synchronises. A key block outside [0, num_k_blocks) is not in the lists that come
// out. Cost: O(blocks listed). Errors: InvalidArgument, ExternalError.
#pragma once

#include <cstdint>

namespace mtraining::kernels::lists_cuda {

struct TransposeParams {
  int64_t rows = 0;  // batch * heads
  int64_t num_q_blocks = 0, num_k_blocks = 0;
  const int64_t* row_begin = nullptr;   // [rows, num_q_blocks + 1], absolute into key_blocks
  const int32_t* key_blocks = nullptr;  // ascending within a query block, none twice
  int64_t* key_row_begin = nullptr;     // [rows, num_k_blocks + 1]
  int32_t* query_blocks = nullptr;      // as many as key_blocks
  void* workspace = nullptr;            // 4-byte aligned
  void* stream = nullptr;
};

int64_t transpose_workspace_bytes(const TransposeParams& params);

void transpose_lists(const TransposeParams& params);

}  // namespace mtraining::kernels::lists_cuda
