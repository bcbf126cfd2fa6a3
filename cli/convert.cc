#include "cli/convert.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <filesystem>
#include <functional>
#include <iostream>
#include <optional>
#include <string>
#include <vector>

#include "cli/config_file.h"
#include "cli/parse_options.h"
#include "mtraining/base/check.h"
#include "mtraining/checkpoint/disk.h"
#include "mtraining/checkpoint/publication.h"
#include "mtraining/checkpoint/training_state.h"
#include "mtraining/checkpoint/weight_folder.h"
#include "mtraining/checkpoint/weights.h"
#include "mtraining/model/hf_config.h"
#include "mtraining/train/run_state.h"

namespace mtraining::cli {
namespace {

namespace fs = std::filesystem;
using checkpoint::StoredType;
using checkpoint::TensorSpec;

constexpr const char* kFooter = R"(
FROM is a checkpoint, a run's folder (its last checkpoint) or a Hugging Face folder; TO must not exist. Without --to a checkpoint
becomes a Hugging Face folder, and with --ranks a checkpoint of so many ranks. Weights come from the float32 masters where FROM
has a training state. A state that begins at train_step 0 needs --config, the run that will go on from it.

examples:
  mtraining convert runs/one models/one --dtype bf16
  mtraining convert runs/one/checkpoints/step-00000100 resharded --ranks 8
  mtraining convert models/base start --to state --config recipes/one.toml
  mtraining train --config recipes/one.toml --resume start
)";

constexpr const char* kState = "training_state";
constexpr const char* kMaster = "/master";
constexpr const char* kMoments[] = {"/first_moment", "/second_moment"};
constexpr int64_t kChunk = int64_t{4} << 20;  ///< elements held at a time

struct Options {
  std::string from, to, target, dtype, config;
  int ranks = 0;
};

/// What is written, tensor by tensor and range by range.
class Source {
 public:
  virtual ~Source() = default;
  /// Parameters with their shapes; the type is the one that they are stored in.
  virtual const std::vector<TensorSpec>& parameters() const = 0;
  /// Elements [begin, end) of a parameter, in the stored type.
  virtual at::Tensor read(const TensorSpec& parameter, int64_t begin, int64_t end) = 0;
};

at::Tensor bytes_as(StoredType type, int64_t count) {
  return at::empty({count}, at::TensorOptions(checkpoint::scalar_type_of(type)));
}
std::span<std::byte> bytes_of(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.data_ptr()), static_cast<size_t>(tensor.nbytes())};
}

class Masters : public Source {
 public:
  explicit Masters(checkpoint::TrainingState& state) : state_(state) {
    const std::string_view suffix = kMaster;
    for (TensorSpec spec : state.tensors()) {
      if (!spec.name.ends_with(suffix)) continue;
      spec.name.resize(spec.name.size() - suffix.size());
      parameters_.push_back(spec);
    }
    MT_CHECK_ARG(!parameters_.empty(), "training state: expected tensors named .. ", kMaster,
                 ", got none");
  }
  const std::vector<TensorSpec>& parameters() const override { return parameters_; }
  at::Tensor read(const TensorSpec& parameter, int64_t begin, int64_t end) override {
    const at::Tensor values = bytes_as(parameter.type, end - begin);
    state_.read(parameter.name + kMaster, begin, end, bytes_of(values));
    return values;
  }

 private:
  checkpoint::TrainingState& state_;
  std::vector<TensorSpec> parameters_;
};

