// Agreement: what all ranks have to pass alike to one call of a ring, compared before the choice of an index begins.
//
// In:   named values as short texts, the same names in the same order on every rank. Out: nothing, or the same error on all ranks.
// Next: ring.cc. What only one rank has wrong (a dtype of its k) is found behind it, by that rank.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "mtraining/attention/autograd.h"
#include "mtraining/comm/transport.h"
#include "mtraining/index/index.h"

namespace mtraining::torch_ops {

struct AgreedValue {
  std::string name;
  std::string text;  ///< compared in its first kAgreedBytes - 1 bytes
};
inline constexpr size_t kAgreedBytes = 48;

/// The pattern or the replayed index, q's dtype, the shapes of q and k, the scale and the documents.
std::vector<AgreedValue> call_values(const at::Tensor& q, const at::Tensor& k,
                                     const at::Tensor& document_starts, double softmax_scale,
                                     const attention::AttentionPattern& pattern,
                                     const index::Index* replayed);

/// Collective: one all-gather of 48 bytes a value. Errors: InvalidArgument `ranks differ in NAME: rank 0 has A, rank 2 has B`.
void check_agreement(const std::vector<AgreedValue>& values, comm::Communicator& group);

}  // namespace mtraining::torch_ops
