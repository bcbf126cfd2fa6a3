#include "mtraining/train/generate.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <optional>

#include "mtraining/attention/autograd.h"
#include "mtraining/base/check.h"
#include "mtraining/base/error_kinds.h"
#include "mtraining/checkpoint/weight_folder.h"
#include "mtraining/checkpoint/weights.h"
#include "mtraining/comm/loopback.h"
#include "mtraining/index/index.h"
#include "mtraining/train/layer_patterns.h"

namespace mtraining::train {
namespace {

/// Tokens of an option that are read at once: their mask has a row of the whole cache each.
constexpr size_t kRun = 32;

}  // namespace

struct Generator::State {
  RunConfig config;
  ResolvedRun resolved;
  std::unique_ptr<comm::Transport> transport = comm::make_single();
  model::Decoder decoder;
  std::vector<at::Tensor> keys, values;  // [layers] of [1, Hk, capacity, D]
  double density = 0;                    // of the last prompt

  State(const RunConfig& c, const ResolvedRun& r)
      : config(c),
        resolved(r),
        decoder(c.model, model::empty_parameters(c.model, r.device), c.train.mlp_tile) {
    MT_CHECK_ARG(c.init_from.has_value(), "model.init_from: expected weights, got none");
    checkpoint::load_weights(checkpoint::WeightFolder(*c.init_from), decoder.parameters().list(),
                             c.model.tie_word_embeddings);
  }

  void make_cache(int64_t tokens) {
    keys.clear();
    values.clear();
    for (int64_t layer = 0; layer < config.model.num_hidden_layers; ++layer) {
      for (std::vector<at::Tensor>* cache : {&keys, &values})
        cache->push_back(
            at::empty({1, config.model.num_key_value_heads, tokens, config.model.head_dim},
                      at::TensorOptions(config.model.dtype).device(resolved.device)));
    }
  }
  /// k, v [1, n, Hk, D] of tokens first .. first + count - 1.
  void keep(int64_t layer, int64_t first, int64_t count, const at::Tensor& k, const at::Tensor& v) {
    keys[layer].narrow(2, first, count).copy_(k.narrow(1, 0, count).transpose(1, 2));
    values[layer].narrow(2, first, count).copy_(v.narrow(1, 0, count).transpose(1, 2));
  }

  /// float32 [vocab] on the host, of hidden's row.
  at::Tensor logits(const at::Tensor& hidden, int64_t row) const {
    at::Tensor host = at::matmul(decoder.head_weight(), hidden.reshape({-1, hidden.size(-1)})[row])
                          .to(at::kFloat)
                          .cpu();
    MT_CHECK_FINITE(host.isfinite().all().item<bool>(), *config.init_from,
                    ": logits are not finite: expected weights that are");
    return host;
  }
  static int64_t best(const at::Tensor& logits) {
    const float* scores = logits.const_data_ptr<float>();
    return std::max_element(scores, scores + logits.numel()) - scores;  // the first of equals
  }

  void check_ids(const char* what, const std::vector<int64_t>& ids) const {
    MT_CHECK_ARG(!ids.empty(), what, ": expected at least one id, got none");
    for (size_t i = 0; i < ids.size(); ++i)
      MT_CHECK_ARG(ids[i] >= 0 && ids[i] < config.model.vocab_size, what, ": id ", i,
                   ": expected 0 to ", config.model.vocab_size - 1, ", got ", ids[i]);
  }

  /// Logits after the prompt; fills the cache.
  at::Tensor read_prompt(const std::vector<int64_t>& prompt) {
    const auto length = static_cast<int64_t>(prompt.size());
    RunConfig whole = config;
    whole.train.seq_len = length;
    whole.attention.layout = layout::LayoutKind::kContiguous;
    const LayerPatterns patterns = layer_patterns(whole);
    attention::RingContext context(ring_options(whole, resolved), *transport);
    const std::vector<int64_t> positions = context.layout().positions(0);  // with padding behind
    const at::Tensor ids = at::zeros({1, static_cast<int64_t>(positions.size())}, at::kLong);
    std::copy(prompt.begin(), prompt.end(), ids.mutable_data_ptr<int64_t>());
    double densities = 0;
    const at::Tensor hidden =
        decoder.forward(ids.to(resolved.device), at::tensor(positions).to(resolved.device),
                        decoder.layers_with([&](int64_t layer, const at::Tensor& q,
                                                const at::Tensor& k, const at::Tensor& v) {
                          keep(layer, 0, length, k, v);
                          attention::AttentionCall call;
                          call.pattern = patterns[layer];
                          const attention::AttentionOutput output =
                              attention::sparse_ring_attention(context, q, k, v, call);
                          densities += index::density(*output.index);
                          return output.out;
                        }));
    density = densities / static_cast<double>(config.model.num_hidden_layers);
    return logits(hidden, length - 1);
  }