class Weights : public Source {
 public:
  Weights(const fs::path& folder, bool tied) : folder_(folder) {
    for (const std::string& name : folder_.names()) {
      // What follows from others is no parameter.
      if (name.ends_with("rotary_emb.inv_freq") || (tied && name == "lm_head.weight")) continue;
      parameters_.push_back(*folder_.find(name));
      const at::ScalarType type = checkpoint::scalar_type_of(parameters_.back().type);
      MT_CHECK_ARG(at::isFloatingType(type), folder_.file_of(name), ": ", name,
                   ": expected a float type, got ", to_string(parameters_.back()));
    }
  }
  const std::vector<TensorSpec>& parameters() const override { return parameters_; }
  at::Tensor read(const TensorSpec& parameter, int64_t begin, int64_t end) override {
    const at::Tensor values = bytes_as(parameter.type, end - begin);
    const std::span<const std::byte> data = folder_.data(parameter.name);
    const int64_t size = checkpoint::bytes_of(parameter.type);
    std::memcpy(values.data_ptr(), data.data() + begin * size,
                static_cast<size_t>((end - begin) * size));
    return values;
  }

 private:
  checkpoint::WeightFolder folder_;
  std::vector<TensorSpec> parameters_;
};

/// Calls `take` for each range of at most kChunk elements of [begin, end).
void for_chunks(int64_t begin, int64_t end, const std::function<void(int64_t, int64_t)>& take) {
  for (; begin < end; begin += kChunk) take(begin, std::min(end, begin + kChunk));
}

void write_weights(const fs::path& folder, Source& source, StoredType type) {
  std::vector<TensorSpec> specs = source.parameters();
  for (TensorSpec& spec : specs) spec.type = type;
  checkpoint::WeightFolderWriter writer(folder, specs);
  for (const TensorSpec& parameter : source.parameters()) {
    for_chunks(0, checkpoint::num_elements(parameter), [&](int64_t begin, int64_t end) {
      const at::Tensor values =
          source.read(parameter, begin, end).to(checkpoint::scalar_type_of(type)).contiguous();
      writer.write(parameter.name, bytes_of(values));
    });
  }
  writer.finish();
}

/// Ranges of all tensors, one behind the other, cut evenly over the ranks.
std::vector<std::vector<checkpoint::StatePiece>> even_pieces(const std::vector<TensorSpec>& tensors,
                                                             int ranks) {
  int64_t total = 0, place = 0;
  for (const TensorSpec& tensor : tensors) total += checkpoint::num_elements(tensor);
  std::vector<std::vector<checkpoint::StatePiece>> pieces(static_cast<size_t>(ranks));
  for (const TensorSpec& tensor : tensors) {
    const int64_t size = checkpoint::num_elements(tensor);
    for (int rank = 0; rank < ranks; ++rank) {
      const int64_t begin =
          std::max(place, total / ranks * rank + std::min<int64_t>(rank, total % ranks));
      const int64_t end = std::min(
          place + size, total / ranks * (rank + 1) + std::min<int64_t>(rank + 1, total % ranks));
      if (begin < end)
        pieces[static_cast<size_t>(rank)].push_back({tensor, begin - place, end - place});
    }
    place += size;
  }
  return pieces;
}

using ReadRange = std::function<at::Tensor(const TensorSpec&, int64_t begin, int64_t end)>;

void write_state(const fs::path& folder, const std::vector<TensorSpec>& tensors, int ranks,
                 const checkpoint::Progress& progress, const ReadRange& read) {
  checkpoint::make_folder(folder);
  const auto pieces = even_pieces(tensors, ranks);
  for (int rank = 0; rank < ranks; ++rank) {
    const auto& own = pieces[static_cast<size_t>(rank)];
    checkpoint::TrainingStateWriter writer(folder, rank, ranks, own, progress);
    for (size_t i = 0; i < own.size(); ++i) {
      for_chunks(own[i].begin, own[i].end, [&](int64_t begin, int64_t end) {
        const at::Tensor values = read(own[i].tensor, begin, end).contiguous();
        writer.write(i, bytes_of(values));
      });
    }
    writer.finish();
  }
}

void write_config(const fs::path& folder, model::HfConfig config, StoredType type) {
  config.dtype = type == StoredType::kF32    ? "float32"
                 : type == StoredType::kBF16 ? "bfloat16"
                                             : "float16";
  checkpoint::write_text_file(folder / "config.json",
                              model::to_json(config, config.max_position_embeddings));
}

