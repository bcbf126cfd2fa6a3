#include "mtraining/checkpoint/weights.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <functional>

#include "mtraining/testing/error_of.h"
#include "mtraining/testing/scratch_folder.h"

namespace mtraining::checkpoint {
namespace {

using testing::error_of;
using testing::expect_says;
using testing::get_text;
using testing::put_text;
using testing::ScratchFolder;

model::DecoderConfig tiny(bool tied) {
  model::DecoderConfig config;
  config.vocab_size = 48;
  config.hidden_size = 32;
  config.intermediate_size = 40;
  config.num_hidden_layers = 2;
  config.num_attention_heads = 4;
  config.num_key_value_heads = 2;
  config.head_dim = 8;
  config.tie_word_embeddings = tied;
  return config;
}

/// Parameters that are all different from one another, biases and norms too.
model::DecoderParameters random_parameters(bool tied, int64_t seed) {
  model::DecoderParameters parameters = model::init_parameters(tiny(tied), seed);
  for (const model::Parameter& each : parameters.list()) {
    auto generator =
        at::make_generator<at::CPUGeneratorImpl>(seed + std::hash<std::string>()(each.name));
    each.value.detach().normal_(0, 1, generator);
  }
  return parameters;
}

void expect_same(const std::vector<model::Parameter>& a, const std::vector<model::Parameter>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i].name, b[i].name);
    EXPECT_TRUE(at::equal(a[i].value, b[i].value)) << a[i].name;
  }
}

std::string load_error(const std::filesystem::path& folder,
                       const std::vector<model::Parameter>& parameters, bool tied) {
  return error_of([&] { load_weights(WeightFolder(folder), parameters, tied); });
}

TEST(Weights, SavedAndLoadedAreTheSameBitForBit) {
  for (const bool tied : {false, true})
    for (const int64_t shard_bytes : {int64_t{2000}, int64_t{1} << 30}) {
      const ScratchFolder folder;
      const auto saved = random_parameters(tied, 1).list();
      save_weights(folder.path(), saved, at::kFloat, shard_bytes);
      const auto loaded = random_parameters(tied, 2).list();
      load_weights(WeightFolder(folder.path()), loaded, tied);
      expect_same(loaded, saved);
      EXPECT_EQ(WeightFolder(folder.path()).find("lm_head.weight") != nullptr, !tied);
    }
}

TEST(Weights, FloatTypesConvertAsTorchDoes) {
  for (const at::ScalarType stored : {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf})
    for (const at::ScalarType wanted : {at::kFloat, at::kBFloat16}) {
      const ScratchFolder folder;
      const auto saved = random_parameters(false, 1).list();
      save_weights(folder.path(), saved, stored);
      std::vector<model::Parameter> loaded;
      for (const auto& each : saved)
        loaded.push_back({each.name, at::zeros_like(each.value.detach(), wanted)});
      load_weights(WeightFolder(folder.path()), loaded, false);
      for (size_t i = 0; i < saved.size(); ++i)
        EXPECT_TRUE(at::equal(loaded[i].value, saved[i].value.detach().to(stored).to(wanted)));
    }
}

TEST(Weights, ATiedHeadSharesTheEmbeddingBeforeAndAfterLoadingAndAStep) {
  const ScratchFolder folder;
  save_weights(folder.path(), random_parameters(true, 1).list(), at::kFloat);
  const model::DecoderParameters parameters = random_parameters(true, 2);
  load_weights(WeightFolder(folder.path()), parameters.list(), true);
  const auto shares = [&] {
    return parameters.lm_head.data_ptr() == parameters.embed_tokens.data_ptr() &&
           at::equal(parameters.lm_head, parameters.embed_tokens);
  };
  EXPECT_TRUE(shares());
  // One use as a table of rows and one as a matrix: the gradient is the sum of both.
  const at::Tensor ids = at::tensor({int64_t{3}, int64_t{3}, int64_t{7}});
  const at::Tensor rows = parameters.embed_tokens.index_select(0, ids);
  const at::Tensor loss = rows.sum() + 2 * parameters.lm_head.sum();
  loss.backward();
  at::Tensor want = at::full({48, 32}, 2.0f);
  want[3] += 2;
  want[7] += 1;
  EXPECT_TRUE(at::equal(parameters.embed_tokens.grad(), want));
  parameters.embed_tokens.detach().sub_(0.1 * parameters.embed_tokens.grad());
  EXPECT_TRUE(shares());
}

TEST(Weights, ATiedHeadInTheFileMustBeTheEmbedding) {
  const model::DecoderParameters parameters = random_parameters(true, 1);
  auto saved = parameters.list();
  saved.push_back({"lm_head.weight", parameters.embed_tokens.detach().clone()});
  const auto loaded = random_parameters(true, 2).list();
  {
    const ScratchFolder folder;
    save_weights(folder.path(), saved, at::kFloat);
    EXPECT_EQ(load_error(folder.path(), loaded, true), "");
    expect_same(loaded, parameters.list());
  }
  saved.back().value[5][5] += 1;
  const ScratchFolder folder;
  save_weights(folder.path(), saved, at::kFloat);
  expect_says(load_error(folder.path(), loaded, true),
              {"tie_word_embeddings is true", "\"lm_head.weight\" differs"});
}

