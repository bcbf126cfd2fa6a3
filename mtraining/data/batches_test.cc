#include "mtraining/data/batches.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <map>
#include <set>

#include "mtraining/base/check.h"

namespace mtraining::data {
namespace {

class BatchesTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() /
              concat("mt_batches_", ::getpid(), "_",
                     ::testing::UnitTest::GetInstance()->current_test_info()->name());
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  /// Tokens first, first + 1, ..
  std::string counting(const std::string& name, int64_t tokens, int64_t first = 0) const {
    const std::string prefix = (folder_ / name).string();
    TokenFileWriter writer(prefix, TokenType::kInt32);
    std::vector<int64_t> ids(tokens);
    for (int64_t i = 0; i < tokens; ++i) ids[i] = first + i;
    writer.add_sequence(ids);
    writer.finish();
    return prefix;
  }
  BatchOptions options(const std::string& path, int64_t seq_len) const {
    BatchOptions o;
    o.sources = {{path, 1.0}};
    o.seq_len = seq_len;
    o.vocab_size = 1 << 20;
    o.shuffle_seed = 5;
    return o;
  }
  std::filesystem::path folder_;
};

TEST_F(BatchesTest, EveryTokenButTheFirstIsALabelOnceAPass) {
  for (const int64_t seq_len : {1, 7, 64, 99}) {
    for (const int64_t tokens : {seq_len + 1, 5 * seq_len + 1, 5 * seq_len + 2, 100 * seq_len}) {
      const Batches batches(options(counting("t", tokens), seq_len));
      const int64_t samples = batches.num_samples(0);
      EXPECT_EQ(samples, (tokens - 1) / seq_len);
      for (int64_t epoch = 0; epoch < 2; ++epoch) {
        std::set<int64_t> labels;
        for (int64_t k = 0; k < samples; ++k) {
          const auto sample = batches.sample(epoch * samples + k);
          for (size_t i = 0; i < sample.ids.size(); ++i) {
            ASSERT_EQ(sample.labels[i], sample.ids[i] + 1);
            ASSERT_TRUE(labels.insert(sample.labels[i]).second);
          }
        }
        EXPECT_EQ(static_cast<int64_t>(labels.size()), samples * seq_len);
        EXPECT_EQ(*labels.begin(), 1);
      }
    }
  }
}

TEST_F(BatchesTest, OrderFollowsTheSeedAndChangesEveryPass) {
  const std::string path = counting("t", 641);
  const Batches a(options(path, 10)), same(options(path, 10));
  BatchOptions other_seed = options(path, 10);
  other_seed.shuffle_seed = 6;
  const Batches b(other_seed);
  int equal_seed = 0, equal_pass = 0, in_order = 0;
  for (int64_t k = 0; k < 64; ++k) {
    EXPECT_EQ(a.sample_ref(k).sample, same.sample_ref(k).sample);
    equal_seed += a.sample_ref(k).sample == b.sample_ref(k).sample;
    equal_pass += a.sample_ref(k).sample == a.sample_ref(k + 64).sample;
    in_order += a.sample_ref(k).sample == k;
  }
  EXPECT_LT(equal_seed, 10);
  EXPECT_LT(equal_pass, 10);
  EXPECT_LT(in_order, 10);
}

TEST_F(BatchesTest, ShardsOfEveryLayoutJoinToTheSample) {
  using layout::LayoutKind;
  const int64_t seq_len = 700;  // divides nothing
  const Batches batches(options(counting("t", 5000), seq_len));
  const auto whole = batches.sample(0);
  for (const auto kind : {LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kStriped,
                          LayoutKind::kBlockStriped}) {
    for (const int cp_size : {1, 2, 3, 4}) {
      const layout::Layout layout({kind, seq_len, cp_size, 64, 1});
      std::map<int64_t, std::pair<int64_t, int64_t>> joined;
      for (int r = 0; r < cp_size; ++r) {
        const Batch batch = batches.batch(0, 0, layout, r);
        ASSERT_EQ(batch.ids.size(1), layout.tokens_per_rank());
        for (int64_t i = 0; i < batch.ids.size(1); ++i) {
          const int64_t position = batch.positions[i].item<int64_t>();
          ASSERT_TRUE(joined
                          .emplace(position, std::pair(batch.ids[0][i].item<int64_t>(),
                                                       batch.labels[0][i].item<int64_t>()))
                          .second);
        }
      }
      ASSERT_EQ(static_cast<int64_t>(joined.size()), layout.padded_len());
      for (const auto& [position, values] : joined) {
        if (position < seq_len) {
          ASSERT_EQ(values.first, whole.ids[position]);
          // Shifted before sharding: the label of a rank's last token is the next rank's first id.
          ASSERT_EQ(values.second, whole.ids[0] + position + 1);
        } else {
          ASSERT_EQ(values.second, kIgnored);
        }
      }
    }
  }
}

TEST_F(BatchesTest, DataParallelRanksShareEachStepsSamplesWithoutOverlap) {
  const std::string path = counting("t", 10 * 400 + 1);
  const layout::Layout layout({layout::LayoutKind::kContiguous, 10, 1, 64, 1});
  BatchOptions one = options(path, 10);
  one.micro_batch = 2;
  one.accumulation = 6;
  const Batches alone(one);
  std::multiset<int64_t> want, got;
  for (int64_t step = 0; step < 3; ++step) {
    for (int64_t m = 0; m < 6; ++m) {
      const auto ids = alone.batch(step, m, layout, 0).ids;
      for (int64_t b = 0; b < 2; ++b) want.insert(step * 100000 + ids[b][0].item<int64_t>());
    }
    for (int d = 0; d < 3; ++d) {
      BatchOptions split = one;
      split.accumulation = 2;
      split.dp_rank = d;
      split.dp_size = 3;
      const Batches part(split);
      for (int64_t m = 0; m < 2; ++m) {
        const auto ids = part.batch(step, m, layout, 0).ids;
        for (int64_t b = 0; b < 2; ++b) got.insert(step * 100000 + ids[b][0].item<int64_t>());
      }
    }
  }
  EXPECT_EQ(want, got);
}

TEST_F(BatchesTest, SourcesAreDrawnInProportionToTheirWeights) {
  BatchOptions o = options(counting("a", 1001), 10);
  o.sources = {{(folder_ / "a").string(), 3.0}, {counting("b", 501, 100000), 1.0}};
  const Batches batches(o);
  int64_t from_b = 0;
  for (int64_t k = 0; k < 400; ++k) {
    const bool b = batches.sample_ref(k).source == 1;
    from_b += b;
    EXPECT_EQ(batches.sample(k).ids[0] >= 100000, b);
    EXPECT_NEAR(static_cast<double>(from_b), 0.25 * static_cast<double>(k + 1), 1.01);
  }
}

TEST_F(BatchesTest, MaskedTokensAreNoLabels) {
  const std::string path = counting("t", 101);
  TokenFileWriter mask(path + "_loss_mask", TokenType::kUInt8);
  std::vector<int64_t> flags(101);
  for (size_t i = 0; i < flags.size(); ++i) flags[i] = i % 3 != 0;
  mask.add_sequence(flags);
  mask.finish();
  const Batches batches(options(path, 10));
  for (int64_t k = 0; k < 10; ++k) {
    const auto sample = batches.sample(k);
    for (size_t i = 0; i < 10; ++i) {
      const int64_t target = sample.ids[i] + 1;
      EXPECT_EQ(sample.labels[i], target % 3 == 0 ? kIgnored : target);
    }
  }
  TokenFileWriter wrong(path + "_loss_mask", TokenType::kUInt8);
  wrong.add_sequence(std::vector<int64_t>(100, 1));
  wrong.finish();
  EXPECT_THROW(Batches(options(path, 10)), InvalidArgument);
}

TEST_F(BatchesTest, ShortDataIsAnErrorThatNamesTheFile) {
  const std::string path = counting("short", 64);
  try {
    Batches batches(options(path, 64));
    FAIL() << "64 tokens are no sample of 64 + 1";
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("short.bin: 64 tokens"), std::string::npos)
        << error.what();
  }
  EXPECT_NO_THROW(Batches(options(path, 63)));
  BatchOptions none = options(path, 63);
  none.sources[0].weight = 0;
  EXPECT_THROW(Batches{none}, InvalidArgument);
  none.sources.clear();
  EXPECT_THROW(Batches{none}, InvalidArgument);
}

}  // namespace
}  // namespace mtraining::data
