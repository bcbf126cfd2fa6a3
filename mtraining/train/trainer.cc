#include "mtraining/train/trainer.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <optional>
#include <string_view>

#include "mtraining/base/check.h"
#include "mtraining/checkpoint/weight_folder.h"
#include "mtraining/checkpoint/weights.h"
#include "mtraining/optim/sharded_parameters.h"
#include "mtraining/train/attention_layers.h"
#include "mtraining/train/fault.h"
#include "mtraining/train/imbalance.h"
#include "mtraining/train/job.h"
#include "mtraining/train/loss.h"
#include "mtraining/train/run_files.h"
#include "mtraining/train/run_state.h"
#include "mtraining/train/stop_poll.h"
#include "mtraining/train/tensor_memory.h"

namespace mtraining::train {

using pattern::PatternKind;

namespace {

double seconds(int64_t begin_us, int64_t end_us) {
  return static_cast<double>(end_us - begin_us) * 1e-6;
}

data::BatchOptions batch_options(const RunConfig& config, const ResolvedRun& resolved,
                                 int dp_rank) {
  data::BatchOptions options;
  options.sources = config.data.train;
  options.seq_len = config.train.seq_len;
  options.vocab_size = config.model.vocab_size;
  options.shuffle_seed = config.data.shuffle_seed;
  options.document_mask = config.data.document_mask;
  options.micro_batch = config.train.micro_batch_size;
  options.accumulation = resolved.accumulation;
  options.dp_rank = dp_rank;
  options.dp_size = resolved.dp_size;
  return options;
}

std::unique_ptr<data::Batches> open_valid(const RunConfig& config, const ResolvedRun& resolved,
                                          int dp_rank) {
  if (config.data.valid.empty()) return nullptr;
  data::BatchOptions options = batch_options(config, resolved, dp_rank);
  options.sources = config.data.valid;
  options.shuffle = false;
  options.accumulation = 1;
  return std::make_unique<data::Batches>(options);
}

std::unique_ptr<optim::ParameterShare> make_share(const RunConfig& config,
                                                  const std::vector<model::Parameter>& parameters,
                                                  comm::Communicator& group) {
  std::vector<optim::ParameterShare::Named> named;
  for (const auto& p : parameters) named.push_back({p.name, p.value});
  return optim::make_parameter_share(std::move(named), group, config.parallel.zero,
                                     {config.optim.grad_dtype, config.parallel.offload_optimizer});
}

/// After so many skipped steps in a row nothing will become finite again: weights do not change.
constexpr int64_t kMostSkipped = 10;

/// Weights to begin with. Those of a resumed run come from its checkpoint.
model::DecoderParameters first_parameters(const RunConfig& config, bool resumed) {
  if (!resumed && !config.init_from) return model::init_parameters(config.model, config.train.seed);
  model::DecoderParameters parameters = model::empty_parameters(config.model);
  if (!resumed) {
    checkpoint::load_weights(checkpoint::WeightFolder(*config.init_from), parameters.list(),
                             config.model.tie_word_embeddings);
  }
  return parameters;
}

}  // namespace

void check_data(const RunConfig& config, const ResolvedRun& resolved) {
  const data::Batches train(batch_options(config, resolved, 0));
  train.sample(0);
  layer_patterns(config);
  if (const auto valid = open_valid(config, resolved, 0)) valid->sample(0);
}

std::vector<std::string> check_weights(const RunConfig& config) {
  if (!config.init_from) return {};
  const checkpoint::WeightFolder folder(*config.init_from);
  checkpoint::check_weights(folder, model::empty_parameters(config.model, at::kMeta).list(),
                            config.model.tie_word_embeddings);
  return folder.unused_files();
}

struct Trainer::State {
  TensorMemory memory;
  std::optional<TensorMemory::Scope> construction{std::in_place, memory};
  RunConfig config;
  ResolvedRun resolved;
  // Data first: what is wrong with a file is known to every rank alike, before any communication.
  data::Batches train_data;
  std::unique_ptr<data::Batches> valid_data;
  LayerPatterns patterns, dense_patterns;
  Job job;
  attention::RingContext context;
  model::Decoder decoder;
  std::vector<model::Parameter> parameters;
  std::unique_ptr<optim::ParameterShare> share;
  optim::AdamW adamw;
  AttentionLayers layers;
  Fault fault;
  RunState run_state;
  StopPoll stop_poll;
  RunPosition position;  // at the end of the last finished step, or in the middle of the next
  bool in_backward = false;
  int64_t whole_micro_steps =
      0;  // of the step under way, whose gradients are all there and nothing else
  int64_t saved_steps = 0;
  std::function<void(int64_t)> on_saved;
  std::chrono::steady_clock::time_point saved_at = std::chrono::steady_clock::now();
  trace::SpanRecorder recorder;
  bool recording = false;
  std::vector<std::vector<std::shared_ptr<const index::Index>>> last_indices;
  std::vector<std::string> warnings;
  const std::atomic<bool>* stop = nullptr;  // run()'s
  bool stop_agreed = false, step_dropped = false, save_agreed = false;
  int64_t current_step = 0;  // 0-based; what a fault of attention is said of

