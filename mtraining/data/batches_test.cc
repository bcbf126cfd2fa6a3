#include "mtraining/data/batches.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <tuple>

#include "mtraining/base/check.h"
#include "mtraining/testing/scratch_folder.h"

namespace mtraining::data {
namespace {

class BatchesTest : public ::testing::Test {
 protected:
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
  testing::ScratchFolder folder_;
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

/// Token i of the stream is i; documents of the given lengths, each cut into sequences of at most `longest` tokens.
std::string with_documents(const std::filesystem::path& prefix, const std::vector<int64_t>& lengths,
                           int64_t longest = 1 << 30) {
  TokenFileWriter writer(prefix, TokenType::kInt32);
  int64_t next = 0;
  for (int64_t left : lengths) {
    while (left > 0) {
      std::vector<int64_t> ids(std::min(left, longest));
      for (int64_t& id : ids) id = next++;
      left -= static_cast<int64_t>(ids.size());
      writer.add_sequence(ids);
    }
    writer.end_document();
  }
  writer.finish();
  return prefix.string();
}

TEST_F(BatchesTest, PackedDocumentsLoseNothingButWhatIsReported) {
  // Shorter and longer than a sample, ends on and off a sample's end, single tokens.
  const std::vector<std::vector<int64_t>> files = {{5, 30, 1, 1, 64, 27, 100, 3},
                                                   {40},
                                                   {20, 20, 20},
                                                   {1, 1, 1, 1, 1, 1, 1, 1, 1, 1},
                                                   {19, 1, 21}};
  for (const int64_t seq_len : {1, 4, 10, 20}) {
    for (size_t f = 0; f < files.size(); ++f) {
      int64_t tokens = 0;
      std::set<int64_t> ends;  // last token of each document
      std::vector<int64_t> document(1000);
      for (const int64_t length : files[f]) {
        for (int64_t i = 0; i < length; ++i) document[tokens + i] = tokens;
        tokens += length;
        ends.insert(tokens - 1);
      }
      if (tokens < seq_len) continue;
      BatchOptions o = options(with_documents(folder_ / concat("d", f), files[f], 7), seq_len);
      o.document_mask = true;
      const Batches batches(o);
      const PassCount count = batches.pass_counts()[0];
      EXPECT_EQ(count.tokens, tokens);
      EXPECT_EQ(count.in_samples + count.dropped, tokens);
      EXPECT_LT(count.dropped, seq_len);
      std::set<int64_t> seen;
      int64_t labels = 0;
      for (int64_t k = 0; k < batches.num_samples(0); ++k) {
        const auto sample = batches.sample(k);
        for (int64_t i = 0; i < seq_len; ++i) {
          const int64_t id = sample.ids[i];
          ASSERT_TRUE(seen.insert(id).second);
          ASSERT_EQ(sample.labels[i], ends.contains(id) ? kIgnored : id + 1);
          labels += sample.labels[i] != kIgnored;
          // The first token of the sample that is of the same document.
          ASSERT_EQ(sample.ids[sample.document_starts[i]], std::max(document[id], sample.ids[0]));
        }
      }
      EXPECT_EQ(static_cast<int64_t>(seen.size()), count.in_samples);
      EXPECT_EQ(labels, count.labels);
    }
  }
}

TEST_F(BatchesTest, EveryRankKnowsTheDocumentsAndPositionsRestartInEach) {
  const int64_t seq_len = 150;
  BatchOptions o = options(with_documents(folder_ / "d", {70, 10, 200, 1, 19, 300}), seq_len);
  o.document_mask = true;
  o.micro_batch = 2;
  const Batches batches(o);
  for (const auto kind : {layout::LayoutKind::kContiguous, layout::LayoutKind::kZigzag,
                          layout::LayoutKind::kBlockStriped}) {
    for (const int cp_size : {1, 2, 3}) {
      const layout::Layout layout({kind, seq_len, cp_size, 64, 1});
      uint64_t digest = 0;
      for (int r = 0; r < cp_size; ++r) {
        const Batch batch = batches.batch(0, 0, layout, r);
        if (r == 0) digest = batch.digest;
        EXPECT_EQ(batch.digest, digest);
        ASSERT_EQ(batch.document_starts.sizes(), at::IntArrayRef({2, seq_len}));
        EXPECT_TRUE(batch.rope_positions().equal(batch.document_positions));
        for (int64_t b = 0; b < 2; ++b) {
          const auto whole = batches.sample(b);
          for (int64_t i = 0; i < seq_len; ++i)
            ASSERT_EQ(batch.document_starts[b][i].item<int32_t>(), whole.document_starts[i]);
          for (int64_t i = 0; i < layout.tokens_per_rank(); ++i) {
            const int64_t position = batch.positions[i].item<int64_t>();
            if (position >= seq_len) continue;
            ASSERT_EQ(batch.document_positions[b][i].item<int64_t>(),
                      position - whole.document_starts[position]);
          }
        }
      }
      EXPECT_NE(batches.batch(1, 0, layout, 0).digest, digest);
    }
  }
  o.document_mask = false;
  const layout::Layout layout({layout::LayoutKind::kContiguous, seq_len, 1, 64, 1});
  EXPECT_FALSE(Batches(o).batch(0, 0, layout, 0).document_starts.defined());
}

TEST_F(BatchesTest, ARunThatGoesOnWithAnotherDpSizeTakesEachRemainingSampleOnce) {
  const int64_t per_step = 24;
  for (const int64_t old_batch : {1, 2}) {
    for (const int old_dp : {1, 2, 4}) {
      for (const int new_dp : {1, 2, 3, 4, 6}) {
        for (int64_t micro_done = 0; micro_done < per_step / (old_batch * old_dp); ++micro_done) {
          std::vector<int> taken(3 * per_step, 0);
          const auto take = [&](int64_t step, int64_t from, int64_t to, int64_t batch, int dp) {
            for (int64_t m = from; m < to; ++m)
              for (int d = 0; d < dp; ++d)
                for (int64_t b = 0; b < batch; ++b)
                  ++taken.at(first_sample(step, per_step, m, batch, d, dp) + b);
          };
          take(0, 0, per_step / (old_batch * old_dp), old_batch, old_dp);
          take(1, 0, micro_done, old_batch, old_dp);
          const int64_t done = micro_done * old_batch * old_dp;
          if (done % new_dp != 0) continue;  // no beginning of a micro-step: the step begins anew
          take(1, done / new_dp, per_step / new_dp, 1, new_dp);
          take(2, 0, per_step / new_dp, 1, new_dp);
          EXPECT_EQ(taken, std::vector<int>(taken.size(), 1))
              << old_dp << " -> " << new_dp << " after " << done;
        }
      }
    }
  }
}

TEST_F(BatchesTest, AMixtureIsTheSameInWhateverOrderItIsAsked) {
  BatchOptions o = options(counting("a", 1001), 10);
  o.sources = {
      {(folder_ / "a").string(), 2.0}, {counting("b", 501), 1.0}, {counting("c", 91), 0.3}};
  const Batches ascending(o), any(o);
  std::vector<SampleRef> refs;
  for (int64_t k = 0; k < 300; ++k) refs.push_back(ascending.sample_ref(k));
  for (const int64_t k : {299, 0, 150, 149, 151, 7, 298, 298}) {
    const SampleRef ref = any.sample_ref(k);
    EXPECT_EQ(std::tuple(ref.source, ref.sample, ref.epoch),
              std::tuple(refs[k].source, refs[k].sample, refs[k].epoch));
  }
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
