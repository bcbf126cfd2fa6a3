#include "mtraining/train/score.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <filesystem>

#include "mtraining/attention/autograd.h"
#include "mtraining/base/check.h"
#include "mtraining/checkpoint/weight_folder.h"
#include "mtraining/checkpoint/weights.h"
#include "mtraining/data/batches.h"
#include "mtraining/data/token_file.h"
#include "mtraining/train/attention_layers.h"
#include "mtraining/train/job.h"
#include "mtraining/train/loss.h"

namespace mtraining::train {

std::vector<TokenWindow> token_windows(int64_t num_tokens, int64_t window, int64_t stride) {
  MT_CHECK_ARG(window >= 1 && window < num_tokens,
               "window: expected 1 to the file's tokens - 1 = ", num_tokens - 1, ", got ", window);
  MT_CHECK_ARG(stride >= 1 && stride <= window, "stride: expected 1 to window = ", window,
               ", or tokens are left out; got ", stride);
  const int64_t last = num_tokens - 1 - window;
  std::vector<TokenWindow> windows;
  for (int64_t begin = 0;; begin = std::min(begin + stride, last)) {
    windows.push_back({begin, windows.empty() ? 1 : windows.back().begin + window + 1});
    if (begin == last) return windows;
  }
}

struct Scorer::State {
  RunConfig config;
  ResolvedRun resolved;
  data::TokenFile tokens;
  std::unique_ptr<data::TokenFile> loss_mask;
  Job job;
  attention::RingContext context;
  model::Decoder decoder;
  AttentionLayers layers;

  State(const RunConfig& c, const ResolvedRun& r, comm::Transport& transport,
        const std::string& path)
      : config(c),
        resolved(r),
        tokens(path, c.model.vocab_size),
        job(transport, r.cp_size),
        context(ring_options(c, r), transport, job.cp_members()),
        decoder(c.model, model::empty_parameters(c.model, r.device), c.train.mlp_tile),
        layers(context, c.model.num_hidden_layers) {
    const std::string mask = path + "_loss_mask";
    if (std::filesystem::exists(mask + ".idx")) {
      loss_mask = std::make_unique<data::TokenFile>(mask, 2);
      MT_CHECK_ARG(loss_mask->num_tokens() == tokens.num_tokens(), mask, ".bin: has ",
                   loss_mask->num_tokens(), " entries for ", tokens.num_tokens(), " tokens");
    }
    MT_CHECK_ARG(c.init_from.has_value(), "model.init_from: expected weights to score, got none");
    checkpoint::load_weights(checkpoint::WeightFolder(*c.init_from), decoder.parameters().list(),
                             c.model.tie_word_embeddings);
  }

  SummedLoss forward(const TokenWindow& window, const AttendRequest& request) {
    const int64_t length = config.train.seq_len;
    std::vector<int64_t> ids(length + 1), wanted(length + 1, 1);
    tokens.read(window.begin, ids);
    if (loss_mask) loss_mask->read(window.begin, wanted);
    const std::vector<int64_t> positions = context.layout().positions(context.cp_rank());
    const auto n = static_cast<int64_t>(positions.size());
    const at::Tensor own = at::zeros({1, n}, at::kLong),
                     labels = at::full({1, n}, data::kIgnored, at::kLong);
    for (int64_t i = 0; i < n; ++i) {
      const int64_t p = positions[i];
      if (p >= length) continue;  // padding
      own.mutable_data_ptr<int64_t>()[i] = ids[p];
      if (window.begin + p + 1 >= window.first_label && wanted[p + 1] != 0)
        labels.mutable_data_ptr<int64_t>()[i] = ids[p + 1];
    }
    const at::Tensor hidden =
        decoder.forward(own.to(resolved.device), at::tensor(positions).to(resolved.device),
                        decoder.layers_with(layers.attend(request)));
    return chunked_loss(hidden.reshape({-1, hidden.size(-1)}), decoder.head_weight(),
                        labels.reshape({-1}), config.train.loss_chunk);
  }
};

Scorer::Scorer(const RunConfig& config, const ResolvedRun& resolved, comm::Transport& transport,
               const std::string& tokens) {
  MT_CHECK_ARG(resolved.dp_size == 1, "parallel.dp_size: expected 1, got ", resolved.dp_size);
  state_ = std::make_unique<State>(config, resolved, transport, tokens);
}
Scorer::~Scorer() = default;

int64_t Scorer::num_tokens() const { return state_->tokens.num_tokens(); }

Score Scorer::run(const LayerPatterns& patterns, int64_t stride, int64_t max_windows) {
  State& s = *state_;
  const at::NoGradGuard no_grad;
  std::vector<TokenWindow> windows =
      token_windows(s.tokens.num_tokens(), s.config.train.seq_len, stride);
  if (max_windows > 0 && max_windows < static_cast<int64_t>(windows.size()))
    windows.resize(max_windows);
  s.layers.begin(nullptr, 0);
  AttendRequest request;
  request.patterns = patterns;
  request.measure_recall = !all_dense(patterns);
  std::vector<double> totals(2, 0);
  for (size_t i = 0; i < windows.size(); ++i) {
    request.recall_seed = s.config.train.seed + i;
    const SummedLoss loss = s.forward(windows[i], request);
    totals[0] += loss.sum.item<double>();
    totals[1] += static_cast<double>(loss.count);
  }
  s.job.sum(totals);
  const AttentionSeen seen = s.layers.seen();
  Score score;
  score.loss = totals[1] > 0 ? totals[0] / totals[1] : 0;
  score.tokens = static_cast<int64_t>(totals[1]);
  score.windows = static_cast<int64_t>(windows.size());
  score.density = seen.mean_density();
  score.density_by_layer = seen.density;
  score.recall_by_layer.assign(seen.density.size(), 1);
  if (request.measure_recall) {
    score.recall_by_layer = seen.recall;
    score.recall = *seen.mean_recall();
    score.recall_worst = seen.recall_worst;
  }
  return score;
}

}  // namespace mtraining::train