/// The folder appears under its name whole, or not at all.
void publish_as(const fs::path& to, int64_t train_step,
                const std::function<void(const fs::path&)>& write) {
  const fs::path target = fs::absolute(to).lexically_normal();
  const fs::path parent = target.parent_path();
  std::error_code error;
  fs::create_directories(parent, error);
  MT_CHECK_ARG(!error, parent.string(), ": cannot be made: ", error.message());
  const fs::path staging = parent / (".incomplete-" + target.filename().string());
  checkpoint::remove_tree(staging);
  std::exception_ptr mistake;  // publish() makes every error one of the disk
  try {
    const fs::path published = checkpoint::publish(
        {.root = staging, .train_step = train_step, .rank = 0, .keep = 0},
        [&](const fs::path& folder) {
          try {
            write(folder);
          } catch (const InvalidArgument&) {
            mistake = std::current_exception();
            throw;
          }
        },
        [](const fs::path& folder) {
          if (fs::exists(folder / kState)) checkpoint::TrainingState whole(folder / kState);
          checkpoint::WeightFolder weights(folder);
        },
        checkpoint::agree_alone);
    checkpoint::rename_path(published, target);
    checkpoint::sync_folder(parent);
    checkpoint::remove_tree(staging);
  } catch (...) {
    fs::remove_all(staging, error);
    if (mistake) std::rethrow_exception(mistake);
    throw;
  }
}

StoredType parse_dtype(const std::string& text) {
  if (text == "float32") return StoredType::kF32;
  if (text == "bf16" || text == "bfloat16") return StoredType::kBF16;
  if (text == "fp16" || text == "float16") return StoredType::kF16;
  throw InvalidArgument(concat("--dtype: expected float32, bf16 or fp16, got '", text, "'"));
}

/// --dtype, or what config.json says, or what is stored.
StoredType weight_type(const Options& options, const model::HfConfig& config,
                       const std::vector<TensorSpec>& stored) {
  if (!options.dtype.empty()) return parse_dtype(options.dtype);
  if (!config.dtype.empty()) return parse_dtype(config.dtype);
  return stored.front().type;
}

