#include "mtraining/train/trainer.h"

#include <ATen/ATen.h>
#include <sys/resource.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <string_view>

#include "mtraining/base/check.h"
#include "mtraining/train/attention_layers.h"
#include "mtraining/train/fault.h"
#include "mtraining/train/imbalance.h"
#include "mtraining/train/job.h"
#include "mtraining/train/loss.h"
#include "mtraining/train/run_files.h"

namespace mtraining::train {
namespace {

double seconds(int64_t begin_us, int64_t end_us) {
  return static_cast<double>(end_us - begin_us) * 1e-6;
}

int64_t peak_memory_bytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss * 1024;
}

data::BatchOptions batch_options(const RunConfig& config, const ResolvedRun& resolved,
                                 int dp_rank) {
  data::BatchOptions options;
  options.sources = config.data.train;
  options.seq_len = config.train.seq_len;
  options.vocab_size = config.model.vocab_size;
  options.shuffle_seed = config.data.shuffle_seed;
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

std::vector<optim::FlatParameters::Named> named(const std::vector<model::Parameter>& parameters) {
  std::vector<optim::FlatParameters::Named> result;
  for (const auto& p : parameters) result.push_back({p.name, p.value});
  return result;
}

/// After so many skipped steps in a row nothing will become finite again: weights do not change.
constexpr int64_t kMostSkipped = 10;

attention::AttentionPattern dense_pattern() {
  attention::AttentionPattern pattern;
  pattern.kind = pattern::PatternKind::kDense;
  return pattern;
}

}  // namespace

void check_data(const RunConfig& config, const ResolvedRun& resolved) {
  const data::Batches train(batch_options(config, resolved, 0));
  train.sample(0);
  if (const auto valid = open_valid(config, resolved, 0)) valid->sample(0);
}

struct Trainer::State {
  RunConfig config;
  ResolvedRun resolved;
  // Data first: what is wrong with a file is known to every rank alike, before any communication.
  data::Batches train_data;
  std::unique_ptr<data::Batches> valid_data;
  Job job;
  attention::RingContext context;
  model::Decoder decoder;
  std::vector<model::Parameter> parameters;
  optim::FlatParameters flat;
  optim::AdamW adamw;
  AttentionLayers layers;
  Fault fault;
  trace::SpanRecorder recorder;
  bool recording = false;
  int64_t skipped = 0, tokens_total = 0;
  std::vector<std::vector<std::shared_ptr<const index::Index>>> last_indices;
  std::vector<std::string> warnings;
  const std::atomic<bool>* stop = nullptr;  // run()'s
  bool stop_agreed = false, step_dropped = false;
  int64_t skipped_in_a_row = 0;
  int64_t current_step = 0;  // 0-based; what a fault of attention is said of

  State(const RunConfig& c, const ResolvedRun& r, comm::Transport& transport)
      : config(c),
        resolved(r),
        train_data(batch_options(c, r, transport.rank() / r.cp_size)),
        valid_data(open_valid(c, r, transport.rank() / r.cp_size)),
        job(transport, r.cp_size),
        context(ring_options(c, r), transport, job.cp_members()),
        decoder(c.model, model::init_parameters(c.model, c.train.seed)),
        parameters(decoder.parameters().list()),
        flat(named(parameters)),
        adamw(c.optim.adamw, flat),
        layers(context, c.model.num_hidden_layers),
        fault(Fault::from_environment(transport.rank())) {}

