// Documents: ways to cut a packed sequence, as document_start per token.
//
// In:   a kind, batch and seq_len. Out: int32 [B, S], the position at which each token's document starts.
// Next: tests sweep over the kinds.
#pragma once

#include <cstdint>
#include <vector>

namespace mtraining::testing {

enum class Documents {
  kOne,         ///< empty vector: a single document
  kAtZero,      ///< an array, but one document that starts at 0
  kMidBlock,    ///< bounds inside 64-token blocks, another cut per sample
  kOnBlock,     ///< bounds on multiples of 64
  kEveryToken,  ///< each token its own document
};
inline constexpr Documents kAllDocuments[] = {Documents::kOne, Documents::kAtZero,
                                              Documents::kMidBlock, Documents::kOnBlock,
                                              Documents::kEveryToken};

std::vector<int32_t> make_document_starts(Documents kind, int64_t batch, int64_t seq_len);

}  // namespace mtraining::testing
