// Device index: a rank's choice of an index, and its recall, from q and k in a GPU's memory.
//
// In:   this rank's shards on a GPU. Out: the index as host lists, the same on every rank; recall. Next: autograd.cc.
//
// The choice is made on the device (pattern/device_choice.h) and its lists are copied to the host, which waits for them: two small
// copies a layer. Collective over the context's ranks.
#pragma once

#include "mtraining/attention/device_lists.h"
#include "mtraining/attention/ring_context.h"
#include "mtraining/pattern/pattern.h"

namespace mtraining::attention {

/// q [B, n, H, D], k [B, n, Hk, D]; document_starts [B, N] int32 on the CPU, or undefined. Errors: InvalidArgument, on every rank
/// alike, where values of k or of the observed rows are not finite or too large; Unsupported naming what a GPU does not choose.
index::Index choose_on_device(RingContext::State& state, const at::Tensor& q, const at::Tensor& k,
                              double softmax_scale, const at::Tensor& document_starts,
                              const pattern::VerticalSlashOptions& options);
/// The same choice, enqueued: the host goes on. What is wrong with values is said when the host's index is asked for.
std::shared_ptr<DeviceLists> lists_on_device(RingContext::State& state, const at::Tensor& q,
                                             const at::Tensor& k, double softmax_scale,
                                             const at::Tensor& document_starts,
                                             const pattern::VerticalSlashOptions& options,
                                             bool counts_caps = true);
pattern::Recall recall_on_device(RingContext::State& state, const at::Tensor& q,
                                 const at::Tensor& k, double softmax_scale,
                                 const at::Tensor& document_starts,
                                 const pattern::VerticalSlashOptions& options,
                                 const index::Index& index, uint64_t seed);

}  // namespace mtraining::attention
