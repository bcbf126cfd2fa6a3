#include "mtraining/testing/documents.h"

namespace mtraining::testing {

std::vector<int32_t> make_document_starts(Documents kind, int64_t batch, int64_t seq_len) {
  if (kind == Documents::kOne) return {};
  std::vector<int32_t> starts(batch * seq_len, 0);
  for (int64_t b = 0; b < batch; ++b) {
    int32_t start = 0;
    for (int64_t i = 0; i < seq_len; ++i) {
      bool begins = i == 0;
      if (kind == Documents::kEveryToken) begins = true;
      if (kind == Documents::kOnBlock) begins = begins || i % 192 == 64 * (b % 3);
      // 150 and 37 share no period with 64: the cut falls on a different place of the block each time.
      if (kind == Documents::kMidBlock) begins = begins || i % 150 == 37 + b % 3;
      if (begins) start = static_cast<int32_t>(i);
      starts[b * seq_len + i] = start;
    }
  }
  return starts;
}

}  // namespace mtraining::testing
