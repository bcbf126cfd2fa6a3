#include "mtraining/train/run_state.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "mtraining/base/check.h"
#include "mtraining/base/json.h"
#include "mtraining/checkpoint/agreement.h"
#include "mtraining/checkpoint/disk.h"
#include "mtraining/checkpoint/publication.h"
#include "mtraining/checkpoint/training_state.h"
#include "mtraining/checkpoint/weight_folder.h"
#include "mtraining/checkpoint/weights.h"
#include "mtraining/optim/flat_parameters.h"

namespace mtraining::train {
namespace {

namespace fs = std::filesystem;
using checkpoint::StatePiece;
using checkpoint::StoredType;
using checkpoint::TensorSpec;

constexpr const char* kStateFolder = "training_state";
constexpr const char* kMaster = "/master";
constexpr const char* kFirstMoment = "/first_moment";
constexpr const char* kSecondMoment = "/second_moment";
constexpr const char* kGradient = "/gradient";
constexpr int64_t kChunk = int64_t{8} << 20;  // elements of one reduction

/// Exact, and written also where it is not finite, which JSON's numbers are not.
std::string exact(double value) {
  char text[64];
  std::snprintf(text, sizeof(text), "%a", value);
  return text;
}

CheckpointInfo info_of(const checkpoint::Progress& progress, const std::string& where) {
  CheckpointInfo info;
  RunPosition& p = info.position;
  p.steps_done = progress.train_step;
  p.tokens_total = progress.tokens_total;
  p.skipped = progress.skipped_steps;
  try {
    const nlohmann::json notes = parse_json(progress.notes, where);
    p.optimizer_steps = notes.at("optimizer_steps").get<int64_t>();
    p.skipped_in_a_row = notes.at("skipped_in_a_row").get<int64_t>();
    p.evaluated = notes.at("evaluated").get<bool>();
    p.kept_samples = notes.at("kept_samples").get<int64_t>();
    p.kept_loss = std::strtod(notes.at("kept_loss").get<std::string>().c_str(), nullptr);
    p.kept_labels = std::strtod(notes.at("kept_labels").get<std::string>().c_str(), nullptr);
    info.config = notes.at("config").get<std::string>();
  } catch (const nlohmann::json::exception&) {
    throw InvalidArgument(concat(
        where, ": expected the notes that training writes; a key is missing or of another type"));
  }
  return info;
}

fs::path state_folder(const fs::path& checkpoint) {
  const std::string reason = checkpoint::incomplete_reason(checkpoint);
  MT_CHECK_ARG(reason.empty(), reason);
  const fs::path folder = checkpoint / kStateFolder;
  std::error_code ignored;
  MT_CHECK_ARG(fs::is_directory(folder, ignored), checkpoint.string(), ": expected a folder ",
               kStateFolder, " in it, got none");
  return folder;
}

}  // namespace

std::string checkpoint_notes(const RunPosition& p, const std::string& config) {
  const nlohmann::json notes = {{"optimizer_steps", p.optimizer_steps},
                                {"skipped_in_a_row", p.skipped_in_a_row},
                                {"evaluated", p.evaluated},
                                {"kept_samples", p.kept_samples},
                                {"kept_loss", exact(p.kept_loss)},
                                {"kept_labels", exact(p.kept_labels)},
                                {"config", config}};
  return notes.dump();
}

CheckpointInfo read_checkpoint_info(const fs::path& folder) {
  const checkpoint::TrainingState state(state_folder(folder));
  return info_of(state.progress(), folder.string());
}

RunState::RunState(const RunConfig& config, Job& job,
                   const std::vector<model::Parameter>& parameters, optim::ParameterShare& share,
                   optim::AdamW& adamw)
    : config_(config),
      job_(job),
      parameters_(parameters),
      share_(share),
      adamw_(adamw),
      hf_(config.init_from ? model::read_hf_config(*config.init_from)
                           : model::hf_config(config.model, config.train.seq_len)) {
  hf_.rope = config.model.rope;
  if (config.init_from && job.rank() == 0)
    companions_ = checkpoint::read_companion_files(*config.init_from);
  MT_ASSERT(parameters.size() == share.segments().size(), "parameters and segments differ");
}

std::vector<RunState::Part> RunState::parts_of(const Piece& piece) const {
  std::vector<Part> parts;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const optim::Segment& s = share_.segments()[i];
    const int64_t begin = std::max(piece.begin, s.begin);
    const int64_t end = std::min(piece.end, s.begin + s.size);
    if (begin < end)
      parts.push_back({&parameters_[i], begin - s.begin, end - s.begin, begin - piece.begin});
  }
  return parts;
}

