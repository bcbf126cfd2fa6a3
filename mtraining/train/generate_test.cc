#include "mtraining/train/generate.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>

#include "mtraining/base/check.h"
#include "mtraining/base/parallel.h"
#include "mtraining/checkpoint/weights.h"
#include "mtraining/testing/scratch_folder.h"
#include "mtraining/train/tiny_run_case.h"

namespace mtraining::train {
namespace {

/// Weights in a folder, and the greedy continuation by the definition: everything read anew for every token.
struct Case {
  Case() {
    at::set_num_threads(1);
    set_num_threads(1);
    config = tiny_config(data);
    config.attention.pattern = pattern::PatternKind::kDense;
    config.init_from = (files.path() / "weights").string();
    std::filesystem::create_directories(*config.init_from);
    parameters = model::init_parameters(config.model, 5);
    checkpoint::save_model_folder(*config.init_from, model::hf_config(config.model, 512), 512,
                                  parameters.list(), at::kFloat, {});
  }
  std::vector<int64_t> prompt(int64_t length) const {
    std::vector<int64_t> ids(length);
    for (int64_t i = 0; i < length; ++i) ids[i] = (i * i * 7 + 3 * i + length) % 64;
    return ids;
  }
  /// [vocab] after ids.
  at::Tensor logits(const std::vector<int64_t>& ids) const {
    const at::NoGradGuard no_grad;
    const model::Decoder decoder(config.model, parameters);
    const auto attend = [](int64_t, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
      return at::scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2),
                                              v.transpose(1, 2), std::nullopt, 0, true,
                                              std::nullopt, true)
          .transpose(1, 2);
    };
    const auto n = static_cast<int64_t>(ids.size());
    const at::Tensor hidden =
        decoder.forward(at::tensor(ids).reshape({1, n}), at::arange(n), model::Attend(attend));
    return at::matmul(decoder.head_weight(), hidden[0][n - 1]);
  }
  std::vector<int64_t> by_definition(std::vector<int64_t> ids, int64_t count) const {
    std::vector<int64_t> made;
    for (int64_t i = 0; i < count; ++i) {
      made.push_back(logits(ids).argmax().item<int64_t>());
      ids.push_back(made.back());
    }
    return made;
  }
  double log_likelihood(std::vector<int64_t> ids, const std::vector<int64_t>& option) const {
    double sum = 0;
    for (const int64_t id : option) {
      sum += at::log_softmax(logits(ids).to(at::kDouble), 0)[id].item<double>();
      ids.push_back(id);
    }
    return sum;
  }
  std::unique_ptr<Generator> generator() const {
    RunConfig copy = config;
    const ResolvedRun resolved = resolve(copy, topology::LaunchEnvironment());
    return std::make_unique<Generator>(copy, resolved);
  }
  testing::ScratchFolder files{testing::memory_folder()};
  TinyData data;
  RunConfig config;
  model::DecoderParameters parameters;
};

TEST(Generator, TheCacheGivesWhatReadingEverythingAnewGives) {
  Case c;
  const auto generator = c.generator();
  for (const int64_t length : {1, 2, 63, 64, 65, 130})
    EXPECT_EQ(generator->continue_greedily(c.prompt(length), 9),
              c.by_definition(c.prompt(length), 9))
        << length;
}

TEST(Generator, APatternThatTakesEverythingIsDenseAndASparseOneReadsThePromptAlone) {
  Case c;
  const std::vector<int64_t> want = c.by_definition(c.prompt(200), 6);
  c.config.attention.pattern = pattern::PatternKind::kVerticalSlash;
  c.config.attention.options.p_vertical = c.config.attention.options.p_slash = 1;
  EXPECT_EQ(c.generator()->continue_greedily(c.prompt(200), 6), want);
  c.config.attention.options.p_vertical = c.config.attention.options.p_slash = 0.05;
  c.config.attention.options.sink_tokens = 0;
  EXPECT_EQ(c.generator()->continue_greedily(c.prompt(200), 6).size(), 6u);
}

TEST(Generator, EndsWithTheFirstStopAndRefusesWhatIsNoPrompt) {
  Case c;
  const auto generator = c.generator();
  const std::vector<int64_t> whole = generator->continue_greedily(c.prompt(70), 8);
  const std::vector<int64_t> stops = {whole[3]};
  const auto first = std::find(whole.begin(), whole.end(), whole[3]) - whole.begin();
  EXPECT_EQ(generator->continue_greedily(c.prompt(70), 8, stops),
            std::vector<int64_t>(whole.begin(), whole.begin() + first + 1));
  EXPECT_THROW(generator->continue_greedily({}, 3), InvalidArgument);
  EXPECT_THROW(generator->continue_greedily({1, 64}, 3), InvalidArgument);
  EXPECT_THROW(generator->continue_greedily({-1}, 3), InvalidArgument);
  EXPECT_THROW(generator->continue_greedily({1}, 0), InvalidArgument);
}

TEST(Generator, OptionsAreAsLikelyAsReadingEverythingAnewSays) {
  Case c;
  const auto generator = c.generator();
  const std::vector<std::vector<int64_t>> options = {{5}, {9, 1}, c.prompt(40), {5, 5, 5}};
  for (const int64_t length : {1, 63, 130}) {
    const std::vector<double> got = generator->option_log_likelihoods(c.prompt(length), options);
    ASSERT_EQ(got.size(), options.size());
    for (size_t i = 0; i < options.size(); ++i)
      EXPECT_NEAR(got[i], c.log_likelihood(c.prompt(length), options[i]), 1e-4) << length << i;
  }
  EXPECT_THROW(generator->option_log_likelihoods(c.prompt(9), {}), InvalidArgument);
  EXPECT_THROW(generator->option_log_likelihoods(c.prompt(9), {{}}), InvalidArgument);
  EXPECT_THROW(generator->option_log_likelihoods(c.prompt(9), {{64}}), InvalidArgument);
}

TEST(Generator, AnotherPatternMayReadTheNextPromptAndItsDensityIsSaid) {
  Case c;
  const auto generator = c.generator();
  const std::vector<int64_t> dense = generator->continue_greedily(c.prompt(900), 3);
  const double all = 15 * 16 / 2 * 64 * 64 / (900. * 900 / 2);  // blocks are counted whole
  EXPECT_NEAR(generator->prompt_density(), all, 1e-6);
  AttentionSection sparse = c.config.attention;
  sparse.pattern = pattern::PatternKind::kVerticalSlash;
  sparse.options.p_vertical = sparse.options.p_slash = 0.05;
  sparse.options.sink_tokens = 0;
  generator->attend_with(sparse);
  generator->continue_greedily(c.prompt(900), 3);
  EXPECT_LT(generator->prompt_density(), 0.9 * all);
  EXPECT_GT(generator->prompt_density(), 0);
  generator->attend_with(c.config.attention);
  EXPECT_EQ(generator->continue_greedily(c.prompt(900), 3), dense);
}

}  // namespace
}  // namespace mtraining::train
