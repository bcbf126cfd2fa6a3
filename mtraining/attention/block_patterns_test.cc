// Choices of single blocks by tensor operations against the host's loops in pattern/: the same lists, over ranks and layouts.
#include "mtraining/attention/block_patterns.h"

#include <gtest/gtest.h>

#include <cmath>
#include <mutex>
#include <vector>

#include "mtraining/attention/ring_case.h"
#include "mtraining/attention/tensors.h"
#include "mtraining/base/check.h"
#include "mtraining/base/rng.h"
#include "mtraining/pattern/block_choice.h"

namespace mtraining::attention {
namespace {

using layout::LayoutKind;
using testing::Documents;
using testing::Precision;
using testing::rank_inputs;
using testing::RankInputs;
using testing::ring_options;
using testing::RingProblem;

TEST(BestBlocks, EqualTheHostsOnTheSameMasses) {
  const Rng rng(3);
  uint64_t draw = 0;
  int rows_seen = 0;
  for (const int64_t key_blocks : {1, 2, 7, 40}) {
    for (const int64_t step : {1, 3}) {
      for (int64_t first = 0; first < std::min(step, key_blocks); ++first) {
        for (const double threshold : {0.0, 0.3, 0.9, 0.999999, 1.0}) {
          for (const int64_t values : {1, 3, 1 << 20}) {  // many equal ones, some, none
            const int64_t rows = (key_blocks - first + step - 1) / step;
            at::Tensor masses = at::zeros({rows, key_blocks}, at::kLong),
                       sinks = at::zeros({rows}, at::kLong);
            std::vector<std::vector<int64_t>> want;
            for (int64_t r = 0; r < rows; ++r) {
              const int64_t own = first + r * step;
              const auto sink = static_cast<int64_t>(rng.below(draw++, own + 1));
              std::vector<int64_t> row(own + 1, 0);
              for (int64_t b = sink; b <= own; ++b)
                row[b] = static_cast<int64_t>(rng.below(draw++, values)) * 1234567;
              for (int64_t b = 0; b <= own; ++b) masses[r][b] = row[b];
              sinks[r] = sink;
              want.push_back(pattern::best_blocks(row, sink, threshold));
            }
            const at::Tensor got = best_blocks(masses, sinks, first, step, threshold);
            for (int64_t r = 0; r < rows; ++r, ++rows_seen) {
              std::vector<int64_t> list;
              for (int64_t b = 0; b < key_blocks; ++b)
                if (got[r][b].item<bool>()) list.push_back(b);
              ASSERT_EQ(list, want[r]) << key_blocks << " blocks, row " << r << ", threshold "
                                       << threshold << ", values " << values;
            }
          }
        }
      }
    }
  }
  EXPECT_GT(rows_seen, 500);
}

pattern::LocalAttention local_of(RingContext& context, const RankInputs& in) {
  pattern::LocalAttention local;
  local.layout = &context.layout();
  local.cp_rank = context.cp_rank();
  local.batch = in.q.size(0);
  local.num_q_heads = in.q.size(2);
  local.num_kv_heads = in.k.size(2);
  local.head_dim = in.q.size(3);
  local.dtype = kernel_dtype(in.q, "q");
  local.softmax_scale = 1 / std::sqrt(static_cast<double>(in.q.size(3)));
  local.q = const_view(in.q);
  local.k = const_view(in.k);
  local.document_starts =
      in.document_starts.defined() ? in.document_starts.const_data_ptr<int32_t>() : nullptr;
  return local;
}

void expect_equal(const index::Index& got, const index::Index& want) {
  EXPECT_EQ(got.blocks.row_begin, want.blocks.row_begin);
  EXPECT_EQ(got.blocks.key_blocks, want.blocks.key_blocks);
}

TEST(BlockPatterns, ByTensorsAreThoseOfTheHostOverRanksAndLayouts) {
  for (const int64_t seq_len : {1, 200, 1000}) {
    for (const Documents documents : {Documents::kOne, Documents::kMidBlock}) {
      for (const Precision precision : {Precision::kFloat32, Precision::kBFloat16}) {
        const RingProblem problem({.batch = 2,
                                   .seq_len = seq_len,
                                   .num_q_heads = 4,
                                   .num_kv_heads = 2,
                                   .head_dim = 16,
                                   .precision = precision,
                                   .documents = documents});
        for (const LayoutKind kind :
             {LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kBlockStriped}) {
          for (const int ranks : {1, 3}) {
            SCOPED_TRACE(concat(layout::to_string(kind), " over ", ranks, ", N ", seq_len));
            comm::run_loopback(ranks, [&](comm::Transport& transport) {
              testing::use_one_thread();
              RingContext context(ring_options(1, ranks, kind, 64, seq_len), transport);
              const RankInputs in = rank_inputs(problem, context.layout(), context.cp_rank());
              const pattern::LocalAttention local = local_of(context, in);
              for (const pattern::XAttentionOptions& options :
                   {pattern::XAttentionOptions{128, 16, 0.9}, {64, 64, 0.5}}) {
                expect_equal(xattention_by_tensors(context.state(), in.q, in.k, 0,
                                                   in.document_starts, options),
                             pattern::build_xattention(local, options, context.index_group()));
              }
              for (const pattern::MobaOptions& options :
                   {pattern::MobaOptions{128, 3}, {64, 1}, {192, 100}}) {
                expect_equal(
                    moba_by_tensors(context.state(), in.q, in.k, in.document_starts, options),
                    pattern::build_moba(local, options, context.index_group()));
              }
            });
          }
        }
      }
    }
  }
}

TEST(BlockPatterns, ValuesThatAreNotFiniteAreRefusedOnEveryRankInTheHostsWords) {
  const RingProblem problem({.seq_len = 300, .head_dim = 16});
  for (const bool in_q : {false, true}) {
    for (const bool moba : {false, true}) {
      comm::run_loopback(2, [&](comm::Transport& transport) {
        testing::use_one_thread();
        RingContext context(ring_options(1, 2, LayoutKind::kBlockStriped, 64, 300), transport);
        const RankInputs in = rank_inputs(problem, context.layout(), context.cp_rank());
        at::Tensor q = in.q.clone(), k = in.k.clone();
        const layout::Owner owner = context.layout().owner(210);
        if (owner.cp_rank == context.cp_rank())
          (in_q ? q : k)[0][owner.offset][1][5] = std::nan("");
        const RankInputs spoiled{q, k, in.v, in.dout, in.document_starts};
        const pattern::LocalAttention local = local_of(context, spoiled);
        const auto said = [](const auto& call) -> std::string {
          try {
            call();
          } catch (const InvalidArgument& error) {
            return error.what();
          }
          return "";
        };
        const std::string host = said([&] {
          if (moba)
            pattern::build_moba(local, {64, 3}, context.index_group());
          else
            pattern::build_xattention(local, {}, context.index_group());
        });
        const std::string tensors = said([&] {
          if (moba)
            moba_by_tensors(context.state(), q, k, {}, {64, 3});
          else
            xattention_by_tensors(context.state(), q, k, 0, {}, {});
        });
        EXPECT_NE(host, "");
        EXPECT_EQ(tensors, host);
      });
    }
  }
}

}  // namespace
}  // namespace mtraining::attention
