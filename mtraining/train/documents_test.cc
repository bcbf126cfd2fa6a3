// Training on packed documents: what a rank computes is what each document alone would give.

#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "mtraining/train/tiny_run_case.h"

namespace mtraining::train {
namespace {

/// A file of many documents, shorter and longer than a sample of tiny_config, their ends off the block grid mostly.
class PackedData {
 public:
  PackedData() : folder_(100) {
    const Rng rng(11);
    data::TokenFileWriter writer(prefix(), data::TokenType::kUInt8);
    int64_t at = 0;
    for (int64_t d = 0; d < 60; ++d) {
      std::vector<int64_t> ids(d % 9 == 0 ? 700 : 1 + static_cast<int64_t>(rng.below(d, 260)));
      for (size_t i = 1; i < ids.size(); ++i, ++at) {
        ids[i] = rng.uniform(1000 + 2 * at) < 0.7
                     ? (ids[i - 1] * 5 + 3) % 64
                     : static_cast<int64_t>(rng.below(1001 + 2 * at, 64));
      }
      writer.add_sequence(ids);
      writer.end_document();
    }
    writer.finish();
  }
  std::string prefix() const { return (folder_.folder() / "packed").string(); }
  RunConfig config() const {
    RunConfig c = tiny_config(folder_);
    c.data.train = {{prefix(), 1.0}};
    c.data.valid = {{prefix(), 1.0}};
    c.data.document_mask = true;
    c.train.steps = 2;
    return c;
  }

 private:
  TinyData folder_;
};

/// Loss and gradient norm of one batch, document by document with torch's own attention.
std::pair<double, double> plain_documents(const RunConfig& config, int64_t samples) {
  const data::TokenFile file(config.data.train[0].path, config.model.vocab_size);
  const std::vector<int64_t>& starts = file.document_starts();
  data::BatchOptions options = tiny_batches(config);
  options.document_mask = true;
  const data::Batches batches(options);
  const model::DecoderParameters parameters =
      model::init_parameters(config.model, config.train.seed);
  const model::Decoder decoder(config.model, parameters);
  const auto attend = [](int64_t, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
    return at::scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
                                            {}, 0.0, true, std::nullopt, true)
        .transpose(1, 2);
  };
  at::Tensor sum = at::zeros({}, at::kDouble);
  int64_t count = 0;
  for (int64_t n = 0; n < samples; ++n) {
    const int64_t begin = batches.sample_ref(n).sample * config.train.seq_len;
    const int64_t end = begin + config.train.seq_len;
    for (size_t d = 0; d + 1 < starts.size(); ++d) {
      const int64_t first = std::max(starts[d], begin), last = std::min(starts[d + 1], end);
      if (first >= last) continue;
      const int64_t next = std::min(starts[d + 1], end + 1);  // the label of a cut document's end
      std::vector<int64_t> ids(next - first);
      file.read(first, ids);
      const int64_t length = last - first, labels = next - first - 1;
      if (labels == 0) continue;
      const at::Tensor all = at::tensor(ids);
      const at::Tensor hidden = decoder.forward(all.narrow(0, 0, length).unsqueeze(0),
                                                at::arange(length, at::kLong), attend);
      const at::Tensor logits = at::linear(hidden[0], decoder.head_weight()).narrow(0, 0, labels);
      sum = sum + at::cross_entropy_loss(logits, all.narrow(0, 1, labels), {}, at::Reduction::Sum);
      count += labels;
    }
  }
  const at::Tensor loss = sum / static_cast<double>(count);
  loss.backward();
  double square = 0;
  for (const auto& p : parameters.list())
    square += p.value.grad().to(at::kDouble).square().sum().item<double>();
  return {loss.item<double>(), std::sqrt(square)};
}

TEST(Documents, APackedStepIsTheSumOfItsDocumentsAlone) {
  const PackedData data;
  RunConfig config = data.config();
  config.attention.pattern = pattern::PatternKind::kDense;
  config.train.global_batch_size = 2;
  const auto [loss, norm] = plain_documents(config, 2);
  config.train.micro_batch_size = 2;
  const TinyResult one = run_tiny(config, 1, 1);
  EXPECT_NEAR(one.steps[0].loss / loss, 1, 1e-5);
  EXPECT_NEAR(one.steps[0].grad_norm / norm, 1, 1e-4);
  config.train.micro_batch_size = 1;
  const double valid_loss = run_tiny(config, 1, 1).valid_loss;
  for (const auto& [ranks, dp_size] : std::vector<std::pair<int, int>>{{4, 1}, {4, 2}, {2, 2}}) {
    RunConfig split = config;
    split.parallel.dp_size = dp_size;
    split.parallel.cp_inner_size = ranks / dp_size > 2 ? 2 : 1;
    const TinyResult many = run_tiny(split, ranks, 2);
    EXPECT_TRUE(many.ranks_agree);
    for (size_t i = 0; i < one.steps.size(); ++i) {
      EXPECT_NEAR(many.steps[i].loss / one.steps[i].loss, 1, 1e-5) << ranks << " dp " << dp_size;
      EXPECT_NEAR(many.steps[i].grad_norm / one.steps[i].grad_norm, 1, 1e-5);
    }
    EXPECT_NEAR(many.valid_loss / valid_loss, 1, dp_size == 1 ? 1e-5 : 0.2);
  }
  config.data.document_mask = false;
  EXPECT_GT(std::abs(run_tiny(config, 1, 1).steps[0].loss / loss - 1), 1e-4);
}

TEST(Documents, SparseAndReplayedOverEverySplitIsOneRun) {
  const PackedData data;
  RunConfig config = data.config();
  config.train.global_batch_size = 2;
  const TinyResult one = run_tiny(config, 1, 1);
  EXPECT_LT(one.steps[0].attention_density, 0.95);
  RunConfig split = config;
  split.parallel.cp_inner_size = 2;
  const TinyResult replayed = run_tiny(split, 4, 2, &one.indices);
  const TinyResult online = run_tiny(split, 4, 2);
  for (size_t i = 0; i < one.steps.size(); ++i) {
    EXPECT_NEAR(replayed.steps[i].loss / one.steps[i].loss, 1, 1e-5);
    EXPECT_NEAR(online.steps[i].loss / one.steps[i].loss, 1, 1e-3);
  }
  EXPECT_NEAR(online.valid_loss / one.valid_loss, 1, 1e-3);
}

TEST(Documents, RanksOfAGroupThatReadOtherTokensAllSaySo) {
  const PackedData data;
  const TinyData other;
  RunConfig config = data.config();
  config.data.document_mask = false;
  topology::LaunchEnvironment launch;
  launch.world_size = 4;
  launch.local_world_size = 4;
  config.parallel.dp_size = 2;
  config.train.global_batch_size = 2;
  const ResolvedRun resolved = resolve(config, launch);
  std::mutex mutex;
  std::set<std::string> said;
  int threw = 0;
  comm::run_loopback(4, [&](comm::Transport& transport) {
    at::set_num_threads(1);
    set_num_threads(1);
    RunConfig mine = config;
    if (transport.rank() == 3) mine.data.train = {{other.prefix(), 1.0}};
    Trainer trainer(mine, resolved, transport);
    try {
      trainer.step(0);
    } catch (const InvalidArgument& error) {
      const std::lock_guard lock(mutex);
      ++threw;
      said.insert(error.what());
    }
  });
  EXPECT_EQ(threw, 4);
  ASSERT_EQ(said.size(), 1u);
  EXPECT_NE(said.begin()->find("train_step 1: ranks 2 and 3"), std::string::npos) << *said.begin();
}

}  // namespace
}  // namespace mtraining::train
