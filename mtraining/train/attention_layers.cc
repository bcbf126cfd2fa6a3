#include "mtraining/train/attention_layers.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <span>
#include <string_view>
#include <utility>

#include "mtraining/base/check.h"

namespace mtraining::train {

double AttentionSeen::mean_density() const {
  return std::accumulate(density.begin(), density.end(), 0.0) / static_cast<double>(density.size());
}

std::optional<double> AttentionSeen::mean_recall() const {
  if (std::any_of(recall.begin(), recall.end(), [](double r) { return std::isnan(r); }))
    return std::nullopt;
  return std::accumulate(recall.begin(), recall.end(), 0.0) / static_cast<double>(recall.size());
}

AttentionLayers::AttentionLayers(attention::RingContext& context, int64_t num_layers)
    : context_(context), num_layers_(num_layers) {
  context_.set_observer([this](const attention::StepTiming& timing) { observe(timing); });
  begin(nullptr, 0);
}

AttentionLayers::~AttentionLayers() { context_.set_observer({}); }

void AttentionLayers::begin(trace::SpanRecorder* recorder, int64_t train_step) {
  context_.finish_observing();  // what is still to be reported belongs to what was before
  recorder_ = recorder;
  train_step_ = train_step;
  seen_ = {};
  seen_.density.assign(num_layers_, 0);
  seen_.recall.assign(num_layers_, 0);
  seen_.indices.resize(num_layers_);
  passes_.assign(num_layers_, 0);
  recall_passes_.assign(num_layers_, 0);
  work_.clear();
}

model::Attend AttentionLayers::attend(const AttendRequest& request) {
  return [this, request](int64_t layer, const at::Tensor& q, const at::Tensor& k,
                         const at::Tensor& v) {
    return named(layer, first(request, layer, q, k, v).out);
  };
}

TwiceAttend AttentionLayers::attend_twice(const AttendRequest& request) {
  const auto run_first = [this, request](int64_t layer, const at::Tensor& q, const at::Tensor& k,
                                         const at::Tensor& v, KeptAttention& kept) {
    const attention::AttentionOutput output = first(request, layer, q, k, v);
    kept = {output.index, {output.out, output.lse, output.out_residual}};
    return output.out;
  };
  const auto run_again = [this, documents = request.document_starts](
                             int64_t layer, const at::Tensor& q, const at::Tensor& k,
                             const at::Tensor& v, const KeptAttention& kept) {
    if (boundary_) boundary_();
    context_.set_tag(layer);
    attention::AttentionCall call;
    call.document_starts = documents;
    call.index = kept.index;
    call.result = kept.result;
    return named(layer, attention::sparse_ring_attention(context_, q, k, v, call).out);
  };
  const auto runs = [this, documents = request.document_starts](int64_t layer,
                                                                const KeptAttention& kept) {
    const auto forward = [this, documents, layer, kept](const at::Tensor& q, const at::Tensor& k,
                                                        const at::Tensor& v) {
      if (boundary_) boundary_();
      context_.set_tag(layer);
      if (kept.result.out.defined()) return kept.result;
      return attention::ring_forward(context_, q, k, v, kept.index, 0, documents);
    };
    const auto backward = [this, documents, layer,
                           index = kept.index](attention::BackwardInputs inputs) {
      if (boundary_) boundary_();
      context_.set_tag(layer);
      return attention::ring_backward(context_, std::move(inputs), index, 0, documents);
    };
    return model::AttentionRuns{forward, backward};
  };
  return {run_first, run_again, runs};
}

attention::AttentionOutput AttentionLayers::first(const AttendRequest& request, int64_t layer,
                                                  const at::Tensor& q, const at::Tensor& k,
                                                  const at::Tensor& v) {
  if (boundary_) boundary_();
  context_.set_tag(layer);
  attention::AttentionCall call;
  MT_ASSERT(static_cast<int64_t>(request.patterns.size()) == num_layers_, "a pattern for each of ",
            num_layers_, " layers, got ", request.patterns.size());
  call.pattern = request.patterns[layer];
  call.document_starts = request.document_starts;
  const bool dense = call.pattern.kind == pattern::PatternKind::kDense;
  call.measure_recall = request.measure_recall && !dense;
  call.recall_seed = request.recall_seed;
  call.chosen = request.chosen;
  if (request.replay != nullptr) {
    MT_CHECK_ARG(static_cast<int64_t>(request.replay->size()) == num_layers_, "replay: expected ",
                 num_layers_, " indices, got ", request.replay->size());
    call.index = (*request.replay)[layer];
  }
  const attention::AttentionOutput output =
      attention::sparse_ring_attention(context_, q, k, v, call);
  const index::Index& index = *output.index;
  ++passes_[layer];
  const at::Tensor starts =
      request.document_starts.defined() ? request.document_starts.contiguous() : at::Tensor();
  std::span<const int32_t> documents;
  if (starts.defined())
    documents = {starts.const_data_ptr<int32_t>(), static_cast<size_t>(starts.numel())};
  seen_.heads_dense += std::count(index.dense_heads.begin(), index.dense_heads.end(), 1);
  seen_.caps_hit += index.caps_hit;
  seen_.columns_per_step += output.columns_per_step ? 1 : 0;
  seen_.dense_by_torch += output.by_torch ? index.batch : 0;
  // Counted once a layer: with documents it is a walk over all blocks of every head.
  const auto length = static_cast<double>(index.seq_len);
  double pairs = 0, dense_pairs = 0;
  for (int b = 0; b < index.batch; ++b) {
    const auto sample =
        documents.empty() ? documents : documents.subspan(b * index.seq_len, index.seq_len);
    dense_pairs +=
        index.num_q_heads * (sample.empty()
                                 ? length * length / 2
                                 : static_cast<double>(index::dense_pairs(index.seq_len, sample)));
    for (int h = 0; h < index.num_q_heads; ++h)
      pairs += static_cast<double>(index::computed_pairs(index, b, h, sample));
  }
  seen_.density[layer] += pairs / dense_pairs;  // index::density
  seen_.pairs += pairs;
  seen_.indices[layer] = output.index;
  if (request.measure_recall && dense) {  // all of it
    ++recall_passes_[layer];
    seen_.recall[layer] += 1;
    seen_.recall_worst = std::min(seen_.recall_worst, 1.0);
  }
  if (output.recall) {
    ++recall_passes_[layer];
    seen_.recall[layer] += output.recall->sampled;
    seen_.recall_worst = std::min(seen_.recall_worst, output.recall->sampled_worst);
  }
  if (layer == request.keep_layer) {
    seen_.kept_q = q.detach();
    seen_.kept_k = k.detach();
  }
  return output;
}

at::Tensor AttentionLayers::named(int64_t layer, at::Tensor out) {
  if (out.requires_grad()) {
    // Runs right before this layer's backward, so that its spans carry the layer.
    out.register_hook([this, layer](const at::Tensor&) {
      if (boundary_) boundary_();
      context_.set_tag(layer);
    });
  }
  return out;
}

const std::vector<StepWork>& AttentionLayers::work() const {
  context_.finish_observing();
  return work_;
}

AttentionSeen AttentionLayers::seen() const {
  AttentionSeen seen = seen_;
  for (int64_t l = 0; l < num_layers_; ++l) {
    seen.density[l] = passes_[l] > 0 ? seen_.density[l] / static_cast<double>(passes_[l]) : 1;
    seen.recall[l] = recall_passes_[l] > 0
                         ? seen_.recall[l] / static_cast<double>(recall_passes_[l])
                         : std::numeric_limits<double>::quiet_NaN();
  }
  return seen;
}

void AttentionLayers::observe(const attention::StepTiming& timing) {
  const std::string_view what = timing.what;
  if (what == "forward" || what == "backward" || what == "columns") {
    work_.push_back({static_cast<double>(timing.pairs),
                     static_cast<double>(timing.end_us - timing.begin_us) * 1e-6});
  }
  if (recorder_ != nullptr) {
    // A track of its own a channel: transfers are beside launches.
    const bool transfer = what == "transfer";
    recorder_->add({transfer ? concat("transfer ", timing.channel) : std::string(what),
                    transfer ? concat("transfers ", timing.channel) : "ring", timing.begin_us,
                    timing.end_us, train_step_, timing.tag, timing.ring_step, timing.pairs});
  }
}

}  // namespace mtraining::train
