// Batches: cuts samples of seq_len + 1 tokens out of token files, in a seeded order, and gives each rank its shard.
//
// In:   weighted token files, seq_len, a layout, the rank's place (dp_rank, cp_rank). Out: Batch (tensors of this rank's shard).
// Next: model/ takes ids and positions, train/ the labels.
//
// A file is one stream of tokens; sample i of it is tokens [i * seq_len, (i + 1) * seq_len), whatever the lengths of its
// sequences and documents: packed without loss, the rest at the end is dropped and reported (PassCount). Labels are shifted
// before the layout is applied, and the layout is applied once, alike to ids, labels and positions. All ranks of a
// context-parallel group get the same sample: which one is a pure function of (seed, step, micro_step, dp_rank, dp_size).
//
// Without document_mask the stream is one text: each token but the first is a label once a pass. With it a sample is a row of
// documents (those of the file's document index; one that a sample's end cuts goes on in the next sample as a document of its
// own): rows see their own document only, RoPE's positions restart with it, and no label crosses its end.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "mtraining/data/token_file.h"
#include "mtraining/layout/layout.h"

namespace mtraining::data {

/// Label of a position that has none (padding, masked tokens).
inline constexpr int64_t kIgnored = -100;

struct Source {
  std::string path;   ///< prefix of a token file
  double weight = 1;  ///< relative share of samples
};

struct BatchOptions {
  std::vector<Source> sources;
  int64_t seq_len = 0;
  int64_t vocab_size = 0;
  uint64_t shuffle_seed = 0;
  bool document_mask = false;
  bool shuffle = true;      ///< false: samples in file order, sources one after the other by weight
  int64_t micro_batch = 1;  ///< samples of one forward on one context-parallel group
  int64_t accumulation = 1;
  int dp_rank = 0, dp_size = 1;
};

/// One rank's part of `micro_batch` samples. n = layout.tokens_per_rank().
struct Batch {
  at::Tensor ids;        ///< [B, n] int64; padding holds id 0
  at::Tensor labels;     ///< [B, n] int64, kIgnored where there is nothing to predict
  at::Tensor positions;  ///< [n] int64 positions in the sequence, padding included
  /// With document_mask, else undefined:
  at::Tensor document_positions;  ///< [B, n] int64 positions in the token's document, for RoPE
  at::Tensor document_starts;     ///< [B, seq_len] int32 of the whole samples, on every rank
  uint64_t digest = 0;  ///< of the whole samples: equal on the ranks of a context-parallel group

  /// What RoPE takes: document_positions where there are documents, else positions.
  const at::Tensor& rope_positions() const {
    return document_positions.defined() ? document_positions : positions;
  }
};

/// Where the tokens of one pass over a source go: tokens = in_samples + dropped.
struct PassCount {
  std::string path;
  int64_t tokens = 0;      ///< of the file
  int64_t in_samples = 0;  ///< in whole samples
  int64_t labels =
      0;  ///< of in_samples, those that something is predicted at (a loss mask may take more)
  int64_t dropped = 0;  ///< at the file's end, too few for a sample
};

/// The number, from the run's beginning, of the first sample of a micro-step; `micro_batch` samples follow one another. Nothing but
/// these numbers decides it: samples [step * samples_per_step, (step + 1) * samples_per_step) make a train step for every
/// dp_size, so that a run that goes on with another dp_size takes each remaining sample exactly once.
int64_t first_sample(int64_t step, int64_t samples_per_step, int64_t micro_step,
                     int64_t micro_batch, int dp_rank, int dp_size);

/// Which sample of which source is the k-th of the run.
struct SampleRef {
  int64_t source = 0;
  int64_t sample = 0;
  int64_t epoch = 0;
};

class Batches {
 public:
  /// Errors: InvalidArgument naming file and key: a file too short for one sample, weights not positive, no sources, a
  /// loss mask of another length than its tokens.
  explicit Batches(const BatchOptions& options);

  int64_t samples_per_step() const {
    return options_.micro_batch * options_.accumulation * options_.dp_size;
  }
  /// Samples of one pass over source s.
  int64_t num_samples(int64_t s) const { return sources_[s].samples; }
  std::vector<PassCount> pass_counts() const;
  /// Cost with several sources: O(k) once, O(1) for ascending k. One thread.
  SampleRef sample_ref(int64_t k) const;

  /// Before any layout. Labels are shifted; those masked or of another document are kIgnored.
  struct Sample {
    std::vector<int64_t> ids;              ///< [seq_len]
    std::vector<int64_t> labels;           ///< [seq_len]
    std::vector<int32_t> document_starts;  ///< [seq_len] with document_mask, else empty
  };
  Sample sample(int64_t k) const;

  /// step and micro_step 0-based.
  Batch batch(int64_t step, int64_t micro_step, const layout::Layout& layout, int cp_rank) const;

 private:
  struct OpenSource {
    std::unique_ptr<TokenFile> tokens;
    std::unique_ptr<TokenFile> loss_mask;  ///< null where there is none
    double share = 1;
    int64_t samples = 0;
  };
  /// Which source sample k comes from, and how many samples it has given before.
  std::pair<int64_t, int64_t> turn_of(int64_t k) const;

  BatchOptions options_;
  std::vector<OpenSource> sources_;
  mutable int64_t counted_ = 0;  ///< samples that given_ counts; a memory of turn_of(), no state
  mutable std::vector<int64_t> given_;
};

}  // namespace mtraining::data
