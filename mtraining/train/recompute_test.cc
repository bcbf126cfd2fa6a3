// Layers that run twice give the bits of layers that run once, and keep less.

#include "mtraining/train/recompute.h"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <map>
#include <mutex>

#include "mtraining/comm/c10d.h"
#include "mtraining/model/mlp.h"
#include "mtraining/testing/process_ranks.h"
#include "mtraining/train/attention_layers.h"
#include "mtraining/train/loss.h"
#include "mtraining/train/tensor_memory.h"
#include "mtraining/train/tiny_run_case.h"

namespace mtraining::train {
namespace {

constexpr int64_t kLength = 500;
const std::vector<Recompute> kModes = {Recompute::kNone, Recompute::kLayer,
                                       Recompute::kExceptAttention};

struct Pass {
  at::ScalarType dtype = at::kFloat;
  bool documents = false;
  const char* architecture = "qwen2";
  Recompute mode = Recompute::kNone;
  int64_t mlp_tile = 0, layers = 2, length = kLength;
  int64_t span = 1, host_layers = 0;
};

struct PassResult {
  at::Tensor loss;
  std::vector<at::Tensor> gradients;
  std::map<std::string, int> events;  // of attention, by name
  int64_t kept_bytes = 0;  // tensors alive between forward and backward beyond those before
  int64_t peak_bytes = 0;  // in backward, likewise
};

model::DecoderConfig decoder_config(const Pass& pass) {
  model::DecoderConfig c;
  c.architecture = pass.architecture;
  c.vocab_size = 64;
  c.hidden_size = 32;
  c.intermediate_size = 48;
  c.num_hidden_layers = pass.layers;
  c.num_attention_heads = 4;
  c.num_key_value_heads = 2;
  c.head_dim = 16;
  c.initializer_range = 0.1;
  c.embedding_initializer_range = 0.3;
  c.dtype = pass.dtype;
  return c;
}

/// Two micro-steps of a model on this rank's shard, with gradients left on the parameters.
PassResult run_pass(comm::Transport& transport, int ranks_per_node, const Pass& pass) {
  at::set_num_threads(1);
  set_num_threads(1);
  PassResult result;
  attention::RingOptions options;
  options.layout = {layout::LayoutKind::kBlockStriped, pass.length, transport.size(), 64, 1};
  options.topology = topology::make_topology(transport.size(), ranks_per_node);
  options.layout.nodes = options.topology.nodes;
  attention::RingContext context(options, transport);
  const model::Decoder decoder(decoder_config(pass),
                               model::init_parameters(decoder_config(pass), 5), pass.mlp_tile);
  AttentionLayers layers(context, pass.layers);
  trace::SpanRecorder recorder;
  layers.begin(&recorder, 0);

  const std::vector<int64_t> positions = context.layout().positions(context.cp_rank());
  const auto n = static_cast<int64_t>(positions.size());
  const Rng rng(3);
  at::Tensor ids = at::zeros({1, n}, at::kLong), labels = at::full({n}, data::kIgnored, at::kLong);
  at::Tensor starts = at::zeros({1, pass.length}, at::kInt);
  for (int64_t i = 0; i < pass.length; ++i) {
    starts[0][i] = static_cast<int32_t>(i < 130 ? 0 : i < 133 ? 130 : 133);
  }
  for (int64_t i = 0; i < n; ++i) {
    if (positions[i] >= pass.length) continue;
    ids[0][i] = static_cast<int64_t>(rng.below(positions[i], 64));
    labels[i] = static_cast<int64_t>(rng.below(1000 + positions[i], 64));
  }
  AttendRequest request;
  attention::AttentionPattern pattern;
  pattern.vertical_slash.last_q = 32;
  pattern.vertical_slash.sink_tokens = 8;
  pattern.vertical_slash.local_blocks = 1;
  pattern.vertical_slash.p_vertical = 0.3;
  pattern.vertical_slash.p_slash = 0.5;
  pattern.vertical_slash.dense_threshold = 1;
  request.patterns.assign(pass.layers, pattern);
  if (pass.documents) request.document_starts = starts;

  HostLayers host(at::kCPU, pass.host_layers);
  TensorMemory memory;
  const TensorMemory::Scope scope(memory);
  for (int micro = 0; micro < 2; ++micro) {
    const int64_t before = memory.live_bytes();
    const model::RunLayer run_layer =
        pass.mode == Recompute::kNone
            ? decoder.layers_with(layers.attend(request))
            : recomputed_layers(decoder, pass.mode, layers.attend_twice(request), {}, &host,
                                pass.span);
    const at::Tensor hidden = decoder.forward(ids, at::tensor(positions), run_layer);
    result.kept_bytes = memory.live_bytes() - before;
    const SummedLoss loss =
        chunked_loss(hidden.reshape({n, -1}), decoder.head_weight(), labels, 64);
    result.loss = loss.sum.detach();
    memory.reset_peak();
    torch::autograd::backward({loss.sum}, {});
    result.peak_bytes = memory.peak_bytes() - before;
  }
  for (const auto& p : decoder.parameters().list()) result.gradients.push_back(p.value.grad());
  for (const trace::Span& span : recorder.spans()) ++result.events[span.name];
  return result;
}

void expect_same_bits(const PassResult& a, const PassResult& b) {
  EXPECT_TRUE(at::equal(a.loss, b.loss));
  ASSERT_EQ(a.gradients.size(), b.gradients.size());
  for (size_t i = 0; i < a.gradients.size(); ++i) {
    ASSERT_TRUE(a.gradients[i].defined() && b.gradients[i].defined()) << i;
    EXPECT_GT(a.gradients[i].abs().sum().item<double>(), 0) << i;
    EXPECT_TRUE(at::equal(a.gradients[i], b.gradients[i])) << i;
  }
}

void expect_modes_equal(comm::Transport& transport, Pass pass,
                        const std::vector<int64_t>& tiles = {0, model::kMlpRun}) {
  pass.mode = Recompute::kNone;
  const PassResult none = run_pass(transport, 2, pass);
  for (const Recompute mode : kModes) {
    for (const int64_t tile : tiles) {
      pass.mode = mode;
      pass.mlp_tile = tile;
      SCOPED_TRACE(concat("mode ", static_cast<int>(mode), ", tile ", tile));
      expect_same_bits(run_pass(transport, 2, pass), none);
    }
  }
}

TEST(Recompute, EveryModeAndTheTiledMlpGiveTheSameBits) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    for (const bool documents : {false, true}) {
      for (const int ranks : {1, 4}) {
        SCOPED_TRACE(concat(dtype, documents ? ", documents, " : ", ", ranks, " ranks"));
        comm::run_loopback(ranks, [&](comm::Transport& transport) {
          if (ranks == 1) {
            Pass pass{.dtype = dtype, .documents = documents};
            const PassResult none = run_pass(transport, 1, pass);
            for (const Recompute mode : kModes) {
              pass.mode = mode;
              expect_same_bits(run_pass(transport, 1, pass), none);
            }
          } else {
            expect_modes_equal(transport, {.dtype = dtype, .documents = documents});
          }
        });
      }
    }
  }
}