  /// Hidden rows [1, n, hidden] of tokens that follow `first` kept ones, kept themselves.
  at::Tensor read_tokens(std::span<const int64_t> given, int64_t first) {
    const auto count = static_cast<int64_t>(given.size());
    const at::Tensor ids = at::empty({1, count}, at::kLong);
    std::copy(given.begin(), given.end(), ids.mutable_data_ptr<int64_t>());
    const at::Tensor rows = at::arange(first, first + count, ids.options().device(resolved.device));
    // A row sees the kept tokens and those of `given` up to its own.
    std::optional<at::Tensor> mask;
    if (count > 1)
      mask = at::arange(first + count, rows.options()).unsqueeze(0) <= rows.unsqueeze(1);
    return decoder.forward(ids.to(resolved.device), rows,
                           decoder.layers_with([&](int64_t layer, const at::Tensor& q,
                                                   const at::Tensor& k, const at::Tensor& v) {
                             keep(layer, first, count, k, v);
                             return at::scaled_dot_product_attention(
                                        q.transpose(1, 2), keys[layer].narrow(2, 0, first + count),
                                        values[layer].narrow(2, 0, first + count), mask, 0, false,
                                        std::nullopt, q.size(2) != k.size(2))
                                 .transpose(1, 2);
                           }));
  }
};

Generator::Generator(const RunConfig& config, const ResolvedRun& resolved) {
  MT_CHECK_ARG(resolved.cp_size == 1 && resolved.dp_size == 1,
               "generation: expected one rank, got cp_size ", resolved.cp_size, " and dp_size ",
               resolved.dp_size);
  state_ = std::make_unique<State>(config, resolved);
}
Generator::~Generator() = default;

std::vector<int64_t> Generator::continue_greedily(const std::vector<int64_t>& prompt,
                                                  int64_t max_new_tokens,
                                                  std::span<const int64_t> stops) {
  State& s = *state_;
  const at::NoGradGuard no_grad;
  s.check_ids("prompt", prompt);
  MT_CHECK_ARG(max_new_tokens >= 1, "max_new_tokens: expected at least 1, got ", max_new_tokens);
  auto position = static_cast<int64_t>(prompt.size());
  s.make_cache(position + max_new_tokens);
  std::vector<int64_t> made = {State::best(s.read_prompt(prompt))};
  while (static_cast<int64_t>(made.size()) < max_new_tokens &&
         std::find(stops.begin(), stops.end(), made.back()) == stops.end()) {
    const int64_t last = made.back();
    made.push_back(State::best(s.logits(s.read_tokens({&last, 1}, position++), 0)));
  }
  return made;
}

std::vector<double> Generator::option_log_likelihoods(
    const std::vector<int64_t>& prompt, const std::vector<std::vector<int64_t>>& options) {
  State& s = *state_;
  const at::NoGradGuard no_grad;
  s.check_ids("prompt", prompt);
  MT_CHECK_ARG(!options.empty(), "options: expected at least one, got none");
  size_t longest = 0;
  for (const std::vector<int64_t>& option : options) {
    s.check_ids("option", option);
    longest = std::max(longest, option.size());
  }
  const auto position = static_cast<int64_t>(prompt.size());
  s.make_cache(position + static_cast<int64_t>(longest));
  const at::Tensor first = at::log_softmax(s.read_prompt(prompt).to(at::kDouble), 0);
  std::vector<double> sums;
  for (const std::vector<int64_t>& option : options) {
    double& sum = sums.emplace_back(first[option[0]].item<double>());
    for (size_t begin = 0; begin + 1 < option.size(); begin += kRun) {
      const size_t count = std::min(kRun, option.size() - 1 - begin);
      const at::Tensor hidden = s.read_tokens(std::span(option).subspan(begin, count),
                                              position + static_cast<int64_t>(begin));
      for (size_t i = 0; i < count; ++i) {
        const at::Tensor next = s.logits(hidden, static_cast<int64_t>(i)).to(at::kDouble);
        sum += at::log_softmax(next, 0)[option[begin + i + 1]].item<double>();
      }
    }
  }
  return sums;
}

void Generator::attend_with(const AttentionSection& attention) {
  state_->config.attention = attention;
}
double Generator::prompt_density() const { return state_->density; }

}  // namespace mtraining::train
