#include "mtraining/torch_ops/block_lists.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <utility>

#include "mtraining/attention/tensors.h"
#include "mtraining/base/check.h"
#include "mtraining/kernels/lists_cuda/expand.h"
#include "mtraining/kernels/lists_cuda/transpose.h"
#include "mtraining/kernels/pattern_cuda/lists.h"
#include "mtraining/torch_ops/later_checks.h"

namespace mtraining::torch_ops {
namespace {

using kernels::lists_cuda::ChosenBlocks;

ChosenBlocks chosen_of(const BlockBits& blocks, const at::Tensor& bits,
                       const at::Tensor& block_starts) {
  ChosenBlocks chosen;
  chosen.rows = bits.size(0) * bits.size(1);
  chosen.num_blocks = chosen.num_q_blocks = chosen.num_k_blocks = block_starts.numel();
  chosen.bits = reinterpret_cast<const uint32_t*>(bits.const_data_ptr<int32_t>());
  chosen.words = bits.size(3);
  chosen.query_blocks_per_unit = blocks.query_unit;
  chosen.key_blocks_per_unit = blocks.key_unit;
  chosen.q_block_starts = chosen.k_block_starts = block_starts.const_data_ptr<int32_t>();
  return chosen;
}

at::Tensor block_starts_of(int64_t seq_len, const at::TensorOptions& ints, void* stream) {
  at::Tensor starts = at::empty({(seq_len + kernels::kBlock - 1) / kernels::kBlock}, ints);
  kernels::pattern_cuda::write_positions(seq_len, 0, false, nullptr, starts.numel(),
                                         starts.data_ptr<int32_t>(), stream);
  return starts;
}

}  // namespace

BlockListsOnDevice lists_of_bits(const BlockBits& blocks, int64_t seq_len, bool by_key) {
  MT_CHECK_ARG(blocks.capacity >= 0, "capacity: expected at least 0, got ", blocks.capacity);
  const at::Tensor bits = blocks.bits.contiguous();
  const at::TensorOptions ints = bits.options(), longs = ints.dtype(at::kLong);
  void* const stream = attention::current_stream(bits.device());
  BlockListsOnDevice made;
  made.block_starts = block_starts_of(seq_len, ints, stream);
  const int64_t num_blocks = made.block_starts.numel(), most = num_blocks * (num_blocks + 1) / 2;
  kernels::lists_cuda::ExpandParams expand;
  expand.chosen = chosen_of(blocks, bits, made.block_starts);
  expand.capacity = std::clamp<int64_t>(blocks.capacity, 1, most);
  expand.stream = stream;
  const int64_t rows = expand.chosen.rows, begins = rows * (num_blocks + 1);
  made.begins = at::empty({begins * (by_key ? 2 : 1)}, longs);
  made.blocks = at::empty({rows * expand.capacity * (by_key ? 2 : 1)}, ints);
  expand.row_begin = made.begins.data_ptr<int64_t>();
  expand.key_blocks = made.blocks.data_ptr<int32_t>();
  at::Tensor longest;
  if (expand.capacity < most) {
    longest = at::zeros({1}, ints);
    expand.longest = longest.data_ptr<int32_t>();
  }
  kernels::lists_cuda::expand_lists(expand);
  if (longest.defined()) {
    check_when_known(longest.to(at::kLong), [capacity = expand.capacity](const int64_t* found) {
      MT_CHECK_ARG(*found <= capacity, "capacity: expected the longest list of a head, ", *found,
                   " blocks, or more, got ", capacity);
    });
  }
  made.lists.kind = kernels::BlockListKind::kCsr;
  made.lists.row_begin = expand.row_begin;
  made.lists.key_blocks = expand.key_blocks;
  if (!by_key) return made;
  kernels::lists_cuda::TransposeParams transpose;
  transpose.rows = rows;
  transpose.num_q_blocks = transpose.num_k_blocks = num_blocks;
  transpose.row_begin = expand.row_begin;
  transpose.key_blocks = expand.key_blocks;
  transpose.key_row_begin = expand.row_begin + begins;
  transpose.query_blocks = expand.key_blocks + rows * expand.capacity;
  made.workspace = at::empty({std::max<int64_t>(transpose_workspace_bytes(transpose), 16)},
                             ints.dtype(at::kByte));
  transpose.workspace = made.workspace.data_ptr();
  transpose.stream = stream;
  kernels::lists_cuda::transpose_lists(transpose);
  made.lists.key_row_begin = transpose.key_row_begin;
  made.lists.query_blocks = transpose.query_blocks;
  return made;
}

at::Tensor longest_list_on_device(const BlockBits& blocks, int64_t seq_len) {
  check_block_bits(blocks, seq_len);
  const c10::DeviceGuard guard(blocks.bits.device());
  const at::Tensor bits = blocks.bits.contiguous();
  void* const stream = attention::current_stream(bits.device());
  const at::Tensor starts = block_starts_of(seq_len, bits.options(), stream);
  const ChosenBlocks chosen = chosen_of(blocks, bits, starts);
  at::Tensor longest = at::zeros({1}, bits.options()),
             begins = at::empty({chosen.rows * (chosen.num_q_blocks + 1)},
                                bits.options().dtype(at::kLong));
  kernels::lists_cuda::longest_row(chosen, begins.data_ptr<int64_t>(), longest.data_ptr<int32_t>(),
                                   stream);
  return longest.to(at::kLong).squeeze(0);
}

}  // namespace mtraining::torch_ops
