#include "mtraining/model/decoder.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

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
  const auto linear = [&](const Rows& x, const at::Tensor& w, const at::Tensor* bias) {
    Rows y(x.size(), std::vector<double>(w.size(0)));
    const at::Tensor wide = w.detach().to(at::kDouble).contiguous();
    const double* data = wide.data_ptr<double>();
    for (size_t t = 0; t < x.size(); ++t) {
      for (int64_t o = 0; o < w.size(0); ++o) {
        double sum = bias != nullptr ? (*bias)[o].item<double>() : 0;
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
  const auto rotate = [&](Rows& x) {
    for (size_t t = 0; t < x.size(); ++t) {
      for (size_t head = 0; head < x[t].size(); head += c.head_dim) {
        for (int64_t i = 0; i < c.head_dim / 2; ++i) {
          const double phase = static_cast<double>(t) *
                               std::pow(c.rope_theta, -2.0 * static_cast<double>(i) / c.head_dim);
          double &a = x[t][head + i], &b = x[t][head + i + c.head_dim / 2];
          const double first = a * std::cos(phase) - b * std::sin(phase);
          b = b * std::cos(phase) + a * std::sin(phase);
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
    Rows q = linear(x, l.q_weight, &l.q_bias), k = linear(x, l.k_weight, &l.k_bias);
    const Rows v = linear(x, l.v_weight, &l.v_bias);
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
    add(h, linear(attended, l.o_weight, nullptr));
    const Rows y = norm(h, l.post_attention_norm);
    Rows gate = linear(y, l.gate_weight, nullptr);
    const Rows up = linear(y, l.up_weight, nullptr);
    for (size_t t = 0; t < gate.size(); ++t) {
      for (size_t i = 0; i < gate[t].size(); ++i)
        gate[t][i] *= up[t][i] / (1 + std::exp(-gate[t][i]));
    }
    add(h, linear(gate, l.down_weight, nullptr));
  }
  std::vector<double> logits;
  for (const auto& row : linear(norm(h, p.norm), p.lm_head, nullptr)) {
    logits.insert(logits.end(), row.begin(), row.end());
  }
  return logits;
}

TEST(Decoder, LogitsEqualTheFormulasForEveryGrouping) {
  for (const auto& [heads, kv_heads] :
       std::vector<std::pair<int64_t, int64_t>>{{4, 2}, {4, 4}, {7, 1}, {8, 2}}) {
    for (const bool tied : {true, false}) {
      DecoderConfig c = tiny(heads, kv_heads);
      c.tie_word_embeddings = tied;
      DecoderParameters p = init_parameters(c, 11);
      at::NoGradGuard no_grad;
      for (LayerParameters& l :
           p.layers) {  // biases and norms start at 0 and 1, which would hide their absence
        for (const at::Tensor& t : {l.q_bias, l.k_bias, l.v_bias})
          t.copy_(at::linspace(-1, 1, t.numel()));
        for (const at::Tensor& t : {l.input_norm, l.post_attention_norm})
          t.copy_(at::linspace(.5, 1.5, t.numel()));
      }
      p.norm.copy_(at::linspace(.5, 2, p.norm.numel()));
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
      EXPECT_LT(worst, 2e-5) << heads << "/" << kv_heads << " tied " << tied;
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

TEST(Rope, PhasesAreFloat32AtLargePositions) {
  for (const double theta : {5e5, 1e6}) {
    const std::vector<int64_t> positions{0, 1, 256, 257, 15962, 524287};
    const RopeTable table = rope_table(at::tensor(positions), 128, theta);
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
  const RopeTable table = rope_table(at::tensor(std::vector<int64_t>{256, 257}), 64, 1e6);
  EXPECT_TRUE(at::allclose(apply_rope(x.to(at::kBFloat16), table).to(at::kFloat),
                           apply_rope(x, table), 2e-2, 2e-2));
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
}

}  // namespace
}  // namespace mtraining::model
