// Selection and lists on the device against the host's, on the same integers: bit for bit.
#include "mtraining/kernels/pattern_cuda/select.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "mtraining/index/index.h"
#include "mtraining/index/step_index.h"
#include "mtraining/kernels/pattern_cuda/lists.h"
#include "mtraining/kernels/sm90/device_memory.h"
#include "mtraining/kernels/window.h"
#include "mtraining/layout/layout.h"
#include "mtraining/pattern/pattern.h"
#include "mtraining/pattern/top_p.h"
#include "mtraining/testing/gpu.h"
#include "mtraining/testing/random.h"

namespace mtraining::kernels::pattern_cuda {
namespace {

using sm90::DeviceMemory;

/// Masses of several kinds: like attention's, all equal, few values, zeros, a giant, the largest allowed, ones (a budget between
/// two counts).
std::vector<int64_t> masses_of(int kind, int64_t count, uint64_t seed) {
  testing::Random random(seed);
  std::vector<int64_t> masses(count);
  for (int64_t i = 0; i < count; ++i) {
    const double u = random.uniform();
    switch (kind) {
      case 0:
        masses[i] = static_cast<int64_t>(std::exp2(40 * u * u * u));
        break;
      case 1:
        masses[i] = 12345678901;
        break;
      case 2:
        masses[i] = static_cast<int64_t>(u * 4) * 1000003;
        break;
      case 3:
        masses[i] = 0;
        break;
      case 4:
        masses[i] = i == count / 3 ? int64_t{1} << 46 : static_cast<int64_t>(u * 100);
        break;
      case 5:
        masses[i] = (int64_t{1} << 47) + static_cast<int64_t>(u * 3);
        break;
      default:
        masses[i] = 1;
    }
  }
  return masses;
}
constexpr int kKinds = 7;

std::vector<int32_t> bits_to_list(const std::vector<uint32_t>& words, int64_t row,
                                  int64_t per_row) {
  std::vector<int32_t> list;
  for (int64_t w = 0; w < per_row; ++w)
    for (int b = 0; b < 32; ++b)
      if (words[row * per_row + w] >> b & 1) list.push_back(static_cast<int32_t>(w * 32 + b));
  return list;
}

// With several ranks the steps run by turns and the test adds their numbers up, as an exchange would.
TEST(KeySelection, EqualsTheHostsTopPForEverySplitBudgetAndCap) {
  MT_NEEDS_GPU();
  int cut_rows = 0;
  for (const int64_t seq_len : {1, 63, 64, 65, 700, 9000}) {
    for (const int ranks : {1, 2, 3}) {
      const layout::Layout layout({.seq_len = seq_len, .cp_size = ranks});
      const int64_t n = layout.tokens_per_rank(), words = (seq_len + 31) / 32;
      const int64_t rows = kKinds;
      std::vector<std::vector<int64_t>> whole;
      for (int kind = 0; kind < kKinds; ++kind) whole.push_back(masses_of(kind, seq_len, 7 + kind));
      std::vector<DeviceMemory> masses, starts;
      for (int rank = 0; rank < ranks; ++rank) {
        const std::vector<int64_t> positions = layout.positions(rank);
        std::vector<int64_t> local(rows * n, -1);
        for (int64_t row = 0; row < rows; ++row)
          for (int64_t t = 0; t < n; ++t)
            if (positions[t] < seq_len) local[row * n + t] = whole[row][positions[t]];
        masses.emplace_back(local);
        starts.emplace_back(layout.block_starts(rank));
      }
      for (const double p : {0.0, 0.3, 0.9, 0.999999, 1.0}) {
        for (const int64_t cap : {int64_t{-1}, int64_t{0}, int64_t{1}, int64_t{17}, seq_len}) {
          std::vector<DeviceMemory> bits, cuts, workspaces;
          std::vector<KeySelection> selections;
          for (int rank = 0; rank < ranks; ++rank) {
            bits.emplace_back(rows * words * 4);
            cuts.emplace_back(rows * 4);
            workspaces.emplace_back(KeySelection::workspace_bytes(rows, n));
            selections.emplace_back(SelectionParams{.rows = rows,
                                                    .num_keys = n,
                                                    .seq_len = seq_len,
                                                    .masses = masses[rank].get<int64_t>(),
                                                    .block_starts = starts[rank].get<int32_t>(),
                                                    .p = p,
                                                    .cap = cap,
                                                    .bits = bits[rank].get<uint32_t>(),
                                                    .cut = cuts[rank].get<int32_t>(),
                                                    .workspace = workspaces[rank].get()});
          }
          const auto sum = [&](const std::vector<Summed>& parts) {
            std::vector<int64_t> total(parts[0].count, 0), part(total);
            for (const Summed& s : parts) {
              sm90::check_device(
                  cudaMemcpy(part.data(), s.values, s.count * 8, cudaMemcpyDeviceToHost), "read");
              for (size_t i = 0; i < total.size(); ++i) total[i] += part[i];
            }
            for (const Summed& s : parts)
              sm90::check_device(
                  cudaMemcpy(s.values, total.data(), s.count * 8, cudaMemcpyHostToDevice), "write");
          };
          std::vector<Summed> parts;
          for (KeySelection& s : selections) parts.push_back(s.begin());
          if (ranks == 1) {
            selections[0].finish();
          } else {
            sum(parts);
            for (int round = 0; round < selections[0].rounds(); ++round) {
              parts.clear();
              for (KeySelection& s : selections) parts.push_back(s.round(round));
              sum(parts);
            }
            for (KeySelection& s : selections) s.mark();
          }
          std::vector<uint32_t> united(rows * words, 0);
          for (int rank = 0; rank < ranks; ++rank) {
            const std::vector<uint32_t> own = bits[rank].read<uint32_t>();
            for (size_t w = 0; w < united.size(); ++w) {
              ASSERT_EQ(united[w] & own[w], 0u) << "a position of two ranks";
              united[w] |= own[w];
            }
          }
          for (int64_t row = 0; row < rows; ++row) {
            const std::vector<int32_t> uncapped = pattern::top_p(whole[row], p);
            const bool cut = cap >= 0 && static_cast<int64_t>(uncapped.size()) > cap;
            ASSERT_EQ(bits_to_list(united, row, words), pattern::top_p(whole[row], p, cap))
                << "seq_len " << seq_len << ", " << ranks << " ranks, p " << p << ", cap " << cap
                << ", kind " << row;
            for (int rank = 0; rank < ranks; ++rank)
              ASSERT_EQ(cuts[rank].read<int32_t>()[row], cut)
                  << "seq_len " << seq_len << ", p " << p << ", cap " << cap << ", kind " << row;
            cut_rows += cut;
          }
        }
      }
    }
  }
  EXPECT_GT(cut_rows, 100);
}

struct HostChoice {
  std::vector<std::vector<int32_t>> diagonals, columns;
  std::vector<uint8_t> dense;
  int64_t caps_hit = 0;
};

// Columns are given; diagonals, what is forced, dense heads and lists are the device's.
TEST(WriteChoice, EqualsWhatTheHostMakesOfTheSameMassesAndColumns) {
  MT_NEEDS_GPU();
  int dense_seen = 0, sparse_seen = 0;
  for (const int64_t seq_len : {1, 64, 130, 1000, 4096, 20000}) {
    const int64_t batch = 2, heads = 6, rows = batch * heads;
    const int64_t num_blocks = (seq_len + 63) / 64, words = (seq_len + 31) / 32;
    testing::Random random(seq_len);
    std::vector<int32_t> documents(batch * seq_len, 0);
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t i = 0; i < seq_len; ++i)
        documents[b * seq_len + i] = static_cast<int32_t>(i / (70 + 30 * b) * (70 + 30 * b));
    for (const int64_t shared : {1, 3}) {
      const int64_t choices = rows / shared;
      std::vector<int64_t> masses;
      std::vector<uint32_t> bits(choices * words, 0);
      std::vector<std::vector<int32_t>> chosen(choices);
      for (int64_t c = 0; c < choices; ++c) {
        const std::vector<int64_t> of_choice =
            masses_of(static_cast<int>(c % kKinds), num_blocks + 1, 31 + c);
        masses.insert(masses.end(), of_choice.begin(), of_choice.end());
        const double density = c % 4 == 0 ? 0.0 : c % 4 == 1 ? 0.01 : c % 4 == 2 ? 0.3 : 1.0;
        for (int64_t j = 0; j < seq_len; ++j)
          if (random.uniform() < density) {
            chosen[c].push_back(static_cast<int32_t>(j));
            bits[c * words + j / 32] |= 1u << (j % 32);
          }
      }
      const DeviceMemory device_masses(masses), device_bits(bits), device_documents(documents),
          cut(std::vector<int32_t>(choices, 0));
      for (const double p : {0.0, 0.5, 0.95, 1.0}) {
        for (const int64_t cap : {-1, 0, 3}) {
          for (const double threshold : {0.8, 1.0}) {
            for (const bool with_documents : {false, true}) {
              const int64_t local_blocks = 2, sink_tokens = 5;
              const DeviceMemory diagonals(rows * num_blocks * 4), num_diagonals(rows * 4),
                  columns(rows * seq_len * 4), num_columns(rows * 4), dense_heads(rows),
                  caps_hit(8), diagonal_bits(rows * ((num_blocks + 63) / 64) * 8),
                  column_bits(rows * words * 4), pairs(rows * 8);
              const IndexBits out_bits{diagonal_bits.get<uint64_t>(), column_bits.get<uint32_t>()};
              write_choice(
                  {.batch = batch,
                   .num_q_heads = heads,
                   .seq_len = seq_len,
                   .heads_per_choice = shared,
                   .diagonal_masses = device_masses.get<int64_t>(),
                   .p_slash = p,
                   .max_diagonals = cap,
                   .column_bits = device_bits.get<uint32_t>(),
                   .columns_cut = cut.get<int32_t>(),
                   .local_blocks = local_blocks,
                   .sink_tokens = sink_tokens,
                   .document_start = with_documents ? device_documents.get<int32_t>() : nullptr,
                   .dense_threshold = threshold},
                  {diagonals.get<int32_t>(), num_diagonals.get<int32_t>(), columns.get<int32_t>(),
                   num_columns.get<int32_t>(), num_blocks, seq_len},
                  out_bits, dense_heads.get<uint8_t>(), caps_hit.get<int64_t>());
              count_pairs(out_bits, rows, seq_len, pairs.get<int64_t>(), nullptr);

              HostChoice want;
              for (int64_t row = 0; row < rows; ++row) {
                const int64_t c = row / shared, b = row / heads;
                const std::span<const int64_t> pooled(&masses[c * (num_blocks + 1)], num_blocks);
                std::vector<int32_t> d = pattern::top_p(pooled, p, cap);
                want.caps_hit +=
                    cap >= 0 && static_cast<int64_t>(pattern::top_p(pooled, p).size()) > cap;
                for (int64_t f = 0; f < std::min(local_blocks, num_blocks); ++f)
                  d.push_back(static_cast<int32_t>(f));
                std::vector<int32_t> k = chosen[c];
                for (int64_t j = 0; j < seq_len; ++j)
                  if (j - (with_documents ? documents[b * seq_len + j] : 0) < sink_tokens)
                    k.push_back(static_cast<int32_t>(j));
                want.diagonals.push_back(d);
                want.columns.push_back(k);
              }
              index::Index index =
                  index::make_index(batch, heads, seq_len, want.diagonals, want.columns);
              want.dense.assign(rows, 0);
              for (int64_t row = 0; row < rows; ++row) {
                std::span<const int32_t> starts;
                if (with_documents)
                  starts = {documents.data() + row / heads * seq_len, static_cast<size_t>(seq_len)};
                const double causal = static_cast<double>(index::dense_pairs(seq_len, starts));
                if (threshold < 1 &&
                    static_cast<double>(index::computed_pairs(index, static_cast<int>(row / heads),
                                                              static_cast<int>(row % heads),
                                                              starts)) >= threshold * causal) {
                  want.dense[row] = 1;
                  want.diagonals[row].resize(num_blocks);
                  std::iota(want.diagonals[row].begin(), want.diagonals[row].end(), 0);
                  want.columns[row].clear();
                }
                (want.dense[row] ? dense_seen : sparse_seen) += 1;
              }
              index = index::make_index(batch, heads, seq_len, want.diagonals, want.columns);

              SCOPED_TRACE(concat("seq_len ", seq_len, ", shared ", shared, ", p ", p, ", cap ",
                                  cap, ", threshold ", threshold, ", documents ", with_documents));
              const auto got_diagonals = diagonals.read<int32_t>(),
                         got_columns = columns.read<int32_t>(),
                         counts = num_diagonals.read<int32_t>(),
                         column_counts = num_columns.read<int32_t>();
              const auto got_pairs = pairs.read<int64_t>();
              ASSERT_EQ(dense_heads.read<uint8_t>(), want.dense);
              ASSERT_EQ(caps_hit.read<int64_t>()[0], want.caps_hit);
              for (int64_t row = 0; row < rows; ++row) {
                const auto d = index.diagonals.row(row), k = index.columns.row(row);
                ASSERT_EQ(counts[row], static_cast<int32_t>(d.size()));
                ASSERT_EQ(column_counts[row], static_cast<int32_t>(k.size()));
                for (int64_t i = 0; i < num_blocks; ++i)
                  ASSERT_EQ(got_diagonals[row * num_blocks + i], i < counts[row] ? d[i] : -1);
                for (int64_t i = 0; i < seq_len; ++i)
                  ASSERT_EQ(got_columns[row * seq_len + i], i < column_counts[row] ? k[i] : -1);
                ASSERT_EQ(got_pairs[row],
                          index::computed_pairs(index, static_cast<int>(row / heads),
                                                static_cast<int>(row % heads)));
              }
              ASSERT_EQ(diagonal_bits.read<uint64_t>(), index::diagonal_bitmap(index).bits);
            }
          }
        }
      }
    }
  }
  EXPECT_GT(dense_seen, 50);
  EXPECT_GT(sparse_seen, 50);
}

TEST(HeadsBelowFloor, OneHeadOfAChoiceTakesTheOthersWithIt) {
  MT_NEEDS_GPU();
  int64_t seen[2] = {0, 0};
  for (const int64_t heads : {1, 2, 5}) {
    for (const int64_t num_rows : {1, 37, 1000}) {
      const int64_t choices = 16;
      testing::Random random(heads * 1000 + num_rows);
      std::vector<int64_t> covered;
      std::vector<double> recall;
      for (int64_t head = 0; head < choices * heads; ++head) {
        const double level = random.uniform();
        int64_t sum = 0;
        for (int64_t r = 0; r < num_rows; ++r) {
          covered.push_back(static_cast<int64_t>((level + random.uniform()) / 2 * kMassOne));
          sum += covered.back();
        }
        recall.push_back(static_cast<double>(sum) / static_cast<double>(kMassOne * num_rows));
      }
      const DeviceMemory on(covered);
      for (const double floor : {0.0, 0.3, 0.5, recall[2], 1.0}) {
        std::vector<uint8_t> want;
        for (int64_t choice = 0; choice < choices; ++choice) {
          const auto first = recall.begin() + choice * heads;
          const bool below = *std::min_element(first, first + heads) < floor;
          want.insert(want.end(), heads, below);
          ++seen[below];
        }
        const DeviceMemory got(choices * heads);
        heads_below_floor(on.get<int64_t>(), choices, heads, num_rows, floor, got.get<uint8_t>(),
                          nullptr);
        EXPECT_EQ(got.read<uint8_t>(), want) << heads << " heads, floor " << floor;
      }
    }
  }
  EXPECT_GT(std::min(seen[0], seen[1]), 50);
}

// Unsorted lists with duplicates and values out of range; entries and columns of every pair of ranks, as index/ makes them.
TEST(Lists, EntriesAndColumnsOfEveryPairOfRanksEqualTheHosts) {
  MT_NEEDS_GPU();
  for (const int64_t seq_len : {1, 200, 3000}) {
    const int64_t rows = 3, num_blocks = (seq_len + 63) / 64;
    testing::Random random(5);
    std::vector<std::vector<int32_t>> diagonals(rows), columns(rows);
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t c = 0; c < num_blocks; ++c)
        if (row == 1 || random.uniform() < 0.4) diagonals[row].push_back(static_cast<int32_t>(c));
      for (int64_t j = 0; j < seq_len && row != 2; ++j)
        if (random.uniform() < 0.05) columns[row].push_back(static_cast<int32_t>(j));
    }
    const index::Index index = index::make_index(1, rows, seq_len, diagonals, columns);
    const int64_t capacity = 2 * seq_len + 8;
    std::vector<int32_t> given_d(rows * capacity, 99), given_c(given_d), n_d(rows), n_c(rows);
    for (int64_t row = 0; row < rows; ++row) {
      const auto spoil = [&](std::vector<int32_t> list, std::vector<int32_t>& to, int64_t end) {
        std::vector<int32_t> copy = list;
        std::reverse(copy.begin(), copy.end());
        copy.insert(copy.end(), list.begin(), list.begin() + list.size() / 2);
        copy.insert(copy.begin() + copy.size() / 2,
                    {-1, static_cast<int32_t>(end), std::numeric_limits<int32_t>::max()});
        std::copy(copy.begin(), copy.end(), to.begin() + row * capacity);
        return static_cast<int32_t>(copy.size());
      };
      n_d[row] = spoil(diagonals[row], given_d, num_blocks);
      n_c[row] = spoil(columns[row], given_c, seq_len);
    }
    const DeviceMemory dev_d(given_d), dev_c(given_c), dev_nd(n_d), dev_nc(n_c);
    const DeviceMemory diagonal_bits(rows * ((num_blocks + 63) / 64) * 8),
        column_bits(rows * ((seq_len + 31) / 32) * 4);
    const IndexBits bits{diagonal_bits.get<uint64_t>(), column_bits.get<uint32_t>()};
    const DeviceMemory whole_entries(rows * num_blocks * sizeof(Entry)), whole_counts(rows * 4),
        whole_positions(rows * seq_len * 4), whole_columns(rows * 4), whole_starts(num_blocks * 4);
    GivenLists lists;
    lists.lists = {dev_d.get<int32_t>(),
                   dev_nd.get<int32_t>(),
                   dev_c.get<int32_t>(),
                   dev_nc.get<int32_t>(),
                   capacity,
                   capacity};
    lists.batch = 1;
    lists.num_q_heads = rows;
    lists.seq_len = seq_len;
    lists.bits = bits;
    read_lists(lists);
    ASSERT_EQ(diagonal_bits.read<uint64_t>(), index::diagonal_bitmap(index).bits);
    lists.entries = whole_entries.get<Entry>();
    lists.entry_capacity = num_blocks;
    lists.num_entries = whole_counts.get<int32_t>();
    lists.positions = whole_positions.get<int32_t>();
    lists.counts = whole_columns.get<int32_t>();
    lists.capacity = seq_len;
    lists.block_starts = whole_starts.get<int32_t>();
    // What a launch reads, of those lists and of right ones; the bits of columns afterwards from the first.
    const auto expect_launch = [&] {
      read_lists(lists);
      ASSERT_EQ(diagonal_bits.read<uint64_t>(), index::diagonal_bitmap(index).bits);
      const auto num_d = whole_counts.read<int32_t>(), num_c = whole_columns.read<int32_t>(),
                 got_c = whole_positions.read<int32_t>();
      const auto got_d = whole_entries.read<Entry>();
      for (int64_t row = 0; row < rows; ++row) {
        ASSERT_EQ(num_d[row], static_cast<int32_t>(diagonals[row].size()));
        ASSERT_EQ(num_c[row], static_cast<int32_t>(columns[row].size()));
        for (int64_t i = 0; i < num_d[row]; ++i)
          ASSERT_EQ(got_d[row * num_blocks + i], (Entry{0, diagonals[row][i]}));
        for (int64_t i = 0; i < num_c[row]; ++i)
          ASSERT_EQ(got_c[row * seq_len + i], columns[row][i]);
      }
    };
    expect_launch();
    std::vector<int32_t> right_c(rows * capacity, 99), num_right(rows);
    for (int64_t row = 0; row < rows; ++row) {
      std::copy(columns[row].begin(), columns[row].end(), right_c.begin() + row * capacity);
      num_right[row] = static_cast<int32_t>(columns[row].size());
    }
    const DeviceMemory dev_right(right_c), dev_num_right(num_right);
    lists.lists.columns = dev_right.get<int32_t>();
    lists.lists.num_columns = dev_num_right.get<int32_t>();
    expect_launch();
    lists.lists.columns = dev_c.get<int32_t>();
    lists.lists.num_columns = dev_nc.get<int32_t>();
    lists.entries = nullptr;
    read_lists(lists);
    for (int64_t i = 0; i < num_blocks; ++i)
      ASSERT_EQ(whole_starts.read<int32_t>()[i], static_cast<int32_t>(64 * i));

