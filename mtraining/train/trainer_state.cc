#include "mtraining/train/trainer_state.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>

#include <string_view>

#include "mtraining/base/check.h"
#include "mtraining/base/error_kinds.h"
#include "mtraining/checkpoint/weight_folder.h"
#include "mtraining/checkpoint/weights.h"
#include "mtraining/train/device.h"

namespace mtraining::train {

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
                                     {.grad_dtype = config.optim.grad_dtype,
                                      .offload = config.parallel.offload_optimizer,
                                      .host_threads = config.parallel.optimizer_threads});
}

/// Weights to begin with. Those of files, of a checkpoint too, come later: they go to the masters first.
model::DecoderParameters first_parameters(const RunConfig& config, at::Device device,
                                          bool resumed) {
  return resumed || config.init_from
             ? model::empty_parameters(config.model, device)
             : model::init_parameters(config.model, config.train.seed, device);
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

Trainer::State::State(const RunConfig& c, const ResolvedRun& r, comm::Transport& transport,
                      const std::filesystem::path& resume)
    : memory(r.device.type()),
      config(c),
      resolved(r),
      train_data(batch_options(c, r, transport.rank() / r.cp_size)),
      valid_data(open_valid(c, r, transport.rank() / r.cp_size)),
      patterns(layer_patterns(c)),
      dense_patterns(dense_layers(c)),
      job(transport, r.cp_size),
      context(ring_options(c, r), transport, job.cp_members()),
      decoder(c.model, first_parameters(c, r.device, !resume.empty()), c.train.mlp_tile),
      parameters(decoder.parameters().list()),
      share(make_share(c, parameters, job.gradients())),
      adamw(c.optim.adamw, *share),
      layers(context, c.model.num_hidden_layers),
      host_layers(r.device, c.train.offload_layers),
      fault(Fault::from_environment(transport.rank())),
      run_state(config, job, parameters, *share, adamw),
      stop_poll(transport),
      times(r.device) {
  if (!resume.empty()) {
    position = run_state.load(resume);
  } else if (config.init_from) {
    run_state.begin_from(checkpoint::WeightFolder(*config.init_from));
  }
  saved_steps = position.steps_done;
  layers.set_boundary([this] { boundary(); });
  construction.reset();
  release_cached_memory(resolved.device);  // temporaries of the first weights
}

void Trainer::State::boundary() {
  const StopLevel level = stop_poll.boundary();
  if (level == StopLevel::kNone) return;
  // A micro-step that is dropped in its backward has spoilt the gradients of those before it.
  if (in_backward && keeps_micro_steps() && level != StopLevel::kUrgent) return;
  if (in_backward) whole_micro_steps = 0;
  throw StepAbandoned();
}

bool Trainer::State::save_is_due() const {
  const double minutes = config.checkpoint.save_every_minutes;
  return minutes > 0 && job.rank() == 0 &&
         std::chrono::duration<double>(std::chrono::steady_clock::now() - saved_at).count() >=
             60 * minutes;
}

void Trainer::State::save() {
  times.begin("checkpoint", "step", position.steps_done, -1, PartTimes::Clock::kHost);
  run_state.save(position, [this] { fault.strike("checkpoint", position.steps_done); });
  saved_at = std::chrono::steady_clock::now();
  saved_steps = position.steps_done;
  save_agreed = false;
  if (on_saved) on_saved(position.steps_done);
  times.end("checkpoint");
  times.collect(recorder);
}

void Trainer::State::keep_micro_steps(std::vector<double> totals) {
  job.sum(totals);
  position.kept_samples = whole_micro_steps * config.train.micro_batch_size * resolved.dp_size;
  position.kept_loss = totals[0];
  position.kept_labels = totals[1];
}

model::PartObserver Trainer::State::part_observer(int64_t step) {
  if (!recording) return {};
  return [this, step](std::string_view part, int64_t layer, bool begins) {
    begins ? times.begin(part, "model", step + 1, layer) : times.end(part);
  };
}

model::RunLayer Trainer::State::run_layer(const AttendRequest& request, int64_t step) {
  const Recompute mode = config.train.recompute;
  if (mode == Recompute::kNone || !at::GradMode::is_enabled())
    return decoder.layers_with(layers.attend(request), part_observer(step));
  AttendRequest sending = request;
  sending.chosen = [this] { host_layers.send(); };
  return recomputed_layers(decoder, mode, layers.attend_twice(sending), part_observer(step),
                           &host_layers, config.train.recompute_span);
}

SummedLoss Trainer::State::forward(const data::Batch& batch, AttendRequest request, int64_t step) {
  check_same_samples(batch);
  request.document_starts = batch.document_starts;
  at::Tensor hidden;
  try {
    hidden = decoder.forward(to_device(batch.ids, resolved.device),
                             to_device(batch.rope_positions(), resolved.device),
                             run_layer(request, step), part_observer(step));
  } catch (const NotFinite& error) {
    // Configuration and tokens were checked before: this is the training's fault.
    throw ExternalError(
        concat("train_step ", current_step + 1, ": training has diverged: ", error.what()));
  }
  host_layers.send();  // a last layer that no other follows
  times.begin("head_and_loss", "model", step + 1);
  SummedLoss loss = chunked_loss(hidden.reshape({-1, hidden.size(-1)}), decoder.head_weight(),
                                 batch.labels.reshape({-1}), config.train.loss_chunk);
  times.end("head_and_loss");
  return loss;
}

void Trainer::State::check_same_samples(const data::Batch& batch) {
  if (job.size() == 1) return;
  const auto all = job.gather(
      {static_cast<double>(batch.digest >> 32), static_cast<double>(batch.digest & 0xffffffffu)});
  for (int r = 0; r < job.size(); ++r) {
    const int first = r - r % resolved.cp_size;
    MT_CHECK_ARG(all[r] == all[first], "train_step ", current_step + 1, ": ranks ", first, " and ",
                 r,
                 " of one context-parallel group read different samples; expected the same token "
                 "files on every node");
  }
}

SummedLoss Trainer::State::micro_step(int64_t step, int64_t micro, const AttendRequest& request,
                                      double& data_wait_s) {
  const int64_t begin_us = trace::now_us();
  times.begin("batch", "step", step + 1, -1, PartTimes::Clock::kHost);
  fault.strike("loader", step + 1);
  const data::Batch batch = train_data.batch(step, micro, context.layout(), context.cp_rank());
  data_wait_s += seconds(begin_us, trace::now_us());
  times.end("batch");
  times.begin("forward", "step", step + 1);
  fault.strike("forward", step + 1);
  host_layers.clear();
  SummedLoss loss = forward(batch, request, step);
  times.end("forward");
  times.begin("backward", "step", step + 1);
  if (fault.is_at("backward", step + 1)) {
    loss.sum.register_hook([this, step](const at::Tensor&) { fault.strike("backward", step + 1); });
  }
  in_backward = true;
  if (loss.sum.requires_grad()) torch::autograd::backward({loss.sum}, {});
  in_backward = false;
  share->collect_gradient();
  times.end("backward");
  return loss;
}

int64_t Trainer::State::first_micro_step() {
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

bool Trainer::State::stops_between_micro_steps(const std::function<std::vector<double>()>& totals) {
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
    keep_micro_steps(totals());
    save();
  }
  return stops;
}

data::Batch Trainer::State::valid_batch(int64_t b) const {
  // Fewer samples than asked for: the file is passed through again rather than scored less.
  return valid_data->batch(b, 0, context.layout(), context.cp_rank());
}

}  // namespace mtraining::train
