#include "mtraining/model/decoder.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "mtraining/base/check.h"
#include "mtraining/model/rope.h"

namespace mtraining::model {
namespace {

DecoderConfig tiny(int64_t heads = 4, int64_t kv_heads = 2) {
  DecoderConfig c;
  c.vocab_size = 37;
  c.hidden_size = 24;
  c.intermediate_size = 40;
  c.num_hidden_layers = 2;
  c.num_attention_heads = heads;
  c.num_key_value_heads = kv_heads;
  c.head_dim = 8;
  c.initializer_range = 0.2;
  c.embedding_initializer_range = 0.5;
  return c;
}

/// Causal attention for the tests alone: torch's own, in one rank.
at::Tensor local_attention(int64_t, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  return at::scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
                                          {}, 0.0, true, std::nullopt, true)
      .transpose(1, 2);
}

/// The same block written out scalar by scalar in float64, one query row at a time, from the architecture's formulas.
std::vector<double> reference_logits(const DecoderConfig& c, const DecoderParameters& p,
                                     const std::vector<int64_t>& ids) {
  using Rows = std::vector<std::vector<double>>;
  const auto at2 = [](const at::Tensor& w, int64_t i, int64_t j) { return w[i][j].item<double>(); };
  const auto linear = [&](const Rows& x, const at::Tensor& w, const at::Tensor& bias) {
    Rows y(x.size(), std::vector<double>(w.size(0)));
    const at::Tensor wide = w.detach().to(at::kDouble).contiguous();
    const double* data = wide.data_ptr<double>();
    for (size_t t = 0; t < x.size(); ++t) {
      for (int64_t o = 0; o < w.size(0); ++o) {
        double sum = bias.defined() ? bias[o].item<double>() : 0;
        for (int64_t i = 0; i < w.size(1); ++i) sum += data[o * w.size(1) + i] * x[t][i];
        y[t][o] = sum;
      }
    }
    return y;
  };
  const auto norm = [&](const Rows& x, const at::Tensor& w) {
    Rows y = x;
    for (auto& row : y) {
      double square = 0;
      for (const double value : row) square += value * value;
      const double scale = 1 / std::sqrt(square / static_cast<double>(row.size()) + c.rms_norm_eps);
      for (size_t i = 0; i < row.size(); ++i)
        row[i] *= scale * w[static_cast<int64_t>(i)].item<double>();
    }
    return y;
  };
  // Each head alone, as a row of its own.
  const auto norm_heads = [&](Rows& x, const at::Tensor& w) {
    const auto dim = static_cast<size_t>(c.head_dim);
    for (auto& row : x) {
      for (size_t head = 0; head < row.size(); head += dim) {
        const Rows normed = norm({{row.begin() + static_cast<std::ptrdiff_t>(head),
                                   row.begin() + static_cast<std::ptrdiff_t>(head + dim)}},
                                 w);
        std::ranges::copy(normed[0], row.begin() + static_cast<std::ptrdiff_t>(head));
      }
    }
  };
  const RopeFrequencies frequencies = rope_frequencies(c.rope, c.head_dim);
  const auto rotate = [&](Rows& x) {
    for (size_t t = 0; t < x.size(); ++t) {
      for (size_t head = 0; head < x[t].size(); head += c.head_dim) {
        for (int64_t i = 0; i < c.head_dim / 2; ++i) {
          const double phase = static_cast<double>(t) * frequencies.inverse[i];
          const double cos = std::cos(phase) * frequencies.attention_factor;
          const double sin = std::sin(phase) * frequencies.attention_factor;
          double &a = x[t][head + i], &b = x[t][head + i + c.head_dim / 2];
          const double first = a * cos - b * sin;
          b = b * cos + a * sin;
          a = first;
        }
      }
    }
  };
  const auto add = [](Rows& x, const Rows& y) {
    for (size_t t = 0; t < x.size(); ++t) {
      for (size_t i = 0; i < x[t].size(); ++i) x[t][i] += y[t][i];
    }
  };
  Rows h(ids.size());
  for (size_t t = 0; t < ids.size(); ++t) {
    for (int64_t i = 0; i < c.hidden_size; ++i) h[t].push_back(at2(p.embed_tokens, ids[t], i));
  }
  const int64_t group = c.num_attention_heads / c.num_key_value_heads;
  for (const LayerParameters& l : p.layers) {
    const Rows x = norm(h, l.input_norm);
    Rows q = linear(x, l.q_weight, l.q_bias), k = linear(x, l.k_weight, l.k_bias);
    const Rows v = linear(x, l.v_weight, l.v_bias);
    if (c.architecture == "qwen3") {
      norm_heads(q, l.q_norm);
      norm_heads(k, l.k_norm);
    }
    rotate(q);
    rotate(k);
    Rows attended(ids.size(), std::vector<double>(c.num_attention_heads * c.head_dim, 0));
    for (int64_t head = 0; head < c.num_attention_heads; ++head) {
      const int64_t q0 = head * c.head_dim, k0 = head / group * c.head_dim;
      for (size_t i = 0; i < ids.size(); ++i) {
        std::vector<double> weight(i + 1);
        double total = 0;
        for (size_t j = 0; j <= i; ++j) {
          double dot = 0;
          for (int64_t d = 0; d < c.head_dim; ++d) dot += q[i][q0 + d] * k[j][k0 + d];
          total += weight[j] = std::exp(dot / std::sqrt(static_cast<double>(c.head_dim)));
        }
        for (size_t j = 0; j <= i; ++j) {
          for (int64_t d = 0; d < c.head_dim; ++d)
            attended[i][q0 + d] += weight[j] / total * v[j][k0 + d];
        }
      }
    }
    add(h, linear(attended, l.o_weight, l.o_bias));
    const Rows y = norm(h, l.post_attention_norm);
    Rows gate = linear(y, l.gate_weight, {});
    const Rows up = linear(y, l.up_weight, {});
    for (size_t t = 0; t < gate.size(); ++t) {
      for (size_t i = 0; i < gate[t].size(); ++i)
        gate[t][i] *= up[t][i] / (1 + std::exp(-gate[t][i]));
    }
    add(h, linear(gate, l.down_weight, {}));
  }
  std::vector<double> logits;
  for (const auto& row : linear(norm(h, p.norm), p.lm_head, {})) {
    logits.insert(logits.end(), row.begin(), row.end());
  }
  return logits;
}

TEST(Decoder, LogitsEqualTheFormulasForEveryGrouping) {
  for (const auto& [heads, kv_heads] :
       std::vector<std::pair<int64_t, int64_t>>{{4, 2}, {4, 4}, {7, 1}, {8, 2}}) {
    for (const auto& [family, bias, tied] :
         std::vector<std::tuple<const char*, bool, bool>>{{"qwen2", false, true},
                                                          {"qwen2", false, false},
                                                          {"qwen3", false, true},
                                                          {"qwen3", true, false},
                                                          {"llama", false, false},
                                                          {"llama", true, true}}) {
      DecoderConfig c = tiny(heads, kv_heads);
      c.architecture = family;
      c.attention_bias = bias;
      c.tie_word_embeddings = tied;
      if (!tied) {
        c.rope.type = RopeType::kYarn;
        c.rope.factor = 8;
        c.rope.original_max_position_embeddings = 16;
      }
      const DecoderParameters p = init_parameters(c, 11);
      at::NoGradGuard no_grad;
      for (const Parameter& each :
           p.list()) {  // 0 and 1, where they start, would hide their absence
        const at::Tensor& t = each.value;
        if (each.name.ends_with(".bias")) t.copy_(at::linspace(-1, 1, t.numel()));
        if (each.name.ends_with("norm.weight")) t.copy_(at::linspace(.5, 1.6, t.numel()));
      }
      std::vector<int64_t> ids;
      for (int64_t i = 0; i < 19; ++i) ids.push_back(i * i * 7 % 37);
      const Decoder decoder(c, p);
      const at::Tensor hidden =
          decoder.forward(at::tensor(ids).unsqueeze(0), at::arange(19), local_attention);
      const at::Tensor logits =
          at::linear(hidden, decoder.head_weight()).to(at::kDouble).contiguous();
      const std::vector<double> want = reference_logits(c, p, ids);
      ASSERT_EQ(logits.numel(), static_cast<int64_t>(want.size()));
      double worst = 0;
      for (size_t i = 0; i < want.size(); ++i) {
        worst = std::max(
            worst, std::abs(want[i] - logits.data_ptr<double>()[i]) / (1 + std::abs(want[i])));
      }
      EXPECT_LT(worst, 2e-5) << heads << "/" << kv_heads << ' ' << family << " bias " << bias
                             << " tied " << tied;
    }
  }
}

TEST(Decoder, PositionsNotPlacesInTheShardTurnQAndK) {
  const DecoderConfig c = tiny();
  const Decoder decoder(c, init_parameters(c, 1));
  const at::Tensor ids = at::arange(12).unsqueeze(0);
  std::vector<at::Tensor> seen;
  const Attend keep = [&](int64_t layer, const at::Tensor& q, const at::Tensor& k,
                          const at::Tensor& v) {
    if (layer == 0) seen.push_back(at::cat({q, k}, 2));
    return local_attention(layer, q, k, v);
  };
  const at::Tensor order = at::tensor(std::vector<int64_t>{4, 5, 6, 7, 0, 1, 2, 3, 8, 9, 10, 11});
  decoder.forward(ids, at::arange(12), keep);
  decoder.forward(ids.index_select(1, order), order, keep);
  EXPECT_TRUE(at::allclose(seen[0].index_select(1, order), seen[1], 1e-6, 1e-6));
}

TEST(Decoder, InitialisationDependsOnSeedAndNameAlone) {
  const DecoderConfig c = tiny();
  const auto a = init_parameters(c, 1).list(), b = init_parameters(c, 1).list(),
             other = init_parameters(c, 2).list();
  DecoderConfig deeper = c;
  deeper.num_hidden_layers = 3;
  const auto d = init_parameters(deeper, 1).list();
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_TRUE(at::equal(a[i].value, b[i].value)) << a[i].name;
    if (a[i].value.dim() == 2) {
      EXPECT_FALSE(at::equal(a[i].value, other[i].value)) << a[i].name;
    }
  }
  EXPECT_TRUE(at::equal(a[2].value,
                        d[2].value));  // a layer's own values do not depend on how many come after
  EXPECT_NEAR(a[0].value.std().item<double>(), 0.5, 0.03);
  EXPECT_NEAR(a[2].value.std().item<double>(), 0.2, 0.02);
}

