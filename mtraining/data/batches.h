// Batches: cuts samples of seq_len + 1 tokens out of token files, in a seeded order, and gives each rank its shard.
//
// In:   weighted token files, seq_len, a layout, the rank's place (dp_rank, cp_rank). Out: Batch (tensors of this rank's shard).
// Next: model/ takes ids and positions, train/ the labels.
//
// Sample i of a source is tokens [i * seq_len, i * seq_len + seq_len], so that each token is predicted once a pass. Labels are
// shifted before the layout is applied, and the layout is applied once, alike to ids, labels and positions. All ranks of
// a context-parallel group get the same sample: which one is a pure function of (seed, step, micro_step, dp_rank).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
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
};

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
  SampleRef sample_ref(int64_t k) const;

  /// seq_len + 1 ids, and seq_len labels (shifted; masked ones kIgnored), before any layout.
  struct Sample {
    std::vector<int64_t> ids;     ///< [seq_len]
    std::vector<int64_t> labels;  ///< [seq_len]
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
  BatchOptions options_;
  std::vector<OpenSource> sources_;
};

}  // namespace mtraining::data
