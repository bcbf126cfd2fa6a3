// Layer patterns: the attention pattern of each layer, from [attention] and its overrides for ranges of layers.
//
// In:   RunConfig. Out: one AttentionPattern a layer. Next: attention_layers.h attends with them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "mtraining/attention/autograd.h"
#include "mtraining/train/config.h"

namespace mtraining::train {

using LayerPatterns = std::vector<attention::AttentionPattern>;

/// Checks the sections of [attention] and of its ranges. Errors: InvalidArgument / Unsupported naming the key: a range that is beyond
/// the layers or meets another, values out of range, a pattern's keys missing.
void check_patterns(const RunConfig& config);

/// Resolved; reads pattern files. Errors: InvalidArgument where a file is malformed or fits neither the sequence length nor the heads.
LayerPatterns layer_patterns(const RunConfig& config);
/// Every layer dense.
LayerPatterns dense_layers(const RunConfig& config);
bool all_dense(const LayerPatterns& patterns);

}  // namespace mtraining::train