TEST(Decoder, TiedHeadIsOneTensorAndGetsBothGradients) {
  DecoderConfig c = tiny();
  const DecoderParameters p = init_parameters(c, 1);
  EXPECT_TRUE(p.lm_head.is_same(p.embed_tokens));
  for (const auto& parameter : p.list()) EXPECT_NE(parameter.name, "lm_head.weight");
  EXPECT_EQ(p.list().size(), 2u + 12 * 2);
  const Decoder decoder(c, p);
  const at::Tensor ids = at::tensor(std::vector<int64_t>{3, 3, 3, 3}).unsqueeze(0);
  at::linear(decoder.forward(ids, at::arange(4), local_attention), decoder.head_weight())
      .square()
      .sum()
      .backward();
  const at::Tensor tied = p.embed_tokens.grad().clone();
  c.tie_word_embeddings = false;
  DecoderParameters q = init_parameters(c, 1);
  q.lm_head.set_data(p.embed_tokens.detach().clone());
  const Decoder untied(c, q);
  at::linear(untied.forward(ids, at::arange(4), local_attention), untied.head_weight())
      .square()
      .sum()
      .backward();
  EXPECT_TRUE(at::allclose(tied, q.embed_tokens.grad() + q.lm_head.grad(), 1e-4, 1e-4));
  EXPECT_GT(q.embed_tokens.grad().abs().sum().item<double>(), 0);
}

