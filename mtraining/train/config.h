// RunConfig: everything that one training run is, as plain data.
//
// In:   cli/ fills it from TOML and the command line. Out: the trainer reads it; nothing changes it later.
// Next: trainer.h.
//
// Field names are the keys of the file, section by section. Defaults that are ours and not the paper's: sink_tokens 64,
// local_blocks 2, stripe 64, inner "gather".
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "mtraining/attention/ring_attention.h"
#include "mtraining/data/batches.h"
#include "mtraining/layout/layout.h"
#include "mtraining/model/decoder.h"
#include "mtraining/optim/adamw.h"
#include "mtraining/optim/schedule.h"
#include "mtraining/pattern/pattern.h"
#include "mtraining/ring/schedule.h"
#include "mtraining/topology/topology.h"
#include "mtraining/train/recompute.h"

namespace mtraining::train {

struct DataSection {
  std::vector<data::Source> train;
  std::vector<data::Source> valid;  ///< empty: no held-out loss
  uint64_t shuffle_seed = 0;
  bool document_mask = false;  ///< samples are rows of documents; nothing crosses their bounds
};

struct ParallelSection {
  std::optional<int> cp_size;        ///< absent: all ranks / dp_size
  std::optional<int> cp_inner_size;  ///< absent: min(cp_size, LOCAL_WORLD_SIZE)
  int dp_size = 1;
  /// 0: every rank holds all gradients and optimizer state; 2: of all ranks (cp x dp) each holds its part.
  int zero = 0;
  bool offload_optimizer = false;  ///< masters and moments in host memory
  /// Threads of this rank that update offloaded masters; 0: its share of the cores.
  int64_t optimizer_threads = 0;
  /// How long a rank waits for another one in a transfer before the job ends with that as its cause.
  double timeout_s = 600;
};

/// The keys of [attention] that a range of layers may have for itself.
struct PatternSection {
  pattern::PatternKind pattern = pattern::PatternKind::kVerticalSlash;
  pattern::VerticalSlashOptions options;
  /// "fixed": lists of every head from a file (docs/formats.md), or how many columns and diagonals each head takes.
  std::optional<std::string> pattern_file;
  std::optional<int64_t> fixed_columns, fixed_diagonals;
  /// With pattern_file, for benchmarks: vertical_slash chooses an index beside the lists, timed and not used, so that a step costs what
  /// it would. Absent: no; `mtraining bench train`: yes.
  std::optional<bool> estimate;
  pattern::XAttentionOptions xattention;
  pattern::MobaOptions moba;
};

/// Layers first .. last, both included. What the range does not give is [attention]'s.
struct LayerRange : PatternSection {
  int64_t first = 0, last = 0;
};

struct AttentionSection : PatternSection {
  std::vector<LayerRange> layers;
  int64_t dense_steps = 0;  ///< the first train steps use dense attention
  layout::LayoutKind layout = layout::LayoutKind::kBlockStriped;
  int64_t stripe = 64;
  ring::RingKind ring = ring::RingKind::kHierarchical;
  ring::InnerKind inner = ring::InnerKind::kGather;
  int ring_stride = 1;
  int prefetch_steps = 2;
  int launch_shards = 0;  ///< arrived shards that a launch takes; 0: chosen (ring_attention.h)
  attention::ColumnMode columns = attention::ColumnMode::kOnce;
  attention::GradientTransport gradient_transport = attention::GradientTransport::kFloat32;
  attention::Transfers transfers = attention::Transfers::kCollectives;
  bool deterministic = true;
  int sm_margin = 8;  ///< multiprocessors of a GPU that launches leave to transfers
};

/// train.device. In a file the key may be absent (cli/device.h decides).
enum class DeviceKind { kCpu, kCuda };

struct TrainSection {
  DeviceKind device = DeviceKind::kCpu;
  int64_t seq_len = 0;
  std::optional<int64_t> steps;   ///< exactly one of steps and tokens
  std::optional<int64_t> tokens;  ///< steps = tokens / (global_batch_size * seq_len), rounded up
  int64_t global_batch_size =
      1;  ///< sequences a train step over all ranks; accumulation follows and must divide
  int64_t micro_batch_size = 1;  ///< sequences of one forward on one context-parallel group
  uint64_t seed = 0;
  double stop_grace_s = 20;
  bool preflight = true;
  Recompute recompute = Recompute::kNone;
  int64_t recompute_span = 1;  ///< neighbouring layers that keep one input together
  /// The first so many layers keep what recompute keeps in host memory between forward and backward.
  int64_t offload_layers = 0;
  int64_t mlp_tile = 0;       ///< tokens of one tile of the MLP, recomputed in backward; 0: off
  int64_t loss_chunk = 1024;  ///< tokens of one chunk of logits
  int64_t recall_every = 10;  ///< train steps between measurements of recall; 0: never
  std::optional<double>
      peak_flops_per_s;  ///< of one rank's device, for metrics' mfu; absent: unknown
};

struct OptimSection {
  optim::AdamWOptions adamw;
  optim::ScheduleOptions schedule;         ///< total_steps is filled by resolve()
  double clip_norm = 1.0;                  ///< 0: off
  at::ScalarType grad_dtype = at::kFloat;  ///< in which gradients are added up and sent
};

struct EvalSection {
  int64_t every = 0;  ///< train steps between held-out losses; 0: only at the end
  int64_t batches =
      4;  ///< held-out batches (global_batch_size is not used: one micro batch a context-parallel group each)
  std::vector<double>
      also_p;  ///< at the end the same weights are evaluated at these p_vertical = p_slash too
};

struct TraceSection {
  bool chrome = true;
  int64_t first_step = 2;  ///< 1-based train step at which spans begin to be recorded
  int64_t steps = 3;       ///< train steps recorded
  int64_t example_layer =
      -1;  ///< layer whose q, k and index of one head are written at the end; -1: none
  int64_t example_head = 0;
};

/// Keys model.rope_scaling.* as given; model.rope is what follows from them.
struct RopeScalingSection {
  std::optional<std::string> rope_type;  ///< "none", "linear", "yarn", "llama3"
  std::optional<double> factor;
  std::optional<int64_t> original_max_position_embeddings;
  std::optional<double> beta_fast, beta_slow, attention_factor, mscale, mscale_all_dim;
  std::optional<bool> truncate;
  std::optional<double> low_freq_factor, high_freq_factor;
};

struct CheckpointSection {
  int64_t every = 0;  ///< train steps between checkpoints; 0: only where the run ends or is stopped
  double save_every_minutes = 0;   ///< 0: off
  int64_t keep = 2;                ///< last checkpoints that stay; 0: all
  bool save_accumulation = false;  ///< gradients of a step's finished micro-steps are kept too
};

struct RunConfig {
  model::DecoderConfig model;
  RopeScalingSection rope_scaling;
  std::optional<std::string>
      init_from;  ///< Hugging Face folder of the first weights; absent: random ones
  DataSection data;
  ParallelSection parallel;
  AttentionSection attention;
  TrainSection train;
  OptimSection optim;
  EvalSection eval;
  CheckpointSection checkpoint;
  TraceSection trace;
  std::string
      text;         ///< as TOML; checkpoints keep it, so that a resumed run can be compared with it
  std::string out;  ///< the run's folder
};

/// What follows from a config and the ranks that run it.
struct ResolvedRun {
  at::Device device = at::kCPU;  ///< of this rank
  int cp_size = 1, dp_size = 1;
  topology::Topology topology;
  int64_t steps = 0;
  int64_t accumulation = 1;
};

/// Checks every range and every relation between keys and ranks, and derives what is absent; fills optim.schedule.total_steps.
/// Before any file is opened and any communication. Errors: InvalidArgument / Unsupported naming the key.
ResolvedRun resolve(RunConfig& config, const topology::LaunchEnvironment& launch);

attention::RingOptions ring_options(const RunConfig& config, const ResolvedRun& resolved);

}  // namespace mtraining::train
