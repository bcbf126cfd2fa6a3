// Choices on a GPU: the same bits on every rank and for every ring, layout and rule; baselines against the host's.

#include <ATen/cuda/Sleep.h>
#include <c10/cuda/CUDAGuard.h>
#include <gtest/gtest.h>

#include <chrono>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <set>

#include "mtraining/attention/autograd.h"
#include "mtraining/attention/block_lists.h"
#include "mtraining/attention/device_index.h"
#include "mtraining/attention/device_ring_case.h"
#include "mtraining/attention/ring_case.h"
#include "mtraining/base/check.h"
#include "mtraining/comm/loopback_device.h"
#include "mtraining/kernels/pattern_cuda/fault.h"

namespace mtraining::attention {
namespace {

using layout::LayoutKind;
using pattern::SlashPooling;
using pattern::VerticalSlashOptions;
using testing::Documents;
using testing::Precision;
using testing::RankInputs;
using testing::ring_options;
using testing::RingProblem;

using OnRank = std::function<void(RingContext&, const RankInputs&)>;

/// `body` on each rank with its shards on the GPU.
void on_ranks(const RingProblem& problem, const RingOptions& options, const OnRank& body) {
  testing::on_ranks(options, [&](RingContext& context, comm::Transport&) {
    body(context,
         testing::on_device(testing::rank_inputs(problem, context.layout(), context.cp_rank()),
                            at::kCUDA));
  });
}

bool same_lists(const index::Lists& a, const index::Lists& b) {
  if (a.rows != b.rows) return false;
  for (int64_t row = 0; row < a.rows; ++row) {
    const auto x = a.row(row), y = b.row(row);
    if (!std::equal(x.begin(), x.end(), y.begin(), y.end())) return false;
  }
  return true;
}
bool same(const index::Index& a, const index::Index& b) {
  return same_lists(a.diagonals, b.diagonals) && same_lists(a.columns, b.columns) &&
         a.blocks.row_begin == b.blocks.row_begin && a.blocks.key_blocks == b.blocks.key_blocks &&
         a.dense_heads == b.dense_heads && a.caps_hit == b.caps_hit;
}

/// What every rank chose, once; the ranks agree.
index::Index chosen_by(const RingProblem& problem, const RingOptions& options,
                       const std::function<index::Index(RingContext&, const RankInputs&)>& choose) {
  std::mutex mutex;
  std::optional<index::Index> first;
  on_ranks(problem, options, [&](RingContext& context, const RankInputs& in) {
    index::Index index = choose(context, in);
    const std::lock_guard lock(mutex);
    if (!first) first = index;
    EXPECT_TRUE(same(index, *first)) << "two ranks differ";
  });
  return *first;
}

struct Rule {
  std::string name;
  VerticalSlashOptions options;
};

std::vector<Rule> rules() {
  VerticalSlashOptions plain;
  plain.p_vertical = 0.6;
  plain.p_slash = 0.6;
  plain.sink_tokens = 3;
  plain.dense_threshold = 1;
  std::vector<Rule> all = {{"plain", plain}};
  const auto add = [&](const char* name, const auto& change) {
    all.push_back({name, plain});
    change(all.back().options);
  };
  add("paper", [](auto& o) { o.slash_pooling = SlashPooling::kPaper; });
  add("token, capped", [](auto& o) {
    o.slash_pooling = SlashPooling::kToken;
    o.max_diagonals = 5;
  });
  add("kv_group", [](auto& o) { o.selection = pattern::Selection::kKvGroup; });
  add("strided", [](auto& o) { o.window = pattern::Window::kStrided; });
  add("capped", [](auto& o) {
    o.max_columns = 20;
    o.max_diagonals = 3;
  });
  add("floor", [](auto& o) {
    o.p_vertical = o.p_slash = 0.2;
    o.recall_floor = 0.7;
  });
  add("all", [](auto& o) { o.p_vertical = o.p_slash = 1; });
  add("dense heads", [](auto& o) { o.dense_threshold = 0.4; });
  add("fixed", [](auto& o) { o = pattern::options_of({40, 4}, o); });
  return all;
}

TEST(ChoiceOnGpu, IsTheSameForEveryRingAndLayout) {
  std::set<int> dense_seen;
  for (const int64_t seq_len : {40, 1000}) {
    for (const Documents documents : {Documents::kOne, Documents::kMidBlock}) {
      const RingProblem problem({.batch = 2,
                                 .seq_len = seq_len,
                                 .precision = Precision::kBFloat16,
                                 .documents = documents});
      for (const Rule& rule : rules()) {
        const auto choose = [&](RingContext& context, const RankInputs& in) {
          return choose_on_device(context.state(), in.q, in.k, 0, in.document_starts, rule.options);
        };
        const index::Index want =
            chosen_by(problem, ring_options(1, 1, LayoutKind::kContiguous, 64, seq_len), choose);
        dense_seen.insert(
            static_cast<int>(std::count(want.dense_heads.begin(), want.dense_heads.end(), 1)));
        for (const auto& [nodes, ranks, kind, stripe] :
             {std::tuple{1, 1, LayoutKind::kBlockStriped, 128},
              {1, 2, LayoutKind::kZigzag, 64},
              {1, 3, LayoutKind::kContiguous, 64},
              {2, 2, LayoutKind::kBlockStriped, 64}}) {
          SCOPED_TRACE(concat(rule.name, ", N ", seq_len, ", documents ",
                              documents != Documents::kOne, ", ", layout::to_string(kind), " over ",
                              nodes, "x", ranks));
          EXPECT_TRUE(same(
              chosen_by(problem, ring_options(nodes, ranks, kind, stripe, seq_len), choose), want));
        }
      }
    }
  }
  EXPECT_GE(dense_seen.size(), 2u);
}

TEST(ChoiceOnGpu, AChoiceThatIsGivenUpReportsIntoNoOtherMemory) {
  const RingProblem problem({.seq_len = 300, .precision = Precision::kBFloat16});
  const auto pinned = at::TensorOptions().dtype(at::kByte).pinned_memory(true);
  on_ranks(problem, ring_options(1, 1, LayoutKind::kContiguous, 64, 300),
           [&](RingContext& context, const RankInputs& in) {
             const at::Tensor bad = at::full_like(in.k, std::numeric_limits<double>::infinity());
             const auto choose = [&](const at::Tensor& k) {
               return lists_on_device(context.state(), in.q, k, 0, in.document_starts, {});
             };
             EXPECT_THROW(choose(bad)->host_index(), InvalidArgument);
             choose(in.k)->host_index();
             at::cuda::sleep(400'000'000);  // some .2 s
             choose(bad);
             EXPECT_FALSE(c10::cuda::getCurrentCUDAStream().query()) << "the choice is over";
             std::vector<at::Tensor> others;
             for (int i = 0; i < 16; ++i) {
               others.push_back(at::empty({sizeof(kernels::pattern_cuda::FaultReport)}, pinned));
               others.back().zero_();  // as a report that may be written
             }
             c10::cuda::getCurrentCUDAStream().synchronize();
             for (const at::Tensor& other : others) EXPECT_FALSE(other.any().item<bool>());
           });
}

/// Query blocks of which the two differ.
int64_t rows_that_differ(const index::Index& a, const index::Index& b) {
  int64_t rows = 0;
  for (int64_t r = 0; r < int64_t{a.batch} * a.num_q_heads; ++r) {
    for (int64_t q = 0; q < a.num_blocks(); ++q) {
      const auto x = a.blocks.row(r, q, a.num_blocks()), y = b.blocks.row(r, q, b.num_blocks());
      rows += !std::equal(x.begin(), x.end(), y.begin(), y.end());
    }
  }
  return rows;
}

TEST(ChoiceOnGpu, BlockPatternsAreTheHostsUpToRounding) {
  const int64_t seq_len = 1500;
  for (const Documents documents : {Documents::kOne, Documents::kMidBlock}) {
    const RingProblem problem({.batch = 2,
                               .seq_len = seq_len,
                               .precision = Precision::kBFloat16,
                               .documents = documents});
    const int64_t rows = 2 * problem.options().num_q_heads * ((seq_len + 63) / 64);
    for (const bool moba : {false, true}) {
      const auto choose = [&](RingContext& context, const RankInputs& in) {
        return moba ? moba_by_tensors(context.state(), in.q, in.k, in.document_starts, {128, 3})
                    : xattention_by_tensors(context.state(), in.q, in.k, 0, in.document_starts, {});
      };
      const auto on_host = [&](RingContext& context, const RankInputs& in) {
        return choose(context,
                      {in.q.cpu(), in.k.cpu(), in.v.cpu(), in.dout.cpu(), in.document_starts});
      };
      const RingOptions one = ring_options(1, 1, LayoutKind::kContiguous, 64, seq_len);
      const index::Index want = chosen_by(problem, one, on_host),
                         got = chosen_by(problem, one, choose);
      EXPECT_LE(rows_that_differ(got, want), rows / 100) << "moba " << moba;
      for (const LayoutKind kind : {LayoutKind::kZigzag, LayoutKind::kBlockStriped}) {
        const index::Index many = chosen_by(problem, ring_options(1, 3, kind, 64, seq_len), choose);
        EXPECT_LE(rows_that_differ(many, got), rows / 100) << "moba " << moba;
      }
    }
  }
}

TEST(ChoiceOnGpu, ListsOfBlocksAreMadeWithoutWaitingForTheDevice) {
  const RingProblem problem(
      {.seq_len = 1500, .precision = Precision::kBFloat16, .documents = Documents::kMidBlock});
  on_ranks(problem, ring_options(1, 1, LayoutKind::kZigzag, 64, 1500),
           [&](RingContext& context, const RankInputs& in) {
             const auto make = [&](bool moba) {
               const auto lists = block_lists_on_device(
                   context.state(),
                   moba
                       ? choose_moba(context.state(), in.q, in.k, in.document_starts, {128, 3})
                       : choose_xattention(context.state(), in.q, in.k, 0, in.document_starts, {}));
               kernels::BlockLists made = *lists->block_lists(0);
               lists->add_lists_by_key(0, made);
               EXPECT_NE(made.query_blocks, nullptr);
               lists->check_values();
               return lists;
             };
             for (const bool moba : {false, true}) {
               for (int warm_up = 0; warm_up < 2; ++warm_up) make(moba)->host_index();
               at::cuda::sleep(2'000'000'000);  // a second
               const auto start = std::chrono::steady_clock::now();
               const auto lists = make(moba);
               const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
               EXPECT_LT(took.count(), 0.5) << "moba " << moba;
               EXPECT_TRUE(lists->host_index()->has_blocks());
             }
           });
}

TEST(ChoiceOnGpu, BlocksOfValuesThatAreNotFiniteAreRefusedWhenTheIndexIsAskedFor) {
  const RingProblem problem({.seq_len = 300, .precision = Precision::kBFloat16});
  on_ranks(problem, ring_options(1, 1, LayoutKind::kContiguous, 64, 300),
           [&](RingContext& context, const RankInputs& in) {
             const auto said = [&](bool moba, const at::Tensor& q, const at::Tensor& k) {
               const auto lists = block_lists_on_device(
                   context.state(), moba ? choose_moba(context.state(), q, k, {}, {64, 3})
                                         : choose_xattention(context.state(), q, k, 0, {}, {}));
               try {
                 lists->host_index();
               } catch (const InvalidArgument& error) {
                 return std::string(error.what());
               }
               return std::string("nothing");
             };
             at::Tensor bad = in.k.clone();
             bad[0][210][1][5] = std::numeric_limits<double>::infinity();
             EXPECT_EQ(said(false, in.q, in.k), "nothing");
             EXPECT_EQ(said(true, in.q, in.k), "nothing");
             EXPECT_NE(said(false, in.q, bad)
                           .find("k: expected finite values, got NaN or inf at "
                                 "sample 0, head 1, position 210"),
                       std::string::npos);
             EXPECT_NE(said(true, in.q, bad).find("sample 0, head 1, block 3"), std::string::npos);
           });
}

TEST(ChoiceOnGpu, EveryPatternAttendsAndAGivenOneIsEstimatedWhereThatIsAskedFor) {
  const RingProblem problem({.seq_len = 500, .precision = Precision::kBFloat16});
  const RingOptions options = ring_options(1, 1, LayoutKind::kBlockStriped, 128, 500);
  for (const auto kind : {pattern::PatternKind::kFixed, pattern::PatternKind::kXAttention,
                          pattern::PatternKind::kMoba, pattern::PatternKind::kVerticalSlash}) {
    for (const auto& [given, asked] :
         {std::pair{false, false}, std::pair{true, false}, std::pair{true, true}}) {
      if (given && kind != pattern::PatternKind::kFixed) continue;
      on_ranks(problem, options, [&](RingContext& context, const RankInputs& in) {
        int estimated = 0;
        context.set_observer(
            [&](const StepTiming& step) { estimated += std::string(step.what) == "index"; });
        AttentionCall call;
        call.pattern.kind = kind;
        call.pattern.budgets = {30, 3};
        call.pattern.moba = {64, 3};
        if (given) call.pattern.given = std::make_shared<const index::Index>(problem.index());
        call.pattern.estimate = asked;
        const int chosen = given && !asked ? 0 : 1;
        const AttentionOutput first = sparse_ring_attention(context, in.q, in.k, in.v, call);
        context.finish_observing();
        EXPECT_EQ(estimated, chosen);
        if (given) {
          EXPECT_TRUE(same_lists(first.index->columns, problem.index().columns));
        }
        EXPECT_EQ(first.index->caps_hit, 0);
        AttentionCall again;
        again.index = first.index;
        const AttentionOutput second = sparse_ring_attention(context, in.q, in.k, in.v, again);
        context.finish_observing();
        EXPECT_EQ(estimated, chosen) << "a replayed index is not estimated";
        EXPECT_TRUE(at::equal(first.out, second.out));
      });
    }
  }
}

}  // namespace
}  // namespace mtraining::attention