std::vector<RunState::Piece> RunState::pieces_to_write(bool with_gradient) {
  const int64_t size = share_.size();
  const int64_t even_begin = size * job_.rank() / job_.size();
  const int64_t even_end = size * (job_.rank() + 1) / job_.size();
  std::vector<Piece> pieces;
  for (const optim::OptimizerShard& shard : adamw_.shards()) {
    const int64_t begin = shard.replicated ? even_begin : shard.begin;
    const int64_t end = shard.replicated ? even_end : shard.end;
    const auto add = [&](const char* suffix, const at::Tensor& values) {
      pieces.push_back({begin, end, suffix, values.narrow(0, begin - shard.begin, end - begin)});
    };
    add(kMaster, shard.master);
    add(kFirstMoment, shard.first_moment);
    add(kSecondMoment, shard.second_moment);
  }
  if (!with_gradient) return pieces;
  if (share_.is_sharded()) {
    share_.reduce_gradient();  // buckets of the last backward may be under way
    for (const optim::OwnedRange& owned : share_.owned())
      pieces.push_back({owned.begin, owned.end, kGradient,
                        share_.gradient().narrow(0, owned.offset, owned.end - owned.begin)});
    return pieces;
  }
  at::Tensor kept = at::empty({even_end - even_begin}, share_.gradient().options());
  for (int64_t begin = 0; begin < size; begin += kChunk) {
    const int64_t end = std::min(begin + kChunk, size);
    at::Tensor chunk = share_.gradient().slice(0, begin, end).clone();
    optim::all_reduce_buckets(chunk, job_.gradients());
    const int64_t from = std::max(begin, even_begin), to = std::min(end, even_end);
    if (from < to)
      kept.slice(0, from - even_begin, to - even_begin)
          .copy_(chunk.slice(0, from - begin, to - begin));
  }
  pieces.push_back({even_begin, even_end, kGradient, kept});
  return pieces;
}

void RunState::read(checkpoint::TrainingState& state, const Piece& piece) const {
  for (const Part& part : parts_of(piece)) {
    const std::string name = part.parameter->name + piece.suffix;
    const TensorSpec wanted{name, StoredType::kF32, part.parameter->value.sizes().vec()};
    const TensorSpec* stored = state.find(name);
    MT_CHECK_ARG(stored != nullptr && stored->type == wanted.type && stored->shape == wanted.shape,
                 state.path(), ": expected a tensor ", in_quotes(name), ' ', to_string(wanted),
                 ", got ", stored != nullptr ? to_string(*stored) : "none");
    const int64_t count = part.end - part.begin;
    at::Tensor values = at::empty({count}, at::kFloat);
    state.read(name, part.begin, part.end,
               {static_cast<std::byte*>(values.data_ptr()), static_cast<size_t>(values.nbytes())});
    piece.values.narrow(0, part.offset, count).copy_(values);
  }
}