void convert(const Options& options, const fs::path& from) {
  const model::HfConfig config = model::read_hf_config(from);
  const bool has_state = fs::exists(from / kState);
  if (has_state || fs::exists(from / "complete.json")) {
    const std::string reason = checkpoint::incomplete_reason(from);
    MT_CHECK_ARG(reason.empty(), reason);
  }
  const bool state_wanted = options.target.empty() ? options.ranks > 0 : options.target == "state";
  MT_CHECK_ARG(state_wanted || options.ranks == 0,
               "--ranks: expected it with --to state, got it with --to hf");
  MT_CHECK_ARG(!(state_wanted && !has_state && options.config.empty()), from.string(),
               " has no training state: expected --config FILE, the run that a fresh one is for");
  MT_CHECK_ARG(options.config.empty() || (state_wanted && !has_state),
               "--config: expected it for a fresh training state alone");

  std::optional<checkpoint::TrainingState> state;
  if (has_state) state.emplace(from / kState);
  std::unique_ptr<Source> source;
  if (state) {
    source = std::make_unique<Masters>(*state);
  } else {
    source = std::make_unique<Weights>(from, config.tie_word_embeddings);
  }
  const StoredType type = weight_type(options, config, source->parameters());
  checkpoint::Progress progress;
  if (state) {
    progress = state->progress();
  } else if (state_wanted) {
    const train::RunConfig run = load_config(options.config, {}).config;
    progress.seed = run.train.seed;
    progress.notes = train::checkpoint_notes({}, to_toml(run));
  }
  const int ranks = options.ranks > 0 ? options.ranks : state ? state->world_size() : 1;

  const checkpoint::CompanionFiles companions = checkpoint::read_companion_files(from);
  publish_as(options.to, progress.train_step, [&](const fs::path& folder) {
    write_weights(folder, *source, type);
    write_config(folder, config, type);
    checkpoint::write_companion_files(companions, folder);
    if (!state_wanted) return;
    if (state) {
      write_state(folder / kState, state->tensors(), ranks, progress,
                  [&](const TensorSpec& tensor, int64_t begin, int64_t end) {
                    const at::Tensor values = bytes_as(tensor.type, end - begin);
                    state->read(tensor.name, begin, end, bytes_of(values));
                    return values;
                  });
      return;
    }
    std::vector<TensorSpec> tensors;
    for (TensorSpec tensor : source->parameters()) {
      const std::string name = tensor.name;
      tensor.type = StoredType::kF32;
      for (const char* suffix : {kMaster, kMoments[0], kMoments[1]}) {
        tensor.name = name + suffix;
        tensors.push_back(tensor);
      }
    }
    write_state(folder / kState, tensors, ranks, progress,
                [&](const TensorSpec& tensor, int64_t begin, int64_t end) {
                  if (!tensor.name.ends_with(kMaster)) return at::zeros({end - begin}, at::kFloat);
                  const std::string name =
                      tensor.name.substr(0, tensor.name.size() - std::strlen(kMaster));
                  const auto& all = source->parameters();
                  const auto found = std::find_if(
                      all.begin(), all.end(), [&](const TensorSpec& p) { return p.name == name; });
                  return source->read(*found, begin, end).to(at::kFloat);
                });
  });
  std::cout << options.to << ": " << (state_wanted ? "a checkpoint" : "a Hugging Face folder");
  if (state_wanted)
    std::cout << " of train_step " << progress.train_step << " for " << ranks << " ranks";
  std::cout << ", weights " << checkpoint::to_string(type) << "\n";
}

}  // namespace

fs::path find_weights(const std::string& from) {
  const fs::path path = from;
  std::error_code error;
  MT_CHECK_ARG(fs::is_directory(path, error), from, ": expected a folder, got ",
               fs::exists(path, error) ? "a file" : "none of that name");
  for (const fs::path& root : {path, path / "checkpoints"})
    if (const auto newest = checkpoint::find_newest(root)) return newest->folder;
  MT_CHECK_ARG(fs::exists(path / "config.json"), from,
               ": expected a checkpoint, a run with one, or a Hugging Face folder, got neither");
  return path;
}

int run_convert(int argc, char** argv) {
  CLI::App app("Hugging Face folder <-> checkpoint, and a training state for other ranks",
               "mtraining convert");
  app.footer(kFooter);
  Options options;
  app.add_option("FROM", options.from, "what is read")->required();
  app.add_option("TO", options.to, "the folder that is made")->required();
  app.add_option("--to", options.target, "hf or state");
  app.add_option("--ranks", options.ranks,
                 "ranks of the training state (default: as it was, or 1)");
  app.add_option("--dtype", options.dtype,
                 "of the weights: float32, bf16 or fp16 (default: as it was)");
  app.add_option("--config", options.config, "the run that a fresh training state is for");
  if (!parse_options(app, "convert", argc, argv)) return 0;
  MT_CHECK_ARG(options.target.empty() || options.target == "hf" || options.target == "state",
               "--to: expected hf or state, got '", options.target, "'");
  MT_CHECK_ARG(app.count("--ranks") == 0 || (options.ranks >= 1 && options.ranks <= 65536),
               "--ranks: expected 1 to 65536, got ", options.ranks);
  if (!options.dtype.empty()) parse_dtype(options.dtype);
  std::error_code error;
  MT_CHECK_ARG(!options.to.empty() && !fs::exists(options.to, error), "convert: ", options.to,
               ": expected the name of a folder that does not exist, got one that does");
  convert(options, find_weights(options.from));
  return 0;
}

}  // namespace mtraining::cli