    const DeviceMemory list_d(rows * num_blocks * 4), list_nd(rows * 4), list_c(rows * seq_len * 4),
        list_nc(rows * 4), mask(rows * seq_len * seq_len);
    lists_of_bits(bits, rows, seq_len,
                  {list_d.get<int32_t>(), list_nd.get<int32_t>(), list_c.get<int32_t>(),
                   list_nc.get<int32_t>(), num_blocks, seq_len},
                  nullptr);
    for (int64_t row = 0; row < rows; ++row) {
      ASSERT_EQ(list_nd.read<int32_t>()[row], static_cast<int32_t>(diagonals[row].size()));
      ASSERT_EQ(list_nc.read<int32_t>()[row], static_cast<int32_t>(columns[row].size()));
    }
    write_mask(bits, 1, rows, seq_len, nullptr, mask.get<uint8_t>(), nullptr);
    ASSERT_EQ(mask.read<uint8_t>(), index::mask(index, {}));

    for (const int64_t stripe : {0, 64, 128, 192}) {
      for (const int ranks : {1, 2, 3, 4}) {
        if (stripe == 0 && ranks > 1) continue;
        const layout::Layout layout({.kind = stripe == 0 ? layout::LayoutKind::kContiguous
                                                         : layout::LayoutKind::kBlockStriped,
                                     .seq_len = seq_len,
                                     .cp_size = ranks,
                                     .stripe = stripe == 0 ? 64 : stripe});
        const int64_t m = layout.blocks_per_stripe(), stripes = layout.blocks_per_rank() / m;
        std::vector<int32_t> owners, all_ranks, distances;
        for (int64_t block = 0; block < layout.padded_len() / 64; ++block) {
          const layout::Owner owner = layout.owner(block * 64);
          owners.push_back(owner.cp_rank);
          owners.push_back(static_cast<int32_t>(owner.offset / 64));
        }
        for (int r = 0; r < ranks; ++r) all_ranks.push_back(r);
        const DeviceMemory dev_owners(owners), dev_ranks(all_ranks);
        for (int rank = 0; rank < ranks; ++rank) {
          SCOPED_TRACE(
              concat("seq_len ", seq_len, ", stripe ", stripe, ", rank ", rank, " of ", ranks));
          distances.clear();
          for (int r = 0; r < ranks; ++r)
            distances.push_back(layout.residue(rank) - layout.residue(r));
          const DeviceMemory dev_distances(distances);
          const int64_t cap = entries_capacity(m, stripes, num_blocks, ranks);
          const DeviceMemory entries(ranks * rows * cap * sizeof(Entry)), counts(ranks * rows * 4);
          write_entries({.rows = rows,
                         .num_blocks = num_blocks,
                         .diagonal_bits = bits.diagonals,
                         .blocks_per_stripe = m,
                         .ranks = ranks,
                         .stripes_per_rank = stripes,
                         .distances = dev_distances.get<int32_t>(),
                         .num_sources = ranks,
                         .capacity = cap,
                         .entries = entries.get<Entry>(),
                         .num_entries = counts.get<int32_t>()});
          const DeviceMemory key_rows(ranks * rows * seq_len * 4), positions(key_rows.bytes()),
              column_counts(ranks * rows * 4);
          write_shard_columns({.rows = rows,
                               .seq_len = seq_len,
                               .column_bits = bits.columns,
                               .owners = dev_owners.get<int32_t>(),
                               .sources = dev_ranks.get<int32_t>(),
                               .num_sources = ranks,
                               .capacity = seq_len,
                               .key_rows = key_rows.get<int32_t>(),
                               .positions = positions.get<int32_t>(),
                               .counts = column_counts.get<int32_t>()});
          const auto got = entries.read<Entry>();
          const auto got_counts = counts.read<int32_t>(), got_rows = key_rows.read<int32_t>(),
                     got_positions = positions.read<int32_t>(),
                     got_columns = column_counts.read<int32_t>();
          for (int source = 0; source < ranks; ++source) {
            const index::StepBlocks want = index::step_blocks(index, layout, rank, source);
            const index::StepColumns want_columns = index::step_columns(index, layout, source);
            for (int64_t row = 0; row < rows; ++row) {
              const int64_t at = source * rows + row;
              ASSERT_EQ(got_counts[at], want.num_entries[row]);
              for (int64_t i = 0; i < got_counts[at]; ++i)
                ASSERT_EQ(got[at * cap + i], want.entries[row * want.capacity + i]);
              ASSERT_EQ(got_columns[at], want_columns.counts[row]);
              for (int64_t i = 0; i < got_columns[at]; ++i) {
                ASSERT_EQ(got_rows[at * seq_len + i],
                          want_columns.rows[row * want_columns.capacity + i]);
                ASSERT_EQ(got_positions[at * seq_len + i],
                          want_columns.positions[row * want_columns.capacity + i]);
              }
            }
          }
        }
      }
    }
  }
}