fs::path RunState::save(const RunPosition& position, const std::function<void()>& between) {
  const bool with_gradient = position.kept_samples > 0;
  // Reductions come before the first file: a rank whose disk is full would leave the others waiting in them.
  const std::vector<Piece> held = pieces_to_write(with_gradient);
  std::vector<StatePiece> pieces;
  for (const Piece& piece : held) {
    for (const Part& part : parts_of(piece)) {
      const model::Parameter& p = *part.parameter;
      pieces.push_back(
          {{p.name + piece.suffix, StoredType::kF32, p.value.sizes().vec()}, part.begin, part.end});
    }
  }
  checkpoint::Progress progress;
  progress.train_step = position.steps_done;
  progress.micro_step =
      position.kept_samples / (config_.train.micro_batch_size * (job_.size() / job_.cp_size()));
  progress.sample_position =
      position.steps_done * config_.train.global_batch_size + position.kept_samples;
  progress.tokens_total = position.tokens_total;
  progress.skipped_steps = position.skipped;
  progress.seed = config_.train.seed;
  progress.notes = checkpoint_notes(position, config_.text);

  checkpoint::PublicationOptions options;
  options.root = fs::path(config_.out) / "checkpoints";
  options.train_step = position.steps_done;
  options.rank = job_.rank();
  options.keep = static_cast<int>(config_.checkpoint.keep);
  const auto write = [&](const fs::path& folder) {
    checkpoint::make_folder(folder / kStateFolder, true);
    checkpoint::TrainingStateWriter writer(folder / kStateFolder, job_.rank(), job_.size(), pieces,
                                           progress);
    size_t next = 0;
    for (const Piece& piece : held) {
      for (const Part& part : parts_of(piece)) {
        const at::Tensor values = piece.values.narrow(0, part.offset, part.end - part.begin)
                                      .to(at::kCPU, at::kFloat)
                                      .contiguous();
        writer.write(next++, {static_cast<const std::byte*>(values.data_ptr()),
                              static_cast<size_t>(values.nbytes())});
      }
    }
    writer.finish();
    if (between) between();
    if (job_.rank() != 0) return;
    checkpoint::save_model_folder(folder, hf_, config_.train.seq_len, parameters_,
                                  config_.model.dtype, companions_);
  };
  const auto verify = [&](const fs::path& folder) {
    const checkpoint::TrainingState written(folder / kStateFolder);
    const size_t expected = parameters_.size() * (with_gradient ? 4 : 3);
    MT_ASSERT(written.tensors().size() == expected, "training state: expected ", expected,
              " tensors, got ", written.tensors().size());
  };
  return checkpoint::publish(options, write, verify, checkpoint::agree_over(job_.metrics()));
}

void RunState::begin_from(const checkpoint::WeightFolder& folder) {
  checkpoint::check_weights(folder, parameters_, config_.model.tie_word_embeddings);
  for (const optim::OptimizerShard& shard : adamw_.shards()) {
    for (const Part& part : parts_of({shard.begin, shard.end, kMaster, shard.master})) {
      const int64_t count = part.end - part.begin;
      const at::Tensor weight = checkpoint::mapped_weight(folder, part.parameter->name);
      shard.master.narrow(0, part.offset, count)
          .copy_(weight.reshape({-1}).narrow(0, part.begin, count));
      folder.release(part.parameter->name);
    }
  }
  adamw_.restored(0);
}

RunPosition RunState::load(const fs::path& folder) {
  checkpoint::TrainingState state(state_folder(folder));
  const RunPosition position = info_of(state.progress(), folder.string()).position;
  const auto all = job_.gather(
      {static_cast<double>(position.steps_done), static_cast<double>(position.kept_samples)});
  for (int rank = 1; rank < job_.size(); ++rank) {
    MT_CHECK_EXTERNAL(all[rank] == all[0], folder.string(), ": rank ", rank,
                      " sees another checkpoint (train_step ", all[rank][0],
                      ") than rank 0 (train_step ", all[0][0],
                      "); expected one file system on all nodes");
  }
  for (const optim::OptimizerShard& shard : adamw_.shards()) {
    read(state, {shard.begin, shard.end, kMaster, shard.master});
    read(state, {shard.begin, shard.end, kFirstMoment, shard.first_moment});
    read(state, {shard.begin, shard.end, kSecondMoment, shard.second_moment});
  }
  adamw_.restored(position.optimizer_steps);
  share_.zero_gradient();
  if (position.kept_samples == 0) return position;
  if (share_.is_sharded()) {
    for (const optim::OwnedRange& owned : share_.owned())
      read(state, {owned.begin, owned.end, kGradient,
                   share_.gradient().narrow(0, owned.offset, owned.end - owned.begin)});
  } else {
    // Each element on one rank: the step's reduction adds all ranks' gradients.
    const int64_t begin = share_.size() * job_.rank() / job_.size();
    const int64_t end = share_.size() * (job_.rank() + 1) / job_.size();
    read(state, {begin, end, kGradient, share_.gradient().narrow(0, begin, end - begin)});
  }
  return position;
}

}  // namespace mtraining::train
