// What the trainer does otherwise on a GPU: first weights, the loss of a bf16 head, what goes to host memory and comes back.

#include "mtraining/train/device.h"

#include <ATen/ATen.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/cuda/CUDAFunctions.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <vector>

#include "mtraining/comm/loopback.h"
#include "mtraining/data/batches.h"
#include "mtraining/model/random_tensor.h"
#include "mtraining/optim/adamw.h"
#include "mtraining/optim/sharded_parameters.h"
#include "mtraining/train/host_layers.h"
#include "mtraining/train/loss.h"

namespace mtraining::train {
namespace {

const at::Device kGpu(at::kCUDA, 0);

at::Tensor values(int64_t seed, at::IntArrayRef shape, double deviation = 1,
                  at::ScalarType dtype = at::kFloat) {
  return model::random_normal(Rng(static_cast<uint64_t>(seed)), shape, deviation, at::kCPU, dtype);
}

TEST(RandomTensor, AGpuMakesTheHostsBits) {
  for (const int64_t count : {7, (1 << 22) + 1000}) {
    const Rng rng(3, static_cast<uint64_t>(count));
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      const at::Tensor there = model::random_normal(rng, {count}, 0.02, kGpu, dtype);
      EXPECT_TRUE(
          at::equal(there.cpu(), model::random_normal(rng, {count}, 0.02, at::kCPU, dtype)));
    }
  }
}

/// Sum of losses and its gradients in float64.
struct Exact {
  at::Tensor sum, hidden, weight;
};
Exact exact_loss(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& labels) {
  const at::Tensor x = hidden.to(at::kDouble).requires_grad_(true);
  const at::Tensor w = weight.to(at::kDouble).requires_grad_(true);
  const at::Tensor valid = labels.ne(data::kIgnored);
  const at::Tensor target = at::where(valid, labels, at::zeros_like(labels)).unsqueeze(1);
  const at::Tensor logits = at::mm(x, w.t());
  const at::Tensor losses =
      (at::logsumexp(logits, {1}, true) - logits.gather(1, target)).squeeze(1);
  const at::Tensor sum = at::where(valid, losses, at::zeros_like(losses)).sum();
  torch::autograd::backward({sum}, {});
  return {sum.detach(), x.grad(), w.grad()};
}

double relative_error(const at::Tensor& got, const at::Tensor& want) {
  const at::Tensor exact = want.to(at::kDouble);
  return ((got.cpu().to(at::kDouble) - exact).norm() / exact.norm()).item<double>();
}

TEST(DeviceLoss, BfloatHeadIsTheFloat64LossToItsRounding) {
  for (const int64_t tokens : {1, 63, 300}) {
    for (const int64_t chunk : {1, 64, 300, 1024}) {
      const at::Tensor hidden = values(tokens, {tokens, 128}, 1, at::kBFloat16);
      const at::Tensor weight = values(1000 + chunk, {1000, 128}, 0.3, at::kBFloat16);
      at::Tensor labels = at::arange(tokens, at::kLong).mul_(37).remainder_(1000);
      if (tokens > 2) labels.slice(0, 0, tokens, 3).fill_(data::kIgnored);
      const Exact want = exact_loss(hidden, weight, labels);
      const at::Tensor x = hidden.to(kGpu).requires_grad_(true);
      const at::Tensor w = weight.to(kGpu).requires_grad_(true);
      const SummedLoss got = chunked_loss(x, w, labels, chunk);
      torch::autograd::backward({got.sum}, {});
      EXPECT_EQ(got.count, labels.ne(data::kIgnored).sum().item<int64_t>());
      EXPECT_NEAR(got.sum.item<double>(), want.sum.item<double>(), 2e-5 * want.sum.item<double>());
      EXPECT_LT(relative_error(x.grad(), want.hidden), 6e-3) << tokens << ' ' << chunk;
      EXPECT_LT(relative_error(w.grad(), want.weight), 6e-3) << tokens << ' ' << chunk;
      const at::NoGradGuard no_grad;
      EXPECT_EQ(chunked_loss(x, w, labels.to(kGpu), chunk).sum.item<float>(),
                got.sum.item<float>());
    }
  }
}

TEST(DeviceLoss, AnIgnoredRowThatIsNotFiniteAddsNothing) {
  at::Tensor hidden = values(1, {4, 64}, 1, at::kBFloat16);
  hidden[2].fill_(std::numeric_limits<float>::infinity());
  const at::Tensor labels = at::tensor({3, 5, static_cast<int>(data::kIgnored), 9}, at::kLong);
  const at::Tensor x = hidden.to(kGpu).requires_grad_(true);
  const at::Tensor w = values(2, {100, 64}, 0.3, at::kBFloat16).to(kGpu).requires_grad_(true);
  const SummedLoss loss = chunked_loss(x, w, labels, 4);
  torch::autograd::backward({loss.sum}, {});
  EXPECT_TRUE(loss.sum.isfinite().item<bool>());
  EXPECT_EQ(x.grad()[2].abs().max().item<float>(), 0);
}

TEST(DeviceLoss, NoFloat32CopyOfTheHead) {
  constexpr int64_t kVocab = 50000, kHidden = 256, kChunk = 64;
  const at::Tensor x = values(1, {512, kHidden}, 1, at::kBFloat16).to(kGpu).requires_grad_(true);
  const at::Tensor w =
      values(2, {kVocab, kHidden}, 0.1, at::kBFloat16).to(kGpu).requires_grad_(true);
  const at::Tensor labels = at::zeros({512}, at::kLong);
  // The matrix library's workspace, which a process has once, is not the loss's.
  torch::autograd::backward({chunked_loss(x, w, labels, kChunk).sum}, {});
  for (const at::Tensor& each : {x, w}) each.mutable_grad() = at::Tensor();
  const int64_t before = at::accelerator::getDeviceStats(0).allocated_bytes[0].current;
  reset_peak_memory(kGpu);
  torch::autograd::backward({chunked_loss(x, w, labels, kChunk).sum}, {});
  const int64_t used = peak_memory(kGpu).tensors - before;
  // Of the weight: its gradient in float32, and in bf16 once backward is called; one and a half chunks of logits.
  EXPECT_LT(used, kVocab * kHidden * 6 + kVocab * kChunk * 6 + 512 * kHidden * 4 + (8 << 20));
}

TEST(HostLayers, BytesComeBackWhateverRunsBeside) {
  HostLayers host(kGpu, 4);
  for (int step = 0; step < 3; ++step) {
    std::vector<std::vector<at::Tensor>> kept;
    for (int64_t layer = 0; layer < 5; ++layer) {
      const at::Tensor h = values(10 * step + layer, {3, 1001, 257}, 1, at::kBFloat16);
      const at::Tensor lse = values(layer, {3, 77}, 1, at::kFloat);
      kept.push_back({h, at::Tensor(), lse});
      ASSERT_EQ(host.holds(layer), layer < 4);
      if (host.holds(layer)) host.put(layer, {h.to(kGpu), at::Tensor(), lse.to(kGpu)});
      if (layer != step) host.send();  // else the next one's turn sends it, or its own return
      // What is freed is used again at once.
      for (int i = 0; i < 8; ++i)
        at::full({3, 1001, 257}, i, at::TensorOptions(kGpu).dtype(at::kBFloat16));
    }
    for (int64_t layer = 4; layer-- > 0;) {
      const std::vector<at::Tensor> back = host.take(layer);
      host.fetch(layer - 1);
      for (int i = 0; i < 8; ++i)
        at::full({3, 1001, 257}, i, at::TensorOptions(kGpu).dtype(at::kBFloat16));
      ASSERT_EQ(back.size(), 3u);
      EXPECT_TRUE(at::equal(back[0].cpu(), kept[layer][0])) << step << ' ' << layer;
      EXPECT_FALSE(back[1].defined());
      EXPECT_TRUE(at::equal(back[2].cpu(), kept[layer][2])) << step << ' ' << layer;
    }
  }
}

TEST(HostLayers, BytesThatAreAskedForBeforeALayerIsSentDoNotWaitForIt) {
  const at::TensorOptions bytes = at::TensorOptions(kGpu).dtype(at::kByte);
  const at::Tensor large = at::full({int64_t{1} << 29}, 1, bytes),
                   small = at::full({1 << 16}, 2, bytes);
  const at::Tensor there =
      at::empty(small.sizes(), at::TensorOptions(at::kByte).pinned_memory(true));
  HostLayers host(kGpu, 1);
  const c10::Stream stream = c10::impl::VirtualGuardImpl(at::kCUDA).getStream(kGpu);
  const auto marked = [&] {
    c10::Event event(at::kCUDA, c10::EventFlag::BACKEND_DEFAULT);
    event.record(stream);
    return event;
  };
  // What else the machine does makes a copy longer, never shorter: the shortest of some.
  double asked_ms = 1e9, sent_ms = 1e9;
  for (int attempt = 0; attempt < 5; ++attempt) {
    host.put(0, {large});
    c10::Event begin = marked();
    there.copy_(small, /*non_blocking=*/true);
    c10::Event asked = marked();
    host.send();
    const at::Tensor back = host.take(0)[0];
    c10::Event sent = marked();
    sent.synchronize();
    asked_ms = std::min(asked_ms, begin.elapsedTime(asked));
    sent_ms = std::min(sent_ms, asked.elapsedTime(sent));
    EXPECT_TRUE(at::equal(back, large)) << attempt;
  }
  EXPECT_LT(asked_ms, sent_ms / 8);  // a small copy behind a large one takes half of both ways
}

TEST(HostLayers, TensorsOverSeveralPiecesComeBackWhole) {
  HostLayers host(kGpu, 2);
  for (int step = 0; step < 2; ++step) {
    std::vector<std::vector<at::Tensor>> kept;
    for (int64_t layer = 0; layer < 2;
         ++layer) {  // 20 MB, 54 MB: parts and pinned pieces end within them
      const Rng rng(static_cast<uint64_t>(2 * step + layer));
      kept.push_back({model::random_normal(rng, {5'000'007}, 1, kGpu, at::kFloat),
                      model::random_normal(rng, {3, 9'000'001}, 1, kGpu, at::kBFloat16)});
      host.put(layer, {kept.back()[0].clone(), kept.back()[1].clone()});
    }
    for (int64_t layer = 2; layer-- > 0;) {
      const std::vector<at::Tensor> back = host.take(layer);
      for (size_t i = 0; i < 2; ++i)
        EXPECT_TRUE(at::equal(back[i], kept[layer][i])) << step << ' ' << layer << ' ' << i;
    }
  }
}

TEST(HostLayers, OneThatGoesWhileBytesComeBackWritesIntoNoOtherMemory) {
  constexpr int64_t kBytes = int64_t{256} << 20;
  const at::TensorOptions bytes = at::TensorOptions(kGpu).dtype(at::kByte);
  for (int attempt = 0; attempt < 3; ++attempt) {
    {
      HostLayers host(kGpu, 1);
      host.put(0, {at::full({kBytes}, 1, bytes)});
      host.fetch(0);
    }  // as an error leaves it
    const at::Tensor other = at::full({kBytes}, 2, bytes);
    c10::cuda::device_synchronize();
    EXPECT_TRUE((other == 2).all().item<bool>()) << attempt;
  }
}

TEST(HostLayers, HostMemoryIsAllocatedOnceAndWastesLittle) {
  HostLayers host(kGpu, 2);
  constexpr int64_t kBytes = (int64_t{5} << 20) + 4096;
  int64_t first = 0;
  for (int step = 0; step < 3; ++step) {
    for (const int64_t layer : {0, 1})
      host.put(layer, {at::zeros({kBytes}, at::TensorOptions(kGpu).dtype(at::kByte))});
    host.clear();  // a pass that was given up
    if (step == 0) first = host.host_bytes();
    EXPECT_EQ(host.host_bytes(), first);
  }
  EXPECT_GE(first, 2 * kBytes);
  EXPECT_LE(first, 2 * (kBytes + (1 << 20)));
}

/// Three updates of bf16 parameters on the GPU with masters here or there.
std::vector<at::Tensor> updated(bool offload, int zero, int64_t threads) {
  auto transport = comm::make_single();
  const comm::CommunicatorPtr group = transport->open("gradients", {0});
  std::vector<optim::ParameterShare::Named> named;
  const std::vector<std::vector<int64_t>> shapes = {{1000, 300}, {17}, {3000, 2000}, {8}};
  for (size_t i = 0; i < shapes.size(); ++i) {
    named.push_back(
        {std::to_string(i), values(static_cast<int64_t>(i), shapes[i], 0.1, at::kBFloat16)
                                .to(kGpu)
                                .requires_grad_(true)});
  }
  std::vector<at::Tensor> parameters;
  for (const auto& each : named) parameters.push_back(each.value);
  const auto share = optim::make_parameter_share(
      named, *group, zero, {.offload = offload, .bucket_bytes = 1 << 20, .host_threads = threads});
  optim::AdamW adamw({.weight_decay = 0.1}, *share);
  for (int step = 0; step < 3; ++step) {
    share->zero_gradient();
    at::Tensor sum = at::zeros({}, at::TensorOptions(kGpu).dtype(at::kFloat));
    for (size_t i = 0; i < parameters.size(); ++i) {
      const at::Tensor weight =
          values(100 * step + static_cast<int64_t>(i), parameters[i].sizes()).to(kGpu);
      sum = sum + (parameters[i] * weight).sum();
    }
    torch::autograd::backward({sum}, {});
    share->collect_gradient();
    share->reduce_gradient();
    adamw.step(1e-2, 0.5);
  }
  std::vector<at::Tensor> result;
  for (const at::Tensor& each : parameters) result.push_back(each.detach().cpu().to(at::kFloat));
  return result;
}

TEST(HostUpdate, OffloadedMastersMakeTheSameParameters) {
  const std::vector<at::Tensor> want = updated(false, 0, 0);
  for (const int zero : {0, 2}) {
    for (const int64_t threads : {0, 2}) {
      const std::vector<at::Tensor> got = updated(true, zero, threads);
      for (size_t i = 0; i < want.size(); ++i) {
        // One rounding to bf16 apart at most, and nearly nowhere.
        EXPECT_TRUE(at::allclose(got[i], want[i], 1e-2, 1e-6)) << i;
        EXPECT_LT(got[i].ne(want[i]).to(at::kDouble).mean().item<double>(), 1e-3) << i;
      }
    }
  }
}

}  // namespace
}  // namespace mtraining::train
