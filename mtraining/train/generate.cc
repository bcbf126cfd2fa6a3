#include "mtraining/train/generate.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "mtraining/attention/autograd.h"
#include "mtraining/base/check.h"
#include "mtraining/base/error_kinds.h"
#include "mtraining/checkpoint/weight_folder.h"
#include "mtraining/checkpoint/weights.h"
#include "mtraining/comm/loopback.h"
#include "mtraining/train/layer_patterns.h"

namespace mtraining::train {

struct Generator::State {
  RunConfig config;
  ResolvedRun resolved;
  std::unique_ptr<comm::Transport> transport = comm::make_single();
  model::Decoder decoder;
  std::vector<at::Tensor> keys, values;  // [layers] of [1, Hk, capacity, D]

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

  int64_t best(const at::Tensor& hidden, int64_t row) const {
    const at::Tensor logits =
        at::matmul(decoder.head_weight(), hidden.reshape({-1, hidden.size(-1)})[row])
            .to(at::kFloat);
    const at::Tensor host = logits.cpu();
    const float* scores = host.const_data_ptr<float>();
    MT_CHECK_FINITE(host.isfinite().all().item<bool>(), *config.init_from,
                    ": logits are not finite: expected weights that are");
    return std::max_element(scores, scores + host.numel()) - scores;  // the first of equals
  }

  int64_t read_prompt(const std::vector<int64_t>& prompt) {
    const auto length = static_cast<int64_t>(prompt.size());
    RunConfig whole = config;
    whole.train.seq_len = length;
    whole.attention.layout = layout::LayoutKind::kContiguous;
    const LayerPatterns patterns = layer_patterns(whole);
    attention::RingContext context(ring_options(whole, resolved), *transport);
    const std::vector<int64_t> positions = context.layout().positions(0);  // with padding behind
    const at::Tensor ids = at::zeros({1, static_cast<int64_t>(positions.size())}, at::kLong);
    std::copy(prompt.begin(), prompt.end(), ids.mutable_data_ptr<int64_t>());
    const at::Tensor hidden =
        decoder.forward(ids.to(resolved.device), at::tensor(positions).to(resolved.device),
                        decoder.layers_with([&](int64_t layer, const at::Tensor& q,
                                                const at::Tensor& k, const at::Tensor& v) {
                          keep(layer, 0, length, k, v);
                          attention::AttentionCall call;
                          call.pattern = patterns[layer];
                          return attention::sparse_ring_attention(context, q, k, v, call).out;
                        }));
    return best(hidden, length - 1);
  }

  int64_t read_token(int64_t id, int64_t position) {
    const at::Tensor hidden =
        decoder.forward(at::full({1, 1}, id, at::kLong).to(resolved.device),
                        at::full({1}, position, at::kLong).to(resolved.device),
                        decoder.layers_with([&](int64_t layer, const at::Tensor& q,
                                                const at::Tensor& k, const at::Tensor& v) {
                          keep(layer, position, 1, k, v);
                          return at::scaled_dot_product_attention(
                                     q.transpose(1, 2), keys[layer].narrow(2, 0, position + 1),
                                     values[layer].narrow(2, 0, position + 1), std::nullopt, 0,
                                     false, std::nullopt, q.size(2) != k.size(2))
                              .transpose(1, 2);
                        }));
    return best(hidden, 0);
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
  MT_CHECK_ARG(!prompt.empty(), "prompt: expected at least one id, got none");
  for (size_t i = 0; i < prompt.size(); ++i)
    MT_CHECK_ARG(prompt[i] >= 0 && prompt[i] < s.config.model.vocab_size, "prompt: id ", i,
                 ": expected 0 to ", s.config.model.vocab_size - 1, ", got ", prompt[i]);
  MT_CHECK_ARG(max_new_tokens >= 1, "max_new_tokens: expected at least 1, got ", max_new_tokens);
  auto position = static_cast<int64_t>(prompt.size());
  s.make_cache(position + max_new_tokens);
  std::vector<int64_t> made = {s.read_prompt(prompt)};
  while (static_cast<int64_t>(made.size()) < max_new_tokens &&
         std::find(stops.begin(), stops.end(), made.back()) == stops.end())
    made.push_back(s.read_token(made.back(), position++));
  return made;
}

}  // namespace mtraining::train