TEST(Recompute, SpansOfLayersAndHostMemoryGiveTheSameBits) {
  for (const int ranks : {1, 2}) {
    comm::run_loopback(ranks, [&](comm::Transport& transport) {
      Pass pass{.dtype = at::kBFloat16, .documents = true, .layers = 5};
      const PassResult none = run_pass(transport, ranks, pass);
      for (const Recompute mode : kModes) {
        for (const int64_t span : {1, 2, 3, 5}) {
          pass.mode = mode;
          pass.span = span;
          pass.host_layers = 3;  // of spans of one layer three, of two layers two, else the first
          SCOPED_TRACE(concat("mode ", static_cast<int>(mode), ", span ", span));
          expect_same_bits(run_pass(transport, ranks, pass), none);
        }
      }
    });
  }
}

TEST(Recompute, ASpanRunsAllItsLayersButTheLastOnceMore) {
  comm::run_loopback(1, [&](comm::Transport& transport) {
    const auto forwards = [&](int64_t span) {
      return run_pass(transport, 1, {.mode = Recompute::kLayer, .layers = 6, .span = span})
          .events.at("forward");
    };
    const int once = forwards(1) / 2;  // forward, and again in backward
    for (const int64_t span : {2, 3, 4, 6}) {
      const int64_t spans = (6 + span - 1) / span;
      EXPECT_EQ(6 * forwards(span), once * (6 * 2 + (6 - spans))) << span;
    }
  });
}

