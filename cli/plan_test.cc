// What plan computes beside what a run has: parameters, buffers, tensors, bytes.
#include "cli/plan.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <mutex>

#include "mtraining/base/check.h"
#include "mtraining/base/parallel.h"
#include "mtraining/comm/loopback.h"
#include "mtraining/train/tiny_run_case.h"

namespace mtraining::cli {
namespace {

model::DecoderConfig small_model(const std::string& architecture, bool tied, bool bias) {
  model::DecoderConfig m;
  m.architecture = architecture;
  m.vocab_size = 96;
  m.hidden_size = 64;
  m.intermediate_size = 160;
  m.num_hidden_layers = 3;
  m.num_attention_heads = 4;
  m.num_key_value_heads = 2;
  m.head_dim = 32;
  m.tie_word_embeddings = tied;
  m.attention_bias = bias;
  return m;
}

TEST(Plan, CountsTheParametersThatTheModelHas) {
  for (const char* architecture : {"qwen2", "qwen3", "llama"}) {
    for (const bool tied : {true, false}) {
      for (const bool bias : {false, true}) {
        if (bias && std::string(architecture) == "qwen2") continue;
        const model::DecoderConfig config = small_model(architecture, tied, bias);
        int64_t counted = 0;
        for (const auto& p : model::init_parameters(config, 1).list()) counted += p.value.numel();
        EXPECT_EQ(sim::total_parameters(decoder_sizes(config)), counted) << architecture << tied;
      }
    }
  }
}

TEST(Plan, CountsTheBuffersThatARingAllocates) {
  const model::DecoderConfig model = small_model("llama", true, false);
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const ring::RingKind kind : {ring::RingKind::kFlat, ring::RingKind::kHierarchical}) {
      for (const ring::InnerKind inner : {ring::InnerKind::kGather, ring::InnerKind::kRing}) {
        for (const auto wire :
             {attention::GradientTransport::kFloat32, attention::GradientTransport::kBFloat16}) {
          train::RunConfig config;
          config.model = model;
          config.model.dtype = dtype;
          config.train.seq_len = 1000;
          config.train.steps = 1;
          config.train.micro_batch_size = config.train.global_batch_size = 2;
          config.data.train = {{"unread", 1.0}};
          config.attention.ring = kind;
          config.attention.inner = inner;
          config.attention.gradient_transport = wire;
          topology::LaunchEnvironment launch;
          launch.world_size = 4;
          launch.local_world_size = 2;
          const train::ResolvedRun resolved = train::resolve(config, launch);
          sim::RunShape run = run_shape(config, resolved);
          run.on_gpu = false;  // whose buffers these are not
          std::vector<int64_t> allocated(4);
          comm::run_loopback(4, [&](comm::Transport& transport) {
            at::set_num_threads(1);
            const ThreadCountScope one_thread(1);
            attention::RingContext context(train::ring_options(config, resolved), transport);
            const auto tensor = [&](int64_t heads) {
              return at::ones({2, context.layout().tokens_per_rank(), heads, model.head_dim},
                              at::TensorOptions().dtype(dtype));
            };
            const at::Tensor q = tensor(4), k = tensor(2);
            const index::Index dense = index::dense_index(2, 4, 1000);
            const auto f = attention::ring_forward(context, q, k, k, dense, 0);
            attention::ring_backward(context, q, q, k, k, f.out, f.lse, dense, 0);
            allocated[transport.rank()] = context.buffer_bytes();
          });
          EXPECT_EQ(sim::ring_buffer_bytes(decoder_sizes(model), run), allocated[0])
              << dtype << " " << ring::to_string(kind) << " " << ring::to_string(inner);
        }
      }
    }
  }
}

struct Measured {
  int64_t peak_bytes = 0;  // of the largest rank
  int64_t sent_bytes = 0;  // of all ranks
};

Measured run(train::RunConfig config, const train::ResolvedRun& resolved) {
  Measured measured;
  comm::run_loopback(resolved.cp_size * resolved.dp_size, [&](comm::Transport& transport) {
    at::set_num_threads(1);
    const ThreadCountScope one_thread(1);
    train::Trainer trainer(config, resolved, transport);
    trainer.step(0);
    const trace::StepMetrics m = trainer.step(1);  // buffers and moments are there
    if (transport.rank() == 0) measured = {m.peak_tensor_bytes, m.comm_bytes};
  });
  return measured;
}

train::RunConfig planned_config(const train::TinyData& data) {
  train::RunConfig config = train::tiny_config(data);
  config.model = small_model("llama", true, false);
  config.model.num_hidden_layers = 3;
  config.data.valid.clear();
  config.attention.pattern = pattern::PatternKind::kDense;
  config.train.seq_len = 512;
  config.train.loss_chunk = 64;
  config.train.steps = 2;
  config.train.global_batch_size = 2;
  return config;
}

sim::RunShape cpu_shape(const train::RunConfig& config, const train::ResolvedRun& resolved) {
  sim::RunShape run = run_shape(config, resolved);
  run.on_gpu = false;
  return run;
}

