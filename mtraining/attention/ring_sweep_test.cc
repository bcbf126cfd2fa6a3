// Every pair of options of ring attention, against the float64 oracle: topologies, layouts, rings, prefetch, columns, shapes,
// documents and types.

#include <gtest/gtest.h>

#include <map>
#include <numeric>
#include <set>

#include "mtraining/attention/ring_case.h"
#include "mtraining/base/check.h"
#include "mtraining/index/columns.h"
#include "mtraining/testing/random.h"

namespace mtraining::attention {
namespace {

using layout::LayoutKind;
using testing::Choice;
using testing::Documents;
using testing::Precision;
using testing::ProblemOptions;
using testing::RingProblem;

/// Rows of one value a factor such that each pair of values of two factors is in some row. Greedy, deterministic.
std::vector<std::vector<int>> pairwise_rows(const std::vector<int>& sizes) {
  using Pair = std::array<int, 4>;  // factor, value, factor, value
  const int factors = static_cast<int>(sizes.size());
  std::set<Pair> open;
  for (int f = 0; f < factors; ++f)
    for (int g = f + 1; g < factors; ++g)
      for (int a = 0; a < sizes[f]; ++a)
        for (int b = 0; b < sizes[g]; ++b) open.insert({f, a, g, b});
  const auto pair_of = [](int f, int a, int g, int b) {
    return f < g ? Pair{f, a, g, b} : Pair{g, b, f, a};
  };
  std::vector<std::vector<int>> rows;
  while (!open.empty()) {
    std::vector<int> row(sizes.size(), -1);
    const Pair first = *open.begin();
    row[first[0]] = first[1];
    row[first[2]] = first[3];
    for (int f = 0; f < factors; ++f) {
      if (row[f] >= 0) continue;
      int best = -1, best_count = -1;
      for (int offset = 0; offset < sizes[f]; ++offset) {
        const int value =
            (offset + static_cast<int>(rows.size())) % sizes[f];  // ties: another one each time
        int count = 0;
        for (int g = 0; g < factors; ++g)
          count += g != f && row[g] >= 0 && open.contains(pair_of(f, value, g, row[g]));
        if (count > best_count) {
          best = value;
          best_count = count;
        }
      }
      row[f] = best;
    }
    for (int f = 0; f < factors; ++f)
      for (int g = f + 1; g < factors; ++g) open.erase({f, row[f], g, row[g]});
    rows.push_back(row);
  }
  return rows;
}

struct Grid {
  int nodes, ranks_per_node;
  ring::RingKind ring;
};
constexpr auto kFlat = ring::RingKind::kFlat;
constexpr auto kHierarchical = ring::RingKind::kHierarchical;
const std::vector<Grid> kGrids = {
    {1, 1, kFlat},         {1, 1, kHierarchical}, {1, 2, kFlat},         {1, 3, kFlat},
    {2, 2, kFlat},         {1, 4, kHierarchical}, {2, 2, kHierarchical}, {4, 1, kHierarchical},
    {2, 3, kHierarchical}, {1, 6, kFlat},         {2, 4, kHierarchical}, {1, 8, kFlat}};

struct LayoutChoice {
  LayoutKind kind;
  int64_t stripe;
};
const std::vector<LayoutChoice> kLayouts = {
    {LayoutKind::kContiguous, 64},    {LayoutKind::kZigzag, 64},
    {LayoutKind::kBlockStriped, 64},  {LayoutKind::kBlockStriped, 128},
    {LayoutKind::kBlockStriped, 192}, {LayoutKind::kStriped, 64}};

struct Columns {
  ColumnMode mode;
  int64_t max_rows;
};
const std::vector<Columns> kColumns = {
    {ColumnMode::kOnce, 16384}, {ColumnMode::kOnce, 5}, {ColumnMode::kPerStep, 16384}};

std::vector<ProblemOptions> problems() {
  const auto make = [](int64_t batch, int64_t n, int64_t h, int64_t hk, int64_t d,
                       Precision precision, Documents documents, Choice choice) {
    return ProblemOptions{.batch = batch,
                          .seq_len = n,
                          .num_q_heads = h,
                          .num_kv_heads = hk,
                          .head_dim = d,
                          .precision = precision,
                          .documents = documents,
                          .choice = choice,
                          .seed = static_cast<uint64_t>(n)};
  };
  using enum Precision;
  using enum Documents;
  using enum Choice;
  return {make(1, 500, 4, 4, 64, kFloat32, kOne, kSparse),
          make(1, 333, 4, 1, 64, kBFloat16, kMidBlock, kSparse),
          make(1, 257, 7, 1, 128, kFloat32, kAtZero, kSparse),
          make(2, 130, 8, 1, 64, kBFloat16, kEveryToken, kSparse),
          make(1, 30, 2, 1, 64, kFloat32, kOne, kSparse),
          make(2, 1, 4, 2, 64, kFloat32, kOne, kSparse),
          make(1, 600, 2, 2, 128, kBFloat16, kOne, kDense),
          make(2, 420, 4, 2, 64, kFloat32, kMidBlock, kFew),
          make(1, 300, 4, 2, 64, kFloat32, kOne, kEmpty),
          make(1, 400, 2, 1, 64, kBFloat16, kOne, kMany),
          make(1, 64, 2, 2, 64, kFloat32, kOnBlock, kDense),
          make(1, 200, 2, 1, 64, kFloat16, kOne, kSparse),
          make(1, 150, 4, 1, 64, kFloat64, kMidBlock, kSparse)};
}

const RingProblem& problem_of(const ProblemOptions& options) {
  static std::map<std::string, RingProblem> made;
  return made.try_emplace(to_string(options), options).first->second;
}

TEST(RingAttentionSweep, EqualsTheOracleForEveryPairOfOptions) {
  const std::vector<ProblemOptions> all = problems();
  const std::vector<int> sizes = {static_cast<int>(kGrids.size()),
                                  static_cast<int>(all.size()),
                                  static_cast<int>(kLayouts.size()),
                                  static_cast<int>(kColumns.size()),
                                  3,   // prefetch_steps, launch_shards
                                  2,   // inner
                                  2};  // ring_stride
  std::vector<std::vector<int>> rows = pairwise_rows(sizes);
  ASSERT_GE(rows.size(), kGrids.size() * all.size());
  // And as many again at random: three and more options meet.
  mtraining::testing::Random random(7);
  for (size_t i = 0, pairs = rows.size(); i < pairs; ++i) {
    std::vector<int>& row = rows.emplace_back();
    for (int size : sizes) row.push_back(static_cast<int>(random.below(size)));
  }
  for (const std::vector<int>& row : rows) {
    const Grid& grid = kGrids[row[0]];
    ProblemOptions problem_options = all[row[1]];
    const LayoutChoice& layout = kLayouts[row[2]];
    // 64 tokens of a striped shard are no block: dense only.
    if (layout.kind == LayoutKind::kStriped) problem_options.choice = Choice::kDense;
    const RingProblem& problem = problem_of(problem_options);
    RingOptions options = testing::ring_options(grid.nodes, grid.ranks_per_node, layout.kind,
                                                layout.stripe, problem_options.seq_len);
    options.ring = grid.ring;
    options.columns = kColumns[row[3]].mode;
    options.max_column_rows_per_rank = kColumns[row[3]].max_rows;
    options.prefetch_steps = row[4] + 1;
    options.launch_shards = (row[4] + row[0]) % 3 + 1;
    options.inner = row[5] == 0 ? ring::InnerKind::kGather : ring::InnerKind::kRing;
    const int cp_size = options.layout.cp_size;
    if (row[6] == 1 && options.ring == kFlat && cp_size > 2) options.ring_stride = cp_size - 1;
    SCOPED_TRACE(to_string(problem_options) + ", " + testing::to_string(options));
    const auto result = testing::compare_with_truth(testing::run_ring(problem, options), problem);
    ASSERT_EQ(result.fault, "");
  }
  std::cout << rows.size() << " combinations" << std::endl;
}

TEST(RingAttentionSweep, SlicesOfColumnsThatAreNotInMemoryWithTheFirstOnesHaveALaunchEach) {
  const RingProblem problem({.seq_len = 500});
  for (const int rows : {8, 4096}) {
    RingOptions options = testing::ring_options(2, 2, LayoutKind::kBlockStriped, 64, 500);
    options.max_column_rows_per_rank = rows;
    comm::run_loopback(4, [&](comm::Transport& transport) {
      testing::use_one_thread();
      RingContext context(options, transport);
      const int kv_heads = static_cast<int>(problem.options().num_kv_heads);
      const auto slices = static_cast<int>(
          index::plan_columns(problem.index(), context.layout(), kv_heads, rows).slices.size());
      ASSERT_EQ(slices > 2, rows == 8);
      int launches = 0;
      context.set_observer(
          [&](const StepTiming& step) { launches += std::string(step.what) == "columns"; });
      testing::run_rank(context, problem);
      EXPECT_EQ(launches, 2 * std::max(0, slices - 2));  // forward and backward
    });
  }
}

}  // namespace
}  // namespace mtraining::attention