  State(const RunConfig& c, const ResolvedRun& r, comm::Transport& transport,
        const std::filesystem::path& resume)
      : config(c),
        resolved(r),
        train_data(batch_options(c, r, transport.rank() / r.cp_size)),
        valid_data(open_valid(c, r, transport.rank() / r.cp_size)),
        patterns(layer_patterns(c)),
        dense_patterns(dense_layers(c)),
        job(transport, r.cp_size),
        context(ring_options(c, r), transport, job.cp_members()),
        decoder(c.model, first_parameters(c, !resume.empty()), c.train.mlp_tile),
        parameters(decoder.parameters().list()),
        share(make_share(c, parameters, job.gradients())),
        adamw(c.optim.adamw, *share),
        layers(context, c.model.num_hidden_layers),
        fault(Fault::from_environment(transport.rank())),
        run_state(config, job, parameters, *share, adamw),
        stop_poll(transport) {
    if (!resume.empty()) position = run_state.load(resume);
    saved_steps = position.steps_done;
    layers.set_boundary([this] { boundary(); });
    construction.reset();
  }

  bool keeps_micro_steps() const {
    return config.checkpoint.save_accumulation && whole_micro_steps > 0;
  }

  /// Between two layers, on all ranks alike.
  void boundary() {
    const StopLevel level = stop_poll.boundary();
    if (level == StopLevel::kNone) return;
    // A micro-step that is dropped in its backward has spoilt the gradients of those before it.
    if (in_backward && keeps_micro_steps() && level != StopLevel::kUrgent) return;
    if (in_backward) whole_micro_steps = 0;
    throw StepAbandoned();
  }

  bool save_is_due() const {
    const double minutes = config.checkpoint.save_every_minutes;
    return minutes > 0 && job.rank() == 0 &&
           std::chrono::duration<double>(std::chrono::steady_clock::now() - saved_at).count() >=
               60 * minutes;
  }

  void save() {
    const int64_t begin_us = trace::now_us();
    run_state.save(position, [this] { fault.strike("checkpoint", position.steps_done); });
    saved_at = std::chrono::steady_clock::now();
    saved_steps = position.steps_done;
    save_agreed = false;
    if (on_saved) on_saved(position.steps_done);
    span("checkpoint", "step", begin_us, position.steps_done - 1);
  }

  /// `totals` of the micro-steps that this rank has finished: what a step that goes on later needs to know.
  void keep_micro_steps(std::vector<double> totals) {
    job.sum(totals);
    position.kept_samples = whole_micro_steps * config.train.micro_batch_size * resolved.dp_size;
    position.kept_loss = totals[0];
    position.kept_labels = totals[1];
  }

  const LayerPatterns& patterns_of_step(int64_t step) const {
    return step < config.attention.dense_steps ? dense_patterns : patterns;
  }

