#include "mtraining/sim/pattern_shapes.h"

#include <algorithm>
#include <set>

#include "mtraining/base/check.h"
#include "mtraining/base/rng.h"

namespace mtraining::sim {
namespace {

constexpr int64_t kClusterWidth = 256;
constexpr int64_t kSinkColumns = 64;

/// What one head has.
struct HeadShape {
  int64_t band = 0;      ///< nearest offsets
  int64_t clusters = 0;  ///< runs of kClusterWidth offsets
  int64_t lines = 0;     ///< single offsets
  int64_t columns = 0;
};

HeadShape head_shape(std::string_view shape, int head) {
  if (shape == "local") return {1024, 0, 8, 512};
  if (shape == "typical") return {1024 * (1 + head % 3), 6, 16, 1024};
  if (shape == "wide") return {4096, 24, 64, 2048};
  constexpr HeadShape kUneven[] = {{64, 0, 0, 64},     {64, 0, 0, 4096},    {8192, 0, 0, 0},
                                   {512, 0, 2, 128},   {16384, 48, 64, 64}, {128, 12, 0, 256},
                                   {2048, 0, 128, 64}, {256, 2, 4, 1024}};
  return kUneven[head % std::size(kUneven)];
}

}  // namespace

std::vector<std::string_view> pattern_shapes() { return {"local", "typical", "wide", "uneven"}; }

OffsetPattern make_pattern(std::string_view shape, int64_t seq_len, int num_heads) {
  const auto known = pattern_shapes();
  MT_CHECK_ARG(std::find(known.begin(), known.end(), shape) != known.end(),
               "pattern shape: expected local, typical, wide or uneven, got '", shape, "'");
  MT_CHECK_ARG(seq_len >= 1024, "pattern seq_len: expected >= 1024, got ", seq_len);
  MT_CHECK_ARG(num_heads >= 1, "pattern heads: expected >= 1, got ", num_heads);
  OffsetPattern pattern{.name = std::string(shape), .seq_len = seq_len, .heads = {}};
  for (int h = 0; h < num_heads; ++h) {
    const HeadShape wanted = head_shape(shape, h);
    const Rng random(
        static_cast<uint64_t>(std::find(known.begin(), known.end(), shape) - known.begin()),
        static_cast<uint64_t>(h));
    uint64_t draw = 0;
    const int64_t band = std::min(wanted.band, seq_len / 2);
    OffsetHead head;
    head.offset_ranges.push_back({0, band});
    const auto add_runs = [&](int64_t count, int64_t width) {
      for (int64_t i = 0; i < count; ++i) {
        const auto span = static_cast<uint64_t>(seq_len - band - width);
        const int64_t begin = band + static_cast<int64_t>(random.below(draw++, span));
        head.offset_ranges.push_back({begin, begin + width});
      }
    };
    add_runs(wanted.clusters, kClusterWidth);
    add_runs(wanted.lines, 1);
    std::set<int32_t> columns;
    for (int64_t j = 0; j < std::min(kSinkColumns, wanted.columns); ++j) {
      columns.insert(static_cast<int32_t>(j));
    }
    // Early keys are chosen more often, as they are by real heads.
    while (static_cast<int64_t>(columns.size()) < std::min(wanted.columns, seq_len / 4)) {
      const double u = random.uniform(draw++);
      columns.insert(static_cast<int32_t>(static_cast<double>(seq_len) * u * u));
    }
    head.columns.assign(columns.begin(), columns.end());
    pattern.heads.push_back(std::move(head));
  }
  return pattern;
}

}  // namespace mtraining::sim