/// Each thing that a list must not hold is reported once, with what was got and where; a fault that the host has not read stays.
TEST(Lists, WhatNoListHoldsIsReported) {
  MT_NEEDS_GPU();
  constexpr int64_t kBatch = 2, kHeads = 3, kSeqLen = 200, kBlocks = 4, kCapacity = 10;
  FaultReport* report = nullptr;
  ASSERT_EQ(cudaMallocHost(&report, sizeof(FaultReport)), cudaSuccess);
  const DeviceMemory diagonal_bits(kBatch * kHeads * 8), column_bits(kBatch * kHeads * 7 * 4);
  struct Spoilt {
    FaultKind kind;
    int64_t place, value, end;
  };
  for (const Spoilt& spoilt :
       {Spoilt{FaultKind::kDiagonal, 4, kBlocks, kBlocks},
        {FaultKind::kDiagonal, 0, -1, kBlocks},
        {FaultKind::kColumn, 5, kSeqLen, kSeqLen},
        {FaultKind::kColumn, 2, std::numeric_limits<int32_t>::min(), kSeqLen},
        {FaultKind::kCount, 2 * 3, kCapacity + 1, kCapacity + 1},
        {FaultKind::kCount, 2 * 3 + 1, -1, kCapacity + 1},
        {FaultKind::kDocument, 1 * kSeqLen + 17, 18, 18},
        {FaultKind::kDocument, 1 * kSeqLen + 199, -7, 200}}) {
    std::vector<int32_t> diagonals(kBatch * kHeads * kCapacity, 1), columns(diagonals),
        num_diagonals(kBatch * kHeads, kCapacity), num_columns(num_diagonals),
        documents(kBatch * kSeqLen, 0);
    const auto value = static_cast<int32_t>(spoilt.value);
    switch (spoilt.kind) {
      case FaultKind::kDiagonal:
        diagonals[spoilt.place * kCapacity + 9] = value;
        break;
      case FaultKind::kColumn:
        columns[spoilt.place * kCapacity + 9] = value;
        break;
      case FaultKind::kCount:
        (spoilt.place % 2 == 0 ? num_diagonals : num_columns)[spoilt.place / 2] = value;
        break;
      default:
        documents[spoilt.place] = value;
    }
    const DeviceMemory d(diagonals), nd(num_diagonals), c(columns), nc(num_columns), s(documents);
    GivenLists lists;
    lists.lists = {d.get<int32_t>(),  nd.get<int32_t>(), c.get<int32_t>(),
                   nc.get<int32_t>(), kCapacity,         kCapacity};
    lists.batch = kBatch;
    lists.num_q_heads = kHeads;
    lists.seq_len = kSeqLen;
    lists.bits = {diagonal_bits.get<uint64_t>(), column_bits.get<uint32_t>()};
    lists.document_start = s.get<int32_t>();
    lists.report = report;
    *report = {};
    for (int repeat = 0; repeat < 2; ++repeat) {
      read_lists(lists);
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      EXPECT_EQ(report->code, fault_code(spoilt.kind, spoilt.place));
      EXPECT_EQ(fault_kind(report->code), spoilt.kind);
      EXPECT_EQ(fault_place(report->code), spoilt.place);
      EXPECT_EQ(report->value, spoilt.value);
      EXPECT_EQ(report->end, spoilt.end);
      EXPECT_EQ(report->num_q_heads, kHeads);
      EXPECT_EQ(report->seq_len, kSeqLen);
    }
    report->code = 123;  // not read yet
    read_lists(lists);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    EXPECT_EQ(report->code, 123);
  }
  // Right lists report nothing.
  const DeviceMemory ones(std::vector<int32_t>(kBatch * kHeads * kCapacity, 1)),
      counts(std::vector<int32_t>(kBatch * kHeads, kCapacity)),
      documents(std::vector<int32_t>(kBatch * kSeqLen, 0));
  GivenLists lists;
  lists.lists = {ones.get<int32_t>(), counts.get<int32_t>(),
                 ones.get<int32_t>(), counts.get<int32_t>(),
                 kCapacity,           kCapacity};
  lists.batch = kBatch;
  lists.num_q_heads = kHeads;
  lists.seq_len = kSeqLen;
  lists.bits = {diagonal_bits.get<uint64_t>(), column_bits.get<uint32_t>()};
  lists.document_start = documents.get<int32_t>();
  lists.report = report;
  *report = {};
  read_lists(lists);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(report->code, 0);
  EXPECT_EQ(report->claimed, 0);
  cudaFreeHost(report);
}

}  // namespace
}  // namespace mtraining::kernels::pattern_cuda