  void span(const char* name, const char* row, int64_t begin_us, int64_t step, int64_t layer = -1) {
    if (recording) recorder.add({name, row, begin_us, trace::now_us(), step + 1, layer});
  }

  model::PartObserver part_observer(int64_t step) {
    if (!recording) return {};
    return [this, step, begin = int64_t{0}](std::string_view part, int64_t layer,
                                            bool begins) mutable {
      if (begins) {
        begin = trace::now_us();
      } else {
        span(std::string(part).c_str(), "model", begin, step, layer);
      }
    };
  }

  model::RunLayer run_layer(const AttendRequest& request, int64_t step) {
    const Recompute mode = config.train.recompute;
    if (mode == Recompute::kNone || !at::GradMode::is_enabled())
      return decoder.layers_with(layers.attend(request), part_observer(step));
    return recomputed_layers(decoder, mode, layers.attend_twice(request), part_observer(step));
  }

  SummedLoss forward(const data::Batch& batch, AttendRequest request, int64_t step) {
    check_same_samples(batch);
    request.document_starts = batch.document_starts;
    at::Tensor hidden;
    try {
      hidden = decoder.forward(batch.ids, batch.rope_positions(), run_layer(request, step),
                               part_observer(step));
    } catch (const InvalidArgument& error) {
      // Configuration and tokens were checked before: values that are not finite are the training's fault.
      if (std::string_view(error.what()).find("finite") == std::string_view::npos) throw;
      throw ExternalError(
          concat("train_step ", current_step + 1, ": training has diverged: ", error.what()));
    }
    return chunked_loss(hidden.reshape({-1, hidden.size(-1)}), decoder.head_weight(),
                        batch.labels.reshape({-1}), config.train.loss_chunk);
  }

  /// Ranks of a group that read different files would train on a text that nobody wrote. All ranks throw alike.
  void check_same_samples(const data::Batch& batch) {
    if (job.size() == 1) return;
    const auto all = job.gather(
        {static_cast<double>(batch.digest >> 32), static_cast<double>(batch.digest & 0xffffffffu)});
    for (int r = 0; r < job.size(); ++r) {
      const int first = r - r % resolved.cp_size;
      MT_CHECK_ARG(all[r] == all[first], "train_step ", current_step + 1, ": ranks ", first,
                   " and ", r,
                   " of one context-parallel group read different samples; expected the same token "
                   "files on every node");
    }
  }

  /// Forward and backward of one micro-step; adds to the gradient vector. Returns the sum of losses and the count.
  SummedLoss micro_step(int64_t step, int64_t micro, const AttendRequest& request,
                        double& data_wait_s) {
    const int64_t begin_us = trace::now_us();
    fault.strike("loader", step + 1);
    const data::Batch batch = train_data.batch(step, micro, context.layout(), context.cp_rank());
    data_wait_s += seconds(begin_us, trace::now_us());
    span("batch", "step", begin_us, step);
    const int64_t forward_us = trace::now_us();
    fault.strike("forward", step + 1);
    SummedLoss loss = forward(batch, request, step);
    span("forward", "step", forward_us, step);
    const int64_t backward_us = trace::now_us();
    if (fault.is_at("backward", step + 1)) {
      loss.sum.register_hook(
          [this, step](const at::Tensor&) { fault.strike("backward", step + 1); });
    }
    in_backward = true;
    if (loss.sum.requires_grad()) torch::autograd::backward({loss.sum}, {});
    in_backward = false;
    share->collect_gradient();
    span("backward", "step", backward_us, step);
    return loss;
  }

  /// Zero gradients, or those that a checkpoint kept, and the micro-step that comes next.
  int64_t first_micro_step() {
    const int64_t samples = config.train.micro_batch_size * resolved.dp_size;
    const int64_t kept = position.kept_samples;
    if (kept > 0 && kept % samples == 0) return whole_micro_steps = kept / samples;
    if (kept > 0) {
      warnings.push_back(concat("train_step ", current_step + 1, ": ", kept,
                                " samples were finished before the stop, which is no multiple of "
                                "micro_batch_size x dp_size = ",
                                samples, "; the step begins anew"));
    }
    position.kept_samples = whole_micro_steps = 0;
    share->zero_gradient();
    return 0;
  }