TEST(Decoder, TheGradientOfATokenThatComesOftenIsSummedInFloat32) {
  at::set_num_threads(1);  // more for products this small cost more than they do
  // Tokens alike in all things, so that each adds the same to its row: a bf16 sum of them stops growing.
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    DecoderConfig c = tiny();
    c.tie_word_embeddings = false;
    c.dtype = dtype;
    const auto row_gradient = [&](int64_t tokens) {
      const DecoderParameters p = init_parameters(c, 1);
      const at::Tensor ids = at::full({1, tokens}, 5, at::kLong);
      const auto own_value = [](int64_t, const at::Tensor& q, const at::Tensor&,
                                const at::Tensor& v) { return v.repeat_interleave(2, 2) + q * 0; };
      const at::Tensor hidden =
          Decoder(c, p).forward(ids, at::zeros({tokens}, at::kLong), own_value);
      (hidden * at::arange(1, 25).to(dtype)).sum().backward();
      EXPECT_EQ(p.embed_tokens.grad().scalar_type(), dtype);
      return p.embed_tokens.grad()[5].to(at::kDouble);
    };
    const at::Tensor one = row_gradient(1), many = row_gradient(3000) / 3000;
    EXPECT_LT(((many - one).norm() / one.norm()).item<double>(), 0.01) << dtype;
  }
}

RopeParameters rope_of(RopeType type, double theta, double factor = 1) {
  RopeParameters rope;
  rope.type = type;
  rope.rope_theta = theta;
  rope.factor = factor;
  rope.original_max_position_embeddings = 32768;
  return rope;
}