TEST(Recompute, EveryFamilyOfModelsGivesTheSameBits) {
  for (const char* architecture : {"qwen3", "llama"}) {
    SCOPED_TRACE(architecture);
    comm::run_loopback(4, [&](comm::Transport& transport) {
      expect_modes_equal(transport, {.architecture = architecture});
    });
  }
}

TEST(Recompute, EveryModeGivesTheSameBitsOverGloo) {
  const auto run =
      testing::run_processes(4, comm::free_port, [](const testing::RankProcess& process) {
        const auto transport = comm::make_c10d({.master_port = process.port,
                                                .rank = process.rank,
                                                .size = process.size,
                                                .timeout = std::chrono::minutes(2)});
        expect_modes_equal(*transport, {}, {model::kMlpRun});
        expect_modes_equal(*transport, {.dtype = at::kBFloat16, .documents = true}, {0});
      });
  for (const auto& rank : run.ranks) EXPECT_EQ(rank.exit_code, 0) << rank.output;
}

TEST(Recompute, IndicesAreMadeOnceAndExceptAttentionRunsItsKernelsOnce) {
  comm::run_loopback(4, [&](comm::Transport& transport) {
    const auto events = [&](Recompute mode) {
      return run_pass(transport, 2, {.documents = true, .mode = mode}).events;
    };
    const auto none = events(Recompute::kNone), layer = events(Recompute::kLayer),
               except_attention = events(Recompute::kExceptAttention);
    EXPECT_EQ(none.at("index"), 2 * 2);  // layers x micro-steps
    EXPECT_GE(none.at("forward"), 2 * 2);
    EXPECT_EQ(except_attention, none);
    EXPECT_EQ(layer.at("index"), none.at("index"));
    EXPECT_EQ(layer.at("forward"), 2 * none.at("forward"));
    EXPECT_EQ(layer.at("backward"), none.at("backward"));
  });
}

TEST(Recompute, WhatIsKeptPerLayerIsTheInputAndWithItAttentionsResult) {
  comm::run_loopback(1, [&](comm::Transport& transport) {
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      const auto kept_per_layer = [&](Recompute mode, int64_t tile) {
        Pass pass{.dtype = dtype, .mode = mode, .mlp_tile = tile, .length = 640};
        pass.layers = 5;
        const int64_t many = run_pass(transport, 1, pass).kept_bytes;
        pass.layers = 2;
        return static_cast<double>(many - run_pass(transport, 1, pass).kept_bytes) / 3;
      };
      const double element = dtype == at::kFloat ? 4 : 2;
      const double n = 640, input = n * 32 * element, out = n * 4 * 16 * element, lse = n * 4 * 4;
      // Allocations are whole multiples of the alignment; nothing else may hide in 2 %.
      const double layer = kept_per_layer(Recompute::kLayer, 0);
      EXPECT_NEAR(layer / input, 1, 0.02) << dtype;
      const double except_attention = kept_per_layer(Recompute::kExceptAttention, 0);
      const auto kept_of_spans = [&](int64_t spans) {
        return static_cast<double>(run_pass(transport, 1,
                                            {.dtype = dtype,
                                             .mode = Recompute::kLayer,
                                             .layers = 2 * spans,
                                             .length = 640,
                                             .span = 2})
                                       .kept_bytes);
      };
      EXPECT_NEAR((kept_of_spans(4) - kept_of_spans(1)) / 3 / input, 1, 0.02) << dtype;
      const double residual = dtype == at::kFloat ? 0 : out;
      EXPECT_NEAR(except_attention / (input + out + residual + lse), 1, 0.02) << dtype;
      const double none = kept_per_layer(Recompute::kNone, 0);
      EXPECT_GT(none, 2.5 * except_attention) << dtype;
      // A tiled MLP keeps its input; untiled gate(x) and up(x) too.
      const double tiled = kept_per_layer(Recompute::kNone, 64);
      EXPECT_NEAR((none - tiled) / (2 * n * 48 * element), 1, 0.02) << dtype;
    }
  });
}

