#include "mtraining/data/batches.h"

#include <ATen/ATen.h>

#include <cmath>
#include <filesystem>

#include "mtraining/base/check.h"
#include "mtraining/base/rng.h"

namespace mtraining::data {
namespace {

/// A permutation of [0, count) without storing it: a four-round Feistel network over the next even power of two, walked until
/// it lands inside. Any sample of any epoch is found in O(1), so that a run can resume anywhere.
int64_t permuted(int64_t i, int64_t count, uint64_t seed, uint64_t stream) {
  int half_bits = 1;
  while ((int64_t{1} << (2 * half_bits)) < count) ++half_bits;
  const uint64_t mask = (uint64_t{1} << half_bits) - 1;
  auto x = static_cast<uint64_t>(i);
  do {
    uint64_t left = x >> half_bits, right = x & mask;
    for (uint64_t round = 0; round < 4; ++round) {
      const uint64_t mixed = Rng(seed, stream * 4 + round).bits(right) & mask;
      const uint64_t next = left ^ mixed;
      left = right;
      right = next;
    }
    x = (left << half_bits) | right;
  } while (x >= static_cast<uint64_t>(count));
  return static_cast<int64_t>(x);
}

}  // namespace

Batches::Batches(const BatchOptions& options) : options_(options) {
  MT_CHECK_ARG(!options.sources.empty(),
               "data.train: expected at least one {path, weight}, got none");
  MT_CHECK_ARG(options.seq_len >= 1, "train.seq_len: expected at least 1, got ", options.seq_len);
  double total = 0;
  for (const Source& source : options.sources) {
    MT_CHECK_ARG(source.weight > 0 && std::isfinite(source.weight), "data: weight of ", source.path,
                 ": expected a positive number, got ", source.weight);
    total += source.weight;
  }
  for (const Source& source : options.sources) {
    OpenSource open;
    open.tokens = std::make_unique<TokenFile>(source.path, options.vocab_size);
    const int64_t tokens = open.tokens->num_tokens();
    MT_CHECK_ARG(tokens >= options.seq_len + 1, source.path, ".bin: ", tokens,
                 " tokens are too few for one sample of train.seq_len + 1 = ", options.seq_len + 1);
    open.samples = (tokens - 1) / options.seq_len;
    open.share = source.weight / total;
    const std::string mask = source.path + "_loss_mask";
    if (std::filesystem::exists(mask + ".idx")) {
      open.loss_mask = std::make_unique<TokenFile>(mask, 2);
      MT_CHECK_ARG(open.loss_mask->num_tokens() == tokens, mask, ".bin: has ",
                   open.loss_mask->num_tokens(), " entries for ", tokens, " tokens");
    }
    sources_.push_back(std::move(open));
  }
}

SampleRef Batches::sample_ref(int64_t k) const {
  SampleRef ref;
  int64_t turn = k;  // how many samples the chosen source has given before
  if (sources_.size() > 1) {
    // The source that is furthest behind its share comes next; ties go to the first. Counts follow from k alone.
    std::vector<int64_t> given(sources_.size(), 0);
    for (int64_t i = 0; i <= k; ++i) {
      double most = -1e300;
      for (size_t s = 0; s < sources_.size(); ++s) {
        const double behind =
            sources_[s].share * static_cast<double>(i + 1) - static_cast<double>(given[s]);
        if (behind > most + 1e-9) {
          most = behind;
          ref.source = static_cast<int64_t>(s);
        }
      }
      turn = given[ref.source]++;
    }
  }
  const int64_t count = sources_[ref.source].samples;
  ref.epoch = turn / count;
  ref.sample = turn % count;
  if (options_.shuffle && count > 1) {
    ref.sample = permuted(ref.sample, count, options_.shuffle_seed,
                          static_cast<uint64_t>(ref.epoch) * sources_.size() + ref.source);
  }
  return ref;
}

Batches::Sample Batches::sample(int64_t k) const {
  const SampleRef ref = sample_ref(k);
  const OpenSource& source = sources_[ref.source];
  std::vector<int64_t> ids(options_.seq_len + 1);
  source.tokens->read(ref.sample * options_.seq_len, ids);
  Sample sample;
  sample.labels.assign(ids.begin() + 1, ids.end());
  if (source.loss_mask) {
    std::vector<int64_t> mask(options_.seq_len);
    source.loss_mask->read(ref.sample * options_.seq_len + 1, mask);
    for (int64_t i = 0; i < options_.seq_len; ++i) {
      if (mask[i] == 0) sample.labels[i] = kIgnored;
    }
  }
  ids.pop_back();
  sample.ids = std::move(ids);
  return sample;
}

Batch Batches::batch(int64_t step, int64_t micro_step, const layout::Layout& layout,
                     int cp_rank) const {
  MT_ASSERT(layout.seq_len() == options_.seq_len, "layout of ", layout.seq_len(),
            " tokens, samples of ", options_.seq_len);
  const std::vector<int64_t> positions = layout.positions(cp_rank);
  const auto n = static_cast<int64_t>(positions.size());
  Batch batch;
  batch.ids = at::zeros({options_.micro_batch, n}, at::kLong);
  batch.labels = at::full({options_.micro_batch, n}, kIgnored, at::kLong);
  batch.positions = at::empty({n}, at::kLong);
  std::copy(positions.begin(), positions.end(), batch.positions.data_ptr<int64_t>());
  for (int64_t b = 0; b < options_.micro_batch; ++b) {
    const int64_t k = step * samples_per_step() +
                      (micro_step * options_.dp_size + options_.dp_rank) * options_.micro_batch + b;
    const Sample whole = sample(k);
    int64_t* ids = batch.ids.data_ptr<int64_t>() + b * n;
    int64_t* labels = batch.labels.data_ptr<int64_t>() + b * n;
    for (int64_t i = 0; i < n; ++i) {
      if (positions[i] >= options_.seq_len) continue;
      ids[i] = whole.ids[positions[i]];
      labels[i] = whole.labels[positions[i]];
    }
  }
  return batch;
}

}  // namespace mtraining::data