TEST(Weights, MissingUnusedAndMisshapenTensorsAreNamedAndNothingIsTouched) {
  const auto with = [](bool tied, auto change) {
    const ScratchFolder folder;
    auto saved = random_parameters(false, 1).list();
    change(saved);
    save_weights(folder.path(), saved, at::kFloat);
    const auto loaded = random_parameters(tied, 2).list();
    const std::string error = load_error(folder.path(), loaded, tied);
    if (!error.empty()) expect_same(loaded, random_parameters(tied, 2).list());
    return error;
  };
  const auto drop = [](const std::string& part) {
    return [part](std::vector<model::Parameter>& list) {
      std::erase_if(list,
                    [&](const auto& each) { return each.name.find(part) != std::string::npos; });
    };
  };
  EXPECT_EQ(with(false, [](auto&) {}), "");
  expect_says(with(false, drop("lm_head")), {"1 parameters missing: \"lm_head.weight\""});
  expect_says(with(false, drop("k_proj.bias")),
              {"2 parameters missing", "\"model.layers.0.self_attn.k_proj.bias\""});
  expect_says(with(false, drop("layers.1")), {"12 parameters missing", ", .."});
  expect_says(with(false,
                   [](auto& list) {
                     list.push_back({"model.extra", at::ones({2})});
                   }),
              {"1 tensors unused: \"model.extra\""});
  expect_says(with(false,
                   [](auto& list) {
                     list[1].value = at::ones({3, 5});
                   }),
              {"1 shapes differ", "got F32 [3, 5]"});
  EXPECT_EQ(with(false,
                 [](auto& list) {
                   list.push_back({"model.layers.0.self_attn.rotary_emb.inv_freq", at::ones({4})});
                 }),
            "");
}

TEST(Weights, TensorsThatStandUnalignedInTheirFileAreRead) {
  const ScratchFolder folder;
  const std::string header =
      R"({"w":{"dtype":"F32","shape":[3],"data_offsets":[0,12]}})";  // its data begin at an odd offset
  const uint64_t length = header.size() + (header.size() % 2 == 0 ? 1 : 0);
  std::string text(8, '\0');
  std::memcpy(text.data(), &length, 8);
  text += header;
  text.resize(8 + length, ' ');
  const float values[] = {1, 2, 3};
  text.append(reinterpret_cast<const char*>(values), 12);
  put_text(folder / "model.safetensors", text);
  const model::Parameter parameter{"w", at::zeros({3})};
  load_weights(WeightFolder(folder.path()), {parameter}, false);
  EXPECT_TRUE(at::equal(parameter.value, at::tensor({1.0f, 2.0f, 3.0f})));
}

/// A line of /proc/self/status, in bytes.
int64_t memory_of(const std::string& key) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.rfind(key, 0) == 0) return std::stoll(line.substr(key.size() + 1)) * 1024;
  return -1;
}

TEST(Weights, TheModelIsNotHeldTwiceWhileItIsLoaded) {
  constexpr int64_t kCount = 12, kBytes = int64_t{8} << 20;
  const ScratchFolder folder;
  std::vector<model::Parameter> parameters;
  for (int64_t i = 0; i < kCount; ++i)
    parameters.push_back({concat("w", i), at::full({kBytes / 4}, static_cast<float>(i))});
  save_weights(folder.path(), parameters, at::kFloat, 3 * kBytes);
  for (const auto& each : parameters) each.value.zero_();
  const WeightFolder weights(folder.path());
  std::ofstream("/proc/self/clear_refs") << "5";  // the peak starts from now
  const int64_t before = memory_of("VmRSS:");
  load_weights(weights, parameters, false);
  const int64_t grown = memory_of("VmHWM:") - before;
  EXPECT_LT(grown, 3 * kBytes) << "of " << kCount * kBytes << " bytes of weights";
  for (int64_t i = 0; i < kCount; ++i) EXPECT_EQ(parameters[i].value[7].item<float>(), i);
}

TEST(Weights, AModelFolderHoldsConfigurationWeightsAndTokenizer) {
  const ScratchFolder source, folder;
  put_text(source / "tokenizer.json", "{}");
  put_text(source / "config.json", "of another length");
  model::HfConfig config;
  config.vocab_size = 48;
  config.hidden_size = 32;
  config.intermediate_size = 40;
  config.num_hidden_layers = config.num_key_value_heads = 2;
  config.num_attention_heads = 4;
  config.head_dim = 8;
  config.qkv_bias = config.tie_word_embeddings = true;
  const auto parameters = random_parameters(true, 1).list();
  save_model_folder(folder.path(), config, 512, parameters, at::kBFloat16,
                    read_companion_files(source.path()));
  const model::HfConfig read = model::read_hf_config(folder.path());
  EXPECT_EQ(read.max_position_embeddings, 512);
  EXPECT_EQ(read.dtype, "bfloat16");
  EXPECT_EQ(get_text(folder / "tokenizer.json"), "{}");
  EXPECT_EQ(WeightFolder(folder.path()).find("model.norm.weight")->type, StoredType::kBF16);
  EXPECT_NE(error_of([&] {
              save_model_folder(folder.path(), config, 512, parameters, at::kDouble, {});
            }).find("got Double"),
            std::string::npos);
}

TEST(Weights, EveryStoredTypeHasItsCounterpart) {
  for (const at::ScalarType type : {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf, at::kLong,
                                    at::kInt, at::kByte, at::kBool}) {
    EXPECT_EQ(scalar_type_of(stored_type_of(type)), type);
    EXPECT_EQ(bytes_of(stored_type_of(type)), static_cast<int64_t>(at::elementSize(type)));
  }
  expect_says(error_of([] { stored_type_of(at::kComplexFloat); }), {"ComplexFloat"});
}

}  // namespace
}  // namespace mtraining::checkpoint
