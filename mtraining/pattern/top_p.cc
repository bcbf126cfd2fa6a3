#include "mtraining/pattern/top_p.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "mtraining/base/check.h"

namespace mtraining::pattern {
namespace {

__extension__ typedef unsigned __int128
    Key;  // mass, then N-1-position: the larger of two keys is chosen first

constexpr int kDigitBits = 8;
constexpr int64_t kBins = int64_t{1} << kDigitBits;

int bits_of(uint64_t value) {
  int bits = 0;
  for (; value != 0; value >>= 1) ++bits;
  return bits;
}

// Where the search of one row stands. Keys above `prefix` (compared after dropping `shift` low bits) are chosen already; those
// equal to it are still to be cut: they must add need_mass, or at most need_count of them.
struct Search {
  bool open = false;
  bool all = false;  // every key
  bool none = false;
  Key prefix = 0;  // of the low end of the choice, once closed: chosen iff key >> shift >= prefix
  int shift = 0;
  int64_t need_mass = 0;
  int64_t need_count = 0;
  bool cut = false;
  std::vector<int32_t> candidates;  // local keys whose high bits equal prefix
};

}  // namespace

int64_t top_p_threshold(int64_t total, double p) {
  if (p <= 0) return 0;
  // The conversion to double may round total up; no list can reach more than all of it.
  const double product = std::ceil(p * static_cast<double>(total));
  return product >= static_cast<double>(total) ? total : static_cast<int64_t>(product);
}

std::vector<int32_t> top_p(std::span<const int64_t> masses, double p, int64_t cap) {
  std::vector<int32_t> order(masses.size());
  std::iota(order.begin(), order.end(), 0);
  if (p <= 0 || cap == 0) return {};
  size_t keep = order.size();
  const bool capped = cap > 0 && static_cast<size_t>(cap) < keep;
  if (p < 1 || capped) {
    std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
      return masses[a] != masses[b] ? masses[a] > masses[b] : a < b;
    });
  }
  if (p < 1) {
    const int64_t threshold =
        top_p_threshold(std::accumulate(masses.begin(), masses.end(), int64_t{0}), p);
    int64_t sum = 0;
    keep = 0;
    while (sum < threshold) sum += masses[order[keep++]];
  }
  if (cap >= 0) keep = std::min(keep, static_cast<size_t>(cap));
  order.resize(keep);
  std::sort(order.begin(), order.end());
  return order;
}

