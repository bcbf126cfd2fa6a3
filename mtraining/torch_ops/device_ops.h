// Device ops: the operators on a GPU, on the current stream, without synchronising with the host where the call allows it.
//
// In:   as attend.h and estimate.h, tensors on one CUDA device. Out: the same, on that device. Next: register.cc.
//
// dtype bf16 or fp16. The host waits for the device only: in build_index and recall with document_starts (their rows are chosen
// on the host); in attend where columns have room for so many that their copies would exceed kMaxGatherBytes (give the pattern
// max_columns to avoid it). Lists of index tensors are put in order. A count, a value or a document start of attend that is out of
// range is cut or dropped, and the next call of any operator on that device throws what the CPU would have thrown at once, as it does
// for values that no index can be chosen from. Errors: as on the CPU, and Unsupported for what only the CPU does.
#pragma once

#include "mtraining/torch_ops/attend.h"
#include "mtraining/torch_ops/estimate.h"

namespace mtraining::torch_ops {

/// Memory that copies of chosen columns may take without asking how many there are.
inline constexpr int64_t kMaxGatherBytes = int64_t{1} << 30;

IndexTensors build_index_on_device(const at::Tensor& q, const at::Tensor& k,
                                   const at::Tensor& document_starts, double softmax_scale,
                                   const pattern::VerticalSlashOptions& options);
Attended attend_on_device(const AttendInputs& inputs);
/// Deterministic where torch.use_deterministic_algorithms is on.
std::tuple<at::Tensor, at::Tensor, at::Tensor> attend_backward_on_device(const AttendInputs& inputs,
                                                                         const at::Tensor& dout,
                                                                         const Attended& attended);
std::tuple<at::Tensor, at::Tensor> measure_recall_on_device(
    const at::Tensor& q, const at::Tensor& k, const IndexTensors& index,
    const at::Tensor& document_starts, double softmax_scale,
    const pattern::VerticalSlashOptions& options, int64_t seed);
at::Tensor index_mask_on_device(const IndexTensors& index, const at::Tensor& document_starts,
                                int64_t seq_len);
at::Tensor index_pairs_on_device(const IndexTensors& index, int64_t seq_len);

}  // namespace mtraining::torch_ops