TEST(Recompute, PeakOfBackwardHoldsOneLayerNotAll) {
  comm::run_loopback(1, [&](comm::Transport& transport) {
    const auto peak = [&](Recompute mode, int64_t layers) {
      return static_cast<double>(
          run_pass(transport, 1, {.mode = mode, .layers = layers, .length = 640}).peak_bytes);
    };
    const double input = 640 * 32 * 4, parameters = 40e3;  // of a layer; gradients stay
    for (const Recompute mode : {Recompute::kLayer}) {
      EXPECT_LT(peak(mode, 8) - peak(mode, 2), 6 * (input + parameters) * 1.1);
      EXPECT_LT(peak(mode, 8), 0.5 * peak(Recompute::kNone, 8));
    }
  });
}

TEST(Recompute, WhatASecondRunThrowsReachesTheCallerOfBackward) {
  struct GivenUp {};
  comm::run_loopback(1, [&](comm::Transport&) {
    const model::DecoderConfig config = decoder_config({});
    const model::Decoder decoder(config, model::init_parameters(config, 5));
    int again = 0;
    const TwiceAttend attend = {[](int64_t, const at::Tensor& q, const at::Tensor&,
                                   const at::Tensor&, KeptAttention&) { return q; },
                                [&](int64_t, const at::Tensor& q, const at::Tensor& k,
                                    const at::Tensor& v, const KeptAttention&) {
                                  if (++again == 2) throw GivenUp();
                                  return q + (k.sum() + v.sum()) * 0;
                                },
                                {}};
    const at::Tensor h = decoder.forward(at::zeros({1, 9}, at::kLong), at::arange(9, at::kLong),
                                         recomputed_layers(decoder, Recompute::kLayer, attend));
    EXPECT_THROW(torch::autograd::backward({h.sum()}, {}), GivenUp);
    EXPECT_EQ(again, 2);
  });
}

TEST(TensorMemory, SeesWhatIsMadeAndFreedByThisThreadAlone) {
  TensorMemory memory;
  const TensorMemory::Scope scope(memory);
  EXPECT_EQ(memory.live_bytes(), 0);
  at::Tensor a = at::empty({1000}, at::kFloat);
  EXPECT_EQ(memory.live_bytes(), 4000);
  { const at::Tensor b = at::empty({500}, at::kFloat); }
  EXPECT_EQ(memory.live_bytes(), 4000);
  EXPECT_EQ(memory.peak_bytes(), 6000);
  memory.reset_peak();
  EXPECT_EQ(memory.peak_bytes(), 4000);
  std::thread([] { at::empty({9999}, at::kFloat); }).join();
  EXPECT_EQ(memory.peak_bytes(), 4000);
  a = at::Tensor();
  EXPECT_EQ(memory.live_bytes(), 0);
}

}  // namespace
}  // namespace mtraining::train
