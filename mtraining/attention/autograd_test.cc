#include "mtraining/attention/autograd.h"

#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>
#include <string>

#include "mtraining/attention/ring_case.h"
#include "mtraining/base/check.h"

namespace mtraining::attention {
namespace {

using layout::LayoutKind;
using testing::Choice;
using testing::Documents;
using testing::Precision;
using testing::RankInputs;
using testing::ring_options;
using testing::RingProblem;

std::shared_ptr<const index::Index> shared(const index::Index& index) {
  return std::make_shared<const index::Index>(index);
}

void require_grad(RankInputs& in) {
  for (at::Tensor* t : {&in.q, &in.k, &in.v}) *t = t->detach().requires_grad_(true);
}

std::vector<at::Tensor> gradients(const at::Tensor& out, const at::Tensor& dout,
                                  const RankInputs& in) {
  return torch::autograd::grad({out}, {in.q, in.k, in.v}, {dout});
}

TEST(SparseRingAttention, GradientsAreRingBackwards) {
  const RingProblem problem(
      {.seq_len = 300, .precision = Precision::kBFloat16, .documents = Documents::kMidBlock});
  comm::run_loopback(4, [&](comm::Transport& transport) {
    testing::use_one_thread();
    RingContext context(ring_options(2, 2, LayoutKind::kBlockStriped, 64, 300), transport);
    RankInputs in = rank_inputs(problem, context.layout(), context.cp_rank());
    const testing::RankResult expected = testing::run_rank(context, problem);
    require_grad(in);
    AttentionCall call;
    call.index = shared(problem.index());
    call.document_starts = in.document_starts;
    const AttentionOutput output = sparse_ring_attention(context, in.q, in.k, in.v, call);
    EXPECT_TRUE(at::equal(output.out, expected.forward.out));
    EXPECT_TRUE(at::equal(output.lse, expected.forward.lse));
    EXPECT_TRUE(output.out.requires_grad());
    EXPECT_FALSE(output.lse.requires_grad());
    EXPECT_EQ(output.index, call.index);
    const std::vector<at::Tensor> got = gradients(output.out, in.dout, in);
    EXPECT_TRUE(at::equal(got[0], expected.backward.dq));
    EXPECT_TRUE(at::equal(got[1], expected.backward.dk));
    EXPECT_TRUE(at::equal(got[2], expected.backward.dv));
  });
}

TEST(SparseRingAttention, FiniteDifferencesWithTheIndexFrozen) {
  // The choice is discrete, so the gradient is that of masked attention: every entry of q, k and v of 16 tokens, in float64.
  for (int ranks : {1, 2}) {
    const RingProblem problem({.seq_len = 16,
                               .num_q_heads = 2,
                               .num_kv_heads = 1,
                               .head_dim = 8,
                               .precision = Precision::kFloat64,
                               .choice = Choice::kMany});
    for (ColumnMode columns : {ColumnMode::kOnce, ColumnMode::kPerStep}) {
      RingOptions options = ring_options(1, ranks, LayoutKind::kBlockStriped, 64, 16);
      options.columns = columns;
      comm::run_loopback(ranks, [&](comm::Transport& transport) {
        testing::use_one_thread();
        RingContext context(options, transport);
        RankInputs in = rank_inputs(problem, context.layout(), context.cp_rank());
        in.q = at::nan_to_num(in.q);  // padding: differences of NaN say nothing
        in.k = at::nan_to_num(in.k);
        in.v = at::nan_to_num(in.v);
        in.dout = at::nan_to_num(in.dout);
        require_grad(in);
        AttentionCall call;
        call.index = shared(problem.index());
        const auto loss = [&](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
          return (sparse_ring_attention(context, q, k, v, call).out * in.dout).sum();
        };
        const std::vector<at::Tensor> analytic =
            torch::autograd::grad({loss(in.q, in.k, in.v)}, {in.q, in.k, in.v});
        // Tokens 0..15 live on rank 0; the others only take part.
        constexpr double kStep = 1e-6;
        double worst = 0;
        for (int which = 0; which < 3; ++which) {
          const int64_t heads = which == 0 ? 2 : 1;
          for (int64_t i = 0; i < 16 * heads * 8; ++i) {
            double values[2];
            for (int side = 0; side < 2; ++side) {
              const at::NoGradGuard no_grad;
              at::Tensor tensors[3] = {in.q.clone(), in.k.clone(), in.v.clone()};
              if (context.cp_rank() == 0) tensors[which].view(-1)[i] += side == 0 ? kStep : -kStep;
              values[side] = loss(tensors[0], tensors[1], tensors[2]).item<double>();
            }
            if (context.cp_rank() != 0) continue;
            const double numeric = (values[0] - values[1]) / (2 * kStep);
            worst = std::max(worst, std::abs(numeric - analytic[which].view(-1)[i].item<double>()));
          }
        }
        EXPECT_LT(worst, 1e-7);
      });
    }
  }
}

TEST(SparseRingAttention, TheIndexIsBuiltOnceAndReplayed) {
  const RingProblem problem({.seq_len = 600, .num_q_heads = 2, .num_kv_heads = 1});
  comm::run_loopback(4, [&](comm::Transport& transport) {
    testing::use_one_thread();
    RingContext context(ring_options(2, 2, LayoutKind::kBlockStriped, 64, 600), transport);
    int built = 0;
    context.set_observer(
        [&](const StepTiming& step) { built += std::string(step.what) == "index"; });
    RankInputs in = rank_inputs(problem, context.layout(), context.cp_rank());
    require_grad(in);
    AttentionCall call;
    call.pattern.vertical_slash.p_vertical = 0.8;
    call.pattern.vertical_slash.p_slash = 0.8;
    call.pattern.vertical_slash.dense_threshold = 1;
    call.measure_recall = true;
    const AttentionOutput output = sparse_ring_attention(context, in.q, in.k, in.v, call);
    EXPECT_EQ(built, 1);
    ASSERT_TRUE(output.recall.has_value());
    EXPECT_GT(output.recall->window, 0.5);
    const std::vector<at::Tensor> first = gradients(output.out, in.dout, in);
    EXPECT_EQ(built, 1);

    // Recomputation replays it and gives the same bits, even where the inputs now would choose otherwise.
    AttentionCall replay = call;
    replay.index = output.index;
    const AttentionOutput again = sparse_ring_attention(context, in.q, in.k, in.v, replay);
    EXPECT_EQ(built, 1);
    EXPECT_TRUE(at::equal(again.out, output.out));
    const std::vector<at::Tensor> second = gradients(again.out, in.dout, in);
    for (int i = 0; i < 3; ++i) EXPECT_TRUE(at::equal(first[i], second[i]));
    const at::Tensor other_q = at::nan_to_num(in.q.detach()).flip(3);
    EXPECT_EQ(sparse_ring_attention(context, other_q, in.k, in.v, replay).index, output.index);
    EXPECT_EQ(built, 1);
  });
}

TEST(SparseRingAttention, VerticalSlashOverRanksEqualsTheOracleOfItsOwnIndex) {
  const RingProblem problem({.seq_len = 500});
  std::mutex mutex;
  std::shared_ptr<const index::Index> of_one;
  for (auto [nodes, ranks] : {std::pair{1, 1}, {2, 2}}) {
    comm::run_loopback(
        nodes * ranks, [&, nodes = nodes, ranks = ranks](comm::Transport& transport) {
          testing::use_one_thread();
          RingContext context(ring_options(nodes, ranks, LayoutKind::kBlockStriped, 64, 500),
                              transport);
          const RankInputs in = rank_inputs(problem, context.layout(), context.cp_rank());
          AttentionCall call;
          call.pattern.vertical_slash.dense_threshold = 1;
          const AttentionOutput output = sparse_ring_attention(context, in.q, in.k, in.v, call);
          const ForwardResult same = ring_forward(context, in.q, in.k, in.v, *output.index, 0);
          EXPECT_TRUE(at::equal(output.out, same.out));
          std::unique_lock lock(mutex);
          if (!of_one) of_one = output.index;
          for (int64_t r = 0; r < of_one->columns.rows; ++r) {
            const auto equal = [](auto a, auto b) {
              return std::equal(a.begin(), a.end(), b.begin(), b.end());
            };
            EXPECT_TRUE(equal(of_one->columns.row(r), output.index->columns.row(r)));
            EXPECT_TRUE(equal(of_one->diagonals.row(r), output.index->diagonals.row(r)));
          }
        });
  }
}

TEST(SparseRingAttention, LayersKeepTheirOwnIndex) {
  // Two forwards, then both backwards, as two layers make them.
  const RingProblem first({.seq_len = 300, .seed = 1}), second({.seq_len = 300, .seed = 2});
  comm::run_loopback(2, [&](comm::Transport& transport) {
    testing::use_one_thread();
    RingContext context(ring_options(1, 2, LayoutKind::kBlockStriped, 64, 300), transport);
    std::vector<RankInputs> inputs;
    std::vector<testing::RankResult> expected;
    std::vector<AttentionOutput> outputs;
    for (const RingProblem* problem : {&first, &second}) {
      expected.push_back(testing::run_rank(context, *problem));
      inputs.push_back(rank_inputs(*problem, context.layout(), context.cp_rank()));
      require_grad(inputs.back());
      AttentionCall call;
      call.index = shared(problem->index());
      outputs.push_back(
          sparse_ring_attention(context, inputs.back().q, inputs.back().k, inputs.back().v, call));
    }
    for (int layer : {1, 0}) {
      const auto got = gradients(outputs[layer].out, inputs[layer].dout, inputs[layer]);
      EXPECT_TRUE(at::equal(got[0], expected[layer].backward.dq));
      EXPECT_TRUE(at::equal(got[1], expected[layer].backward.dk));
      EXPECT_TRUE(at::equal(got[2], expected[layer].backward.dv));
    }
  });
}

TEST(SparseRingAttention, DensePatternEqualsTheOracleAndSharesOneIndex) {
  const RingProblem problem({.seq_len = 300, .choice = Choice::kDense});
  testing::Solution whole = empty_solution(problem);
  std::mutex mutex;
  comm::run_loopback(2, [&](comm::Transport& transport) {
    testing::use_one_thread();
    RingContext context(ring_options(1, 2, LayoutKind::kStriped, 64, 300), transport);
    RankInputs in = rank_inputs(problem, context.layout(), context.cp_rank());
    require_grad(in);
    AttentionCall call;
    call.pattern.kind = pattern::PatternKind::kDense;
    const AttentionOutput output = sparse_ring_attention(context, in.q, in.k, in.v, call);
    EXPECT_EQ(sparse_ring_attention(context, in.q, in.k, in.v, call).index, output.index);
    const std::vector<at::Tensor> grads = gradients(output.out, in.dout, in);
    std::unique_lock lock(mutex);
    put_rank({{output.out.detach(), output.lse, {}}, {grads[0], grads[1], grads[2]}}, problem,
             context.layout(), context.cp_rank(), whole);
  });
  EXPECT_EQ(testing::compare_with_truth(whole, problem).fault, "");
}

TEST(SparseRingAttention, BesideAGivenIndexOneIsChosenOnlyWhereThatIsAskedFor) {
  const RingProblem problem({.seq_len = 300});
  comm::run_loopback(2, [&](comm::Transport& transport) {
    testing::use_one_thread();
    RingContext context(ring_options(1, 2, LayoutKind::kBlockStriped, 64, 300), transport);
    int chosen = 0;
    context.set_observer(
        [&](const StepTiming& step) { chosen += std::string(step.what) == "index"; });
    const RankInputs in = rank_inputs(problem, context.layout(), context.cp_rank());
    AttentionCall call;
    call.pattern.kind = pattern::PatternKind::kFixed;
    call.pattern.given = shared(problem.index());
    const AttentionOutput plain = sparse_ring_attention(context, in.q, in.k, in.v, call);
    EXPECT_EQ(chosen, 0);
    call.pattern.estimate = true;
    const AttentionOutput estimated = sparse_ring_attention(context, in.q, in.k, in.v, call);
    EXPECT_EQ(chosen, 1);
    EXPECT_EQ(estimated.index, call.pattern.given);
    EXPECT_TRUE(at::equal(estimated.out, plain.out));
    // Values that no index can be chosen from end a call that chooses, and no other.
    const at::Tensor q = in.q.clone();
    q.fill_(std::numeric_limits<double>::infinity());
    EXPECT_THROW(sparse_ring_attention(context, q, in.k, in.v, call), InvalidArgument);
    call.pattern.estimate = false;
    EXPECT_FALSE(
        sparse_ring_attention(context, q, in.k, in.v, call).out.isfinite().all().item<bool>());
    EXPECT_EQ(chosen, 1);
  });
}

TEST(SparseRingAttention, ItSaysOnceThatTheChoiceIsDoneBeforeTheFirstLaunch) {
  const RingProblem problem({.seq_len = 300});
  comm::run_loopback(2, [&](comm::Transport& transport) {
    testing::use_one_thread();
    RingContext context(ring_options(1, 2, LayoutKind::kBlockStriped, 64, 300), transport);
    std::vector<std::string> order;
    context.set_observer([&](const StepTiming& step) {
      const std::string what = step.what;
      if (what == "index" || what == "forward") order.push_back(what);
    });
    const RankInputs in = rank_inputs(problem, context.layout(), context.cp_rank());
    const auto order_of = [&](AttentionCall call) {
      order.clear();
      call.chosen = [&] { order.push_back("chosen"); };
      sparse_ring_attention(context, in.q, in.k, in.v, call);
      return order;
    };
    using Order = std::vector<std::string>;
    AttentionCall call;
    const Order chosen = order_of(call);
    ASSERT_GE(chosen.size(), 3u);
    EXPECT_EQ(Order(chosen.begin(), chosen.begin() + 3), (Order{"index", "chosen", "forward"}));
    EXPECT_EQ(std::count(chosen.begin(), chosen.end(), "chosen"), 1);
    call.pattern.kind = pattern::PatternKind::kFixed;
    call.pattern.given = shared(problem.index());
    const Order given = order_of(call);
    EXPECT_EQ(Order(given.begin(), given.begin() + 2), (Order{"chosen", "forward"}));
    call.pattern.estimate = true;
    EXPECT_EQ(order_of(call), chosen);
    call.pattern.estimate = false;
    call.index = call.pattern.given;
    EXPECT_EQ(order_of(call), given);
    // A result that is given launches nothing.
    call.result = ring_forward(context, in.q, in.k, in.v, call.index, 0, at::Tensor());
    EXPECT_EQ(order_of(call), Order{"chosen"});
  });
}

TEST(SparseRingAttention, OnlyWhatIsAskedForIsDifferentiated) {
  const RingProblem problem({.seq_len = 100});
  comm::run_loopback(1, [&](comm::Transport& transport) {
    testing::use_one_thread();
    RingContext context(ring_options(1, 1, LayoutKind::kBlockStriped, 64, 100), transport);
    RankInputs in = rank_inputs(problem, context.layout(), 0);
    in.q = at::nan_to_num(in.q);
    AttentionCall call;
    call.index = shared(problem.index());
    EXPECT_FALSE(sparse_ring_attention(context, in.q, in.k, in.v, call).out.requires_grad());
    in.v.requires_grad_(true);
    const AttentionOutput output = sparse_ring_attention(context, in.q, in.k, in.v, call);
    // sum() gives a gradient with strides 0.
    const at::Tensor dv = torch::autograd::grad({output.out.sum()}, {in.v})[0];
    EXPECT_TRUE(dv.isfinite().all().item<bool>());
    EXPECT_THROW(
        torch::autograd::grad({sparse_ring_attention(context, in.q, in.k, in.v, call).out.sum()},
                              {in.v}, {}, true, /*create_graph=*/true),
        Unsupported);
  });
}

TEST(SparseRingAttention, ASparsePatternOnStripedIsUnsupportedByName) {
  const RingProblem problem({.seq_len = 300});
  try {
    comm::run_loopback(2, [&](comm::Transport& transport) {
      testing::use_one_thread();
      RingContext context(ring_options(1, 2, LayoutKind::kStriped, 64, 300), transport);
      const RankInputs in = rank_inputs(problem, context.layout(), context.cp_rank());
      sparse_ring_attention(context, in.q, in.k, in.v, AttentionCall{});
    });
    ADD_FAILURE() << "expected an error";
  } catch (const Unsupported& e) {
    EXPECT_NE(std::string(e.what()).find("striped"), std::string::npos) << e.what();
  }
}

}  // namespace
}  // namespace mtraining::attention
