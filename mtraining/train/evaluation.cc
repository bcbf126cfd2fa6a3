// Losses of weights that do not change: held-out data, the first batch before step 1, and the picture of one head.

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>

#include "mtraining/base/check.h"
#include "mtraining/train/run_files.h"
#include "mtraining/train/trainer_state.h"

namespace mtraining::train {

using pattern::PatternKind;

Evaluation Trainer::evaluate(const LayerPatterns& patterns, bool measure_recall) {
  State& s = *state_;
  const TensorMemory::Scope scope(s.memory);
  MT_CHECK_ARG(s.valid_data != nullptr,
               "data.valid: expected held-out data for an evaluation, got none");
  const at::NoGradGuard no_grad;
  const State::Unrecorded unrecorded(s);
  const bool dense = all_dense(patterns);
  s.layers.begin(nullptr, 0);
  AttendRequest request;
  request.patterns = patterns;
  request.measure_recall = measure_recall && !dense;
  std::vector<double> totals(2, 0);
  for (int64_t b = 0; b < s.config.eval.batches; ++b) {
    request.recall_seed = s.config.train.seed + static_cast<uint64_t>(b);
    const SummedLoss loss = s.forward(s.valid_batch(b), request, 0);
    totals[0] += loss.sum.item<double>();
    totals[1] += static_cast<double>(loss.count);
  }
  s.job.sum(totals);
  const AttentionSeen seen = s.layers.seen();
  Evaluation e;
  // What most of it is: of [attention], or of the first layer that is not dense.
  const auto sparse = std::find_if(patterns.begin(), patterns.end(), [&](const auto& pattern) {
    return pattern.kind == s.config.attention.pattern && pattern.kind != PatternKind::kDense;
  });
  const auto first = std::find_if(patterns.begin(), patterns.end(), [](const auto& pattern) {
    return pattern.kind != PatternKind::kDense;
  });
  const attention::AttentionPattern& named = dense                      ? patterns.front()
                                             : sparse != patterns.end() ? *sparse
                                                                        : *first;
  e.pattern = to_string(named.kind);
  e.p = named.kind == PatternKind::kVerticalSlash ? named.vertical_slash.p_slash : 1;
  e.loss = totals[1] > 0 ? totals[0] / totals[1] : 0;
  e.tokens = static_cast<int64_t>(totals[1]);
  e.density_by_layer = seen.density;
  if (request.measure_recall) {
    e.recall_by_layer = seen.recall;
    e.recall_worst = seen.recall_worst;
  }
  return e;
}

void Trainer::State::write_example() {
  const int64_t layer = config.trace.example_layer, head = config.trace.example_head;
  const at::NoGradGuard no_grad;
  const Unrecorded unrecorded(*this);
  layers.begin(nullptr, 0);
  AttendRequest request;
  request.patterns = patterns;
  request.keep_layer = layer;
  forward(valid_data ? valid_batch(0) : train_data.batch(0, 0, context.layout(), context.cp_rank()),
          request, 0);
  const AttentionSeen seen = layers.seen();
  if (seen.indices[layer]->has_blocks()) {
    warnings.emplace_back(
        "trace.example_layer: no picture of a pattern that chooses single blocks");
    return;
  }
  const int64_t kv_head =
      head / (config.model.num_attention_heads / config.model.num_key_value_heads);
  const int64_t n = context.layout().tokens_per_rank(), dim = config.model.head_dim;
  const auto join = [&](const at::Tensor& shard, int64_t h) {
    const at::Tensor part =
        shard.select(0, 0).select(1, h).to(at::kCPU, at::kFloat).contiguous();  // [n, D]
    const std::vector<float> all = job.gather_floats(part.data_ptr<float>(), part.numel());
    at::Tensor whole = at::zeros({context.layout().padded_len(), dim});
    for (int r = 0; r < resolved.cp_size; ++r) {
      const std::vector<int64_t> positions = context.layout().positions(r);
      const at::Tensor rows = at::from_blob(const_cast<float*>(all.data()) + r * n * dim, {n, dim});
      whole.index_copy_(0, at::tensor(positions), rows);
    }
    return whole.narrow(0, 0, config.train.seq_len);
  };
  const at::Tensor q = join(seen.kept_q, head), k = join(seen.kept_k, kv_head);
  if (job.rank() == 0) {
    train::write_example(std::filesystem::path(config.out) / "example", q, k, *seen.indices[layer],
                         layer, head, 1 / std::sqrt(static_cast<double>(dim)));
  }
}

void Trainer::evaluate_at_end(TrainResult& result) {
  State& s = *state_;
  if (!s.valid_data) return;
  std::vector<Evaluation> all{evaluate(s.dense_patterns, false)};
  if (!all_dense(s.patterns)) {
    all.push_back(evaluate(s.patterns, true));
    const bool any_p = std::any_of(s.patterns.begin(), s.patterns.end(), [](const auto& pattern) {
      return pattern.kind == PatternKind::kVerticalSlash;
    });
    for (const double p : any_p ? s.config.eval.also_p : std::vector<double>()) {
      LayerPatterns patterns = s.patterns;
      for (attention::AttentionPattern& pattern : patterns)
        pattern.vertical_slash.p_vertical = pattern.vertical_slash.p_slash = p;
      all.push_back(evaluate(patterns, true));
    }
  }
  result.evaluations = std::move(all);
}

Preflight Trainer::look_at_first_batch() {
  State& s = *state_;
  const at::NoGradGuard no_grad;
  const State::Unrecorded unrecorded(s);
  Preflight preflight;
  const data::Batch batch =
      s.train_data.batch(s.position.steps_done, 0, s.context.layout(), s.context.cp_rank());
  for (const bool dense : {true, false}) {
    s.layers.begin(nullptr, 0);
    AttendRequest request;
    request.patterns = dense ? s.dense_patterns : s.patterns;
    request.measure_recall = !all_dense(request.patterns);
    const SummedLoss loss = s.forward(batch, request, 0);
    std::vector<double> totals{loss.sum.item<double>(), static_cast<double>(loss.count)};
    s.job.sum(totals);
    const double mean = totals[1] > 0 ? totals[0] / totals[1] : 0;
    (dense ? preflight.loss_dense : preflight.loss_pattern) = mean;
    const AttentionSeen seen = s.layers.seen();
    preflight.density = seen.mean_density();
    if (request.measure_recall) preflight.recall_worst = seen.recall_worst;
  }
  return preflight;
}

}  // namespace mtraining::train
