// Random and extreme indices and the layouts that index/ is swept over. Only for tests.
//
// In:   a seed and sizes. Out: ragged lists, and layouts with their names. Next: the tests of
//       index/.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "mtraining/index/index.h"
#include "mtraining/layout/layout.h"

namespace mtraining::index::cases {

struct Chosen {
  std::vector<std::vector<int32_t>> diagonals;
  std::vector<std::vector<int32_t>> columns;
};

/// Each value of [0, end) with this probability.
inline std::vector<int32_t> some_of(std::mt19937& random, int64_t end, double probability) {
  std::vector<int32_t> values;
  std::bernoulli_distribution coin(probability);
  for (int64_t v = 0; v < end; ++v) {
    if (coin(random)) values.push_back(static_cast<int32_t>(v));
  }
  return values;
}

/// Six heads: sparse with a band, dense diagonals and many columns, nothing at all, one diagonal,
/// one column, everything.
inline Chosen six_heads(uint32_t seed, int64_t seq_len) {
  std::mt19937 random(seed);
  const int64_t num_blocks = (seq_len + 63) / 64;
  Chosen chosen;
  const auto head = [&](std::vector<int32_t> diagonals, std::vector<int32_t> columns) {
    chosen.diagonals.push_back(std::move(diagonals));
    chosen.columns.push_back(std::move(columns));
  };
  auto band = some_of(random, num_blocks, 0.2);
  band.push_back(0);  // twice where it was drawn: make_index removes it
  head(band, some_of(random, seq_len, 0.03));
  head(some_of(random, num_blocks, 0.7), some_of(random, seq_len, 0.3));
  head({}, {});
  head({static_cast<int32_t>(random() % num_blocks)}, {});
  head({}, {static_cast<int32_t>(random() % seq_len)});
  head(some_of(random, num_blocks, 1), some_of(random, seq_len, 1));
  return chosen;
}

inline Index make_six_heads(uint32_t seed, int64_t seq_len) {
  Chosen chosen = six_heads(seed, seq_len);
  return make_index(2, 3, seq_len, std::move(chosen.diagonals), std::move(chosen.columns));
}

inline std::string name(const layout::Layout& layout) {
  const auto& options = layout.options();
  return std::string(layout::to_string(options.kind)) + " W=" + std::to_string(options.cp_size) +
         " stripe=" + std::to_string(options.stripe) + " nodes=" + std::to_string(options.nodes) +
         " N=" + std::to_string(options.seq_len);
}

/// Every layout with blocks: contiguous, zigzag, block_striped 64, 128, 192 with every number of
/// nodes.
inline std::vector<layout::Layout> layouts(int64_t seq_len,
                                           const std::vector<int>& cp_sizes = {1, 2, 3, 4, 6, 8}) {
  std::vector<layout::Layout> all;
  for (const int cp_size : cp_sizes) {
    all.emplace_back(layout::LayoutOptions{layout::LayoutKind::kContiguous, seq_len, cp_size});
    all.emplace_back(layout::LayoutOptions{layout::LayoutKind::kZigzag, seq_len, cp_size});
    for (const int64_t stripe : {64, 128, 192}) {
      for (int nodes = 1; nodes <= cp_size; ++nodes) {
        if (cp_size % nodes != 0) continue;
        all.emplace_back(layout::LayoutOptions{layout::LayoutKind::kBlockStriped, seq_len, cp_size,
                                               stripe, nodes});
      }
    }
  }
  return all;
}

}  // namespace mtraining::index::cases
