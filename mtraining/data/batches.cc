#include "mtraining/data/batches.h"

#include <ATen/ATen.h>

#include <algorithm>
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

class Digest {
 public:
  void add(int64_t value) {
    value_ = (value_ ^ static_cast<uint64_t>(value)) * 0x100000001b3u;
    value_ ^= value_ >> 29;
  }
  uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 0xcbf29ce484222325u;
};

}  // namespace

int64_t first_sample(int64_t step, int64_t samples_per_step, int64_t micro_step,
                     int64_t micro_batch, int dp_rank, int dp_size) {
  return step * samples_per_step + (micro_step * dp_size + dp_rank) * micro_batch;
}

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
    // A text's last token is a label only; a document's last token has none, and is a query all the same.
    const int64_t beyond = options.document_mask ? 0 : 1;
    MT_CHECK_ARG(tokens >= options.seq_len + beyond, source.path, ".bin: ", tokens,
                 " tokens are too few for one sample of train.seq_len", beyond > 0 ? " + 1" : "",
                 " = ", options.seq_len + beyond);
    open.samples = (tokens - beyond) / options.seq_len;
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

std::vector<PassCount> Batches::pass_counts() const {
  std::vector<PassCount> counts;
  for (size_t i = 0; i < sources_.size(); ++i) {
    PassCount count;
    count.path = options_.sources[i].path;
    count.tokens = sources_[i].tokens->num_tokens();
    count.in_samples = sources_[i].samples * options_.seq_len;
    count.dropped = count.tokens - count.in_samples;
    count.labels = count.in_samples;
    if (options_.document_mask) {
      const std::vector<int64_t>& starts = sources_[i].tokens->document_starts();
      for (size_t d = 0; d + 1 < starts.size(); ++d)  // a document's last token has no label
        count.labels -= starts[d] < starts[d + 1] && starts[d + 1] <= count.in_samples;
    }
    counts.push_back(std::move(count));
  }
  return counts;
}

std::pair<int64_t, int64_t> Batches::turn_of(int64_t k) const {
  if (sources_.size() == 1) return {0, k};
  if (given_.empty() || k < counted_) {
    counted_ = 0;
    given_.assign(sources_.size(), 0);
  }
  // The source that is furthest behind its share comes next; ties go to the first. Counts follow from k alone.
  for (;; ++counted_) {
    size_t next = 0;
    double most = -1e300;
    for (size_t s = 0; s < sources_.size(); ++s) {
      const double behind =
          sources_[s].share * static_cast<double>(counted_ + 1) - static_cast<double>(given_[s]);
      if (behind > most + 1e-9) {
        most = behind;
        next = s;
      }
    }
    if (counted_ == k) return {static_cast<int64_t>(next), given_[next]};
    ++given_[next];
  }
}

SampleRef Batches::sample_ref(int64_t k) const {
  SampleRef ref;
  const auto [source, turn] = turn_of(k);
  ref.source = source;
  const int64_t count = sources_[source].samples;
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
  const int64_t length = options_.seq_len, begin = ref.sample * length;
  // Ids of the sample and the one after it, which the file's end may lack.
  std::vector<int64_t> ids(std::min(length + 1, source.tokens->num_tokens() - begin));
  source.tokens->read(begin, ids);
  Sample sample;
  sample.labels.assign(ids.begin() + 1, ids.end());
  sample.labels.resize(length, kIgnored);
  if (source.loss_mask) {
    std::vector<int64_t> mask(ids.size() - 1);
    source.loss_mask->read(begin + 1, mask);
    for (size_t i = 0; i < mask.size(); ++i) {
      if (mask[i] == 0) sample.labels[i] = kIgnored;
    }
  }
  if (options_.document_mask) {
    sample.document_starts.resize(length, 0);
    const std::vector<int64_t>& starts = source.tokens->document_starts();
    for (auto next = std::upper_bound(starts.begin(), starts.end(), begin);
         next != starts.end() && *next <= begin + length; ++next) {
      const int64_t first = *next - begin;  // of the next document
      sample.labels[first - 1] = kIgnored;
      std::fill(sample.document_starts.begin() + first, sample.document_starts.end(),
                static_cast<int32_t>(first));
    }
  }
  ids.resize(length);
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
  if (options_.document_mask) {
    batch.document_positions = batch.positions.expand({options_.micro_batch, n}).contiguous();
    batch.document_starts = at::empty({options_.micro_batch, options_.seq_len}, at::kInt);
  }
  Digest digest;
  const int64_t first = first_sample(step, samples_per_step(), micro_step, options_.micro_batch,
                                     options_.dp_rank, options_.dp_size);
  for (int64_t b = 0; b < options_.micro_batch; ++b) {
    const Sample whole = sample(first + b);
    for (const int64_t id : whole.ids) digest.add(id);
    for (const int64_t label : whole.labels) digest.add(label);
    for (const int32_t start : whole.document_starts) digest.add(start);
    int64_t* ids = batch.ids.data_ptr<int64_t>() + b * n;
    int64_t* labels = batch.labels.data_ptr<int64_t>() + b * n;
    for (int64_t i = 0; i < n; ++i) {
      if (positions[i] >= options_.seq_len) continue;
      ids[i] = whole.ids[positions[i]];
      labels[i] = whole.labels[positions[i]];
    }
    if (!options_.document_mask) continue;
    std::copy(whole.document_starts.begin(), whole.document_starts.end(),
              batch.document_starts.data_ptr<int32_t>() + b * options_.seq_len);
    int64_t* document_positions = batch.document_positions.data_ptr<int64_t>() + b * n;
    for (int64_t i = 0; i < n; ++i) {
      if (positions[i] < options_.seq_len)
        document_positions[i] -= whole.document_starts[positions[i]];
    }
  }
  batch.digest = digest.value();
  return batch;
}

}  // namespace mtraining::data
