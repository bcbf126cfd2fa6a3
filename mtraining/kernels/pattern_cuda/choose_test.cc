// One launch for a whole choice against the steps one by one, which select_test.cc holds against the host: bit for bit.
#include "mtraining/kernels/pattern_cuda/choose.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "mtraining/kernels/pattern_cuda/select.h"
#include "mtraining/kernels/sm90/device_memory.h"
#include "mtraining/testing/gpu.h"
#include "mtraining/testing/random.h"

namespace mtraining::kernels::pattern_cuda {
namespace {

using sm90::DeviceMemory;

/// Peaked like attention's; all equal; few values; zeros; just below and above the edge of a bin; all in one bin but different.
int64_t mass_of(int kind, double u) {
  switch (kind % 6) {
    case 0:
      return static_cast<int64_t>(std::exp2(40 * u * u * u));
    case 1:
      return 12345678901;
    case 2:
      return static_cast<int64_t>(u * 4) * 1000003;
    case 3:
      return 0;
    case 4:
      return (int64_t{1} << 30) - 2 + static_cast<int64_t>(4 * u);
    default:
      return (int64_t{1} << 40) + static_cast<int64_t>(u * 1e9);
  }
}

struct Outputs {
  DeviceMemory diagonals, num_diagonals, columns, num_columns, dense, caps, diagonal_bits,
      column_bits;
  IndexLists lists;
  IndexBits bits;
  Outputs(int64_t rows, int64_t seq_len, int64_t column_capacity)
      : diagonals(rows * ((seq_len + 63) / 64) * 4),
        num_diagonals(rows * 4),
        columns(rows * column_capacity * 4),
        num_columns(rows * 4),
        dense(rows),
        caps(8),
        diagonal_bits(rows * (((seq_len + 63) / 64 + 63) / 64) * 8),
        column_bits(rows * ((seq_len + 31) / 32) * 4) {
    lists = {diagonals.get<int32_t>(),   num_diagonals.get<int32_t>(), columns.get<int32_t>(),
             num_columns.get<int32_t>(), (seq_len + 63) / 64,          column_capacity};
    bits = {diagonal_bits.get<uint64_t>(), column_bits.get<uint32_t>()};
  }
};

TEST(Choose, EqualsTheStepsOneByOne) {
  MT_NEEDS_GPU();
  for (const int64_t seq_len : {1, 64, 130, 1000, 9000, 70000}) {
    const int64_t batch = 2, heads = 6, rows = batch * heads;
    const int64_t num_blocks = (seq_len + 63) / 64, words = (seq_len + 31) / 32;
    testing::Random random(seq_len);
    std::vector<int32_t> documents(batch * seq_len), starts(num_blocks);
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t i = 0; i < seq_len; ++i)
        documents[b * seq_len + i] = static_cast<int32_t>(i / (700 + 30 * b) * (700 + 30 * b));
    for (int64_t block = 0; block < num_blocks; ++block)
      starts[block] = static_cast<int32_t>(block * 64);
    const DeviceMemory device_documents(documents), block_starts(starts);
    for (const int64_t shared : {1, 3, 6}) {
      const int64_t choices = rows / shared;
      std::vector<int64_t> by_key, by_diagonal, totals(choices, 0);
      for (int64_t c = 0; c < choices; ++c) {
        for (int64_t j = 0; j < seq_len; ++j) {
          by_key.push_back(mass_of(static_cast<int>(c + shared), random.uniform()));
          totals[c] += by_key.back();
        }
        if ((c + shared) % 6 ==
            4) {  // one key holds .3, the others .7 of the mean: many of them are needed
          totals[c] -= by_key[c * seq_len];
          by_key[c * seq_len] = totals[c] / 7 * 3;
          totals[c] += by_key[c * seq_len];
        }
        for (int64_t d = 0; d <= num_blocks; ++d)
          by_diagonal.push_back(mass_of(static_cast<int>(c + 2 * shared), random.uniform()));
      }
      const DeviceMemory key_masses(by_key), diagonal_masses(by_diagonal), sums(totals);
      int variant = 0;
      for (const double p : {0.0, 0.4, 0.9, 0.999999, 1.0}) {
        for (const int64_t cap : {int64_t{-1}, int64_t{0}, int64_t{17}, seq_len}) {
          ++variant;
          const bool with_documents = variant % 3 == 0, with_totals = variant % 2 == 0;
          const int64_t capacity = variant % 4 == 3 ? std::min<int64_t>(seq_len, 40) : seq_len;
          ChoiceParams choice = {
              .batch = batch,
              .num_q_heads = heads,
              .seq_len = seq_len,
              .heads_per_choice = shared,
              .diagonal_masses = diagonal_masses.get<int64_t>(),
              .p_slash = p,
              .max_diagonals = cap,
              .local_blocks = 2,
              .sink_tokens = 5,
              .document_start = with_documents ? device_documents.get<int32_t>() : nullptr,
              .dense_threshold = variant % 5 == 0 ? 1.0 : 0.6};
          SCOPED_TRACE("seq_len " + std::to_string(seq_len) + ", shared " + std::to_string(shared) +
                       ", p " + std::to_string(p) + ", cap " + std::to_string(cap) + ", totals " +
                       std::to_string(with_totals));
          const Outputs got(rows, seq_len, capacity), want(rows, seq_len, capacity);
          const DeviceMemory workspace(choose_workspace_bytes(choices, seq_len, seq_len));
          choose({.choice = choice,
                  .num_keys = seq_len,
                  .column_masses = key_masses.get<int64_t>(),
                  .totals = with_totals ? sums.get<int64_t>() : nullptr,
                  .block_starts = block_starts.get<int32_t>(),
                  .p_vertical = p,
                  .max_columns = cap,
                  .workspace = workspace.get()},
                 got.lists, got.bits, got.dense.get<uint8_t>(), got.caps.get<int64_t>());

          const DeviceMemory bits(choices * words * 4), cut(choices * 4),
              selection(KeySelection::workspace_bytes(choices, seq_len));
          KeySelection keys({.rows = choices,
                             .num_keys = seq_len,
                             .seq_len = seq_len,
                             .masses = key_masses.get<int64_t>(),
                             .block_starts = block_starts.get<int32_t>(),
                             .p = p,
                             .cap = cap,
                             .bits = bits.get<uint32_t>(),
                             .cut = cut.get<int32_t>(),
                             .workspace = selection.get()});
          keys.begin();
          keys.finish();
          choice.column_bits = bits.get<uint32_t>();
          choice.columns_cut = cut.get<int32_t>();
          write_choice(choice, want.lists, want.bits, want.dense.get<uint8_t>(),
                       want.caps.get<int64_t>());
          ASSERT_EQ(got.num_diagonals.read<int32_t>(), want.num_diagonals.read<int32_t>());
          ASSERT_EQ(got.diagonals.read<int32_t>(), want.diagonals.read<int32_t>());
          ASSERT_EQ(got.num_columns.read<int32_t>(), want.num_columns.read<int32_t>());
          ASSERT_EQ(got.columns.read<int32_t>(), want.columns.read<int32_t>());
          ASSERT_EQ(got.column_bits.read<uint32_t>(), want.column_bits.read<uint32_t>());
          ASSERT_EQ(got.diagonal_bits.read<uint64_t>(), want.diagonal_bits.read<uint64_t>());
          ASSERT_EQ(got.dense.read<uint8_t>(), want.dense.read<uint8_t>());
          ASSERT_EQ(got.caps.read<int64_t>(), want.caps.read<int64_t>());
        }
      }
    }
  }
}

}  // namespace
}  // namespace mtraining::kernels::pattern_cuda