  /// Before a micro-step: a step of many can take minutes. `stop` is given to all ranks or none.
  bool stops_between_micro_steps(const std::vector<double>& totals) {
    const bool saves =
        config.checkpoint.save_accumulation && config.checkpoint.save_every_minutes > 0;
    fault.strike("accumulation", current_step + 1);
    if (stop == nullptr && !saves) return false;
    bool stops = false, due = false;
    for (const auto& flags : job.gather(
             {stop != nullptr && stop->load() ? 1.0 : 0.0, saves && save_is_due() ? 1.0 : 0.0})) {
      stops = stops || flags[0] != 0;
      due = due || flags[1] != 0;
    }
    if (due && !stops) {
      keep_micro_steps(totals);
      save();
    }
    return stops;
  }

  data::Batch valid_batch(int64_t b) const {
    // Fewer samples than asked for: the file is passed through again rather than scored less.
    return valid_data->batch(b, 0, context.layout(), context.cp_rank());
  }

  void write_example();
};

Trainer::Trainer(const RunConfig& config, const ResolvedRun& resolved, comm::Transport& transport,
                 const std::filesystem::path& resume)
    : state_(std::make_unique<State>(config, resolved, transport, resume)) {}
Trainer::~Trainer() = default;

const std::vector<model::Parameter>& Trainer::parameters() const { return state_->parameters; }
const std::vector<trace::Span>& Trainer::spans() const { return state_->recorder.spans(); }

int64_t Trainer::optimizer_steps() const { return state_->adamw.steps_taken(); }
const std::vector<std::vector<std::shared_ptr<const index::Index>>>& Trainer::last_indices() const {
  return state_->last_indices;
}

trace::StepMetrics Trainer::step(
    int64_t step, const std::vector<std::vector<std::shared_ptr<const index::Index>>>* replay) {
  State& s = *state_;
  const TensorMemory::Scope scope(s.memory);
  s.memory.reset_peak();
  const int64_t begin_us = trace::now_us();
  const int64_t bytes_before = s.context.bytes_sent() + s.job.bytes_sent();
  s.recording = s.config.trace.chrome && step + 1 >= s.config.trace.first_step &&
                step + 1 < s.config.trace.first_step + s.config.trace.steps;
  s.layers.begin(s.recording ? &s.recorder : nullptr, step + 1);
  s.current_step = step;
  s.last_indices.clear();
  s.stop_poll.step_begins();

  AttendRequest request;
  request.patterns = s.patterns_of_step(step);
  const bool dense = all_dense(request.patterns);
  const int64_t every = s.config.train.recall_every;
  request.measure_recall = every > 0 && step % every == 0 && replay == nullptr && !dense;
  request.recall_seed = s.config.train.seed + static_cast<uint64_t>(step);
  double data_wait_s = 0;
  std::vector<double> totals(2, 0);  // sum of losses, valid tokens
  const int64_t first_micro = s.first_micro_step();
  if (first_micro > 0 && s.job.rank() == 0) totals = {s.position.kept_loss, s.position.kept_labels};
  for (int64_t micro = first_micro; micro < s.resolved.accumulation; ++micro) {
    try {
      if (micro > first_micro && s.stops_between_micro_steps(totals)) throw StepAbandoned();
      if (replay != nullptr) request.replay = &replay->at(micro);
      const SummedLoss loss = s.micro_step(step, micro, request, data_wait_s);
      totals[0] += loss.sum.item<double>();
      totals[1] += static_cast<double>(loss.count);
    } catch (const StepAbandoned&) {
      // Buckets that are under way come home, on all ranks alike.
      if (s.in_backward) s.share->collect_gradient();
      s.in_backward = false;
      s.stop_agreed = s.step_dropped = true;
      s.position.kept_samples = 0;
      if (s.keeps_micro_steps()) s.keep_micro_steps(totals);
      return {};
    }
    s.whole_micro_steps = micro + 1;
    s.last_indices.push_back(s.layers.seen().indices);
  }
  s.position.kept_samples = s.whole_micro_steps = 0;

  const int64_t reduce_us = trace::now_us();
  if (s.fault.poisons(step + 1)) s.share->gradient().fill_(std::nan(""));
  s.job.sum(totals);
  s.share->reduce_gradient();
  s.span("reduce", "step", reduce_us, step);
  const int64_t update_us = trace::now_us();
  trace::StepMetrics m;
  const double valid_tokens = totals[1];
  m.loss = valid_tokens > 0 ? totals[0] / valid_tokens : 0;
  if (valid_tokens == 0) {
    s.warnings.push_back(
        concat("train_step ", step + 1, ": no token of the step has a label; loss 0, no gradient"));
  }
  const double per_token = valid_tokens > 0 ? 1 / valid_tokens : 1;
  std::vector<double> squares{optim::sum_of_squares(s.share->gradient())};
  if (s.share->is_sharded()) s.job.sum(squares);
  m.grad_norm = std::sqrt(squares[0]) * per_token;
  m.lr = optim::learning_rate(s.config.optim.schedule, step);
  const bool skip = s.job.any(!std::isfinite(m.grad_norm) || !std::isfinite(m.loss));
  if (skip) {
    ++s.position.skipped;
    ++s.position.skipped_in_a_row;
    s.warnings.push_back(concat("train_step ", step + 1,
                                ": skipped on all ranks, a gradient or the loss is not finite"));
  } else {
    s.adamw.step(m.lr, per_token * optim::clip_factor(m.grad_norm, s.config.optim.clip_norm));
    s.position.skipped_in_a_row = 0;
  }
  s.span("optimizer", "step", update_us, step);

  const AttentionSeen seen = s.layers.seen();
  const std::vector<StepWork>& work = s.layers.work();
  const auto gathered = s.job.gather(
      {data_wait_s, static_cast<double>(s.context.bytes_sent() + s.job.bytes_sent() - bytes_before),
       static_cast<double>(peak_resident_bytes()), static_cast<double>(work.size()),
       seen.mean_density(), static_cast<double>(seen.heads_dense),
       static_cast<double>(seen.caps_hit), s.stop != nullptr && s.stop->load() ? 1.0 : 0.0,
       s.save_is_due() ? 1.0 : 0.0, seconds(begin_us, trace::now_us()),
       static_cast<double>(seen.columns_per_step), seen.pairs,
       static_cast<double>(s.memory.peak_bytes())});
  bool same_events = true;
  double density = 0, attention_pairs = 0;
  size_t most_events = 0;  // groups hold different samples, and so may exchange columns or not
  for (size_t r = 0; r < gathered.size(); ++r) {
    const auto& g = gathered[r];
    m.data_wait_s = std::max(m.data_wait_s, g[0]);
    m.comm_bytes += static_cast<int64_t>(g[1]);
    m.peak_memory_bytes = std::max(m.peak_memory_bytes, static_cast<int64_t>(g[2]));
    m.peak_tensor_bytes = std::max(m.peak_tensor_bytes, static_cast<int64_t>(g[12]));
    const size_t first_of_group = r - r % static_cast<size_t>(s.resolved.cp_size);
    same_events = same_events && g[3] == gathered[first_of_group][3];
    most_events = std::max(most_events, static_cast<size_t>(g[3]));
    density += g[4] / static_cast<double>(gathered.size());
    if (r % s.resolved.cp_size == 0) {  // every rank of a context-parallel group has the same index
      m.heads_dense += static_cast<int64_t>(g[5]);
      m.caps_hit += static_cast<int64_t>(g[6]);
      m.columns_per_step += static_cast<int64_t>(g[10]);
      attention_pairs += g[11];
    }
    s.stop_agreed = s.stop_agreed || g[7] != 0;
    s.save_agreed = s.save_agreed || g[8] != 0;
  }
  s.stop_poll.step_took(gathered[0][9]);
  MT_ASSERT(same_events, "ranks of one group ran different numbers of ring steps");
  m.attention_density = density;
  if (dense) {
    m.attention_recall = 1;
    m.attention_recall_worst = 1;
  } else if (request.measure_recall) {
    m.attention_recall = seen.mean_recall();
    m.attention_recall_worst = seen.recall_worst;
  }
  if (most_events > 0) {
    std::vector<double> flat_work;
    for (const StepWork& w : work) flat_work.insert(flat_work.end(), {w.pairs, w.seconds});
    flat_work.resize(2 * most_events, 0);  // steps without work change no degree
    const auto all_work = s.job.gather(flat_work);
    const Imbalance pairs = imbalance_of(all_work, s.resolved.cp_size, 0);
    const Imbalance time = imbalance_of(all_work, s.resolved.cp_size, 1);
    m.worker_imbalance = pairs.worker;
    m.step_imbalance = pairs.step;
    m.worker_imbalance_time = time.worker;
    m.step_imbalance_time = time.step;
  }
  m.train_step = step + 1;
  m.tokens = s.config.train.global_batch_size * s.config.train.seq_len;
  s.position.steps_done = step + 1;
  s.position.tokens_total += m.tokens;
  s.position.optimizer_steps = s.adamw.steps_taken();
  m.tokens_total = s.position.tokens_total;
  m.step_s = seconds(begin_us, trace::now_us());
  m.tokens_per_s = static_cast<double>(m.tokens) / m.step_s;
  m.tokens_per_s_per_gpu = m.tokens_per_s / s.job.size();
  if (s.config.train.peak_flops_per_s) {
    // Forward 4 D a pair, backward 2.5 times that; recomputation is no work of the model.
    const double flops = s.decoder.dense_flops_per_token() * static_cast<double>(m.tokens) +
                         attention_pairs * 4 * static_cast<double>(s.config.model.head_dim) * 3.5;
    m.mfu = flops / (m.step_s * *s.config.train.peak_flops_per_s * s.job.size());
  }
  m.skipped = s.position.skipped;
  s.span("train_step", "step", begin_us, step);
  return m;
}

const LayerPatterns& Trainer::patterns() const { return state_->patterns; }

Evaluation Trainer::evaluate(const LayerPatterns& patterns, bool measure_recall) {
  State& s = *state_;
  const TensorMemory::Scope scope(s.memory);
  MT_CHECK_ARG(s.valid_data != nullptr,
               "data.valid: expected held-out data for an evaluation, got none");
  const at::NoGradGuard no_grad;
  const bool dense = all_dense(patterns);
  s.layers.begin(nullptr, 0);
  AttendRequest request;
  request.patterns = patterns;
  request.measure_recall = measure_recall && !dense;
  std::vector<double> totals(2, 0);
  for (int64_t b = 0; b < s.config.eval.batches; ++b) {
    request.recall_seed = s.config.train.seed + static_cast<uint64_t>(b);
    const SummedLoss loss = s.forward(s.valid_batch(b), request, 0);
    totals[0] += loss.sum.item<double>();
    totals[1] += static_cast<double>(loss.count);
  }
  s.job.sum(totals);
  const AttentionSeen seen = s.layers.seen();
  Evaluation e;
  // What most of it is: of [attention], or of the first layer that is not dense.
  const auto sparse = std::find_if(patterns.begin(), patterns.end(), [&](const auto& pattern) {
    return pattern.kind == s.config.attention.pattern && pattern.kind != PatternKind::kDense;
  });
  const auto first = std::find_if(patterns.begin(), patterns.end(), [](const auto& pattern) {
    return pattern.kind != PatternKind::kDense;
  });
  const attention::AttentionPattern& named = dense                      ? patterns.front()
                                             : sparse != patterns.end() ? *sparse
                                                                        : *first;
  e.pattern = to_string(named.kind);
  e.p = named.kind == PatternKind::kVerticalSlash ? named.vertical_slash.p_slash : 1;
  e.loss = totals[1] > 0 ? totals[0] / totals[1] : 0;
  e.tokens = static_cast<int64_t>(totals[1]);
  e.density_by_layer = seen.density;
  if (request.measure_recall) {
    e.recall_by_layer = seen.recall;
    e.recall_worst = seen.recall_worst;
  }
  return e;
}

void Trainer::State::write_example() {
  const int64_t layer = config.trace.example_layer, head = config.trace.example_head;
  const at::NoGradGuard no_grad;
  layers.begin(nullptr, 0);
  AttendRequest request;
  request.patterns = patterns;
  request.keep_layer = layer;
  forward(valid_data ? valid_batch(0) : train_data.batch(0, 0, context.layout(), context.cp_rank()),
          request, 0);
  const AttentionSeen seen = layers.seen();
  if (seen.indices[layer]->has_blocks()) {
    warnings.push_back("trace.example_layer: no picture of a pattern that chooses single blocks");
    return;
  }
  const int64_t kv_head =
      head / (config.model.num_attention_heads / config.model.num_key_value_heads);
  const int64_t n = context.layout().tokens_per_rank(), dim = config.model.head_dim;
  const auto join = [&](const at::Tensor& shard, int64_t h) {
    const at::Tensor part = shard.select(0, 0).select(1, h).to(at::kFloat).contiguous();  // [n, D]
    const std::vector<float> all = job.gather_floats(part.data_ptr<float>(), part.numel());
    at::Tensor whole = at::zeros({context.layout().padded_len(), dim});
    for (int r = 0; r < resolved.cp_size; ++r) {
      const std::vector<int64_t> positions = context.layout().positions(r);
      const at::Tensor rows = at::from_blob(const_cast<float*>(all.data()) + r * n * dim, {n, dim});
      whole.index_copy_(0, at::tensor(positions), rows);
    }
    return whole.narrow(0, 0, config.train.seq_len);
  };
  const at::Tensor q = join(seen.kept_q, head), k = join(seen.kept_k, kv_head);
  if (job.rank() == 0) {
    train::write_example(std::filesystem::path(config.out) / "example", q, k, *seen.indices[layer],
                         layer, head, 1 / std::sqrt(static_cast<double>(dim)));
  }
}

void Trainer::evaluate_at_end(TrainResult& result) {
  State& s = *state_;
  if (!s.valid_data) return;
  std::vector<Evaluation> all{evaluate(s.dense_patterns, false)};
  if (!all_dense(s.patterns)) {
    all.push_back(evaluate(s.patterns, true));
    for (const double p : s.config.eval.also_p) {
      LayerPatterns patterns = s.patterns;
      for (attention::AttentionPattern& pattern : patterns)
        pattern.vertical_slash.p_vertical = pattern.vertical_slash.p_slash = p;
      all.push_back(evaluate(patterns, true));
    }
  }
  result.evaluations = std::move(all);
}

Preflight Trainer::look_at_first_batch() {
  State& s = *state_;
  const at::NoGradGuard no_grad;
  Preflight preflight;
  const data::Batch batch =
      s.train_data.batch(s.position.steps_done, 0, s.context.layout(), s.context.cp_rank());
  for (const bool dense : {true, false}) {
    s.layers.begin(nullptr, 0);
    AttendRequest request;
    request.patterns = dense ? s.dense_patterns : s.patterns;
    request.measure_recall = !all_dense(request.patterns);
    const SummedLoss loss = s.forward(batch, request, 0);
    std::vector<double> totals{loss.sum.item<double>(), static_cast<double>(loss.count)};
    s.job.sum(totals);
    const double mean = totals[1] > 0 ? totals[0] / totals[1] : 0;
    (dense ? preflight.loss_dense : preflight.loss_pattern) = mean;
    const AttentionSeen seen = s.layers.seen();
    preflight.density = seen.mean_density();
    if (request.measure_recall) preflight.recall_worst = seen.recall_worst;
  }
  return preflight;
}

TrainResult Trainer::run(const TrainObserver& observer, const std::atomic<bool>* stop) {
  State& s = *state_;
  const TensorMemory::Scope scope(s.memory);
  const std::filesystem::path out = s.config.out;
  const int64_t steps = s.resolved.steps;
  std::unique_ptr<trace::MetricsFile> metrics;
  if (s.job.rank() == 0) {
    metrics = std::make_unique<trace::MetricsFile>(out / "metrics.jsonl", s.position.steps_done);
  }
  const auto warn = [&] {
    for (const std::string& text : s.warnings) {
      if (observer.warning) observer.warning(text);
    }
    s.warnings.clear();
  };
  s.stop = stop;
  s.stop_poll.watch(stop, s.config.train.stop_grace_s);
  s.on_saved = observer.saved;
  /// False where a stop came first or in it; all ranks alike.
  const auto unless_stopped = [&](const auto& body) {
    try {
      if (!s.stop_agreed) body();
    } catch (const StepAbandoned&) {
      s.stop_agreed = true;
    }
    return !s.stop_agreed;
  };

  TrainResult result;
  result.data = s.train_data.pass_counts();
  bool evaluated = s.position.evaluated && s.position.steps_done >= steps;
  s.position.evaluated = false;
  if (s.config.train.preflight && s.position.steps_done < steps) {
    Preflight preflight;
    if (unless_stopped([&] { preflight = look_at_first_batch(); }) && observer.preflight)
      observer.preflight(preflight);
  }
  const EvalSection& eval = s.config.eval;
  for (int64_t step = s.position.steps_done; step < steps && !s.stop_agreed; ++step) {
    trace::StepMetrics m = this->step(step);
    if (s.step_dropped) break;
    const bool last = step + 1 == steps;
    if (s.valid_data && eval.every > 0 && (step + 1) % eval.every == 0 && !last) {
      unless_stopped([&] {
        m.valid_loss_dense = evaluate(s.dense_patterns, false).loss;
        m.valid_loss =
            all_dense(s.patterns) ? m.valid_loss_dense : evaluate(s.patterns, false).loss;
      });
    }
    if (last) {
      evaluated = unless_stopped([&] { evaluate_at_end(result); });
      if (!result.evaluations.empty()) {
        m.valid_loss_dense = result.evaluations.front().loss;
        m.valid_loss = result.evaluations[result.evaluations.size() > 1 ? 1 : 0].loss;
      }
    }
    if (metrics) metrics->write(m);
    warn();
    if (observer.step) observer.step(m, steps);
    // Agreed: every rank skips the same steps.
    MT_CHECK_EXTERNAL(
        s.position.skipped_in_a_row < kMostSkipped && !(last && s.position.skipped == step + 1),
        "train_step ", step + 1, ": training has diverged: ", s.position.skipped_in_a_row,
        " steps in a row were skipped because a gradient or the loss is not finite");
    const int64_t every = s.config.checkpoint.every;
    const bool due = s.save_agreed || (every > 0 && (step + 1) % every == 0);
    if (due && !last && !s.stop_agreed) s.save();
  }
  warn();
  if (s.position.steps_done >= steps && !evaluated)  // resumed where only this was left
    evaluated = unless_stopped([&] { evaluate_at_end(result); });

  result.steps_done = s.position.steps_done;
  result.stopped = !evaluated;
  // First of all: the grace is short.
  const bool unsaved = s.position.steps_done > s.saved_steps || s.position.kept_samples > 0;
  if (result.stopped && unsaved) s.save();
  if (!result.stopped && s.config.trace.example_layer >= 0 &&
      s.patterns[s.config.trace.example_layer].kind != PatternKind::kDense) {
    s.stop_poll.watch(nullptr, 0);
    s.write_example();
  }
  if (s.config.trace.chrome) {
    const auto texts = s.job.gather_text(s.recorder.serialize());
    if (s.job.rank() == 0) trace::write_chrome_trace(out / "trace.json", texts);
  }
  if (s.job.rank() == 0) write_summary(out / "summary.json", result, s.config, s.resolved);
  if (!result.stopped) {  // last: it says that nothing is left to do
    s.position.evaluated = true;
    s.save();
  }
  return result;
}

}  // namespace mtraining::train
