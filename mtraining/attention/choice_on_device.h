// Choice on a device: the loop over samples that an index on a GPU is chosen in, and the tensors that it fills.
//
// In:   q and k of a rank as pattern/ takes them, the rows to be observed. Out: lists, counts, flags, bits. Next: device_index.cc
//       (a ring's plan), torch_ops/device_ops.cc (an operator).
//
// Stream: enqueues on the current one, waits for nothing.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "mtraining/comm/transport.h"
#include "mtraining/pattern/device_choice.h"
#include "mtraining/pattern/pattern.h"

namespace mtraining::attention {

/// q and k of a rank, twice: with document starts in host memory, where windows are chosen, and in the device's.
struct DeviceShards {
  pattern::LocalAttention host, on_device;
  at::Device device{at::kCPU};
  int64_t num_keys = 0;
  pattern::DeviceLayout layout;
  comm::Communicator* group = nullptr;
  void* stream = nullptr;
};

/// What a choice writes; leading sizes [B, H] or [B * H].
struct ChoiceTensors {
  at::Tensor diagonals, num_diagonals;  ///< int32 [.., capacity], [..]
  at::Tensor columns, num_columns;
  at::Tensor dense_heads;                 ///< [..] of one byte
  at::Tensor caps_hit;                    ///< int64, one for each part
  at::Tensor diagonal_bits, column_bits;  ///< int64, int32 [B * H, words]
};

/// Rows in device memory that `memory` keeps.
pattern::DeviceRows uploaded_rows(const std::vector<int32_t>& positions, bool consecutive,
                                  at::Device device, at::Tensor& memory);

/// Samples that are chosen together: all of them (1), or one by one.
int64_t choice_parts(const DeviceShards& shards, const pattern::VerticalSlashOptions& options);
/// Part b of `parts`: one sample, or all.
pattern::LocalAttention part_of(const pattern::LocalAttention& local, int64_t b, int64_t parts);

/// rows: of a part, by its number, and its window where host memory must know it; workspace: memory of so many bytes.
/// Collective over shards.group.
void choose_samples(const DeviceShards& shards, const pattern::VerticalSlashOptions& options,
                    const std::function<pattern::DeviceRows(const pattern::LocalAttention& host,
                                                            at::Tensor& memory)>& rows,
                    const std::function<at::Tensor(int64_t bytes)>& workspace,
                    kernels::pattern_cuda::FaultReport* report, const ChoiceTensors& to);

}  // namespace mtraining::attention
