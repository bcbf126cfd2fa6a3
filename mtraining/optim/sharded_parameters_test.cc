#include "mtraining/optim/sharded_parameters.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <mutex>

#include "mtraining/base/check.h"
#include "mtraining/comm/loopback.h"
#include "mtraining/optim/adamw.h"
#include "mtraining/optim/flat_parameters.h"

namespace mtraining::optim {
namespace {

constexpr double kClip = 0.018;  // some steps are clipped, some are not

/// Parameters of odd sizes: a tied "embedding" that is used at both ends, matrices, norms and one that is never used.
struct Net {
  at::Tensor embed, first, norm, second, unused;

  Net(at::ScalarType dtype, uint64_t seed) {
    at::manual_seed(seed);
    const auto make = [&](at::IntArrayRef shape) {
      return (at::randn(shape) * 0.3).to(dtype).set_requires_grad(true);
    };
    embed = make({13, 7});
    first = make({7, 11});
    norm = make({11});
    second = make({11, 7});
    unused = make({5, 3});
  }
  std::vector<ParameterShare::Named> named() const {
    return {
        {"embed", embed}, {"first", first}, {"norm", norm}, {"second", second}, {"unused", unused}};
  }
  at::Tensor loss(const at::Tensor& ids, bool reversed = false) const {
    const at::Tensor x = at::embedding(embed, ids);
    // Where reversed, the parameters are first used in another order, and so get their gradients in another order.
    const at::Tensor early =
        reversed ? second.sum() * 0 + norm.sum() * 0 : at::zeros({}, x.options());
    const at::Tensor h = at::mm(at::tanh(at::mm(x, first)) * norm, second) + early;
    return at::logsumexp(at::mm(h, embed.t()), {1}).sum().to(at::kFloat);
  }
};

at::Tensor ids_of(int rank, int micro, int step) {
  return at::remainder(at::arange(9, at::kLong) * (rank + 2) + micro * 5 + step * 3, 13);
}

struct Outcome {
  std::vector<at::Tensor> parameters;
  std::vector<double> norms;
  int64_t state_bytes = 0, gradient_bytes = 0;
};

struct Plan {
  at::ScalarType dtype = at::kFloat, grad_dtype = at::kFloat;
  int ranks = 4, steps = 20, accumulation = 2;
  int64_t bucket_bytes = 300;
  bool sharded = true, reversed_on_rank_1 = false, offload = false;
  int skipped_step = 7;
};

std::vector<Outcome> run(const Plan& plan) {
  std::vector<Outcome> outcomes(plan.ranks);
  comm::run_loopback(plan.ranks, [&](comm::Transport& transport) {
    at::set_num_threads(1);
    std::vector<int> all(plan.ranks);
    for (int r = 0; r < plan.ranks; ++r) all[r] = r;
    const auto group = transport.open("gradients", all);
    static std::mutex seeding;  // the generator of random numbers is one for all threads
    std::unique_lock lock(seeding);
    const Net net(plan.dtype, 11);
    lock.unlock();
    const ShareOptions options{plan.grad_dtype, plan.offload, plan.bucket_bytes};
    const auto share = make_parameter_share(net.named(), *group, plan.sharded ? 2 : 0, options);
    EXPECT_EQ(share->is_sharded(), plan.sharded);
    AdamW adamw({0.9, 0.95, 1e-8, 0.1}, *share);
    Outcome outcome;
    for (int step = 0; step < plan.steps; ++step) {
      share->zero_gradient();
      for (int micro = 0; micro < plan.accumulation; ++micro) {
        const bool reversed = plan.reversed_on_rank_1 && transport.rank() == 1;
        torch::autograd::backward({net.loss(ids_of(transport.rank(), micro, step), reversed)}, {});
        share->collect_gradient();
      }
      share->reduce_gradient();
      if (step == plan.skipped_step && transport.rank() == plan.ranks - 1)
        share->gradient().fill_(std::nan(""));
      double squares = sum_of_squares(share->gradient());
      if (share->is_sharded() || step == plan.skipped_step) {
        group->all_reduce({&squares, 8}, comm::ElementType::kFloat64, comm::ReduceOp::kSum)->wait();
      }
      if (!std::isfinite(squares)) continue;  // on every rank
      const double per_token = 1.0 / (9 * plan.ranks * plan.accumulation);
      const double norm = std::sqrt(squares) * per_token;
      outcome.norms.push_back(norm);
      adamw.step(1e-2, per_token * clip_factor(norm, kClip));
    }
    EXPECT_EQ(adamw.steps_taken(), plan.steps - (plan.skipped_step < plan.steps ? 1 : 0));
    for (const auto& p : net.named()) outcome.parameters.push_back(p.value.detach().clone());
    outcome.state_bytes = adamw.state_bytes();
    outcome.gradient_bytes = static_cast<int64_t>(share->gradient().nbytes());
    outcomes[transport.rank()] = outcome;
  });
  for (const Outcome& outcome : outcomes) {
    for (size_t i = 0; i < outcome.parameters.size(); ++i)
      EXPECT_TRUE(at::equal(outcome.parameters[i], outcomes[0].parameters[i])) << i;
    EXPECT_EQ(outcome.norms, outcomes[0].norms);
  }
  return outcomes;
}

double worst(const Outcome& a, const Outcome& b) {
  double worst = 0;
  EXPECT_EQ(a.norms.size(), b.norms.size());
  for (size_t i = 0; i < a.norms.size(); ++i)
    worst = std::max(worst, std::abs(a.norms[i] / b.norms[i] - 1));
  for (size_t i = 0; i < a.parameters.size(); ++i) {
    worst = std::max(worst, (a.parameters[i].to(at::kDouble) - b.parameters[i].to(at::kDouble))
                                .abs()
                                .max()
                                .item<double>());
  }
  return worst;
}

TEST(ShardedParameters, TwentyStepsEqualTheUnshardedOnesForEveryBucketAndNumberOfRanks) {
  for (const int ranks : {1, 2, 3, 4}) {
    const Outcome whole = run({.ranks = ranks, .sharded = false})[0];
    EXPECT_GT(*std::max_element(whole.norms.begin(), whole.norms.end()), kClip);
    EXPECT_LT(*std::min_element(whole.norms.begin(), whole.norms.end()), kClip);
    EXPECT_EQ(whole.norms.size(), 19u);
    for (const int64_t bucket_bytes : {4, 300, 700, 1 << 20})
      EXPECT_LT(worst(run({.ranks = ranks, .bucket_bytes = bucket_bytes})[0], whole), 1e-6)
          << ranks << " ranks, buckets of " << bucket_bytes;
  }
}

TEST(ShardedParameters, WithoutAccumulationTheSumsAreTheSameBits) {
  const Outcome whole = run({.accumulation = 1, .sharded = false})[0];
  EXPECT_LT(worst(run({.accumulation = 1})[0], whole), 1e-7);
}

TEST(ShardedParameters, TheOrderInWhichGradientsArriveDoesNotMatter) {
  const Outcome straight = run({})[0];
  EXPECT_EQ(worst(run({.reversed_on_rank_1 = true})[0], straight), 0);
}

TEST(ShardedParameters, BFloat16ParametersKeepFloat32Masters) {
  const Outcome whole = run({.dtype = at::kBFloat16, .sharded = false})[0];
  const Outcome sharded = run({.dtype = at::kBFloat16})[0];
  EXPECT_LT(worst(sharded, whole), 8e-3);  // a bf16 parameter may round to its neighbour
  EXPECT_EQ(worst(run({.dtype = at::kBFloat16, .offload = true})[0], sharded), 0);
  // Gradients added up and sent in bf16: another rounding, the same run.
  const Outcome wide = run({.dtype = at::kBFloat16, .bucket_bytes = 1 << 20})[0];
  const Outcome low =
      run({.dtype = at::kBFloat16, .grad_dtype = at::kBFloat16, .bucket_bytes = 1 << 20})[0];
  EXPECT_LT(worst(low, whole), 0.1);
  EXPECT_GT(worst(low, wide), 0);
  EXPECT_EQ(low.gradient_bytes * 2, wide.gradient_bytes);
}

TEST(ShardedParameters, ARankHoldsItsShareOfStateAndGradients) {
  const auto leaf = [](at::IntArrayRef shape) { return at::ones(shape).set_requires_grad(true); };
  for (const int ranks : {1, 2, 4, 8}) {
    comm::run_loopback(ranks, [&](comm::Transport& transport) {
      at::set_num_threads(1);
      std::vector<int> all(ranks);
      for (int r = 0; r < ranks; ++r) all[r] = r;
      const auto group = transport.open("gradients", all);
      // 64 x 1024 elements, which every number of ranks divides.
      std::vector<ParameterShare::Named> named;
      for (int i = 0; i < 8; ++i) named.push_back({concat("p", i), leaf({64, 128})});
      ShardedParameters share(named, *group, {.bucket_bytes = 4 * 2 * 64 * 128});
      AdamW adamw({}, share);
      EXPECT_EQ(share.num_buckets(), 4);
      const int64_t total = share.size() * 4;
      EXPECT_EQ(adamw.state_bytes(), 3 * total / ranks);
      EXPECT_EQ(static_cast<int64_t>(share.gradient().nbytes()), total / ranks);
    });
  }
}

TEST(ShardedParameters, ShardsCoverTheFlatVectorsOnceAndHoldTheParametersValues) {
  for (const int ranks : {1, 2, 3, 5}) {
    for (const int64_t bucket_bytes : {4, 300, 1 << 20}) {
      std::mutex mutex;
      std::map<int64_t, std::pair<int64_t, at::Tensor>> found;  // by begin
      at::Tensor flat;
      comm::run_loopback(ranks, [&](comm::Transport& transport) {
        at::set_num_threads(1);
        std::vector<int> all(ranks);
        for (int r = 0; r < ranks; ++r) all[r] = r;
        const auto group = transport.open("gradients", all);
        std::unique_lock lock(mutex);
        const Net net(at::kFloat, 3);
        lock.unlock();
        ShardedParameters share(net.named(), *group, {.bucket_bytes = bucket_bytes});
        AdamW adamw({}, share);
        const std::vector<OptimizerShard> shards = adamw.shards();
        lock.lock();
        std::vector<at::Tensor> parts;
        for (const auto& p : net.named()) parts.push_back(p.value.detach().reshape({-1}));
        flat = at::cat(parts);
        int64_t before = 0;
        for (const OptimizerShard& s : shards) {
          EXPECT_GE(s.begin, before);
          before = s.end;
          EXPECT_FALSE(s.replicated);
          EXPECT_EQ(s.first_moment.numel(), s.end - s.begin);
          EXPECT_TRUE(found.emplace(s.begin, std::pair(s.end, s.master.clone())).second);
          s.master.add_(1);  // as a checkpoint that is read
        }
        lock.unlock();
        adamw.restored(5);
        EXPECT_EQ(adamw.steps_taken(), 5);
        lock.lock();
        std::vector<at::Tensor> after;
        for (const auto& p : net.named()) after.push_back(p.value.detach().reshape({-1}));
        EXPECT_TRUE(at::equal(at::cat(after), flat + 1));
      });
      int64_t next = 0;
      for (const auto& [begin, rest] : found) {
        EXPECT_EQ(begin, next);
        EXPECT_TRUE(at::equal(rest.second, flat.slice(0, begin, rest.first)));
        next = rest.first;
      }
      EXPECT_EQ(next, flat.numel());
    }
  }
}

TEST(ShardedParameters, ABackwardThatIsGivenUpLeavesNothingInTheNextStep) {
  comm::run_loopback(2, [&](comm::Transport& transport) {
    at::set_num_threads(1);
    const auto group = transport.open("gradients", {0, 1});
    at::Tensor a = at::ones({40}).set_requires_grad(true),
               b = at::ones({40}).set_requires_grad(true);
    ShardedParameters share({{"a", a}, {"b", b}}, *group, {.bucket_bytes = 160});
    const at::Tensor early = a * 2;
    early.register_hook([](const at::Tensor&) { throw ExternalError("given up"); });
    EXPECT_THROW(torch::autograd::backward({(early * b).sum()}, {}), ExternalError);  // b has left
    share.zero_gradient();
    torch::autograd::backward({(a * 2 + b * 3).sum()}, {});
    share.collect_gradient();
    share.reduce_gradient();
    for (const OwnedRange& owned : share.owned()) {
      const at::Tensor got = share.gradient().narrow(0, owned.offset, owned.end - owned.begin);
      EXPECT_TRUE(at::equal(got, at::full_like(got, owned.begin < 40 ? 4.0 : 6.0)));
    }
  });
}

TEST(ShardedParameters, GradientsAreFreedAsTheyGoAndParametersOutliveTheirShare) {
  at::Tensor p = at::ones({6, 6}).set_requires_grad(true);
  comm::run_loopback(1, [&](comm::Transport& transport) {
    at::set_num_threads(1);
    const auto group = transport.open("gradients", {0});
    {
      ShardedParameters share({{"p", p}}, *group);
      torch::autograd::backward({(p * 2).sum()}, {});
      EXPECT_FALSE(p.grad().defined());
      share.collect_gradient();
      share.reduce_gradient();
      EXPECT_TRUE(at::equal(share.gradient().slice(0, 0, 36), at::full({36}, 2.0f)));
    }
    torch::autograd::backward({(p * 3).sum()}, {});
    EXPECT_TRUE(at::equal(p.grad(), at::full({6, 6}, 3.0f)));
  });
}

TEST(ParameterShare, ValuesTakenInPartsAreThoseThatArePublished) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const int ranks : {1, 3}) {
      for (const int zero : {0, 2}) {
        if (zero == 0 && dtype == at::kFloat) continue;  // they are the masters themselves
        comm::run_loopback(ranks, [&](comm::Transport& transport) {
          at::set_num_threads(1);
          std::vector<int> all(ranks);
          for (int r = 0; r < ranks; ++r) all[r] = r;
          const auto group = transport.open("gradients", all);
          static std::mutex seeding;
          std::unique_lock lock(seeding);
          const Net net(dtype, 11);
          lock.unlock();
          const auto share = make_parameter_share(net.named(), *group, zero, {.bucket_bytes = 300});
          // A function of the place in the flat vectors alone.
          for (const OwnedRange& owned : share->owned()) {
            share->master()
                .narrow(0, owned.offset, owned.end - owned.begin)
                .copy_(at::arange(owned.begin, owned.end, at::kFloat).mul_(0.37).sin_());
          }
          share->publish();
          std::vector<at::Tensor> want;
          for (const auto& p : net.named()) want.push_back(p.value.detach().clone());
          for (const auto& p : net.named()) p.value.detach().zero_();
          const at::Tensor values = share->master().to(dtype);
          for (const OwnedRange& owned : share->owned()) {
            for (int64_t at = owned.offset, end = at + owned.end - owned.begin; at < end; at += 17)
              share->take(at, values.narrow(0, at, std::min<int64_t>(17, end - at)));
          }
          share->publish_taken();
          for (size_t i = 0; i < want.size(); ++i)
            EXPECT_TRUE(at::equal(net.named()[i].value.detach(), want[i])) << i << ' ' << zero;
        });
      }
    }
  }
}

}  // namespace
}  // namespace mtraining::optim