TEST(Rope, PhasesAreFloat32AtLargePositions) {
  for (const double theta : {5e5, 1e6}) {
    const std::vector<int64_t> positions{0, 1, 256, 257, 15962, 524287};
    const RopeTable table = rope_table(
        at::tensor(positions), decoder_frequencies(rope_of(RopeType::kDefault, theta), 128));
    for (size_t i = 0; i < positions.size(); ++i) {
      for (int64_t j = 0; j < 64; ++j) {
        const double inverse = std::pow(theta, -2.0 * static_cast<double>(j) / 128);
        const float phase = static_cast<float>(positions[i]) * static_cast<float>(inverse);
        const double got_cos = table.cos[static_cast<int64_t>(i)][0][j].item<double>();
        EXPECT_NEAR(got_cos, std::cos(static_cast<double>(positions[i]) * inverse), 3e-2);
        if (positions[i] < 300) {
          EXPECT_NEAR(got_cos, std::cos(phase), 1e-5 + 3e-5 * (positions[i] > 1));
        }
      }
    }
    EXPECT_GT((table.cos[2] - table.cos[3]).abs().max().item<double>(), 0.3);  // 256 and 257 differ
  }
  // A bfloat16 model turns by the same float32 phases.
  at::manual_seed(4);
  const at::Tensor x = at::randn({1, 2, 1, 64});
  const RopeTable table = rope_table(at::tensor(std::vector<int64_t>{256, 257}),
                                     decoder_frequencies(rope_of(RopeType::kDefault, 1e6), 64));
  EXPECT_TRUE(at::allclose(apply_rope(x.to(at::kBFloat16), table).to(at::kFloat),
                           apply_rope(x, table), 2e-2, 2e-2));
}

/// One of each form.
std::vector<RopeParameters> every_rope_form(double theta) {
  RopeParameters plain;
  plain.rope_theta = theta;
  RopeParameters linear = rope_of(RopeType::kLinear, theta, 4);
  linear.original_max_position_embeddings = 0;  // not a field of this form
  return {plain, linear, rope_of(RopeType::kYarn, theta, 16), rope_of(RopeType::kLlama3, theta, 8)};
}

TEST(Rope, FrequenciesAreThoseOfTheConfigurationButForRoundingOfThePower) {
  for (const double theta : {1e4, 1e6, 1.28e8})
    for (const int64_t head_dim : {16, 64, 128})
      for (const RopeParameters& rope : every_rope_form(theta)) {
        const RopeFrequencies want = rope_frequencies(rope, head_dim);
        const RopeFrequencies got = decoder_frequencies(rope, head_dim);
        EXPECT_EQ(got.attention_factor, want.attention_factor);
        ASSERT_EQ(got.inverse.size(), want.inverse.size());
        for (size_t d = 0; d < want.inverse.size(); ++d)
          EXPECT_NEAR(got.inverse[d] / want.inverse[d], 1, 3e-7)
              << to_string(rope.type) << " theta " << theta << " dimension " << d;
      }
}

TEST(Rope, TablesAreFloat32PhasesTimesTheAttentionFactor) {
  const std::vector<int64_t> positions{0, 1, 256, 257, 15962, 524287};
  for (const RopeParameters& rope : every_rope_form(1e6)) {
    const RopeFrequencies frequencies = decoder_frequencies(rope, 128);
    const RopeTable table = rope_table(at::tensor(positions), frequencies);
    for (int64_t i = 0; i < static_cast<int64_t>(positions.size()); ++i)
      for (int64_t d = 0; d < 64; ++d) {
        const double phase = static_cast<float>(positions[i]) * frequencies.inverse[d];
        EXPECT_NEAR(table.cos[i][0][d].item<double>(),
                    frequencies.attention_factor * std::cos(phase), 1e-5);
        EXPECT_NEAR(table.sin[i][0][d].item<double>(),
                    frequencies.attention_factor * std::sin(phase), 1e-5);
      }
  }
}

TEST(Decoder, FamiliesHaveTheirTensorsAndNoOthers) {
  const auto names = [](const char* family, bool bias) {
    DecoderConfig c = tiny();
    c.architecture = family;
    c.attention_bias = bias;
    c.num_hidden_layers = 1;
    std::set<std::string> found;
    for (const Parameter& each : init_parameters(c, 1).list()) found.insert(each.name);
    return found;
  };
  const std::set<std::string> bare = names("llama", false);
  EXPECT_EQ(bare.size(), 11u);
  const auto with = [&](const std::vector<std::string>& more) {
    std::set<std::string> all = bare;
    for (const std::string& each : more) all.insert("model.layers.0.self_attn." + each);
    return all;
  };
  EXPECT_EQ(names("qwen2", false), with({"q_proj.bias", "k_proj.bias", "v_proj.bias"}));
  EXPECT_EQ(names("qwen3", false), with({"q_norm.weight", "k_norm.weight"}));
  EXPECT_EQ(names("llama", true),
            with({"q_proj.bias", "k_proj.bias", "v_proj.bias", "o_proj.bias"}));
  EXPECT_EQ(names("qwen3", true), with({"q_norm.weight", "k_norm.weight", "q_proj.bias",
                                        "k_proj.bias", "v_proj.bias", "o_proj.bias"}));
}