  attention::AttentionPattern run_pattern() const {
    attention::AttentionPattern pattern;
    pattern.kind = config.attention.pattern;
    pattern.vertical_slash = config.attention.options;
    return pattern;
  }
  attention::AttentionPattern pattern_of_step(int64_t step) const {
    return step < config.attention.dense_steps ? dense_pattern() : run_pattern();
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

  SummedLoss forward(const data::Batch& batch, const AttendRequest& request, int64_t step) {
    at::Tensor hidden;
    try {
      hidden =
          decoder.forward(batch.ids, batch.positions, layers.attend(request), part_observer(step));
    } catch (const InvalidArgument& error) {
      // Configuration and tokens were checked before: values that are not finite are the training's fault.
      if (std::string_view(error.what()).find("finite") == std::string_view::npos) throw;
      throw ExternalError(
          concat("train_step ", current_step + 1, ": training has diverged: ", error.what()));
    }
    return chunked_loss(hidden.reshape({-1, hidden.size(-1)}), decoder.head_weight(),
                        batch.labels.reshape({-1}), config.train.loss_chunk);
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
    if (loss.sum.requires_grad()) torch::autograd::backward({loss.sum}, {});
    flat.collect_gradient();
    span("backward", "step", backward_us, step);
    return loss;
  }

  data::Batch valid_batch(int64_t b) const {
    // Fewer samples than asked for: the file is passed through again rather than scored less.
    return valid_data->batch(b, 0, context.layout(), context.cp_rank());
  }

  void write_example();
};

Trainer::Trainer(const RunConfig& config, const ResolvedRun& resolved, comm::Transport& transport)
    : state_(std::make_unique<State>(config, resolved, transport)) {}
Trainer::~Trainer() = default;

const std::vector<model::Parameter>& Trainer::parameters() const { return state_->parameters; }
int64_t Trainer::optimizer_steps() const { return state_->adamw.steps_taken(); }
const std::vector<std::vector<std::shared_ptr<const index::Index>>>& Trainer::last_indices() const {
  return state_->last_indices;
}

trace::StepMetrics Trainer::step(
    int64_t step, const std::vector<std::vector<std::shared_ptr<const index::Index>>>* replay) {
  State& s = *state_;
  const int64_t begin_us = trace::now_us();
  const int64_t bytes_before = s.context.bytes_sent() + s.job.bytes_sent();
  s.recording = s.config.trace.chrome && step + 1 >= s.config.trace.first_step &&
                step + 1 < s.config.trace.first_step + s.config.trace.steps;
  s.layers.begin(s.recording ? &s.recorder : nullptr, step + 1);
  s.current_step = step;
  s.flat.zero_gradient();
  s.last_indices.clear();

  AttendRequest request;
  request.pattern = s.pattern_of_step(step);
  const int64_t every = s.config.train.recall_every;
  request.measure_recall = every > 0 && step % every == 0 && replay == nullptr &&
                           request.pattern.kind != pattern::PatternKind::kDense;
  request.recall_seed = s.config.train.seed + static_cast<uint64_t>(step);
  double data_wait_s = 0;
  std::vector<double> totals(2, 0);  // sum of losses, valid tokens
  for (int64_t micro = 0; micro < s.resolved.accumulation; ++micro) {
    // A step of many micro-steps can take minutes. `stop` is given to all ranks or none.
    if (micro > 0 && s.stop != nullptr && s.job.any(s.stop->load())) {
      s.stop_agreed = s.step_dropped = true;
      return {};
    }
    if (replay != nullptr) request.replay = &replay->at(micro);
    const SummedLoss loss = s.micro_step(step, micro, request, data_wait_s);
    totals[0] += loss.sum.item<double>();
    totals[1] += static_cast<double>(loss.count);
    s.last_indices.push_back(s.layers.seen().indices);
  }

  const int64_t reduce_us = trace::now_us();
  if (s.fault.poisons(step + 1)) s.flat.gradient().fill_(std::nan(""));
  s.job.sum(totals);
  optim::all_reduce_buckets(s.flat.gradient(), s.job.gradients());
  s.span("reduce", "step", reduce_us, step);
  const int64_t update_us = trace::now_us();
  trace::StepMetrics m;
  const double valid_tokens = totals[1];
  m.loss = valid_tokens > 0 ? totals[0] / valid_tokens : 0;
  if (valid_tokens > 0) {
    s.flat.gradient().mul_(1 / valid_tokens);
  } else {
    s.warnings.push_back(
        concat("train_step ", step + 1, ": no token of the step has a label; loss 0, no gradient"));
  }
  m.grad_norm = optim::global_norm(s.flat.gradient());
  m.lr = optim::learning_rate(s.config.optim.schedule, step);
  const bool skip = s.job.any(!std::isfinite(m.grad_norm) || !std::isfinite(m.loss));
  if (skip) {
    ++s.skipped;
    ++s.skipped_in_a_row;
    s.warnings.push_back(concat("train_step ", step + 1,
                                ": skipped on all ranks, a gradient or the loss is not finite"));
  } else {
    optim::clip_by_norm(s.flat.gradient(), m.grad_norm, s.config.optim.clip_norm);
    s.adamw.step(m.lr);
    s.skipped_in_a_row = 0;
  }
  s.span("optimizer", "step", update_us, step);

  const AttentionSeen seen = s.layers.seen();
  const std::vector<StepWork>& work = s.layers.work();
  const auto gathered = s.job.gather(
      {data_wait_s, static_cast<double>(s.context.bytes_sent() + s.job.bytes_sent() - bytes_before),
       static_cast<double>(peak_memory_bytes()), static_cast<double>(work.size()),
       seen.mean_density(), static_cast<double>(seen.heads_dense),
       static_cast<double>(seen.caps_hit), s.stop != nullptr && s.stop->load() ? 1.0 : 0.0});
  bool same_events = true;
  double density = 0;
  size_t most_events = 0;  // groups hold different samples, and so may exchange columns or not
  for (size_t r = 0; r < gathered.size(); ++r) {
    const auto& g = gathered[r];
    m.data_wait_s = std::max(m.data_wait_s, g[0]);
    m.comm_bytes += static_cast<int64_t>(g[1]);
    m.peak_memory_bytes = std::max(m.peak_memory_bytes, static_cast<int64_t>(g[2]));
    const size_t first_of_group = r - r % static_cast<size_t>(s.resolved.cp_size);
    same_events = same_events && g[3] == gathered[first_of_group][3];
    most_events = std::max(most_events, static_cast<size_t>(g[3]));
    density += g[4] / static_cast<double>(gathered.size());
    if (r % s.resolved.cp_size == 0) {  // every rank of a context-parallel group has the same index
      m.heads_dense += static_cast<int64_t>(g[5]);
      m.caps_hit += static_cast<int64_t>(g[6]);
    }
    s.stop_agreed = s.stop_agreed || g[7] != 0;
  }
  MT_ASSERT(same_events, "ranks of one group ran different numbers of ring steps");
  m.attention_density = density;
  if (request.pattern.kind == pattern::PatternKind::kDense) {
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
  s.tokens_total += m.tokens;
  m.tokens_total = s.tokens_total;
  m.step_s = seconds(begin_us, trace::now_us());
  m.tokens_per_s = static_cast<double>(m.tokens) / m.step_s;
  m.tokens_per_s_per_gpu = m.tokens_per_s / s.job.size();
  m.skipped = s.skipped;
  s.span("train_step", "step", begin_us, step);
  return m;
}

Evaluation Trainer::evaluate(const attention::AttentionPattern& pattern, bool measure_recall) {
  State& s = *state_;
  MT_CHECK_ARG(s.valid_data != nullptr,
               "data.valid: expected held-out data for an evaluation, got none");
  const at::NoGradGuard no_grad;
  const bool dense = pattern.kind == pattern::PatternKind::kDense;
  s.layers.begin(nullptr, 0);
  AttendRequest request;
  request.pattern = pattern;
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
  e.pattern = dense ? "dense" : "vertical_slash";
  e.p = dense ? 1 : pattern.vertical_slash.p_slash;
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
  request.pattern = run_pattern();
  request.keep_layer = layer;
  forward(valid_data ? valid_batch(0) : train_data.batch(0, 0, context.layout(), context.cp_rank()),
          request, 0);
  const AttentionSeen seen = layers.seen();
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

TrainResult Trainer::run(const TrainObserver& observer, const std::atomic<bool>* stop) {
  State& s = *state_;
  const std::filesystem::path out = s.config.out;
  std::unique_ptr<trace::MetricsFile> metrics;
  if (s.job.rank() == 0) metrics = std::make_unique<trace::MetricsFile>(out / "metrics.jsonl");
  const auto warn = [&] {
    for (const std::string& text : s.warnings) {
      if (observer.warning) observer.warning(text);
    }
    s.warnings.clear();
  };

  if (s.config.train.preflight) {
    const at::NoGradGuard no_grad;
    Preflight preflight;
    const data::Batch batch = s.train_data.batch(0, 0, s.context.layout(), s.context.cp_rank());
    for (const bool dense : {true, false}) {
      s.layers.begin(nullptr, 0);
      AttendRequest request;
      request.pattern = dense ? dense_pattern() : s.run_pattern();
      request.measure_recall = !dense && request.pattern.kind != pattern::PatternKind::kDense;
      const SummedLoss loss = s.forward(batch, request, 0);
      std::vector<double> totals{loss.sum.item<double>(), static_cast<double>(loss.count)};
      s.job.sum(totals);
      const double mean = totals[1] > 0 ? totals[0] / totals[1] : 0;
      (dense ? preflight.loss_dense : preflight.loss_pattern) = mean;
      const AttentionSeen seen = s.layers.seen();
      preflight.density = seen.mean_density();
      if (request.measure_recall) preflight.recall_worst = seen.recall_worst;
    }
    if (observer.preflight) observer.preflight(preflight);
  }

  TrainResult result;
  s.stop = stop;
  const EvalSection& eval = s.config.eval;
  for (int64_t step = 0; step < s.resolved.steps && !s.stop_agreed; ++step) {
    trace::StepMetrics m = this->step(step);
    if (s.step_dropped) break;
    const bool last = step + 1 == s.resolved.steps;
    if (s.valid_data && eval.every > 0 && (step + 1) % eval.every == 0 && !last && !s.stop_agreed) {
      m.valid_loss_dense = evaluate(dense_pattern(), false).loss;
      m.valid_loss = s.config.attention.pattern == pattern::PatternKind::kDense
                         ? m.valid_loss_dense
                         : evaluate(s.run_pattern(), false).loss;
    }
    result.steps_done = step + 1;
    if (s.valid_data && last && !s.stop_agreed) {
      result.evaluations.push_back(evaluate(dense_pattern(), false));
      m.valid_loss_dense = m.valid_loss = result.evaluations.back().loss;
      if (s.config.attention.pattern != pattern::PatternKind::kDense) {
        result.evaluations.push_back(evaluate(s.run_pattern(), true));
        m.valid_loss = result.evaluations.back().loss;
        for (const double p : eval.also_p) {
          attention::AttentionPattern pattern = s.run_pattern();
          pattern.vertical_slash.p_vertical = pattern.vertical_slash.p_slash = p;
          result.evaluations.push_back(evaluate(pattern, true));
        }
      }
    }
    if (metrics) metrics->write(m);
    warn();
    if (observer.step) observer.step(m, s.resolved.steps);
    // Agreed: every rank skips the same steps.
    MT_CHECK_EXTERNAL(s.skipped_in_a_row < kMostSkipped && !(last && s.skipped == step + 1),
                      "train_step ", step + 1, ": training has diverged: ", s.skipped_in_a_row,
                      " steps in a row were skipped because a gradient or the loss is not finite");
  }
  result.stopped = s.stop_agreed && result.steps_done < s.resolved.steps;
  if (!result.stopped && s.config.trace.example_layer >= 0 &&
      s.config.attention.pattern != pattern::PatternKind::kDense) {
    s.write_example();
  }
  if (s.config.trace.chrome) {
    const auto texts = s.job.gather_text(s.recorder.serialize());
    if (s.job.rank() == 0) trace::write_chrome_trace(out / "trace.json", texts);
  }
  if (s.job.rank() == 0) write_summary(out / "summary.json", result, s.config, s.resolved);
  return result;
}

}  // namespace mtraining::train
