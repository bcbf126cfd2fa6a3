#include "mtraining/attention/ring_attention.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <mutex>
#include <thread>

#include "mtraining/attention/ring_case.h"
#include "mtraining/base/check.h"
#include "mtraining/index/step_pairs.h"

namespace mtraining::attention {
namespace {

using layout::LayoutKind;
using testing::Choice;
using testing::compare_with_truth;
using testing::Documents;
using testing::largest_difference;
using testing::Precision;
using testing::RankInputs;
using testing::RankResult;
using testing::ring_options;
using testing::RingProblem;
using testing::run_ring;
using testing::same_bits;
using testing::Solution;

constexpr auto kFlat = ring::RingKind::kFlat;
constexpr auto kHierarchical = ring::RingKind::kHierarchical;

/// The text of the error that the body ends with.
std::string error_of(int ranks, const std::function<void(comm::Transport&)>& body) {
  try {
    comm::run_loopback(ranks, body, std::chrono::seconds(20));
  } catch (const Error& e) {
    return e.what();
  }
  ADD_FAILURE() << "expected an error";
  return {};
}

#define EXPECT_TEXT(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

TEST(RingAttention, SingleBlocksOnEveryLayoutAndRingAreTheOracle) {
  for (const Documents documents : {Documents::kOne, Documents::kMidBlock}) {
    for (const int64_t seq_len : {90, 700}) {
      const RingProblem problem({.batch = 2,
                                 .seq_len = seq_len,
                                 .num_q_heads = 4,
                                 .num_kv_heads = 2,
                                 .documents = documents,
                                 .choice = Choice::kBlocks});
      for (const auto& [kind, stripe] :
           {std::pair<LayoutKind, int64_t>{LayoutKind::kContiguous, 64},
            {LayoutKind::kZigzag, 64},
            {LayoutKind::kBlockStriped, 64},
            {LayoutKind::kBlockStriped, 128}}) {
        for (const auto& [nodes, ranks] : {std::pair{1, 1}, {1, 3}, {2, 2}}) {
          RingOptions options = ring_options(nodes, ranks, kind, stripe, seq_len);
          options.ring = nodes > 1 ? kHierarchical : kFlat;
          EXPECT_EQ(compare_with_truth(run_ring(problem, options), problem).fault, "")
              << testing::to_string(options) << " N " << seq_len;
        }
      }
    }
  }
}

TEST(RingAttention, AStaleOrSwappedShardWouldShow) {
  // Keys and values grow with their block, so a shard taken for another one is far off.
  for (int cp_size : {4, 8}) {
    const RingProblem problem({.seq_len = 64 * 8 * 2,
                               .num_q_heads = 2,
                               .num_kv_heads = 1,
                               .choice = Choice::kDense,
                               .scale_by_block = 0.3});
    for (ring::InnerKind inner : {ring::InnerKind::kRing, ring::InnerKind::kGather}) {
      RingOptions options =
          ring_options(2, cp_size / 2, LayoutKind::kBlockStriped, 64, problem.options().seq_len);
      options.inner = inner;
      EXPECT_EQ(compare_with_truth(run_ring(problem, options), problem).fault, "")
          << testing::to_string(options);
    }
  }
}

TEST(RingAttention, FlatEqualsHierarchical) {
  const RingProblem problem({.seq_len = 700});
  const Solution flat = [&] {
    RingOptions options = ring_options(1, 4, LayoutKind::kBlockStriped, 64, 700);
    options.ring = kFlat;
    return run_ring(problem, options);
  }();
  for (auto [nodes, ranks] : {std::pair{1, 4}, {2, 2}, {4, 1}}) {
    for (ring::InnerKind inner : {ring::InnerKind::kRing, ring::InnerKind::kGather}) {
      RingOptions options = ring_options(nodes, ranks, LayoutKind::kBlockStriped, 64, 700);
      options.inner = inner;
      const Solution hierarchical = run_ring(problem, options);
      // out and lse to 1e-6; gradients are sums of up to 700 terms in another order.
      Solution out_only = hierarchical;
      out_only.dq = flat.dq;
      out_only.dk = flat.dk;
      out_only.dv = flat.dv;
      EXPECT_LE(largest_difference(flat, out_only), 2e-6) << testing::to_string(options);
      EXPECT_LE(largest_difference(flat, hierarchical), 2e-5) << testing::to_string(options);
    }
  }
}

TEST(RingAttention, ErrorOverEightRanksIsWithinTwiceThatOfOne) {
  for (Precision precision : {Precision::kFloat32, Precision::kBFloat16}) {
    const RingProblem problem(
        {.seq_len = 1000, .num_q_heads = 2, .num_kv_heads = 1, .precision = precision});
    const auto one = compare_with_truth(
        run_ring(problem, ring_options(1, 1, LayoutKind::kBlockStriped, 64, 1000)), problem);
    const auto eight = compare_with_truth(
        run_ring(problem, ring_options(2, 4, LayoutKind::kBlockStriped, 64, 1000)), problem);
    std::cout << "precision " << static_cast<int>(precision) << ": out " << one.worst_out << " and "
              << eight.worst_out << ", gradients " << one.worst_gradient << " and "
              << eight.worst_gradient << std::endl;
    EXPECT_EQ(one.fault, "");
    EXPECT_EQ(eight.fault, "");
    EXPECT_LE(eight.worst_out, 2 * one.worst_out);
    EXPECT_LE(eight.worst_gradient, 2 * one.worst_gradient);
  }
}

TEST(RingAttention, ThirtyTwoRanksMeetEveryPairExactlyOnce) {
  // With q = 0 every visible key weighs the same: exp(lse) counts them, and out is their mean. Each of the 8 random values of a
  // key would have to cancel for a missing or doubled pair to hide.
  const int64_t n = 64 * 32 + 100;
  const RingProblem problem(
      {.seq_len = n, .num_q_heads = 2, .num_kv_heads = 1, .head_dim = 8, .seed = 5});
  for (ring::InnerKind inner : {ring::InnerKind::kRing, ring::InnerKind::kGather}) {
    RingOptions options = ring_options(4, 8, LayoutKind::kBlockStriped, 64, n);
    options.inner = inner;
    const auto mask = problem.mask();
    std::mutex mutex;
    int64_t rows_seen = 0;
    comm::run_loopback(32, [&](comm::Transport& transport) {
      testing::use_one_thread();
      RingContext context(options, transport);
      const RankInputs in = rank_inputs(problem, context.layout(), context.cp_rank());
      const ForwardResult result =
          ring_forward(context, at::zeros_like(in.q), in.k, in.v, problem.index(), 1.0);
      const std::vector<int64_t> positions = context.layout().positions(context.cp_rank());
      const std::vector<double>& values = problem.inputs().v;
      int64_t wrong = 0, rows = 0;
      for (int64_t h = 0; h < 2; ++h) {
        for (size_t t = 0; t < positions.size(); ++t) {
          if (positions[t] >= n) continue;
          ++rows;
          int64_t count = 0;
          double sum[8] = {};
          for (int64_t j = 0; j <= positions[t]; ++j) {
            if (!mask(0, h, positions[t], j)) continue;
            ++count;
            for (int d = 0; d < 8; ++d) sum[d] += values[j * 8 + d];
          }
          const auto row = static_cast<int64_t>(t);
          wrong += std::llround(std::exp(result.lse[0][h][row].item<double>())) != count;
          const at::Tensor out = result.out[0][row][h];
          for (int d = 0; d < 8 && count > 0; ++d) {
            wrong += std::abs(out[d].item<double>() - sum[d] / static_cast<double>(count)) > 1e-4;
          }
        }
      }
      std::unique_lock lock(mutex);
      EXPECT_EQ(wrong, 0) << "rank " << context.cp_rank();
      rows_seen += rows;
    });
    EXPECT_EQ(rows_seen, 2 * n);
  }
}

TEST(RingAttention, ThirtyTwoRanksEqualTheOracle) {
  const RingProblem problem({.seq_len = 64 * 32 + 1,
                             .num_q_heads = 1,
                             .num_kv_heads = 1,
                             .head_dim = 64,
                             .choice = Choice::kFew});
  const RingOptions options =
      ring_options(4, 8, LayoutKind::kBlockStriped, 64, problem.options().seq_len);
  EXPECT_EQ(compare_with_truth(run_ring(problem, options), problem).fault, "");
}

TEST(RingAttention, ARankOfPaddingOnlyJoinsAndGetsNothing) {
  for (LayoutKind kind :
       {LayoutKind::kContiguous, LayoutKind::kBlockStriped, LayoutKind::kZigzag}) {
    const RingProblem problem({.seq_len = 70, .num_q_heads = 2, .num_kv_heads = 1});
    int64_t empty_ranks = 0;
    std::mutex mutex;
    const Solution got = run_ring(
        problem, ring_options(2, 2, kind, 64, 70),
        [&](RingContext& context, const RankInputs&, const RankResult& result) {
          const std::vector<int64_t> positions = context.layout().positions(context.cp_rank());
          if (positions[0] < 70) return;
          std::unique_lock lock(mutex);
          ++empty_ranks;
          EXPECT_TRUE((result.forward.out == 0).all().item<bool>());
          EXPECT_TRUE((result.backward.dk == 0).all().item<bool>());
        });
    EXPECT_GE(empty_ranks, 1);
    EXPECT_EQ(compare_with_truth(got, problem).fault, "");
  }
}

TEST(RingAttention, SlicesOfColumnsDoNotChangeTheResult) {
  const RingProblem problem({.seq_len = 500});
  RingOptions options = ring_options(2, 2, LayoutKind::kBlockStriped, 64, 500);
  const Solution whole = run_ring(problem, options);
  for (int64_t rows : {1, 3, 20}) {
    options.max_column_rows_per_rank = rows;
    const Solution sliced = run_ring(problem, options);
    EXPECT_EQ(compare_with_truth(sliced, problem).fault, "") << rows;
    EXPECT_LE(largest_difference(whole, sliced), 5e-5) << rows;
  }
}

TEST(RingAttention, BFloat16TransportOfGradientsCostsNoMoreThanItsRounding) {
  const RingProblem problem(
      {.seq_len = 500, .num_q_heads = 2, .num_kv_heads = 1, .precision = Precision::kBFloat16});
  for (ring::InnerKind inner : {ring::InnerKind::kRing, ring::InnerKind::kGather}) {
    RingOptions options = ring_options(2, 4, LayoutKind::kBlockStriped, 64, 500);
    options.inner = inner;
    const Solution exact = run_ring(problem, options);
    options.gradient_transport = GradientTransport::kBFloat16;
    int64_t grad_bytes = -1;
    std::mutex mutex;
    const Solution rounded =
        run_ring(problem, options, [&](RingContext& context, const RankInputs&, const RankResult&) {
          std::unique_lock lock(mutex);
          grad_bytes = context.bytes_sent(ring::Channel::kOuterGrad);
        });
    // Two outer hops of dk and dv in two bytes.
    EXPECT_EQ(grad_bytes, 2 * 2 * 2 * 64 * 64 * 1);
    EXPECT_EQ(exact.dq, rounded.dq);
    for (const auto& [a, b] : {std::pair{&exact.dk, &rounded.dk}, {&exact.dv, &rounded.dv}}) {
      double difference = 0, norm = 0;
      for (size_t i = 0; i < a->size(); ++i) {
        difference += ((*a)[i] - (*b)[i]) * ((*a)[i] - (*b)[i]);
        norm += (*a)[i] * (*a)[i];
      }
      EXPECT_GT(difference, 0);
      EXPECT_LT(std::sqrt(difference / norm), 8 * 0x1p-9);  // a rounding a hop
    }
  }
}

TEST(RingAttention, BackwardTwiceIsBitwiseEqual) {
  const RingProblem problem(
      {.seq_len = 500, .precision = Precision::kBFloat16, .documents = Documents::kMidBlock});
  for (ColumnMode columns : {ColumnMode::kOnce, ColumnMode::kPerStep}) {
    RingOptions options = ring_options(2, 2, LayoutKind::kBlockStriped, 128, 500);
    options.columns = columns;
    const Solution first =
        run_ring(problem, options,
                 [&](RingContext& context, const RankInputs& in, const RankResult& result) {
                   // Forward again (as recomputation does), and backward again from it, on buffers that other calls have used.
                   const ForwardResult forward = ring_forward(
                       context, in.q, in.k, in.v, problem.index(), 0, in.document_starts);
                   EXPECT_TRUE(at::equal(forward.out, result.forward.out));
                   EXPECT_TRUE(at::equal(forward.lse, result.forward.lse));
                   const BackwardResult backward =
                       ring_backward(context, in.dout, in.q, in.k, in.v, forward.out, forward.lse,
                                     problem.index(), 0, in.document_starts, forward.out_residual);
                   EXPECT_TRUE(at::equal(backward.dq, result.backward.dq));
                   EXPECT_TRUE(at::equal(backward.dk, result.backward.dk));
                   EXPECT_TRUE(at::equal(backward.dv, result.backward.dv));
                 });
    EXPECT_TRUE(same_bits(first, run_ring(problem, options)));
  }
}

TEST(RingAttention, CountedBytesAreTheSchedulesTraffic) {
  const RingProblem problem(
      {.seq_len = 500, .num_q_heads = 4, .num_kv_heads = 1, .precision = Precision::kBFloat16});
  for (auto [nodes, ranks, kind] : {std::tuple{1, 4, kFlat},
                                    {2, 2, kFlat},
                                    {1, 4, kHierarchical},
                                    {2, 2, kHierarchical},
                                    {4, 1, kHierarchical},
                                    {2, 3, kHierarchical}}) {
    for (ring::InnerKind inner : {ring::InnerKind::kRing, ring::InnerKind::kGather}) {
      RingOptions options = ring_options(nodes, ranks, LayoutKind::kBlockStriped, 64, 500);
      options.ring = kind;
      options.inner = inner;
      run_ring(
          problem, options, [&](RingContext& context, const RankInputs& in, const RankResult&) {
            const ring::ScheduleOptions schedule{
                .topology = options.topology, .ring = kind, .inner = inner};
            ring::Traffic sum;
            for (const ring::Schedule& s : {ring::forward_schedule(schedule, context.cp_rank()),
                                            ring::backward_schedule(schedule, context.cp_rank())}) {
              const ring::Traffic t = ring::traffic(s, options.topology, context.cp_rank());
              sum.kv_inner += t.kv_inner;
              sum.kv_outer += t.kv_outer;
              sum.grad_inner += t.grad_inner;
              sum.grad_outer += t.grad_outer;
            }
            // One kv head travels, not four: bf16 K and V, float32 dk and dv.
            const int64_t kv_unit = 2 * in.k.numel() * 2, grad_unit = 2 * in.k.numel() * 4;
            const auto sent = [&](ring::Channel channel) { return context.bytes_sent(channel); };
            SCOPED_TRACE(testing::to_string(options));
            if (kind == kFlat) {
              EXPECT_EQ(sent(ring::Channel::kFlatKv), (sum.kv_inner + sum.kv_outer) * kv_unit);
              EXPECT_EQ(sent(ring::Channel::kFlatGrad),
                        (sum.grad_inner + sum.grad_outer) * grad_unit);
              EXPECT_EQ(sent(ring::Channel::kFlatKv),
                        2 * (nodes * ranks - 1) * kv_unit);  // forward and backward
            } else {
              EXPECT_EQ(sent(ring::Channel::kInnerKv), sum.kv_inner * kv_unit);
              EXPECT_EQ(sent(ring::Channel::kOuterKv), sum.kv_outer * kv_unit);
              EXPECT_EQ(sent(ring::Channel::kInnerGrad), sum.grad_inner * grad_unit);
              EXPECT_EQ(sent(ring::Channel::kOuterGrad), sum.grad_outer * grad_unit);
            }
          });
    }
  }
}

TEST(RingAttention, ResultsOutliveTheNextCall) {
  // float32 results need no conversion; they must still be no views of the shared buffers.
  for (Precision precision : {Precision::kFloat32, Precision::kBFloat16}) {
    const RingProblem problem({.seq_len = 500, .precision = precision});
    const RingProblem other({.seq_len = 500, .precision = precision, .seed = 2});
    const RingOptions options = ring_options(2, 2, LayoutKind::kBlockStriped, 64, 500);
    run_ring(problem, options,
             [&](RingContext& context, const RankInputs&, const RankResult& kept) {
               const std::vector<at::Tensor> tensors = {kept.forward.out, kept.forward.lse,
                                                        kept.backward.dq, kept.backward.dk,
                                                        kept.backward.dv};
               std::vector<at::Tensor> copies;
               for (const at::Tensor& t : tensors) copies.push_back(t.clone());
               run_rank(context, other);
               for (size_t i = 0; i < tensors.size(); ++i)
                 EXPECT_TRUE(at::equal(tensors[i], copies[i])) << i;
             });
  }
}

TEST(RingAttention, AnyStridesGiveTheSameBits) {
  const RingProblem problem({.seq_len = 300});
  const RingOptions options = ring_options(1, 2, LayoutKind::kBlockStriped, 64, 300);
  run_ring(problem, options,
           [&](RingContext& context, const RankInputs& in, const RankResult& result) {
             const auto head_major = [](const at::Tensor& t) {
               return t.transpose(1, 2).contiguous().transpose(1, 2);
             };
             const auto sliced = [](const at::Tensor& t) {
               return at::cat({t, t + 1, t, t - 1}, 3).slice(3, 0, t.size(3));
             };
             const auto token_strided = [](const at::Tensor& t) {
               return t.transpose(2, 3).contiguous().transpose(2, 3);
             };
             for (const auto& f : {std::function<at::Tensor(const at::Tensor&)>(head_major),
                                   {sliced},
                                   {token_strided}}) {
               const ForwardResult forward =
                   ring_forward(context, f(in.q), f(in.k), f(in.v), problem.index(), 0);
               EXPECT_TRUE(at::equal(forward.out, result.forward.out));
               const BackwardResult backward =
                   ring_backward(context, f(in.dout), f(in.q), f(in.k), f(in.v), f(forward.out),
                                 forward.lse, problem.index(), 0);
               EXPECT_TRUE(at::equal(backward.dq, result.backward.dq));
               EXPECT_TRUE(at::equal(backward.dk, result.backward.dk));
               EXPECT_TRUE(at::equal(backward.dv, result.backward.dv));
             }
             // The gradient of sum(): one number with stride 0.
             const at::Tensor expanded = at::full({1}, 0.5, in.q.options()).expand(in.q.sizes());
             const BackwardResult a =
                 ring_backward(context, expanded, in.q, in.k, in.v, result.forward.out,
                               result.forward.lse, problem.index(), 0);
             const BackwardResult b =
                 ring_backward(context, expanded.contiguous(), in.q, in.k, in.v, result.forward.out,
                               result.forward.lse, problem.index(), 0);
             EXPECT_TRUE(at::equal(a.dq, b.dq));
             EXPECT_TRUE(at::equal(a.dv, b.dv));
           });
}

TEST(RingAttention, BuffersAreAllocatedOnce) {
  const RingProblem problem({.seq_len = 500}),
      shorter_index({.seq_len = 500, .choice = Choice::kFew});
  RingOptions options = ring_options(2, 2, LayoutKind::kBlockStriped, 64, 500);
  options.max_column_rows_per_rank = 8;
  run_ring(problem, options, [&](RingContext& context, const RankInputs&, const RankResult&) {
    const int64_t bytes = context.buffer_bytes();
    EXPECT_GT(bytes, 0);
    run_rank(context, problem);
    run_rank(context, shorter_index);
    EXPECT_EQ(context.buffer_bytes(), bytes);
  });
}

TEST(RingAttention, TheObserverSeesEveryLaunchAndAllPairs) {
  const RingProblem problem({.seq_len = 500});
  int64_t whole = 0;
  for (int h = 0; h < 4; ++h) whole += index::computed_pairs(problem.index(), 0, h);
  for (ColumnMode columns : {ColumnMode::kOnce, ColumnMode::kPerStep}) {
    RingOptions options = ring_options(2, 2, LayoutKind::kBlockStriped, 64, 500);
    options.columns = columns;
    options.inner = ring::InnerKind::kRing;
    int64_t pairs = 0;
    std::mutex mutex;
    comm::run_loopback(4, [&](comm::Transport& transport) {
      testing::use_one_thread();
      RingContext context(options, transport);
      int launches = 0;
      int64_t seen = 0, last_end = 0;
      std::vector<int> source_of_step;
      for (const ring::Op& op :
           ring::forward_schedule(
               {.topology = options.topology, .ring = options.ring, .inner = options.inner},
               context.cp_rank())
               .ops) {
        if (op.kind == ring::OpKind::kLaunch) source_of_step.push_back(op.sources[0].source_rank);
      }
      context.set_observer([&](const StepTiming& step) {
        const std::string what = step.what;
        EXPECT_LE(step.begin_us, step.end_us);
        if (what == "forward") {
          EXPECT_EQ(step.ring_step, launches++);
          int64_t expected = 0;
          const auto add = [&](int source, bool with_columns, int64_t sign) {
            for (int64_t row = 0; row < 4; ++row)
              expected += sign * index::step_pairs(problem.index(), context.layout(),
                                                   context.cp_rank(), source, row, with_columns);
          };
          add(source_of_step.at(step.ring_step), columns == ColumnMode::kPerStep, 1);
          // The last launch takes those of all shards along.
          for (int source = 0; columns == ColumnMode::kOnce && step.ring_step == 3 && source < 4;
               ++source) {
            add(source, true, 1);
            add(source, false, -1);
          }
          EXPECT_EQ(step.pairs, expected);
        }
        EXPECT_NE(what, "columns");
        if (what != "wait") {
          EXPECT_GE(step.begin_us, last_end);  // launches do not overlap
          last_end = step.end_us;
        }
        seen += step.pairs;
      });
      const RankInputs in = rank_inputs(problem, context.layout(), context.cp_rank());
      ring_forward(context, in.q, in.k, in.v, problem.index(), 0);
      EXPECT_EQ(launches, 4);
      std::unique_lock lock(mutex);
      pairs += seen;
    });
    EXPECT_EQ(pairs, whole);
  }
}

TEST(RingAttention, AUnionOfColumnsLargerThanHalfOfTheKeysIsTakenStepByStep) {
  for (Choice choice : {Choice::kMany, Choice::kSparse}) {
    const RingProblem problem({.seq_len = 500, .choice = choice});
    RingOptions options = ring_options(1, 2, LayoutKind::kBlockStriped, 64, 500);
    options.inner = ring::InnerKind::kRing;
    comm::run_loopback(2, [&](comm::Transport& transport) {
      testing::use_one_thread();
      RingContext context(options, transport);
      // The first launch has the own shard; its columns too, unless those of all shards are exchanged.
      int64_t of_blocks = 0, with_columns = 0;
      for (int64_t row = 0; row < 4; ++row) {
        const auto pairs = [&](bool columns) {
          return index::step_pairs(problem.index(), context.layout(), context.cp_rank(),
                                   context.cp_rank(), row, columns);
        };
        of_blocks += pairs(false);
        with_columns += pairs(true);
      }
      ASSERT_LT(of_blocks, with_columns);
      int first_launches = 0;
      context.set_observer([&](const StepTiming& step) {
        const std::string what = step.what;
        if ((what != "forward" && what != "backward") || step.ring_step != 0) return;
        ++first_launches;
        EXPECT_EQ(step.pairs, choice == Choice::kMany ? with_columns : of_blocks);
      });
      run_rank(context, problem);
      EXPECT_EQ(first_launches, 2);
    });
  }
}

TEST(RingContext, TwoGroupsOfAJobWorkSideBySide) {
  // Data parallel 2 x context parallel 2, each group with its own sequence.
  const RingProblem first({.seq_len = 300, .seed = 1}), second({.seq_len = 300, .seed = 2});
  Solution whole[2] = {empty_solution(first), empty_solution(second)};
  std::mutex mutex;
  comm::run_loopback(4, [&](comm::Transport& transport) {
    testing::use_one_thread();
    const int group = transport.rank() / 2;
    RingContext context(ring_options(1, 2, LayoutKind::kBlockStriped, 64, 300), transport,
                        {2 * group, 2 * group + 1});
    EXPECT_EQ(context.cp_rank(), transport.rank() % 2);
    const RingProblem& problem = group == 0 ? first : second;
    const RankResult result = run_rank(context, problem);
    std::unique_lock lock(mutex);
    put_rank(result, problem, context.layout(), context.cp_rank(), whole[group]);
  });
  EXPECT_EQ(compare_with_truth(whole[0], first).fault, "");
  EXPECT_EQ(compare_with_truth(whole[1], second).fault, "");
}

TEST(RingContext, ResiduesAreNumberedOverNodesUnderAHierarchicalRingAlone) {
  comm::run_loopback(4, [](comm::Transport& transport) {
    RingOptions options = ring_options(2, 2, LayoutKind::kBlockStriped, 64, 500);
    EXPECT_EQ(RingContext(options, transport).layout().residue(1), 2);  // local rank 1 of node 0
    options.ring = kFlat;
    EXPECT_EQ(RingContext(options, transport).layout().residue(1), 1);
  });
}

TEST(RingContext, RefusesOptionsThatContradictThemselves) {
  const auto error = [](const std::function<void(RingOptions&)>& change) {
    return error_of(4, [&](comm::Transport& transport) {
      RingOptions options = ring_options(2, 2, LayoutKind::kBlockStriped, 64, 500);
      change(options);
      RingContext context(options, transport);
    });
  };
  // The node size of a hierarchical ring is missing.
  EXPECT_TEXT(error([](RingOptions& o) { o.topology = {}; }),
              "expected nodes x ranks_per_node = cp_size 4, got 1x1 (ring = hierarchical needs "
              "parallel.cp_inner_size)");
  EXPECT_TEXT(error([](RingOptions& o) {
                o.layout.cp_size = 2;
                o.topology = {1, 2};
              }),
              "cp_size: expected the 4 ranks");
  EXPECT_TEXT(error([](RingOptions& o) { o.layout.stripe = 48; }), "stripe");
  EXPECT_TEXT(error([](RingOptions& o) { o.layout.seq_len = 0; }), "seq_len");
  EXPECT_TEXT(error([](RingOptions& o) { o.prefetch_steps = 0; }),
              "attention.prefetch_steps: expected >= 1, got 0");
  EXPECT_TEXT(error([](RingOptions& o) {
                o.ring = kFlat;
                o.ring_stride = 2;
              }),
              "ring_stride");
  EXPECT_TEXT(error([](RingOptions& o) { o.max_column_rows_per_rank = 0; }),
              "max_column_rows_per_rank");
}

TEST(RingContext, ARankWithOtherOptionsIsNamed) {
  const auto error = [](const std::function<void(RingOptions&)>& change) {
    return error_of(4, [&](comm::Transport& transport) {
      RingOptions options = ring_options(2, 2, LayoutKind::kBlockStriped, 64, 500);
      if (transport.rank() == 2) change(options);
      RingContext context(options, transport);
    });
  };
  EXPECT_TEXT(error([](RingOptions& o) { o.layout.seq_len = 501; }), "seq_len: ranks differ");
  EXPECT_TEXT(error([](RingOptions& o) { o.prefetch_steps = 3; }),
              "attention.prefetch_steps: ranks differ");
  EXPECT_TEXT(error([](RingOptions& o) { o.topology = {1, 4}; }), "ranks differ");
  const std::string text = error([](RingOptions& o) { o.columns = ColumnMode::kPerStep; });
  EXPECT_TEXT(text, "attention.columns: ranks differ");
  EXPECT_TEXT(text, "rank 2");
}

TEST(RingAttention, WrongInputsAreSaidInOneSentence) {
  const RingProblem problem({.seq_len = 500});
  const auto error = [&](const std::function<void(RankInputs&)>& change) {
    return error_of(2, [&](comm::Transport& transport) {
      testing::use_one_thread();
      RingContext context(ring_options(1, 2, LayoutKind::kBlockStriped, 64, 500), transport);
      RankInputs in = rank_inputs(problem, context.layout(), context.cp_rank());
      in.document_starts = at::zeros({1, 500}, at::kInt);
      change(in);
      const ForwardResult result =
          ring_forward(context, in.q, in.k, in.v, problem.index(), 0, in.document_starts);
      ring_backward(context, in.dout, in.q, in.k, in.v, result.out, result.lse, problem.index(), 0,
                    in.document_starts);
    });
  };
  EXPECT_TEXT(error([](RankInputs& in) { in.q = in.q.to(at::kBFloat16); }),
              "k: expected [B=1, S_local=256, Hk=2, D=64] bf16, got [1, 256, 2, 64] float32");
  EXPECT_TEXT(error([](RankInputs& in) { in.q = in.q.slice(1, 0, 255); }),
              "q: expected [B=1, S_local=256, H=4, D=64] float32, got [1, 255, 4, 64] float32");
  EXPECT_TEXT(error([](RankInputs& in) { in.q = in.q.slice(2, 0, 2); }),
              "q: expected [B=1, S_local=256, H=4, D=64] float32, got [1, 256, 2, 64]");
  EXPECT_TEXT(error([](RankInputs& in) { in.k = in.k.slice(3, 0, 32); }),
              "k: expected [B=1, S_local=256, Hk=2, D=64] float32, got [1, 256, 2, 32]");
  EXPECT_TEXT(error([](RankInputs& in) { in.v = in.v.slice(2, 0, 1); }),
              "v: expected [B=1, S_local=256, Hk=2, D=64] float32, got [1, 256, 1, 64]");
  EXPECT_TEXT(error([](RankInputs& in) {
                in.k = in.v = at::cat({in.k, in.k.slice(2, 0, 1)}, 2);
              }),
              "divides H=4, got [1, 256, 3, 64]");
  EXPECT_TEXT(error([](RankInputs& in) { in.q = at::Tensor(); }),
              "q: expected [B=1, S_local=256, H=4, D=0] float32, got an undefined tensor");
  EXPECT_TEXT(error([](RankInputs& in) {
                in.q = in.q.to(at::kLong);
                in.k = in.v = in.k.to(at::kLong);
              }),
              "q: expected float32, bf16, fp16 or float64, got Long");
  EXPECT_TEXT(error([](RankInputs& in) { in.dout = in.dout[0]; }),
              "dout: expected [B=1, S_local=256, H=4, D=64] float32, got [256, 4, 64]");
  EXPECT_TEXT(error([](RankInputs& in) {
                in.document_starts = at::zeros({1, 256}, at::kInt);
              }),
              "document_starts: expected [B=1, S=500] int32, got [1, 256] int32");
  EXPECT_TEXT(error([](RankInputs& in) {
                in.document_starts = at::full({1, 500}, 3, at::kInt);
              }),
              "document_starts[0, 0]: expected 0 .. 0, got 3");
}

TEST(RingAttention, RanksThatMeanDifferentCallsAreToldBeforeAnyShardMoves) {
  const RingProblem problem({.seq_len = 500}), other({.seq_len = 500, .seed = 9}),
      heads({.seq_len = 500, .num_kv_heads = 1});
  const auto error = [&](const RingProblem& second,
                         const std::function<void(RankInputs&)>& change) {
    return error_of(2, [&](comm::Transport& transport) {
      testing::use_one_thread();
      RingContext context(ring_options(1, 2, LayoutKind::kBlockStriped, 64, 500), transport);
      const RingProblem& mine = transport.rank() == 1 ? second : problem;
      RankInputs in = rank_inputs(mine, context.layout(), context.cp_rank());
      if (transport.rank() == 1) change(in);
      try {
        ring_forward(context, in.q, in.k, in.v, mine.index(), 0, in.document_starts);
      } catch (const Error&) {
        for (auto channel :
             {ring::Channel::kFlatKv, ring::Channel::kInnerKv, ring::Channel::kOuterKv})
          EXPECT_EQ(context.bytes_sent(channel), 0);
        throw;
      }
    });
  };
  EXPECT_TEXT(error(other, [](RankInputs&) {}), "ranks differ in the index's digest");
  EXPECT_TEXT(error(heads, [](RankInputs&) {}), "ranks differ in num_kv_heads");
  EXPECT_TEXT(error(problem,
                    [](RankInputs& in) {
                      in.document_starts = at::zeros({1, 500}, at::kInt);
                    }),
              "ranks differ in document_starts' digest");
  EXPECT_TEXT(error(problem,
                    [](RankInputs& in) {
                      in.q = in.q.to(at::kHalf);
                      in.k = in.k.to(at::kHalf);
                      in.v = in.v.to(at::kHalf);
                    }),
              "ranks differ in dtype");
}

TEST(RingAttention, ARankThatFailsInALaunchEndsTheOthersWithItsCause) {
  for (bool backward : {false, true}) {
    const RingProblem problem({.seq_len = 500});
    const auto start = std::chrono::steady_clock::now();
    std::mutex mutex;
    std::vector<std::string> others;
    EXPECT_THROW(comm::run_loopback(
                     4,
                     [&](comm::Transport& transport) {
                       testing::use_one_thread();
                       RingContext context(ring_options(2, 2, LayoutKind::kBlockStriped, 64, 500),
                                           transport);
                       const RankInputs in =
                           rank_inputs(problem, context.layout(), context.cp_rank());
                       const std::string where = backward ? "backward" : "forward";
                       context.set_observer([&](const StepTiming& step) {
                         if (transport.rank() == 1 && step.ring_step == 0 && step.what == where)
                           throw std::logic_error("the kernel broke");
                       });
                       try {
                         testing::run_rank(context, problem);
                       } catch (const ExternalError& e) {
                         std::unique_lock lock(mutex);
                         others.push_back(e.what());
                         throw;
                       }
                     }),
                 std::logic_error);
    EXPECT_LT(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(), 10);
    EXPECT_GE(others.size(), 1u);
    for (const std::string& text : others)
      EXPECT_TEXT(text, "rank 1 failed first: the kernel broke");
  }
}

}  // namespace
}  // namespace mtraining::attention