TEST(Decoder, ParametersThatAreNotTheConfigurationsAreNamed) {
  const auto error = [](auto change) {
    DecoderConfig c = tiny();
    c.architecture = "qwen3";
    DecoderParameters p = init_parameters(c, 1);
    change(c, p);
    try {
      const Decoder decoder(c, p);
    } catch (const InvalidArgument& fault) {
      return std::string(fault.what());
    }
    return std::string();
  };
  EXPECT_EQ(error([](auto&, auto&) {}), "");
  const auto expect_names = [](const std::string& text, const char* part) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  expect_names(error([](auto&, auto& p) { p.layers[1].q_norm = at::Tensor(); }),
               "layers.1.self_attn.q_norm");
  expect_names(error([](auto&, auto& p) { p.layers[0].k_norm = at::ones({16}); }), "[16]");
  expect_names(error([](auto&, auto& p) { p.layers.pop_back(); }), "layers.1.input_layernorm");
  expect_names(error([](auto&, auto& p) { p.layers[0].o_bias = at::zeros({24}); }), "o_proj.bias");
  expect_names(error([](auto& c, auto&) { c.tie_word_embeddings = false; }), "lm_head.weight");
  expect_names(error([](auto&, auto& p) { p.norm = at::Tensor(); }), "model.norm.weight");
}

TEST(Decoder, ConfigJsonAndBack) {
  for (const char* family : {"qwen2", "qwen3", "llama"})
    for (const bool bias : {false, true})
      for (const RopeParameters& rope : every_rope_form(5e5)) {
        if (bias && std::string_view(family) == "qwen2") continue;
        DecoderConfig c = tiny();
        c.architecture = family;
        c.attention_bias = bias;
        c.rope = rope;
        c.rms_norm_eps = 1e-5;
        c.embedding_initializer_range = c.initializer_range;
        const std::string text = to_json(hf_config(c, 4096), 4096);
        const DecoderConfig got = decoder_config(parse_hf_config(text, "config.json"));
        EXPECT_EQ(to_json(hf_config(got, 4096), 4096), text);
        EXPECT_EQ(got.rope, rope);
        EXPECT_EQ(optional_tensors(got), optional_tensors(c));
        EXPECT_EQ(got.head_dim, c.head_dim);
        EXPECT_EQ(got.rms_norm_eps, 1e-5);
        EXPECT_EQ(got.tie_word_embeddings, c.tie_word_embeddings);
        EXPECT_EQ(got.initializer_range, c.initializer_range);
        EXPECT_EQ(got.embedding_initializer_range, c.initializer_range);
      }
  HfConfig strange = hf_config(tiny(), 64);
  strange.qk_norm = true;  // no file says so of Qwen2
  EXPECT_THROW(decoder_config(strange), Unsupported);
}

TEST(Decoder, WrongConfigurationsAreNamed) {
  const auto text = [](auto change) {
    DecoderConfig c = tiny();
    change(c);
    try {
      check(c);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_NE(text([](auto& c) { c.num_key_value_heads = 3; }).find("num_attention_heads"),
            std::string::npos);
  EXPECT_NE(text([](auto& c) { c.head_dim = 12; }).find("head_dim"), std::string::npos);
  EXPECT_NE(text([](auto& c) { c.architecture = "gpt"; }).find("architecture"), std::string::npos);
  EXPECT_NE(text([](auto& c) { c.vocab_size = 0; }).find("vocab_size"), std::string::npos);
  EXPECT_NE(text([](auto& c) { c.rope.rope_theta = 1; }).find("model.rope_theta"),
            std::string::npos);
  EXPECT_NE(text([](auto& c) { c.attention_bias = true; }).find("model.attention_bias"),
            std::string::npos);
  EXPECT_NE(text([](auto& c) { c.rope = rope_of(RopeType::kLinear, 1e4, .5); }).find("factor"),
            std::string::npos);
}

}  // namespace
}  // namespace mtraining::model
