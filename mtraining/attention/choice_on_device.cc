#include "mtraining/attention/choice_on_device.h"

#include <ATen/ATen.h>

#include "mtraining/attention/list_uploads.h"
#include "mtraining/pattern/observation.h"

namespace mtraining::attention {

pattern::DeviceRows uploaded_rows(const std::vector<int32_t>& positions, bool consecutive,
                                  at::Device device, at::Tensor& memory) {
  memory =
      upload(positions.data(), static_cast<int64_t>(positions.size() * sizeof(int32_t)), device);
  return {static_cast<const int32_t*>(memory.const_data_ptr()),
          static_cast<int64_t>(positions.size()), consecutive};
}

int64_t choice_parts(const DeviceShards& shards, const pattern::VerticalSlashOptions& options) {
  return pattern::has_windows_by_sample(shards.host, options) ? shards.host.batch : 1;
}

pattern::LocalAttention part_of(const pattern::LocalAttention& local, int64_t b, int64_t parts) {
  return parts == 1 ? local : pattern::sample_of(local, b);
}

void choose_samples(const DeviceShards& shards, const pattern::VerticalSlashOptions& options,
                    const std::function<pattern::DeviceRows(const pattern::LocalAttention& host,
                                                            at::Tensor& memory)>& rows,
                    const std::function<at::Tensor(int64_t bytes)>& workspace,
                    kernels::pattern_cuda::FaultReport* report, const ChoiceTensors& to) {
  const int64_t parts = choice_parts(shards, options), heads = shards.host.num_q_heads;
  const int64_t seq_len = shards.host.layout->seq_len();
  const int64_t diagonal_capacity = to.diagonals.size(-1), column_capacity = to.columns.size(-1);
  for (int64_t b = 0; b < parts; ++b) {
    const pattern::LocalAttention host = part_of(shards.host, b, parts),
                                  part = part_of(shards.on_device, b, parts);
    at::Tensor row_memory, floor_memory;
    const pattern::DeviceRows row_list = rows(host, row_memory);
    pattern::DeviceRows floor_rows;
    if (options.recall_floor > 0) {
      const std::vector<int32_t> window =
          pattern::window_positions(options, seq_len, host.document_starts);
      floor_rows = uploaded_rows(pattern::floor_positions(options, window, seq_len), false,
                                 shards.device, floor_memory);
    }
    const int64_t row = b * heads;
    pattern::DeviceIndex out;
    out.lists = {to.diagonals.data_ptr<int32_t>() + row * diagonal_capacity,
                 to.num_diagonals.data_ptr<int32_t>() + row,
                 to.columns.data_ptr<int32_t>() + row * column_capacity,
                 to.num_columns.data_ptr<int32_t>() + row,
                 diagonal_capacity,
                 column_capacity};
    out.bits = {reinterpret_cast<uint64_t*>(to.diagonal_bits.data_ptr<int64_t>()) +
                    row * to.diagonal_bits.size(1),
                reinterpret_cast<uint32_t*>(to.column_bits.data_ptr<int32_t>()) +
                    row * to.column_bits.size(1)};
    out.dense_heads = static_cast<uint8_t*>(to.dense_heads.data_ptr()) + row;
    out.caps_hit = to.caps_hit.data_ptr<int64_t>() + b;
    out.report = report;
    out.first_sample = b;
    const int64_t bytes =
        pattern::device_choice_bytes(part, options, row_list.count, floor_rows.count);
    at::Tensor memory = workspace(bytes);
    pattern::build_vertical_slash_on_device(part, shards.num_keys, options, row_list, floor_rows,
                                            shards.layout, shards.group, memory.data_ptr(),
                                            memory.numel(), shards.stream, out);
  }
}

}  // namespace mtraining::attention
