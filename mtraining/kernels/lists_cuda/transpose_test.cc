// Transposed lists against index::transpose, over sizes around the edges of chunks and of the scan.
#include "mtraining/kernels/lists_cuda/transpose.h"

#include <gtest/gtest.h>

#include <chrono>
#include <string>

#include "mtraining/base/check.h"
#include "mtraining/index/step_index.h"
#include "mtraining/kernels/sm90/device_memory.h"
#include "mtraining/testing/gpu.h"
#include "mtraining/testing/random.h"

namespace mtraining::kernels::lists_cuda {
namespace {

using sm90::check_device;
using sm90::DeviceMemory;

/// Each query block lists a random share of the key blocks; some list none, some all.
index::StepBlocks random_lists(int64_t rows, int64_t num_q_blocks, int64_t num_k_blocks) {
  testing::Random random(rows * 7919 + num_q_blocks * 31 + num_k_blocks);
  index::StepBlocks lists;
  lists.kind = BlockListKind::kCsr;
  lists.num_q_blocks = num_q_blocks;
  for (int64_t r = 0; r < rows; ++r) {
    lists.row_begin.push_back(static_cast<int64_t>(lists.key_blocks.size()));
    for (int64_t q = 0; q < num_q_blocks; ++q) {
      const double share = (q + r) % 5 == 0 ? 0 : (q + r) % 17 == 1 ? 1 : 8.0 / num_k_blocks;
      for (int64_t k = 0; k < num_k_blocks; ++k)
        if (random.uniform() < share) lists.key_blocks.push_back(static_cast<int32_t>(k));
      lists.row_begin.push_back(static_cast<int64_t>(lists.key_blocks.size()));
    }
  }
  return lists;
}

TEST(TransposeLists, GivesTheHostsTranspose) {
  MT_NEEDS_GPU();
  for (const int64_t rows : {1, 3}) {
    for (const int64_t num_q_blocks : {1, 63, 64, 65, 700, 2100}) {
      for (const int64_t num_k_blocks : {1, 31, 1024, 1025, 2100}) {
        const std::string name = concat(rows, " x ", num_q_blocks, " x ", num_k_blocks);
        const index::StepBlocks lists = random_lists(rows, num_q_blocks, num_k_blocks);
        const index::StepBlocks right = index::transpose(lists, num_k_blocks);
        const DeviceMemory row_begin(lists.row_begin), key_blocks(lists.key_blocks);
        const DeviceMemory key_row_begin(static_cast<int64_t>(right.row_begin.size()) * 8),
            query_blocks(static_cast<int64_t>(right.key_blocks.size()) * 4);
        TransposeParams params;
        params.rows = rows;
        params.num_q_blocks = num_q_blocks;
        params.num_k_blocks = num_k_blocks;
        params.row_begin = row_begin.get<int64_t>();
        params.key_blocks = key_blocks.get<int32_t>();
        params.key_row_begin = key_row_begin.get<int64_t>();
        params.query_blocks = query_blocks.get<int32_t>();
        const DeviceMemory workspace(transpose_workspace_bytes(params));
        params.workspace = workspace.get();
        transpose_lists(params);
        check_device(cudaDeviceSynchronize(), "the transpose");
        ASSERT_EQ(key_row_begin.read<int64_t>(), right.row_begin) << name;
        ASSERT_EQ(query_blocks.read<int32_t>(), right.key_blocks) << name;
      }
    }
  }
}

TEST(TransposeLists, RefusesSizesBelowZeroAndNull) {
  const auto message = [](const TransposeParams& params) {
    try {
      transpose_lists(params);
    } catch (const InvalidArgument& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  TransposeParams params;
  params.rows = 1;
  params.num_k_blocks = -1;
  EXPECT_NE(message(params).find("expected sizes >= 0, got 1 rows"), std::string::npos);
  params.num_k_blocks = 1;
  EXPECT_NE(message(params).find("got null"), std::string::npos);
}

}  // namespace
}  // namespace mtraining::kernels::lists_cuda