/// What a layer more adds to the peak is what it keeps, its parameters and their state.
TEST(Plan, ALayerKeepsWhatWasPlanned) {
  const train::TinyData data;
  struct Mode {
    train::Recompute recompute;
    int64_t tile;
  };
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const Mode mode :
         {Mode{train::Recompute::kNone, 0}, Mode{train::Recompute::kNone, 64},
          Mode{train::Recompute::kLayer, 0}, Mode{train::Recompute::kExceptAttention, 0}}) {
      train::RunConfig config = planned_config(data);
      config.train.seq_len = 1024;  // so long that the peak lies in backward
      config.train.global_batch_size = 1;
      config.model.dtype = dtype;
      config.train.recompute = mode.recompute;
      config.train.mlp_tile = mode.tile;
      topology::LaunchEnvironment launch;
      launch.world_size = 2;
      launch.local_world_size = 2;
      const train::ResolvedRun resolved = train::resolve(config, launch);
      const sim::DecoderSizes sizes = decoder_sizes(config.model);
      int64_t peaks[2];
      for (const int more : {0, 1}) {
        config.model.num_hidden_layers = more == 1 ? 5 : 3;
        peaks[more] = run(config, resolved).peak_bytes;
      }
      // float32: weight, gradient, two moments; bf16: weight, float32 gradient, master, two moments.
      const int64_t parameters = sim::layer_parameters(sizes);
      int64_t planned = parameters * (dtype == at::kFloat ? 16 : 18);
      const int64_t kept = sim::kept_layer_bytes(sizes, cpu_shape(config, resolved));
      planned += kept;
      EXPECT_NEAR(static_cast<double>(peaks[1] - peaks[0]) / 2, static_cast<double>(planned),
                  0.01 * static_cast<double>(kept))
          << dtype << " mode " << static_cast<int>(mode.recompute) << " tile " << mode.tile;
    }
  }
}

TEST(Plan, TensorsOfAStepTakeWhatWasPlanned) {
  const train::TinyData data;
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const train::Recompute mode :
         {train::Recompute::kNone, train::Recompute::kLayer, train::Recompute::kExceptAttention}) {
      for (const int zero : {0, 2}) {
        train::RunConfig config = planned_config(data);
        config.model.dtype = dtype;
        config.train.recompute = mode;
        config.parallel.zero = zero;
        config.train.seq_len = 1024;
        config.train.global_batch_size = 1;
        topology::LaunchEnvironment launch;
        launch.world_size = 2;
        launch.local_world_size = 2;
        const train::ResolvedRun resolved = train::resolve(config, launch);
        const auto items =
            sim::memory_plan(decoder_sizes(config.model), cpu_shape(config, resolved));
        // Buckets of 32 MiB are larger than this model: none is ever full.
        int64_t planned = 0;
        for (const sim::MemoryItem& item : items)
          planned += zero == 2 && item.name == "gradients under way" ? 0 : item.bytes;
        const Measured measured = run(config, resolved);
        const double share =
            static_cast<double>(measured.peak_bytes) / static_cast<double>(planned);
        std::string text;
        for (const sim::MemoryItem& item : items) text += concat(item.name, " ", item.bytes, "\n");
        EXPECT_GT(share, 0.8) << dtype << " mode " << static_cast<int>(mode) << " zero " << zero
                              << ": " << measured.peak_bytes << " measured\n"
                              << text;
        EXPECT_LT(share, 1.2) << dtype << " mode " << static_cast<int>(mode) << " zero " << zero
                              << ": " << measured.peak_bytes << " measured\n"
                              << text;
      }
    }
  }
}

TEST(Plan, BytesOfAStepAreThoseThatWereSent) {
  const train::TinyData data;
  for (const train::Recompute mode : {train::Recompute::kNone, train::Recompute::kLayer}) {
    for (const int zero : {0, 2}) {
      for (const int ranks_per_node : {2, 4}) {
        train::RunConfig config = planned_config(data);
        config.train.recompute = mode;
        config.parallel.zero = zero;
        config.train.global_batch_size = 3;
        topology::LaunchEnvironment launch;
        launch.world_size = 4;
        launch.local_world_size = ranks_per_node;
        const train::ResolvedRun resolved = train::resolve(config, launch);
        const sim::DecoderSizes sizes = decoder_sizes(config.model);
        const sim::BytesPlan bytes = sim::bytes_plan(
            sizes, run_shape(config, resolved), sim::planned_index(config.train.seq_len, 4, 1));
        const double planned = 4.0 * static_cast<double>(bytes.ring_intra + bytes.ring_inter +
                                                         bytes.columns + bytes.gradients);
        const auto sent = static_cast<double>(run(config, resolved).sent_bytes);
        // Agreements before each call and sums of metrics come on top.
        EXPECT_GE(sent, planned) << "zero " << zero << " mode " << static_cast<int>(mode);
        EXPECT_LE(sent, 1.01 * planned) << "zero " << zero << " mode " << static_cast<int>(mode);
      }
    }
  }
}

}  // namespace
}  // namespace mtraining::cli
