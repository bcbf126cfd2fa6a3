// The files of a run's folder beside metrics.jsonl and trace.json: summary.json and the example of one head's attention.
//
// In:   evaluations; q and k of one layer with the index it used. Out: summary.json; example/{q.npy, k.npy, index.json}.
// Next: python/mtraining/plots.py.
#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <vector>

#include "mtraining/index/index.h"
#include "mtraining/train/trainer.h"

namespace mtraining::train {

/// Errors (all): ExternalError naming the file.
void write_summary(const std::filesystem::path& path, const TrainResult& result,
                   const RunConfig& config, const ResolvedRun& resolved);
/// q [N, D], k [N, D] float32 in the order of positions.
void write_example(const std::filesystem::path& folder, const at::Tensor& q, const at::Tensor& k,
                   const index::Index& index, int64_t layer, int64_t head, double softmax_scale);

}  // namespace mtraining::train