std::vector<SelectedKeys> distributed_top_p(std::span<const int64_t> masses,
                                            std::span<const int32_t> positions, int64_t rows,
                                            int64_t seq_len, double p, int64_t cap,
                                            comm::Communicator& group) {
  const int64_t num_local = static_cast<int64_t>(positions.size());
  MT_CHECK_ARG(rows >= 0 && static_cast<int64_t>(masses.size()) == rows * num_local,
               "distributed_top_p: masses: expected ", rows, " x ", num_local, " values, got ",
               masses.size());
  std::vector<SelectedKeys> chosen(rows);
  if (rows == 0 || p <= 0) return chosen;

  const int position_bits = bits_of(static_cast<uint64_t>(seq_len - 1));
  const auto key_of = [&](int64_t row, int64_t local) {
    return (static_cast<Key>(masses[row * num_local + local]) << position_bits) |
           static_cast<Key>(seq_len - 1 - positions[local]);
  };

  // One exchange that fixes the number of digits.
  int64_t largest = 0;
  for (int64_t mass : masses) largest = std::max(largest, mass);
  group.all_reduce({&largest, sizeof largest}, comm::ElementType::kInt64, comm::ReduceOp::kMax)
      ->wait();
  const int key_bits = bits_of(static_cast<uint64_t>(largest)) + position_bits;

  std::vector<Search> searches(rows);
  for (Search& search : searches) {
    search.open = true;
    search.shift = key_bits;  // prefix 0 of no bits: every key is a candidate
    search.need_mass = std::numeric_limits<int64_t>::max();
    search.need_count = cap < 0 ? std::numeric_limits<int64_t>::max() : cap;
    search.candidates.resize(num_local);
    std::iota(search.candidates.begin(), search.candidates.end(), 0);
  }

  std::vector<int64_t> histogram;
  for (bool first = true;; first = false) {
    std::vector<int64_t> open;
    for (int64_t row = 0; row < rows; ++row)
      if (searches[row].open) open.push_back(row);
    if (open.empty()) break;

    histogram.assign(open.size() * kBins * 2, 0);  // [open row, bin, (mass, count)]
    for (size_t i = 0; i < open.size(); ++i) {
      Search& search = searches[open[i]];
      const int digit = std::min(kDigitBits, search.shift);
      search.shift -= digit;
      int64_t* bins = &histogram[i * kBins * 2];
      for (int32_t local : search.candidates) {
        const int64_t bin = static_cast<int64_t>((key_of(open[i], local) >> search.shift) &
                                                 ((Key{1} << digit) - 1));
        bins[bin * 2] += masses[open[i] * num_local + local];
        bins[bin * 2 + 1] += 1;
      }
      search.prefix <<= digit;
    }
    group
        .all_reduce({histogram.data(), static_cast<int64_t>(histogram.size() * sizeof(int64_t))},
                    comm::ElementType::kInt64, comm::ReduceOp::kSum)
        ->wait();

    // From here on every rank computes the same.
    for (size_t i = 0; i < open.size(); ++i) {
      Search& search = searches[open[i]];
      const int64_t* bins = &histogram[i * kBins * 2];
      if (first) {
        int64_t total = 0, keys = 0;
        for (int64_t bin = 0; bin < kBins; ++bin) {
          total += bins[bin * 2];
          keys += bins[bin * 2 + 1];
        }
        if (p < 1) search.need_mass = top_p_threshold(total, p);
        // With p >= 1 no mass suffices, so that all keys or the cap ends the search.
        search.cut = cap >= 0 && (p < 1 ? search.need_mass > 0 && cap == 0 : keys > cap);
      }
      if (search.need_mass <= 0 || search.need_count <= 0) {  // only before anything is chosen
        search.none = true;
        search.open = false;
        continue;
      }
      int64_t bin = kBins - 1;
      for (; bin >= 0; --bin) {
        if (bins[bin * 2] >= search.need_mass || bins[bin * 2 + 1] >= search.need_count) break;
        search.need_mass -= bins[bin * 2];
        search.need_count -= bins[bin * 2 + 1];
      }
      if (bin < 0) {  // p >= 1 and fewer keys than the cap
        search.all = true;
        search.open = false;
        continue;
      }
      search.prefix |= static_cast<Key>(bin);
      // The low end of the choice lies in this bin. Nothing is left to cut where the whole bin is taken: a single key, or as
      // many keys as the cap still admits whose mass does not suffice.
      const int64_t mass = bins[bin * 2], count = bins[bin * 2 + 1];
      if (count == 1 || (count == search.need_count && mass < search.need_mass)) {
        if (p < 1) search.cut = mass < search.need_mass;
        search.open = false;
      }
      MT_ASSERT(!search.open || search.shift > 0, "distributed_top_p: two keys at one position");
      std::erase_if(search.candidates, [&](int32_t local) {
        return (key_of(open[i], local) >> search.shift) != search.prefix;
      });
    }
  }

  // The chosen positions, and nothing else, go to every rank: first how many, then the lists, padded to the longest.
  std::vector<int32_t> counts(rows, 0), list;
  for (int64_t row = 0; row < rows; ++row) {
    const Search& search = searches[row];
    for (int64_t local = 0; local < num_local && !search.none; ++local) {
      if (!search.all && (key_of(row, local) >> search.shift) < search.prefix) continue;
      list.push_back(positions[local]);
      ++counts[row];
    }
  }
  const int64_t size = group.size();
  std::vector<int32_t> all_counts(size * rows);
  std::vector<comm::Buffer> receive(size);
  for (int64_t r = 0; r < size; ++r)
    receive[r] = {&all_counts[r * rows], static_cast<int64_t>(rows * sizeof(int32_t))};
  group.all_gather({counts.data(), static_cast<int64_t>(rows * sizeof(int32_t))}, receive)->wait();
  int64_t longest = 0;
  for (int64_t r = 0; r < size; ++r)
    longest = std::max<int64_t>(
        longest, std::accumulate(&all_counts[r * rows], &all_counts[r * rows] + rows, int64_t{0}));
  for (int64_t row = 0; row < rows; ++row) chosen[row].cut = searches[row].cut;
  if (longest == 0) return chosen;
  list.resize(longest, 0);
  std::vector<int32_t> all_lists(size * longest);
  for (int64_t r = 0; r < size; ++r)
    receive[r] = {&all_lists[r * longest], static_cast<int64_t>(longest * sizeof(int32_t))};
  group.all_gather({list.data(), static_cast<int64_t>(longest * sizeof(int32_t))}, receive)->wait();
  for (int64_t r = 0; r < size; ++r) {
    const int32_t* from = &all_lists[r * longest];
    for (int64_t row = 0; row < rows; ++row) {
      chosen[row].positions.insert(chosen[row].positions.end(), from,
                                   from + all_counts[r * rows + row]);
      from += all_counts[r * rows + row];
    }
  }
  for (SelectedKeys& keys : chosen) std::sort(keys.positions.begin(), keys.positions.end());
  return chosen;
}

}  // namespace mtraining::pattern
