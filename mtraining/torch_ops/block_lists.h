// Block lists: the lists that kernels read of one launch over a whole sequence, made of bits on a GPU.
//
// In:   BlockBits in device memory. Out: CSR lists by query block and, for a backward, by key block; how long they can get.
// Next: device_ops.cc.
//
// Stream: four short launches on the current one, seven with lists by key block; nobody waits.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "mtraining/kernels/params.h"
#include "mtraining/torch_ops/block_bits.h"

namespace mtraining::torch_ops {

/// Memory of one call's lists.
struct BlockListsOnDevice {
  at::Tensor begins, blocks,
      workspace;            ///< what the pointers of `lists` point to, and scratch memory
  at::Tensor block_starts;  ///< int32 [blocks of 64]
  kernels::BlockLists lists;
};
/// blocks: checked. Errors: InvalidArgument where its capacity is below 0.
BlockListsOnDevice lists_of_bits(const BlockBits& blocks, int64_t seq_len, bool by_key);

/// longest_list of device memory.
at::Tensor longest_list_on_device(const BlockBits& blocks, int64_t seq_len);

}  // namespace mtraining::torch_ops
