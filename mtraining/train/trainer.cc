#include "mtraining/train/trainer.h"

#include <cmath>
#include <filesystem>

#include "mtraining/base/check.h"
#include "mtraining/train/device.h"
#include "mtraining/train/run_files.h"
#include "mtraining/train/trainer_state.h"

namespace mtraining::train {

using pattern::PatternKind;

namespace {

/// After so many skipped steps in a row nothing will become finite again: weights do not change.
constexpr int64_t kMostSkipped = 10;

}  // namespace

Trainer::Trainer(const RunConfig& config, const ResolvedRun& resolved, comm::Transport& transport,
                 const std::filesystem::path& resume) {
  Fault::from_environment(transport.rank()).strike("start", 0);
  enter_device(resolved.device);
  state_ = std::make_unique<State>(config, resolved, transport, resume);
}
Trainer::~Trainer() = default;

const std::vector<model::Parameter>& Trainer::parameters() const { return state_->parameters; }
const std::vector<trace::Span>& Trainer::spans() const { return state_->recorder.spans(); }

void Trainer::keep_indices() { state_->keeps_indices = true; }
int64_t Trainer::optimizer_steps() const { return state_->adamw.steps_taken(); }
const std::vector<std::vector<std::shared_ptr<const index::Index>>>& Trainer::last_indices() const {
  return state_->last_indices;
}

trace::StepMetrics Trainer::step(
    int64_t step, const std::vector<std::vector<std::shared_ptr<const index::Index>>>* replay) {
  State& s = *state_;
  const TensorMemory::Scope scope(s.memory);
  s.memory.reset_peak();
  reset_peak_memory(s.resolved.device);
  StepUnderWay under_way{trace::now_us(), s.context.bytes_sent() + s.job.bytes_sent()};
  s.recording = s.config.trace.chrome && step + 1 >= s.config.trace.first_step &&
                step + 1 < s.config.trace.first_step + s.config.trace.steps;
  s.times.record(s.recording);
  s.times.begin("train_step", "step", step + 1);
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
  std::vector<double> totals(2, 0);  // sum of losses, valid tokens
  std::vector<at::Tensor>
      losses;  // of micro-steps, not yet in totals: to read one is to wait for a GPU
  const auto read_totals = [&] {
    for (const at::Tensor& loss : losses) totals[0] += loss.item<double>();
    losses.clear();
    return totals;
  };
  const int64_t first_micro = s.first_micro_step();
  if (first_micro > 0 && s.job.rank() == 0) totals = {s.position.kept_loss, s.position.kept_labels};
  for (int64_t micro = first_micro; micro < s.resolved.accumulation; ++micro) {
    try {
      if (micro > first_micro && s.stops_between_micro_steps(read_totals)) throw StepAbandoned();
      if (replay != nullptr) request.replay = &replay->at(micro);
      const SummedLoss loss = s.micro_step(step, micro, request, under_way.data_wait_s);
      losses.push_back(loss.sum.detach());
      totals[1] += static_cast<double>(loss.count);
    } catch (const StepAbandoned&) {
      // Buckets that are under way come home, on all ranks alike.
      if (s.in_backward) s.share->collect_gradient();
      s.in_backward = false;
      s.stop_agreed = s.step_dropped = true;
      s.position.kept_samples = 0;
      if (s.keeps_micro_steps()) s.keep_micro_steps(read_totals());
      return {};
    }
    s.whole_micro_steps = micro + 1;
    if (s.keeps_indices) s.last_indices.push_back(s.layers.seen().indices);
  }
  s.position.kept_samples = s.whole_micro_steps = 0;
  read_totals();

  s.times.begin("reduce", "step", step + 1);
  if (s.fault.poisons("gradient", step + 1)) s.share->gradient().fill_(std::nan(""));
  s.job.sum(totals);
  s.share->reduce_gradient();
  s.times.end("reduce");
  s.times.begin("optimizer", "step", step + 1);
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
  if (s.fault.poisons("norm", step + 1)) m.grad_norm = std::nan("");
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
  s.times.end("optimizer");
  const double attention_pairs = s.gather_metrics(under_way, request, m);
  m.train_step = step + 1;
  m.tokens = s.config.train.global_batch_size * s.config.train.seq_len;
  s.position.steps_done = step + 1;
  s.position.tokens_total += m.tokens;
  s.position.optimizer_steps = s.adamw.steps_taken();
  m.tokens_total = s.position.tokens_total;
  m.step_s = static_cast<double>(trace::now_us() - under_way.begin_us) * 1e-6;
  // Of a step that goes on after a stop, what was done here.
  const double tokens = static_cast<double>(m.tokens) *
                        static_cast<double>(s.resolved.accumulation - first_micro) /
                        static_cast<double>(s.resolved.accumulation);
  m.tokens_per_s = tokens / m.step_s;
  m.tokens_per_s_per_gpu = m.tokens_per_s / s.job.size();
  if (s.config.train.peak_flops_per_s) {
    // Forward 4 D a pair, backward 2.5 times that; recomputation is no work of the model.
    const double flops = s.decoder.dense_flops_per_token() * tokens +
                         attention_pairs * 4 * static_cast<double>(s.config.model.head_dim) * 3.5;
    m.mfu = flops / (m.step_s * *s.config.train.peak_flops_per_s * s.job.size());
  }
  m.skipped = s.position.skipped;
  s.times.end("train_step");
  s.times.collect(s.recorder);
  return m;
}

const LayerPatterns& Trainer::patterns() const { return state_->patterns; }

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
      // Before the evaluations: whatever ends them must not take the training along.
      if (s.valid_data && !s.stop_agreed) s.save();
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
    warn();
  }
  if (s.config.trace.chrome) {
    const auto texts = s.job.gather_text(s.recorder.serialize());
    // A run that goes on beyond those steps leaves the file that it has.
    const bool none = s.recorder.spans().empty();
    if (s.job.rank() == 0 && !(none && std::filesystem::exists(out / "trace.json")))
      trace::write_chrome_trace(out / "trace.json", texts);
  }
  if (s.job.rank() == 0) write_summary(out / "summary.json", result, s.config, s.resolved);
  if (!result.stopped) {  // last: it says that nothing is left to do
    s.position.evaluated = true;
    s.save();
  }
  return result;
}

}  // namespace mtraining::train
