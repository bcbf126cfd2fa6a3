// Lists of chosen blocks against index::step_blocks_csr of the same choice: layouts, ranks, units, ragged ends.
#include "mtraining/kernels/lists_cuda/expand.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "mtraining/base/check.h"
#include "mtraining/index/index.h"
#include "mtraining/index/step_index.h"
#include "mtraining/kernels/sm90/device_memory.h"
#include "mtraining/layout/layout.h"
#include "mtraining/testing/gpu.h"
#include "mtraining/testing/random.h"

namespace mtraining::kernels::lists_cuda {
namespace {

using layout::LayoutKind;
using sm90::check_device;
using sm90::DeviceMemory;

struct Choice {
  std::vector<uint32_t> bits;
  int64_t words = 0;
  index::Index index;
};

/// Bits after the query block too: they must not count. Some query units choose nothing, some everything.
Choice choose(int64_t rows, int64_t seq_len, int64_t query_wide, int64_t key_wide) {
  testing::Random random(static_cast<uint64_t>(rows * 7919 + seq_len * 31 + query_wide + key_wide));
  const int64_t blocks = (seq_len + 63) / 64, query_units = (blocks + query_wide - 1) / query_wide,
                key_units = (blocks + key_wide - 1) / key_wide;
  Choice choice;
  choice.words = (key_units + 31) / 32;
  choice.bits.assign(rows * query_units * choice.words, 0);
  for (int64_t u = 0; u < rows * query_units; ++u) {
    const double share = u % 5 == 0 ? 0 : u % 7 == 1 ? 1 : 0.3;
    for (int64_t k = 0; k < key_units; ++k)
      if (random.uniform() < share) choice.bits[u * choice.words + k / 32] |= 1u << (k % 32);
  }
  index::BlockRows lists;
  lists.row_begin = {0};
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t q = 0; q < blocks; ++q) {
      const uint32_t* row = choice.bits.data() + (r * query_units + q / query_wide) * choice.words;
      for (int64_t k = 0; k <= q; ++k)
        if ((row[k / key_wide / 32] >> (k / key_wide % 32) & 1) != 0)
          lists.key_blocks.push_back(static_cast<int32_t>(k));
      lists.row_begin.push_back(static_cast<int64_t>(lists.key_blocks.size()));
    }
  }
  choice.index = index::make_block_index(1, static_cast<int>(rows), seq_len, std::move(lists));
  return choice;
}

TEST(ExpandLists, GivesTheHostsListsOfEveryRankAndSource) {
  MT_NEEDS_GPU();
  int64_t entries_seen = 0;
  for (const int64_t seq_len : {1, 64, 65, 3000, 70000}) {
    for (const auto& [query_wide, key_wide] : {std::pair<int64_t, int64_t>{1, 1}, {2, 2}, {1, 7}}) {
      const Choice choice = choose(3, seq_len, query_wide, key_wide);
      const DeviceMemory bits(choice.bits);
      for (const auto& [kind, ranks, stripe] : {std::tuple{LayoutKind::kContiguous, 1, 64},
                                                {LayoutKind::kContiguous, 3, 64},
                                                {LayoutKind::kZigzag, 2, 64},
                                                {LayoutKind::kBlockStriped, 4, 128}}) {
        if (seq_len > 3000 && ranks > 1) continue;  // for its long rows, once
        const layout::Layout layout(
            {.kind = kind, .seq_len = seq_len, .cp_size = ranks, .stripe = stripe, .nodes = 1});
        for (int rank = 0; rank < ranks; ++rank) {
          for (int source = 0; source < ranks; ++source) {
            SCOPED_TRACE(concat(layout::to_string(kind), " N ", seq_len, ", units ", query_wide,
                                " x ", key_wide, ", rank ", rank, " of ", ranks, ", source ",
                                source));
            const index::StepBlocks want =
                index::step_blocks_csr(choice.index, layout, rank, source);
            const DeviceMemory q_starts(layout.block_starts(rank)),
                k_starts(layout.block_starts(source));
            ExpandParams params;
            ChosenBlocks& chosen = params.chosen;
            chosen.rows = 3;
            chosen.num_blocks = choice.index.num_blocks();
            chosen.bits = bits.get<uint32_t>();
            chosen.words = choice.words;
            chosen.query_blocks_per_unit = query_wide;
            chosen.key_blocks_per_unit = key_wide;
            chosen.q_block_starts = q_starts.get<int32_t>();
            chosen.k_block_starts = k_starts.get<int32_t>();
            chosen.num_q_blocks = chosen.num_k_blocks = layout.blocks_per_rank();
            const int64_t begins = chosen.num_q_blocks + 1;
            const DeviceMemory row_begin(3 * begins * 8), longest(std::vector<int32_t>{0});
            longest_row(chosen, row_begin.get<int64_t>(), longest.get<int32_t>(), nullptr);
            int64_t most = 0;
            for (int64_t r = 0; r < 3; ++r)
              most =
                  std::max(most, want.row_begin[(r + 1) * begins - 1] - want.row_begin[r * begins]);
            ASSERT_EQ(longest.read<int32_t>()[0], most);
            constexpr int64_t kRoom = 5;  // more than is needed
            params.capacity = most + kRoom;
            const DeviceMemory key_blocks(std::vector<int32_t>(3 * params.capacity, -1));
            params.row_begin = row_begin.get<int64_t>();
            params.key_blocks = key_blocks.get<int32_t>();
            expand_lists(params);
            check_device(cudaDeviceSynchronize(), "the lists");
            const auto begin = row_begin.read<int64_t>();
            const auto got = key_blocks.read<int32_t>();
            for (int64_t r = 0; r < 3; ++r) {
              const int64_t first = want.row_begin[r * begins];
              for (int64_t q = 0; q < begins; ++q)
                ASSERT_EQ(begin[r * begins + q] - r * params.capacity,
                          want.row_begin[r * begins + q] - first);
              const int64_t count = want.row_begin[(r + 1) * begins - 1] - first;
              for (int64_t i = 0; i < params.capacity; ++i)
                ASSERT_EQ(got[r * params.capacity + i],
                          i < count ? want.key_blocks[first + i] : -1);
              entries_seen += count;
            }
          }
        }
      }
    }
  }
  EXPECT_GT(entries_seen, 1000000);
}

TEST(ExpandLists, RefusesNullAndSizesBelowZero) {
  ExpandParams params;
  params.chosen.rows = params.chosen.num_q_blocks = 1;
  EXPECT_THROW(expand_lists(params), InvalidArgument);
  params.chosen.rows = -1;
  EXPECT_THROW(expand_lists(params), InvalidArgument);
}

}  // namespace
}  // namespace mtraining::kernels::lists_cuda
